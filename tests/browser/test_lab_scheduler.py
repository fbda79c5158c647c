"""Chapter 11 in real JupyterLab: the scheduler clock is drawn, and answers to the keyboard."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.widgets.scheduler_clock import SchedulerClock

# One server and one browser: keep these tests on one worker when pytest runs several.
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


def test_chapter_11_scheduler_clock(open_chapter: Any) -> None:
    chapter = open_chapter("11_scheduler.ipynb")
    assert chapter.errors() == []
    expected = SchedulerClock(rate=1.0, chunk=128, policy="serial")
    assert chapter.widget_text() == chapter.text_of(expected.html())

    expected.update(chunk=256)
    chapter.press("Chunk size (tokens)", "ArrowRight")
    chapter.wait_for_text(chapter.text_of(expected.html()))

    expected.update(rate=0.5)
    chapter.press("Arrivals a second", "ArrowLeft")
    chapter.wait_for_text(chapter.text_of(expected.html()))

    expected.update(policy="mixed")
    chapter.page.get_by_label("Policy").select_option("mixed")
    chapter.wait_for_text(chapter.text_of(expected.html()))
    assert chapter.errors() == []
