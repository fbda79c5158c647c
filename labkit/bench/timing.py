"""Timing on a GPU: cold L2, CUDA graphs, contenders interleaved in one run.

* A weight is never read twice in a row: a sample goes through so many copies of it that the cache
  has forgotten the first when it comes round again.
* A sample is one replay of a CUDA graph of at least eight calls, between two events: the host's
  launches are not what is timed. Where capture does not work, a plain loop is, and the method says so.
* Samples go A B C A B C …, so that a clock that drifts drifts for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from labkit.errors import require
from labkit.kernels.capture import capturing

COLD_BYTES = 256 << 20
"""A sample reads at least this many bytes of weights, or twice the L2 cache if that is more."""

MOST_COPIES = 512
"""A weight so small that it would take more copies is timed with these; the record says when that is warm."""

LEAST_CALLS = 8
LEAST_SAMPLES = 20
LONG_US = 100.0
"""From here on a sample need not pass over all copies: as many as fill the cache twice are enough."""
VERY_LONG_US = 1000.0
"""From here on two calls make a sample long enough to time."""
_WARM_UP = 3
_SLEEP_CYCLES = 1_000_000  # half a millisecond or so: the host gets ahead of the device


class Clock(Protocol):
    """Times the work that is queued between two marks."""

    def mark(self) -> Any:
        """A point in the stream of work."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two marks, once :meth:`wait` has returned."""

    def begin_round(self) -> None:
        """Called before each round of samples."""

    def wait(self) -> None:
        """Until all queued work is done."""


class EventClock:
    """CUDA events on torch's current stream."""

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) * 1e3

    def begin_round(self) -> None:
        import torch

        # An idle device would stamp the first event long before the host has launched what follows.
        if hasattr(torch.cuda, "_sleep"):
            torch.cuda._sleep(_SLEEP_CYCLES)

    def wait(self) -> None:
        import torch

        torch.cuda.synchronize()


@dataclass(frozen=True)
class Timed:
    """Something to take samples of.

    Attributes:
        replay: queues ``calls`` calls.
        calls: calls of one sample.
        how: "CUDA graph", or why it is a plain loop.
    """

    replay: Callable[[], Any]
    calls: int
    how: str


def copies_needed(nbytes: int, l2_bytes: int | None, free_bytes: int | None = None) -> int:
    """Copies of a weight so that a pass over all of them leaves none in the cache.

    Args:
        nbytes: bytes of one copy.
        l2_bytes: size of the L2 cache; None when unknown.
        free_bytes: what the copies may take; None for no limit.

    Returns:
        2 to :data:`MOST_COPIES`, as long as ``free_bytes`` holds that many; at least 1.
    """
    require(nbytes >= 1, "nbytes", nbytes, "at least 1")
    wanted = max(COLD_BYTES, 2 * (l2_bytes or 0))
    copies = min(max(2, -(-wanted // nbytes)), MOST_COPIES)
    if free_bytes is not None:
        copies = min(copies, max(1, free_bytes // nbytes))
    return copies


def plan_calls(copies: int, us: float = 0.0, cold_copies: int = 0) -> int:
    """Calls of one sample: whole passes over the copies, at least :data:`LEAST_CALLS`; fewer of long calls.

    Args:
        copies: copies of the weight.
        us: roughly how long a call takes; 0 for unknown.
        cold_copies: copies that fill the cache twice; all of them when 0.
    """
    whole = copies * -(-LEAST_CALLS // copies)
    if us < LONG_US:
        return whole
    return min(whole, max(2 if us >= VERY_LONG_US else LEAST_CALLS, cold_copies or copies))


def rough_us(call: Callable[[], Any], clock: Clock) -> float:
    """About how long one call takes, µs, without what only a first call does."""
    call()
    clock.wait()
    clock.begin_round()
    start = clock.mark()
    call()
    end = clock.mark()
    clock.wait()
    return clock.elapsed_us(start, end)


def prepare(
    calls: Sequence[Callable[[], Any]], *, graph: bool = True, us: float = 0.0, cold_copies: int = 0
) -> Timed:
    """Make one sample out of calls, each on a copy of the weight of its own.

    Args:
        calls: one function a copy; a sample goes through them in turn.
        graph: capture a CUDA graph; where that fails the calls are made one by one.
        us, cold_copies: as for :func:`plan_calls`.
    """
    count = plan_calls(len(calls), us, cold_copies)

    def one_by_one() -> None:
        for i in range(count):
            calls[i % len(calls)]()

    if not graph:
        return Timed(one_by_one, count, "plain loop")
    try:
        return Timed(captured(one_by_one), count, "CUDA graph")
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Timed(one_by_one, count, f"plain loop: capture failed ({reason[:160]})")


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of ``work`` as a CUDA graph, captured on a stream of its own after one run.

    Raises:
        RuntimeError: something in ``work`` cannot be captured.
    """
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles and sets up whatever the first call does, which cannot be captured
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, stream=stream):
        work()

    def replay(keep: Callable[[], Any] = work) -> None:
        # A graph holds addresses, not tensors: the weights must live as long as it does, so ``keep`` does.
        graph.replay()

    return replay


def interleave(
    contenders: Mapping[str, Timed], samples: int = LEAST_SAMPLES, *, clock: Clock | None = None
) -> dict[str, list[float]]:
    """Time every contender once a round, ``samples`` rounds.

    Args:
        contenders: by name, in the order in which they take turns.
        samples: samples of each, at least 1.
        clock: CUDA events by default.

    Returns:
        Name → µs a call, one value a round, in order.
    """
    require(samples >= 1, "samples", samples, "at least 1")
    clock = clock or EventClock()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(_WARM_UP):
        for contender in contenders.values():
            contender.replay()
    clock.wait()
    for _ in range(samples):
        clock.begin_round()
        marks = {}
        for name, contender in contenders.items():
            start = clock.mark()
            contender.replay()
            marks[name] = (start, clock.mark())
        clock.wait()
        for name, (start, end) in marks.items():
            taken[name].append(round(clock.elapsed_us(start, end) / contenders[name].calls, 4))
    return taken


def median_us(call: Callable[[], Any], samples: int = LEAST_SAMPLES) -> float:
    """Median µs of one call on the GPU, without the host's time for launching it.

    The call reads the same data each time, so a small weight comes from the L2 cache.

    Args:
        call: launches on torch's current stream.
        samples: replays of a CUDA graph of at least :data:`LEAST_CALLS` calls.
    """
    with side_stream():
        return median(interleave({"": prepare([call])}, samples)[""])


@contextlib.contextmanager
def side_stream() -> Any:
    """Everything inside runs on a stream of its own, as an engine's work does; never the legacy stream."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)
