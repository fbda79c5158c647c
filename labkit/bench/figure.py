"""Pictures of a record, saved beside its JSON as PNG and SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit import atomic, plots
from labkit.bench.cases import SWEEP
from labkit.bench.record import Record
from labkit.bench.report import label

_MARKERS = "osD^vP*X"
_TICKS = tuple(2**i for i in range(18))


def draw(record: Record) -> tuple[Any, str] | None:
    """Time against M for every format and shape of the sweep, and what the picture shows in words.

    Returns:
        (figure, alternative text), or None when the record holds no timed sweep.
    """
    entries = [entry for entry in record.of_table(SWEEP) if entry.samples_us]
    if not entries:
        return None
    formats = list(dict.fromkeys(entry.format for entry in entries))
    shapes = list(dict.fromkeys((entry.n, entry.k) for entry in entries))
    contenders = list(dict.fromkeys(entry.contender for entry in entries))
    size = {"width": max(7.2, 4.4 * len(shapes)), "height": 3.4 * len(formats)}
    fig, grid = plots.figure(**size, rows=len(formats), cols=len(shapes), squeeze=False)
    for row, format in enumerate(formats):
        for column, (n, k) in enumerate(shapes):
            ax = grid[row][column]
            here = [e for e in entries if (e.format, e.n, e.k) == (format, n, k)]
            for i, contender in enumerate(contenders):
                points = sorted((e.m, e.median_us) for e in here if e.contender == contender)
                if points:
                    style = {"color": plots.CYCLE[i % 8], "marker": _MARKERS[i % 8], "markersize": 4}
                    line = "--" if contender == "dense_fp16" else "-"
                    ax.plot(*zip(*points), line, label=label(contender), **style)
            plots.log_axes(ax)
            ticks = [m for m in _TICKS if m <= max(entry.m for entry in entries)]
            ax.set_xticks(ticks, [str(m) for m in ticks])
            ax.set_xticks([], minor=True)
            ax.set_title(f"{format.upper()}, {n}×{k} (N×K)")
            ax.set_xlabel("rows of activations, M")
            ax.set_ylabel("µs a call")
    drawn: dict[str, Any] = {}
    for ax in grid.flat:
        drawn |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    # Below the axes, where no curve passes.
    fig.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=3)
    fig.suptitle(f"{record.device.get('name')}, {record.kind}, cold L2", fontsize=10)
    names = ", ".join(label(contender) for contender in contenders)
    where = "; ".join(f"{n}×{k}" for n, k in shapes)
    alt = f"Microseconds a call against M on {record.device.get('name')} for {where}: {names}."
    return fig, alt


def save(record: Record, beside: Path) -> list[Path]:
    """Write PNG and SVG next to ``beside`` (the JSON); an empty list when there is nothing to draw."""
    drawn = draw(record)
    if drawn is None:
        return []
    fig, alt = drawn
    png, svg = beside.with_suffix(".png"), beside.with_suffix(".svg")
    with atomic.replacing(svg, binary=True) as file:
        fig.savefig(file, format="svg", metadata={"Date": None, "Title": alt})
    with atomic.replacing(png, binary=True) as file:
        file.write(plots.render(fig, alt).png)
    return [png, svg]
