"""Tables of ``labkit bench gemm --table fast``: the tensor-core family against everything else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from labkit.bench.cases import FAST, TENSOR_CORE
from labkit.bench.labels import foreign, label
from labkit.bench.record import Entry, Record
from labkit.tables import Table, table

# (title, least M, most M, whose time over ours): each range of M has a target of its own.
_TARGETS = (
    ("least peer / ours, M ≤ 8", 1, 8, ""),
    ("least peer / ours, M 9–64", 9, 64, ""),
    ("least humming / ours, M ≤ 64", 1, 64, "humming_"),
)


def tables(record: Record) -> Iterator[Table]:
    """One table a format and shape, rows M; then the figures that have targets, a row a format and shape."""
    together = _groups(record.of_table(FAST))
    for (format, n, k, group), entries in together.items():
        found = _shape(record, entries, f"{format.upper()} {n}×{k} (N×K), group {group}")
        if found is not None:
            yield found
    rows = [row for key, entries in together.items() if (row := _summary(record, key, entries))]
    if rows:
        columns = {"case": "N×K", "mb": "MB", "read": "% of read, M = 1", "flat": "t(8) / t(1)"}
        columns |= {title: title for title, _, _, _ in _TARGETS} | {"w3": "our W4 / W3, M = 1"}
        columns = {key: words for key, words in columns.items() if any(row.get(key) for row in rows)}
        formats = {"mb": ".1f", "read": ".0f", "flat": ".2f", "w3": ".2f"}
        yield table(rows, columns, caption="Tensor core: the figures with targets", formats=formats)


def _groups(entries: Sequence[Entry]) -> dict[tuple[str, int, int, int], list[Entry]]:
    found: dict[tuple[str, int, int, int], list[Entry]] = {}
    for entry in entries:
        if entry.samples_us:
            found.setdefault((entry.format, entry.n, entry.k, entry.group), []).append(entry)
    return found


def _shape(record: Record, entries: Sequence[Entry], title: str) -> Table | None:
    names = list(dict.fromkeys(entry.contender for entry in entries))
    rows: list[dict[str, Any]] = []
    for m in dict.fromkeys(entry.m for entry in entries):
        here = {entry.contender: entry for entry in entries if entry.m == m}
        row: dict[str, Any] = {"m": m, **{name: entry.median_us for name, entry in here.items()}}
        best, ratio = best_peer(here)
        row |= {"best": label(best) if best else None, "ratio": ratio, "origin": record.kind}
        ours = here.get(TENSOR_CORE)
        if ours is not None:
            figures = ours.to_json()["summary"]
            row["spread"] = f"{figures['p10_us']:.1f}–{figures['p90_us']:.1f}"
            row["read"], row["copy"] = (_percent(record, ours, name) for name in ("read", "copy"))
        rows.append(row)
    columns = {"m": "M"} | {name: label(name) for name in names}
    columns |= {"best": "best peer", "ratio": "peer / ours", "read": "% of read", "copy": "% of copy"}
    columns |= {"spread": "ours, p10–p90"}
    columns = {key: words for key, words in columns.items() if any(row.get(key) is not None for row in rows)}
    formats = dict.fromkeys(names, ".1f") | {"ratio": ".2f", "read": ".0f", "copy": ".0f"}
    return table(rows, columns, caption=f"{title}: µs a call", formats=formats) if rows else None


def best_peer(here: dict[str, Entry], names: str = "") -> tuple[str | None, float | None]:
    """The fastest that is not labkit's, and its time over that of the tensor-core kernel.

    Args:
        here: contender → entry with samples, of one case.
        names: only those whose names begin so.
    """
    times = {name: entry.median_us for name, entry in here.items() if entry.median_us}
    peers = {name: us for name, us in times.items() if foreign(name) and name.startswith(names)}
    if not peers:
        return None, None
    best = min(peers, key=lambda name: peers[name] or 0.0)
    ours, theirs = times.get(TENSOR_CORE), peers[best]
    return best, theirs / ours if ours and theirs else None


def _percent(record: Record, entry: Entry, ceiling: str) -> float | None:
    share = record.share(entry, f"{ceiling}_gb_s")
    return None if share is None else 100 * share


def _summary(
    record: Record, key: tuple[str, int, int, int], entries: Sequence[Entry]
) -> dict[str, Any] | None:
    ours = {entry.m: entry for entry in entries if entry.contender == TENSOR_CORE}
    if not ours:
        return None
    format, n, k, _ = key
    row: dict[str, Any] = {"case": f"{format.upper()} {n}×{k}", "origin": record.kind}
    row["mb"] = next(iter(ours.values())).weight_bytes / 1e6
    row["read"] = _percent(record, ours[1], "read") if 1 in ours else None
    one, eight = (ours[m].median_us if m in ours else None for m in (1, 8))
    row["flat"] = eight / one if one and eight else None
    for title, low, high, names in _TARGETS:
        ratios = {}
        for m in ours:
            _, ratio = best_peer({e.contender: e for e in entries if e.m == m}, names)
            if low <= m <= high and ratio is not None:
                ratios[m] = ratio
        worst = min(ratios, key=lambda m: ratios[m], default=None)
        row[title] = None if worst is None else f"{ratios[worst]:.2f} at M = {worst}"
    wider = record.find(TENSOR_CORE, table=FAST, format="w4", m=1, n=n, k=k)
    if format == "w3" and one and wider is not None and wider.median_us:
        row["w3"] = wider.median_us / one
    return row
