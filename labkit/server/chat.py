"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from labkit.engine.sampling import Sampled
from labkit.server.answers import answer
from labkit.server.call import Ask, Piece
from labkit.server.logprobs import TokenTexts, chat_logprobs
from labkit.server.schemas import ChatRequest
from labkit.server.service import Service
from labkit.server.shape import Shape, Told


class ChatShape:
    """A message of the assistant.

    Args:
        reported: log probabilities were asked for.
    """

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, texts: TokenTexts, *, reported: bool) -> None:
        self.texts, self.reported = texts, reported

    def whole(self, choice: int, told: Told) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(told.texts), "refusal": None}
        return {
            "index": choice,
            "message": message,
            "logprobs": self._logprobs(told.logprobs),
            "finish_reason": told.reason,
        }

    def opening(self, choice: int) -> dict[str, Any]:
        return _chunk(choice, {"role": "assistant", "content": "", "refusal": None})

    def delta(self, choice: int, piece: Piece) -> dict[str, Any]:
        return _chunk(choice, {"content": piece.text}, self._logprobs(piece.logprobs))

    def closing(self, choice: int, reason: str) -> dict[str, Any]:
        return _chunk(choice, {}, None, reason)

    def _logprobs(self, sampled: Sequence[Sampled]) -> dict[str, Any] | None:
        return chat_logprobs(self.texts, sampled) if self.reported else None


async def chat(service: Service, http: Request, body: ChatRequest) -> Response:
    """Answer a conversation.

    Raises:
        ApiError: refused.
    """

    async def prepare() -> tuple[list[Ask], Shape]:
        ids = await service.prompts.of_chat([message.plain for message in body.messages])
        return service.asks([ids], body, "messages"), ChatShape(service.texts, reported=bool(body.logprobs))

    return await answer(service, http, body, 1, prepare)


def _chunk(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
