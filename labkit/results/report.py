"""Histories as a table for the terminal and as a page with plots."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from labkit.results.history import Histories, History
from labkit.tables import Table, table

MOST_ROWS = 40
MOST_PLOTS = 60
METHOD = (
    "A run is a change point when the bootstrap 95 % interval of its median does not overlap that of the "
    "runs before it (up to 5, back to the last change) and the medians differ by the threshold or more. "
    "Counts are exact: any difference is a change. Runs of different devices or kinds are never compared."
)
_COLUMNS = {
    "case": "case",
    "device": "device",
    "runs": "runs",
    "last": "last run",
    "median": "median",
    "spread": "10–90 %",
    "unit": "unit",
    "before": "median before",
    "change": "last change",
    "when": "at",
}


def ordered(found: Sequence[History]) -> list[History]:
    """Those that changed first, then those with most runs; else by case."""
    return sorted(found, key=lambda one: (not one.changed, -len(one.points), one.case, one.device))


def rows(found: Sequence[History]) -> list[dict[str, Any]]:
    """One row a history: its newest run, the one before, and the last change."""
    made = []
    for one in found:
        last = one.points[-1]
        low, high = last.spread
        row: dict[str, Any] = {"case": one.label, "device": one.device.key, "runs": len(one.points)}
        row |= {"last": last.started[:16], "median": last.median, "spread": f"{low:.4g}–{high:.4g}"}
        row |= {
            "unit": one.unit or one.metric,
            "origin": one.kind,
            "before": None,
            "change": None,
            "when": None,
        }
        if len(one.points) > 1:
            row["before"] = one.points[-2].median
        if one.changed:
            row["change"] = one.words(one.changed[-1])
            row["when"] = one.changed[-1].started[:16]
        made.append(row)
    return made


def as_table(found: Sequence[History], caption: str = "") -> Table | None:
    """The rows as a table; None when there is none."""
    return table(rows(found), _COLUMNS, caption=caption) if found else None


def notes(histories: Histories, found: Sequence[History]) -> list[str]:
    """What a reader has to know beside the table: what was left out and why, devices, settings."""
    lines = [f"not compared: {reason}" for reason in histories.refused]
    devices = sorted({one.device for one in found})
    if len(devices) > 1:
        lines.append(
            "not compared with each other (they differ in the device): "
            + "; ".join(device.label for device in devices)
        )
    seen: dict[Any, set[tuple[str, ...]]] = {}
    for one in found:
        places = (one.case.label, one.device, one.kind, one.metric)
        seen.setdefault(places, set()).add((f"how={one.case.how}", *one.case.settings))
    apart: dict[tuple[str, ...], list[str]] = {}
    for (label, *_), settings in seen.items():
        if len(settings) > 1:
            common = set.intersection(*map(set, settings))
            apart.setdefault(tuple(sorted(set().union(*settings) - common)), []).append(label)
    for differing, labels in apart.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        lines.append(f"not compared (settings differ: {', '.join(differing)}): {labels[0]}{more}")
    lines += [f"{one.label}: at {p.started[:16]} also new: {one.beside(p)}" for one, p in _with_news(found)]
    return lines


def _with_news(found: Sequence[History]) -> list[tuple[History, Any]]:
    return [(one, p) for one in found for p in one.changed[-1:] if one.beside(p)][:MOST_ROWS]


def text(histories: Histories, found: Sequence[History], *, everything: bool = False) -> str:
    """The report of a terminal."""
    chosen = ordered(found)
    shown = chosen if everything else chosen[:MOST_ROWS]
    changed = sum(bool(one.changed) for one in chosen)
    head = f"{histories.records} runs, {len(chosen)} histories, {changed} with a change point"
    parts = [head]
    if (made := as_table(shown)) is not None:
        parts.append(repr(made))
    if len(shown) < len(chosen):
        left = len(chosen) - len(shown)
        parts.append(f"… {left} more, without a newer change: --all shows them, --case narrows")
    if lines := notes(histories, chosen):
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


_STYLE = (
    "body{font-family:sans-serif;color:#22262B;max-width:75rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;font-size:.85rem}td,th{border:1px solid #ddd;padding:.25rem .5rem}"
    "figure{margin:1.5rem 0}figcaption{font-size:.85rem;color:#5F6670}.wide{overflow-x:auto}"
)


def page(histories: Histories, found: Sequence[History], *, everything: bool = False) -> str:
    """A page of its own: table, what was left out, a plot of each history with at least two runs.

    Nothing is loaded from the network, and every plot says in words what it shows.
    """
    from labkit.results import figure

    chosen = ordered(found)
    changed = sum(bool(one.changed) for one in chosen)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>labkit: history of results</title><style>{_STYLE}</style></head><body>",
        "<h1>History of results</h1>",
        f"<p>{histories.records} runs, {len(chosen)} histories, {changed} with a change point.</p>",
        f"<p>{html.escape(METHOD)}</p>",
    ]
    if lines := notes(histories, chosen):
        parts.append("<h2>Left out or not compared</h2><ul>")
        parts += [f"<li>{html.escape(line)}</li>" for line in lines]
        parts.append("</ul>")
    if histories.skipped:
        parts.append(f"<p>{len(histories.skipped)} files that are no records were skipped.</p>")
    if (made := as_table(chosen)) is not None:
        parts.append(f'<h2>Newest runs</h2><div class="wide">{made._repr_html_()}</div>')
    drawn = [one for one in chosen if len(one.points) > 1]
    if drawn:
        parts.append("<h2>Plots</h2>")
    most = len(drawn) if everything else MOST_PLOTS
    for number, one in enumerate(drawn[:most]):
        caption = html.escape(figure.alt(one))
        parts.append(f"<figure>{figure.svg(one, number)}<figcaption>{caption}</figcaption></figure>")
    if len(drawn) > most:
        parts.append(f"<p>{len(drawn) - most} more plots were left out; --all draws them.</p>")
    parts.append("</body></html>\n")
    return "\n".join(parts)
