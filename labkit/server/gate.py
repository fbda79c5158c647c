"""The outermost layer: request ids, keys, kinds and sizes of bodies, and the count of outcomes.

Plain ASGI, so that a refused body is never kept, whatever it says of its length.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import uuid
from dataclasses import dataclass
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from labkit.server.errors import ApiError
from labkit.server.metrics import Meters
from labkit.server.settings import Settings

log = logging.getLogger("labkit.server")

OPEN_PATHS = frozenset({"/health"})
"""What needs no key: a load balancer has none."""

COUNTED = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}


@dataclass
class Outcome:
    """How a request went, where its status does not say so; the scope's "labkit.outcome"."""

    name: str | None = None
    status: int = 0

    @property
    def word(self) -> str:
        """For the counter."""
        if self.name is not None:
            return self.name
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "overloaded"
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return "draining"
        if self.status == 0:
            return "cancelled"
        return "ok" if self.status < 400 else "refused" if self.status < 500 else "failed"


class _Gone(Exception):
    """The client left before its body was complete."""


class Gate:
    """Wraps an application.

    Args:
        app: reached by requests that may pass, with their bodies complete.
        settings: key and limits. meters: counts requests by outcome.
    """

    def __init__(self, app: ASGIApp, settings: Settings, meters: Meters) -> None:
        self.app, self.settings, self.meters = app, settings, meters
        self._key = None if settings.api_key is None else settings.api_key.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        outcome = scope["labkit.outcome"] = Outcome()
        request_id = f"req_{uuid.uuid4().hex}".encode()

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            try:
                headers = {name.lower(): value for name, value in scope["headers"]}
                self._check_key(scope["path"], headers)
                body = await self._body(scope["method"], headers, receive)
            except ApiError as error:
                await error.response()(scope, receive, marked)
                return
            except _Gone:
                return
            # HEAD is GET without its body, which uvicorn leaves out by the scope that it keeps itself.
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self.app(inner, _replay(body, receive), marked)
        finally:
            endpoint = COUNTED.get(scope["path"])
            if endpoint is not None and scope["method"] == "POST":
                self.meters.requests.labels(endpoint, outcome.word).inc()

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # Compared in constant time, also where nothing was sent.
        same = hmac.compare_digest(given.strip(), self._key)
        if not same or scheme.lower() != b"bearer":
            message = "no API key was sent" if not given else "the API key is not the one of this server"
            message += "; send it as: Authorization: Bearer KEY"
            raise ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")

    async def _body(self, method: str, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body, at most as long as is allowed, whether or not its length was announced."""
        if method != "POST":
            return b""  # nothing reads it
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            # Also what keeps web pages of other sites from posting here without being asked.
            shown = kind.decode("latin-1") or "none"
            words = f"content type {shown}; expected application/json"
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, words, code="unsupported_media_type")
        most = self.settings.max_body_bytes
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > most:
            raise _too_large(most)
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise _too_large(most)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            words = f"the body was not complete after {self.settings.body_seconds:g} s"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, words, code="body_timeout") from None


def _too_large(most: int) -> ApiError:
    message = f"the body is larger than this server's limit of {most} bytes"
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever comes: that the client has left."""
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed
