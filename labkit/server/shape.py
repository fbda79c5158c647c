"""How an endpoint writes what has come of its choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from labkit.engine.sampling import Sampled
from labkit.server.call import Piece


@dataclass
class Told:
    """What has come of one choice."""

    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    logprobs: list[Sampled] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    cached: int = 0
    reason: str | None = None

    def add(self, piece: Piece) -> None:
        """One piece more."""
        if not self.tokens:
            self.cached = piece.cached
        self.texts.append(piece.text)
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.offsets += piece.offsets
        self.reason = piece.reason


class Shape(Protocol):
    """How an endpoint writes its answers: entries of "choices"."""

    whole_object: str
    chunk_object: str
    prefix: str
    """Of ids."""

    def whole(self, choice: int, told: Told) -> dict[str, Any]:
        """A finished choice."""

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The first chunk of a choice, if it has one of its own."""

    def delta(self, choice: int, piece: Piece) -> dict[str, Any]:
        """A chunk in the middle."""

    def closing(self, choice: int, reason: str) -> dict[str, Any]:
        """The last chunk of a choice."""
