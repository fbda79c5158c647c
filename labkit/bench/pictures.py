"""One picture of any record of ``labkit bench``, and what it shows in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from labkit import plots
from labkit.bench import figure, open_loop, pareto, report_attention
from labkit.bench.concurrency import PEER, TABLE
from labkit.bench.jitter import COLD, DOCUMENT
from labkit.bench.labels import foreign, label
from labkit.bench.record import Entry, Record
from labkit.errors import refuse

_MARKERS = "os^Dv*PX"
_COLUMNS = 3
_MOST_PANELS, _MOST_BARS = 12, 24
_POLICIES = {
    "serial": (plots.GREY, "o"),
    "overlap": (plots.BLUE, "s"),
    "ticks": (plots.SKY, "^"),
    "dynamic": (plots.ORANGE, "D"),
    "mixed": (plots.GREEN, "v"),
    "sliced": (plots.RED, "P"),
    "adaptive": (plots.PURPLE, "X"),
    PEER: (plots.BLACK, "*"),
}
_OFF = " no overlap"
_STYLES: tuple[dict[str, Any], ...] = (
    {"linestyle": "-", "markersize": 5},
    {"linestyle": "--", "markersize": 8},
    {"linestyle": ":", "markersize": 3},
)
"""Of the first, second, … chunk of one policy."""

Drawn = tuple[Any, str]


def draw(record: Record) -> Drawn:
    """(figure, alternative text) of a record.

    Raises:
        InputError: there is no figure in it.
    """
    shown = [one for one in record.entries if one.status in ("timed", "emulated")]
    shown = [one for one in shown if one.samples_us or one.counts or one.figures]
    if not shown:
        why = next((one.note for one in record.entries if one.note), "no entries")
        refuse("record", f"{record.name} without figures: {why}", "an entry that is timed or emulated")
    tables = {entry.table for entry in shown}
    if TABLE in tables:
        return _concurrency(record, [one for one in shown if one.table == TABLE])
    if tables & {DOCUMENT, COLD}:
        return _jitter(record, shown)
    if any(name.startswith(open_loop.PREFIX) for name in tables):
        return _serving(record, shown)
    if any(map(report_attention.shows, shown)):
        return _attention(record, shown)
    if record.kind == "emulated":
        return _counts(record, shown)
    return figure.draw(record) or _bars(record, [(one, one.median_us or 0.0) for one in shown], "µs a call")


# --- kernels -----------------------------------------------------------------------------------------------


def _counts(record: Record, shown: Sequence[Entry]) -> Drawn:
    """Bytes moved over the bytes of the weights, by M; a panel a format and shape."""
    panels = list(dict.fromkeys((one.format, one.n, one.k) for one in shown))[:_MOST_PANELS]
    names = list(dict.fromkeys(one.contender for one in shown))
    columns = min(len(panels), _COLUMNS)
    lines = -(-len(panels) // columns)
    fig, grid = plots.figure(
        max(7.2, 3.2 * columns), 2.8 * lines + 0.7, rows=lines, cols=columns, squeeze=False
    )
    told = []
    for ax in grid.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (form, n, k) in zip(grid.flat, panels):
        here = [one for one in shown if (one.format, one.n, one.k) == (form, n, k)]
        for number, name in enumerate(names):
            found = sorted((one.m, _times(one)) for one in here if one.contender == name)
            if found:
                style = {"marker": _MARKERS[number % 8], "color": plots.CYCLE[number % 8], "markersize": 5}
                ax.plot(*zip(*found), "--" if foreign(name) else "-", label=label(name), **style)
                told.append(f"{form.upper()} {label(name)} {found[0][1]:.1f} at M = {found[0][0]}, ")
                told[-1] += f"{found[-1][1]:.1f} at M = {found[-1][0]}"
        _log(ax, "y")
        plots.log_axes(ax, y=False)
        _ticks(ax, {one.m for one in here})
        ax.set_title(f"{form.upper()}  {n}×{k}", fontsize=10)
        ax.set_xlabel("rows of activations, M")
    for row in grid:
        row[0].set_ylabel("bytes moved / weight bytes")
    _legend(fig, grid.flat)
    fig.suptitle("Emulated: source-level bytes, no caches; shrunk shapes (N×K)", fontsize=10)
    return fig, "Bytes that a launch moves over the bytes of its weights, against M, emulated. " + _said(told)


def _times(entry: Entry) -> float:
    return float(entry.counts["bytes"]) / max(entry.weight_bytes, 1)


def _attention(record: Record, shown: Sequence[Entry]) -> Drawn:
    if record.kind == "emulated":
        return _bars(record, [(one, _times(one)) for one in shown], "bytes moved / bytes of keys and values")
    models = list(dict.fromkeys((one.table, one.n) for one in shown))[:_COLUMNS]
    fig, grid = plots.figure(max(7.2, 3.4 * len(models)), 3.4, cols=len(models), squeeze=False, sharey=True)
    told, unit = [], "µs a call" if max(chunk for _, chunk in models) > 1 else "GB/s"
    for ax, (name, chunk) in zip(grid[0], models):
        rows = max(one.m for one in shown if (one.table, one.n) == (name, chunk))
        here = [one for one in shown if (one.table, one.n, one.m) == (name, chunk, rows)]
        for number, key in enumerate(dict.fromkeys((one.contender, one.format) for one in here)):
            of_key = [one for one in here if (one.contender, one.format) == key]
            found = sorted(
                (one.k, (one.weight_gb_s if unit == "GB/s" else one.median_us) or 0.0) for one in of_key
            )
            style = {"marker": _MARKERS[number % 8], "color": plots.CYCLE[number % 8], "markersize": 4}
            ax.plot(*zip(*found), label=report_attention._key(key), **style)
            told.append(f"{name.removeprefix(report_attention.PREFIX)} {report_attention._key(key)} ")
            told[-1] += f"{found[-1][1]:,.0f} {unit} at context {found[-1][0]}"
        copy = record.ceilings.get("copy_gb_s")
        if copy and unit == "GB/s":
            ax.axhline(copy, color=plots.GREY, linestyle=":", label="copy bandwidth, same run")
        plots.log_axes(ax, y=False)
        _ticks(ax, {one.k for one in here})
        ax.tick_params(axis="x", rotation=35)
        title = name.removeprefix(report_attention.PREFIX)
        ax.set_title(f"{title}, batch {rows}" + (f", chunk {chunk}" if chunk > 1 else ""), fontsize=10)
        ax.set_xlabel("context, tokens")
        ax.set_ylim(0, None)
    grid[0][0].set_ylabel(unit if unit != "GB/s" else "keys and values, GB/s")
    _legend(fig, grid.flat)
    fig.suptitle(f"{record.device.get('name')}, {record.kind}", fontsize=10)
    what = "Time of a call" if unit != "GB/s" else "Bytes of keys and values a second"
    return fig, f"{what} against the context, {record.kind}. " + _said(told)


def _bars(record: Record, found: Sequence[tuple[Entry, float]], unit: str) -> Drawn:
    """A bar an entry."""
    kept = found[:_MOST_BARS]
    tables = {one.table for one, _ in kept}
    labels = []
    for one, _ in kept:
        if report_attention.shows(one):
            model = one.table.removeprefix(report_attention.PREFIX)
            chunk = f", chunk {one.n}" if one.n > 1 else ""
            labels.append(f"{model} {one.format}, batch {one.m}{chunk}, context {one.k}")
        else:
            head = f"{one.table}: " if len(tables) > 1 else ""
            labels.append(f"{head}{label(one.contender)} {one.format} {one.m}×{one.n}×{one.k}")
    fig, ax = plots.figure(7.2, 0.24 * len(kept) + 1.1)
    plots.bars(ax, labels, [value for _, value in kept], [record.kind] * len(kept), unit=unit)
    told = [f"{words} {value:.2f}" for words, (_, value) in zip(labels, kept)]
    return fig, f"Bars of {unit}, {record.kind}. " + _said(told)


# --- the engine --------------------------------------------------------------------------------------------


def _concurrency(record: Record, shown: Sequence[Entry]) -> Drawn:
    fig, axes = plots.figure(8.6, 3.6, cols=2)
    rates = _lines(axes[0], shown, lambda one: (one.m, one.figures["tok_s"]))
    gaps = _lines(axes[1], shown, lambda one: (one.m, _ms(one.figures["itl"]["max"])))
    for ax, words in zip(axes, ("tokens/s, all clients together", "longest gap between tokens, ms")):
        plots.log_axes(ax, y=False)
        _ticks(ax, {one.m for one in shown})
        ax.set_xlabel("clients at once")
        ax.set_title(words, fontsize=10)
    axes[0].set_ylim(0, None)
    _log(axes[1], "y")
    _legend(fig, axes)
    _engine_title(fig, record)
    most = max(one.m for one in shown)
    told = [
        f"{name}: {points[-1][1]:,.0f} tokens/s, gap {gaps[name][-1][1]:,.3g} ms"
        for name, points in rates.items()
    ]
    return fig, f"Tokens a second and longest gap against clients, {_origin(record)}. At {most}: " + _said(
        told
    )


def _serving(record: Record, shown: Sequence[Entry]) -> Drawn:
    fig, axes = plots.figure(9.6, 3.7, cols=3)
    wait = _lines(axes[0], shown, lambda one: (_rate(one), _ms(one.figures["ttft"]["p95"])))
    _lines(axes[1], shown, lambda one: (_rate(one), _ms(one.figures["tpot"]["p95"])))
    good = _lines(axes[2], shown, lambda one: (_rate(one), one.figures["goodput"]))
    words = ("TTFT p95, ms", "TPOT p95, ms", "answers in bounds, a second")
    bounds = [record.parameters.get(name) for name in ("ttft", "tpot")]
    for ax, said in zip(axes, words):
        ax.set_title(said, fontsize=10)
        ax.set_xlabel("requests a second, offered")
    for ax, bound in zip(axes, bounds):
        _log(ax, "y")
        ax.set_xlim(0, None)
        if bound:
            ax.axhline(1e3 * bound, color=plots.INK, linestyle=":", linewidth=1.2, label="bound; offered")
    top = max(map(_rate, shown))
    axes[2].plot([0, top], [0, top], ":", color=plots.INK, linewidth=1.2, label="bound; offered")
    axes[2].set_ylim(0, None)
    _legend(fig, axes)
    _engine_title(fig, record)
    told = [
        f"{name}: TTFT p95 {wait[name][-1][1]:,.3g} ms, goodput {points[-1][1]:.3g}"
        for name, points in good.items()
    ]
    head = f"TTFT, TPOT and goodput against the rate of arrivals, {_origin(record)}. At {top:.3g} a second: "
    return fig, head + _said(told)


def _rate(entry: Entry) -> float:
    return float(entry.figures["rate"])


def _jitter(record: Record, shown: Sequence[Entry]) -> Drawn:
    """Documents: rate against the largest gap, with the front. Cold prompts: TTFT against the largest gap."""
    parts = [part for part in (DOCUMENT, COLD) if any(one.table == part for one in shown)]
    fig, grid = plots.figure(
        4.6 * len(parts) + (2.6 if len(parts) == 1 else 0), 3.9, cols=len(parts), squeeze=False
    )
    told = []
    for ax, part in zip(grid[0], parts):
        here = [one for one in shown if one.table == part and one.figures["itl_beside"]["max"]]
        for one in here:
            x, gap = one.figures["itl_beside"]["max"], one.figures
            y = gap["prompt_tok_s"] if part == DOCUMENT else _ms(gap["ttft"]["p95"])
            color, mark = _POLICIES.get(one.figures["policy"], (plots.BLACK, "*"))
            hollow = one.contender.endswith(_OFF) or not one.figures["two_lanes"]
            face = "white" if hollow else color
            ax.plot(
                [1e3 * x],
                [y],
                mark,
                color=color,
                markerfacecolor=face,
                label=one.figures["policy"],
                markersize=7,
            )
            told.append(f"{one.contender} {1e3 * x:.3g} ms, {y:,.0f}")
        _log(ax, "x")
        if part == COLD:
            _log(ax, "y")
        ax.set_xlabel("largest gap of the streams beside prefill, ms")
        ax.set_title(
            "documents: prompt tokens/s" if part == DOCUMENT else "cold prompts: TTFT p95, ms", fontsize=10
        )
        if part == DOCUMENT:
            ax.set_ylim(0, None)
            front = pareto.front(pareto.points(record))
            ax.plot(
                [1e3 * p.max_gap for p in front],
                [p.prompt_rate for p in front],
                "-",
                color="#B9BFC7",
                zorder=0,
            )
    names = list(dict.fromkeys(one.figures["policy"] for one in shown))
    keys = [_POLICIES.get(name, (plots.BLACK, "*")) for name in names]
    marks = [Line2D([], [], color=color, marker=mark, linestyle="") for color, mark in keys]
    fig.legend(marks, names, loc="outside lower center", ncols=len(names))
    _engine_title(fig, record, "; filled: two lanes; line: nothing beats it" if DOCUMENT in parts else "")
    return fig, f"What prompts do to streams, {_origin(record)}: largest gap, and rate or TTFT. " + _said(
        told
    )


Line = list[tuple[float, float]]


def _lines(ax: Axes, shown: Sequence[Entry], at: Callable[[Entry], tuple[float, float]]) -> dict[str, Line]:
    """A line a contender: colour by policy, style by chunk; hollow where the overlap is off."""
    found: dict[str, Line] = {}
    for name in dict.fromkeys(one.contender for one in shown):
        here = [one for one in shown if one.contender == name]
        policy = here[0].figures["policy"]
        color, mark = _POLICIES.get(str(policy), (plots.BLACK, "*"))
        same = list(dict.fromkeys(one.figures["label"] for one in shown if one.figures["policy"] == policy))
        style: dict[str, Any] = {"color": color, "marker": mark, "linewidth": 1.4}
        style |= _STYLES[same.index(here[0].figures["label"]) % len(_STYLES)]
        style |= {"markerfacecolor": "white"} if name.endswith(_OFF) else {}
        points = sorted(map(at, here))
        found[name] = points
        ax.plot(*zip(*points), label=name, **style)
    return found


def _engine_title(fig: Any, record: Record, more: str = "") -> None:
    device = str(record.device.get("name"))
    origin = _origin(record)
    words = device if origin in device else f"{device}, {origin}"
    fig.suptitle(words + more, fontsize=10)


def _origin(record: Record) -> str:
    return str(record.parameters.get("origin", record.kind))


def _ms(seconds: float | None) -> float:
    return float("nan") if seconds is None else 1e3 * seconds


def _ticks(ax: Axes, values: Iterable[int]) -> None:
    """The values themselves, but no two so near that their numbers touch."""
    ticks: list[int] = []
    for value in sorted(values):
        if not ticks or value / ticks[-1] >= 1.4:
            ticks.append(value)
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_xticks([], minor=True)


def _log(ax: Axes, name: str) -> None:
    """One logarithmic axis with numbers at 1, 2 and 5: a panel may span less than a decade."""
    plots.log_axes(ax, x=name == "x", y=name == "y")
    axis = ax.xaxis if name == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_ticks([], minor=True)


def _legend(fig: Any, axes: Iterable[Axes]) -> None:
    """One for all axes, below them."""
    drawn: dict[str, Any] = {}
    for ax in axes:
        drawn |= {words: handle for handle, words in zip(*ax.get_legend_handles_labels())}
    columns = 3 if max(map(len, drawn)) > 18 or len(drawn) == 3 else 4
    fig.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=min(len(drawn), columns))


def _said(parts: Sequence[str]) -> str:
    """Numbers for the alternative text; a reader with a screen reader has the table for the rest."""
    shown = parts[:12]
    return "; ".join(shown) + (f"; and {len(parts) - len(shown)} more." if len(parts) > len(shown) else ".")
