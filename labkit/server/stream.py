"""Server-sent events, as OpenAI streams them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
PING = b": waiting\n\n"
"""A comment: clients skip it, and what lies between sees that the stream is alive."""


_JSON = json.JSONEncoder(separators=(",", ":"))


def written(data: Mapping[str, Any] | str) -> bytes:
    """JSON in ASCII, so that no character of an answer can be taken for the end of a line."""
    return _JSON.encode(data).encode("ascii")


def event(data: Mapping[str, Any]) -> bytes:
    """One event with JSON in it."""
    return b"data: %b\n\n" % written(data)


class EventStream(Response):
    """Sends events until there are none.

    Not sse-starlette's response: that one ends its streams as soon as the server is told to stop, and here
    they are to be finished.

    Args:
        events: what to send; several that are ready at once may come as one, and then go out in one write.
        close: called at the end in any case, also where nothing could be sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self.events, self.close = events, close
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for data in self.events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.close()
