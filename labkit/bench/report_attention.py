"""Tables of ``labkit bench attention``: a row a batch and context, µs a call, shares of copy bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from labkit.bench.record import Entry, Record
from labkit.tables import Table, table

PREFIX = "attention "
"""Of the names of its tables; the model's key follows."""

OURS, FUSED, TALL, SDPA = "paged", "paged_fused", "paged_tall", "sdpa_gathered"
_COPY = "copy_gb_s"


def shows(entry: Entry) -> bool:
    """It belongs to a table of this module."""
    return entry.table.startswith(PREFIX)


def tables(record: Record) -> Iterator[Table]:
    """One table a model and chunk."""
    timed = [entry for entry in record.entries if shows(entry) and entry.samples_us]
    for name, chunk in dict.fromkeys((entry.table, entry.n) for entry in timed):
        here = [entry for entry in timed if (entry.table, entry.n) == (name, chunk)]
        what = "decode" if chunk == 1 else f"prefill, chunk {chunk}"
        title = f"{name.removeprefix(PREFIX)}, {here[0].group} query heads a key/value head, {what}"
        yield _table(record, here, title, chunk)


def _table(record: Record, here: list[Entry], title: str, chunk: int) -> Table:
    names = list(dict.fromkeys((entry.contender, entry.format) for entry in here))
    rows: list[dict[str, Any]] = []
    for batch, context in dict.fromkeys((entry.m, entry.k) for entry in here):
        found = {(e.contender, e.format): e for e in here if (e.m, e.k) == (batch, context)}
        row: dict[str, Any] = {"batch": batch, "context": context, "origin": record.kind}
        for name, entry in found.items():
            row[_key(name)] = entry.median_us
            share = record.share(entry, _COPY)
            row[_key(name) + " copy"] = None if share is None or chunk > 1 else 100 * share
        ours, small = found.get((OURS, "fp16")), found.get((OURS, "int8"))
        peer = found.get((SDPA, "fp16"))
        row["int8"] = _ratio(ours, small)
        row["sdpa"] = _ratio(peer, ours)
        row["tall"] = _ratio(peer, found.get((TALL, "fp16")))
        rows.append(row)
    columns = {"batch": "batch", "context": "context"}
    formats = {"int8": ".2f", "sdpa": ".2f", "tall": ".2f"}
    for name in names:
        key = _key(name)
        columns |= {key: key, key + " copy": "% of copy"}
        formats |= {key: ".1f", key + " copy": ".0f"}
    columns |= {"int8": "fp16 / int8", "sdpa": "SDPA / paged", "tall": "SDPA / tall tiles"}
    columns = {key: words for key, words in columns.items() if any(row.get(key) is not None for row in rows)}
    return table(rows, columns, caption=f"{title}: µs a call", formats=formats)


def _key(name: tuple[str, str]) -> str:
    words = {OURS: "paged", FUSED: "fused step", TALL: "tall tiles", SDPA: "SDPA, gathered"}
    contender, _, plan = name[0].partition(" ")
    return " ".join(filter(None, (words.get(contender, contender), plan, name[1])))


def _ratio(above: Entry | None, below: Entry | None) -> float | None:
    if above is None or below is None or not above.median_us or not below.median_us:
        return None
    return above.median_us / below.median_us
