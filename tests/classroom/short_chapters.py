"""Chapters cut down to their parameters, their start and their exercises, so that running them is quick."""

from __future__ import annotations

from pathlib import Path

from labkit.classroom.answers import exercises_of
from labkit.course.anatomy import exercise_names
from labkit.course.index import chapter_named
from labkit.course.notebook import dumps, joined, normalise, read, tags
from labkit.course.params import start_call


def short(folder: Path, number: str) -> Path:
    """Write the short form of a chapter; its exercises are the chapter's own."""
    path = chapter_named(number).notebook()
    assert path is not None
    book = read(path)
    names = exercise_names(book)
    kept = []
    for at, cell in enumerate(book["cells"]):
        source = joined(cell["source"])
        code = cell["cell_type"] == "code"
        needed = code and ("parameters" in tags(cell) or start_call(source) or exercises_of(source, names))
        if at == 0 or needed:
            kept.append({**cell, **({"outputs": [], "execution_count": None} if code else {})})
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / path.name
    target.write_text(dumps(normalise({**book, "cells": kept})), encoding="utf-8")
    return target
