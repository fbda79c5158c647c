"""The part of ``labkit bench gemm`` that runs on a GPU: copies, checks, samples.

What costs GPU time is done once for all M of a weight: its copies, its layouts in every contender's
own form, the FP64 product (of the largest M; smaller batches are its first rows), and the check of
every copy. The other M's check the first and the last copy.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit.bench import ceilings, contenders, machine, timing
from labkit.bench.cases import Case, grouped
from labkit.bench.check import Reference, check, references
from labkit.bench.gemm import first_line, line, new_entry
from labkit.bench.record import Entry, Record
from labkit.quant.formats import QuantWeight

if TYPE_CHECKING:
    from labkit.bench.gemm import Options, Report


def measure(options: Options, record: Record, report: Report) -> None:
    """Run every case of the options on torch's current GPU, and put what comes out into the record."""
    index = machine.gpu_index()
    record.clocks.append(machine.clocks("before", index))
    record.ceilings, said = ceilings.measure()
    record.notes.append(said)
    found = options.cases()
    _compile(found, record, report)
    bench = Bench(options, record.device.get("l2_bytes"), report)
    last = ""
    with timing.side_stream():
        for together in grouped(found):
            table = together[0].table
            if last and table != last:
                record.clocks.append(machine.clocks(f"after {last}", index))
            last = table
            bench.group(together, record.entries)
    with ceilings.busy():
        record.clocks.append(machine.clocks("under load (a copy, right after)", index))
    record.clocks.append(machine.clocks("after", index))


def _compile(found: Sequence[Case], record: Record, report: Report) -> None:
    """What contenders compile for a whole run: before it, so that no figure waits for a compiler."""
    began = time.monotonic()
    for name in dict.fromkeys(name for case in found for name in case.contenders):
        contenders.get(name).compile([case for case in found if name in case.contenders])
    record.parameters["compile_seconds"] = round(time.monotonic() - began, 1)
    if record.parameters["compile_seconds"] >= 1:
        report(f"compiled kernels of peers: {record.parameters['compile_seconds']} s")


@dataclass
class _Lane:
    """One contender on one weight: its calls, one a copy, and what they are compared with.

    Attributes:
        wanted: M → reference.
        x: input of the largest M; smaller ones are its first rows.
        checked: every copy was found right.
        reason: why there are no calls, as (status, note).
    """

    contender: contenders.Contender
    x: Tensor
    wanted: dict[int, Reference]
    calls: list[contenders.Call] = field(default_factory=list)
    checked: bool = False
    reason: tuple[str, str] | None = None


