"""Which chapters fit into so many hours: minutes and prerequisites are read from the notebooks themselves.

A plan is a model with three assumptions, all of them parameters: a break in every hour, a pair at one
machine takes longer than one person, and a chapter that the teacher only shows takes a third of its time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.course.index import Chapter, all_chapters
from labkit.course.notebook import joined, read
from labkit.errors import require

BREAK_MINUTES = 10
"""Of every full hour: an assumption."""
SETUP_MINUTES = 10
"""Before the first cell, with the environment already on the machines: an assumption."""
SHOWN = 3
"""A chapter that the teacher runs and talks through, exercises left out, takes 1/3: an assumption."""
PAIR = 1.2
"""Two people at one machine talk: an assumption."""

# the goal box is a list or a table, with or without a colon inside the bold words
_MINUTES = re.compile(r"\*\*(?:minutes|time)\W*(?:about\s+)?(\d+)", re.IGNORECASE)
_NEEDS = re.compile(r"\*\*(?:prerequisites?|you need)\W*\*\*(.*)", re.IGNORECASE)
_NUMBERS = re.compile(r"\bchapters?\s+((?:\d\d(?:\s*(?:,|–|-|to|and)\s*)?)+)", re.IGNORECASE)

TRACKS: dict[str, tuple[str, ...]] = {
    "first look": ("00", "01", "02", "09", "03", "11", "12", "07", "13"),
    "kernels": ("00", "01", "03", "04", "05", "06", "07", "02", "08", "09"),
    "engine": ("00", "01", "11", "12", "10", "13", "09", "07", "14"),
}
"""What to take first, by what a class is for."""


@dataclass(frozen=True)
class Lesson:
    """A chapter as its own notebook describes it; ``needs`` are chapter numbers."""

    number: str
    title: str
    minutes: int
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One line of a plan: ``mode`` is ``"do"`` or ``"show"``; ``start`` in minutes from the beginning."""

    lesson: Lesson
    mode: str
    start: int
    minutes: int


@dataclass(frozen=True)
class Plan:
    """A syllabus: its rows in order of time, and the minutes of ``hours`` that are left."""

    hours: float
    rows: tuple[Row, ...]
    breaks: int
    left: int

    def numbers(self, mode: str = "") -> list[str]:
        """Chapters of the plan, of one mode or of both."""
        return [row.lesson.number for row in self.rows if mode in ("", row.mode)]

    def text(self) -> str:
        """Such as ``2 h: do 00, 01; show 12; 5 minutes left``."""
        said = [f"{mode} {', '.join(found)}" for mode in ("do", "show") if (found := self.numbers(mode))]
        return f"{self.hours:g} h: {'; '.join(said) or 'nothing fits'}; {self.left} minutes left"


def lessons(folder: Path | None = None) -> dict[str, Lesson]:
    """Number -> lesson, of the chapters whose notebook is there."""
    return {
        chapter.number: _lesson(chapter, path)
        for chapter in all_chapters()
        if (path := chapter.notebook(folder)) is not None
    }


def _lesson(chapter: Chapter, path: Path) -> Lesson:
    opening = joined(read(path)["cells"][0]["source"])
    minutes = _MINUTES.search(opening)
    needs = _NEEDS.search(opening)
    own = int(minutes[1]) if minutes else chapter.minutes
    before = sorted({n for n in _named(needs[1] if needs else "") if n < chapter.number})
    return Lesson(chapter.number, chapter.title, own, tuple(before))


def _named(text: str) -> Iterable[str]:
    for found in _NUMBERS.finditer(text):
        numbers = re.findall(r"\d\d", found[1])
        if re.search(r"\d\d\s*(?:–|-|to)\s*\d\d", found[1]):
            numbers = [f"{n:02}" for n in range(int(numbers[0]), int(numbers[-1]) + 1)]
        yield from numbers


def plan(
    hours: float,
    *,
    track: str | Sequence[str] = "first look",
    students: int = 30,
    machines: int = 30,
    known: dict[str, Lesson] | None = None,
) -> Plan:
    """Fill the hours along a track: each chapter is done, or else shown, or else left out.

    It is taken together with all chapters that it needs and that are not there yet.

    Args:
        hours: 0.5 to 40.
        track: a name of :data:`TRACKS`, or chapter numbers, the most wanted first.
        students, machines: two share a machine where there are too few.
        known: lessons (default: read from the notebooks).

    Raises:
        InputError: out of range, or more than two students for a machine.
    """
    require(0.5 <= hours <= 40, "hours", hours, "0.5 to 40")
    require(1 <= students <= 1000, "students", students, "1 to 1000")
    fix = "two at a machine still work; three do not"
    require(students <= 2 * machines, "machines", machines, f"at least {-(-students // 2)}", fix)
    known = known if known is not None else lessons()
    named = isinstance(track, str) and track in TRACKS
    wanted = TRACKS[str(track)] if named else tuple(track)
    if named:  # a chapter may still be coming
        wanted = tuple(number for number in wanted if number in known)
    for number in wanted:
        require(number in known, "track", repr(track), f"one of {', '.join(TRACKS)}, or chapter numbers")
    slower = PAIR if students > machines else 1.0
    breaks = BREAK_MINUTES * int(hours)
    room = int(60 * hours) - breaks - SETUP_MINUTES
    chosen: dict[str, tuple[str, int]] = {}
    for number in wanted:
        for mode in ("do", "show"):  # what does not fit any more is shown
            if number in chosen:
                break
            more = {}
            for one in (*_before(number, known), number):
                if one not in chosen:
                    # what is only a prerequisite may be shown
                    own = mode if one == number or one in wanted else "show"
                    more[one] = (own, _cost(known[one], slower / (SHOWN if own == "show" else 1)))
            cost = sum(minutes for _, minutes in more.values())
            if cost <= room:
                chosen |= more
                room -= cost
    rows, at = [], SETUP_MINUTES
    for number in sorted(chosen):
        mode, minutes = chosen[number]
        rows.append(Row(known[number], mode, at, minutes))
        at += minutes
    return Plan(hours, tuple(rows), breaks, room)


def _before(number: str, known: dict[str, Lesson]) -> list[str]:
    """All that a chapter needs, directly or through others, in course order."""
    found: set[str] = set()
    waiting = list(known[number].needs)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += known[one].needs
    return sorted(found)


def _cost(lesson: Lesson, factor: float) -> int:
    """Whole minutes, rounded up to five: nobody plans 23."""
    return -(-round(lesson.minutes * factor) // 5) * 5
