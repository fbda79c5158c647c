"""Pictures of chapter 06: lines of time, sectors, a strip of machine instructions, time over instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from matplotlib.axes import Axes

from labkit import plots
from labkit.bench import batch_tile
from labkit.bench.batch_times import Times, issue_us, line
from labkit.device import get_device
from labkit.kernels.loops import Loop

_BUFFERS = {"packed": plots.RED, "scales": plots.ORANGE, "x": plots.BLUE, "out": plots.GREY}
_COLORS = {
    "grid.y": (plots.BLUE, "o"),
    "tile": (plots.RED, "s"),
    "together": (plots.GREEN, "^"),
    "rolled": (plots.ORANGE, "D"),
}


def draw_times(ax: Axes, times: Sequence[Times]) -> None:
    """One card: points of both kernels, and the line fixed + each · M of each."""
    for variant in ("grid.y", "tile"):
        color, mark = _COLORS[variant]
        fixed, each = line(times, variant)
        last = times[-1].m
        ax.plot([0, last], [fixed, fixed + each * last], ":", color=color)
        words = f"{variant}: {fixed:.3g} + {each:.3g} · M"
        ax.plot([one.m for one in times], [one.us[variant] for one in times], mark, color=color, label=words)
    top = 1.45 * max(us for one in times for us in (one.us["grid.y"], one.us["tile"]))
    ax.set(xlabel="M, rows of x", ylabel="µs a call", xlim=(0, None), ylim=(0, top))
    ax.set_title(f"{times[0].device} ({times[0].origin})", fontsize=10)
    ax.legend(loc="upper left")


def draw_sectors(ax: Axes, traces: Mapping[int, Mapping[str, Any]], columns: int) -> None:
    """Sectors that one column of the output asks for, stacked by buffer.

    Args:
        traces: rows → kernel → trace of a launch with that many rows.
        columns: columns of the output that every launch made.
    """
    bars = [(m, name) for m in traces for name in traces[m]]
    for at, (m, name) in enumerate(bars):
        start = 0.0
        for buffer, color in _BUFFERS.items():
            count = traces[m][name].sectors(buffer=buffer) / columns
            ax.barh(at, count, left=start, color=color, label=None if at else buffer)
            start += count
        ax.annotate(f"{start:.0f}", (start, at), (4, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_yticks(range(len(bars)), [f"M = {m}, {name}" for m, name in bars])
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set_xlabel("sectors that one column of the output asks for (emulated)")
    ax.legend(loc="upper right", ncols=2)


def draw_loop(ax: Axes, loop: Loop, name: str) -> None:
    """The instructions of one trip in order: blue a load, red one that waits for loads."""
    ax.barh(0.5, len(loop.marks), height=1, color=plots.PALE)
    for kind, color in (("load", plots.BLUE), ("wait", plots.RED)):
        ax.vlines([at + 0.5 for at, mark in enumerate(loop.marks) if mark == kind], 0, 1, color=color)
    waits = "1 wait" if loop.waits() == 1 else f"{loop.waits()} waits"
    ax.set_title(f"{name}: {len(loop.marks)} instructions, {waits}", fontsize=9)
    ax.set_yticks([])
    ax.grid(False)


def draw_pace(ax: Axes, times: Sequence[Times]) -> None:
    """One card: time of a call over the instructions that a step carries out, a point for each kernel and M.

    The dotted line is the least time: as if nothing but starting those instructions took any.

    Args:
        times: of one card of ``data/devices.json``; its machine code is compiled for the counts.
    """
    major, minor = get_device(times[0].key).capability
    for variant, (color, mark) in _COLORS.items():
        timed = [one for one in times if variant in one.us]
        if not timed:
            continue
        code = batch_tile.code(variant, f"sm_{major}{minor}")
        places = [(code.instructions(one.m), one.us[variant]) for one in timed]
        ax.plot(*zip(*places, strict=True), mark, color=color, label=variant)
        for x in dict.fromkeys(x for x, _ in places):
            here = [(one.m, us) for one, (at, us) in zip(timed, places, strict=True) if at == x]
            words = "M = " + ", ".join(str(m) for m, _ in here)
            middle = (x, sum(us for _, us in here) / len(here))
            below = variant == "grid.y"
            shift, across, up = ((0, -9), "center", "top") if below else ((-7, 0), "right", "center")
            where = {"xytext": shift, "textcoords": "offset points", "ha": across, "va": up}
            ax.annotate(words, middle, fontsize=7.5, **cast(Any, where))
    most = 1.1 * ax.get_xlim()[1]
    ax.plot([0, most], [0, issue_us(most, times[0].key)], ":", color=plots.GREY, label="the least (computed)")
    ax.set(xlabel="warp instructions of a step (counted)", ylabel="µs a call", xlim=(0, None), ylim=(0, None))
    ax.set_title(f"{times[0].device} ({times[0].origin})", fontsize=10)
    ax.legend(loc="upper left")
