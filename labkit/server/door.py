"""How many answers may be under way at once, and whether the server still takes any."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus

from labkit.server.errors import ApiError

_RECENT = 64
_LEAST_WAIT, _MOST_WAIT = 1, 60


class Pace:
    """How fast answers have been ending, counted while any was under way: an idle night slows nothing down.

    Args:
        clock: seconds, such as time.monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._worked, self._since = 0.0, clock()
        self._busy = False
        self._from = 0.0
        self._ends: deque[float] = deque()

    def _now(self) -> float:
        """Seconds of work so far."""
        return self._worked + (self._clock() - self._since if self._busy else 0.0)

    def work(self, busy: bool) -> None:
        """Something is under way, or nothing any more."""
        if busy != self._busy:
            self._worked, self._since, self._busy = self._now(), self._clock(), busy

    def ended(self) -> None:
        """One answer has ended."""
        self._ends.append(self._now())
        if len(self._ends) > _RECENT:
            self._from = self._ends.popleft()

    def seconds(self, count: int) -> int:
        """After how many whole seconds so many more will have ended, at the pace of the last answers.

        From 1 to 60. Where none has ended yet nothing is known, and it is 1.
        """
        if not self._ends:
            return _LEAST_WAIT
        each = (self._now() - self._from) / len(self._ends)
        return min(_MOST_WAIT, max(_LEAST_WAIT, math.ceil(count * each)))


class Door:
    """Counts answers, from the moment a request is read to the end of each; used on one event loop.

    Args:
        running: answers that the engine works on at once.
        waiting: answers that may wait beyond these.
        clock: seconds, such as time.monotonic.

    Attributes:
        live: answers under way.
    """

    def __init__(self, running: int, waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.waiting, self.live = running + waiting, waiting, 0
        self._clock, self._pace = clock, Pace(clock)
        self._closes: float | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def draining(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closes is not None

    def close(self, seconds: float) -> None:
        """Let nobody in any more; those inside have so many seconds."""
        self._closes = self._clock() + seconds

    def check(self) -> None:
        """Refuse everybody while the server is draining.

        Raises:
            ApiError: 503.
        """
        if self._closes is not None:
            left = max(1, math.ceil(self._closes - self._clock()))
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the server is draining: it ends what runs and takes nothing new",
                code="draining",
                retry_after=left,
            )

    def enter(self, count: int, param: str = "n") -> None:
        """Let so many answers in, together; ``param`` is the field that asks for so many.

        Raises:
            ApiError: 503 while draining; 400 for more than there is ever room for; 429 for more than now.
        """
        self.check()
        if count > self.most:
            message = f"{count} answers in one request; this server holds at most {self.most} at once"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code="invalid_value")
        if self.live + count > self.most:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self.live} answers are under way and the queue holds {self.waiting}: try again later",
                code="queue_full",
                retry_after=self.retry_after(count),
            )
        self.live += count
        self._pace.work(True)
        self._empty.clear()

    def retry_after(self, count: int = 1) -> int:
        """Seconds after which there may be room for so many answers: those in the way, at the recent pace."""
        return self._pace.seconds(max(1, self.live + count - self.most))

    def leave(self, count: int = 1, *, ended: bool = False) -> None:
        """So many are inside no more: refused after all, or ``ended``, which sets the pace."""
        for _ in range(count if ended else 0):
            self._pace.ended()
        self.live -= count
        if self.live == 0:
            self._pace.work(False)
            self._empty.set()

    async def empty(self) -> None:
        """Wait until nothing is under way."""
        await self._empty.wait()
