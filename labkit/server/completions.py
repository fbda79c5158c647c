"""/v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import Response

from labkit.server.answers import answer
from labkit.server.call import Ask, Piece
from labkit.server.logprobs import TokenTexts, completion_logprobs
from labkit.server.schemas import CompletionRequest
from labkit.server.service import Service
from labkit.server.shape import Shape, Told


class CompletionShape:
    """Text with the prompt in front where it was asked for.

    Args:
        echoes: for each choice, the text in front of it.
        reported: log probabilities were asked for.
    """

    whole_object = chunk_object = "text_completion"
    prefix = "cmpl"

    def __init__(self, texts: TokenTexts, echoes: list[str], *, reported: bool) -> None:
        self.texts, self.echoes, self.reported = texts, echoes, reported

    def whole(self, choice: int, told: Told) -> dict[str, Any]:
        text = self.echoes[choice] + "".join(told.texts)
        logprobs = completion_logprobs(self.texts, told.logprobs, told.offsets) if self.reported else None
        return _choice(choice, text, logprobs, told.reason)

    def opening(self, choice: int) -> dict[str, Any] | None:
        echo = self.echoes[choice]
        return _choice(choice, echo, None, None) if echo else None

    def delta(self, choice: int, piece: Piece) -> dict[str, Any]:
        logprobs = completion_logprobs(self.texts, piece.logprobs, piece.offsets) if self.reported else None
        return _choice(choice, piece.text, logprobs, None)

    def closing(self, choice: int, reason: str) -> dict[str, Any]:
        return _choice(choice, "", None, reason)


async def complete(service: Service, http: Request, body: CompletionRequest) -> Response:
    """Continue texts.

    Raises:
        ApiError: refused.
    """

    async def prepare() -> tuple[list[Ask], Shape]:
        prompts, echoes = await service.prompts.of_completion(body.prompt, echo=bool(body.echo))
        asks = service.asks(prompts, body, "prompt")
        each = [echo for echo in echoes for _ in range(body.n or 1)]
        return asks, CompletionShape(service.texts, each, reported=body.logprobs is not None)

    return await answer(service, http, body, len(body.prompt), prepare)


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
