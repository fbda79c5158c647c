"""What the answers look like, for the OpenAPI description at /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Reason = Literal["stop", "length"]


class Error(BaseModel):
    """Of an :class:`ErrorReply`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every error."""

    error: Error


class CachedTokens(BaseModel):
    """Of :class:`Usage`."""

    cached_tokens: int


class Usage(BaseModel):
    """Each prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    """One entry a token, in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """Of :class:`Completion`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason


class Completion(BaseModel):
    """Of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenLogprob(BaseModel):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TokenLogprob):
    """One token of an answer."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Of a chat answer."""

    content: list[ChatToken]
    refusal: None


class ChatMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """Of :class:`ChatCompletion`."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class ChatCompletion(BaseModel):
    """Of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Model(BaseModel):
    """Of :class:`Models`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(BaseModel):
    """Of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """Of /health."""

    status: Literal["ok"]


_ERROR = {"model": ErrorReply, "description": "An error."}

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR, "5XX": _ERROR}
"""The responses of every endpoint that are errors; 422, the framework's own, never comes."""
