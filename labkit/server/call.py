"""One HTTP request in the engine: its choices, and the queue that their news come through."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.engine.sampling import Sampled, SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """One choice to be made: a prompt, and how to go on from it."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one choice; nothing in it changes any more, so that it can cross threads.

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
        self._news: asyncio.Queue[Piece | None] = asyncio.Queue()

    def put(self, piece: Piece) -> None:
        """News, on the call's own event loop."""
        if piece.reason is not None:
            self.left -= 1
        self._news.put_nowait(piece)

    def leave(self) -> None:
        """The client has gone: who waits for news gets none."""
        self.gone = True
        self._news.put_nowait(None)

    async def next(self, timeout: float | None = None) -> Piece | None:
        """The next news; None when the client has gone.

        Raises:
            TimeoutError: nothing new for so many seconds.
        """
        if self.gone:
            return None
        async with asyncio.timeout(timeout):
            return await self._news.get()
