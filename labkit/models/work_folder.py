"""The folder ``OUT.partial`` in which a checkpoint is made: what may lie in it, and its lock.

Only files that an earlier run made are ever removed. A folder of that name that holds anything else
is somebody's own and is refused by the name of what was found, before anything in it is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from labkit.errors import InputError, ModelFileError, require
from labkit.models.checkpoint import MANIFEST, PROGRESS, partial_path
from labkit.models.hf import COMPANIONS
from labkit.models.hf_files import read_json

LOCK = "lock"
_NAMES = frozenset({PROGRESS, MANIFEST, "config.json", *COMPANIONS})
_SHARD = re.compile(r"weights-\d{5,}\.safetensors(\.part)?")
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[A-Za-z0-9_]+\.part")  # of labkit.atomic in a killed process
_STATE_KEYS = {"source", "recipe", "shards", "resume", "done"}


def shard_name(index: int) -> str:
    """File name of shard ``index``, which counts from 0."""
    return f"weights-{index + 1:05d}.safetensors"


def check_apart(src: Path, out: Path) -> None:
    """Refuse ``out`` when it, or the folder it is made in, is the source, in it or around it."""
    for target in (out, partial_path(out)):
        same = src.exists() and target.exists() and os.path.samefile(src, target)
        what = f"{out}, which is the source" if target == out else f"{out}, made in {target}: the source"
        require(not same, "out", what, "another folder")
        inner, outer = src.resolve(), target.resolve()
        require(
            inner not in outer.parents and outer not in inner.parents,
            "out",
            f"{out}, inside the source or around it",
            "a folder beside the source",
        )


def earlier_state(work: Path) -> dict[str, Any] | None:
    """The progress record of the run that ``work`` was begun by; None when none was.

    Raises:
        InputError: ``work`` holds something that no run of labkit left there.
    """
    if not (work.exists() or work.is_symlink()):
        return None
    if not work.is_dir():
        raise InputError("out", f"{work}, a file where the work would be done", "no such file", _fix(work))
    paths = sorted(work.iterdir())
    state = None
    if any(path.name == PROGRESS and _is_ours(path) for path in paths):
        state = _state(work / PROGRESS)
    for path in paths:
        # Before its first record a run makes the lock and the record's temporary file, nothing else.
        early = path.name == LOCK or path.name.startswith(f".{PROGRESS}.")
        if not _is_ours(path) or (state is None and not early):
            raise InputError(
                "out",
                f"{work}, which holds {path.name!r} that no unfinished run of labkit left there",
                "a working folder of labkit, or none",
                _fix(work),
            )
    return state


def clear(work: Path, keep: Collection[str]) -> None:
    """Remove what earlier runs left in ``work``, but not the lock and the files named in ``keep``."""
    for path in work.iterdir():
        if path.name != LOCK and path.name not in keep and _is_ours(path):
            path.unlink()


@contextlib.contextmanager
def lock(work: Path) -> Iterator[None]:
    """Keep a second run out of ``work``; the system frees the lock when a process dies."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / LOCK).open("a+b") as file:
        try:
            _lock_file(file.fileno())
        except OSError as error:
            raise InputError(
                "out", f"{work}, in use by another run", "one run at a time", "wait until that run has ended"
            ) from error
        yield


def _is_ours(path: Path) -> bool:
    """Whether ``path`` is a plain file of a name that labkit gives."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.name == LOCK:
        return path.stat().st_size == 0
    leftover = _LEFTOVER.fullmatch(path.name)
    return (
        path.name in _NAMES
        or _SHARD.fullmatch(path.name) is not None
        or (leftover is not None and leftover["name"] in _NAMES)
    )


def _state(path: Path) -> dict[str, Any] | None:
    """The record, or None when the file is another program's (or damaged: then nothing is sure)."""
    try:
        state = read_json(path)
    except ModelFileError:
        return None
    return state if state.keys() >= _STATE_KEYS and isinstance(state["done"], list) else None


def _fix(work: Path) -> str:
    return f"choose another folder for the result, or move {work} away"


def _lock_file(handle: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        return
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
