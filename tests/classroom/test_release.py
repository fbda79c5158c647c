"""Releases: what students and teachers get, what stops a release, what drift is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from short_chapters import short
from typer.testing import CliRunner

from labkit import solutions
from labkit.classroom import drift, release
from labkit.classroom.answers import exercises_of
from labkit.cli import app
from labkit.course.anatomy import exercise_names
from labkit.course.gate import check_format
from labkit.course.index import chapter_named, ready_chapters
from labkit.course.notebook import dumps, joined, normalise, read
from labkit.errors import InputError


@pytest.fixture(scope="module")
def whole() -> release.Release:
    """Of every chapter that is ready."""
    return release.build(None)


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A copy of two chapters, to be changed."""
    folder = tmp_path / "课程 notebooks"
    folder.mkdir()
    for number in ("00", "03"):
        path = chapter_named(number).notebook()
        assert path is not None
        shutil.copy(path, folder / path.name)
    return folder


def change(folder: Path, number: str, old: str, new: str) -> None:
    """Replace text in a copy's cells."""
    path = chapter_named(number).notebook(folder)
    assert path is not None
    book, count = read(path), 0
    for cell in book["cells"]:
        text = joined(cell["source"])
        count += text.count(old)
        cell["source"] = text.replace(old, new)
    assert count
    path.write_text(dumps(normalise(book)), encoding="utf-8")


@pytest.mark.parametrize("chapter", ready_chapters(), ids=lambda chapter: chapter.number)
def test_students_get_stubs_and_teachers_solutions(chapter: Any, whole: release.Release) -> None:
    path = chapter.notebook()
    given = json.loads(whole.files[f"student/{path.name}"])
    teacher = json.loads(whole.files[f"teacher/{path.name}"])
    course = read(path)
    assert [cell["source"] for cell in given["cells"]] == [cell["source"] for cell in course["cells"]]
    assert [cell["id"] for cell in given["cells"]] == [cell["id"] for cell in course["cells"]]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in given["cells"])
    assert not [p for p in check_format(given) if p.rule != "checked"]
    names = exercise_names(course)
    shown = [
        joined(cell["source"]) for cell in teacher["cells"] if "solution" in cell["metadata"].get("tags", [])
    ]
    assert len(shown) == len(names)
    for name, text in zip(names, shown):
        assert solutions.show(name).source in text
        assert solutions.show(name).source not in whole.files[f"student/{path.name}"]
    # right below its exercise
    for at, cell in enumerate(teacher["cells"]):
        if exercises_of(joined(cell["source"]), names):
            assert "solution" in teacher["cells"][at + 1]["metadata"]["tags"]


def test_an_executed_teacher_notebook_has_its_outputs(tmp_path: Path) -> None:
    short(tmp_path / "short", "00")
    made = release.build("00", folder=tmp_path / "short", executed=True, nbgrader=False)
    assert "00.1 passed (reference solution)" in made.files["teacher/00_start_here.ipynb"]
    assert "passed (reference" not in made.files["student/00_start_here.ipynb"]
    assert not any(name.startswith("nbgrader") for name in made.files)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "    raise NotImplementedError\n\n\ncheck.steady",
            "    return 1, True\n\n\ncheck.steady",
            "holds an answer",
        ),
        ("def steady(seconds)", "def steady(seconds, extra)", "stubs that fit"),
        ("check.steady(steady)", "print(steady)", "exercises"),
        ("check.steady(steady)", "check.steady(len)", "stub"),
        (
            "## Five questions",
            "warm = sorted(seconds[1:]) median = statistics.median(warm) return median, warm[-1] - "
            "warm[0] <= 0.25 * median\n\n## Five questions",
            "steady",
        ),
    ],
)
def test_what_is_not_fit_is_not_released(
    course: Path, tmp_path: Path, old: str, new: str, words: str
) -> None:
    if "median" in new:  # the docstring belongs to the body too
        new = '"""Median of the warm calls, and whether they agree with each other."""\n' + new
    change(course, "00", old, new)
    with pytest.raises(InputError, match=words):
        release.build("00", folder=course)


