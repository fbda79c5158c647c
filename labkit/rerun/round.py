"""One round of a suite in its folder: its state file, what can be kept of it, and the summary.

OUT/2026-12-01T03-00-00Z/summary.json     state and summary, rewritten after every job
OUT/2026-12-01T03-00-00Z/jobs/ID/…        executed notebook, result and files of a job
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.atomic import write_json
from labkit.errors import InputError, refuse
from labkit.rerun import archive, spec
from labkit.rerun.suite import Job, Suite
from labkit.tables import Table, table

VERSION = 1
_FOLDER = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ(-\d+)?")


@dataclass
class Round:
    """A round that runs, or ran.

    Attributes:
        entries: results by job id; those of jobs that are kept are there from the start.
        todo: the jobs that have to run, in the suite's order.
        notes: what the user should know, such as a damaged state file.
    """

    suite: Suite
    folder: Path
    started: str
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    todo: list[Job] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 every job passed, 1 one failed or did not run, 130 interrupted."""
        if self.interrupted:
            return 130
        passed = all(self.status(job) == "passed" for job in self.suite.jobs)
        return 0 if passed else 1

    def status(self, job: Job) -> str:
        """passed, failed or not run."""
        return str(self.entries.get(job.id, {}).get("status", "not run"))

    def done(self, job: Job, packed: bytes) -> dict[str, Any]:
        """Keep what a job left; the files are there before the state says so."""
        try:
            result = archive.result_of(packed)
            archive.unpack(packed, self.folder / "jobs" / job.id)
        except (InputError, OSError) as error:
            result = {"id": job.id, "notebook": job.notebook, "parameters": job.values, "status": "failed"}
            result["failure"] = {"error": type(error).__name__, "message": f"could not be kept: {error}"}
        return self.note(job, result)

    def note(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        """Put a result into the state file; a disk that is full costs the state, not the other jobs."""
        entry = {"fingerprint": spec.fingerprint(job), **result}
        self.entries[job.id] = entry
        try:
            self.write()
        except OSError as error:
            self.notes.append(f"summary.json was not written: {error.strerror or error}")
        return entry

    def write(self, *, finished: bool = False) -> None:
        """Write summary.json, atomically."""
        jobs = {job.id: self.entries.get(job.id, {"status": "not run"}) for job in self.suite.jobs}
        states = [one["status"] for one in jobs.values()]
        ended = datetime.now(UTC).isoformat(timespec="seconds") if finished else None
        head = {"version": VERSION, "suite": self.suite.name, "started": self.started, "finished": ended}
        counts = {state: states.count(state) for state in ("passed", "failed", "not run")}
        write_json(self.folder / "summary.json", {**head, "counts": counts, "kept": self.kept, "jobs": jobs})

    def summary(self) -> Table:
        """One row a job."""
        rows = []
        for job in self.suite.jobs:
            entry = self.entries.get(job.id, {})
            cells, failure = entry.get("cells"), entry.get("failure")
            row: dict[str, Any] = {"job": job.id, "status": self.status(job)}
            row["status"] += " (kept)" if job.id in self.kept else ""
            row["cells"] = f"{cells['done']}/{cells['total']}" if cells else None
            row["seconds"] = entry.get("seconds")
            row["why"] = _one_line(f"{failure['error']}: {failure['message']}") if failure else None
            rows.append(row)
        return table(rows, formats={"seconds": ".1f"}, origins=False)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:99] + "…"


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the suite's folder; a second run of it, such as the scheduler's next one, is refused.

    Raises:
        InputError: another run holds it, or the folder cannot be made.
    """
    from filelock import FileLock, Timeout

    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        refuse("--out", f"{out}, where another run is at work", "a folder of its own", "wait for its end")
    except OSError as error:
        raise InputError("--out", f"{out}: {error.strerror}", "a folder that can be written") from error
    try:
        yield
    finally:
        lock.release()


def begin(suite: Suite, out: Path, *, resume: bool) -> Round:
    """A new round, or the newest one again with what it has.

    Jobs of a resumed round that passed are kept unless the notebook, the values, the device or labkit
    changed since; their files have to be there.
    """
    last = max((p for p in out.glob("*") if p.is_dir() and _FOLDER.fullmatch(p.name)), default=None)
    if not resume or last is None:
        return _new(suite, out, last)
    entries, note = _state(last)
    made = Round(suite, last, str(entries.pop("", {}).get("started") or _now()))
    made.notes += [note] if note else []
    for job in suite.jobs:
        entry = entries.get(job.id)
        if entry and _still_good(entry, job, last):
            made.entries[job.id] = entry
            made.kept.append(job.id)
        else:
            made.todo.append(job)
    changed = [job.id for job in made.todo if entries.get(job.id, {}).get("status") == "passed"]
    if changed:
        words = "notebook, values, device or labkit changed since, or their files are gone"
        made.notes.append(f"passed before, and run again ({words}): {', '.join(changed)}")
    return made


def _new(suite: Suite, out: Path, last: Path | None) -> Round:
    started = _now()
    name = started.replace(":", "-").replace("+00-00", "Z")
    folder, number = out / name, 1
    while folder.exists():
        folder, number = out / f"{name}-{number}", number + 1
    made = Round(suite, folder, started, todo=list(suite.jobs))
    if last is not None:
        entries, _ = _state(last)
        head = entries.pop("", {})
        if entries and head.get("finished") is None:
            done = sum(entry.get("status") == "passed" for entry in entries.values())
            words = f"{done} of {len(entries)} jobs passed; --resume goes on with it instead of a new round"
            made.notes.append(f"the round {last.name} did not end: {words}")
    try:
        folder.mkdir(parents=True)
        made.write()
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()  # --resume would take it for the newest round
        raise InputError("--out", f"{folder}: {error.strerror}", "a folder that can be written") from error
    return made


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _state(folder: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Entries of a state file, its head under ""; and what is wrong with it."""
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            return {}, f"{folder.name}: the state is of another version; every job runs again"
        jobs = {str(k): v for k, v in found["jobs"].items() if isinstance(v, dict) and "status" in v}
        return {**jobs, "": {key: found.get(key) for key in ("started", "finished")}}, ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, f"{folder.name}: no readable state; every job runs again"


def _still_good(entry: dict[str, Any], job: Job, folder: Path) -> bool:
    same = entry.get("status") == "passed" and entry.get("fingerprint") == spec.fingerprint(job)
    return same and (folder / "jobs" / job.id / archive.RESULT).is_file()
