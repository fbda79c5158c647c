"""A record as tables: ours beside the article's figures, and what could not be timed and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from labkit import quoted
from labkit.bench import report_attention, report_fast, report_open_loop, report_serving
from labkit.bench.cases import FAST, SEED_TABLES, SWEEP
from labkit.bench.labels import foreign, label
from labkit.bench.record import Entry, Record
from labkit.tables import Table, table

_TITLES = {
    "tiled_w4": "W4 tiled GEMM, M = 30, µs a call",
    "tiled_w3": "W3 tiled GEMM, M = 30, µs a call",
    "w3_batch_tile": "W3 GEMV: grid.y = batch against the batch tile, µs a call",
}
_OTHER_LABELS = {"w3_batch_tile": {"gemv_small_batch": "grid.y = batch"}}
# What the article has for each contender of a table, in its columns (ms).
_QUOTED = {
    "gemm_tiled": "tiled_ms",
    "dequant_matmul": "fallback_ms",
    "gemv_small_batch": "grid_y_ms",
    "gemv_batch_w3": "batch_tile_ms",
}
# (column, slower, faster): the article's own ratio, and ours against dense cuBLAS.
_TILED_RATIOS = (
    ("fallback / tiled", "dequant_matmul", "gemm_tiled"),
    ("dense / tiled", "dense_fp16", "gemm_tiled"),
)
_RATIOS = {
    "tiled_w4": _TILED_RATIOS,
    "tiled_w3": _TILED_RATIOS,
    "w3_batch_tile": (
        ("grid.y / batch tile", "gemv_small_batch", "gemv_batch_w3"),
        ("dense / grid.y", "dense_fp16", "gemv_small_batch"),
    ),
}


def tables(record: Record) -> list[Table]:
    """Everything that a record says, as tables in the order of the run."""
    if record.kind == "emulated":
        return list(_emulated(record))
    found: list[Table] = []
    for name in SEED_TABLES:
        entries = record.of_table(name)
        if entries:
            found.append(_seed(record, name, entries))
    found += _sweeps(record)
    found += report_fast.tables(record)
    found += report_attention.tables(record)
    found += report_serving.tables(record)
    found += report_open_loop.tables(record)
    found += _others(record)
    found += _untimed(record)
    return found


def markdown(record: Record) -> str:
    """The same as :func:`text` for a file of ``results/evidence``: Markdown, wide tables and all."""
    parts = ["\n".join(f"- {line}" for line in head(record))]
    parts += [as_markdown(one) for one in tables(record)]
    parts += ["\n".join(f"- {note}" for note in record.notes)] if record.notes else []
    return "\n\n".join(parts)


def as_markdown(one: Table) -> str:
    """A table in Markdown, its caption in bold above it."""

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [f"**{one.caption}**", ""] if one.caption else []
    lines += [row(one.headers), "|" + "|".join("---:" if right else "---" for right in one.right) + "|"]
    return "\n".join(lines + [row(cells) for cells in one.cells])


def text(record: Record) -> str:
    """A record to print: what it was made on, its tables, its notes."""
    parts = ["\n".join(head(record))]
    parts += [repr(one) for one in tables(record)]
    if record.notes:
        parts.append("\n".join(record.notes))
    return "\n\n".join(parts)


def head(record: Record) -> list[str]:
    """Lines that say what the figures are: kind, device, software, clocks."""
    device, software = record.device, record.software
    versions = software.get("versions", {})
    lines = [f"{record.name}, {record.kind}, {record.started}, {record.command}"]
    facts = [str(device.get("name"))]
    words = {"capability": "SM {}", "driver": "driver {}", "cuda": "CUDA {}", "sms": "{} SMs"}
    facts += [form.format(device[name]) for name, form in words.items() if device.get(name)]
    commit = software.get("commit")
    facts += [f"torch {versions['torch']}"] if "torch" in versions else []
    if commit:
        facts.append(f"commit {commit['id'][:10]}{' with changes' if commit['dirty'] else ''}")
    lines.append(", ".join(facts))
    lines += [clock_line(clocks) for clocks in record.clocks]
    if record.ceilings:
        parts = [f"{name} {value:,.0f}" for name, value in record.ceilings.items()]
        lines.append("measured ceilings: " + ", ".join(parts))
    if not record.complete:
        lines.append("INCOMPLETE: the run was interrupted")
    return lines


def clock_line(clocks: dict[str, Any]) -> str:
    """One snapshot of clocks and throttle reasons in words."""
    when = clocks.get("when", "?")
    if "unread" in clocks:
        return f"clocks {when}: {clocks['unread']}"
    reasons = clocks.get("throttle_reasons")
    why = "unknown" if reasons is None else ", ".join(reasons) or "none"
    parts = [
        f"SM {clocks.get('sm_mhz')} of {clocks.get('sm_max_mhz')} MHz",
        f"memory {clocks.get('memory_mhz')} MHz",
        f"{clocks.get('temperature_c')} °C",
        f"{clocks.get('power_w')} of {clocks.get('power_limit_w')} W",
        f"throttle reasons: {why}",
    ]
    return f"clocks {when}: " + ", ".join(parts)


def _seed(record: Record, name: str, entries: Sequence[Entry]) -> Table:
    """Ours and the article's row of the same shape, one under the other."""
    contenders = list(dict.fromkeys(entry.contender for entry in entries))
    article = quoted.table(quoted.DEEPINFER, name)
    gpu = quoted.table(quoted.DEEPINFER, "hardware").value("gpu").split(",")[0].removeprefix("NVIDIA ")
    rows: list[dict[str, Any]] = []
    for shape in dict.fromkeys((entry.m, entry.n, entry.k) for entry in entries):
        m, n, k = shape
        here = {entry.contender: entry for entry in entries if (entry.m, entry.n, entry.k) == shape}
        ours = {contender: entry.median_us for contender, entry in here.items()}
        base = {"shape": f"{m}×{n}×{k}"}
        first = here.get(contenders[0])
        spread = _spread(first) if first else None
        rows.append(
            base
            | {"device": record.device.get("name"), "origin": record.kind, "spread": spread}
            | ours
            | _ratios(name, ours)
        )
        theirs = _article_row(article, name, shape)
        if theirs:
            rows.append(base | {"device": gpu, "origin": "quoted"} | theirs | _ratios(name, theirs))
    titles = _OTHER_LABELS.get(name, {})
    columns = {"shape": "M×N×K", "device": "device"} | {c: titles.get(c, label(c)) for c in contenders}
    columns |= {title: title for title, _, _ in _RATIOS[name]} | {"spread": "first column p10–p90"}
    columns = {key: title for key, title in columns.items() if any(key in row for row in rows)}
    formats = dict.fromkeys(contenders, ".1f") | {title: ".2f" for title, _, _ in _RATIOS[name]}
    return table(rows, columns, caption=f"{_TITLES[name]} (quoted: {article.source})", formats=formats)


