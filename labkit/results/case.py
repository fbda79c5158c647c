"""What makes two figures figures of the same thing: the case, the device, and the metric."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from labkit.bench.record import Entry, Record

# Parameters that say which cases a run had, or how often it looked: they change no single figure's meaning.
_CHOICES = frozenset(
    """shapes m formats table tables models model context batch chunk clients policies parts peers samples
    repeats rounds plans documents where origin device baseline rows loads rates""".split()  # noqa: SIM905
)
# Parameters that the run found out and wrote down.
_FOUND = frozenset(
    """seconds compile_seconds weights_seconds peak_memory_bytes baseline_gap_s baseline_step_s
    baseline_prompt_tok_s rate ttft tpot gap row capacity alone_ttft_s alone_tpot_s""".split()  # noqa: SIM905
)


@dataclass(frozen=True, order=True)
class Case:
    """One contender on one problem, with the settings that it was run under.

    Attributes:
        name, table, contender, format, m, n, k, group: as in the record and its entry.
        how: how it was timed; a graph's time and a host clock's are not the same thing.
        settings: parameters of the run that can change a figure, as ``name=JSON``, sorted.
    """

    name: str
    table: str
    contender: str
    format: str
    m: int
    n: int
    k: int
    group: int
    how: str = ""
    settings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Such as "gemm-fast/fast tensor_core w4 1×2560×2048 g128"."""
        group = f" g{self.group}" if self.group else ""
        return f"{self.name}/{self.table} {self.contender} {self.format} {self.m}×{self.n}×{self.k}{group}"


@dataclass(frozen=True, order=True)
class DeviceId:
    """What has to be equal before two times may be compared; a laptop at 60 W is another one at 95 W."""

    key: str
    name: str
    capability: str
    power_limit_w: float

    @property
    def label(self) -> str:
        """Such as "h200 (NVIDIA H200, 9.0, 700 W)"."""
        parts = [self.name, self.capability, f"{self.power_limit_w:g} W" if self.power_limit_w else ""]
        facts = ", ".join(part for part in parts if part)
        return f"{self.key} ({facts})" if facts else self.key


@dataclass(frozen=True)
class Series:
    """One metric of one entry: the samples in their order.

    ``exact`` figures are counted, not timed: any difference is a change. Less is better in all of them.
    """

    metric: str
    unit: str
    samples: tuple[float, ...]
    exact: bool = False


def case_of(record: Record, entry: Entry) -> Case:
    """The case of an entry; a parameter that this version does not know keeps cases apart."""
    settings = []
    for name in sorted(set(record.parameters) - _CHOICES - _FOUND):
        value = record.parameters[name]
        if value is not None:
            settings.append(f"{name}={json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)}")
    how = str(entry.method.get("how", ""))
    places = (entry.table, entry.contender, entry.format, entry.m, entry.n, entry.k, entry.group)
    return Case(record.name, *places, how, tuple(settings))


def device_of(record: Record) -> DeviceId:
    """The device of a record; what it does not say is empty or 0. Counts do not depend on who emulates."""
    if record.kind == "emulated":
        return DeviceId("emulator", "", "", 0.0)
    device: dict[str, Any] = record.device
    key, name, capability = (str(device.get(field) or "") for field in ("key", "name", "capability"))
    return DeviceId(key, name, capability, float(device.get("power_limit_w") or 0))


def series_of(entry: Entry) -> Iterator[Series]:
    """What an entry can be followed by: its time; or, emulated, the memory traffic that was counted."""
    if entry.samples_us and entry.status == "timed":
        yield Series("time", "µs", tuple(entry.samples_us))
    elif entry.counts and entry.status == "emulated":
        for name in ("sectors", "wavefronts"):
            yield Series(name, "", (float(entry.counts[name]),), exact=True)
