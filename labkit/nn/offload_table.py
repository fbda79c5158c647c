"""What the way to the GPU and back costs, and from how many FLOP on it pays: ``data/offload.json``.

Nothing here needs torch.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from labkit import paths
from labkit.errors import ModelFileError, refuse, require


@dataclass(frozen=True, slots=True)
class OffloadRow:
    """One line of ``data/offload.json``.

    Attributes:
        device: the GPU's name as torch gives it, or "*".
        machine: the CPU in words, or "*".
        round_trip_us: the smallest call there and back, microseconds; None when not known.
        cpu_gflops: rate of the CPU's kernels at M = 1; None when not known.
        gpu_gflops: rate of the GPU's kernel at M = 1 without the way; None when not known.
        threshold_flop: products of fewer FLOP stay on the CPU; infinite when all do (null in the file).
        provenance: measured, quoted or assumed, and where.
    """

    device: str
    machine: str
    round_trip_us: float | None
    cpu_gflops: float | None
    gpu_gflops: float | None
    threshold_flop: float
    provenance: str


def flop_threshold(measurement: OffloadRow) -> float:
    """FLOP at which the way there and back is paid for: flop / cpu = round trip + flop / gpu.

    A GPU rate that is not known counts as infinite. A GPU no faster than the CPU gives infinity.

    Raises:
        InputError: round trip or CPU rate missing or not positive.
    """
    trip, cpu, gpu = measurement.round_trip_us, measurement.cpu_gflops, measurement.gpu_gflops
    for name, value in (("round_trip_us", trip), ("cpu_gflops", cpu)):
        require(value is not None and value > 0, name, value, "a measured number > 0")
    assert trip is not None and cpu is not None
    if gpu is not None and gpu <= cpu:
        return math.inf
    seconds_saved = 1 / (cpu * 1e9) - (1 / (gpu * 1e9) if gpu is not None else 0.0)
    return trip * 1e-6 / seconds_saved


@functools.cache
def rows() -> tuple[OffloadRow, ...]:
    """The table, in file order.

    Raises:
        ModelFileError: missing, not JSON, or a row with a wrong or missing field, by row and field.
    """
    path = paths.data_dir() / "offload.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except OSError as error:
        raise ModelFileError(path.name, error.strerror or "unreadable", "an offload table") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(path.name, f"{type(error).__name__}: {error}", 'JSON with "rows"') from error
    return tuple(_row(f"{path.name} row {i}", entry) for i, entry in enumerate(entries))


def row_for(device_name: str, table: Sequence[OffloadRow] | None = None) -> OffloadRow:
    """The row of a GPU: the first with its name, else the first ``*``."""
    found = rows() if table is None else table
    for row in found:
        if row.device == device_name:
            return row
    for row in found:
        if row.device == "*":
            return row
    refuse("device_name", repr(device_name), "a device of the table, or a table with a row *")


def _row(where: str, entry: Any) -> OffloadRow:
    names = {field.name for field in fields(OffloadRow)}
    ok = isinstance(entry, dict) and set(entry) == names
    if not ok:
        raise ModelFileError(where, entry, "exactly " + ", ".join(sorted(names)))
    for name in ("device", "machine", "provenance"):
        if not isinstance(entry[name], str) or not entry[name]:
            raise ModelFileError(f"{where}: {name}", repr(entry[name]), "text")
    for name in ("round_trip_us", "cpu_gflops", "gpu_gflops", "threshold_flop"):
        value = entry[name]
        number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not number and value is not None:
            raise ModelFileError(f"{where}: {name}", repr(value), "a number >= 0, or null")
    threshold = math.inf if entry["threshold_flop"] is None else float(entry["threshold_flop"])
    return OffloadRow(**{**entry, "threshold_flop": threshold})


def to_json(row: OffloadRow) -> dict[str, Any]:
    """The row as the file holds it: an infinite threshold is null."""
    threshold = row.threshold_flop if math.isfinite(row.threshold_flop) else None
    return {**asdict(row), "threshold_flop": threshold}