def _article_row(article: quoted.QuotedTable, name: str, shape: tuple[int, int, int]) -> dict[str, float]:
    m, n, k = shape
    for row in article.rows:
        same = row["batch"] == m if name == "w3_batch_tile" else (row["m"], row["n"], row["k"]) == (m, n, k)
        if same:
            return {c: row[column] * 1e3 for c, column in _QUOTED.items() if column in row}
    return {}


def _ratios(name: str, medians: dict[str, Any]) -> dict[str, float]:
    found = {}
    for title, above, below in _RATIOS[name]:
        if medians.get(above) and medians.get(below):
            found[title] = medians[above] / medians[below]
    return found


def _spread(entry: Entry) -> str | None:
    figures = entry.to_json()["summary"]
    return f"{figures['p10_us']:.1f}–{figures['p90_us']:.1f}" if figures else None


def _sweeps(record: Record) -> Iterator[Table]:
    """One table a format and shape: rows M, columns contenders."""
    entries = record.of_table(SWEEP)
    for key in dict.fromkeys((entry.format, entry.n, entry.k, entry.group) for entry in entries):
        format, n, k, group = key
        here = [entry for entry in entries if (entry.format, entry.n, entry.k, entry.group) == key]
        contenders = [
            c
            for c in dict.fromkeys(e.contender for e in here)
            if any(e.samples_us for e in here if e.contender == c)
        ]
        rows = []
        for m in dict.fromkeys(entry.m for entry in here):
            medians = {e.contender: e.median_us for e in here if e.m == m and e.samples_us}
            own = {c: us for c, us in medians.items() if not foreign(c) and us is not None}
            best = min(own, key=lambda c: own[c]) if own else None
            rows.append({"m": m, **medians, "best": label(best) if best else None, "origin": record.kind})
        if not contenders:
            continue
        columns = {"m": "M"} | {c: label(c) for c in contenders} | {"best": "fastest of ours"}
        title = f"{format.upper()} {n}×{k} (N×K), group {group}: µs a call by M"
        yield table(rows, columns, caption=title, formats=dict.fromkeys(contenders, ".1f"))


