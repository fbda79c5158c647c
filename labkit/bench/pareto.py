"""The trade between gaps and prefill: points of a jitter record, and which of them nothing beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.bench.jitter import DOCUMENT
from labkit.bench.record import Record
from labkit.errors import require


@dataclass(frozen=True)
class Point:
    """A policy on the document trace of one record; seconds, tokens a second.

    Attributes:
        label: policy, chunk and target, as the command line has them; "no overlap" where that differs.
        policy: its name. overlap: prefill had a lane of its own.
        max_gap, p99_gap: of the steady streams, while a document was computed.
        prompt_rate: prompt tokens a second of the documents.
        origin: "measured", "simulated from quoted", ...
    """

    label: str
    policy: str
    overlap: bool
    max_gap: float
    p99_gap: float
    prompt_rate: float
    origin: str


def points(record: Record) -> list[Point]:
    """Every cell of the document trace that counts, in the order of the run."""
    found = []
    for entry in record.of_table(DOCUMENT):
        figures = entry.figures
        if entry.status != "timed" or figures["itl_beside"]["max"] is None:
            continue
        gaps = figures["itl_beside"]
        label, policy, origin = entry.contender, figures["policy"], figures["origin"]
        rate, lanes = figures["prompt_tok_s"], figures["two_lanes"]
        found.append(Point(label, policy, lanes, gaps["max"], gaps["p99"], rate, origin))
    return found


def front(found: Sequence[Point], gap: str = "max_gap") -> list[Point]:
    """Points that no other beats in both the gap and the rate, the smallest gap first.

    Args:
        gap: "max_gap" or "p99_gap": two different stories.
    """
    require(gap in ("max_gap", "p99_gap"), "gap", repr(gap), "max_gap or p99_gap")
    kept: list[Point] = []
    for point in sorted(found, key=lambda one: (getattr(one, gap), -one.prompt_rate)):
        if not kept or point.prompt_rate > kept[-1].prompt_rate:
            kept.append(point)
    return kept
