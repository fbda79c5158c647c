"""The course map: every chapter, whether it is there, and how far this person has come."""

from __future__ import annotations

import functools
import html
import re
from dataclasses import dataclass
from pathlib import Path

from labkit.check import progress
from labkit.course.index import Chapter, all_chapters

_EXERCISE = re.compile(r"@(?:check\.)?exercise\(\s*[\"'](\d\d\.\d+)[\"']")


@dataclass(frozen=True)
class MapRow:
    """One chapter on the map; ``total`` counts its exercises, ``file`` is "" while it is coming."""

    chapter: Chapter
    file: str
    passed: int
    tried: int
    total: int

    @property
    def status(self) -> str:
        """``coming``, ``ready``, ``2 of 4 passed`` or ``done``."""
        if not self.file:
            return "coming"
        if self.total and self.passed == self.total:
            return "done"
        return f"{self.passed} of {self.total} passed" if self.passed or self.tried else "ready"


@dataclass(frozen=True)
class CourseMap:
    """All chapters with progress; a notebook displays it. ``note`` tells of a damaged progress file."""

    rows: tuple[MapRow, ...]
    note: str = ""

    def __repr__(self) -> str:
        lines = []
        for row in self.rows:
            c = row.chapter
            lines.append(f"{c.number}  {c.title:<24} {c.minutes:>3} min  {row.status:<14} {c.question}")
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return (
            "<table style='border-collapse:collapse;text-align:left'><thead><tr>"
            + "".join(f"<th style='text-align:left;padding:.3em .7em'>{h}</th>" for h in _HEADS)
            + "</tr></thead><tbody>"
            + "".join(_html_row(row) for row in self.rows)
            + f"</tbody></table>{note}"
        )


_HEADS = ("No", "Chapter", "Question", "Builds", "Minutes", "You")


def _html_row(row: MapRow) -> str:
    c = row.chapter
    title = html.escape(c.title)
    cells = [
        c.number,
        f"<a href='{html.escape(row.file)}'>{title}</a>" if row.file else title,
        html.escape(c.question),
        html.escape(c.builds),
        str(c.minutes),
        f"<b>{html.escape(row.status)}</b>" if row.passed else html.escape(row.status),
    ]
    style = "text-align:left;padding:.3em .7em" + ("" if row.file else ";opacity:.55")
    return "<tr>" + "".join(f"<td style='{style}'>{cell}</td>" for cell in cells) + "</tr>"


@functools.cache
def exercise_ids(chapter: str) -> tuple[str, ...]:
    """The ids of a chapter's exercises, read from the source of its checks without importing them."""
    source = Path(__file__).resolve().parents[1] / "check" / f"ch{chapter}.py"
    if not source.is_file():
        return ()
    return tuple(sorted(set(_EXERCISE.findall(source.read_text(encoding="utf-8")))))


def course_map() -> CourseMap:
    """The map for this person; the same on every machine as long as there is no progress."""
    entries, note = progress.load()
    rows = []
    for chapter in all_chapters():
        ids = exercise_ids(chapter.number)
        states = [entries[key].state for key in ids if key in entries]
        notebook = chapter.notebook()
        file = notebook.name if notebook else ""
        rows.append(MapRow(chapter, file, states.count("passed"), len(states), len(ids)))
    return CourseMap(tuple(rows), note)
