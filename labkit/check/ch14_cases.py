"""What the exercises of chapter 14 are tried on: a stream, a client that leaves, a crowd, bodies, a key."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

# --- 14.1


class Visit:
    """A client that leaves, and a model that computes for it.

    Args:
        length: tokens of the whole answer.
        queued: steps before the first token, in which nothing is computed.
        leaves: steps after which the client is gone; None stays.
        silent: that is seen only when a send fails.
        fault: token at which ``send`` raises something else.
    """

    def __init__(
        self,
        length: int,
        *,
        queued: int = 0,
        leaves: int | None = None,
        silent: bool = False,
        fault: int | None = None,
    ) -> None:
        self.length, self.queued, self.leaves, self.silent = length, queued, leaves, silent
        self.fault = fault
        self.took = self.computed = self.wasted = self.aborts = self.sent = self.unheard = self.taken = 0

    @property
    def left(self) -> bool:
        """Whether the client is gone by now."""
        return self.leaves is not None and self.took >= self.leaves

    def steps(self) -> Iterator[int | None]:
        """The model: a token, or None while the request waits in the queue."""
        for _ in range(self.queued):
            self.took += 1
            yield None
        for token in range(self.length):
            self.wasted += self.left
            self.computed += 1
            self.took += 1
            yield token

    def send(self, token: Any) -> None:
        """To the client. As with TCP, the first send after it has left goes nowhere, and says nothing."""
        if self.fault is not None and token == self.fault:
            raise ValueError("no such token")
        if self.left:
            self.unheard += 1
            if self.unheard > 1:
                raise ConnectionResetError("the client has left")
            self.taken += 1
            return
        if token is None or token != self.sent:
            raise TypeError(f"send got {token!r}, expected token {self.sent}")
        self.sent += 1
        self.taken += 1

    def gone(self) -> bool:
        """What the connection says."""
        return self.left and not self.silent

    def abort(self) -> None:
        """The engine gives the request up, and its blocks back."""
        self.aborts += 1


# --- 14.2

WORDS = ("naïve", "你好", "😀", "two\nlines", "a\u2028b", " spaced ", "", "data: no event", "[DONE]")
"""Data of the events, one by one. U+2028 ends a line for ``str.splitlines``, not for an event stream."""


def event_stream(end: bytes = b"\n") -> bytes:
    """The words as events, with a comment, fields of other names, and a last event that never ends."""
    lines: list[bytes] = [b": waiting", b""]
    for number, word in enumerate(WORDS):
        lines += [b"id: %d" % number] if number % 2 else []
        lines += [b"data: " + part.encode() for part in word.split("\n")]
        lines += [b""]
    return end.join([*lines, b"data: cut off"])


class Feed:
    """Bytes in chunks of one size; ``given`` is how many were asked for, the last chunk taken as whole."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size, self.given = data, size, 0

    def __iter__(self) -> Iterator[bytes]:
        while self.given < len(self.data):
            at, self.given = self.given, self.given + self.size
            yield self.data[at : at + self.size]


def ends_of(data: bytes, end: bytes) -> list[int]:
    """Bytes up to the end of each event, its empty line included."""
    ends, at = [], data.index(end * 2) + 2 * len(end)  # behind the comment
    for _ in WORDS:
        at = data.index(end * 2, at) + 2 * len(end)
        ends.append(at)
    return ends


# --- 14.3

FIELDS: dict[str, type] = {
    "model": str,
    "prompt": list,
    "max_tokens": int,
    "temperature": float,
    "stream": bool,
}
REQUIRED = ("model", "prompt")
CONTEXT = 512
GOOD: dict[str, Any] = {"model": "lab", "prompt": [1, 2, 3], "max_tokens": 8}

