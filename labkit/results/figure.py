"""The plot of one history: medians with their spread, run by run; change points marked."""

from __future__ import annotations

import html
import io
import re
from typing import Any

from labkit import plots
from labkit.results.history import History

_WIDE, _HIGH = 7.2, 2.6
_MOST_DATES = 7


def alt(history: History) -> str:
    """What the plot shows, in a sentence."""
    points = history.points
    unit = f" {history.unit}" if history.unit else ""
    words = f"{history.label} on {history.device.label}, {history.kind}: {len(points)} runs, "
    words += f"median {points[0].median:.4g}{unit} at first and {points[-1].median:.4g}{unit} at last"
    marks = [f"{point.started[:10]} {history.words(point)}" for point in history.changed]
    return words + ("; changes: " + ", ".join(marks) if marks else "; no change point")


def draw(ax: Any, history: History) -> None:
    """Draw a history into matplotlib axes; also the static figure beside the widget."""
    points = history.points
    at = list(range(len(points)))
    medians = [point.median for point in points]
    spreads = [point.spread for point in points]
    below = [max(median - low, 0.0) for median, (low, _) in zip(medians, spreads)]
    above = [max(high - median, 0.0) for median, (_, high) in zip(medians, spreads)]
    color = plots.ORIGIN_COLORS[history.kind]
    ax.errorbar(at, medians, yerr=(below, above), color=color, marker="o", capsize=3, linewidth=1.4)
    for i in at:
        if words := history.words(points[i]):
            ax.plot([i], [medians[i]], marker="D", markersize=9, color=plots.RED, zorder=5)
            # what went down is named below the line, so that the night after a peak does not cover it
            rises = i == 0 or medians[i] >= medians[i - 1]
            place = {"xytext": (8, 8 if rises else -15), "textcoords": "offset points"}
            paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
            ax.annotate(words, (i, medians[i]), **place, fontsize=8, bbox=paper, zorder=6)
    step = -(-len(at) // _MOST_DATES)
    shown = at[::step]
    ax.set_xticks(shown, [points[i].started[:10] for i in shown])
    ax.set_ylabel(f"{history.metric} ({history.unit})" if history.unit else history.metric)
    ax.margins(x=0.08, y=0.25)
    ax.set_ylim(bottom=0)
    ax.set_title(history.label, fontsize=9)


def svg(history: History, number: int) -> str:
    """The plot as inline ``<svg>`` with its text for readers who cannot see it.

    Args:
        number: of the plot in its page; matplotlib gives the same ids to every figure.
    """
    fig, ax = plots.figure(_WIDE, _HIGH)
    draw(ax, history)
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>p{number}-", body)
    label = html.escape(alt(history), quote=True)
    return body.replace("<svg", f'<svg role="img" aria-label="{label}" style="max-width:100%;height:auto"', 1)
