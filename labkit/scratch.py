"""A temporary folder that ends with its owner; what a killed owner left, the next one removes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

_OWNER = ".owner"
_TRIES = 3

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Scratch:
    """A new temporary folder: ``with Scratch("labkit-x-") as path``, or its ``path`` and ``close``.

    It is removed by the end of the block, by ``close``, when nothing refers to this object any more, or when
    Python exits. A process that is killed removes nothing; so the owner holds a lock on a file in its folder,
    which the system frees whatever ended the process, and the next Scratch of the same prefix removes the
    folders that nobody holds. A process id would not do: containers share /tmp but not their numbers.

    Args:
        prefix: what the folder's name begins with; one for each kind of work.
    """

    def __init__(self, prefix: str) -> None:
        for folder in _left(prefix):
            _sweep(folder)
        self.path, held = _made(prefix)
        self._end = weakref.finalize(self, _remove, self.path, held)

    def close(self) -> None:
        """Remove the folder now; nothing is raised for what cannot be removed."""
        self._end()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _left(prefix: str) -> Iterator[Path]:
    """Folders of this user that were made with the prefix, whether somebody holds them or not."""
    named = re.compile(re.escape(prefix) + "[a-z0-9_]{8}")  # as tempfile names them
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if named.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) and _mine(entry):
                yield Path(entry.path)


def _mine(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        return sys.platform == "win32" or entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return False


def _made(prefix: str) -> tuple[Path, int | None]:
    """A folder and the descriptor that holds it; None where there are no locks, and nothing is swept."""
    for _ in range(_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        if (held := _hold(folder, os.O_CREAT)) is not None:
            return folder, held
        shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix)), None


def _hold(folder: Path, flags: int = 0) -> int | None:
    """Lock the folder's file; None when another process has it, or took the folder away meanwhile."""
    path = folder / _OWNER
    try:
        descriptor = os.open(path, os.O_RDWR | flags, 0o600)
    except OSError:
        return None
    try:
        _lock(descriptor)
        # between open and lock a sweep may have come by: what we hold must be what lies there, as it
        # does on Windows, where an open file stays
        if sys.platform == "win32" or os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _sweep(folder: Path) -> None:
    """Remove a folder whose owner is gone."""
    if (held := _hold(folder)) is not None:
        _remove(folder, held)


def _remove(folder: Path, held: int | None) -> None:
    """Empty the folder and remove it. What cannot go yet keeps the file of the lock, for the next sweep."""
    _unlock(folder)
    owner, left = folder / _OWNER, False
    for path in _entries(folder):
        if path != owner:
            _remove_one(path)
            left = left or os.path.lexists(path)
    if not left:
        with contextlib.suppress(OSError):  # Windows removes no open file
            owner.unlink()
    if held is not None:
        os.close(held)
    if not left:
        with contextlib.suppress(OSError):
            owner.unlink(missing_ok=True)
            folder.rmdir()


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def _remove_one(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _unlock(folder: Path) -> None:
    """Open the folders that a student's code made read-only; not those that a link leads to."""
    for here, folders, _ in os.walk(folder):
        for path in (Path(here) / name for name in folders):
            with contextlib.suppress(OSError):
                if not path.is_symlink():
                    path.chmod(0o700)
