"""Time against M for each kernel, from records that are kept: what chapter 07's thresholds stand on.

``data/measured/*.json`` holds records of ``labkit bench gemm`` as they were written, each with the
device, versions and command that made it. Article 7's few figures come from ``data/quoted``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit import quoted
from labkit.bench.cases import GROUP, SWEEP, batch_tile_shape
from labkit.bench.record import Record, read_all
from labkit.device import devices
from labkit.errors import refuse, require
from labkit.paths import data_dir
from labkit.quant.sizes import PACKED_FORMATS

QUOTED_DEVICE = "rtx3050-laptop"
"""The card of the article, by its key in ``data/devices.json``."""


@dataclass(frozen=True)
class Curves(Mapping[str, list[tuple[int, float]]]):
    """Kernel → [(M, µs a call)], M ascending; and where the figures are from.

    Attributes:
        device: key of the device.
        format, n, k, group: of the weight.
        origin: "measured" or "quoted".
        provenance: device, driver, versions, commit, date and command; or the article's section.
        points: what the mapping holds.
    """

    device: str
    format: str
    n: int
    k: int
    group: int
    origin: str
    provenance: str
    points: dict[str, list[tuple[int, float]]]

    def __getitem__(self, kernel: str) -> list[tuple[int, float]]:
        return self.points[kernel]

    def __iter__(self) -> Iterator[str]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def at(self, m: int) -> dict[str, float]:
        """Kernel → µs at exactly this M, for those that were timed there."""
        return {kernel: us for kernel, line in self.points.items() for rows, us in line if rows == m}

    @property
    def m_values(self) -> list[int]:
        """Every M that some kernel was timed at, ascending."""
        return sorted({m for line in self.points.values() for m, _ in line})


def curves(
    device: str, format: str = "w4", shape: tuple[int, int] | None = None, folder: Path | None = None
) -> Curves:
    """The newest curves of one device and format.

    Args:
        device: key or name as in ``data/devices.json``; "rtx3050-laptop" has the article's points.
        format: "w4" or "w3".
        shape: (N, K); the first that was recorded when left out.
        folder: records to read; ``data/measured`` by default.

    Raises:
        InputError: no record of that device, format or shape; lists what there is.
    """
    require(format in PACKED_FORMATS, "format", repr(format), " or ".join(PACKED_FORMATS))
    wanted = str(device).strip().lower()
    for known in devices().values():
        if wanted == known.name.lower():
            wanted = known.key
    found = [one for one in available(folder) if one.device == wanted and one.format == format]
    for one in found:
        if shape is None or (one.n, one.k) == tuple(shape):
            return one
    listed = ", ".join(dict.fromkeys(f"{c.device} {c.format} {c.n}x{c.k}" for c in available(folder)))
    where = "" if shape is None else f" {shape[0]}x{shape[1]}"
    refuse("curves", f"{wanted} {format}{where}", listed, "labkit bench gemm --table sweep")


def available(folder: Path | None = None) -> list[Curves]:
    """All curves: records of each device newest first, then the article's."""
    return [*_measured(folder or data_dir() / "measured"), *quoted_curves()]


@functools.lru_cache(maxsize=8)
def _measured(folder: Path) -> tuple[Curves, ...]:
    records, _ = read_all(sorted(folder.glob("*.json")))
    newest = sorted(records, key=lambda record: record.started, reverse=True)
    return tuple(one for record in newest for one in from_record(record))


def from_record(record: Record) -> list[Curves]:
    """The sweeps of one record, one for each format and shape; only what was timed."""
    if record.kind != "measured":
        return []
    entries = [entry for entry in record.of_table(SWEEP) if entry.samples_us]
    found = []
    for key in dict.fromkeys((entry.format, entry.n, entry.k, entry.group) for entry in entries):
        points: dict[str, list[tuple[int, float]]] = {}
        for entry in entries:
            if (entry.format, entry.n, entry.k, entry.group) == key and entry.median_us is not None:
                points.setdefault(entry.contender, []).append((entry.m, entry.median_us))
        lines = {kernel: sorted(line) for kernel, line in points.items()}
        device = str(record.device.get("key", "unknown"))
        found.append(Curves(device, *key, "measured", provenance(record), lines))
    return found


def provenance(record: Record) -> str:
    """One line: what made the figures, and on what."""
    device, software = record.device, record.software
    parts = [f"measured on {device.get('name')}"]
    parts += [f"driver {device['driver']}"] if device.get("driver") else []
    parts += [f"torch {software['versions']['torch']}"] if "torch" in software.get("versions", {}) else []
    commit = software.get("commit")
    parts += [f"commit {commit['id'][:10]}{' with changes' if commit['dirty'] else ''}"] if commit else []
    parts += [record.started[:10], "cold L2", f"medians of {record.parameters.get('samples', '?')}"]
    return ", ".join([*parts, record.command])


def quoted_curves() -> list[Curves]:
    """The article's few points for the shapes that it timed; W4 and W3 at M = 30, W3 at 2, 4 and 8."""
    found: dict[tuple[str, int, int], Curves] = {}

    def put(format: str, n: int, k: int, source: str, kernel: str, m: int, ms: float) -> None:
        one = found.setdefault(
            (format, n, k), Curves(QUOTED_DEVICE, format, n, k, GROUP, "quoted", source, {})
        )
        one.points.setdefault(kernel, []).append((m, ms * 1e3))

    batch = quoted.table(quoted.DEEPINFER, "w3_batch_tile")
    for row in batch.rows:
        n, k = batch_tile_shape()
        put("w3", n, k, batch.source, "gemv_small_batch", row["batch"], row["grid_y_ms"])
        put("w3", n, k, batch.source, "gemv_batch_w3", row["batch"], row["batch_tile_ms"])
    for format in PACKED_FORMATS:
        article = quoted.table(quoted.DEEPINFER, f"tiled_{format}")
        for row in article.rows:
            shape = (row["n"], row["k"], article.source)
            put(format, *shape, "gemm_tiled", row["m"], row["tiled_ms"])
            put(format, *shape, "dequant_matmul", row["m"], row["fallback_ms"])
    return list(found.values())
