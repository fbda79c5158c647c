"""What ``labkit grade`` shows: a line a notebook while it works, then one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from labkit.classroom.scores import GRADED, Gradebook, Graded

_SIGNS = {"passed": "●", "not yet": "◐", "not attempted": "○", "missing": "○"}
_PLAIN = {"●": "P", "◐": "n", "○": "-", "✗": "X"}


class Report:
    """``file`` is where it writes (default: standard output)."""

    def __init__(self, file: Any = None) -> None:
        self.out = Console(file=file, highlight=False, soft_wrap=True)

    def one(self, row: Graded, done: int, total: int) -> None:
        """A notebook is done."""
        said = f"{row.points} of {len(row.marks)}" if row.status == GRADED else f"{row.status}: {row.reason}"
        self.out.print(f"{done}/{total} {escape(row.file)}: {escape(said)}")

    def end(self, book: Gradebook, where: Path) -> None:
        """The table of all, what wants a look, and where the files are."""
        table = Table(box=None, pad_edge=False)
        for head in ("student", "chapter", "points", "exercises", "look"):
            table.add_column(head, overflow="fold")
        for row in book.rows:
            points = f"{row.points}/{len(row.marks)}" if row.status == GRADED else "–"
            states = "".join(self._sign(mark.state) for mark in row.marks)
            look = "; ".join([*row.flags, *([f"{row.status}: {row.reason}"] if row.status != GRADED else [])])
            table.add_row(*map(escape, (row.student, row.chapter, points, states, look)))
        self.out.print(table)
        graded = [row for row in book.rows if row.status == GRADED]
        got, asked = sum(row.points for row in graded), sum(len(row.marks) for row in graded)
        word = "interrupted; " if book.interrupted else ""
        self.out.print(f"{word}{len(graded)} of {len(book.rows)} notebooks graded, {got} of {asked} passed")
        if not all(row.walls for row in graded):
            self.out.print("This system has no Landlock: only Python's own guard stood round the answers.")
        self.out.print(escape(f"{where / 'grades.csv'}"))

    def _sign(self, state: str) -> str:
        sign = _SIGNS.get(state, "✗")
        encoding = self.out.encoding or "ascii"
        try:
            sign.encode(encoding)
        except (UnicodeError, LookupError):
            return _PLAIN[sign]
        return sign
