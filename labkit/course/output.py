"""The text one cell puts out, kept while it arrives: neighbouring streams merged, its size bounded.

All of it takes time linear in the text: nbclient's own merging runs a regular expression that is
quadratic in the length of a line, outside of every time-out.
"""

from __future__ import annotations

from typing import Any

from labkit.course.notebook import joined

CELL_TEXT_LIMIT = 2_000_000
# an error goes into summary.json, the index and the terminal as well
ERROR_TEXT_LIMIT = 20_000
# a figure's one-line description is never worth cutting
_SHORT = 1_000


def cut_mark(limit: int) -> str:
    """The line that stands where text was left away."""
    return f"\n[labkit: cut here; a notebook keeps {limit:,} characters of one cell's text]\n"


class CellText:
    """One cell's text outputs; call :meth:`take` after each output and :func:`finish` at the end.

    Attributes:
        limit: characters of text kept; what comes later is replaced by one marked line.
    """

    def __init__(self, limit: int = CELL_TEXT_LIMIT) -> None:
        self.limit = limit
        self._used = 0

    def take(self, outputs: list[Any]) -> None:
        """``outputs[-1]`` has just arrived: merge it into its neighbours, cut it where the room ends."""
        new = outputs[-1]
        if len(outputs) == 1:
            self._used = 0  # the first one, or the first after clear_output
        kind = new.get("output_type")
        if kind == "stream":
            self._stream(outputs)
        elif kind == "error":
            new["evalue"] = _shortened(new.get("evalue", ""))
            new["traceback"] = [_shortened(line) for line in new.get("traceback", [])]
        elif len(plain := joined(new.get("data", {}).get("text/plain", ""))) > _SHORT:
            new["data"]["text/plain"] = self._within(plain)

    def _stream(self, outputs: list[Any]) -> None:
        new = outputs.pop()
        text = self._within(joined(new["text"]))
        at = len(outputs)
        while at and outputs[at - 1].get("output_type") == "stream":
            at -= 1
            if outputs[at]["name"] == new["name"]:
                outputs[at]["text"].append(text)
                return
        if text:
            new["text"] = [text]  # joined at the end: adding to a string copies it every time
            # the two arrive in any order, so it is always stdout first
            outputs.insert(at if new["name"] == "stdout" else len(outputs), new)

    def _within(self, text: str) -> str:
        room = self.limit - self._used
        self._used += len(text)
        if len(text) <= room:
            return text
        return text[:room] + cut_mark(self.limit) if room >= 0 else ""


def _shortened(text: str) -> str:
    return text if len(text) <= ERROR_TEXT_LIMIT else text[:ERROR_TEXT_LIMIT] + cut_mark(ERROR_TEXT_LIMIT)


def finish(outputs: list[Any]) -> None:
    """Make every stream one string, as a terminal would show it."""
    for output in outputs:
        if output.get("output_type") == "stream":
            output["text"] = overwritten(joined(output["text"]))


def overwritten(text: str) -> str:
    """``text`` without what a carriage return lets later text of the same line overwrite.

    A carriage return at the end of a line stays, as nbclient and nbval leave it there.
    """
    if "\r" not in text:
        return text
    return "\n".join(
        line[line.rfind("\r", 0, len(line) - 1) + 1 :] if line else "" for line in text.split("\n")
    )
