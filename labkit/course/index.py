"""The list of chapters: ``data/course.json`` read once, and which notebooks are there."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from labkit import paths
from labkit.errors import refuse


@dataclass(frozen=True)
class Chapter:
    """One row of the course table; ``minutes`` is a planned reading and working time."""

    number: str
    slug: str
    title: str
    question: str
    builds: str
    minutes: int

    def notebook(self, folder: Path | None = None) -> Path | None:
        """The chapter's notebook in ``folder`` (default: the notebooks folder), None while it is coming."""
        where = folder if folder is not None else paths.notebooks_dir()
        found = sorted(where.glob(f"{self.number}_*.ipynb"))
        return found[0] if found else None


@functools.cache
def all_chapters() -> tuple[Chapter, ...]:
    """The chapters 00..16 in order."""
    table = json.loads((paths.data_dir() / "course.json").read_text(encoding="utf-8"))
    return tuple(Chapter(**row) for row in table["chapters"])


def chapter_named(number: str) -> Chapter:
    """The chapter with this number; ``"2"`` means ``"02"``. InputError for any other."""
    wanted = str(number).strip()
    wanted = wanted.zfill(2) if wanted else wanted
    for chapter in all_chapters():
        if chapter.number == wanted:
            return chapter
    return refuse("chapter", repr(number), f"one of {', '.join(c.number for c in all_chapters())}")


def ready_chapters(folder: Path | None = None) -> list[Chapter]:
    """The chapters whose notebook is there."""
    return [chapter for chapter in all_chapters() if chapter.notebook(folder) is not None]


def choose(spec: str | list[str] | None, folder: Path | None = None) -> list[Chapter]:
    """The chapters a user named, in course order: ``"00,02"``, ``"00-02"``, ``"all"`` or None for all ready.

    Raises:
        InputError: for a number that does not exist, or a chapter that is still coming.
    """
    ready = ready_chapters(folder)
    names = ", ".join(c.number for c in ready) or "none"
    parts = spec.split(",") if isinstance(spec, str) else list(spec or [])
    parts = [part.strip() for part in parts if part.strip()]
    if not parts or parts == ["all"]:
        if not ready:
            refuse("chapters", "no notebook found", f"notebooks in {folder or paths.notebooks_dir()}")
        return ready
    numbers: set[str] = set()
    for part in parts:
        first, dash, last = part.partition("-")
        if not dash:
            numbers.add(chapter_named(part).number)
            continue
        low, high = chapter_named(first).number, chapter_named(last).number
        if low > high:
            refuse("chapters", repr(part), f"a rising range, such as {high}-{low}")
        # a range takes what is there: 00-16 is a fair way to say "everything so far"
        numbers.update(c.number for c in ready if low <= c.number <= high)
    for number in sorted(numbers):
        if number not in {c.number for c in ready}:
            refuse("chapters", repr(number), f"a chapter that is ready: {names}", "this one is still coming")
    if not numbers:
        refuse("chapters", repr(spec), f"at least one chapter that is ready: {names}")
    return [c for c in ready if c.number in numbers]
