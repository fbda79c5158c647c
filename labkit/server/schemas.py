"""What a client may ask: the fields of OpenAI's requests that this server honours, and some of its own.

Nothing is ignored. A field that is not here is refused by name, and so is a value that is not honoured;
``null`` asks for the default, and so does a value that names what is done anyway (``store: false``). Two
fields change nothing, as at OpenAI: ``user`` and ``metadata``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from labkit.engine.sampling import SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_MESSAGES = 8192
MAX_STOP_TOKENS = 64
MAX_METADATA = 16

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _refused(message: str, at: str = "") -> PydanticCustomError:
    return PydanticCustomError("refused", message, {"at": at})  # type: ignore[arg-type]


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        return False
    return True


def _stops(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(_is_text(text) and text for text in texts):
        raise _refused("expected a text, or a list of texts, none of them empty")
    if len(texts) > MAX_STOPS:
        raise _refused(f"expected at most {MAX_STOPS} texts, got {len(texts)}")
    return tuple(texts)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """A prompt in any of its four forms, as several."""
    if _is_text(value):
        return (value,)  # type: ignore[return-value]
    if _is_ids(value):
        return (tuple(value),)  # type: ignore[arg-type]
    if isinstance(value, list) and value:
        if all(_is_text(one) for one in value):
            return tuple(value)
        if all(_is_ids(one) for one in value):
            return tuple(tuple(one) for one in value)
    raise _refused("expected a text, a list of texts, a list of token ids, or a list of such lists")


def _at_most(limit: int) -> BeforeValidator:
    """Refuses a longer list or mapping before anything in it is looked at."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            raise _refused(f"expected at most {limit} entries, got {len(value)}")
        return value

    return BeforeValidator(check)


Number = Annotated[float, Field(allow_inf_nan=False)]


class Fields(BaseModel):
    """Base of all: strict types, no further fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    unsupported: ClassVar[Mapping[str, str]] = {}
    """OpenAI's fields that are refused, and what to do instead."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Of these, values that ask for what this server does anyway: clients send their defaults along."""

    @model_validator(mode="before")
    @classmethod
    def _without_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # Here and not after the fields, where each of a million strange names would be an error of its own.
        known = cls.model_fields.keys() | cls.unsupported.keys()
        if (strange := next((name for name in data if name not in known), None)) is not None:
            raise PydanticCustomError("unknown", "unknown", {"at": strange})
        for name, fix in cls.unsupported.items():
            value = data.get(name)
            # 1 is not true
            same = any(type(value) is type(one) and value == one for one in cls.neutral.get(name, ()))
            if value is not None and not same:
                message = "not supported by this server" + (f": {fix}" if fix else "")
                raise PydanticCustomError("unsupported", message, {"at": name})  # type: ignore[arg-type]
        return {name: value for name, value in data.items() if name not in cls.unsupported}


class StreamOptions(Fields):
    """Of a stream."""

    unsupported: ClassVar[Mapping[str, str]] = {"include_obfuscation": "nothing is added to hide lengths"}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="A last chunk with the usage of the whole request.")


class Generation(Fields):
    """What both endpoints take."""

    model: str = Field(description="A name that /v1/models lists.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="Answers to each prompt; answer i draws with seed + i."
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = Field(None, description="1 by default.")
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(_stops),
        WithJsonSchema(
            {
                "anyOf": [
                    {**_TEXT, "minLength": 1},
                    {"type": "array", "items": {**_TEXT, "minLength": 1}, "maxItems": MAX_STOPS},
                    {"type": "null"},
                ]
            }
        ),
    ] = None
    user: str | None = Field(None, description="Taken and not used.")
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = Field(
        None, description="Extension: draw from the k likeliest tokens; 0 or -1 from all."
    )
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = Field(
        None, description="Extension: no token less likely than this share of the likeliest."
    )
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = Field(
        None, description="Extension: divides the logits of tokens seen; 1 by default."
    )
    stop_token_ids: Annotated[
        Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=MAX_STOP_TOKENS)] | None,
        _at_most(MAX_STOP_TOKENS),
    ] = Field(None, description="Extension: tokens that end the answer.")
    ignore_eos: bool | None = Field(None, description="Extension: go on past the model's end tokens.")

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise _refused("only allowed with stream: true", "stream_options")
        return self

    @property
    def most_tokens(self) -> int | None:
        """Tokens asked for; None for as many as fit, or the endpoint's default."""
        return self.max_tokens

    @property
    def reported(self) -> int | None:
        """Log probabilities asked for, as in SamplingParams."""
        return None

    def params(self, max_tokens: int) -> SamplingParams:
        """For the engine."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seed,
            logprobs=self.reported,
            stop=self.stop or (),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionRequest(Generation):
    """Body of /v1/completions."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "best_of": "ask for n and choose yourself",
        "logit_bias": "",
        "suffix": "",
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"best_of": (1,), "logit_bias": ({},)}

    prompt: Annotated[
        tuple[str | tuple[int, ...], ...],
        BeforeValidator(_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    _TEXT,
                    {"type": "array", "items": _TEXT, "minItems": 1},
                    _IDS,
                    {"type": "array", "items": _IDS, "minItems": 1},
                ]
            }
        ),
    ] = Field(description="Text, texts, token ids, or lists of them.")
    echo: bool | None = Field(None, description="Put the prompt in front of the answer.")
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = Field(
        None, description="So many of the likeliest tokens beside each token of the answer. Not with echo."
    )

    @model_validator(mode="after")
    def _no_prompt_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            message = "not supported together with echo: log probabilities of the prompt are not computed"
            raise PydanticCustomError("unsupported", message, {"at": "logprobs"})
        return self

    @property
    def most_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def reported(self) -> int | None:
        return self.logprobs


