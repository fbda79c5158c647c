"""Run one job in a process of its own: text in, bytes out, whatever becomes of it.

The same function serves a suite that runs here and a worker of a Dask cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from labkit.rerun import archive, spec
from labkit.rerun.suite import Job
from labkit.scratch import Scratch

OnEvent = Callable[[dict[str, Any]], None]
_END_SECONDS = 20.0
_ROOT = str(Path(__file__).resolve().parents[2])


def perform(text: str, on_event: OnEvent | None = None) -> bytes:
    """Run a job.

    Args:
        text: of :func:`labkit.rerun.spec.dumps`.
        on_event: called, from another thread, with each event of the job's process.

    Returns:
        The archive (:mod:`labkit.rerun.archive`); its result says "failed" when the notebook failed, took
        longer than the job may, or its process died. Only an interrupt raises: the process has ended then.
    """
    job, _ = spec.loads(text)
    with Scratch("labkit-run-") as scratch:
        return _run(job, text, scratch, on_event)


def _run(job: Job, text: str, scratch: Path, on_event: OnEvent | None) -> bytes:
    given, made = scratch / "job.json", scratch / "job.zip"
    given.write_text(text, encoding="utf-8")
    seen: dict[str, Any] = {}
    with (scratch / "errors.txt").open("wb") as errors:
        process = _start(given, made, errors, scratch)
        reader = threading.Thread(target=_read, args=(process, seen, on_event), daemon=True)
        reader.start()
        try:
            late = _late(process, seen, job.timeout)
        except BaseException:
            _stop(process)
            raise
        if late:
            _stop(process)
    if not late and process.returncode == 0 and made.is_file():
        return made.read_bytes()
    cell = seen.get("cell", {"done": 0, "total": 0})
    result: dict[str, Any] = {"id": job.id, "notebook": job.notebook, "parameters": job.values}
    result |= {
        "device": None,
        "seconds": job.timeout if late else 0.0,
        "cells": {k: cell[k] for k in ("done", "total")},
    }
    if late:
        words = f"the job took longer than {job.timeout:g} seconds; raise its timeout, or give it less to do"
        return archive.pack(failed(result, "Timeout", words))
    tail = (scratch / "errors.txt").read_text(encoding="utf-8", errors="replace").strip()[-1500:]
    words = f"the job's process ended with {process.returncode} (killed, out of memory, or a crash). {tail}"
    return archive.pack(failed(result, "ProcessDied", words.strip()))


def failed(result: dict[str, Any], name: str, message: str) -> dict[str, Any]:
    """A result that says what failed."""
    return result | {"status": "failed", "failure": {"error": name, "message": message[:2000]}}


def _start(given: Path, made: Path, errors: IO[bytes], scratch: Path) -> subprocess.Popen[bytes]:
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [env.get("PYTHONPATH")])])
    # a group of its own: Ctrl-C in the terminal is ours to answer, and the job ends in order
    apart: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return subprocess.Popen(
        [sys.executable, "-m", "labkit.rerun.work", str(given), str(made)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        cwd=scratch,
        env=env,
        **apart,
    )


def _read(process: subprocess.Popen[bytes], seen: dict[str, Any], on_event: OnEvent | None) -> None:
    """Events of the process, until its output ends."""
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(line)
            seen[event["event"]] = event | {"at": time.monotonic()}
            if on_event is not None:
                on_event(event)


def _late(process: subprocess.Popen[bytes], seen: dict[str, Any], timeout: float) -> bool:
    """Wait for the end. True when the job took longer than it may; waiting for its turn does not count."""
    while True:
        try:
            process.wait(timeout=0.2)
            return False
        except subprocess.TimeoutExpired:
            began = seen.get("start")
            if began is not None and time.monotonic() - began["at"] > timeout:
                return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process in order, so that its kernel goes with it; kill it when it does not."""
    with contextlib.suppress(OSError):
        process.terminate()
    try:
        process.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
