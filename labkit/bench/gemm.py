"""``labkit bench gemm``: quantised products against the fallback and dense cuBLAS, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from labkit.bench import contenders, counts, machine, timing
from labkit.bench.cases import FAST, FAST_M, GROUP, SWEEP_M, Case, cases, default_shapes, shrunk
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
        shapes: (N, K) of the sweep and of "fast"; None for their own.
        m: rows of the sweep and of "fast"; None for :data:`SWEEP_M` and
            :data:`labkit.bench.cases.FAST_M`, on the CPU :data:`EMULATED_M`.
        formats: "w4", "w3".
        device: "cpu" or "cuda".
        samples: samples of each contender, at least 20 on a GPU.
        graph: capture CUDA graphs.
        group: group size of the sweep and of "fast".
        dtype: activations of "fast": "float16" or "bfloat16".
        peers: kernels of other projects compete as well.
    """

    table: str = "seed"
    shapes: tuple[tuple[int, int], ...] | None = None
    m: tuple[int, ...] | None = None
    formats: tuple[str, ...] = ("w4", "w3")
    device: str = "cpu"
    samples: int = timing.LEAST_SAMPLES
    graph: bool = True
    group: int = GROUP
    dtype: str = "float16"
    peers: bool = False

    def __post_init__(self) -> None:
        least = timing.LEAST_SAMPLES
        require(self.samples >= least, "samples", self.samples, f"at least {least}: fewer show no spread")
        require(self.device in ("cpu", "cuda"), "device", repr(self.device), "cpu or cuda")
        seen = self.device == "cpu" or torch.cuda.is_available()
        require(seen, "device", "cuda", "a GPU that torch can use", "--device cpu")

    def cases(self) -> list[Case]:
        """The cases, at full size; the emulator gets a few of the sweep unless it is told which."""
        on_gpu = self.device == "cuda"
        full = FAST_M if self.table == FAST else SWEEP_M
        rows = self.m or (full if on_gpu else EMULATED_M)
        shapes = self.shapes or (None if on_gpu else default_shapes()[:1])
        chosen: dict[str, Any] = {"formats": self.formats, "group": self.group, "dtype": self.dtype}
        return cases(self.table, shapes=shapes, m=rows, peers=self.peers, **chosen)


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
    if options.peers:
        from labkit.bench import peers as _  # noqa: F401  (makes them known to contenders)
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
            from labkit.bench.gemm_gpu import measure

            measure(options, record, report)
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
        "activations": options.dtype,
        "peers": options.peers,
    }


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
        report(line(case, entries))


def _emulate(case: Case, name: str, weight: Any, x: Any, wanted: Reference) -> Entry:
    contender = contenders.get(name)
    entry = new_entry(case, contender)
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
        entry.status, entry.note = "failed", first_line(error)
    return entry


# --- both -------------------------------------------------------------------------------------------


def new_entry(case: Case, contender: contenders.Contender) -> Entry:
    """An entry of one contender on one case, without figures yet."""
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


def line(case: Case, entries: Sequence[Entry]) -> str:
    """One case in one line of text, for whoever watches the run."""
    parts = []
    for entry in entries:
        median = entry.median_us
        parts.append(f"{entry.contender} {f'{median:.1f} µs' if median is not None else _state(entry)}")
    return f"{case.table:<14}{case.label}: " + ", ".join(parts)


def _state(entry: Entry) -> str:
    return "right" if entry.status == "emulated" else entry.status.upper()


def first_line(error: BaseException) -> str:
    """Kind and first line of an error, for a note."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"