@dataclass
class Bench:
    """Groups of cases one after another; the copies of a weight serve every M of its shape."""

    options: Options
    l2_bytes: int | None
    report: Report
    device: str = "cuda"
    clock: timing.Clock = field(default_factory=timing.EventClock)

    def group(self, together: Sequence[Case], entries: list[Entry]) -> None:
        """Cases of one weight, which differ in M; ``entries`` grows case by case."""
        lanes: dict[str, _Lane] = {}
        shared = _Shared(together, self._copies(together[0]))
        for case in together:
            here: list[Entry] = []
            ready: dict[str, timing.Timed] = {}
            for name in case.contenders:
                entry, timed = self._prepare(case, name, shared, lanes)
                here.append(entry)
                if timed is not None:
                    ready[name] = timed
            for name, samples in timing.interleave(ready, self.options.samples, clock=self.clock).items():
                next(entry for entry in here if entry.contender == name).samples_us = samples
            ready.clear()
            entries += here
            self.report(line(case, here))
        lanes.clear()
        del shared
        gc.collect()

    def case(self, case: Case) -> list[Entry]:
        """One case alone."""
        entries: list[Entry] = []
        self.group([case], entries)
        return entries

    def _copies(self, case: Case) -> list[QuantWeight]:
        first = contenders.random_weight(case, self.device)
        return [first, *(contenders.clone(first) for _ in range(self._count(case.weight_bytes) - 1))]

    def _count(self, nbytes: int) -> int:
        # A third of what is free: packed copies, those of the other contenders, and room for what calls need.
        return timing.copies_needed(nbytes, self.l2_bytes, free_bytes() // 3)

    def _prepare(
        self, case: Case, name: str, shared: _Shared, lanes: dict[str, _Lane]
    ) -> tuple[Entry, timing.Timed | None]:
        contender = contenders.get(name)
        entry = new_entry(case, contender)
        reason = contender.why_not(case, shared.weights[0])
        if reason:
            entry.status, entry.note = "unavailable", reason
            return entry, None
        try:
            lane = lanes.setdefault(name, _Lane(contender, shared.x, {}))
            if not lane.calls and not lane.reason:
                self._fill(case, lane, shared)
            if lane.reason:
                entry.status, entry.note = lane.reason
                return entry, None
            entry.method = contender.method(case, shared.weights[0])
            if not self._right(case, lane, entry):
                return entry, None
            return entry, self._timed(case, lane, entry)
        except _EXPECTED as error:
            entry.status, entry.note = _reason(error)
        return entry, None

    def _fill(self, case: Case, lane: _Lane, shared: _Shared) -> None:
        """Make the calls of a contender; when it cannot, that is so for every M."""
        contender = lane.contender
        own = isinstance(contender, contenders.OwnKernel)
        try:
            copies = len(shared.weights) if own else self._count(contender.nbytes(case))
            lane.x, lane.wanted = shared.reference(contender)
            lane.calls = contender.calls(case, shared.weights, copies)
        except _EXPECTED as error:
            lane.reason = _reason(error)

    def _right(self, case: Case, lane: _Lane, entry: Entry) -> bool:
        """Check the calls on this M; every copy the first time, then the first and the last."""
        x, wanted = lane.x[: case.m], lane.wanted[case.m]
        last = len(lane.calls) - 1
        for i in range(len(lane.calls)) if not lane.checked else sorted({0, last}):
            verdict = check(lane.calls[i], x, wanted, repeatable=lane.contender.repeatable and i == 0)
            if i == 0 or verdict.problem:
                entry.error = verdict.to_json()
            if verdict.problem:
                entry.status, entry.note = "wrong", f"copy {i}: {verdict.problem}"
                return False
        lane.checked = True
        return True

    def _timed(self, case: Case, lane: _Lane, entry: Entry) -> timing.Timed:
        x, nbytes, copies = lane.x[: case.m], entry.weight_bytes, len(lane.calls)
        calls: list[Callable[[], Any]] = [lambda call=call: call(x) for call in lane.calls]  # type: ignore[misc]
        cold = 2 * self.l2_bytes if self.l2_bytes else timing.COLD_BYTES
        us = timing.rough_us(calls[0], self.clock)
        timed = timing.prepare(calls, graph=self.options.graph, us=us, cold_copies=-(-cold // nbytes))
        used = min(copies, timed.calls)
        entry.method |= {"how": timed.how, "calls": timed.calls, "copies": used}
        if used * nbytes < cold:
            read = f"a pass over {used} copies reads {used * nbytes} bytes"
            entry.note = f"{read}: the cache may have been warm"
        return timed


# What a contender that cannot or does not work raises: the rest of the run goes on without it.
_EXPECTED = (contenders.Unavailable, RuntimeError, ValueError)


def _reason(error: Exception) -> tuple[str, str]:
    if isinstance(error, contenders.Unavailable):
        return "unavailable", str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "unavailable", f"not enough GPU memory: {first_line(error)}"
    return "failed", first_line(error)


class _Shared:
    """What all contenders of a group have in common: copies of the weight, input, references."""

    def __init__(self, together: Sequence[Case], weights: list[QuantWeight]) -> None:
        self.weights = weights
        self.rows = [case.m for case in together]
        self.largest = max(together, key=lambda case: case.m)
        self.x = contenders.random_input(self.largest, str(weights[0].device))
        self._references: dict[tuple[str, int], tuple[Tensor, dict[int, Reference]]] = {}

    def reference(self, contender: contenders.Contender) -> tuple[Tensor, dict[int, Reference]]:
        """Input of the largest M in the contender's dtype, and M → reference with its tolerance."""
        weight = self.weights[0]
        held = contender.held(self.largest, weight)
        x = self.x.to(getattr(torch, contender.activations)) if contender.activations else self.x
        key = (str(x.dtype), 0 if held is weight else id(contender))
        if key not in self._references:
            self._references[key] = x, references(x, held, self.rows)
        x, wanted = self._references[key]
        return x, {m: one.allowing(contender.tolerance) for m, one in wanted.items()}


def free_bytes() -> int:
    """Bytes of GPU memory that torch can still hand out, what it keeps for reuse included."""
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + kept
