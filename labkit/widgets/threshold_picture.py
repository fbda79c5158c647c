"""Pictures of :class:`labkit.widgets.dispatch_thresholds.DispatchThresholds`: SVG and matplotlib.

Both draw every recorded curve in grey, and in the kernel's colour where the table takes it.
A quoted point stands alone: nothing is known between two of them, so no line joins them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from labkit import device as devices
from labkit import plots
from labkit.widgets import base

if TYPE_CHECKING:
    from labkit.widgets.dispatch_thresholds import DispatchThresholds

WIDTH = 680
_LEFT, _RIGHT, _TOP, _FLOOR = 62, 150, 62, 300
_COST_TOP, _COST_FLOOR, _HEIGHT = 340, 396, 424
_PASSED, _PEER, _FAINT = "#B9BEC6", "#5F6670", "#5F6670"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LIGHT = (plots.ORANGE, plots.PALE, plots.SKY, plots.YELLOW)
_TICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class CurveSet(Protocol):
    """One record: :class:`labkit.bench.curves.Curves`, or a stand-in in tests.

    ``points`` is kernel → (M, µs a call), ``origin`` "measured" or "quoted", ``provenance`` one line.
    """

    @property
    def device(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def origin(self) -> str: ...
    @property
    def provenance(self) -> str: ...
    @property
    def points(self) -> Mapping[str, Sequence[tuple[int, float]]]: ...


def m_values(record: CurveSet) -> list[int]:
    """Every recorded M, ascending."""
    return sorted({m for line in record.points.values() for m, _ in line})


def between(left: tuple[float, float], right: tuple[float, float], m: float) -> float:
    """µs at ``m`` on the straight line between two points of a log-log plot."""
    share = math.log(m / left[0]) / math.log(right[0] / left[0])
    return left[1] * (right[1] / left[1]) ** share


@dataclass(frozen=True)
class _Frame:
    """Axes of the SVG: both logarithmic."""

    low: float
    high: float
    bottom: float
    top: float

    @classmethod
    def of(cls, record: CurveSet) -> _Frame:
        ms = m_values(record)
        times = [us for line in record.points.values() for _, us in line]
        low, high = min(ms) / 1.12, max(max(ms), min(ms) * 2) * 1.12
        return cls(low, high, min(times) / 1.3, max(times) * 1.3)

    def x(self, m: float) -> float:
        share = math.log(m / self.low) / math.log(self.high / self.low)
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(max(share, 0.0), 1.0)

    def y(self, us: float) -> float:
        return _FLOOR - (_FLOOR - _TOP) * math.log(us / self.bottom) / math.log(self.top / self.bottom)

    def grid(self) -> list[str]:
        parts = []
        for m in _TICKS:
            if self.low <= m <= self.high:
                parts.append(base.line([(self.x(m), _TOP), (self.x(m), _FLOOR)], plots.PALE, width=1))
                parts.append(base.label(self.x(m), _FLOOR + 15, str(m), size=12, anchor="middle"))
        for us in _steps(self.bottom, self.top):
            level = self.y(us)
            parts.append(base.line([(_LEFT, level), (WIDTH - _RIGHT, level)], plots.PALE, width=1))
            parts.append(base.label(_LEFT - 6, level + 4, f"{us:,g}", size=12, anchor="end"))
        middle = (_TOP + _FLOOR) / 2
        parts.append(base.label(16, middle, "µs a call", size=12, anchor="middle", rotate=-90))
        parts.append(base.label(WIDTH - _RIGHT + 12, _FLOOR + 15, "M (rows)", size=12))
        return parts


def _steps(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, 20, … between two numbers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**d for d in decades for step in (1, 2, 5) if low <= step * 10.0**d <= high]


def svg(state: DispatchThresholds, record: CurveSet) -> str:
    """Who gets which M, the curves, and the cost of the choice at every recorded M."""
    frame = _Frame.of(record)
    taken = {(state.choose(m).kernel, m) for m in m_values(record)}
    parts = [*frame.grid(), *_band(state, frame, record)]
    parts += [*_curves(state, frame, record, taken), *_names(state, frame, record, taken)]
    parts += [*_cursor(state, frame), *_cost_bars(state, frame)]
    return base.svg(WIDTH, _HEIGHT, parts, label=state.text())


def _band(state: DispatchThresholds, frame: _Frame, record: CurveSet) -> list[str]:
    """A strip over the axes: which kernel the table takes for which M."""
    parts = [base.label(_LEFT, 16, f"who computes M rows, by the table; times: {record.origin}", size=12)]
    for segment in state.segments():
        left = frame.x(max(segment.first - 0.5, frame.low))
        right = frame.x(frame.high if segment.last is None else min(segment.last + 0.5, frame.high))
        if right <= left:
            continue
        color = state.color(segment.kernel)
        parts.append(
            base.rect(left, 24, right - left - 1, 16, color, title=f"{segment.range}: {segment.reason}")
        )
        parts.append(base.line([(right, 24), (right, _FLOOR)], plots.GREY, width=1, dash="3 3"))
        name = segment.kernel or "no kernel"
        if right - left > 7.4 * len(name):
            ink = plots.INK if color in _LIGHT else "white"
            middle = (left + right) / 2
            parts.append(base.label(middle, 36, name, size=12, anchor="middle", color=ink, bold=True))
    return parts


def _cursor(state: DispatchThresholds, frame: _Frame) -> list[str]:
    x = frame.x(state.m)
    words, cost = state.cursor_words(), state.cost(state.m)
    # Two pieces: the tick labels and the heading between the two parts stay readable.
    ends = ((_TOP - 2, _FLOOR), (_COST_TOP, _COST_FLOOR))
    parts = [base.line([(x, top), (x, bottom)], plots.INK, width=1.5) for top, bottom in ends]
    if cost is not None and cost.us is not None:
        parts.append(base.dot(x, frame.y(cost.us), plots.INK, radius=4, title=words))
    # The words begin at the cursor, but never run out of the picture.
    start = min(x + 5, WIDTH - 8 - 7.2 * len(words))
    return [*parts, base.label(max(start, 8), 55, words, size=12, bold=True)]


def _curves(
    state: DispatchThresholds, frame: _Frame, record: CurveSet, taken: set[tuple[str, int]]
) -> list[str]:
    lines = {kernel: sorted(line) for kernel, line in record.points.items()}
    parts = []
    if record.origin != "quoted":
        for kernel, line in lines.items():
            peer = state.is_peer(kernel)
            places = [(frame.x(m), frame.y(us)) for m, us in line]
            parts.append(base.line(places, _PEER if peer else _PASSED, dash="2 4" if peer else ""))
        for kernel, piece in state.chosen_pieces():
            places = [(frame.x(m), frame.y(us)) for m, us in piece]
            parts.append(base.line(places, state.color(kernel), width=4))
    for kernel, line in lines.items():
        for m, us in line:
            chosen = (kernel, m) in taken
            color = state.color(kernel) if chosen else _PEER if state.is_peer(kernel) else _PASSED
            tip = f"{kernel}, M = {m}: {us:.4g} µs ({record.origin})"
            radius = 5.5 if chosen else 3.5
            parts.append(base.dot(frame.x(m), frame.y(us), color, radius=radius, title=tip))
    return parts


def _names(
    state: DispatchThresholds, frame: _Frame, record: CurveSet, taken: set[tuple[str, int]]
) -> list[str]:
    """Legend at the right: every recorded curve in the order of its last point, and whose time it is."""
    used = {kernel for kernel, _ in taken}
    ends = sorted((frame.y(max(line)[1]), kernel) for kernel, line in record.points.items())
    parts: list[str] = []
    below = 0.0
    lowest = _FLOOR - 30 * len(ends)
    for y, kernel in ends:
        below = max(min(y, lowest) + 4, below + 30)
        lowest += 30
        peer = state.is_peer(kernel)
        color = _PEER if peer else state.color(kernel) if kernel in used else _PASSED
        parts.append(base.dot(WIDTH - _RIGHT + 16, below - 4, color, radius=4.5))
        parts.append(base.label(WIDTH - _RIGHT + 25, below, kernel, size=12, bold=kernel in used))
        role = "peer" if peer else "taken" if kernel in used else "not taken"
        words = f"{record.origin}, {role}"
        parts.append(base.label(WIDTH - _RIGHT + 25, below + 13, words, size=11, color=_FAINT))
    return parts


def _cost_bars(state: DispatchThresholds, frame: _Frame) -> list[str]:
    costs = state.costs()
    top = max([10.0, *(cost.percent or 0 for cost in costs)])
    height = _COST_FLOOR - _COST_TOP
    heading = "cost of the choice against the best kernel, %"
    parts = [
        base.label(_LEFT, _COST_TOP - 7, heading, size=12, color=_FAINT),
        base.label(_LEFT - 6, _COST_TOP + 8, f"{top:.0f}", size=12, anchor="end"),
        base.label(_LEFT - 6, _COST_FLOOR, "0", size=12, anchor="end"),
        base.line([(_LEFT, _COST_FLOOR), (WIDTH - _RIGHT, _COST_FLOOR)], plots.GREY, width=1),
        base.label(8, _HEIGHT - 8, state.regret_words(), size=13, bold=True),
    ]
    for cost in costs:
        x = frame.x(cost.m)
        if cost.us is None or cost.percent is None:
            parts.append(base.label(x, _COST_FLOOR - 3, "?", size=12, anchor="middle", color=_FAINT))
            continue
        tall = max(height * cost.percent / top, 1.0)
        against = f"{cost.us:.4g} µs, best {cost.best} {cost.best_us:.4g} µs: {cost.percent:+.1f} %"
        color = plots.RED if cost.percent >= 1 else plots.GREEN
        tip = f"M = {cost.m}: {cost.kernel} {against}"
        parts.append(base.rect(x - 4, _COST_FLOOR - tall, 8, tall, color, title=tip))
    return parts


def draw(ax: Axes, state: DispatchThresholds, record: CurveSet) -> None:
    """The same curves on ``ax``, with a legend at its right."""
    taken = {(state.choose(m).kernel, m) for m in m_values(record)}
    used = {kernel for kernel, _ in taken}
    handles = []
    for index, (kernel, points) in enumerate(record.points.items()):
        line = sorted(points)
        peer, marker = state.is_peer(kernel), _MARKERS[index % len(_MARKERS)]
        passed = _PEER if peer else _PASSED
        if record.origin != "quoted":
            ms, us_all = [m for m, _ in line], [us for _, us in line]
            ax.plot(ms, us_all, color=passed, linewidth=1.5, linestyle=":" if peer else "-", zorder=1)
        for m, us in line:
            chosen = (kernel, m) in taken
            color = state.color(kernel) if chosen else passed
            ax.plot([m], [us], marker, color=color, markersize=7 if chosen else 5, zorder=3)
        color = state.color(kernel) if kernel in used else passed
        label = f"{kernel} ({'peer, ' if peer else ''}{record.origin})"
        handles.append(Line2D([], [], color=color, marker=marker, label=label, linestyle="none"))
    if record.origin != "quoted":
        for kernel, piece in state.chosen_pieces():
            ms_cut, us_cut = [m for m, _ in piece], [us for _, us in piece]
            ax.plot(ms_cut, us_cut, color=state.color(kernel), linewidth=4, solid_capstyle="butt", zorder=2)
    plots.log_axes(ax)
    times = [us for line in record.points.values() for _, us in line]
    levels = _steps(min(times) / 1.3, max(times) * 1.3)
    ax.set_ylim(min(times) / 1.3, max(times) * 1.3)
    ax.set_yticks(levels, [f"{us:,g}" for us in levels])
    rows = m_values(record)
    ax.set_xlim(min(rows) * 0.9, max(rows) * 1.15)
    ticks = [m for m in _TICKS if min(rows) <= m <= max(rows)] or rows
    ax.set_xticks(ticks, [str(m) for m in ticks])
    for segment in state.segments():
        if segment.last is not None and segment.last < max(rows):
            ax.axvline(segment.last + 0.5, color=plots.GREY, linewidth=1, linestyle="--", zorder=0)
    ax.set_xlabel("M, rows of activations")
    ax.set_ylabel("µs a call")
    ax.set_title(f"{devices.get_device(state.device).name}, {state.format.upper()} {state.shape}")
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