def _others(record: Record) -> Iterator[Table]:
    """Entries of tables that have no form of their own."""
    shown = (*SEED_TABLES, SWEEP, FAST)
    rest = [e for e in record.entries if e.table not in shown and e.samples_us]
    known = (report_attention, report_serving, report_open_loop)
    rest = [e for e in rest if not any(one.shows(e) for one in known)]
    if rest:
        rows = [
            {
                "table": e.table,
                "case": f"{e.format} {e.m}×{e.n}×{e.k}" if e.n else "",
                "contender": label(e.contender),
                "us": e.median_us,
                "spread": _spread(e),
                "note": e.note or None,
                "origin": record.kind,
            }
            for e in rest
        ]
        columns = {
            "table": "table",
            "case": "M×N×K",
            "contender": "contender",
            "us": "µs",
            "spread": "p10–p90",
        }
        columns |= {"note": "note"} if any(row["note"] for row in rows) else {}
        yield table(rows, columns, caption="Other measurements", formats={"us": ".2f"})


def _untimed(record: Record) -> Iterator[Table]:
    """Contenders without a figure, grouped by reason; and wrong ones, which is the first thing to know."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for entry in record.entries:
        if entry.status in ("timed", "emulated"):
            continue
        status = entry.status.upper() if entry.status in ("wrong", "failed") else entry.status
        key = (status, label(entry.contender), entry.note)
        lines.setdefault(key, []).append(f"{entry.format} {entry.m}×{entry.n}×{entry.k}")
    if lines:
        rows = []
        for (status, contender, note), where in lines.items():
            shown = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
            rows.append({"status": status, "contender": contender, "cases": shown, "reason": note})
        columns = ["contender", "status", "cases", "reason"]
        yield table(rows, columns, caption="Without figures", origins=False)


def _emulated(record: Record) -> Iterator[Table]:
    """Counts of what was emulated: a machine with no GPU measures no time."""
    rows = []
    for entry in record.entries:
        counts = entry.counts
        if not counts:
            continue
        sectors, requests = counts["sectors"], counts["requests"]
        rows.append(
            {
                "table": entry.table,
                "case": f"{entry.format} {entry.m}×{entry.n}×{entry.k}",
                "contender": label(entry.contender),
                "requests": requests,
                "per": sectors / requests if requests else None,
                "bytes": counts["bytes"],
                "times": counts["bytes"] / entry.weight_bytes if entry.weight_bytes else None,
                "wavefronts": counts["wavefronts"],
                "faults": counts["faults"],
                "origin": record.kind,
            }
        )
    if rows:
        columns = {"table": "table", "case": "M×N×K", "contender": "contender", "requests": "requests"}
        columns |= {"per": "sectors / request", "bytes": "bytes moved", "times": "bytes / weight bytes"}
        columns |= {"wavefronts": "shared wavefronts", "faults": "faults"}
        caption = "Right results, shrunk shapes. Source-level accesses, no caches; no time is measured"
        yield table(rows, columns, caption=caption, formats={"per": ".2f", "times": ".1f"})
    yield from _untimed(record)
