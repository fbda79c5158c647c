"""The nbgrader course, run as a teacher would: generate, autograde, feedback, on two chapters, headless."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from short_chapters import short

from labkit.classroom import release
from labkit.classroom.answers import exercises_of
from labkit.classroom.solved import solved
from labkit.course.notebook import dumps, joined, read

ASSIGNMENTS = ("00_start_here", "01_roofline")
NAMES = {
    "00_start_here": ["headline", "read_score", "plant_fault", "steady", "fits_w4"],
    "01_roofline": ["weight_bytes", "ceiling", "batched_rows", "ridge", "tiled_gb_s"],
}


def nbgrader(course: Path, *arguments: str) -> str:
    """One call, in the course's folder; the programs' folder is not on PATH, as on most laptops."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "JUPYTER_CONFIG_DIR": str(course / "config")}
    env |= {"LABKIT_STATE": str(course / "state"), "IPYTHONDIR": str(course / "ipython")}
    env["PYTHONPATH"] = str(Path(release.__file__).resolve().parents[2])
    run = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments],
        cwd=course,
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout + run.stderr


def hand_in(course: Path, student: str, assignment: str, cells: dict[str, str] | None) -> None:
    """What was released, with cells replaced; None solves all."""
    book = read(course / "release" / assignment / f"{assignment}.ipynb")
    for cell in book["cells"]:
        source = joined(cell["source"])
        locked = cell["metadata"].get("nbgrader", {}).get("locked")
        for name in () if locked or cell["cell_type"] != "code" else exercises_of(source, NAMES[assignment]):
            if cells is None:
                cell["source"] = solved(source, name)
            elif name in cells:
                cell["source"] = cells[name]
    # a student who switches everything on: the locked cells are put back before grading
    for cell in book["cells"] if cells else ():
        cell["source"] = joined(cell["source"]).replace("solve = False", "solve = True")
    folder = course / "submitted" / student / assignment
    folder.mkdir(parents=True)
    (folder / f"{assignment}.ipynb").write_text(dumps(book), encoding="utf-8")


def points(course: Path) -> dict[tuple[str, str], float]:
    """(student, assignment) -> points of the gradebook."""
    query = """
        select s.id, a.name, sum(coalesce(g.manual_score, g.auto_score, 0) + coalesce(g.extra_credit, 0))
        from grade g join submitted_notebook n on g.notebook_id = n.id
        join submitted_assignment sa on n.assignment_id = sa.id
        join assignment a on sa.assignment_id = a.id join student s on sa.student_id = s.id
        group by s.id, a.name"""
    with sqlite3.connect(course / "gradebook.db") as base:
        return {(who, what): score for who, what, score in base.execute(query)}


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nbgrader a b")
    for number in ("00", "01"):
        short(root / "notebooks", number)
    release.write(release.build(None, folder=root / "notebooks"), root / "out")
    made = root / "out" / "nbgrader"
    for one in ASSIGNMENTS:
        nbgrader(made, "generate_assignment", one)
    for one in ASSIGNMENTS:
        hand_in(made, "right", one, None)
    wrong = "def headline(findings):\n    return 'x'\n\n\nprint('00.1 passed')\ncheck.headline(headline)"
    hand_in(made, "wrong", ASSIGNMENTS[0], {"headline": wrong})
    broken = {"ceiling": "def ceiling(:\n", "ridge": "raise SystemError('stop')"}
    hand_in(made, "broken", ASSIGNMENTS[1], broken)
    for one in ASSIGNMENTS:
        nbgrader(made, "autograde", one)
        nbgrader(made, "generate_feedback", one)
    return made


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_students_get_the_courses_own_stubs(course: Path, assignment: str) -> None:
    given = read(course / "release" / assignment / f"{assignment}.ipynb")
    own = read(course.parents[1] / "notebooks" / f"{assignment}.ipynb")
    shown = [joined(cell["source"]) for cell in given["cells"]]
    assert all(joined(cell["source"]) in shown for cell in own["cells"])
    assert "BEGIN SOLUTION" not in json.dumps(given) and not any(
        "stub" in cell["metadata"].get("labkit", {}) for cell in given["cells"]
    )
    source = read(course / "source" / assignment / f"{assignment}.ipynb")
    assert json.dumps(source) != json.dumps(given)


def test_points(course: Path) -> None:
    found = points(course)
    assert found["right", "00_start_here"] == found["right", "01_roofline"] == 5
    assert found["wrong", "00_start_here"] == 0
    assert found["broken", "01_roofline"] == 0


def test_feedback_says_why(course: Path) -> None:
    for who, assignment, words in (
        ("right", "00_start_here", "00.1 passed"),
        ("wrong", "00_start_here", "00.1 not yet"),
        ("broken", "01_roofline", "SyntaxError"),
    ):
        page = course / "feedback" / who / assignment / f"{assignment}.html"
        assert words in page.read_text(encoding="utf-8")