# (body, words that the refusal holds, a hint); no words: it is to be accepted.
BODIES: tuple[tuple[Any, tuple[str, ...], str], ...] = (
    (GOOD, (), "all is well with it"),
    ({**GOOD, "temperature": 1, "stream": True}, (), "JSON writes 1.0 as 1, too"),
    ({**GOOD, "temperature": None, "max_tokens": None}, (), "null asks for the default"),
    ({**GOOD, "prompt": [1] * 504}, (), "504 + 8 tokens fit exactly"),
    ({**GOOD, "max_tokns": 8}, ("max_tokns",), "a typing error must not be ignored: nothing would tell"),
    ({**GOOD, "top_q": None}, ("top_q",), "null in a field that does not exist is still a mistake"),
    ({**GOOD, "stream": 5, "tools": []}, ("tools",), "fields that are not known come first"),
    ({"model": "lab"}, ("prompt",), "it is required"),
    ({**GOOD, "model": None}, ("model",), "a required field has no default"),
    ({**GOOD, "max_tokens": "8"}, ("max_tokens",), "a text is no number"),
    ({**GOOD, "max_tokens": True}, ("max_tokens",), "in Python a bool is an int"),
    ({**GOOD, "max_tokens": 8.5}, ("max_tokens",), "half a token"),
    ({**GOOD, "max_tokens": -300, "prompt": [1] * 600}, ("max_tokens",), "at least 1; a sum can hide it"),
    ({**GOOD, "temperature": True}, ("temperature",), "in Python a bool is a number"),
    (
        {**GOOD, "temperature": math.nan},
        ("temperature",),
        "json.loads reads NaN, and NaN fails no comparison",
    ),
    ({**GOOD, "stream": 1}, ("stream",), "1 is no bool"),
    ([1, 2], ("body",), "JSON need not be an object; call it 'body'"),
    ({**GOOD, "prompt": [1] * 600}, ("608", "512"), "name the length that was asked for, and the context"),
    (
        {**GOOD, "prompt": [1] * 300, "max_tokens": 300},
        ("600", "512"),
        "prompt and answer share the context",
    ),
)


# --- 14.4


class Watched(bytes):
    """A key that counts which of its bytes are read, and notices ``==``.

    Attributes:
        reads: single bytes read. equals: comparisons that stop at the first difference.
    """

    reads: int
    equals: int

    def __new__(cls, value: bytes) -> Watched:
        """With both counts at 0."""
        self = super().__new__(cls, value)
        self.reads = self.equals = 0
        return self

    def __eq__(self, other: object) -> bool:
        self.equals += 1
        return bytes.__eq__(self, other) if isinstance(other, bytes) else False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        self.equals += 1
        return bytes.__hash__(self)

    def startswith(self, *args: Any) -> bool:
        """As ``==``."""
        self.equals += 1
        return bytes.startswith(self, *args)

    def decode(self, *args: Any, **options: Any) -> str:
        """As ``==``, which is what follows."""
        self.equals += 1
        return bytes.decode(self, *args, **options)

    def __bytes__(self) -> bytes:
        return self

    def __getitem__(self, at: Any) -> Any:
        found = bytes.__getitem__(self, at)
        self.reads += isinstance(found, int) or len(found)
        return found

    def __iter__(self) -> Iterator[int]:
        for byte in bytes.__iter__(self):
            self.reads += 1
            yield byte


KEY = b"sk-lab-3f9a71c2"


# --- 14.5

CLIENTS, SLOTS, QUEUE, SERVICE, AFTER = 40, 4, 4, 1.0, 1.0
MOST_WAIT, MOST_ATTEMPTS = 60.0, 10
MOST_SECONDS = 20.0
PAR, PASS = 90, 110
"""Requests: of the reference, and the most that pass."""


class Stampede:
    """All clients at once, after a pause of the server; ``refused`` holds who came, and when, to a 429.

    Args:
        retry: ``retry_wait`` of every client.
    """

    def __init__(self, retry: Callable[..., Any], *, slots: int = SLOTS, seed: int = 14) -> None:
        self.sent = self.served = self.gave_up = 0
        self.end = 0.0
        self.refused: list[tuple[float, int]] = []
        coming = [(0.0, client) for client in range(CLIENTS)]
        attempts, dice = [0] * CLIENTS, [random.Random(f"{seed} {client}") for client in range(CLIENTS)]
        free = [0.0] * slots  # when each slot is free
        starts: list[float] = []  # of those let in
        while coming:
            now, client = heapq.heappop(coming)
            self.sent += 1
            attempts[client] += 1
            waiting = sum(start > now for start in starts)
            if slots and (min(free) <= now or waiting < QUEUE):
                start = max(now, heapq.heappop(free))
                heapq.heappush(free, start + SERVICE)
                starts.append(start)
                self.served += 1
                self.end = max(self.end, start + SERVICE)
                continue
            self.refused.append((now, client))
            wait = retry(attempts[client], AFTER, dice[client].random)
            if wait is None:
                self.gave_up += 1
            else:
                heapq.heappush(coming, (now + float(wait), client))
