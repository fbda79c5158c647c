"""From a call to an answer: one body, or a stream of chunks; and its end when the client leaves."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from labkit.server import stream
from labkit.server.call import Ask, Call, Piece
from labkit.server.chunks import Chunks
from labkit.server.errors import ApiError
from labkit.server.schemas import Generation
from labkit.server.service import Service
from labkit.server.shape import Shape, Told

_CLIENT_LEFT = 499
"""Nobody reads it; it is what proxies log for such a request."""
_MOST_AT_ONCE = 1 << 14
"""Bytes of events in one write: a reader that is slow is noticed before much more is in memory for it."""


Prepare = Callable[[], Awaitable[tuple[list[Ask], Shape]]]
"""Encodes the prompts, and checks them."""


async def answer(service: Service, http: Request, body: Generation, count: int, prepare: Prepare) -> Response:
    """Take a request through the engine.

    Args:
        count: prompts; each gets ``body.n`` answers.

    Raises:
        ApiError: refused, before anything was sent.
    """
    received = time.monotonic()
    service.check_model(body.model)
    choices = count * (body.n or 1)
    service.door.enter(choices, "prompt" if count == choices else "n")
    try:
        asks, shape = await prepare()
        call = Call(asks, received)
    except BaseException:
        service.door.leave(choices)
        raise
    visit = _Visit(service, http, call, body, shape)
    try:
        if not await visit.submit():
            return visit.left()
    except BaseException:
        visit.close()
        raise
    if body.stream:
        return stream.EventStream(visit.chunks(), visit.close)
    return await visit.whole()


class _Visit:
    """One call while its client is there."""

    def __init__(self, service: Service, http: Request, call: Call, body: Generation, shape: Shape) -> None:
        self.service, self.call, self.body, self.shape = service, call, body, shape
        self.told = [Told() for _ in call.asks]
        self.unfinished = len(self.told)
        self.outcome = http.scope["labkit.outcome"]
        self.watch = asyncio.create_task(self._watch(http))
        self.head = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "object": shape.chunk_object if body.stream else shape.whole_object,
            "created": int(time.time()),
            "model": service.settings.model,
            "system_fingerprint": service.fingerprint,
        }

    async def submit(self) -> bool:
        """Hand the call to the engine; False where the client has left before it was taken.

        Raises:
            ApiError: it was refused.
        """
        submitted = asyncio.ensure_future(self.service.submit(self.call))
        # The engine takes calls between two steps, which can be long: nobody is waited for who has left.
        await asyncio.wait({submitted, self.watch}, return_when=asyncio.FIRST_COMPLETED)
        if submitted.done():
            submitted.result()
            return True
        submitted.add_done_callback(lambda done: done.cancelled() or done.exception())
        return False

    def left(self) -> Response:
        """For a client that has left; nobody reads it."""
        self.outcome.name = "cancelled"
        self.close()
        return Response(status_code=_CLIENT_LEFT)

    async def whole(self) -> Response:
        """The answer in one body.

        Raises:
            ApiError: the engine has failed on it.
        """
        try:
            while self.unfinished:
                news = await self.call.news()
                if news is None:
                    return self.left()
                for piece in news:
                    self._take(piece)
            choices = [self.shape.whole(i, told) for i, told in enumerate(self.told)]
            return JSONResponse({**self.head, "choices": choices, "usage": self._usage()})
        finally:
            self.close()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as events, those that are ready together in one; what goes wrong is one of them."""
        options = self.body.stream_options
        usage = options is not None and options.include_usage
        chunks = Chunks(self.shape, self.head, after=b',"usage":null}' if usage else b"}")
        if opening := b"".join(chunks.opening(choice) for choice in range(len(self.told))):
            yield opening
        ready = bytearray()
        try:
            while self.unfinished:
                try:
                    news = await self.call.news(self.service.settings.ping_seconds)
                except TimeoutError:
                    yield stream.PING
                    continue
                if news is None:
                    self.outcome.name = "cancelled"
                    return
                for piece in news:
                    self._take(piece)
                    ready += chunks.of(piece)
                    if len(ready) > _MOST_AT_ONCE:
                        yield bytes(ready)
                        ready.clear()
                        if self.call.gone:
                            self.outcome.name = "cancelled"
                            return
                if ready and self.unfinished:
                    yield bytes(ready)
                    ready.clear()
            if usage:
                ready += stream.event({**self.head, "choices": [], "usage": self._usage()})
        except ApiError as error:
            self.outcome.name = "failed"
            ready += stream.event(error.body)
        yield bytes(ready + stream.DONE)

    def close(self) -> None:
        """Cancel what is left in the engine. Idempotent."""
        if self.call.left:
            self.service.loop.cancel(self.call)
        self.watch.cancel()
        self.call.close()

    def _take(self, piece: Piece) -> None:
        self.told[piece.choice].add(piece)
        self.unfinished -= piece.reason is not None
        if piece.reason == "error":
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, piece.error, code="generation_failed")
        if piece.reason == "abort":
            message = f"the answer was given up: {piece.error}"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="aborted", retry_after=1)

    def _usage(self) -> dict[str, Any]:
        """Each prompt counts once, however many answers it has."""
        first = range(0, len(self.told), self.body.n or 1)
        prompt = sum(len(self.call.asks[i].prompt) for i in first)
        generated = sum(told.tokens for told in self.told)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(self.told[i].cached for i in first)},
        }

    async def _watch(self, http: Request) -> None:
        """Wait for the client to leave."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.call.leave()
        # At once, also while the response waits for a slow connection to take more.
        self.service.loop.cancel(self.call)
