"""What the two serving benchmarks share: runs of one cell, put together; tokens compared; a record begun."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from labkit.bench import machine
from labkit.bench.policy_specs import PolicySpec
from labkit.bench.record import Entry, Record
from labkit.bench.stages import Stage
from labkit.engine.engine import Engine
from labkit.engine.metrics import Counters
from labkit.engine.policy import Policy
from labkit.engine.request import Request

Report = Callable[[str], None]

FORMAT = "serving"
"""Of the entries: what is measured is an engine, not a storage format."""

_FAILED = ("error",)


def engine_for(stage: Stage, policy: Policy, overlap: bool) -> Engine:
    """A new engine on the stage's executor: an empty pool, an empty prefix cache, counters at 0."""
    if stage.real:
        # As `labkit serve` does: what is loaded is not gone through again in the middle of a step (70 ms).
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    return Engine(stage.executor, policy=policy, overlap=overlap)


def begin(name: str, stage: Stage, command: str, parameters: dict[str, Any]) -> Record:
    """A record without entries."""
    record = Record(
        name=name,
        kind=stage.kind,
        command=command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        device=stage.device,
        software=machine.software_facts(),
        parameters=parameters | {"origin": stage.origin} | stage.facts,
        notes=list(stage.notes),
    )
    clock(record, stage, "before")
    return record


@contextmanager
def recording(
    name: str, options: Any, specs: Sequence[PolicySpec], stage: Stage, command: str
) -> Iterator[Record]:
    """A record while its cells run; Ctrl-C ends them, and what was done is kept (``complete`` is False).

    Args:
        name: of the benchmark; the model's is put behind it.
        options: a benchmark's own, with ``where``, ``model`` and ``baseline``; they become parameters.
        specs: policies in the order of the cells.
    """
    model = "smollm2" if options.where == "cpu" else options.model
    labels = {"policies": [spec.label for spec in specs], "baseline": options.baseline.label}
    record = begin(f"{name}-{model}", stage, command, asdict(options) | labels)
    if not stage.executor.lanes:
        record.notes.append("one lane: overlap on and off are the same, and run once")
    began = time.monotonic()
    try:
        yield record
    except KeyboardInterrupt:
        record.complete = False
        record.notes.append("interrupted: the entries are those that were done")
    record.parameters["seconds"] = round(time.monotonic() - began, 1)
    clock(record, stage, "after")


def clock(record: Record, stage: Stage, when: str) -> None:
    """Note the clocks of a GPU."""
    if stage.on_gpu:
        record.clocks.append(machine.clocks(when, machine.gpu_index()))


def entry_for(table: str, stage: Stage, spec: PolicySpec, overlap: bool, *, m: int, n: int, k: int) -> Entry:
    """The entry of a cell, without figures. ``m`` requests or streams, ``n`` tokens of an answer, ``k``
    tokens of a prompt. Its contender is the policy, with "no overlap" where that differs."""
    off = spec.overlaps and stage.executor.lanes and not overlap
    entry = Entry(table, spec.label + (" no overlap" if off else ""), FORMAT, m, n, k, 0, "timed")
    entry.figures = {"policy": spec.name, "label": spec.label, "overlap": overlap}
    entry.figures |= {"chunk": spec.chunk, "origin": stage.origin, "concurrent": stage.executor.concurrent}
    return entry


def total(counters: Iterable[Counters]) -> dict[str, Any]:
    """Counters of several runs, added up."""
    found: dict[str, Any] = {}
    for one in counters:
        for item in fields(Counters):
            value = getattr(one, item.name)
            if isinstance(value, dict):
                sums = found.setdefault(item.name, {})
                for key, count in value.items():
                    sums[key] = sums.get(key, 0) + count
            else:
                found[item.name] = found.get(item.name, 0) + value
    return found


class Answers:
    """Tokens that every prompt must get, whatever the policy: those of the first run that computed them.

    Attributes:
        compared, different: answers looked at, and those with another token somewhere.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[int]] = {}

    def compare(self, requests: Iterable[Request]) -> tuple[int, int]:
        """Answers compared, and those that differ in the part that both have."""
        compared = different = 0
        for request in requests:
            found, known = request.output_ids, self._known.get(request.prompt_ids)
            if known is not None:
                both = min(len(found), len(known))
                compared += 1
                different += found[:both] != known[:both]
            if known is None or len(found) > len(known):
                self._known[request.prompt_ids] = list(found)
        return compared, different


def judge(entry: Entry, stage: Stage, requests: Sequence[Request]) -> None:
    """Mark an entry whose requests failed, or got other tokens than those of other policies."""
    failed = [one for one in requests if one.finish_reason in _FAILED]
    different = entry.figures["exact"]["different"]
    if failed:
        entry.status, entry.note = "failed", f"{len(failed)} requests: {failed[0].error[:200]}"
    elif different and stage.exact:
        entry.status = "wrong"
        entry.note = f"{different} of {entry.figures['exact']['compared']} answers have other tokens"


def failed(entry: Entry, error: Exception) -> Entry:
    """The entry of a cell in which a run has raised."""
    text = (str(error).splitlines() or [""])[0]
    entry.status, entry.note = "failed", f"{type(error).__name__}: {text[:300]}"
    return entry


def spread(value: Any) -> dict[str, Any]:
    """A Spread (or Latency) as plain values."""
    return asdict(value)
