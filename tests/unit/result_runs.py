"""Records of the same case, run after run, for the tests of histories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_records import entry, record

from labkit.bench.record import Record


def run_of(day: int, us: float = 10.0, *, name: str = "gemm-seed", **changes: Any) -> Record:
    """One run on a day of December, its samples around ``us``; ``changes`` are fields of the record."""
    started = f"2026-12-{day:02d}T10:00:00+00:00"
    return record([entry(us=us)], started=started, name=name, **changes)


def runs(medians: Sequence[float], **changes: Any) -> list[Record]:
    """One run a day."""
    return [run_of(day, us, **changes) for day, us in enumerate(medians, 1)]


def written(folder: Path, records: Sequence[Record]) -> Path:
    """The records as files of a folder."""
    for one in records:
        one.write(folder / one.file_name)
    return folder


def throttled(reasons: Sequence[str], when: str = "after") -> list[dict[str, Any]]:
    """Clocks of a record: idle before, these reasons later."""
    return [
        {"when": "before", "throttle_reasons": ["idle"]},
        {"when": when, "throttle_reasons": list(reasons)},
    ]
