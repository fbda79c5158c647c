"""Tables of ``labkit bench serving``: one a speed of arrivals, a row a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.bench.open_loop import PREFIX
from labkit.bench.record import Entry, Record
from labkit.tables import Table, table


def shows(entry: Entry) -> bool:
    """It belongs to a table of this module."""
    return entry.table.startswith(PREFIX)


def tables(record: Record) -> Iterator[Table]:
    """One table a rate or load, in the order of the run."""
    shown = [entry for entry in record.entries if shows(entry) and entry.status == "timed" and entry.figures]
    for name in dict.fromkeys(entry.table for entry in shown):
        yield _table(record, [entry for entry in shown if entry.table == name])


def _table(record: Record, entries: Sequence[Entry]) -> Table:
    rows = []
    for entry in entries:
        figures = entry.figures
        row = {"policy": entry.contender, "origin": record.kind, "good": figures["goodput"]}
        row |= {"ttft": _ms(figures["ttft"]["p50"]), "ttft95": _ms(figures["ttft"]["p95"])}
        row |= {"tpot": _ms(figures["tpot"]["p50"]), "tpot95": _ms(figures["tpot"]["p95"])}
        row |= {"gap": _ms(figures["itl"]["max"]), "tok_s": figures["tok_s"]}
        row["met"] = f"{figures['met']} of {figures['requests']}"
        row["both"] = figures["counters"]["prefill_decode_overlap_steps"]
        row["streams"] = figures["counters"]["prefill_decode_stream_overlap_steps"]
        rows.append(row)
    columns = {"policy": "policy", "ttft": "TTFT p50 ms", "ttft95": "TTFT p95 ms", "tpot": "TPOT p50 ms"}
    columns |= {"tpot95": "TPOT p95 ms", "gap": "max gap ms", "tok_s": "tokens/s"}
    columns |= {"good": "goodput /s", "met": "in bounds"}
    columns |= {"both": "overlap steps", "streams": "on two streams"}
    formats = dict.fromkeys(("ttft", "ttft95", "tpot", "tpot95", "gap"), ",.2f")
    formats |= {"tok_s": ",.0f", "good": ",.3g"}
    return table(rows, columns, caption=_caption(record, entries[0]), formats=formats)


def _caption(record: Record, first: Entry) -> str:
    asked = record.parameters
    words = f"Requests arrive at {first.figures['rate']:.3g} a second, "
    words += f"{100 * first.figures['load']:.0f} % of what {asked.get('baseline')} gets through; "
    words += f"{asked.get('origin', record.kind)}; bounds: "
    bounds = [
        f"{name} {_ms(asked[key]):,.4g} ms"
        for key, name in (("ttft", "TTFT"), ("tpot", "TPOT"), ("gap", "gap"))
        if asked.get(key)
    ]
    return words + ", ".join(bounds)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
