"""What this kernel process knows: the chapter it runs and whether it checks the reference solutions.

One notebook is one process, so one value is enough; ``course.start`` sets it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

LOG_VARIABLE = "LABKIT_CHECK_LOG"


@dataclass
class Session:
    """The state of this process; ``chapter`` is None until ``course.start`` ran."""

    chapter: str | None = None
    solve: bool = False


current = Session()


def begin(chapter: str, *, solve: bool, device: str) -> None:
    """Called by ``course.start``: from here on the checks know the chapter and the solve flag."""
    current.chapter = chapter
    current.solve = solve
    log({"event": "start", "chapter": chapter, "solve": solve, "device": device})


def log(record: dict[str, Any]) -> None:
    """Append one JSON line for the headless runner, which names the file; does nothing otherwise."""
    if path := os.environ.get(LOG_VARIABLE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
