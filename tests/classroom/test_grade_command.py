"""``labkit grade`` as a teacher uses it: table, files, exit codes, wrong usage, an interrupt."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from labkit.classroom import samples
from labkit.classroom.grade import grade, prepare
from labkit.classroom.report import Report
from labkit.classroom.scores import UNREADABLE, Gradebook, Graded, Mark
from labkit.cli import app
from labkit.errors import InputError

FILE = "00_start_here.ipynb"


def test_a_class_of_three(tmp_path: Path) -> None:
    folder, out = tmp_path / "handed in", tmp_path / "out"
    samples.hand_in(folder, "学生 1", samples.notebook("00", right=["headline", "fits_w4"]), FILE)
    samples.hand_in(folder, "two", samples.notebook("00", right=None), "renamed (1).ipynb")
    lie = samples.notebook("00")
    samples.claim(lie, "steady", "00.4 passed: Trust a timing")
    samples.hand_in(folder, "three", lie, FILE)
    samples.hand_in(folder / "two", ".ipynb_checkpoints", "{", FILE)
    before = {path: path.read_bytes() for path in folder.rglob("*.ipynb")}
    options = ["--timeout", "20", "--jobs", "2", "--out", str(out)]
    run = CliRunner().invoke(app, ["grade", str(folder), *options])
    assert run.exit_code == 1  # one of them wants a look
    assert "3 of 3 notebooks graded, 7 of 15 passed" in run.output and "its outputs claim 00.4" in run.output
    assert {path: path.read_bytes() for path in folder.rglob("*.ipynb")} == before
    rows = list(csv.DictReader(io.StringIO((out / "grades.csv").read_text(encoding="utf-8-sig"))))
    assert {row["student"]: (row["points"], row["of"]) for row in rows} == {
        "学生 1": ("2", "5"),
        "two": ("5", "5"),
        "three": ("0", "5"),
    }
    exercises = list(csv.DictReader(io.StringIO((out / "exercises.csv").read_text(encoding="utf-8-sig"))))
    assert len(exercises) == 15 and {row["exercise"] for row in exercises} == {f"00.{i}" for i in range(1, 6)}
    scored = [row for row in exercises if row["student"] == "two" and row["exercise"] == "00.3"]
    assert scored[0]["state"] == "passed" and float(scored[0]["score"]) <= 2
    record = json.loads((out / "grades.json").read_text(encoding="utf-8"))
    assert [one["points"] for one in record["notebooks"]] == [int(row["points"]) for row in rows]
    # without the one that claims too much all is well; and one student's folder is a class of one
    alone = CliRunner().invoke(app, ["grade", str(folder / "two"), "--chapters", "00", *options])
    assert alone.exit_code == 0 and "renamed (1)" in alone.output


def test_other_chapters_and_second_notebooks(tmp_path: Path) -> None:
    samples.hand_in(tmp_path, "one", samples.notebook("00"), FILE)
    samples.hand_in(tmp_path, "one", samples.notebook("00"), "01_copy.ipynb")
    book = grade(prepare(tmp_path, chapters="01", timeout=20))
    assert [row.status for row in book.rows] == ["other chapter"] * 2 and book.exit_code == 1
    twice = grade(prepare(tmp_path, timeout=20)).rows
    assert all("2 notebooks of this chapter" in row.flags for row in twice)
    assert "named 01, holds chapter 00" in twice[1].flags


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["none"], "FOLDER"),
        (["."], "no .ipynb"),
        (["in", "--timeout", "0"], "--timeout"),
        (["in", "--timeout", "nan"], "--timeout"),
        (["in", "--memory", "1"], "--memory"),
        (["in", "--jobs", "-1"], "--jobs"),
        (["in", "--chapters", "99"], "chapter"),
        (["in", "--out", "in/one/x.ipynb"], "--out"),
    ],
)
def test_wrong_usage_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if options[0] == "in":
        samples.hand_in(tmp_path / "in", "one", "{", "x.ipynb")
    run = CliRunner().invoke(app, ["grade", *options])
    assert isinstance(run.exception, InputError) and words in str(run.exception)


def in_an_endless_answer(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A grader in the second of two notebooks, one exercise of which never ends; and its children."""
    samples.hand_in(tmp_path / "in", "a", samples.notebook("00", right=None), FILE)
    loop = {"headline": "def headline(f):\n    while True:\n        pass\n\n\ncheck.headline(headline)"}
    samples.hand_in(tmp_path / "in", "b", samples.notebook("00", cells=loop), FILE)
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "labkit.cli", "grade", str(tmp_path / "in"), "--timeout", "600"]
    command += ["--jobs", "1", "--out", str(tmp_path / "out")]
    with (tmp_path / "said").open("wb") as said:
        env = dict(os.environ) | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(tmp_path / "tmp"))
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=env)
    for _ in range(1200):
        if "1/2" in (tmp_path / "said").read_text(encoding="utf-8", errors="replace"):
            children = psutil.Process(process.pid).children(recursive=True)
            if any(child.cpu_times().user > 1 for child in children):  # imports are behind it, or nearly
                return process, children
        assert process.poll() is None, (tmp_path / "said").read_text(encoding="utf-8", errors="replace")
        time.sleep(0.05)
    raise AssertionError("no child")


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_children_and_keeps_what_is_done(tmp_path: Path, how: signal.Signals) -> None:
    process, children = in_an_endless_answer(tmp_path)
    process.send_signal(how)
    assert process.wait(60) == 130
    assert not [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    record = json.loads((tmp_path / "out" / "grades.json").read_text(encoding="utf-8"))
    assert record["interrupted"] and record["notebooks"][0]["points"] == 5
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a child of its parent's end"
)
def test_an_endless_answer_does_not_outlive_a_grader_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, children = in_an_endless_answer(tmp_path)
    process.kill()
    process.wait(60)
    alive = psutil.wait_procs(children, timeout=30)[1]
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    # the copy of the notebook is still there; the next grader removes it
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    samples.hand_in(tmp_path / "next", "c", "{", FILE)
    assert grade(prepare(tmp_path / "next")).rows[0].status == UNREADABLE
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_table_is_printable_everywhere() -> None:
    row = Graded(
        "[red]x[/red]", "a", "graded", "00", (Mark("00.1", "one", "passed"), Mark("00.2", "two", "crashed"))
    )
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="replace")
    Report(stream).end(Gradebook((row,)), Path("out"))
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "[red]x[/red]" in text and "PX" in text
