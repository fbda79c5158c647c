"""The events of a streamed answer."""

from __future__ import annotations

from typing import Any

from labkit.server import stream
from labkit.server.call import Piece
from labkit.server.shape import Shape

_TEXT = "\0text"
"""Stands where a chunk's text will: it is like nothing else in an entry of "choices"."""


class Chunks:
    """Writes the events of one streamed answer; what does not change from one to the next is written once.

    Args:
        shape: of the answer. head: what every chunk begins with.
        after: what every chunk ends with.
    """

    def __init__(self, shape: Shape, head: dict[str, Any], *, after: bytes) -> None:
        self.shape = shape
        self._before = b'data: %b,"choices":[' % stream.written(head).removesuffix(b"}")
        self._after = b"]%b\n\n" % after
        self._deltas: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, choice: int) -> bytes:
        """The first event of a choice; empty where it has none of its own."""
        opening = self.shape.opening(choice)
        return b"" if opening is None else self._event(opening)

    def of(self, piece: Piece) -> bytes:
        """The events of a piece: one of its text, one of its end, both, or none."""
        events = b""
        if piece.logprobs:
            events = self._event(self.shape.delta(piece.choice, piece))
        elif piece.text:
            before, after = self._deltas.get(piece.choice) or self._delta(piece.choice)
            events = before + stream.written(piece.text) + after
        if piece.reason is not None:
            events += self._event(self.shape.closing(piece.choice, piece.reason))
        return events

    def _event(self, choice: dict[str, Any]) -> bytes:
        return self._before + stream.written(choice) + self._after

    def _delta(self, choice: int) -> tuple[bytes, bytes]:
        """What stands around the text of every chunk of a choice."""
        entry = stream.written(self.shape.delta(choice, Piece(choice, _TEXT)))
        before, found, after = entry.partition(stream.written(_TEXT))
        assert found
        self._deltas[choice] = self._before + before, after + self._after
        return self._deltas[choice]
