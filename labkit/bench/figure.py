"""Pictures of a record, saved beside its JSON as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from labkit import atomic, plots
from labkit.bench.cases import FAST, SWEEP
from labkit.bench.labels import foreign, label
from labkit.bench.record import Entry, Record

_MARKERS = "osD^vP*X"
_TICKS = tuple(2**i for i in range(18))
_MOST_COLUMNS = 4

# The family first and strongest; its rivals next; what it replaces in pale colours.
_STYLES: dict[str, tuple[str, str]] = {
    "tensor_core": (plots.RED, "o"),
    "humming_w4": (plots.BLUE, "s"),
    "humming_w3": (plots.BLUE, "s"),
    "tinygemm_w4": (plots.PURPLE, "D"),
    "dense_fp16": (plots.BLACK, "^"),
    "dense_bf16": (plots.BLACK, "^"),
    "dequant_matmul": (plots.GREY, "v"),
    "seed_dispatch": (plots.ORANGE, "P"),
}


def draw(record: Record) -> tuple[Any, str] | None:
    """Time against M for every format and shape, and what the picture shows in words.

    Returns:
        (figure, alternative text) of the sweep, else of "fast"; None when the record holds neither, timed.
    """
    for table in (SWEEP, FAST):
        entries = [entry for entry in record.of_table(table) if entry.samples_us]
        if entries:
            return _panels(record, entries, table)
    return None


def _panels(record: Record, entries: Sequence[Entry], table: str) -> tuple[Any, str]:
    formats = list(dict.fromkeys(entry.format for entry in entries))
    shapes = list(dict.fromkeys((entry.n, entry.k) for entry in entries))
    contenders = list(dict.fromkeys(entry.contender for entry in entries))
    columns = min(len(shapes), _MOST_COLUMNS)
    lines = -(-len(shapes) // columns)
    wide, high = (4.4, 3.4) if table == SWEEP else (3.6, 3.0)
    size = {"width": max(7.2, wide * columns), "height": high * lines * len(formats) + 0.6}
    fig, grid = plots.figure(**size, rows=lines * len(formats), cols=columns, squeeze=False, sharex=True)
    spare = set(grid.flat)
    for f, format in enumerate(formats):
        for i, shape in enumerate(shapes):
            ax = grid[f * lines + i // columns][i % columns]
            spare.discard(ax)
            here = [e for e in entries if (e.format, e.n, e.k) == (format, *shape)]
            _curves(ax, here, contenders, table)
            if table == FAST:
                _floor(ax, here, record)
            ax.set_title(f"{format.upper()}  {shape[0]}×{shape[1]}", fontsize=10)
            if f * lines + i // columns == lines * len(formats) - 1 or i + columns >= len(shapes) > columns:
                ax.set_xlabel("rows of activations, M")
                ax.tick_params(labelbottom=True)
            if i % columns == 0:
                ax.set_ylabel("µs a call")
            _ticks(ax, sorted({entry.m for entry in entries}), table)
    for ax in spare:
        ax.set_visible(False)
    drawn: dict[str, Any] = {}
    for ax in grid.flat:
        drawn |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    # Below the axes, where no curve passes.
    across = 3 if columns == 1 else min(len(drawn), 2 * columns)
    fig.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=across)
    groups = ", ".join(str(group) for group in dict.fromkeys(entry.group for entry in entries))
    title = f"{record.device.get('name')}, {record.kind}, cold L2, group {groups}; titles are N×K"
    fig.suptitle(title, fontsize=10)
    names = ", ".join(label(contender) for contender in contenders)
    where = "; ".join(f"{n}×{k}" for n, k in shapes)
    alt = f"Microseconds a call against M on {record.device.get('name')} for {where}: {names}."
    return fig, alt


def _curves(ax: Axes, here: Sequence[Entry], contenders: Sequence[str], table: str) -> None:
    for i, contender in enumerate(contenders):
        points = sorted((e.m, e.median_us) for e in here if e.contender == contender)
        if not points:
            continue
        color, mark = plots.CYCLE[i % 8], _MARKERS[i % 8]
        if table == FAST:
            color, mark = _STYLES.get(contender, (color, mark))
        style: dict[str, Any] = {"color": color, "marker": mark, "markersize": 4, "linewidth": 1.4}
        if contender == "tensor_core":
            style |= {"linewidth": 2.4, "zorder": 5}
        dashed = foreign(contender) if table == FAST else contender.startswith("dense")
        ax.plot(*zip(*points), "--" if dashed else "-", label=label(contender), **style)
    plots.log_axes(ax)
    if table == FAST:  # the panels span less than two decades: one number a decade is too few to read off
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.set_yticks([], minor=True)


def _floor(ax: Axes, here: Sequence[Entry], record: Record) -> None:
    """The time in which the packed weight can be read at the read rate of the same run."""
    rate = record.ceilings.get("read_gb_s")
    nbytes = next((e.weight_bytes for e in here if not foreign(e.contender)), 0)
    if rate and nbytes:
        style: dict[str, Any] = {"color": plots.GREEN, "linestyle": ":", "linewidth": 1.4}
        ax.axhline(nbytes / rate / 1e3, label="weights at the read rate", **style)


def _ticks(ax: Axes, rows: Sequence[int], table: str) -> None:
    if table == SWEEP:
        ticks = [m for m in _TICKS if m <= max(rows)]
    else:  # the M's themselves, but no two so near that their numbers touch
        ticks = []
        for m in rows:
            if not ticks or m / ticks[-1] >= 1.7:
                ticks.append(m)
    ax.set_xticks(ticks, [str(m) for m in ticks])
    ax.set_xticks([], minor=True)


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
