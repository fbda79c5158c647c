"""Pictures of chapter 06: two lines of time, a strip of machine instructions, burdens around a line at 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from labkit import plots
from labkit.bench.batch_tile import Evidence
from labkit.bench.batch_times import Times, line
from labkit.kernels.loops import Loop

_BUFFERS = {"packed": plots.RED, "scales": plots.ORANGE, "x": plots.BLUE, "out": plots.GREY}
_COLORS = {"grid.y": (plots.BLUE, "o"), "tile": (plots.RED, "s"), "together": (plots.GREEN, "^")}


def draw_times(ax: Axes, times: Sequence[Times]) -> None:
    """One card: points of each variant that was timed throughout, and its line fixed + each · M."""
    for variant, (color, mark) in _COLORS.items():
        if any(variant not in one.us for one in times):
            continue
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
    """The instructions of one trip in order: blue a load, red the first that waits for loads."""
    ax.barh(0.5, len(loop.marks), height=1, color=plots.PALE)
    for kind, color in (("load", plots.BLUE), ("wait", plots.RED)):
        ax.vlines([at + 0.5 for at, mark in enumerate(loop.marks) if mark == kind], 0, 1, color=color)
    waits = "1 wait" if loop.waits() == 1 else f"{loop.waits()} waits"
    ax.set_title(f"{name}: {len(loop.marks)} instructions, {waits}", fontsize=9)
    ax.set_yticks([])
    ax.grid(False)


def draw_evidence(ax: Axes, found: Mapping[str, Sequence[Evidence]], slowdown: float) -> None:
    """Burdens of the tile over those of grid.y.

    Args:
        found: name of a card → its evidence; two cards at most.
        slowdown: what is to be explained, a dashed line.
    """
    causes = [one.cause for one in next(iter(found.values()))]
    for (name, evidence), shift, color in zip(
        found.items(), (-0.2, 0.2), (plots.BLUE, plots.ORANGE), strict=False
    ):
        at = [i + shift for i in range(len(evidence))]
        ax.barh(at, [one.ratio - 1 for one in evidence], left=1, height=0.36, color=color, label=name)
    ax.axvline(1, color=plots.INK)
    ax.axvline(slowdown, color=plots.RED, linestyle="--", label="to explain (article, quoted)")
    ax.set_yticks(range(len(causes)), causes)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set_xlim(left=0)
    ax.set_xlabel("burden of the tile / burden of grid.y (at 1 or left of it: refuted)")
    ax.legend(loc="lower left", bbox_to_anchor=(-0.12, 1.0), ncols=3, columnspacing=1.2)
