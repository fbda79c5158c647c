"""Chapter 08 in real JupyterLab: three widgets are drawn, and the pipeline answers to the keyboard."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.widgets.fragment_map import FragmentMap
from labkit.widgets.pipeline_gantt import PipelineGantt

# One server and one browser: keep these tests on one worker when pytest runs several.
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


def test_chapter_08_pipeline_and_fragments(open_chapter: Any) -> None:
    chapter = open_chapter("08_tensor_cores.ipynb")
    assert chapter.errors() == []
    expected = PipelineGantt()
    assert chapter.widget_text() == chapter.text_of(expected.html())

    expected.update(stages=4)
    chapter.press("Stages", "ArrowRight")
    chapter.wait_for_text(chapter.text_of(expected.html()))
    assert "bubbles 0" in chapter.widget_text()

    # the fragment viewer stands first; picking an element moves the lane
    viewer = chapter.page.locator(".labkit-widget").first
    state = FragmentMap(lane=5)
    assert viewer.text_content() == chapter.text_of(state.html())
    state.update(row=state.row + 1)
    chapter.press("Down: row, or k of B", "ArrowRight")
    wanted = chapter.text_of(state.html())
    chapter.page.wait_for_function(
        "wanted => document.querySelector('.labkit-widget').textContent === wanted",
        arg=wanted,
        timeout=15_000,
    )
    assert state.lane == 9 and chapter.errors() == []
