"""One HTTP request in the engine: its choices, and the way that their news come."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from labkit.engine.sampling import Sampled, SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """One choice to be made: a prompt, and how to go on from it."""

    prompt: tuple[int, ...]
    params: SamplingParams


class Piece(NamedTuple):
    """News of one choice; nothing in it changes any more, so that it can cross threads. One is made for every
    token, and a tuple takes a third of a dataclass's time.

    Attributes:
        choice: its number among the call's.
        text: new text, as far as it is certain.
        tokens: how many new ones.
        logprobs: of tokens whose text is out, one each, where they were asked for.
        offsets: for each of these, characters of the answer before it.
        reason: why it ended: "stop", "length", "abort" or "error"; None while it goes on.
        error: what happened, with reason "error" or "abort".
        cached: prompt tokens that the prefix cache served.
        ttft, gaps, tpot, seconds: of the engine's clock, as labkit.engine.metrics defines them; ``ttft`` with
            the first token, ``tpot`` and ``seconds`` (arrival to end) with the last.
    """

    choice: int
    text: str = ""
    tokens: int = 0
    logprobs: tuple[Sampled, ...] = ()
    offsets: tuple[int, ...] = ()
    reason: str | None = None
    error: str = ""
    cached: int = 0
    ttft: float | None = None
    gaps: tuple[float, ...] = ()
    tpot: float | None = None
    seconds: float | None = None


@dataclass(eq=False)
class Call:
    """The asynchronous side; made and used on one event loop.

    Args:
        asks: the choices.
        received: time.monotonic() when the request came in.

    Attributes:
        left: choices that have not ended.
        gone: the client has left.
    """

    asks: Sequence[Ask]
    received: float
    gone: bool = False
    left: int = field(init=False)
    loop: asyncio.AbstractEventLoop = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.left = len(self.asks)
        self.loop = asyncio.get_running_loop()
        self._news: list[Piece] = []
        self._waiter: asyncio.Future[bool] | None = None  # of whoever waits; False: it has been too long
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    def put(self, piece: Piece) -> None:
        """News, on the call's own event loop."""
        if piece.reason is not None:
            self.left -= 1
        self._news.append(piece)
        self._wake(True)

    def leave(self) -> None:
        """The client has gone: who waits for news gets none."""
        self.gone = True
        self._wake(True)

    def close(self) -> None:
        """Nobody waits for news any more. Idempotent."""
        if self._alarm is not None:
            self._alarm.cancel()

    async def news(self, timeout: float = math.inf) -> list[Piece] | None:
        """All news since the last call, at least one; None when the client has gone. For one waiter.

        Raises:
            TimeoutError: nothing new for so many seconds.
        """
        if not self._news and not self.gone:
            self._waiter = self.loop.create_future()
            self._deadline = self.loop.time() + timeout
            if timeout < math.inf and (self._alarm is None or self._alarm.when() > self._deadline):
                self._set_alarm()
            try:
                if not await self._waiter:
                    raise TimeoutError
            finally:
                self._waiter = None
        if self.gone:
            return None
        news, self._news = self._news, []
        return news

    def _set_alarm(self) -> None:
        self.close()
        self._alarm = self.loop.call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        """One alarm serves many waits: one a token would cost more than to write the token."""
        self._alarm = None
        if self._waiter is None:
            return  # the next wait sets it again
        if self.loop.time() < self._deadline:
            self._set_alarm()
        else:
            self._wake(False)

    def _wake(self, news: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(news)
