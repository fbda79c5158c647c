"""What a record may not say, though each of its fields has the right type."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from labkit.errors import require

if TYPE_CHECKING:
    from labkit.bench.record import Entry, Record

_NO_FIGURES = ("unavailable", "wrong", "failed")


def check(source: str, record: Record) -> None:
    """Refuse a record that contradicts itself; a figure that cannot be has no place in a history.

    Args:
        source: the file's name, for the message.

    Raises:
        InputError: no point in time as its start; a negative time; samples of something that was wrong;
            or a time of something whose error is above its own bound.
    """
    require(_utc(record.started), f"{source}: started", repr(record.started), "a UTC time, ISO 8601")
    for i, entry in enumerate(record.entries):
        _entry(f"{source}: entries[{i}]", entry)


def _entry(place: str, entry: Entry) -> None:
    if entry.samples_us:
        least = min(entry.samples_us)
        require(least >= 0, f"{place}: samples_us", f"{least:g}", "times of 0 or more, in µs")
        figures = entry.status not in _NO_FIGURES
        words = f"{len(entry.samples_us)} samples of something that is {entry.status}"
        require(figures, f"{place}: samples_us", words, "none: only what was found right is timed")
    error, bound = entry.error.get("max_abs"), entry.error.get("bound")
    if entry.status == "timed" and error is not None and bound is not None:
        words = f"{error:.3g} where {bound:.3g} is allowed, and the status is timed"
        require(error <= bound, f"{place}: error", words, "the status wrong, and no samples")


def _utc(text: str) -> bool:
    """Histories are sorted by this text: a time of another zone would stand in the wrong place."""
    try:
        return datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        return False
