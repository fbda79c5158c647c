"""Log probabilities in the two shapes that OpenAI gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from labkit.engine.sampling import Sampled

_LEAST = -9999.0
"""Stands for log 0, which JSON cannot write."""


class TokenTexts:
    """Bytes and texts of single tokens.

    Args:
        tokenizer: with ``token_bytes``; None shows ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def bytes(self, token: int) -> bytes:
        """Maybe not a whole character."""
        return str(token).encode() if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def text(self, token: int, prefix: str = "") -> str:
        r"""Its text; bytes that are no whole characters as "\xe4\xbd" behind ``prefix``, so that no two such
        tokens look the same."""
        raw = self.bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    """One token of a chat answer, without its rivals."""
    return {
        "token": texts.text(token),
        "logprob": max(logprob, _LEAST),
        "bytes": list(texts.bytes(token)),
    }


def chat_logprobs(texts: TokenTexts, sampled: Iterable[Sampled]) -> dict[str, Any]:
    """Of a chat answer, or a chunk of one."""
    content = []
    for one in sampled:
        entry = chat_entry(texts, one.token, _LEAST if one.logprob is None else one.logprob)
        entry["top_logprobs"] = [chat_entry(texts, *each) for each in one.top_logprobs]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(
    texts: TokenTexts, sampled: Sequence[Sampled], offsets: Sequence[int]
) -> dict[str, Any]:
    """Of a completion, or a chunk of one.

    Args:
        offsets: characters of the answer before each token.
    """
    top = []
    for one in sampled:
        found: dict[str, float] = {}
        # The best comes first: of two tokens that look the same, it stays.
        for token, logprob in (*one.top_logprobs, (one.token, one.logprob)):
            found.setdefault(texts.text(token, "bytes:"), _LEAST if logprob is None else max(logprob, _LEAST))
        top.append(found)
    return {
        "tokens": [texts.text(one.token, "bytes:") for one in sampled],
        "token_logprobs": [_LEAST if one.logprob is None else max(one.logprob, _LEAST) for one in sampled],
        "top_logprobs": top,
        "text_offset": list(offsets),
    }
