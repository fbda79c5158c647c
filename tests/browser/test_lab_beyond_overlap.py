"""Chapter 13 in real JupyterLab: the SLA Pareto is drawn; bounds and policies change who meets the level."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.widgets.sla_pareto import STOPS, SlaPareto

# One server and one browser: keep these tests on one worker when pytest runs several.
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


def test_chapter_13_sla_pareto(open_chapter: Any) -> None:
    chapter = open_chapter("13_beyond_overlap.ipynb")
    assert chapter.errors() == []
    expected = SlaPareto()
    first = expected.verdict()
    assert chapter.widget_text() == chapter.text_of(expected.html()) and first in chapter.widget_text()

    # A tighter largest gap, until another is the best or nobody meets the level.
    while expected.verdict() == first:
        expected.update(max_gap=STOPS[STOPS.index(expected.max_gap) - 1])
        chapter.press("Largest gap (ms)", "ArrowLeft")
        chapter.wait_for_text(chapter.text_of(expected.html()))
    assert first not in chapter.widget_text()

    expected.update(share=expected.share - 5)
    chapter.press("Least rate (%)", "ArrowLeft")
    chapter.wait_for_text(chapter.text_of(expected.html()))

    # A policy that is not asked has no point in the picture.
    points = "node => node.querySelectorAll('svg title').length"
    before = chapter.picture().evaluate(points)
    expected.update(mixed=False)
    chapter.page.get_by_role("checkbox", name="mixed").uncheck()
    chapter.wait_for_text(chapter.text_of(expected.html()))
    mixed = sum(point.policy == "mixed" for point in expected.now.points)
    assert chapter.picture().evaluate(points) == before - 2 * mixed < before  # a point in each panel

    other = next((one for one in expected.sources or () if one.key != expected.source), None)
    assert other is not None, "data/measured holds no jitter record"
    expected.update(source=other.key)
    chapter.choose("Points", other.name)
    chapter.wait_for_text(chapter.text_of(expected.html()))
    assert chapter.errors() == []
