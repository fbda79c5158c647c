"""``labkit bench gemm``: quantised products against the fallback and dense cuBLAS, in one run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from labkit.bench import contenders, counts, machine, timing
from labkit.bench.cases import GROUP, SWEEP_M, Case, cases, default_shapes, shrunk
from labkit.bench.check import Reference, check, reference
from labkit.bench.record import Entry, Record
from labkit.errors import require

Report = Callable[[str], None]

EMULATED_M = (1, 2, 8, 9, 33)
"""Rows of the sweep on the CPU: each side of both thresholds, and a second row of tiles."""


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        table: one of :data:`labkit.bench.cases.TABLES`.
        shapes: (N, K) of the sweep, None for the articles'.
        m: rows of the sweep; None for :data:`SWEEP_M`, on the CPU :data:`EMULATED_M`.
        formats: "w4", "w3".
        device: "cpu" or "cuda".
        samples: samples of each contender, at least 20 on a GPU.
        graph: capture CUDA graphs.
        group: group size of the sweep.
    """

    table: str = "seed"
    shapes: tuple[tuple[int, int], ...] | None = None
    m: tuple[int, ...] | None = None
    formats: tuple[str, ...] = ("w4", "w3")
    device: str = "cpu"
    samples: int = timing.LEAST_SAMPLES
    graph: bool = True
    group: int = GROUP

    def __post_init__(self) -> None:
        least = timing.LEAST_SAMPLES
        require(self.samples >= least, "samples", self.samples, f"at least {least}: fewer show no spread")
        require(self.device in ("cpu", "cuda"), "device", repr(self.device), "cpu or cuda")
        seen = self.device == "cpu" or torch.cuda.is_available()
        require(seen, "device", "cuda", "a GPU that torch can use", "--device cpu")

    def cases(self) -> list[Case]:
        """The cases, at full size; the emulator gets a few of the sweep unless it is told which."""
        on_gpu = self.device == "cuda"
        rows = self.m or (SWEEP_M if on_gpu else EMULATED_M)
        shapes = self.shapes or (None if on_gpu else default_shapes()[:1])
        return cases(self.table, shapes=shapes, m=rows, formats=self.formats, group=self.group)


def run(options: Options, command: str, report: Report = print) -> Record:
    """Check every contender on every case, then time those that are right.

    Args:
        options: what to run.
        command: the command line, for the record.
        report: receives one line a case while it runs.

    Returns:
        The record; ``complete`` is False when Ctrl-C ended the run.
    """
    on_gpu = options.device == "cuda"
    record = Record(
        name=f"gemm-{options.table}",
        kind="measured" if on_gpu else "emulated",
        command=command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        device=machine.device_facts(options.device),
        software=machine.software_facts(),
        parameters=_parameters(options),
    )
    began = time.monotonic()
    try:
        if on_gpu:
            _on_gpu(options, record, report)
        else:
            _on_cpu(options, record, report)
    except KeyboardInterrupt:
        record.complete = False
        record.notes.append("interrupted: the entries are those that were done")
    record.parameters["seconds"] = round(time.monotonic() - began, 1)
    return record


def _parameters(options: Options) -> dict[str, Any]:
    return {
        "table": options.table,
        "shapes": [list(shape) for shape in options.shapes] if options.shapes else None,
        "m": sorted({case.m for case in options.cases()}),
        "formats": list(options.formats),
        "group": options.group,
        "samples": options.samples,
        "cold_bytes": timing.COLD_BYTES,
        "activations": "float16",
    }


# --- on a GPU: time ---------------------------------------------------------------------------------


def _on_gpu(options: Options, record: Record, report: Report) -> None:
    from labkit.device import measure_copy, measure_matmul

    index = machine.gpu_index()
    record.clocks.append(machine.clocks("before", index))
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    large = properties.total_memory > 12 << 30
    mib, side = (1024, 8192) if large else (256, 4096)
    record.ceilings = {
        "copy_gb_s": round(measure_copy("cuda", mib).value, 1),
        "matmul_tflops": round(measure_matmul("cuda", side).value, 1),
    }
    record.notes.append(f"ceilings: copy of {mib} MiB counting both ways, dense FP16 product, same run")
    bench = _Bench(options, record.device.get("l2_bytes"), report)
    last = ""
    with timing.side_stream():
        for case in options.cases():
            if last and case.table != last:
                record.clocks.append(machine.clocks(f"after {last}", index))
            last = case.table
            record.entries += bench.case(case)
    record.clocks.append(machine.clocks("after", index))


