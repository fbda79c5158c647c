"""What grading found: one record a notebook, as a table, as CSV for a spreadsheet and as JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labkit.atomic import write_json, write_text

STATES = (
    "passed",
    "not yet",
    "not attempted",
    "missing",
    "time limit",
    "memory limit",
    "crashed",
    "tampered",
)
"""What can become of an exercise; only the first is a point."""

GRADED, UNREADABLE, OTHER, BROKEN = "graded", "unreadable", "other chapter", "broken"
VERSION = 1


@dataclass(frozen=True)
class Mark:
    """One exercise of one notebook.

    Attributes:
        exercise: its id; ``name``: what its check is called.
        state: one of :data:`STATES`.
        score: against par, or None.
        message: a line for the teacher.
        tried: what the answer tried that no answer needs.
    """

    exercise: str
    name: str
    state: str
    score: float | None = None
    message: str = ""
    tried: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graded:
    """One notebook.

    Attributes:
        student, file: folder or file name that says whose it is; path below the graded folder.
        status: ``graded``, ``unreadable``, ``other chapter`` or ``broken`` (the grader's own failure).
        chapter: two digits, empty when unknown.
        reason: why it was not graded.
        flags: what a teacher should look at.
        walls: what the operating system kept from it.
    """

    student: str
    file: str
    status: str
    chapter: str = ""
    marks: tuple[Mark, ...] = ()
    reason: str = ""
    flags: tuple[str, ...] = ()
    walls: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def points(self) -> int:
        """One for each exercise passed."""
        return sum(mark.state == "passed" for mark in self.marks)


@dataclass(frozen=True)
class Gradebook:
    """All notebooks of a folder; ``exit_code`` as ``labkit grade --help`` says."""

    rows: tuple[Graded, ...]
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 all graded; 1 some could not be, or want a look; 130 interrupted."""
        if self.interrupted:
            return 130
        return int(any(row.status != GRADED or row.flags for row in self.rows))

    def write(self, out: Path) -> None:
        """``grades.csv``, ``exercises.csv`` and ``grades.json`` in ``out``, each atomically."""
        ids = sorted({mark.exercise for row in self.rows for mark in row.marks})
        heads = ["student", "file", "chapter", "status", "points", "of", *ids, "flags", "reason"]
        lines = []
        for row in self.rows:
            states = {mark.exercise: mark.state for mark in row.marks}
            counted = [row.points, len(row.marks)] if row.status == GRADED else ["", ""]
            cells = [row.student, row.file, row.chapter, row.status, *counted]
            lines.append([*cells, *(states.get(one, "") for one in ids), "; ".join(row.flags), row.reason])
        write_text(out / "grades.csv", _csv([heads, *lines]))
        detail = [["student", "file", "exercise", "name", "state", "score", "message", "tried"]]
        for row in self.rows:
            for mark in row.marks:
                score = "" if mark.score is None else f"{mark.score:g}"
                words = [mark.message, "; ".join(mark.tried)]
                detail.append([row.student, row.file, mark.exercise, mark.name, mark.state, score, *words])
        write_text(out / "exercises.csv", _csv(detail))
        rows = [{**asdict(row), "points": row.points, "of": len(row.marks)} for row in self.rows]
        write_json(
            out / "grades.json", {"version": VERSION, "interrupted": self.interrupted, "notebooks": rows}
        )


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    """With a byte-order mark: without one a spreadsheet on a Chinese Windows reads it as GBK."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([[_cell(one) for one in row] for row in rows])
    return "\ufeff" + buffer.getvalue()


def _cell(value: Any) -> Any:
    """A name that begins like a formula must not become one."""
    text = str(value)
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def printable(text: str) -> str:
    """A file's name as a terminal may show it: no control characters, no broken surrogates."""
    return "".join(ch if ch.isprintable() else "?" for ch in text.encode("utf-8", "replace").decode("utf-8"))
