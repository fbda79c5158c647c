"""What holds for every exercise of every chapter: its name, its reference solution, its stubs.

The files ``test_check_chNN.py`` hold what one chapter's checks accept, refuse and say.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest

from labkit import check, solutions
from labkit.check import session
from labkit.check.cuda_text import mark
from labkit.course.anatomy import exercise_names
from labkit.course.index import Chapter, ready_chapters
from labkit.course.notebook import read
from labkit.course.source import text_stubs

EXERCISES = check.exercises()
TEXTS = [item for item in EXERCISES if item.text_stub]
# Its thresholds are round numbers; the exact pair of 07.2 would be at par.
SCORES = {"07.5": 2.33}
BODIES = ("raise NotImplementedError", "...", "pass", "return None")


def _by_id(item: check.Exercise) -> str:
    return f"{item.id} {item.name}"


@functools.cache
def _book(chapter: str) -> Any:
    (path,) = (one.notebook() for one in ready_chapters() if one.number == chapter)
    assert path is not None
    return read(path)


def _stub(item: check.Exercise, answer: Any, body: str) -> Any:
    """An answer that nobody has written, in the shape of the reference solution."""
    if isinstance(answer, dict):
        return dict.fromkeys(answer, ...)
    if not callable(answer):
        return [..., None]
    scope: dict[str, Any] = {"__name__": "a_notebook"}
    exec(f"def {item.name}({', '.join(inspect.signature(answer).parameters)}):\n    {body}\n", scope)
    return scope[item.name]


@pytest.mark.parametrize("chapter", ready_chapters(), ids=lambda chapter: chapter.number)
def test_the_notebook_asks_its_chapter_s_exercises_in_their_order(chapter: Chapter) -> None:
    found = check.exercises(chapter.number)
    assert [item.name for item in found] == exercise_names(_book(chapter.number))
    assert [item.id for item in found] == [f"{chapter.number}.{n}" for n in range(1, len(found) + 1)]
    assert len(found) >= 3


@pytest.mark.parametrize("item", EXERCISES, ids=_by_id)
def test_the_reference_passes_with_par_and_can_be_shown(
    item: check.Exercise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.current, "solve", True)
    verdict = item()
    assert verdict.state == "passed", verdict
    assert verdict.score == SCORES.get(item.id, item.par)
    assert item.name in repr(solutions.show(item.id))


@pytest.mark.parametrize("item", EXERCISES, ids=_by_id)
def test_blanks_and_stubs_are_not_attempted(item: check.Exercise) -> None:
    answer = solutions.get(item.id)
    stubs = [None, ..., *(_stub(item, answer, body) for body in BODIES)]
    if item.text_stub:
        stubs += ["", "  \n"]
    assert [item(blank).state for blank in stubs] == ["not attempted"] * len(stubs)


@pytest.mark.parametrize("item", TEXTS, ids=_by_id)
def test_the_text_in_the_notebook_is_the_stub_that_the_check_knows(item: check.Exercise) -> None:
    text = text_stubs(_book(item.chapter))[item.name][2]
    assert mark(text) == item.text_stub
    assert item(text).state == "not attempted"
