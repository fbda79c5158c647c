"""The process that runs one job: a job file in, an archive out. ``python -m labkit.rerun.work SPEC OUT``

It ends when whoever started it does: its standard input is a pipe that closes then, also after a kill.
Events go to standard output, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.course import environment
from labkit.course.cli import terminate_as_interrupt
from labkit.course.execute import Run, run_notebook
from labkit.course.lab import pick_device
from labkit.course.notebook import dumps
from labkit.errors import InputError
from labkit.rerun import archive, spec
from labkit.rerun.perform import failed
from labkit.rerun.suite import Job

_GRACE = 15.0


def main(arguments: list[str]) -> int:
    """Run the job of the first file; write the archive to the second one."""
    job, source = spec.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    # what a cell's native code prints goes elsewhere: standard output is for events
    events = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def say(event: str, **more: Any) -> None:
        events.write(json.dumps({"event": event, **more}) + "\n")

    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with terminate_as_interrupt():
            lock = _machine_lock(say) if job.exclusive else None
            say("start")
            # what is left when this process is killed lies with the job, and its starter removes it
            tempfile.tempdir = str(Path(arguments[0]).resolve().parent)
            packed = perform(job, source, say)
            if lock is not None:
                lock.release()
    except KeyboardInterrupt:
        return 130
    Path(arguments[1]).write_bytes(packed)
    return 0


def _end_with_parent() -> None:
    """Standard input ends when the starter has gone: leave, and take the kernel along."""
    while os.read(0, 4096):  # not sys.stdin: a thread inside of its buffer keeps Python from ending
        pass
    if os.name == "posix":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
    os._exit(1)


def _machine_lock(say: Any) -> Any:
    """Wait until no other job runs on this machine; the system frees the lock of one that dies."""
    from filelock import FileLock, Timeout

    # where the cache cannot be written, all runs of this machine meet in its temporary folder
    for folder in (paths.cache_dir(), Path(tempfile.gettempdir())):
        lock = FileLock(folder / "labkit-rerun.lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            say("waiting")
            lock.acquire(poll_interval=0.2)
        except OSError:
            continue
        return lock
    return None  # nowhere to meet


def perform(job: Job, source: str, say: Any) -> bytes:
    """Run a job in this process; what goes wrong is in the archive.

    Args:
        source: hash that labkit must have here; "" for any.
    """
    result: dict[str, Any] = {
        "id": job.id,
        "notebook": job.notebook,
        "status": "failed",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": job.values,
        "device": None,
        "seconds": 0.0,
        "cells": {"done": 0, "total": 0},
        "failure": None,
        "source": spec.source_hash(),
        **environment.facts(),
    }
    values = dict(job.values)
    try:
        if source not in ("", spec.source_hash()):
            got = f"labkit with sources {spec.source_hash()}"
            raise InputError(
                "labkit", got, f"{source}, as where the suite was started", "the same commit on all"
            )
        if job.device:
            values["device"] = result["device"] = pick_device(job.device)
    except InputError as error:
        return archive.pack(failed(result, "InputError", str(error)))
    with tempfile.TemporaryDirectory(prefix="labkit-job", ignore_cleanup_errors=True) as scratch:
        files = Path(scratch) / "files"
        files.mkdir()
        done = run_notebook(
            job.book,
            values,
            timeout=job.cell_timeout,
            cwd=files,
            results=files,
            on_cell=lambda count, total: say("cell", done=count, total=total),
        )
        return archive.pack(_told(result, done), dumps(done.book), files)


def _told(result: dict[str, Any], done: Run) -> dict[str, Any]:
    result |= {"seconds": round(done.seconds, 2), "cells": {"done": done.done, "total": done.total}}
    if (failure := done.failure) is None:
        return result | {"status": "passed"}
    made = failed(result, failure.ename, failure.evalue)
    made["failure"] |= {"code_cell": failure.number, "of": failure.of, "source": failure.source[:2000]}
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
