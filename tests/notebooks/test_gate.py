"""The gate over every notebook that is kept, and stubs against solutions."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.check.signatures import differences
from labkit.course.anatomy import exercise_names
from labkit.course.gate import gate
from labkit.course.index import Chapter, ready_chapters
from labkit.course.map import exercise_ids
from labkit.course.notebook import read
from labkit.paths import notebooks_dir

NOTEBOOKS = sorted(
    path for path in notebooks_dir().rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
)
READY = ready_chapters()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_passes_the_gate(path: Path) -> None:
    assert [str(problem) for problem in gate(path)] == []


@pytest.mark.parametrize("chapter", READY, ids=lambda chapter: chapter.number)
def test_stubs_and_solutions_take_the_same_arguments(chapter: Chapter) -> None:
    path = chapter.notebook()
    assert path is not None
    assert differences(path) == []


@pytest.mark.parametrize("chapter", READY, ids=lambda chapter: chapter.number)
def test_a_chapter_is_one_file_that_asks_its_own_exercises(chapter: Chapter) -> None:
    from labkit import check

    files = list(notebooks_dir().glob(f"{chapter.number}_*.ipynb"))
    assert [file.stem for file in files] == [f"{chapter.number}_{chapter.slug}"]
    asked = [check.find(name).id for name in exercise_names(read(files[0]))]
    assert sorted(asked) == list(exercise_ids(chapter.number))
