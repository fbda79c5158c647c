"""One job as text, to be run here or on another machine, and what tells two jobs apart."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import labkit
from labkit.course.notebook import joined
from labkit.errors import require
from labkit.rerun.suite import Job

VERSION = 1
_SOURCES = (".py", ".cu", ".cuh", ".h", ".cpp")


@functools.cache
def source_hash() -> str:
    """Hash of labkit's own sources: figures of different code do not belong into one round."""
    root = Path(labkit.__file__).resolve().parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in _SOURCES and path.is_file():
            found.update(path.relative_to(root).as_posix().encode())
            found.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return found.hexdigest()[:16]


def fingerprint(job: Job) -> str:
    """Changes when the notebook's cells, the values, the device or labkit itself do."""
    cells = [(cell["cell_type"], joined(cell["source"])) for cell in job.book["cells"]]
    parts = [cells, job.values, job.device, source_hash()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def dumps(job: Job, *, source: str = "") -> str:
    """The job as text; the machine that gets it needs labkit, and no file of ours.

    Args:
        source: :func:`source_hash` that the other machine's labkit must have; "" for any.
    """
    fields = ("id", "notebook", "book", "values", "device", "timeout", "cell_timeout", "exclusive")
    value = {"version": VERSION, "source": source, **{name: getattr(job, name) for name in fields}}
    return json.dumps(value, ensure_ascii=False)


def loads(text: str) -> tuple[Job, str]:
    """A job, and the hash that labkit must have to run it.

    Raises:
        InputError: of another version.
    """
    value: dict[str, Any] = json.loads(text)
    require(value.pop("version", None) == VERSION, "job", "another version", f"version {VERSION}")
    source = value.pop("source")
    return Job(**value), source
