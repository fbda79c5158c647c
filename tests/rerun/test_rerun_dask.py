"""A suite over a real Dask cluster of processes: a worker is killed in mid-run, and nothing is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit.course.notebook import dumps, normalise
from labkit.errors import InputError
from labkit.rerun import cluster, spec
from labkit.rerun import round as rounds
from labkit.rerun.suite import load

ROOT = Path(__file__).resolve().parents[2]

# Each run leaves a trace, and waits for a file that comes after the kill.
WORK = """
import os, time
from pathlib import Path
from labkit import paths
traces = Path(traces)
(traces / f"job-{number}.{os.getpid()}").touch()
end = time.monotonic() + 60
while not (traces / "go").exists() and time.monotonic() < end:
    time.sleep(0.05)
(paths.results_dir() / "made.bin").write_bytes(bytes(range(256)) * number)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "课程 a b"
    (home / "traces").mkdir(parents=True)
    cells = [
        {"cell_type": "code", "source": source, "metadata": {"tags": tags}, "outputs": []}
        for source, tags in (('number = 1\ntraces = "."', ["parameters"]), (WORK.strip(), []))
    ]
    text = dumps(normalise({"cells": cells, "metadata": {}}))
    (home / "work.ipynb").write_text(text, encoding="utf-8")
    where = json.dumps(str(home / "traces"))
    suite = "version: 1\nexclusive: false\njobs:\n- notebook: work.ipynb\n  name: job\n"
    suite += f"  parameters: {{traces: {where}}}\n  matrix: {{number: [1, 2, 3]}}\n"
    (home / "suite.yaml").write_text(suite, encoding="utf-8")
    return home


@pytest.fixture
def workers() -> Iterator[Any]:
    """Two worker processes of one thread each, on this machine."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
    ) as made:
        yield made


def until(true: Any, seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return found


@pytest.mark.skipif(os.name != "posix", reason="kills by signal")
def test_a_worker_that_is_killed_loses_no_result(folder: Path, workers: Any) -> None:
    traces = folder / "traces"
    command = [sys.executable, "-m", "labkit.cli", "rerun", "suite.yaml", "--out", "results"]
    command += ["--dask", workers.scheduler_address]
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    first = until(lambda: len(found := list(traces.glob("job-*"))) == 2 and found)
    kernel = psutil.Process(int(first[0].suffix[1:]))
    job, worker = kernel.parents()[:2]
    os.kill(worker.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([worker, job, kernel], timeout=60)
    assert not alive, "a killed worker left its job behind"
    (traces / "go").touch()
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    (found,) = (folder / "results").glob("*/summary.json")
    assert json.loads(found.read_text(encoding="utf-8"))["counts"]["passed"] == 3
    for number in (1, 2, 3):
        made = found.parent / "jobs" / f"job-number={number}" / "files" / "made.bin"
        assert made.read_bytes() == bytes(range(256)) * number
    attempts = [len(list(traces.glob(f"job-{number}.*"))) for number in (1, 2, 3)]
    assert sorted(attempts) == [1, 1, 2], "the job of the killed worker ran again, the others once"


def test_workers_with_another_labkit_are_told_so_and_none_at_all_ends_the_wait(
    folder: Path, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "traces" / "go").touch()
    suite = load(folder / "suite.yaml")
    client = cluster.connect(workers.scheduler_address)
    try:
        monkeypatch.setattr(spec, "source_hash", lambda: "another")
        made = rounds.begin(suite, folder / "out", resume=False)
        cluster.run(made, client, on_job=lambda job, entry: None)
        failures = [entry["failure"]["message"] for entry in made.entries.values()]
        assert len(failures) == 3 and all("the same commit on all" in words for words in failures)
        workers.scale(0)
        until(lambda: not client.nthreads())
        again = rounds.begin(suite, folder / "out", resume=False)
        cluster.run(again, client, on_job=lambda job, entry: None, no_worker_seconds=1.0)
        assert again.exit_code == 1 and again.entries == {}
        assert "no worker for 1 seconds: 3 jobs did not run" in again.notes[-1]
    finally:
        client.close()


def test_an_address_where_nobody_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 1)
    with pytest.raises(InputError, match=r"--dask: got tcp://127\.0\.0\.1:9"):
        cluster.connect("tcp://127.0.0.1:9")
