"""Local progress: one small JSON file per person; trouble with it is a note, never an error."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from labkit import paths
from labkit.atomic import write_json
from labkit.check.verdict import Verdict

T = TypeVar("T")

VERSION = 1
_LOCK_STALE_SECONDS = 5.0
# on Windows a virus scanner or another reader holds a file for a moment
_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Entry:
    """One exercise's history: ``state`` never goes back from passed; ``best`` is the best score."""

    state: str
    tries: int
    best: float | None


def path() -> Path:
    """Where the progress is kept; ``LABKIT_STATE`` moves it."""
    return paths.state_dir() / "progress.json"


def load() -> tuple[dict[str, Entry], str]:
    """(entries by exercise id, note). The note tells of a file that was put aside or cannot be read."""
    try:
        return _read()
    except OSError as error:
        return {}, f"the progress file cannot be read ({_why(error)}); nothing in it is lost"


def _read() -> tuple[dict[str, Entry], str]:
    """As :func:`load`; OSError when the file is there and its entries cannot be had or put aside."""
    file = path()
    try:
        text = _patiently(lambda: file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}, ""
    try:
        return _entries(json.loads(text.decode("utf-8"))), ""
    except (ValueError, RecursionError):
        return {}, _put_aside(file)


def _patiently(action: Callable[[], T]) -> T:
    """Do ``action``; while it is refused, try again for about a second."""
    deadline = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            return action()
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _entries(raw: Any) -> dict[str, Entry]:
    if (
        not isinstance(raw, dict)
        or raw.get("version") != VERSION
        or not isinstance(raw.get("exercises"), dict)
    ):
        raise ValueError("not a progress file of this version")
    out = {}
    for key, row in raw["exercises"].items():
        if not isinstance(row, dict) or row.get("state") not in ("not yet", "passed"):
            raise ValueError(f"bad entry {key}")
        best = row.get("best")
        if not isinstance(row.get("tries"), int) or not (best is None or isinstance(best, (int, float))):
            raise ValueError(f"bad entry {key}")
        out[key] = Entry(row["state"], row["tries"], best)
    return out


def _put_aside(file: Path) -> str:
    """Rename a damaged file so that nothing is lost, and say where it went; OSError when it stays."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    aside = file.with_name(f"{file.stem}.damaged-{stamp}.json")
    try:
        _patiently(lambda: file.replace(aside))
    except OSError as error:
        raise OSError(error.errno, f"it is damaged, and cannot be moved: {_why(error)}") from error
    return f"the progress file was damaged; it is kept as {aside.name}, and progress starts anew"


def record(exercise: str, verdict: Verdict) -> str:
    """Remember a verdict; "not attempted" leaves no trace. Nothing here is an error.

    Returns:
        "" when it was kept as usual; a sentence when a damaged file was put aside; and
        ``"not saved: ..."`` when it was not kept. What was recorded before is never lost.
    """
    if verdict.state == "not attempted":
        return ""
    try:
        return _record(exercise, verdict)
    except OSError as error:
        return f"not saved: {_why(error)}"


def _record(exercise: str, verdict: Verdict) -> str:
    folder = path().parent
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, f"the folder {folder} cannot be written")  # no use to wait
    with _lock(path().with_suffix(".lock")):
        entries, note = _read()  # raises rather than letting an empty set replace what is there
        entries[exercise] = _updated(entries.get(exercise), verdict)
        rows = {
            key: {"state": entry.state, "tries": entry.tries, "best": entry.best}
            for key, entry in sorted(entries.items())
        }
        _patiently(lambda: write_json(path(), {"version": VERSION, "exercises": rows}))
    return note


def _updated(old: Entry | None, verdict: Verdict) -> Entry:
    was_passed = old is not None and old.state == "passed"
    best = old.best if old else None
    if verdict.state == "passed" and verdict.score is not None:
        pick = min if verdict.better == "lower" else max
        best = verdict.score if best is None else pick(best, verdict.score)
    state = "passed" if was_passed or verdict.state == "passed" else "not yet"
    return Entry(state, (old.tries if old else 0) + 1, best)


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Two notebooks of one person may record at the same time; a crashed holder is forgotten in seconds."""
    deadline = time.monotonic() + 2 * _LOCK_STALE_SECONDS
    while True:
        try:
            os.close(_patiently(lambda: os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)))
            break
        except FileExistsError:
            with contextlib.suppress(OSError):
                # a time in the future is a clock that was set back
                if abs(time.time() - file.stat().st_mtime) > _LOCK_STALE_SECONDS:
                    file.unlink()
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"{file.name} is held by another notebook") from None
            time.sleep(0.02)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # what stays behind is stale in seconds
            _patiently(lambda: file.unlink(missing_ok=True))
