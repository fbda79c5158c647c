"""Text to token ids and back, by the ``tokenizers`` library, from GGUF metadata or tokenizer.json."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from labkit.errors import MissingModelError, ModelFileError, require
from labkit.models.chat import render_chat
from labkit.models.fields import shown, token_ids, truth

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF (gguf.TokenType)
_WINDOW = 32  # ids that are decoded anew at each token, up to twice as many

# The pre-tokeniser each GGUF name stands for; regular expressions are those of the published
# tokenizer.json files of Llama 3 and Qwen2.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


class Tokenizer:
    """A byte-level BPE tokenizer (any tokenizer.json works; the GGUF kinds are listed in from_gguf).

    Attributes:
        vocab_size: ids run from 0 to vocab_size - 1.
        bos_id: None when there is none; it is put in front only when ``add_bos`` is set.
        eos_ids: ids that end a generated answer.
        chat_template: Jinja text, or None.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        add_bos: bool = False,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        self.inner = inner
        self.vocab_size = max(inner.get_vocab().values(), default=-1) + 1
        self.bos_id, self.add_bos, self.eos_ids = bos_id, add_bos, tuple(eos_ids)
        self.chat_template = chat_template
        self._bytes = _token_bytes(inner)
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from "tokenizer.ggml.*" metadata of model "gpt2" (byte-level BPE).

        Pre-tokenisers: "smollm" (digits one by one, then GPT-2's), "gpt-2", "qwen2", "llama-bpe".
        Byte values without a token are dropped: such text may encode to nothing.

        Raises:
            ModelFileError: another kind of tokenizer, or lists that do not fit together.
        """
        kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
        if not isinstance(kind, str) or kind != "gpt2":
            raise ModelFileError("tokenizer.ggml.model", shown(kind), "'gpt2' (byte-level BPE)")
        if not isinstance(pre, str):
            raise ModelFileError("tokenizer.ggml.pre", shown(pre), "the name of a pre-tokeniser")
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            raise ModelFileError("tokenizer.ggml.tokens", "the same token twice", "each token once")
        merges = []
        for merge in _strings(metadata, "tokenizer.ggml.merges"):
            # A space inside a token is written as another character, so the one space separates.
            left, _, right = merge.partition(" ")
            if left not in vocab or right not in vocab or left + right not in vocab:
                raise ModelFileError("tokenizer.ggml.merges", repr(merge), "two tokens that join to a token")
            merges.append((left, right))
        inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
        inner.pre_tokenizer = _pre_tokenizer(pre)
        inner.decoder = decoders.ByteLevel()
        types = _token_types(metadata, len(tokens))
        control = [t for t, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
        defined = [t for t, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
        if "" in control or "" in defined:
            raise ModelFileError("tokenizer.ggml.tokens", "an empty control token", "a non-empty one")
        inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
        inner.add_tokens([AddedToken(t, special=False, normalized=False) for t in defined])
        ids = {key: _token_id(metadata, key, len(tokens)) for key in ("bos", "eos", "eot", "eom")}
        eos = dict.fromkeys(i for key in ("eos", "eot", "eom") if (i := ids[key]) is not None)
        template = metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise ModelFileError("tokenizer.chat_template", type(template).__name__, "text")
        return cls(
            inner,
            bos_id=ids["bos"],
            add_bos=truth(metadata, "tokenizer.ggml.add_bos_token", pre == "llama-bpe"),
            eos_ids=tuple(eos),
            chat_template=template,
        )

    @classmethod
    def from_file(cls, path: str | Path, *, eos_ids: Sequence[int] = ()) -> Tokenizer:
        """Read a tokenizer.json, with chat template and special ids from the files beside it
        (tokenizer_config.json, chat_template.jinja, generation_config.json), which may be absent.

        Args:
            eos_ids: used when the files beside it name no end token.

        Raises:
            MissingModelError, ModelFileError: no such file; not a tokenizer.
        """
        path = Path(path)
        if not path.is_file():
            raise MissingModelError(str(path), "no such file", "a tokenizer.json")
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelFileError(str(path), f"not a tokenizer ({error})", "a tokenizer.json") from error
        config = _json_beside(path, "tokenizer_config.json")
        generation = path.with_name("generation_config.json")
        ends = _json_beside(path, generation.name).get("eos_token_id")
        found = list(token_ids(ends, f"{generation}: eos_token_id"))
        named = _token_text(config, "eos_token")
        if named is not None and (number := inner.token_to_id(named)) is not None:
            found.append(number)
        bos = _token_text(config, "bos_token")
        return cls(
            inner,
            bos_id=None if bos is None else inner.token_to_id(bos),
            add_bos=False,  # a tokenizer.json adds its own through its post-processor
            eos_ids=tuple(dict.fromkeys(found or eos_ids)),
            chat_template=_template_beside(path, config),
        )

    def encode(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            bos: put the begin token in front; None means as the model wants it.
            special: read control tokens such as "<|im_end|>" in ``text`` as such, not as plain text.

        Returns:
            Possibly an empty list: byte values without a token are dropped.
        """
        require(isinstance(text, str), "text", type(text).__name__, "str")
        # Lone surrogates (from surrogateescape decoding) cannot be written as UTF-8.
        text = text.encode("utf-8", "replace").decode("utf-8")
        if self.inner.encode_special_tokens is special:
            self.inner.encode_special_tokens = not special
        ids = self.inner.encode(text, add_special_tokens=bos is None).ids
        if (self.add_bos if bos is None else bos) and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD. ``special`` keeps control tokens."""
        stream = self.stream(special=special)
        return "".join([stream.put(int(i)) for i in ids]) + stream.finish()

    def token_bytes(self, token: int) -> bytes:
        """Bytes that one token stands for, maybe not a whole character; none for an id without a text.

        A control token stands for its name, "<|im_end|>".
        """
        if self._bytes is not None:
            return self._bytes.get(token, b"")
        return self.inner.decode([token], skip_special_tokens=False).encode("utf-8", "replace")

    def stream(self, *, special: bool = False) -> StreamDecoder:
        """A decoder that takes ids one by one and holds back incomplete characters."""
        return StreamDecoder(self, special=special)

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, generation_prompt: bool = True) -> str:
        """Messages ({"role", "content"}) as the text the model was trained on.

        Raises:
            InputError: no template, malformed messages, or a template that refuses them.
        """
        require(self.chat_template is not None, "messages", "a model without a chat template", "chat=False")
        assert self.chat_template is not None
        tokens = {
            "bos_token": "" if self.bos_id is None else self.inner.id_to_token(self.bos_id) or "",
            "eos_token": self.inner.id_to_token(self.eos_ids[0]) or "" if self.eos_ids else "",
        }
        return render_chat(self.chat_template, messages, generation_prompt=generation_prompt, **tokens)

    def apply_chat(
        self, messages: Sequence[Mapping[str, str]], *, generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of :meth:`render_chat`. The template writes its own begin token, so none is added."""
        return self.encode(self.render_chat(messages, generation_prompt=generation_prompt), bos=False)


class StreamDecoder:
    """Ids in, text out: the pieces of :meth:`put` and :meth:`finish` joined are ``decode`` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer, self._keep_special = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._sent = 0

    def put(self, token: int) -> str:
        """Text that ``token`` completes; empty while a character is incomplete.

        Raises:
            InputError: not a token id.
        """
        tokenizer = self._tokenizer
        require(0 <= token < 1 << 31, "ids", token, "token ids")
        if tokenizer._bytes is not None:
            if token in tokenizer._special and not self._keep_special:
                return ""
            # Ids between the vocabulary and the padded embedding have no text.
            return self._utf8.decode(tokenizer._bytes.get(token, b""))
        self._ids.append(token)
        text = self._all()
        # Another decoder (SentencePiece) may rewrite the end; an unfinished character shows as U+FFFD.
        if text.endswith("\ufffd"):
            return ""
        piece, self._sent = text[self._sent :], max(len(text), self._sent)
        if len(self._ids) >= 2 * _WINDOW and self._sent == len(text):
            self._forget(text)
        return piece

    def finish(self) -> str:
        """What was held back; bytes that never became a character are U+FFFD."""
        if self._tokenizer._bytes is not None:
            return self._utf8.decode(b"", final=True)
        return self._all()[self._sent :]

    def _all(self, since: int = 0) -> str:
        return self._tokenizer.inner.decode(self._ids[since:], skip_special_tokens=not self._keep_special)

    def _forget(self, text: str) -> None:
        """Drop ids whose text is out, so that a token of a long answer costs no more than one of a short one.

        What is kept must end ``text`` when decoded alone. It does not where a cut parts a character's bytes;
        and its first space is gone, now and later, with decoders that strip one.
        """
        for since in range(len(self._ids) - _WINDOW, len(self._ids) - _WINDOW // 2):
            kept = self._all(since)
            if kept and text.endswith(kept):
                del self._ids[:since]
                self._sent = len(kept)
                return


def byte_characters() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE vocabularies (GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def _token_bytes(inner: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """Bytes of every token of a byte-level vocabulary, or None for another kind."""
    if not isinstance(inner.decoder, decoders.ByteLevel):
        return None
    table, added = byte_characters(), inner.get_added_tokens_decoder()
    found = {}
    for token, i in inner.get_vocab().items():
        if i in added or any(character not in table for character in token):
            found[i] = token.encode("utf-8")
        else:
            found[i] = bytes(table[character] for character in token)
    return found


def _pre_tokenizer(name: object) -> Any:
    byte_level = pre_tokenizers.ByteLevel
    if name in ("gpt-2", "default"):
        return byte_level(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level(add_prefix_space=False, use_regex=True)])
    if name in ("qwen2", "llama-bpe"):
        pattern = Regex(_QWEN2 if name == "qwen2" else _LLAMA3)
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level(add_prefix_space=False, use_regex=False)])
    raise ModelFileError("tokenizer.ggml.pre", repr(name), "smollm, gpt-2, default, qwen2 or llama-bpe")


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelFileError(key, "nothing" if value is None else type(value).__name__, "a list of strings")
    return value


def _token_types(metadata: Mapping[str, Any], count: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        return []
    value = metadata[key]
    if getattr(value, "dtype", np.dtype(object)).kind not in "iu" or len(value) != count:
        raise ModelFileError(key, type(value).__name__, f"{count} whole numbers, one a token")
    return value.tolist()


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < count:
        raise ModelFileError(key, repr(value), f"a token id from 0 to {count - 1}")
    return value


def _json_beside(path: Path, name: str) -> dict[str, Any]:
    file = path.with_name(name)
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(str(file), f"not JSON ({error})", "a JSON object") from error
    if not isinstance(value, dict):
        raise ModelFileError(str(file), type(value).__name__, "a JSON object")
    return value


def _token_text(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    if isinstance(value, Mapping):
        value = value.get("content", False)
    if value is not None and not isinstance(value, str):
        raise ModelFileError(f"tokenizer_config.json {key}", shown(config[key]), "a token's text, or null")
    # JSON can spell a lone surrogate, which the library cannot take.
    return value if value is None else value.encode("utf-8", "replace").decode("utf-8")


def _template_beside(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path.with_name("chat_template.jinja")
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(str(file), f"not UTF-8 text ({error})", "a Jinja template") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates: the one called "default"
        named = [t for t in template if isinstance(t, Mapping) and t.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise ModelFileError("tokenizer_config.json chat_template", type(template).__name__, "text")
    return template
