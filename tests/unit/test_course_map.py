from __future__ import annotations

from pathlib import Path

import pytest

from labkit.check import passed, progress
from labkit.course import map as course_maps
from labkit.course.index import all_chapters, choose, ready_chapters
from labkit.course.map import course_map
from labkit.errors import InputError


def test_the_table_holds_the_seventeen_chapters_in_order() -> None:
    chapters = all_chapters()
    assert [c.number for c in chapters] == [f"{n:02d}" for n in range(17)]
    assert all(c.title and c.question.endswith("?") and c.builds and 0 < c.minutes <= 120 for c in chapters)
    assert len({c.slug for c in chapters}) == 17


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("00_a", "02_b", "09_c"):
        (tmp_path / f"{name}.ipynb").write_text("{}", encoding="utf-8")
    return tmp_path


def test_a_chapter_is_ready_when_its_notebook_is_there(folder: Path) -> None:
    assert [c.number for c in ready_chapters(folder)] == ["00", "02", "09"]


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        (None, "00 02 09"),
        ("all", "00 02 09"),
        ("9,0", "00 09"),
        ("00-05", "00 02"),
        (["02"], "02"),
        ("02, 02", "02"),
    ],
)
def test_choosing_chapters(folder: Path, spec: str | list[str] | None, numbers: str) -> None:
    assert [c.number for c in choose(spec, folder)] == numbers.split()


@pytest.mark.parametrize("spec", ["01", "17", "x", "05-02", "03-05", "-1"])
def test_chapters_that_cannot_run_are_refused(folder: Path, spec: str) -> None:
    with pytest.raises(InputError):
        choose(spec, folder)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no notebook found"):
        choose(None, tmp_path)


def test_the_map_is_the_same_without_progress_and_tells_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        course_maps, "exercise_ids", lambda number: ("00.1", "00.2") if number == "00" else ()
    )
    monkeypatch.setattr("labkit.course.index.Chapter.notebook", lambda self: Path(f"{self.number}_x.ipynb"))
    before = course_map()
    assert repr(before) == repr(course_map()) and before._repr_html_() == course_map()._repr_html_()
    assert len(before.rows) == 17 and before.rows[0].status == "ready"
    progress.record("00.1", passed())
    assert course_map().rows[0].status == "1 of 2 passed"
    progress.record("00.2", passed())
    assert course_map().rows[0].status == "done"
    assert "00_x.ipynb" in course_map()._repr_html_()


def test_the_map_says_when_a_damaged_file_was_put_aside() -> None:
    progress.path().parent.mkdir(parents=True, exist_ok=True)
    progress.path().write_text("{", encoding="utf-8")
    shown = course_map()
    assert "damaged" in shown.note and shown.note in repr(shown)


def test_exercises_are_counted_from_source() -> None:
    from labkit import check

    for number in ("00", "01", "02", "09"):
        assert list(course_maps.exercise_ids(number)) == [e.id for e in check.exercises(number)]
