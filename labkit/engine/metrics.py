"""Latency and goodput of requests by the usual definitions, counters, and the state that /status shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from labkit.errors import require


class Timed(Protocol):
    """A request, as far as its times go; seconds on one monotonic (or simulated) clock."""

    @property
    def arrival(self) -> float: ...

    @property
    def token_times(self) -> Sequence[float]:
        """When each output token was there, in order."""

    @property
    def finish_reason(self) -> str | None: ...


def ttft(request: Timed) -> float | None:
    """Time to first token: first token − arrival, queueing included; None without a token."""
    return request.token_times[0] - request.arrival if request.token_times else None


def tpot(request: Timed) -> float | None:
    """Time per output token after the first: (last − first) / (n − 1); None below two tokens."""
    times = request.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def gaps(request: Timed) -> list[float]:
    """Every inter-token latency (ITL) of a request, n − 1 of them; the wait for the first is none."""
    times = request.token_times
    return [later - earlier for earlier, later in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of some values, in their unit; all None for no values. Percentiles are linear
    between samples (numpy's default)."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of any number of values."""
        taken = np.fromiter(values, np.float64)
        if not len(taken):
            return cls(0)
        p50, p95, p99 = np.percentile(taken, (50, 95, 99)).tolist()
        return cls(len(taken), float(taken.mean()), p50, p95, p99, float(taken.max()))


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Service level of one request, in seconds; None sets no bound.

    Args:
        ttft, tpot: as defined above.
        max_gap: longest inter-token latency.

    Raises:
        InputError: a bound that is not above 0.
    """

    ttft: float | None = None
    tpot: float | None = None
    max_gap: float | None = None

    def __post_init__(self) -> None:
        for name, bound in asdict(self).items():
            require(bound is None or bound > 0, name, bound, "seconds above 0, or None")

    def met(self, request: Timed) -> bool:
        """Whether the request ended well ("stop" or "length") within every bound."""
        if request.finish_reason not in ("stop", "length") or not request.token_times:
            return False
        bounds = ((self.ttft, ttft(request)), (self.tpot, tpot(request)))
        # One token has no gap: it cannot miss a bound on gaps.
        late = any(bound is not None and value is not None and value > bound for bound, value in bounds)
        return not late and (self.max_gap is None or max(gaps(request), default=0.0) <= self.max_gap)


@dataclass(frozen=True, slots=True)
class Latency:
    """Of a set of requests: TTFT and TPOT one value a request, ITL pooled over all tokens; seconds."""

    ttft: Spread
    tpot: Spread
    itl: Spread

    @classmethod
    def of(cls, requests: Iterable[Timed]) -> Latency:
        """Requests without a token add nothing."""
        requests = list(requests)
        return cls(
            Spread.of(value for r in requests if (value := ttft(r)) is not None),
            Spread.of(value for r in requests if (value := tpot(r)) is not None),
            Spread.of(gap for r in requests for gap in gaps(r)),
        )


def span(requests: Iterable[Timed]) -> float:
    """Seconds from the first arrival to the last token; 0 without tokens."""
    requests = list(requests)
    ends = [r.token_times[-1] for r in requests if r.token_times]
    return max(ends) - min(r.arrival for r in requests) if ends else 0.0


def goodput(requests: Iterable[Timed], slo: Slo, seconds: float | None = None) -> float:
    """Requests that meet every bound, per second of ``seconds`` (None: their :func:`span`)."""
    requests = list(requests)
    taken = span(requests) if seconds is None else seconds
    require(math.isfinite(taken) and taken >= 0, "seconds", taken, "a duration")
    return sum(slo.met(r) for r in requests) / taken if taken else 0.0


@dataclass(slots=True)
class Counters:
    """Totals since the start; they only grow.

    Attributes:
        steps: engine cycles that held work.
        prefill_decode_overlap_steps: cycles with prefill and decode work both.
        prefill_decode_stream_overlap_steps: those where both were launched on two CUDA streams.
        prompt_tokens, output_tokens: of requests, counted once whatever is computed again.
        prefill_tokens: tokens that prefill work computed, recomputation included.
        preemptions: requests put back to the queue.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up, and found.
        finished: requests ended, by reason.
    """

    steps: int = 0
    prefill_decode_overlap_steps: int = 0
    prefill_decode_stream_overlap_steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    def count_step(self, *, prefill: bool, decode: bool, two_streams: bool) -> None:
        """One cycle.

        Args:
            prefill, decode: the cycle held such work (one forward with both kinds counts for both).
            two_streams: the two were separate launches on two CUDA streams. Never true on a CPU, in a
                simulation, or with the overlap turned off.

        Raises:
            InputError: two streams without both kinds of work.
        """
        both = prefill and decode
        require(both or not two_streams, "two_streams", True, "False in a cycle without both kinds of work")
        self.steps += prefill or decode
        self.prefill_decode_overlap_steps += both
        self.prefill_decode_stream_overlap_steps += two_streams

    def copy(self) -> Counters:
        """As they stand now."""
        return replace(self, finished=dict(self.finished))

    def count_finish(self, reason: str) -> None:
        """One request ended."""
        self.finished[reason] = self.finished.get(reason, 0) + 1


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State at one moment, for /status.

    Attributes:
        policy, executor: names, such as "mixed" and "simulated from quoted".
        overlap: prefill and decode may run beside each other.
        concurrent: the executor has two real streams.
        waiting, prefilling, decoding: requests by status.
        blocks, blocks_free, blocks_idle: KV blocks of the pool; never used; kept for the prefix cache
            alone. The rest is in use.
        block_size: tokens of a block.
        counters: a copy.
        latency: of the requests that the engine still remembers.
    """

    policy: str
    executor: str
    overlap: bool
    concurrent: bool
    waiting: int
    prefilling: int
    decoding: int
    blocks: int
    blocks_free: int
    blocks_idle: int
    block_size: int
    counters: Counters
    latency: Latency

    @property
    def blocks_used(self) -> int:
        """Blocks that some request references."""
        return self.blocks - self.blocks_free - self.blocks_idle

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: no NaN, no infinity."""
        return asdict(self) | {"blocks_used": self.blocks_used}
