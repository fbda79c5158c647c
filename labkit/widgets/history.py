"""History filter: pick case, device and kind; see medians run by run, their spread, and what changed.

Lines of different devices or kinds never share a scale: each is drawn relative to its own first run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit import paths, plots
from labkit.errors import require
from labkit.results.figure import alt as sentence
from labkit.results.history import Histories, History, of_folders
from labkit.results.report import ordered
from labkit.widgets import base, scene

WIDTH = 720
"""Of the picture."""

MOST_LINES = 6
"""More lines than colours that stay apart would only be a tangle; the text says how many are left."""

_COLORS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE, plots.SKY, plots.BLACK)
_FAINT = "#5F6670"
_LEFT, _RIGHT, _TOP, _FLOOR = 62.0, 700.0, 52.0, 262.0
_KEY = _FLOOR + 52
_LINE = 19
_LABEL_CHARACTERS = 92
_MOST_OVER = 1.5
"""Bars reach so far above the highest median at most: one odd sample must not flatten every line."""


def project_histories() -> Histories:
    """What this checkout has: ``results/`` and the records that come with it."""
    places = [paths.results_dir(), paths.data_dir() / "measured"]
    return of_folders([place for place in places if place.is_dir()])


@dataclass
class HistoryFilter(base.Controller):
    """Which histories are shown; "" stands for all.

    Attributes:
        kind: measured, emulated, simulated or quoted. device: key of the device.
        case: benchmark and table, such as "gemm-fast/fast". contender: kernel, policy or peer.
        changed_only: only histories with a change point.
        histories: of :mod:`labkit.results.history`; the project's own by default.
    """

    kind: str = ""
    device: str = ""
    case: str = ""
    contender: str = ""
    changed_only: bool = False
    histories: Histories | None = field(default=None, repr=False)
    title: str = field(default="History: did it get faster, and on which card?", repr=False)

    def __post_init__(self) -> None:
        if self.histories is None:
            self.histories = project_histories()
        require(
            isinstance(self.histories, Histories), "histories", type(self.histories).__name__, "Histories"
        )
        for control in self.controls():
            control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Choice | base.Toggle]:
        """A choice for each property, and one check."""
        found = self._all

        def choice(name: str, label: str, every: str, values: set[str]) -> base.Choice:
            return base.Choice(name, label, ((every, ""), *((value, value) for value in sorted(values))))

        return (
            choice("kind", "Kind", "every kind", {one.kind for one in found}),
            choice("device", "Device", "every device", {one.device.key for one in found}),
            choice("case", "Case", "every case", {_case(one) for one in found}),
            choice("contender", "Contender", "every contender", {one.case.contender for one in found}),
            base.Toggle("changed_only", "Only with a change"),
        )

    # --- numbers

    @property
    def _all(self) -> tuple[History, ...]:
        return self.histories.found if self.histories is not None else ()

    @property
    def selected(self) -> list[History]:
        """Histories that pass the filter: changed ones first, then those with most runs."""
        found = [
            one
            for one in self._all
            if self.kind in ("", one.kind)
            and self.device in ("", one.device.key)
            and self.case in ("", _case(one))
            and self.contender in ("", one.case.contender)
            and (one.changed or not self.changed_only)
        ]
        return ordered(found)

    @property
    def shown(self) -> list[History]:
        """Those that are drawn."""
        return self.selected[:MOST_LINES]

    # --- words

    def verdict(self) -> str:
        """How many there are, and how many changed."""
        found = self.selected
        if not found:
            return "no history passes this filter" if self._all else "no results yet: labkit rerun quick"
        changed = sum(bool(one.changed) for one in found)
        runs = sum(len(one.points) for one in found)
        word = "history" if len(found) == 1 else "histories"
        drawn = f"; {len(self.shown)} are drawn" if len(found) > len(self.shown) else ""
        return f"{len(found)} {word}, {runs} runs, {changed} with a change{drawn}"

    def text(self) -> str:
        lines = [self.verdict() + ".", *(f"  {sentence(one)}." for one in self.shown)]
        if (left := len(self.selected) - len(self.shown)) > 0:
            lines.append(f"  … and {left} more.")
        if self.histories is not None:
            lines += [f"  not compared: {reason}" for reason in self.histories.refused[:3]]
        return "\n".join(lines)

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        return "Medians run by run, relative to the first run of each line. " + " ".join(self.text().split())

    # --- picture

    @property
    def height(self) -> float:
        """Of the picture: a line of key for each history."""
        return _KEY + _LINE * max(len(self.shown), 1)

    def shapes(self) -> list[scene.Shape]:
        """The picture, first shape lowest."""
        out: list[scene.Shape] = [scene.Words(8, 18, self.verdict(), size=14, bold=True)]
        if not self.shown:
            return out
        moments = sorted({point.started for one in self.shown for point in one.points})
        axes = _Axes.of(self.shown, moments)
        out.append(scene.Words(8, 38, axes.caption, 12, color=_FAINT))
        out += axes.frame()
        for number, one in enumerate(self.shown):
            color = _COLORS[number]
            out += axes.line(one, color)
            y = _KEY + _LINE * number
            out.append(scene.Box(8, y - 10, 12, 12, color))
            last = one.points[-1].median
            words = f"{one.label} · {one.device.key} · {one.kind} · {last:.4g} {one.unit}".strip()
            cut = words if len(words) <= _LABEL_CHARACTERS else words[: _LABEL_CHARACTERS - 1] + "…"
            out.append(scene.Words(26, y, cut, size=12, color=_FAINT))
        return out

    def picture(self) -> str:
        """The picture as SVG."""
        return scene.to_svg(WIDTH, self.height, self.shapes(), label=self.alt())

    def html(self) -> str:
        return f'<div style="max-width:{WIDTH}px;background:white;color:{plots.INK}">{self.picture()}</div>'


@dataclass(frozen=True)
class _Axes:
    """Runs by date, evenly spaced; medians relative to a line's first run, from 0 on."""

    moments: list[str]
    top: float
    cut: bool = False

    @staticmethod
    def of(found: Sequence[History], moments: list[str]) -> _Axes:
        points = [(point, _base(one)) for one in found for point in one.points]
        median = max(1.0, *(point.median / base for point, base in points))
        bar = max(point.spread[1] / base for point, base in points)
        highest = max(median, min(bar, _MOST_OVER * median))
        return _Axes(moments, 1.12 * highest, bar > 1.12 * highest)

    @property
    def caption(self) -> str:
        """What is drawn."""
        words = "median, % of the first run of its line; bars: 10 % to 90 %"
        return words + (", longer ones are cut at the top" if self.cut else "")

    def x(self, started: str) -> float:
        step = (_RIGHT - _LEFT) / max(len(self.moments), 1)
        return _LEFT + step * (self.moments.index(started) + 0.5)

    def y(self, relative: float) -> float:
        return _FLOOR - (_FLOOR - _TOP) * max(min(relative / self.top, 1.0), 0.0)

    def frame(self) -> list[scene.Shape]:
        out: list[scene.Shape] = []
        step = 0.25
        while self.top / step > 6:
            step *= 2
        ticks = [step * i for i in range(int(self.top / step) + 1)]
        for tick in ticks:
            y = self.y(tick)
            out.append(scene.Path(((_LEFT, y), (_RIGHT, y)), plots.PALE, 1))
            out.append(scene.Words(_LEFT - 6, y + 4, f"{100 * tick:,.0f} %", 12, "end", _FAINT))
        every = max(1, -(-len(self.moments) // 7))
        for moment in self.moments[::every]:
            x = self.x(moment)
            anchor, x = ("end", x + 18) if x > _RIGHT - 30 else ("middle", x)
            out.append(scene.Words(x, _FLOOR + 18, moment[:10], 12, anchor, _FAINT))
        return out

    def line(self, one: History, color: str) -> list[scene.Shape]:
        first = _base(one)
        places = [(self.x(point.started), self.y(point.median / first)) for point in one.points]
        out: list[scene.Shape] = [scene.Path(tuple(places), color, 1.5)] if len(places) > 1 else []
        before = first
        for point, (x, y) in zip(one.points, places, strict=True):
            low, high = (self.y(value / first) for value in point.spread)
            out.append(scene.Path(((x, low), (x, high)), color, 1))
            title = f"{point.started[:16]}: median {point.median:.4g} {one.unit}, {point.file}"
            changed = point.change is not None
            side = 10 if changed else 7
            fill = plots.RED if changed else color
            title += f", {one.words(point)}" if changed else ""
            out.append(scene.Box(x - side / 2, y - side / 2, side, side, fill, "white", title))
            if changed:
                near = x > _RIGHT - 90
                anchor, at = ("end", x - 8) if near else ("start", x + 8)
                # what went down is named below: the run after a peak would else write over the peak's words
                below = point.median < before and y + 22 < _FLOOR
                line = y + 22 if below else max(y - 8, _TOP + 8)
                out.append(scene.Words(at, line, one.words(point), 12, anchor, plots.RED))
            before = point.median
        return out


def _case(one: History) -> str:
    return f"{one.case.name}/{one.case.table}"


def _base(one: History) -> float:
    """What a line is relative to; counts may be 0 at first."""
    return one.points[0].median or 1.0


def draw(ax: Any, state: HistoryFilter) -> None:
    """The picture of a state on matplotlib axes: the figure beside the widget."""
    scene.to_axes(ax, WIDTH, state.height, state.shapes())
