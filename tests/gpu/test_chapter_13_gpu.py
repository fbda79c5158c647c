"""Chapter 13's own run on a GPU: four policies on the document trace, every figure measured."""

from __future__ import annotations

import pytest

from labkit.check import ch13

pytestmark = pytest.mark.gpu


def test_the_chapter_s_points_are_measured() -> None:
    points = ch13.measured_here(streams=4, document=1024)
    assert [one.label for one in points] == ["serial:128", "overlap:128", "ticks:512", "mixed:128"]
    assert {one.origin for one in points} == {"measured"}
    assert all(0 < one.p99_gap <= one.max_gap and one.prompt_rate > 0 for one in points)
    assert [one.overlap for one in points] == [False, True, True, False]
