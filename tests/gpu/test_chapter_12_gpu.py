"""Chapter 12's lab on a GPU: two real streams, both counters, times from the works' own events."""

from __future__ import annotations

import itertools

import pytest

from labkit.widgets.overlap_lab import OverlapLab
from labkit.widgets.overlap_run import SIZES, machine

pytestmark = pytest.mark.gpu


def test_only_the_overlap_counts_streams_and_no_token_changes() -> None:
    here = machine("cuda")
    off, on, ticks = (
        here.run(policy, overlap, 128)
        for policy, overlap in (("overlap", False), ("overlap", True), ("ticks", True))
    )
    assert off.overlap_steps > 0 and off.stream_overlap_steps == 0
    assert on.overlap_steps == on.stream_overlap_steps > 0
    assert ticks.stream_overlap_steps > 0
    assert off.busy_both == 0
    for run in (off, on, ticks):
        assert run.origin == "measured"
        assert sum(block.prompt_tokens for block in run.blocks) == SIZES["cuda"][1]
        for lane in ("decode", "prefill"):
            works = [block for block in run.blocks if block.lane == lane]
            # Both streams' events are read on one clock; those of one stream do not run into each other.
            assert all(a.end <= b.start + 1e-4 for a, b in itertools.pairwise(works))
    for answers in zip(off.answers, on.answers, ticks.answers, strict=True):
        longest = max(answers, key=len)
        assert all(answer == longest[: len(answer)] for answer in answers)


def test_the_lab_says_measured_and_measures_again() -> None:
    lab = OverlapLab("overlap", True, 128, "cuda")
    first = lab.run
    assert "measured" in lab.text() and "pretended" not in lab.text()
    lab.press("again")
    assert lab.run is not first
