"""What a run of a notebook leaves in the temporary folder: nothing, however the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from notebook_builder import chapter

from labkit.course.execute import run_notebook
from labkit.course.notebook import read


@pytest.mark.parametrize("end", ["1", "1/0", "import os\nos._exit(3)"])
def test_what_a_notebook_leaves_in_its_temporary_folder_goes_with_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its kernel is killed: a TemporaryDirectory that a cell keeps has no chance to remove itself."""
    folder = tmp_path / "临时"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    keeps = "import subprocess, sys, tempfile\nkept = tempfile.TemporaryDirectory()\n"
    keeps += "child = 'import tempfile; print(tempfile.mkdtemp())'\n"
    keeps += "print(kept.name, subprocess.check_output([sys.executable, '-c', child], encoding='utf-8'))"
    book = read(chapter(tmp_path / "notebooks", "00_x", keeps, end))
    done = run_notebook(book, {})
    assert (done.failure is None) == (end == "1")
    said = done.book["cells"][3]["outputs"][0]["text"].split()
    assert len(said) == 2 and all(Path(path).parents[1].parent == folder for path in said)
    assert list(folder.iterdir()) == []


_WAITS = """
import sys, time
from labkit.course.cli import terminate_as_interrupt
from labkit.scratch import Scratch
try:
    with terminate_as_interrupt(), Scratch("x-"):
        print("ready", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.usefixtures("hang_up_ends")
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_end_lets_a_command_clean_up(tmp_path: Path, how: str) -> None:
    with _waiting(tmp_path) as process:
        process.send_signal(getattr(signal, how))
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_under_nohup_a_command_runs_on_when_the_terminal_ends() -> None:
    ignored = "import signal\nfrom labkit.course.cli import terminate_as_interrupt\n"
    ignored += "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nwith terminate_as_interrupt():\n"
    ignored += "    signal.raise_signal(signal.SIGHUP)\n    print('on')\n"
    done = subprocess.run([sys.executable, "-c", ignored], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "on\n"


def _waiting(folder: Path) -> subprocess.Popen[str]:
    """A command that has a folder and waits."""
    env = dict(os.environ) | {"TMPDIR": str(folder)}
    command = [sys.executable, "-c", _WAITS]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, encoding="utf-8")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process
