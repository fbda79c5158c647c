"""Chapter 10's own times on a GPU: paged attention in FP16 and INT8, found right before it is timed."""

from __future__ import annotations

import pytest

from labkit.check import ch10

pytestmark = pytest.mark.gpu


def test_the_chapter_s_rows_are_measured() -> None:
    rows = ch10.gpu_rows((1024,), batch=4)
    names = ["paged kernel, FP16", "paged kernel, INT8", "torch, gathered first, FP16"]
    assert sorted(row["what"] for row in rows) == sorted(names)
    assert all(row["origin"] == "measured" and row["µs"] > 0 and row["context"] == 1024 for row in rows)