class TextPart(Fields):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


def _content(value: object) -> object:
    """Parts of text to one text; other parts are refused by their place."""
    if isinstance(value, str) and not _is_text(value):
        raise _refused("expected text that can be written as UTF-8")
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            message = f"only parts of type text are supported, got {kind!r:.60}"
            raise PydanticCustomError("unsupported", message, {"at": f"[{index}].type"})  # type: ignore[arg-type]
        if extra := next((name for name in part if name not in ("type", "text")), None):
            raise PydanticCustomError(
                "unsupported",
                "not a field of a text part",
                {"at": f"[{index}].{extra}"},
            )
        if not _is_text(part.get("text")):
            raise _refused("expected a text", f"[{index}].text")
        texts.append(part["text"])
    if not texts:
        raise _refused("expected at least one part")
    return "".join(texts)


class Message(Fields):
    """One message of a conversation. What a client sends back of an earlier answer is taken as it is."""

    unsupported: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("name", "refusal", "annotations", "tool_calls", "tool_call_id", "function_call", "audio"), ""
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"annotations": ([],), "tool_calls": ([],)}

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description='"developer" means "system".'
    )
    content: Annotated[
        str,
        BeforeValidator(_content),
        WithJsonSchema(
            {
                "anyOf": [
                    _TEXT,
                    {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "properties": {"type": {"const": "text"}, "text": _TEXT},
                            "required": ["type", "text"],
                            "additionalProperties": False,
                        },
                    },
                ]
            }
        ),
    ]

    @field_validator("role", mode="before")
    @classmethod
    def _known_role(cls, value: object) -> object:
        if value in ("tool", "function"):
            raise PydanticCustomError("unsupported", f"role {value!r} is not supported: there are no tools")  # type: ignore[arg-type]
        return value

    @property
    def plain(self) -> dict[str, str]:
        """For the chat template."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ResponseFormat(Fields):
    """Of an answer: text is all there is."""

    type: Literal["text"]

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            message = f"only text is supported, got {kind!r:.60}"
            raise PydanticCustomError("unsupported", message, {"at": "type"})  # type: ignore[arg-type]
        return data


class ChatRequest(Generation):
    """Body of /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "audio", "function_call", "functions", "logit_bias", "modalities", "moderation",
            "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention",
            "reasoning_effort", "safety_identifier", "service_tier", "store", "tool_choice", "tools",
            "verbosity", "web_search_options",
        ),
        "",
    )  # fmt: skip
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "logit_bias": ({},),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }

    messages: Annotated[list[Message], FailFast(), _at_most(MAX_MESSAGES)] = Field(
        min_length=1, max_length=MAX_MESSAGES
    )
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="OpenAI's newer name of max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(None, description="With logprobs: true.")
    response_format: ResponseFormat | None = None
    metadata: Annotated[
        Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None, _at_most(MAX_METADATA)
    ] = Field(None, description="Taken and not used.")

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise _refused("only allowed with logprobs: true", "top_logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise _refused("disagrees with max_completion_tokens; give one of the two", "max_tokens")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def reported(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
