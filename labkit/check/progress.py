"""Local progress: one small JSON file per person; losing it is never an error."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.atomic import write_json
from labkit.check.verdict import Verdict

VERSION = 1
_LOCK_STALE_SECONDS = 5.0


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
    """(entries by exercise id, note). The note is empty unless a damaged file was put aside."""
    file = path()
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return _entries(raw), ""
    except (FileNotFoundError, NotADirectoryError):
        return {}, ""
    except OSError as error:
        return {}, f"progress cannot be read ({error.strerror}); it starts empty in this session"
    except ValueError:
        return {}, _put_aside(file)


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
    """Rename a damaged file so that nothing is lost, and say where it went."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    aside = file.with_name(f"{file.stem}.damaged-{stamp}.json")
    try:
        file.replace(aside)
    except OSError:
        return "the progress file is damaged and cannot be moved; it starts empty in this session"
    return f"the progress file was damaged; it is kept as {aside.name}, and progress starts anew"


def record(exercise: str, verdict: Verdict) -> None:
    """Remember a verdict; "not attempted" leaves no trace. A folder that cannot be written is no error."""
    if verdict.state == "not attempted":
        return
    with contextlib.suppress(OSError):
        path().parent.mkdir(parents=True, exist_ok=True)
        with _lock(path().with_suffix(".lock")):
            entries, _ = load()
            entries[exercise] = _updated(entries.get(exercise), verdict)
            rows = {
                key: {"state": entry.state, "tries": entry.tries, "best": entry.best}
                for key, entry in sorted(entries.items())
            }
            write_json(path(), {"version": VERSION, "exercises": rows})


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
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > _LOCK_STALE_SECONDS:
                    file.unlink()
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
