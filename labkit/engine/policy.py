"""Policies: what the next work is, from what is ready and what is in flight. No policy changes any token.

The scheduler shows a :class:`View` and launches the :class:`Pick` it gets, again and again, until the policy
picks nothing; then the engine waits, for all that is in flight (``waits`` "all") or for the first to finish
("first"), and the next cycle begins.

| policy | a cycle | gap between two tokens of a stream, while a prompt is computed |
|---|---|---|
| serial | a decode step, then a chunk, on one lane | decode + chunk |
| overlap | both, on two lanes, joined | max(decode, chunk), at best |
| ticks | each lane on its own, not joined | a decode step, slowed by what runs beside it; or as asked |
| dynamic | like overlap, the chunk sized to hold a gap | as asked, in time |
| mixed | decode rows and a chunk in one forward | a little above the chunk |
| sliced | a decode step, then some layers of a chunk | decode + budget |
| adaptive | what one of the others holds | as asked, once found |

No starvation, in any of them: while prompts wait, at most one decode step runs between two pieces of prefill
work, or prefill has a lane of its own; while answers wait, at most one piece of prefill work runs between
two decode steps (as many as fit into it, where ticks are asked for a gap). What becomes ready first lets the
cycle in flight end. How long a piece takes is bounded by its chunk (serial … mixed) or its budget (sliced).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from labkit.engine.executor import Lane
from labkit.engine.work import SlicedPrefillWork, Work
from labkit.errors import require


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees.

    Attributes:
        now: seconds on the executor's clock.
        ready: requests that can take a decode step now.
        decoding: requests that decode, those in flight included.
        prompt_tokens: tokens to prefill of prompts that are admitted and not in flight.
        oldest: arrival of the oldest prompt that has no token yet, waiting ones included; None without.
        in_flight: works launched, not joined, in the order of launches.
        partial: a sliced prefill between two of its slices.
        ahead: a decode step may be launched before the one in flight has joined.
        num_layers: of the model.
        two_lanes: prefill work can run beside a decode step.
    """

    now: float
    ready: int
    decoding: int
    prompt_tokens: int
    oldest: float | None
    in_flight: tuple[Work, ...]
    partial: SlicedPrefillWork | None
    ahead: bool
    num_layers: int
    two_lanes: bool = False

    @property
    def prefill_waits(self) -> bool:
        """Whether prefill work could be launched."""
        return self.prompt_tokens > 0 or self.partial is not None

    @property
    def prefill_runs(self) -> bool:
        """Whether prefill work is in flight."""
        return any(work.has_prefill for work in self.in_flight)

    @property
    def decode_runs(self) -> bool:
        """Whether decode work is in flight."""
        return any(work.has_decode for work in self.in_flight)


@dataclass(frozen=True, slots=True)
class Pick:
    """A work to launch: ``tokens`` of prompts at most, and ``layers`` of a slice."""

    kind: Literal["decode", "prefill", "mixed", "slice"]
    tokens: int = 0
    lane: Lane = "decode"
    layers: int = 0


DECODE = Pick("decode")

_LEAST = 8  # tokens of prompts in a mixed step whose decode rows are many


class Policy:
    """Base of all; keeps no books, only what it has seen."""

    name: ClassVar[str] = ""
    waits: Literal["all", "first"] = "all"
    overlaps: bool = False
    """Uses two lanes."""
    wake: float | None = None
    """Where ``pick`` has found nothing: the clock at which to ask again, though nothing may have joined."""

    def pick(self, view: View) -> Pick | None:
        """The next work; None to wait for what is in flight (or for requests)."""
        raise NotImplementedError

    def observe(self, work: Work, now: float) -> None:
        """A work, or a slice of one, has joined."""


class Serial(Policy):
    """A decode step, then a chunk, one after the other on one lane; the baseline.

    Args:
        chunk: prompt tokens of a step, at most.
    """

    name = "serial"
    lane: Lane = "decode"

    def __init__(self, chunk: int = 128) -> None:
        _check_chunk(chunk)
        self.chunk = chunk
        self._chunk_due = False

    def pick(self, view: View) -> Pick | None:
        if not view.in_flight:
            self._chunk_due = True
            if view.ready:
                return DECODE
        if self._chunk_due:
            self._chunk_due = False
            if view.prefill_waits:
                return self.prefill(view)
        return DECODE if view.ahead and not view.prefill_waits and not view.prefill_runs else None

    def prefill(self, view: View) -> Pick:
        """The cycle's prefill work."""
        return Pick("prefill", self.chunk, self.lane)


