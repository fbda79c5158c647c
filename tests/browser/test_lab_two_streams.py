"""Chapter 12 in real JupyterLab: the overlap lab is drawn; switch, policy and chunk do what they should."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.widgets.overlap_lab import OverlapLab

# One server and one browser: keep these tests on one worker when pytest runs several.
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

BLOCKS = (
    "node => [...node.querySelectorAll('rect')].map(r => r.getAttribute('x') + ' ' + r.getAttribute('y'))"
)


def test_chapter_12_overlap_lab(open_chapter: Any) -> None:
    chapter = open_chapter("12_two_streams.ipynb")
    assert chapter.errors() == []
    expected = OverlapLab("overlap", True, 128, "rtx3050")
    assert chapter.widget_text() == chapter.text_of(expected.html())
    on_text, on_picture = chapter.widget_text(), chapter.picture().evaluate(BLOCKS)
    assert f"overlap steps {expected.run.overlap_steps}" in on_text and expected.run.busy_both > 0

    # The switch off: other numbers, and the works lie elsewhere in the picture.
    expected.update(overlap=False)
    switch = chapter.page.get_by_role("checkbox", name="Overlap on")
    assert switch.is_checked()
    switch.uncheck()
    chapter.wait_for_text(chapter.text_of(expected.html()))
    off_picture = chapter.picture().evaluate(BLOCKS)
    assert expected.run.busy_both == 0 and "both lanes busy for 0 ms" in chapter.widget_text()
    assert off_picture != on_picture

    switch.check()
    chapter.wait_for_text(on_text)
    assert chapter.picture().evaluate(BLOCKS) == on_picture
    expected.update(overlap=True)

    expected.update(policy="mixed")
    chapter.choose("Policy", "mixed")
    _wait_for(chapter, expected)
    mixed = chapter.widget_text()
    assert mixed != on_text

    expected.update(chunk=256)
    chapter.press("Chunk size (tokens)", "ArrowRight")
    _wait_for(chapter, expected)
    assert chapter.widget_text() != mixed and chapter.errors() == []


def _wait_for(chapter: Any, expected: OverlapLab) -> None:
    """Until the widget shows the figures of a state. The engine is shared by the chapter's cells, so its
    clock stands elsewhere than here: a last step more or less may lie in the picture."""
    script = """words => {
        const text = [...document.querySelectorAll('.labkit-widget')].at(-1).textContent;
        return words.every(one => text.includes(one));
    }"""
    words = [expected.verdict(), expected.counted()]
    chapter.page.wait_for_function(script, arg=words, timeout=15_000, polling=100)
