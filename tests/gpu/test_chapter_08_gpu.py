"""Chapter 08's own times on a GPU: the family against its peers, found right before they are timed."""

from __future__ import annotations

import pytest

from labkit.check import ch08

pytestmark = pytest.mark.gpu


def test_the_chapter_s_rows_are_measured() -> None:
    rows = ch08.gpu_rows((5632, 2048), (1, 8))
    assert [(row["weight"], row["M"]) for row in rows] == [
        ("W4 5632×2048", 1),
        ("W4 5632×2048", 8),
        ("W3 5632×2048", 1),
        ("W3 5632×2048", 8),
    ]
    assert all(row["origin"] == "measured" and row["ours"] == "tensor core" for row in rows)