class Overlap(Serial):
    """Decode step and chunk on two lanes, both joined before either goes on: what the seed does.

    The gap is then at least the chunk's own time, whatever the overlap: max(decode, chunk) at best, where
    serial has decode + chunk.
    """

    name = "overlap"
    overlaps = True
    lane: Lane = "prefill"


class Ticks(Policy):
    """Decode steps follow each other on a lane of their own, of high priority; a chunk runs beside them for
    as long as it takes, and neither waits for the other.

    Args:
        chunk: prompt tokens of a piece of prefill work, at most.
        gap: seconds between two tokens of a stream while a chunk runs. The chunk has the device to itself
            until a decode step has to begin, to end in time; so gaps are as long as a bound on them allows.
            How long a step takes beside a chunk, and by how much it may be late, is what has been seen: what
            is new (a first chunk, more rows) may exceed the gap once. None begins each step as soon as the
            last has ended.
    """

    name = "ticks"
    waits = "first"
    overlaps = True

    def __init__(self, chunk: int = 512, *, gap: float | None = None) -> None:
        _check_chunk(chunk)
        require(gap is None or (gap > 0 and math.isfinite(gap)), "gap", gap, "seconds above 0, or None")
        self.chunk, self.gap = chunk, gap
        self._last = self._begun = 0.0  # the last decode step's end, and the next one's begin
        self._span = self._margin = 0.0  # s of a step beside a chunk, the mean; and later than it, at most
        self._beside = self._paced = False  # of the step in flight: a chunk runs, and it was to wait for that

    @property
    def pauses(self) -> bool:
        """Whether the gap leaves time between two decode steps."""
        return self.gap is not None and self.gap > self._margin + self._span

    def pick(self, view: View) -> Pick | None:
        self.wake = None
        if view.ready and not view.decode_runs:
            begin = 0.0
            if (
                self.gap and self._span and view.two_lanes
            ):  # on one lane the step would stand behind the chunk
                begin = self._last + self.gap - self._margin - self._span
            if view.now >= begin or not (view.prefill_waits or view.prefill_runs):
                self._begun, self._beside = view.now, view.prefill_runs
                return DECODE
            self.wake, self._paced = begin, True
        if view.prefill_waits and not view.prefill_runs:
            return Pick("prefill", self.chunk, "prefill")
        paced = self.gap is not None and view.prefill_runs
        return DECODE if view.ahead and not paced else None

    def observe(self, work: Work, now: float) -> None:
        if not work.has_decode:
            return
        if self._beside:
            span = now - self._begun
            self._span += (span - self._span) / (5 if self._span else 1)
            if self._paced and self.gap is not None:
                late = now - self._last - (self.gap - self._margin)
                self._margin = min(max(late, 0.99 * self._margin), 0.25 * self.gap)
        self._last, self._beside, self._paced = now, False, False


class Dynamic(Overlap):
    """Overlap whose chunk shrinks while answers wait for their next token.

    The size follows what is measured: it shrinks in proportion when a cycle took longer than the target,
    and grows, by a quarter at most, when there is room.

    Args:
        chunk: prompt tokens of a step while nothing decodes.
        target_gap: seconds that a cycle with both may take; None takes a fixed ``least`` instead.
        least: prompt tokens of a step, at least.
    """

    name = "dynamic"

    def __init__(self, chunk: int = 512, *, target_gap: float | None = None, least: int = 16) -> None:
        super().__init__(chunk)
        _check_chunk(least)
        require(target_gap is None or target_gap > 0, "target_gap", target_gap, "seconds above 0, or None")
        self.target_gap, self.least = target_gap, min(least, chunk)
        self.size = float(self.least)
        self._last_decode: float | None = None
        self._chunk_seen = 0

    def prefill(self, view: View) -> Pick:
        size = int(self.size) if view.decoding else self.chunk
        return Pick("prefill", size, self.lane)

    def observe(self, work: Work, now: float) -> None:
        if work.has_prefill:
            self._chunk_seen = work.prompt_tokens
        if work.has_decode:
            last, self._last_decode = self._last_decode, now
            seen, self._chunk_seen = self._chunk_seen, 0
            # Only a full chunk says something about its size.
            if self.target_gap is not None and last is not None and seen >= int(self.size) and now > last:
                factor = min(max(self.target_gap / (now - last), 0.25), 1.25)
                self.size = min(max(self.size * factor, self.least), self.chunk)


