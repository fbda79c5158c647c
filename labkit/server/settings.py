"""How the server behaves, apart from its engine; checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.errors import require

DEFAULT_PORT = 8000
API_KEY_VARIABLE = "LABKIT_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and names.

    Args:
        model: the name that clients ask for.
        host, port: where to listen; port 0 takes a free one.
        api_key: what clients must send as ``Authorization: Bearer …``; None asks for none. Printable ASCII,
            since it travels in a header.
        max_queue: answers that may wait beyond those that run; more get status 429.
        max_body_bytes: largest body of a request.
        head_seconds, body_seconds: a request whose head or body takes longer to arrive is given up.
        drain_seconds: how long running answers may go on after SIGTERM.
        ping_seconds: a stream that has said nothing for so long sends a comment, so that proxies keep it.
        overlap: prefill beside decode was asked for; shown in /status.
        options: what else answers depend on, such as bits; shown there too, and part of the fingerprint.

    Raises:
        InputError: a value out of range; names it.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = field(default=None, repr=False)
    max_queue: int = 256
    max_body_bytes: int = 4 << 20
    head_seconds: float = 30.0
    body_seconds: float = 60.0
    drain_seconds: float = 30.0
    ping_seconds: float = 15.0
    overlap: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = self.model.strip() == self.model != "" and self.model.isprintable()
        require(named, "name", repr(self.model), "a name of printable characters")
        require(self.host != "", "host", "empty text", "a name or an address, such as 127.0.0.1")
        require(0 <= self.port <= 65535, "port", self.port, "a whole number from 0 to 65535")
        key = self.api_key
        usable = key is None or (key.isascii() and key.isprintable() and key.strip() == key != "")
        require(usable, "api_key", "a key that no header can carry", "printable ASCII without spaces around")
        require(self.max_queue >= 0, "max_queue", self.max_queue, "a whole number of at least 0")
        require(self.max_body_bytes >= 1, "max_body_bytes", self.max_body_bytes, "at least 1")
        for name in ("head_seconds", "body_seconds", "ping_seconds"):
            value = getattr(self, name)
            require(0 < value < math.inf, name, value, "seconds above 0")
        require(0 <= self.drain_seconds < math.inf, "drain_seconds", self.drain_seconds, "seconds, 0 or more")
