"""One result file: what was measured, on what, with which command, and the raw samples.

A record is the only thing that ``labkit bench`` writes. Every figure in it is of one kind
(measured, emulated, simulated or quoted), stated once at the top. Times are microseconds a call.
These dataclasses are the schema of the file (:mod:`labkit.results.schema` checks and upgrades it).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from labkit import atomic
from labkit.errors import InputError, require
from labkit.results import schema
from labkit.results.facts import COUNTS, ClocksFacts, CountsFacts, DeviceFacts, Sample, SoftwareFacts
from labkit.tables import ORIGINS

__all__ = ["COUNTS", "SCHEMA", "STATUSES", "Entry", "Record", "read", "read_all", "summary"]

SCHEMA = schema.NAME

STATUSES = ("timed", "emulated", "unavailable", "wrong", "failed")
"""What became of one contender on one case; only the first two carry figures."""


@dataclass
class Entry:
    """One contender on one case.

    Attributes:
        table: which table of the run it belongs to, such as "tiled_w4" or "sweep".
        contender: kernel or peer.
        format: storage format of the weight.
        m, n, k: rows of activations, output features, input features.
        group: weights that share one scale.
        status: one of :data:`STATUSES`.
        note: why it was not timed, or what to know about its figures.
        error: largest absolute error against float64 of the same dequantised weights, that of plain
            FP16 torch, and the bound: {"max_abs", "plain", "bound"}. Checked before timing.
        samples_us: every sample, µs a call, in the order taken.
        weight_bytes: bytes of the weight that this contender reads, once.
        method: how it was timed: {"how", "calls", "copies"}; and, where the contender says so, the kernel
            that it chose ("kernel") and the activations that it had instead of the run's ("activations").
        counts: of an emulated run: {"sectors", "bytes", ...}.
        figures: of a run of the engine (labkit.bench.serving): policy, latencies, counters, ...
    """

    table: str
    contender: str
    format: str
    m: int
    n: int
    k: int
    group: int
    status: str
    note: str = ""
    error: dict[str, float] = field(default_factory=dict)
    samples_us: list[Sample] = field(default_factory=list)
    weight_bytes: int = 0
    method: dict[str, Any] = field(default_factory=dict)
    counts: CountsFacts = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def median_us(self) -> float | None:
        """Median of the samples, µs a call; None when it was not timed."""
        return statistics.median(self.samples_us) if self.samples_us else None

    @property
    def weight_gb_s(self) -> float | None:
        """GB/s of weights at the median time; None when it was not timed."""
        median = self.median_us
        return self.weight_bytes / median / 1e3 if median and self.weight_bytes else None

    def to_json(self) -> dict[str, Any]:
        """Fields, and the summary of the samples for readers of the file."""
        return asdict(self) | {"summary": summary(self.samples_us)}


@dataclass
class Record:
    """One run of one benchmark.

    Attributes:
        name: benchmark, such as "gemm-seed".
        kind: one of :data:`labkit.tables.ORIGINS`.
        command: the command line that made it.
        started: UTC time, ISO 8601.
        device: name, key, capability, driver, CUDA, SMs, L2 and memory bytes, power limit.
        software: versions of the packages, commit and whether the checkout had changes, system.
        clocks: clocks, temperature, power and throttle reasons, each with "when".
        parameters: every parameter of the run.
        ceilings: what this device reached in the same run: {"copy_gb_s", "read_gb_s", "matmul_tflops"}.
        entries: the figures.
        notes: sentences that belong to the figures.
        complete: False when the run was interrupted: the entries are those that were done.
        source: of quoted figures, where they stand; "" for those of our own.
    """

    name: str
    kind: str
    command: str
    started: str
    device: DeviceFacts
    software: SoftwareFacts
    parameters: dict[str, Any]
    clocks: list[ClocksFacts] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        require(self.kind in ORIGINS, "kind", repr(self.kind), "one of " + ", ".join(ORIGINS))
        named = self.kind != "quoted" or bool(self.source.strip())
        require(
            named, "source", repr(self.source), "where the quoted figures stand, such as a title and section"
        )
        for entry in self.entries:
            require(entry.status in STATUSES, "status", repr(entry.status), "one of " + ", ".join(STATUSES))

    @property
    def file_name(self) -> str:
        """NAME-DEVICE-DATE.json, the same for the same run."""
        date = self.started.replace(":", "-").replace("+00-00", "Z")
        return f"{self.name}-{self.device.get('key', 'unknown')}-{date}.json"

    def of_table(self, table: str) -> list[Entry]:
        """Entries of one table, in the order taken."""
        return [entry for entry in self.entries if entry.table == table]

    def find(self, contender: str, *, table: str, format: str, m: int, n: int, k: int) -> Entry | None:
        """The entry of one contender on one case, or None."""
        wanted = (table, contender, format, m, n, k)
        for entry in self.entries:
            if (entry.table, entry.contender, entry.format, entry.m, entry.n, entry.k) == wanted:
                return entry
        return None

    def share(self, entry: Entry, ceiling: str) -> float | None:
        """Weights read by an entry over a measured ceiling, such as "read_gb_s"; None when either is missing.

        Above 1 the weights did not all come from memory, or the ceiling was measured low.
        """
        rate, most = entry.weight_gb_s, self.ceilings.get(ceiling)
        return rate / most if rate and most else None

    def _entry_json(self, entry: Entry) -> dict[str, Any]:
        value = entry.to_json()
        rates = {"weight_gb_s": entry.weight_gb_s}
        rates |= {f"of_{name}": self.share(entry, f"{name}_gb_s") for name in ("copy", "read")}
        value["summary"] |= {name: round(rate, 4) for name, rate in rates.items() if rate is not None}
        return value

    def to_json(self) -> dict[str, Any]:
        """The file's content; ``schema`` and ``version`` come first."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "entries"}
        head = {"schema": SCHEMA, "version": schema.VERSION}
        return {**head, **values, "entries": [self._entry_json(entry) for entry in self.entries]}

    def write(self, path: Path) -> Path:
        """Write atomically; one entry a line, so that two files can be compared by a text tool."""
        content = self.to_json()
        entries = content.pop("entries")
        head = json.dumps(content, indent=1, ensure_ascii=False)
        lines = ",\n".join("  " + json.dumps(entry, ensure_ascii=False) for entry in entries)
        body = f'"entries": [\n{lines}\n ]' if entries else '"entries": []'
        atomic.write_text(path, f"{head[:-2]},\n {body}\n}}\n")
        return path


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile (linear between samples) and least; empty for no samples."""
    if not samples:
        return {}
    ordered = sorted(samples)
    return {
        "median_us": round(statistics.median(ordered), 4),
        "p10_us": round(_quantile(ordered, 0.1), 4),
        "p90_us": round(_quantile(ordered, 0.9), 4),
        "min_us": round(ordered[0], 4),
    }


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def read(path: Path) -> Record:
    """Read a record.

    Raises:
        InputError: no such file, truncated, not JSON, or not a record of this schema; says which field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(path.name, error.strerror or "unreadable", "a record of labkit bench") from error
    except ValueError as error:
        raise InputError(path.name, "bytes that are no UTF-8", "a record of labkit bench") from error
    return schema.parse(path.name, text)


def read_all(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Every record among ``paths``, and one message for each file that is none."""
    found: list[Record] = []
    skipped: list[str] = []
    for path in paths:
        try:
            found.append(read(path))
        except InputError as error:
            skipped.append(f"skipped {error}")
    return found, skipped
