"""Grading against tricks and accidents: real children, chapter 00; nobody else's marks move."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

from labkit.classroom import samples, walls
from labkit.classroom.grade import grade, prepare
from labkit.classroom.process import Child
from labkit.classroom.scores import Graded

FILE = "00_start_here.ipynb"
RIGHT = """def headline(findings):
    states = [finding["state"] for finding in findings]
    return f"{states.count('ok')} ok, {states.count('note')} notes, {states.count('problem')} problems"


check.headline(headline)"""
WRONG = 'def headline(findings):\n    return "x"\n'
CHECK = "\ncheck.headline(headline)"


def inside(body: str, before: str = "") -> str:
    """A cell whose answer does ``body``."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{before}\ndef headline(findings):\n{lines}\n{CHECK}"


def module(ending: str) -> str:
    """An expression for a module of the judge that the static look at names does not see."""
    return f'next(m for n, m in list(__import__("sys").modules.items()) if n.endswith("{ending}"))'


# name -> (cell, state of 00.1, words in its message, words in the flags)
TRICKS: dict[str, tuple[str, str, str, str]] = {
    "forged print": (f'{WRONG}print("00.1 passed: Read a report"){CHECK}', "not yet", "'x'", ""),
    "other check": (f"{WRONG}check.headline = lambda answer: check.passed(){CHECK}", "not yet", "'x'", ""),
    "own class check": (
        f"{WRONG}class check:\n    @staticmethod\n    def headline(answer):\n        return 1{CHECK}",
        "not yet",
        "'x'",
        "",
    ),
    "solve in the cell": (f'{WRONG}course.start("00", solve=True){CHECK}', "not yet", "'x'", ""),
    "solve in the call": (
        inside(f'{module("ck.session")}.current.solve = True\nreturn "x"'),
        "tampered",
        "solve",
        "00.1 tampered",
    ),
    "another right answer": (
        inside(f'{module("ck.ch00")}.right_headline = lambda f: "x"\nreturn "x"'),
        "tampered",
        "labkit.check.ch00.right_headline",
        "00.1 tampered",
    ),
    "another code": (
        inside(f'{module("ck.ch00")}.right_headline.__code__ = (lambda f: "x").__code__\nreturn "x"'),
        "tampered",
        "right_headline",
        "00.1 tampered",
    ),
    "another judge": (
        inside(
            f"v = {module('ck.verdict')}\nr = {module('ck.registry')}\n"
            'r.Exercise._framed = lambda *_: v.passed("mine")\nreturn "x"'
        ),
        "tampered",
        "passed a wrong answer",
        "00.1 tampered",
    ),
    "another len": (
        inside('import builtins\nbuiltins.len = lambda x: 0\nreturn "x"'),
        "tampered",
        "builtins.len",
        "00.1 tampered",
    ),
    "equals everything": (
        inside(
            "return Any()",
            "class Any(str):\n    __hash__ = None\n    def __eq__(self, other):\n        return True\n"
            "    def __ne__(self, other):\n        return False\n",
        ),
        "not yet",
        "plain values",
        "",
    ),
    "mock.ANY": (inside("from unittest import mock\nreturn mock.ANY"), "not yet", "plain values", ""),
    "unsigned line": (
        inside(
            "import os\nfor fd in range(3, 40):\n    try:\n        os.write(fd, b'00 {}\\n')\n"
            "    except OSError:\n        pass\nreturn 'x'"
        ),
        "tampered",
        "did not sign",
        "00.1 tampered",
    ),
    "reads the frame": (
        inside("import sys\nreturn sys._getframe(1).f_locals['wanted']"),
        "not yet",
        "may not",
        "frames",
    ),
    "reads the solution": (
        inside(f'open({module("kit.errors")}.__file__[:-9] + "solu" + "tions/ch00.py")'),
        "not yet",
        "may not",
        "solutions/ch00.py",
    ),
    "reads the tests": (
        inside(f'open({module("kit.errors")}.__file__[:-16] + "tests/unit/test_check_ch00.py")'),
        "not yet",
        "may not",
        "unit/test_check_ch00.py",
    ),
    "imports the tests": (
        inside("import tests.unit.test_check_ch00 as answers\nreturn answers.__file__"),
        "not yet",
        "",
        "",
    ),
    "reads the teacher's environment": (
        inside("import os\nreturn open(f'/proc/{os.getppid()}/environ').read()"),
        "not yet",
        "may not" if sys.platform.startswith("linux") else "",
        "environ" if sys.platform.startswith("linux") else "",
    ),
    "kills its parent": (inside("import os\nos.kill(os.getppid(), 9)"), "not yet", "os.kill", "os.kill"),
    "forks": (
        inside("import os\nwhile True:\n    (getattr(os, 'fork', None) or os.system)()"),
        "not yet",
        "may not",
        "os.",
    ),
    "starts a program": (
        inside("import subprocess, sys\nsubprocess.run([sys.executable, '-c', '0'])"),
        "not yet",
        "subprocess.Popen",
        "subprocess.Popen",
    ),
    "uses the network": (
        inside("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"),
        "not yet",
        "may not",
        "socket.",
    ),
    "null pointer": (inside("import ctypes\nctypes.string_at(0)"), "not yet", "ctypes", "ctypes"),
    "leaves quietly": (inside("import os\nos._exit(0)"), "crashed", "exit code 0", "00.1 crashed"),
    "leaves while it is defined": (
        f"import os\n\n@lambda f: os._exit(3)\ndef headline(findings):\n    return 1\n{CHECK}",
        "crashed",
        "exit code 3",
        "00.1 crashed",
    ),
    "system exit": (inside("raise SystemExit"), "not yet", "SystemExit", ""),
    "keyboard interrupt": (inside("raise KeyboardInterrupt"), "not yet", "KeyboardInterrupt", ""),
    "recursion": (inside("return headline(findings)"), "not yet", "RecursionError", ""),
    "deep source": (
        f"def headline(f):\n    return {'(' * 300}1{')' * 300}{CHECK}",
        "not yet",
        "SyntaxError",
        "",
    ),
    "no Python": (f"def headline(f:{CHECK}", "not yet", "SyntaxError in line 1", ""),
    "never ends": (inside("while True:\n    pass"), "time limit", "", ""),
    "text without end": (
        inside("import os\nwhile True:\n    os.write(1, b'x' * 65536)"),
        "time limit",
        "",
        "",
    ),
    "words without end": (
        inside(
            "raise Slow",
            "class Slow(Exception):\n    def __str__(self):\n        while True:\n            pass\n",
        ),
        "time limit",
        "",
        "",
    ),
    # these are right, whatever stands round them
    "exit above": (f"import sys\nsys.exit(0)\n{RIGHT}", "passed", "", ""),
    "loop below": (f"{RIGHT}\nwhile True:\n    pass", "passed", "", ""),
    "magics": (f"%matplotlib inline\n!no-such-program\n{RIGHT}", "passed", "", ""),
    "check removed": (RIGHT.replace("check.headline(headline)", ""), "passed", "", ""),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graded]:
    folder = tmp_path_factory.mktemp("课堂 {a} b")
    for name, (cell, *_) in TRICKS.items():
        samples.hand_in(folder, name, samples.notebook("00", right=None, cells={"headline": cell}), FILE)
    for name, text in {
        "cut": '{"cells": [',
        "deep": "[" * 100_000,
        "list": "[]",
        "empty": "",
        "odd": '{"nbformat": 4, "cells": [1, {"cell_type": "code", "source": 5}, {"cell_type": "code"}]}',
    }.items():
        samples.hand_in(folder, name, text, FILE)
    samples.hand_in(folder, "=sum(a1)", samples.notebook("00", right=None), "[bold]\x1b[31m.ipynb")
    samples.hand_in(folder, "elsewhere", samples.notebook("01"), "01_roofline.ipynb")
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "cut" / "pipe.ipynb")
        (folder / "cut" / "link.ipynb").symlink_to("/etc/hostname")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        book = grade(prepare(folder, chapters="00", timeout=3, memory=1024, jobs=2))
    assert book.exit_code == 1
    book.write(folder / "out")
    text = (folder / "out" / "grades.csv").read_text(encoding="utf-8-sig")
    assert "'=sum(a1)" in text and "\n=sum" not in text
    return {row.student if "cut/" not in row.file or FILE in row.file else row.file: row for row in book.rows}


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_costs_its_own_exercise_and_no_other(name: str, rows: dict[str, Graded]) -> None:
    _, state, words, flag = TRICKS[name]
    row = rows[name]
    assert row.status == "graded" and row.chapter == "00"
    first, *others = row.marks
    assert (first.exercise, first.state) == ("00.1", state), first
    assert words in first.message, first
    assert [mark.state for mark in others] == ["passed"] * 4, others
    assert flag in " ".join(row.flags) if flag else not any("tampered" in one for one in row.flags), row.flags


