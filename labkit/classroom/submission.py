"""A notebook that somebody handed in: read with suspicion, and asked which chapter it is."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from labkit.course.notebook import Cell, Notebook, joined

MOST_BYTES = 64 << 20
_CHECK = re.compile(r"\bcheck\.([A-Za-z_]\w*)\s*\(")
_CLAIM = re.compile(r"\b(\d\d\.\d+) passed\b")


class Unreadable(Exception):
    """It is no notebook of this course; the text says why."""


def load(path: Path) -> Notebook:
    """The notebook in ``path``: cells are dictionaries with a text each, whatever else is odd.

    Raises:
        Unreadable: not a plain file, too large, not UTF-8, not JSON, not a notebook of nbformat 4.
    """
    try:
        if not path.is_file():
            raise Unreadable("not a plain file")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise Unreadable(f"{size >> 20} MiB; a notebook handed in may have {MOST_BYTES >> 20} MiB")
        book = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        where = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise Unreadable(f"broken JSON{where}") from None
    cells = book.get("cells") if isinstance(book, dict) else None
    if not isinstance(cells, list) or book.get("nbformat") != 4:
        raise Unreadable("no notebook of nbformat 4")
    return {"cells": [made for cell in cells if (made := _cell(cell)) is not None]}


def _cell(cell: object) -> Cell | None:
    if not isinstance(cell, dict):
        return None
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    outputs = cell.get("outputs")
    return {
        "cell_type": str(cell.get("cell_type")),
        "id": str(cell.get("id", "")),
        "source": source if isinstance(source, str) else "",
        "metadata": {},
        "outputs": outputs if isinstance(outputs, list) else [],
    }


def chapter_of(book: Notebook, names: Mapping[str, Sequence[str]]) -> str:
    """The chapter whose checks the notebook calls most often.

    Args:
        book: from :func:`load`.
        names: chapter number -> names of its exercises.

    Raises:
        Unreadable: it calls none of them.
    """
    chapter = {name: number for number, own in names.items() for name in own}
    text = "\n".join(joined(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code")
    votes = Counter(chapter[name] for name in set(_CHECK.findall(text)) if name in chapter)
    if not votes:
        raise Unreadable("no exercise of the course in it")
    return min(votes, key=lambda number: (-votes[number], number))


def claims(book: Notebook) -> set[str]:
    """Ids of the exercises that the stored outputs call passed: what it says of itself, to be compared."""
    found: set[str] = set()
    for cell in book["cells"]:
        for output in cell["outputs"]:
            if isinstance(output, dict):
                data = output.get("data")
                parts = [output.get("text"), *(data.values() if isinstance(data, dict) else ())]
                for part in parts:
                    text = "".join(map(str, part)) if isinstance(part, list) else part
                    if isinstance(text, str):
                        found.update(_CLAIM.findall(text))
    return found
