"""``labkit rerun`` as people run it: real processes, papermill, a time-out, an interrupt in mid-run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from labkit.course.notebook import dumps, normalise
from labkit.rerun import spec
from labkit.rerun.archive import result_of
from labkit.rerun.perform import perform
from labkit.rerun.suite import load
from labkit.results import history
from labkit.scratch import Scratch

ROOT = Path(__file__).resolve().parents[2]

NOTEBOOK = """
import json, os, sys, tempfile, time
from pathlib import Path
from labkit import paths
here = paths.results_dir()
(here / "made.txt").write_text(f"{us} {device}", encoding="utf-8")
left = tempfile.mkdtemp()
"""
WRITES_A_RECORD = """
from labkit.bench.record import Entry, Record
entry = Entry("sweep", "kernel", "w4", 1, 2, 3, 32, "timed", samples_us=[us] * 5)
device_facts = {"name": "a card", "key": "card"}
record = Record("tiny", "measured", "labkit rerun", started, device_facts, {}, {}, entries=[entry])
record.write(here / "bench" / record.file_name)
"""
FAILS = """
if us < 0:
    raise ValueError("below zero")
"""
WAITS = """
if wait:
    Path(wait).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(300)
"""


def notebook(path: Path) -> None:
    """One with parameters that can pass, fail, or wait for ever."""
    parameters = 'device = "auto"\nus = 10.0\nstarted = "2026-12-01T00:00:00+00:00"\nwait = ""'
    sources = [
        (parameters, ["parameters"]),
        *((text, []) for text in (NOTEBOOK, WRITES_A_RECORD, FAILS, WAITS)),
    ]
    cells = [
        {"cell_type": "code", "source": source.strip(), "metadata": {"tags": tags}, "outputs": []}
        for source, tags in sources
    ]
    path.write_text(dumps(normalise({"cells": cells, "metadata": {}})), encoding="utf-8")


def labkit(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "labkit.cli", *arguments, "--out", str(folder / "results")]


def environment(folder: Path) -> dict[str, str]:
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "LABKIT_CACHE": str(folder / "cache")}
    return env | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder / "tmp"))


def left_behind(folder: Path) -> list[str]:
    """What lies in the temporary folder of :func:`environment`."""
    return sorted(str(path.relative_to(folder / "tmp")) for path in (folder / "tmp").iterdir())


def summary(folder: Path) -> dict[str, Any]:
    (found,) = (folder / "results").glob("*/summary.json")
    return json.loads(found.read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "课程 {a} b"
    (home / "tmp").mkdir(parents=True)
    notebook(home / "tiny.ipynb")
    return home


def test_a_suite_runs_fails_in_part_and_leaves_records_for_the_report(folder: Path) -> None:
    marker = folder / "waits"
    text = f"""
version: 1
device: cpu
jobs:
  - {{notebook: tiny.ipynb, name: first}}
  - {{notebook: tiny.ipynb, name: below zero, parameters: {{us: -1.0}}}}
  - {{notebook: tiny.ipynb, name: too long, timeout: 8, parameters: {{wait: {json.dumps(str(marker))}}}}}
  - {{notebook: tiny.ipynb, name: second, parameters: {{us: 20.0, started: "2026-12-02T00:00:00+00:00"}}}}
"""
    (folder / "suite.yaml").write_text(text, encoding="utf-8")
    command = labkit(folder, "rerun", "suite.yaml")
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = summary(folder)
    assert found["counts"] == {"passed": 2, "failed": 2, "not run": 0}
    failed = found["jobs"]["below-zero"]
    assert failed["failure"]["error"] == "ValueError" and failed["failure"]["code_cell"] == 5
    assert {"versions", "commit", "machine", "device"} <= set(failed)
    assert found["jobs"]["too-long"]["failure"]["error"] == "Timeout"
    if marker.is_file():  # a busy machine may have ended it before its kernel was up
        assert not psutil.pid_exists(int(marker.read_text(encoding="utf-8")))
    (made,) = (folder / "results").glob("*/jobs/first/files/made.txt")
    assert made.read_text(encoding="utf-8") == "10.0 cpu"
    executed = json.loads((made.parents[1] / "notebook.ipynb").read_text(encoding="utf-8"))
    assert any("injected-parameters" in cell["metadata"].get("tags", []) for cell in executed["cells"])
    # the failing notebook had written its record before it failed: that is a result as well
    (one,) = history.of_folders([folder / "results"]).found
    assert [point.median for point in one.points if point.median > 0][-1] == 20.0
    assert left_behind(folder) == []


@pytest.mark.skipif(os.name != "posix", reason="SIGINT reaches a child in another way on Windows")
@pytest.mark.usefixtures("hang_up_ends")
@pytest.mark.parametrize("how", ["SIGINT", "SIGHUP", "SIGKILL"])  # SIGTERM: test_course_leftovers
def test_a_run_that_is_stopped_keeps_what_was_done_and_leaves_no_process_and_no_file(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = folder / "waits"
    text = f"""
