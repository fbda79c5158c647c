"""Tokens in, text out, as far as it is certain: no half character, and nothing of a stop string."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from labkit.errors import require


class Decoder(Protocol):
    """Incremental decoder of ids, such as :class:`labkit.models.tokenizer.StreamDecoder`."""

    def put(self, token: int) -> str: ...

    def finish(self) -> str: ...


class Streams(Protocol):
    """What makes decoders, such as :class:`labkit.models.tokenizer.Tokenizer`."""

    def stream(self, *, special: bool = False) -> Decoder: ...


class TextStream:
    """The text of one answer. Pieces from :meth:`put` and :meth:`finish` joined are :attr:`text`.

    Held back: the bytes of an incomplete character, and the longest end of the text that a stop string
    could still begin with; nothing else. The answer ends where the first stop string is complete, the
    longest of those that end on that character; so it does not depend on how tokens cut the text.

    The caller passes no end token or stop token: these have no text.

    Args:
        tokenizer: makes the decoder.
        stop: texts that end the answer.
        include_stop: keep the stop text at the end.
        special: show control tokens.

    Attributes:
        text: all that was given out.
        stopped: the stop string found, or None.
        offsets: for each token put, the characters of text before it, stop strings and held text
            counted too (OpenAI's ``text_offset`` without the prompt). Tokens of one character share
            its offset.
    """

    def __init__(
        self,
        tokenizer: Streams,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        special: bool = False,
    ) -> None:
        require(all(stop), "stop", "an empty text", "texts of at least one character")
        self._decoder = tokenizer.stream(special=special)
        self._stop, self._include = tuple(stop), include_stop
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""  # decoded, not given out: a proper prefix of a stop string
        self.text = ""
        self.stopped: str | None = None
        self.offsets: list[int] = []

    @property
    def num_visible(self) -> int:
        """Tokens, from the first, whose text has begun to be in :attr:`text`; all when nothing is held."""
        if not self._held and self.stopped is None:
            return len(self.offsets)
        return bisect_left(self.offsets, len(self.text))

    def put(self, token: int) -> str:
        """Text that ``token`` makes certain, possibly "". After a stop string nothing more comes.

        Raises:
            InputError: not a token id.
        """
        self.offsets.append(len(self.text) + len(self._held))
        return self._take(self._decoder.put(token)) if self.stopped is None else ""

    def finish(self) -> str:
        """What was held back; a character that was never completed shows as U+FFFD. Idempotent."""
        if self.stopped is not None:
            return ""
        piece = self._take(self._decoder.finish())
        if self.stopped is None:
            piece += self._held
            self.text, self._held = self.text + self._held, ""
        return piece

    def _take(self, new: str) -> str:
        """Give out what is certain of the held text and ``new``."""
        text = self._held + new
        found = self._found(text, len(self._held))
        if found is not None:
            self.stopped, end = found
            piece, self._held = text[: end if self._include else end - len(self.stopped)], ""
        else:
            cut = self._certain(text)
            piece, self._held = text[:cut], text[cut:]
        self.text += piece
        return piece

    def _found(self, text: str, old: int) -> tuple[str, int] | None:
        """The stop string that is complete first, and where it ends in ``text``."""
        best: tuple[str, int] | None = None
        for stop in self._stop:
            # It ends in the new part, or it would have been found before.
            begin = text.find(stop, max(0, old - len(stop) + 1))
            if begin < 0:
                continue
            end = begin + len(stop)
            if best is None or (end, -len(stop)) < (best[1], -len(best[0])):
                best = stop, end
        return best

    def _certain(self, text: str) -> int:
        """Length of ``text`` without its longest end that a stop string begins with."""
        for cut in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[cut:]) for stop in self._stop):
                return cut
        return len(text)