@pytest.mark.parametrize("name", ["cut", "deep", "list", "empty", "odd"])
def test_what_is_no_notebook_says_so(name: str, rows: dict[str, Graded]) -> None:
    assert rows[name].status == "unreadable" and rows[name].reason and not rows[name].marks


def test_names_and_chapters(rows: dict[str, Graded]) -> None:
    assert rows["=sum(a1)"].points == 5 and "\x1b" not in rows["=sum(a1)"].file
    assert rows["elsewhere"].status == "other chapter" and rows["elsewhere"].chapter == "01"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
def test_pipes_and_links_are_not_opened(rows: dict[str, Graded]) -> None:
    assert (
        rows["cut/pipe.ipynb"].reason
        == rows["cut/link.ipynb"].reason
        == "a link or a device, not a plain file"
    )


def test_nothing_is_left_running(rows: dict[str, Graded]) -> None:
    children = psutil.Process().children(recursive=True)
    assert not [one for one in children if "child.py" in " ".join(one.cmdline())]


def test_files_elsewhere_stay(tmp_path: Path) -> None:
    """By name, by descriptor, through a link, by a thread, by a handler that runs at the end."""
    victim = tmp_path / "victim"
    (victim / "deep").mkdir(parents=True)
    kept = [victim / "a.txt", victim / "deep" / "b.txt"]
    for path in kept:
        path.write_text("here", encoding="utf-8")
    at = str(victim)
    body = f"""
import atexit, os, shutil, threading
tries = [
    lambda: os.remove({at!r} + "/a.txt"),
    lambda: shutil.rmtree({at!r}),
    lambda: open({at!r} + "/a.txt", "w").close(),
    lambda: os.truncate({at!r} + "/a.txt", 0),
    lambda: os.rename({at!r} + "/a.txt", "mine.txt"),
    lambda: os.unlink("a.txt", dir_fd=os.open({at!r}, os.O_RDONLY)),
    lambda: (os.symlink({at!r} + "/a.txt", "way"), open("way", "w").close()),
    lambda: atexit.register(os.remove, {at!r} + "/a.txt"),
    lambda: threading.Thread(target=os.remove, args=({at!r} + "/a.txt",)).start(),
]
for one in tries:
    try:
        one()
    except (OSError, TypeError, NotImplementedError):
        pass
return "x" """
    cells = {"headline": inside(body.strip())}
    samples.hand_in(tmp_path / "in", "one", samples.notebook("00", right=None, cells=cells), FILE)
    (row,) = grade(prepare(tmp_path / "in", chapters="00", timeout=20, jobs=1)).rows
    assert row.points == 4 and "tried" in " ".join(row.flags)
    assert [path.read_text(encoding="utf-8") for path in kept] == ["here", "here"]


