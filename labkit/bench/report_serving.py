"""Tables of ``labkit bench concurrency`` and ``labkit bench jitter``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from labkit.bench import pareto
from labkit.bench.concurrency import PEER, TABLE
from labkit.bench.jitter import COLD, DOCUMENT
from labkit.bench.record import Entry, Record
from labkit.tables import Table, table


def shows(entry: Entry) -> bool:
    """It belongs to a table of this module."""
    return entry.table in (TABLE, DOCUMENT, COLD)


def tables(record: Record) -> Iterator[Table]:
    """All that a record of the engine says."""
    for name, make in ((TABLE, _concurrency), (DOCUMENT, _document), (COLD, _cold)):
        entries = [entry for entry in record.of_table(name) if entry.status == "timed" and entry.figures]
        if entries:
            yield make(record, entries)
            if name in (DOCUMENT, COLD):
                yield from _stalls(record, name, entries)


def _concurrency(record: Record, entries: Sequence[Entry]) -> Table:
    peers = {entry.m: entry.figures["tok_s"] for entry in entries if entry.contender == PEER}
    rows = []
    for entry in entries:
        figures = entry.figures
        peer = peers.get(entry.m)
        rows.append(
            {
                "clients": entry.m,
                "policy": entry.contender,
                "tok_s": figures["tok_s"],
                "ttft": _ms(figures["ttft"]["p50"]),
                "ttft95": _ms(figures["ttft"]["p95"]),
                "tpot": _ms(figures["tpot"]["p50"]),
                "p99": _ms(figures["itl"]["p99"]),
                "max": _ms(figures["itl"]["max"]),
                "peer": figures["tok_s"] / peer if peer and entry.contender != PEER else None,
                "origin": record.kind,
            }
            | _counted(entry)
        )
    columns = {"clients": "clients", "policy": "policy", "tok_s": "tokens/s", "ttft": "TTFT p50 ms"}
    columns |= {"ttft95": "TTFT p95 ms", "tpot": "TPOT p50 ms", "p99": "ITL p99 ms", "max": "ITL max ms"}
    columns |= {"both": "overlap steps", "streams": "on two streams", "peer": f"× {PEER}"}
    if not peers:
        del columns["peer"]
    formats = {"tok_s": ",.0f", "peer": ".1f"} | dict.fromkeys(
        ("ttft", "ttft95", "tpot", "p99", "max"), ",.2f"
    )
    first = entries[0]
    words = f"{first.k} prompt tokens, {first.n} new tokens, {_origin(record)}"
    return table(rows, columns, caption=f"Clients at once, {words}", formats=formats)


def _document(record: Record, entries: Sequence[Entry]) -> Table:
    points = pareto.points(record)
    best = {name: {one.label for one in pareto.front(points, name)} for name in ("max_gap", "p99_gap")}
    base = next((e for e in entries if e.contender == record.parameters.get("baseline")), None)
    rows = []
    for entry in entries:
        figures = entry.figures
        gaps = figures["itl_beside"]
        row = _gaps(record, entry) | {"rate": figures["prompt_tok_s"], "ttft": _ms(figures["ttft"]["p50"])}
        if base is not None and gaps["max"]:
            row["lower"] = base.figures["itl_beside"]["max"] / gaps["max"]
            row["share"] = 100 * figures["prompt_tok_s"] / base.figures["prompt_tok_s"]
        fronts = [
            word for name, word in (("max_gap", "max"), ("p99_gap", "p99")) if entry.contender in best[name]
        ]
        row["front"] = ", ".join(fronts) or None
        rows.append(row | _counted(entry))
    columns = {"policy": "policy", "max": "max gap ms", "p99": "p99 gap ms", "p50": "p50 ms"}
    columns |= {"steady": "steady p50 ms", "rate": "prompt tokens/s"}
    columns |= {"lower": "max gap, times lower", "share": "% of the rate", "ttft": "TTFT p50 ms"}
    columns |= {"both": "overlap steps", "streams": "on two streams", "front": "Pareto front"}
    formats = dict.fromkeys(("max", "p99", "p50", "steady", "ttft", "lower"), ",.2f")
    formats |= {"rate": ",.0f", "share": ".0f"}
    first = entries[0]
    words = f"{first.k} tokens inserted into {first.m} streams, {_origin(record)}"
    words += f"; against {base.contender}" if base is not None else ""
    return table(rows, columns, caption=f"A document of {words}", formats=formats)


def _cold(record: Record, entries: Sequence[Entry]) -> Table:
    rows = []
    for entry in entries:
        figures = entry.figures
        rows.append(
            _gaps(record, entry)
            | {"ttft": _ms(figures["ttft"]["p50"]), "ttft95": _ms(figures["ttft"]["p95"])}
            | {"tok_s": figures["stream_tok_s"], "good": figures["goodput"]}
            | {"met": f"{figures['met']} of {figures['ttft']['count']}"}
            | {"within": None if figures["gaps_met"] is None else 100 * figures["gaps_met"]}
            | _counted(entry)
        )
    columns = {"policy": "policy", "max": "max gap ms", "p99": "p99 gap ms", "p50": "p50 ms"}
    columns |= {"ttft": "TTFT p50 ms", "ttft95": "TTFT p95 ms", "tok_s": "streams' tokens/s"}
    columns |= {
        "within": "% of their gaps in bound",
        "good": "goodput /s",
        "met": "met",
        "both": "overlap steps",
        "streams": "on two streams",
    }
    formats = dict.fromkeys(("max", "p99", "p50", "ttft", "ttft95"), ",.2f")
    formats |= {"tok_s": ",.0f", "good": ",.3g", "within": ".0f"}
    asked = record.parameters
    ttft, gap = (_ms(asked.get(name)) or 0.0 for name in ("ttft", "gap"))
    words = f"Cold prompts, {asked.get('rate', 0):.3g} a second, among {entries[0].m} streams"
    words += f", {_origin(record)}; bounds: TTFT {ttft:,.3g} ms, TPOT and the streams' gaps {gap:,.3g} ms"
    return table(rows, columns, caption=words, formats=formats)


def _stalls(record: Record, name: str, entries: Sequence[Entry]) -> Iterator[Table]:
    """Long gaps by what ran in them; nothing where there is none."""
    rows = []
    for entry in entries:
        stalls = entry.figures["stalls"]
        for tag, found in stalls["by_tag"].items():
            rows.append(
                {
                    "policy": entry.contender,
                    "tag": tag,
                    "count": found["count"],
                    "share": 100 * found["count"] / stalls["of"],
                    "longest": _ms(found["longest_s"]),
                    "over": _ms(stalls["threshold_s"]),
                    "origin": record.kind,
                }
            )
    if rows:
        columns = {"policy": "policy", "tag": "ran in it", "count": "stalls", "share": "% of gaps"}
        columns |= {"longest": "longest ms", "over": "longer than ms"}
        formats = {"share": ".1f", "longest": ",.2f", "over": ",.2f"}
        yield table(rows, columns, caption=f"Stalls, {name}", formats=formats)


def _gaps(record: Record, entry: Entry) -> dict[str, Any]:
    gaps = entry.figures["itl_beside"]
    row = {key: _ms(gaps[key]) for key in ("max", "p99", "p50")}
    steady = _ms(entry.figures["itl_steady"]["p50"])
    return {"policy": entry.contender, **row, "steady": steady, "origin": record.kind}


def _counted(entry: Entry) -> dict[str, Any]:
    counters = entry.figures.get("counters")
    if not counters:
        return {}
    both = counters["prefill_decode_overlap_steps"]
    return {"both": both, "streams": counters["prefill_decode_stream_overlap_steps"]}


def _origin(record: Record) -> str:
    return str(record.parameters.get("origin", record.kind))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
