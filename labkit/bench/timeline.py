"""What ran when, seen from outside the engine: which gap a prompt fell into, and who decoded meanwhile.

A *stall* is a gap of a steady stream that is longer than ``factor`` times the middle gap without prefill;
it is tagged with the kind of prefill work that ran in it, or "none".

The *capacity gate*: prefill work counts as beside a full decode batch if, when it joined, every steady
stream was decoding, and a decode step with all of them has joined since the piece of prefill work before.
Figures of a run in which less than ``LEAST_BESIDE`` of the prompt tokens were computed so say nothing about
what prefill does to decode: such a cell does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from labkit.engine.engine import Engine
from labkit.engine.metrics import Spread
from labkit.engine.request import Request, Status
from labkit.engine.work import MixedWork, SlicedPrefillWork, Work
from labkit.errors import require

Tag = Literal["none", "chunk", "slice", "mixed"]
"""Prefill work that ran in a gap."""

LEAST_BESIDE = 0.99
STALL_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A work, or a slice of one, with prefill in it: from its launch to its join."""

    start: float
    end: float
    tag: Tag


@dataclass(slots=True)
class Timeline:
    """Watches an engine through ``runner.watch``.

    Args:
        engine: watched from now on.
        streams: the steady streams.

    Attributes:
        pieces: prefill work of others than the streams, in order of joins.
        prompt_tokens: computed for others than the streams.
        beside: those of them beside a full decode batch.
        full_steps: joins of decode steps with all streams.
    """

    engine: Engine
    streams: Sequence[Request]
    pieces: list[Piece] = field(default_factory=list)
    prompt_tokens: int = 0
    beside: int = 0
    full_steps: list[float] = field(default_factory=list)
    _fresh: bool = False  # a full decode step has joined since the last piece
    _slices_full: bool = True  # those of the sliced prefill under way

    def __post_init__(self) -> None:
        self.engine.runner.watch = self._joined

    def _joined(self, work: Work, now: float) -> None:
        ours = set(self.streams)
        if work.has_decode and ours <= {row.request for row in work.rows}:
            self.full_steps.append(now)
            self._fresh = True
        if not work.has_prefill:
            return
        rows = work.rows[work.decode_rows :] if isinstance(work, MixedWork) else work.rows
        tokens = sum(row.count for row in rows if row.request not in ours)
        if not tokens:
            return
        tag: Tag = "chunk"
        if isinstance(work, MixedWork):
            tag = "mixed"
        elif isinstance(work, SlicedPrefillWork):
            tag = "slice"
        self.pieces.append(Piece(now - work.span, now, tag))
        full = self._fresh and all(one.status is Status.DECODE for one in self.streams)
        if isinstance(work, SlicedPrefillWork):
            # Its tokens count at its last slice; every slice on the way must have been beside the batch.
            self._slices_full = full = full and self._slices_full
            if not work.complete:
                tokens = 0
            else:
                self._slices_full = True
        self._fresh = False
        self.prompt_tokens += tokens
        self.beside += tokens if full else 0

    def tag_of(self, start: float, end: float) -> Tag:
        """What ran between two tokens; of several, the last to join."""
        for piece in reversed(self.pieces):
            if piece.start < end and piece.end > start:
                return piece.tag
        return "none"


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of a steady stream; seconds."""

    end: float
    seconds: float
    tag: Tag


def tagged_gaps(timeline: Timeline, since: float) -> list[Gap]:
    """Every gap of every stream that begins at ``since`` or later."""
    known: dict[tuple[float, float], Tag] = {}  # the rows of a step share theirs
    found = []
    for request in timeline.streams:
        for start, end in pairwise(request.token_times):
            if start < since:
                continue
            tag = known.get((start, end))
            if tag is None:
                tag = known[start, end] = timeline.tag_of(start, end)
            found.append(Gap(end, end - start, tag))
    return found


@dataclass(frozen=True, slots=True)
class Gate:
    """The capacity gate of one run.

    Attributes:
        streams: rows of a full decode batch.
        prompt_tokens, beside: computed for prompts; beside a full decode batch.
        expected: tokens that the prompts have.
        full_steps: decode steps with all streams, while a prompt was waiting or computed.
    """

    streams: int
    prompt_tokens: int
    beside: int
    expected: int
    full_steps: int

    @property
    def reason(self) -> str:
        """Why the run does not count; empty if it does."""
        if self.prompt_tokens < self.expected:
            return f"only {self.prompt_tokens} of {self.expected} prompt tokens were computed"
        if not self.full_steps:
            return f"no decode step with all {self.streams} streams while a prompt was there"
        if self.beside < LEAST_BESIDE * self.prompt_tokens:
            share = 100 * self.beside / max(self.prompt_tokens, 1)
            return f"only {share:.0f} % of the prompt tokens ran beside {self.streams} decoding streams"
        return ""

    @property
    def passed(self) -> bool:
        """Whether the run counts."""
        return not self.reason

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self) | {"passed": self.passed}


def gate(timeline: Timeline, prompts: Sequence[Request]) -> Gate:
    """The gate of a run whose prompts have had their first token, or have ended without one."""
    windows = [(one.arrival, one.token_times[0]) for one in prompts if one.token_times]
    steps = [now for now in timeline.full_steps if any(start < now <= end for start, end in windows)]
    return Gate(
        streams=len(timeline.streams),
        prompt_tokens=timeline.prompt_tokens,
        beside=timeline.beside,
        expected=sum(one.prompt_len for one in prompts),
        full_steps=len(steps),
    )


def stalls(gaps: Sequence[Gap], *, factor: float = STALL_FACTOR) -> dict[str, Any]:
    """Long gaps, counted by what ran in them.

    Args:
        gaps: of steady streams, with and without prefill.
        factor: times the middle gap without prefill; above 1.

    Returns:
        ``threshold_s``; ``of`` (all gaps); ``count``, ``seconds`` and ``longest_s`` of the stalls;
        ``by_tag`` with the same three of each tag that has any.
    """
    require(factor > 1, "factor", factor, "above 1")
    steady = Spread.of(gap.seconds for gap in gaps if gap.tag == "none")
    middle = steady.p50 if steady.p50 is not None else Spread.of(gap.seconds for gap in gaps).p50
    if middle is None:
        return {"threshold_s": None, "of": 0, **_sums([]), "by_tag": {}}
    long = [gap for gap in gaps if gap.seconds > factor * middle]
    tags = dict.fromkeys(gap.tag for gap in long)
    by_tag = {tag: _sums([gap for gap in long if gap.tag == tag]) for tag in tags}
    return {"threshold_s": factor * middle, "of": len(gaps), **_sums(long), "by_tag": by_tag}


def _sums(gaps: Sequence[Gap]) -> dict[str, Any]:
    seconds = [gap.seconds for gap in gaps]
    return {"count": len(gaps), "seconds": sum(seconds), "longest_s": max(seconds, default=0.0)}


def settle(engine: Engine, streams: Sequence[Request], tokens: int, *, until: Callable[[], bool]) -> None:
    """Step until every stream has so many tokens more, or one of them has ended, or ``until``."""
    goals = [(one, len(one.output_ids) + tokens) for one in streams]
    while not until() and any(len(one.output_ids) < goal for one, goal in goals):
        if any(one.status.final for one in streams):
            return
        engine.step()
