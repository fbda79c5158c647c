"""Every chapter as a papermill job, with the reference solutions checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.course.anatomy import exercise_names
from labkit.course.index import Chapter, ready_chapters
from labkit.course.notebook import read
from labkit.course.runner import run_course
from labkit.paths import notebooks_dir


@pytest.mark.parametrize("chapter", ready_chapters(), ids=lambda chapter: chapter.number)
def test_chapter_runs_and_its_solutions_pass(chapter: Chapter, tmp_path: Path) -> None:
    path = chapter.notebook()
    assert path is not None
    before = {file: file.read_bytes() for file in notebooks_dir().rglob("*.ipynb")}
    result = run_course(chapter.number, "cpu", None, True, tmp_path / "out")
    one = result.results[0]
    assert one.failure is None, (
        f"code cell {one.failure.number}: {one.failure.summary()}\n{one.failure.source}"
    )
    assert one.status == "passed" and one.cells_done == one.cells_total and not one.note
    asked = len(exercise_names(read(path)))
    assert one.checks == {"passed": asked, "not_yet": 0, "not_attempted": 0, "total": asked}
    assert {file: file.read_bytes() for file in notebooks_dir().rglob("*.ipynb")} == before
