"""A connection that is given up when it does not say what it wants."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Uvicorn's, with a limit on how long the head of a request may take to arrive.

    Uvicorn itself waits for ever for a first request, and for the rest of one that has begun: a few hundred
    idle connections would hold every descriptor that the process may have.
    """

    head_seconds: float

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The time of the first head runs from here."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """The time of a further head runs from its first byte, and more bytes do not lengthen it."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self._unwatch()
        elif self._late is None:
            self._late = self.loop.call_later(self.head_seconds, self.transport.close)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def connections(head_seconds: float) -> type[Connection]:
    """The class for one server, as uvicorn makes its connections itself."""
    return type("Connection", (Connection,), {"head_seconds": head_seconds})
