"""The process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import errno
import math
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from labkit.engine.engine import Engine
from labkit.errors import refuse
from labkit.server.app import make_app
from labkit.server.connection import connections
from labkit.server.service import Service
from labkit.server.settings import Settings

_BACKLOG = 2048
_SAME_SIGNAL = 0.25
"""Seconds within which a signal is the first one again: `timeout` and other launchers hand one on that the
whole group of processes has had already."""
_LAST_WORDS = 5
"""Seconds for connections to take what was written to them."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Taken before a model is loaded: that takes seconds, a port in use should not.

    Raises:
        InputError: the port is in use or not allowed, or the host is not one of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        refuse("host", f"{host!r} ({error})", "a name or an address of this machine, such as 127.0.0.1")
    found = socket.socket(family, kind, protocol)
    try:
        if sys.platform == "win32":
            found.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:  # so that a server can follow one that was killed
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            fix = "end the other program, or name another port, such as --port 0 for any free one"
            refuse("port", f"{port}, which is in use on {host}", "a free port", fix)
        if error.errno == errno.EACCES:
            refuse("port", f"{port}, which this user may not open", "a port of 1024 or more")
        refuse("host", f"{host!r} ({error.strerror})", "an address of this machine, such as 127.0.0.1")
    return found


class Server(uvicorn.Server):
    """Uvicorn that drains: the first signal ends it when all answers have ended, the second one now.

    Args:
        config: of uvicorn.
        service: whose answers are waited for.
        say: told what happens.
    """

    def __init__(self, config: uvicorn.Config, service: Service, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self.service, self.say = service, say
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._first = math.inf

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's; then says that it is done."""
        await super().shutdown(sockets)
        self.say("ended")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's; then says where it listens."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for one in sockets or ():
            host, port = one.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self.say(f"{self.service.settings.model} at http://{shown}:{port}/v1 (Ctrl-C drains and ends)")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        now = time.monotonic()
        self._first = min(self._first, now)
        if self._loop is not None and now - self._first < _SAME_SIGNAL:
            self._loop.call_soon_threadsafe(self.drain)
            return
        # Now means now, whatever the engine is in the middle of; the shell sees which signal it was.
        signal.signal(sig, signal.SIG_DFL)
        signal.raise_signal(sig)

    def drain(self) -> None:
        """Take nothing new, and end when what runs has ended."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        door, seconds = self.service.door, self.service.settings.drain_seconds
        door.close(seconds)
        if door.live:
            self.say(f"draining: {door.live} answers under way, {seconds:g} s at most; once more to end now")
        try:
            await asyncio.wait_for(door.empty(), seconds)
        except TimeoutError:
            self.say(f"{door.live} answers were not ready after {seconds:g} s: given up")
            self.service.loop.abort_all("the server is stopping")
        self.should_exit = True


def make_server(engine: Engine, settings: Settings, *, say: Callable[[str], None] = print) -> Server:
    """A server over any engine; ``server.run(sockets=[listen(…)])`` serves until a signal comes."""
    app, service = make_app(engine, settings)
    config = uvicorn.Config(
        app,
        http=connections(settings.head_seconds),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_LAST_WORDS,
    )
    return Server(config, service, say)