version: 1
device: cpu
exclusive: false
jobs:
  - {{notebook: tiny.ipynb, name: first}}
  - {{notebook: tiny.ipynb, name: waits, parameters: {{wait: {json.dumps(str(marker))}}}}}
  - {{notebook: tiny.ipynb, name: last}}
"""
    (folder / "suite.yaml").write_text(text, encoding="utf-8")
    run = subprocess.Popen(
        labkit(folder, "rerun", "suite.yaml"), cwd=folder, env=environment(folder), stdout=subprocess.PIPE
    )
    until(lambda: marker.is_file() and marker.read_text(encoding="utf-8"))
    below = psutil.Process(run.pid).children(recursive=True)
    assert len(below) >= 2  # the job's process and its kernel
    run.send_signal(getattr(signal, how))
    try:
        run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == (130 if how != "SIGKILL" else -signal.SIGKILL)
    found = summary(folder)
    assert found["counts"]["passed"] == 1 and found["finished"] is None
    _, alive = psutil.wait_procs(below, timeout=60)
    assert alive == []
    if how == "SIGKILL":
        (left,) = left_behind(folder)
        assert left.startswith("labkit-run-")
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
        first = load(folder / "suite.yaml").jobs[0]
        assert result_of(perform(spec.dumps(first)))["status"] == "passed"
    assert left_behind(folder) == []


@pytest.mark.skipif(os.name != "posix", reason="kills by signal")
def test_a_job_whose_process_is_killed_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system does when memory runs out, and as a time-out does on Windows."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    kill = "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)"
    cell = {"cell_type": "code", "source": kill, "metadata": {}, "outputs": []}
    text = dumps(normalise({"cells": [cell], "metadata": {}}))
    (folder / "kills.ipynb").write_text(text, encoding="utf-8")
    suite = "version: 1\nexclusive: false\njobs: [{notebook: kills.ipynb}]\n"
    (folder / "suite.yaml").write_text(suite, encoding="utf-8")
    (job,) = load(folder / "suite.yaml").jobs
    assert result_of(perform(spec.dumps(job)))["failure"]["error"] == "ProcessDied"
    # its kernel lives on for a moment and may write meanwhile: that goes with the next job
    until(lambda: Scratch("labkit-run-").close() or not left_behind(folder))


def test_a_job_waits_while_another_one_holds_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once would time each other; waiting for its turn is not counted as the job's own time."""
    monkeypatch.setenv("LABKIT_CACHE", str(folder / "cache"))
    (folder / "cache").mkdir()
    (folder / "suite.yaml").write_text("version: 1\njobs: [{notebook: tiny.ipynb}]\n", encoding="utf-8")
    (job,) = load(folder / "suite.yaml").jobs
    lock = FileLock(folder / "cache" / "labkit-rerun.lock", thread_local=False)
    lock.acquire()
    events: list[str] = []

    def note(event: dict[str, Any]) -> None:
        events.append(event["event"])
        if event["event"] == "waiting":
            lock.release()

    assert result_of(perform(spec.dumps(job), note))["status"] == "passed"
    assert events[:2] == ["waiting", "start"] and events[-1] == "cell"


def test_a_cache_that_cannot_be_written_costs_no_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is then in the machine's temporary folder."""
    (folder / "cache").write_text("a file where the folder should be", encoding="utf-8")
    monkeypatch.setenv("LABKIT_CACHE", str(folder / "cache"))
    monkeypatch.setenv("TMPDIR", str(folder))
    (folder / "suite.yaml").write_text("version: 1\njobs: [{notebook: tiny.ipynb}]\n", encoding="utf-8")
    (job,) = load(folder / "suite.yaml").jobs
    assert result_of(perform(spec.dumps(job)))["status"] == "passed"
    assert (folder / "labkit-rerun.lock").is_file() or os.name == "nt"


def until(true: Any, seconds: float = 60.0) -> None:
    """Wait for something to become true; a limit only against waiting for ever."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
