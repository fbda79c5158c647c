"""A lane of an executor: a CUDA stream with what belongs to it, or nothing of the kind on a CPU.

On a stream: a ring of pinned staging for copies to the device, pinned buffers for what comes back, and the
paired waits of labkit.engine.executor. Temporaries come from torch's allocator, which keeps a pool a stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from labkit.cache.views import KVView, StagingRing, ViewBuilder


class LaunchedWork:
    """What a lane has queued: when it ends, and what comes back.

    Attributes:
        fetched: host tensors; complete when the work is done.
        outputs: what the executor keeps with it, for the join.
    """

    def __init__(self) -> None:
        self.started: Any = None
        self.ended: Any = None
        self.fetched: list[Tensor] = []
        self.outputs: Any = None
        self.seconds: float | None = None


class HostLane:
    """Everything runs inside the launch, in order."""

    def __init__(self, device: torch.device, block_size: int, query_tile: int) -> None:
        self.device = device
        self.builder = ViewBuilder(device, block_size, query_tile)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Where work is queued."""
        yield

    @contextmanager
    def launching(self) -> Iterator[LaunchedWork]:
        """Around the calls that compute a work."""
        work = LaunchedWork()
        start = time.monotonic()
        yield work
        work.seconds = time.monotonic() - start

    def view(self, tables: Sequence[Any], counts: Sequence[int], starts: Sequence[int]) -> KVView:
        """The view of a step."""
        return self.builder.build(tables, counts, starts=starts)

    def send(self, ids: Sequence[int]) -> Tensor:
        """int64 [n] on the device."""
        return torch.tensor(ids, dtype=torch.int64)

    def copy_to(self, target: Tensor, nbytes: int, fill: Callable[[Tensor], None]) -> None:
        """Let ``fill`` write ``nbytes`` bytes, and copy them to the start of ``target`` uint8."""
        fill(target[:nbytes])

    def fetch(self, work: LaunchedWork, values: Tensor) -> Tensor:
        """A host copy of ``values``, complete when the work is done."""
        return values.clone()

    def done(self, work: LaunchedWork) -> bool:
        """Whether the work has run."""
        return True

    def join(self, work: LaunchedWork) -> None:
        """Wait until it has."""

    def give_back(self, work: LaunchedWork) -> None:
        """Its fetched tensors have been read."""


class StreamLane:
    """Work goes to a stream and runs when its turn comes.

    Args:
        device: a GPU.
        block_size, query_tile: of the views.
        priority: of the stream; lower numbers go first where a block slot frees.
        timed: record how long works take.
    """

    def __init__(
        self, device: torch.device, block_size: int, query_tile: int, *, priority: int = 0, timed: bool = True
    ) -> None:
        self.device, self.timed = device, timed
        self.stream = torch.cuda.Stream(device, priority=priority)
        self.ring = StagingRing(_pinned, torch.cuda.Event)
        self.builder = ViewBuilder(device, block_size, query_tile, ring=self.ring)
        self._free: list[Tensor] = []  # pinned buffers that nobody reads or writes

    @contextmanager
    def current(self) -> Iterator[None]:
        """Where work is queued."""
        with torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def launching(self) -> Iterator[LaunchedWork]:
        """Around the calls that queue a work; a failure in there leaves nothing running on the lane."""
        work = LaunchedWork()
        self.stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(self.stream):
            try:
                if self.timed:
                    work.started = torch.cuda.Event(enable_timing=True)
                    work.started.record(self.stream)
                yield work
                work.ended = torch.cuda.Event(enable_timing=self.timed)
                work.ended.record(self.stream)
            except BaseException:
                self.stream.synchronize()
                self.give_back(work)
                raise

    def view(self, tables: Sequence[Any], counts: Sequence[int], starts: Sequence[int]) -> KVView:
        """The view of a step, for this lane's stream, which is the current one."""
        return self.builder.build(tables, counts, starts=starts)

    def send(self, ids: Sequence[int]) -> Tensor:
        """int64 [n] on the device; queued on this lane's stream, which is the current one."""
        nbytes = 8 * len(ids)

        def fill(buffer: Tensor) -> None:
            buffer.view(torch.int64).numpy()[:] = ids

        def there(staged: Tensor) -> Tensor:
            made = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            return made.copy_(staged, non_blocking=True)

        sent: Tensor = self.ring.copy(nbytes, fill, there)
        return sent.view(torch.int64)

    def copy_to(self, target: Tensor, nbytes: int, fill: Callable[[Tensor], None]) -> None:
        """Let ``fill`` write ``nbytes`` staged bytes, and queue their copy to the start of ``target``."""
        self.ring.copy(nbytes, fill, lambda staged: target[:nbytes].copy_(staged, non_blocking=True))

    def fetch(self, work: LaunchedWork, values: Tensor) -> Tensor:
        """A pinned host copy of contiguous ``values``, complete when the work is done."""
        nbytes = values.nbytes
        place = next((i for i, one in enumerate(self._free) if one.numel() >= nbytes), None)
        held = _pinned(max(4096, nbytes)) if place is None else self._free.pop(place)
        work.fetched.append(held)
        here = held[:nbytes].view(values.dtype).view(values.shape)
        return here.copy_(values, non_blocking=True)

    def done(self, work: LaunchedWork) -> bool:
        """Whether the work has run, or failed: then the join says so."""
        try:
            return bool(work.ended.query())
        except RuntimeError:
            return True

    def join(self, work: LaunchedWork) -> None:
        """Wait until it has; what the default stream does from here on comes after it."""
        work.ended.synchronize()
        torch.cuda.default_stream(self.device).wait_event(work.ended)
        if self.timed:
            work.seconds = work.started.elapsed_time(work.ended) / 1e3

    def give_back(self, work: LaunchedWork) -> None:
        """Its fetched tensors have been read."""
        self._free += work.fetched
        work.fetched = []


AnyLane = HostLane | StreamLane


def make_lanes(
    device: torch.device, block_size: int, query_tile: int, *, concurrent: bool
) -> dict[str, AnyLane]:
    """The lanes of a device: one for all on a CPU; two streams on a GPU, or one where not ``concurrent``."""
    if device.type != "cuda":
        host = HostLane(device, block_size, query_tile)
        return {"decode": host, "prefill": host}
    _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    decode = StreamLane(device, block_size, query_tile, priority=highest)
    prefill = StreamLane(device, block_size, query_tile) if concurrent else decode
    return {"decode": decode, "prefill": prefill}


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
