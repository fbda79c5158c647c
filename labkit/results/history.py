"""Histories: for each case on each device the runs in order, and the runs that have no place in one."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.bench.record import Record, read_all, summary
from labkit.errors import require
from labkit.results import compare
from labkit.results.case import Case, DeviceId, case_of, device_of, series_of
from labkit.results.change import THRESHOLD, Change, changes


@dataclass(frozen=True)
class Point:
    """One run in a history.

    Attributes:
        started: UTC time, ISO 8601. file: name of the record.
        samples: in the order taken. commit, driver: "" where the record does not say.
        change: against the runs before it, or None.
    """

    started: str
    file: str
    samples: tuple[float, ...]
    commit: str
    driver: str
    torch: str
    change: Change | None = None

    @property
    def median(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile."""
        found = summary(self.samples)
        return found["p10_us"], found["p90_us"]


@dataclass(frozen=True)
class History:
    """The runs of one metric of one case on one device, all of one kind, oldest first."""

    case: Case
    device: DeviceId
    kind: str
    metric: str
    unit: str
    points: tuple[Point, ...]

    @property
    def changed(self) -> list[Point]:
        """The change points."""
        return [point for point in self.points if point.change is not None]

    @property
    def label(self) -> str:
        """The case; its metric where that is not the time."""
        return self.case.label + ("" if self.metric == "time" else f", {self.metric}")

    def words(self, point: Point) -> str:
        """The change at a point, "" where there is none: slower or faster; of counts, more or less."""
        if point.change is None:
            return ""
        return point.change.words if self.metric == "time" else point.change.said("more", "less")

    def beside(self, point: Point) -> str:
        """What else was new at a point: commit, driver, torch; a hint where to look, not a cause."""
        at = self.points.index(point)
        if at == 0:
            return ""
        before = self.points[at - 1]
        pairs = [
            (name, getattr(before, name), getattr(point, name)) for name in ("commit", "driver", "torch")
        ]
        return ", ".join(f"{name} {a or '?'} → {b or '?'}" for name, a, b in pairs if a != b)


@dataclass(frozen=True)
class Histories:
    """All histories, and why some runs or files are in none."""

    found: tuple[History, ...]
    refused: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    records: int = 0

    @property
    def devices(self) -> list[DeviceId]:
        """Every device, in order."""
        return sorted({one.device for one in self.found})

    @property
    def kinds(self) -> list[str]:
        """Every kind of figure."""
        return sorted({one.kind for one in self.found})

    def select(self, *, case: str = "", device: str = "", kind: str = "") -> list[History]:
        """Histories whose case holds every word of ``case``, on the device with this key, of this kind."""
        words = case.lower().split()
        return [
            one
            for one in self.found
            if all(word in f"{one.label} {' '.join(one.case.settings)}".lower() for word in words)
            and device in ("", one.device.key, one.device.name, one.device.label)
            and kind in ("", one.kind)
        ]


_BOOKKEEPING = ("summary.json", "result.json")
"""Names under which ``labkit course`` and ``labkit rerun`` keep their books: no results, and no news."""


def read(paths: Sequence[Path]) -> tuple[list[Record], list[str]]:
    """Records in files and, however deep, in folders; one message for each file that is none.

    A notebook's or a summary's JSON among them is a foreign file: it is named, and does no harm.

    Raises:
        InputError: a path that does not exist.
    """
    files: dict[Path, None] = {}
    for path in paths:
        require(path.exists(), "FOLDER", str(path), "a folder of results, or a file")
        inside = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        files |= dict.fromkeys(one for one in inside if _wanted(one, path))
    return read_all(files)


def _wanted(file: Path, given: Path) -> bool:
    return file == given or (file.is_file() and file.name not in _BOOKKEEPING)


def gather(
    records: Iterable[Record],
    *,
    threshold: float = THRESHOLD,
    accept: Collection[str] = (),
    skipped: Sequence[str] = (),
) -> Histories:
    """Histories of records; the same run in two folders counts once, one that was throttled or that does
    not name its device not at all.

    Args:
        threshold: least relative difference that counts as a change.
        accept: reasons of throttling to let pass.
        skipped: messages of :func:`read`, to hand on.
    """
    distinct: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = (record.name, record.kind, record.started, device_of(record), record.command)
        kept = distinct.get(key)
        if kept is None or len(record.entries) > len(kept.entries):
            distinct[key] = record
    rows: dict[tuple[Any, ...], list[tuple[Point, bool, str]]] = {}
    refused = []
    for record in sorted(distinct.values(), key=lambda one: (one.started, one.file_name)):
        if reasons := compare.throttling(record, accept):
            refused.append(f"{record.file_name}: throttled: {', '.join(reasons)}")
            continue
        if compare.unnamed(record):
            refused.append(f"{record.file_name}: measured on a device that it does not name")
            continue
        for entry in record.entries:
            for series in series_of(entry):
                place = (case_of(record, entry), device_of(record), record.kind, series.metric)
                line = rows.setdefault(place, [])
                point = _point(record, series.samples)
                if line and (line[-1][0].file, line[-1][0].started) == (point.file, point.started):
                    # the same case twice in one run: more samples of it, not another run
                    point = replace(point, samples=line.pop()[0].samples + point.samples)
                line.append((point, series.exact, series.unit))
    found = tuple(_history(key, rows[key], threshold) for key in sorted(rows))
    return Histories(found, tuple(refused), tuple(skipped), len(distinct))


def _point(record: Record, samples: tuple[float, ...]) -> Point:
    commit = record.software.get("commit") or {}
    named = str(commit.get("id", ""))[:10] + ("+" if commit.get("dirty") else "")
    versions = record.software.get("versions", {})
    driver, torch = str(record.device.get("driver") or ""), str(versions.get("torch") or "")
    return Point(record.started, record.file_name, samples, named, driver, torch)


def _history(key: tuple[Any, ...], rows: list[tuple[Point, bool, str]], threshold: float) -> History:
    points = [row[0] for row in rows]
    _, exact, unit = rows[0]
    marks = changes([point.samples for point in points], threshold=threshold, exact=exact)
    marked = tuple(replace(point, change=mark) for point, mark in zip(points, marks, strict=True))
    case, device, kind, metric = key
    return History(case, device, kind, metric, unit, marked)


def of_folders(
    paths: Sequence[Path], *, threshold: float = THRESHOLD, accept: Collection[str] = ()
) -> Histories:
    """:func:`read` and :func:`gather` in one call."""
    records, skipped = read(paths)
    return gather(records, threshold=threshold, accept=accept, skipped=skipped)