def test_a_missing_solution_stops_it(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.solutions import ch00

    monkeypatch.delattr(ch00, "steady")
    with pytest.raises(InputError, match="steady"):
        release.build("00", folder=course)


def test_a_fresh_release_fits_and_every_change_is_found(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    release.write(release.build(None, folder=course), out)
    assert drift.problems(out, folder=course) == []

    def found(words: str) -> None:
        lines = drift.problems(out, folder=course)
        assert any(words in line for line in lines), lines

    student = out / "student" / "00_start_here.ipynb"
    text = student.read_text(encoding="utf-8")
    student.write_text(text.replace("Start here", "Start there"), encoding="utf-8")
    found("student/00_start_here.ipynb was changed after the release")
    student.unlink()
    found("is missing")
    student.write_text(text.replace("\n", "\r\n"), encoding="utf-8", newline="")
    assert drift.problems(out, folder=course) == []  # another system's line ends are no change

    before = (course / "00_start_here.ipynb").read_text(encoding="utf-8")
    change(course, "00", '"""What a score means where lower is better."""', '"""What it means."""')
    found("the stub of 00.2 read_score was changed")
    (course / "00_start_here.ipynb").write_text(before, encoding="utf-8")
    change(course, "00", "Think of what real reports", "Think what real reports")
    found("chapter 00: its text was changed")
    change(course, "00", "check.steady(steady)", "print(1)")
    found("exercise 00.4 steady is gone")
    (course / "00_start_here.ipynb").write_text(before, encoding="utf-8")

    from labkit import check
    from labkit.check import ch00, registry

    with monkeypatch.context() as patch:
        patch.setitem(
            registry._registry, "steady", check.Exercise("00.9", "steady", "x", ch00.steady.function)
        )
        found("exercise steady was 00.4, and is 00.9")
    with monkeypatch.context() as patch:
        patch.setattr("labkit.classroom.release.solution_source", lambda name, target: f"{name} = 1")
        found("the solution of 00.1 headline was changed")
    with monkeypatch.context() as patch:
        from labkit.solutions import ch00 as reference

        patch.delattr(reference, "steady")
        found("chapter 00: solution")
    (course / "03_first_gemv.ipynb").unlink()
    found("chapter 03 is not in the course any more")


def test_writing_spares_what_is_not_its_own(course: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    release.write(release.build(None, folder=course), out)
    (out / "nbgrader" / "gradebook.db").write_bytes(b"marks")
    release.write(release.build("00", folder=course, nbgrader=False), out)
    assert (out / "nbgrader" / "gradebook.db").read_bytes() == b"marks"
    assert not (out / "student" / "03_first_gemv.ipynb").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="holds other files"):
        release.write(release.build("00", folder=course), other)
    (out / release.MANIFEST).write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="without a release"):
        drift.problems(out)


def test_a_manifest_cannot_name_files_elsewhere(course: Path, tmp_path: Path) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim.txt"
    victim.write_text("here", encoding="utf-8")
    release.write(release.build("00", folder=course, nbgrader=False), out)
    manifest = json.loads((out / release.MANIFEST).read_text(encoding="utf-8"))
    manifest["files"]["../victim.txt"] = "0"
    (out / release.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    assert any("not in the release's folder" in line for line in drift.problems(out, folder=course))
    release.write(release.build("00", folder=course, nbgrader=False), out)
    assert victim.read_text(encoding="utf-8") == "here"


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner()
    out = str(tmp_path / "a b")
    made = run.invoke(app, ["release", "--chapters", "00", "--out", out])
    assert made.exit_code == 0 and "1 chapters, 5 exercises, 4 files" in made.output
    assert run.invoke(app, ["release", "--check", out]).exit_code == 0
    (tmp_path / "a b" / "student" / "00_start_here.ipynb").unlink()
    checked = run.invoke(app, ["release", "--check", out])
    assert checked.exit_code == 1 and "missing" in checked.output
    for wrong in (
        ["release"],
        ["release", "--out", out, "--check", out],
        ["release", "--check", str(tmp_path)],
    ):
        failed = run.invoke(app, wrong)
        assert isinstance(failed.exception, InputError)
