"""Notebooks as students would hand them in, made on the spot: for trying the grader, in lessons and tests."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path

from labkit.atomic import write_text
from labkit.classroom.answers import exercises_of
from labkit.classroom.solved import solved
from labkit.course.anatomy import exercise_names
from labkit.course.index import chapter_named
from labkit.course.notebook import Notebook, dumps, joined, read
from labkit.errors import require


def notebook(
    chapter: str,
    *,
    right: Iterable[str] | None = (),
    cells: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Notebook:
    """A chapter as handed in.

    Args:
        chapter: its number.
        right: exercises that hold the reference solution; None for all that ``cells`` leaves.
        cells: exercise -> source of its whole cell.
        folder: the course's notebooks (default: the course's own).

    Raises:
        InputError: the chapter is not there, or has no such exercise.
    """
    path = chapter_named(chapter).notebook(folder)
    require(path is not None, "chapter", chapter, "a chapter whose notebook is there")
    assert path is not None
    book = copy.deepcopy(read(path))
    names, given = exercise_names(book), dict(cells or {})
    solve = [name for name in names if name not in given] if right is None else list(right)
    for name in (*solve, *given):
        require(name in names, "exercise", repr(name), f"one of {', '.join(names)}")
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        cell["outputs"], cell["execution_count"] = [], None
        for name in exercises_of(joined(cell["source"]), names):
            if name in given:
                cell["source"] = given[name]
            elif name in solve:
                cell["source"] = solved(cell["source"], name)
    return book


def hand_in(folder: Path, student: str, book: Notebook | str, name: str) -> Path:
    """Write ``folder/student/name``; a text is written as it is, however broken."""
    path = folder / student / name
    write_text(path, book if isinstance(book, str) else dumps(book))
    return path


def claim(book: Notebook, name: str, text: str) -> None:
    """Store ``text`` as the output of the cell that checks exercise ``name``: what a forger would do."""
    for cell in book["cells"]:
        if cell["cell_type"] == "code" and name in exercises_of(joined(cell["source"]), [name]):
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": text}]
            cell["execution_count"] = 1
