"""How far an answer reaches: files of others, and programs that outlive the judge."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from labkit.classroom import samples
from labkit.classroom.grade import grade, prepare
from labkit.classroom.process import Child

FILE = "00_start_here.ipynb"


def inside(body: str) -> str:
    """A cell whose answer does ``body``."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"def headline(findings):\n{lines}\n\ncheck.headline(headline)"


def test_what_others_hand_in_cannot_be_copied(tmp_path: Path) -> None:
    """From the folder of all, or from the copies of those that are graded at the same time."""
    right = samples.hand_in(tmp_path / "in", "able", samples.notebook("00", right=None), FILE)
    body = f"""
import glob, json, os, tempfile
cells = []
for one in [{str(right)!r}, *glob.glob(os.path.dirname(os.getcwd()) + "-*/handed-in.ipynb")]:
    cells += json.load(open(one))["cells"]
scope = {{}}
for cell in cells:
    text = "".join(cell["source"])
    if "def headline" in text:
        exec(text.rpartition("check.")[0], scope)
return scope["headline"](findings)"""
    cells = {"headline": inside(body.strip())}
    samples.hand_in(tmp_path / "in", "copies", samples.notebook("00", right=None, cells=cells), FILE)
    able, copies = grade(prepare(tmp_path / "in", chapters="00", timeout=20, jobs=2)).rows
    assert able.points == 5
    assert copies.points == 4 and f"a look into able/{FILE}" in " ".join(copies.flags)


def test_answers_read_what_the_course_and_python_have(tmp_path: Path) -> None:
    """The device table, a module of the library, a file of their own."""
    body = """
import json, sysconfig
from labkit import paths
json.loads((paths.data_dir() / "devices.json").read_text(encoding="utf-8"))
open(sysconfig.get_paths()["stdlib"] + "/os.py", encoding="utf-8").read()
open("mine.txt", "w", encoding="utf-8").close()
open("mine.txt", encoding="utf-8").read()
import colorsys, this  # not loaded yet
states = [finding["state"] for finding in findings]
return f"{states.count('ok')} ok, {states.count('note')} notes, {states.count('problem')} problems\""""
    cells = {"headline": inside(body.strip())}
    samples.hand_in(tmp_path / "in", "one", samples.notebook("00", right=None, cells=cells), FILE)
    (row,) = grade(prepare(tmp_path / "in", chapters="00", timeout=20, jobs=1)).rows
    assert row.points == 5 and not row.flags, row


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are kept on Linux")
@pytest.mark.parametrize("how", ["it is stopped", "it is done", "it dies"])
def test_a_program_that_leaves_session_and_environment_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """However it was started: the judge is the parent of every orphan, until all of them are ended."""
    script, said = tmp_path / "judge.py", tmp_path / "pid"
    script.write_text(
        f"""
import json, os, sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from pathlib import Path
from labkit.classroom import child, walls

def judged(request, own, channel, stands):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path({str(said)!r} + ".part").write_text(str(os.getpid()), encoding="utf-8")
            os.rename({str(said)!r} + ".part", {str(said)!r})
            for fd in range(64):
                try:
                    os.close(fd)
                except OSError:
                    pass
            os.execve("/bin/sleep", ["sleep", "300"], {{}})
        os._exit(0)
    while not Path({str(said)!r}).is_file():
        time.sleep(0.01)
    if {how!r} == "it is stopped":
        channel.send(event="begin", exercise="x")
        time.sleep(300)
    if {how!r} == "it dies":
        time.sleep(2)
        os._exit(3)
    return True

walls.build = lambda _: ""
child._judge = judged
child.main()
""",
        encoding="utf-8",
    )
    monkeypatch.setattr("labkit.classroom.process._SCRIPT", script)
    ended = Child(tmp_path, {"folder": str(tmp_path)}).run(3, 1 << 30, threading.Event())
    assert ended.whole is (how == "it is done") and (ended.exercise == "x") is (how == "it is stopped")
    pid, end = int(said.read_text(encoding="utf-8")), time.monotonic() + 60
    # a signal takes its time to arrive
    while any(one.pid == pid and one.status() != psutil.STATUS_ZOMBIE for one in psutil.process_iter()):
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.05)
