"""Chapters 14 and 16 in real JupyterLab: a queue limit changes who is served, hours change what is taught."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.widgets.base import Controller, Slider
from labkit.widgets.overload import Overload
from labkit.widgets.syllabus_planner import SyllabusPlanner

# One server and one browser: keep these tests on one worker when pytest runs several.
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


def step(chapter: Any, expected: Controller, name: str, key: str) -> None:
    """Move a slider by one stop, and wait until the widget shows what its controller says then."""
    (slider,) = (control for control in expected.controls() if control.name == name)
    assert isinstance(slider, Slider)
    way, now = {"ArrowRight": 1, "ArrowLeft": -1}[key], getattr(expected, name)
    stops = slider.values
    before = expected.html()
    expected.update(**{name: stops[stops.index(now) + way] if stops else now + way * slider.step})
    assert expected.html() != before
    chapter.press(slider.label, key)
    chapter.wait_for_text(chapter.text_of(expected.html()))


def test_chapter_14_overload(open_chapter: Any) -> None:
    chapter = open_chapter("14_serving.ipynb")
    assert chapter.errors() == []
    expected = Overload(rate=6.0, queue=256, bound=2.0)
    assert chapter.widget_text() == chapter.text_of(expected.html())
    assert "no limit" in chapter.widget_text() and "0 sent away" in chapter.widget_text()

    while expected.queue > 4:
        step(chapter, expected, "queue", "ArrowLeft")
    assert "queue limit 4" in chapter.widget_text() and "0 sent away" not in chapter.widget_text()
    assert f"{expected.counts['in time']} in time" in chapter.widget_text()

    step(chapter, expected, "bound", "ArrowLeft")
    step(chapter, expected, "rate", "ArrowRight")
    assert chapter.errors() == []


def test_chapter_16_syllabus_planner(open_chapter: Any) -> None:
    chapter = open_chapter("16_teaching.ipynb")
    assert chapter.errors() == []
    expected = SyllabusPlanner(hours=4.0, students=30)
    assert chapter.widget_text() == chapter.text_of(expected.html())

    step(chapter, expected, "hours", "ArrowRight")
    step(chapter, expected, "machines", "ArrowLeft")  # now two share one
    expected.update(track="kernels")
    chapter.choose("What for", "kernels")
    chapter.wait_for_text(chapter.text_of(expected.html()))
    assert chapter.errors() == []