@dataclass
class _Bench:
    """Cases one after another; the copies of a weight serve every M of its shape."""

    options: Options
    l2_bytes: int | None
    report: Report
    device: str = "cuda"
    key: tuple[Any, ...] = ()
    weights: list[Any] = field(default_factory=list)

    def case(self, case: Case) -> list[Entry]:
        weights = self._copies(case)
        x = contenders.random_input(case, self.device)
        wanted = reference(x, weights[0])
        entries: list[Entry] = []
        ready: dict[str, timing.Timed] = {}
        for name in case.contenders:
            entry, timed = self._prepare(case, name, weights, x, wanted)
            entries.append(entry)
            if timed is not None:
                ready[name] = timed
        for name, samples in timing.interleave(ready, self.options.samples).items():
            next(entry for entry in entries if entry.contender == name).samples_us = samples
        ready.clear()
        gc.collect()
        self.report(_line(case, entries))
        return entries

    def _copies(self, case: Case) -> list[Any]:
        key = (case.format, case.n, case.k, case.group)
        if key != self.key:
            self.weights.clear()
            gc.collect()
            first = contenders.random_weight(case, self.device)
            count = self._count(case.weight_bytes)
            self.weights = [first, *(contenders.clone(first) for _ in range(count - 1))]
            self.key = key
        return self.weights

    def _count(self, nbytes: int) -> int:
        # A third of what is free: packed copies, dense copies, and room for what calls need.
        return timing.copies_needed(nbytes, self.l2_bytes, _free_bytes() // 3)

    def _prepare(
        self, case: Case, name: str, weights: list[Any], x: Any, wanted: Reference
    ) -> tuple[Entry, timing.Timed | None]:
        contender = contenders.get(name)
        entry = _entry(case, contender)
        reason = contender.why_not(case, weights[0])
        if reason:
            entry.status, entry.note = "unavailable", reason
            return entry, None
        own = isinstance(contender, contenders.OwnKernel)
        copies = len(weights) if own else self._count(contender.nbytes(case))
        try:
            calls = contender.calls(case, weights, copies)
            for i, call in enumerate(calls):
                verdict = check(call, x, wanted, repeatable=contender.repeatable and i == 0)
                if i == 0 or verdict.problem:
                    entry.error = verdict.to_json()
                if verdict.problem:
                    entry.status, entry.note = "wrong", f"copy {i}: {verdict.problem}"
                    return entry, None
            timed = timing.prepare(_bound(calls, x), graph=self.options.graph)
        except contenders.Unavailable as error:
            entry.status, entry.note = "unavailable", str(error)
            return entry, None
        except (RuntimeError, ValueError) as error:
            entry.status, entry.note = "failed", _first_line(error)
            return entry, None
        entry.method = {"how": timed.how, "calls": timed.calls, "copies": copies}
        passed = copies * contender.nbytes(case)
        if passed < (2 * self.l2_bytes if self.l2_bytes else timing.COLD_BYTES):
            entry.note = f"a pass over {copies} copies reads {passed} bytes: the cache may have been warm"
        return entry, timed


def _free_bytes() -> int:
    """Bytes of GPU memory that torch can still hand out, what it keeps for reuse included."""
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + kept


def _bound(calls: Sequence[contenders.Call], x: Any) -> list[Callable[[], Any]]:
    return [lambda call=call: call(x) for call in calls]  # type: ignore[misc]


# --- on the CPU: right or wrong, and counts ----------------------------------------------------------


def _on_cpu(options: Options, record: Record, report: Report) -> None:
    record.notes.append(
        "no GPU: small shapes in the emulator, right or wrong and counts; no time is measured"
    )
    record.parameters["shrunk"] = True
    for full in options.cases():
        case = shrunk(full)
        weight = contenders.random_weight(case, "cpu")
        x = contenders.random_input(case, "cpu")
        wanted = reference(x, weight)
        entries = [_emulate(case, name, weight, x, wanted) for name in case.contenders]
        record.entries += entries
        report(_line(case, entries))


def _emulate(case: Case, name: str, weight: Any, x: Any, wanted: Reference) -> Entry:
    contender = contenders.get(name)
    entry = _entry(case, contender)
    entry.status = "emulated"
    reason = contender.why_not(case, weight)
    if reason:
        entry.status, entry.note = "unavailable", reason
        return entry
    try:
        call = contender.calls(case, [weight], 1)[0]
        verdict = check(call, x, wanted, repeatable=contender.repeatable)
        entry.error = verdict.to_json()
        if verdict.problem:
            entry.status, entry.note = "wrong", verdict.problem
            return entry
        entry.counts = counts.of(name, case, x, weight)
    except contenders.Unavailable as error:
        entry.status, entry.note = "unavailable", str(error)
    except (RuntimeError, ValueError) as error:
        entry.status, entry.note = "failed", _first_line(error)
    return entry


# --- both -------------------------------------------------------------------------------------------


def _entry(case: Case, contender: contenders.Contender) -> Entry:
    return Entry(
        table=case.table,
        contender=contender.name,
        format=case.format,
        m=case.m,
        n=case.n,
        k=case.k,
        group=case.group,
        status="timed",
        weight_bytes=contender.nbytes(case),
    )


def _line(case: Case, entries: Sequence[Entry]) -> str:
    parts = []
    for entry in entries:
        median = entry.median_us
        parts.append(f"{entry.contender} {f'{median:.1f} µs' if median is not None else _state(entry)}")
    return f"{case.table:<14}{case.label}: " + ", ".join(parts)


def _state(entry: Entry) -> str:
    return "right" if entry.status == "emulated" else entry.status.upper()


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"