class Mixed(Policy):
    """Decode rows and a chunk in one forward: the weights are read once for both.

    Args:
        chunk: prompt tokens beside decode rows, at most.
        alone: prompt tokens of a step while nothing decodes; None for ``chunk``.
        whole: ``chunk`` counts the decode rows too (at least 8 tokens of prompts, all the same). Kernels and
            graphs have sizes such as 64 and 128; a step of these rows leaves none of them empty.
    """

    name = "mixed"

    def __init__(self, chunk: int = 64, *, alone: int | None = None, whole: bool = False) -> None:
        _check_chunk(chunk)
        self.chunk, self.alone, self.whole = chunk, chunk if alone is None else alone, whole
        _check_chunk(self.alone)

    def beside(self, rows: int) -> int:
        """Prompt tokens beside so many decode rows, at most."""
        return max(self.chunk - rows, min(self.chunk, _LEAST)) if self.whole else self.chunk

    def pick(self, view: View) -> Pick | None:
        if view.in_flight:
            return DECODE if view.ahead and not view.prefill_waits and not view.prefill_runs else None
        if view.prefill_waits and view.ready:
            return Pick("mixed", self.beside(view.ready))
        if view.prefill_waits:
            return Pick("prefill", self.alone)
        return DECODE if view.ready else None


class Sliced(Serial):
    """Serial, with the chunk cut at layer boundaries: a decode step, then as many layers as the budget
    allows. No shape changes, so that the bits are those of the whole chunk, which can be long.

    Args:
        chunk: prompt tokens of a whole prefill, at most.
        budget: seconds of prefill between two decode steps; at least one layer is computed.
        beside: slices run on the prefill lane, beside the decode step, both joined: the gap is then
            max(decode, budget) at best.
    """

    name = "sliced"

    def __init__(self, chunk: int = 512, *, budget: float = 0.005, beside: bool = False) -> None:
        super().__init__(chunk)
        self.overlaps, self.lane = beside, "prefill" if beside else "decode"
        require(budget > 0 and math.isfinite(budget), "budget", budget, "seconds above 0")
        self.budget = budget
        self._layer_seconds: float | None = None  # of one layer
        self._tokens = self._most = 0  # that layer's tokens, and the most layers of a slice so far

    def prefill(self, view: View) -> Pick:
        if not view.decoding:
            layers = view.num_layers
        elif self._layer_seconds and view.partial is not None:
            tokens = view.partial.tokens
            # Fewer tokens may cost as much: the weights are read and the kernels launched all the same.
            seconds = self._layer_seconds * max(tokens / self._tokens, 1.0)
            # What is queued behind a decode step hides the host's time; a longer slice may show it.
            layers = min(max(1, int(self.budget / seconds)), 2 * self._most)
        else:
            layers = 1  # of a new chunk: it is prepared in the same gap
        return Pick("slice", self.chunk, self.lane, layers)

    def observe(self, work: Work, now: float) -> None:
        if isinstance(work, SlicedPrefillWork) and work.slice_seconds > 0:
            if work.next_layers < work.num_layers or not self._most:
                self._most = max(self._most, work.next_layers)
            if 2 * work.tokens < self._tokens:
                return  # the rest of a prompt says little about whole chunks
            one = work.slice_seconds / work.next_layers
            last = self._layer_seconds
            if last is not None:
                last *= max(work.tokens / self._tokens, 1.0)
            # Slower is believed at once, faster by and by: the budget is to be held.
            self._layer_seconds = one if last is None or one > last else 0.75 * last + 0.25 * one
            self._tokens = work.tokens


def share(budget: int, wanted: Sequence[int]) -> list[int]:
    """Tokens for each prompt, the oldest first: half for that one, the rest to those that need least."""
    if not wanted or budget < 1:
        return [0] * len(wanted)
    given = [0] * len(wanted)
    given[0] = min(wanted[0], budget if len(wanted) == 1 else -(-budget // 2))
    left = budget - given[0]
    for index in sorted(range(1, len(wanted)), key=wanted.__getitem__):
        given[index] = min(wanted[index], left)
        left -= given[index]
    given[0] += min(wanted[0] - given[0], left)
    return given


def _check_chunk(chunk: object) -> None:
    whole = isinstance(chunk, int) and not isinstance(chunk, bool)
    require(whole and chunk >= 1, "chunk", repr(chunk), "a whole number of tokens, at least 1")  # type: ignore[operator]
