"""Chapter 10 in real JupyterLab: the block stepper is drawn, and answers to the keyboard."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.widgets.block_stepper import BlockStepper

# One server and one browser: keep these tests on one worker when pytest runs several.
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


def test_chapter_10_block_stepper(open_chapter: Any) -> None:
    chapter = open_chapter("10_paged_kv.ipynb")
    assert chapter.errors() == []
    expected = BlockStepper(block_size=4, step=4)
    assert chapter.widget_text() == chapter.text_of(expected.html())

    expected.update(step=5)
    chapter.press("Event", "ArrowRight")
    chapter.wait_for_text(chapter.text_of(expected.html()))

    expected.update(block_size=8)
    chapter.press("Block size (tokens)", "ArrowRight")
    chapter.wait_for_text(chapter.text_of(expected.html()))
    assert "1 full block can be matched" in chapter.widget_text()

    expected.press("next")
    chapter.page.get_by_role("button", name="Next event").click()
    chapter.wait_for_text(chapter.text_of(expected.html()))
    assert chapter.errors() == []