def test_memory_is_bounded_by_the_system_or_by_watching(tmp_path: Path) -> None:
    greedy = inside("held = []\nwhile True:\n    held.append(bytearray(16 << 20))")
    book = samples.notebook("00", right=None, cells={"headline": greedy})
    samples.hand_in(tmp_path / "in", "one", book, FILE)
    request = prepare(tmp_path / "in", chapters="00", timeout=60, memory=512, jobs=1)
    (row,) = grade(request).rows
    assert row.points == 4
    assert row.marks[0].state == "memory limit" or "MemoryError" in row.marks[0].message
    # without the system's own limit, as on Windows: the parent sees it
    own = tmp_path / "own"
    own.mkdir()
    payload = {
        "notebook": str(tmp_path / "in" / "one" / FILE),
        "folder": str(own),
        "names": request.names,
        "courses": request.courses,
        "chapters": request.chapters,
        "memory": 1 << 44,
        "skip": [],
    }
    ended = Child(own, payload).run(60, 512 << 20, threading.Event())
    assert (ended.exercise, ended.state) == ("headline", "memory limit")


@pytest.mark.skipif(walls.landlock_version() < 4, reason="no Landlock in this kernel")
def test_the_kernel_keeps_what_python_does_not(tmp_path: Path) -> None:
    """Landlock alone, with no guard in Python: a child program of any language is inside it."""
    import subprocess

    own = tmp_path / "own"
    own.mkdir()
    script = f"""
import os, socket, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from labkit.classroom import walls
assert walls.build([Path({str(own)!r})]).startswith("landlock: files, network")
Path({str(own)!r}, "mine").write_text("yes", encoding="utf-8")
said = []
for one in (
    lambda: Path({str(tmp_path)!r}, "theirs").write_text("no", encoding="utf-8"),
    lambda: socket.create_connection(("127.0.0.1", 9), 1),
    lambda: subprocess.run(["sh", "-c", "echo no 2> /dev/null > {tmp_path}/theirs"], check=True),
):
    try:
        one()
        said.append("done")
    except PermissionError:
        said.append("kept")
    except subprocess.CalledProcessError:
        said.append("kept")
print(said)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert run.stdout.strip() == "['kept', 'kept', 'kept']", run.stderr
    assert not (tmp_path / "theirs").exists() and (own / "mine").exists()
