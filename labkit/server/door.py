"""How many answers may be under way at once, and whether the server still takes any."""

from __future__ import annotations

import asyncio
import math
import time
from http import HTTPStatus

from labkit.server.errors import ApiError


class Door:
    """Counts answers, from the moment a request is read to the end of each; used on one event loop.

    Args:
        running: answers that the engine works on at once.
        waiting: answers that may wait beyond these.

    Attributes:
        live: answers under way.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self.most, self.waiting, self.live = running + waiting, waiting, 0
        self._closes: float | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def draining(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closes is not None

    def close(self, seconds: float) -> None:
        """Let nobody in any more; those inside have so many seconds."""
        self._closes = time.monotonic() + seconds

    def check(self) -> None:
        """Refuse everybody while the server is draining.

        Raises:
            ApiError: 503.
        """
        if self._closes is not None:
            left = max(1, math.ceil(self._closes - time.monotonic()))
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
                retry_after=1,
            )
        self.live += count
        self._empty.clear()

    def leave(self, count: int = 1) -> None:
        """So many have ended."""
        self.live -= count
        if self.live == 0:
            self._empty.set()

    async def empty(self) -> None:
        """Wait until nothing is under way."""
        await self._empty.wait()
