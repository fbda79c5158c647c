"""SLA Pareto: bounds on gaps and on the prefill rate; which policies meet them, and which of those is best.

The points are cells of a jitter record (:mod:`labkit.bench.pareto`): of the newest one of each device in
``data/measured``, or of a run on the simulated RTX 3050, which takes half a second and is made here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labkit import plots
from labkit.bench import jitter, pareto
from labkit.bench.jitter_cases import preset
from labkit.bench.pareto import Point
from labkit.bench.record import Record, read_all
from labkit.engine.adaptive import POLICIES
from labkit.errors import InputError, refuse, require
from labkit.paths import data_dir
from labkit.widgets import base, scene

WIDTH, HEIGHT = 720, 470
"""Of the picture."""

SIMULATED = "simulated-rtx3050"
"""Key of the source that is there without any record."""

STOPS = tuple(
    round(step * 10.0**power, 4) for power in range(4) for step in (1, 1.25, 1.6, 2, 2.5, 3.15, 4, 5, 6.3, 8)
)
"""Bounds on gaps in ms: ten a decade, from 1 ms to 8 s."""

LETTERS = {
    "serial": "S",
    "overlap": "O",
    "ticks": "T",
    "dynamic": "D",
    "mixed": "M",
    "sliced": "L",
    "adaptive": "A",
}
"""What stands in a point: its policy ("sliced" cuts at layers)."""

_FAINT, _FIELD, _MEETS, _BEST, _MISSES = "#5F6670", "#E6F4EC", plots.GREEN, plots.BLUE, plots.GREY
_LEFTS, _WIDE, _TOP, _FLOOR = (62.0, 410.0), 290.0, 92.0, 336.0
_SIDE = 15.0


@dataclass(frozen=True)
class Source:
    """Points of one record, and what they are compared with.

    Attributes:
        key: of the device. name: of device and model, and the origin, in words.
        points: every policy with its lanes on.
        baseline: the point that the shares of the rate refer to.
        document: tokens of a document.
    """

    key: str
    name: str
    points: tuple[Point, ...]
    baseline: Point
    document: int

    def ttft(self, point: Point) -> float:
        """Mean seconds to a document's first token."""
        return self.document / point.prompt_rate


def source_of(record: Record) -> Source:
    """The document trace of a jitter record.

    Raises:
        InputError: no such trace in it, or its baseline did not count.
    """
    points = tuple(one for one in pareto.points(record) if not one.label.endswith("no overlap"))
    wanted = record.parameters.get("baseline")
    baseline = next((one for one in points if one.label == wanted and one.prompt_rate > 0), None)
    if baseline is None:
        refuse(record.file_name, f"no figures of {wanted}", "a record of labkit bench jitter")
    key, device = str(record.device.get("key", "unknown")), record.device.get("name", "unknown")
    name = device if baseline.origin in str(device) else f"{device}, {baseline.origin}"
    document = record.parameters.get("document")
    if not isinstance(document, int) or document < 1:
        refuse(record.file_name, repr(document), "tokens of a document")
    return Source(key, str(name), points, baseline, document)


@functools.cache
def simulated() -> Record:
    """The document trace on the simulated RTX 3050, every policy."""
    options = replace(preset("rtx3050"), parts=("document",))
    return jitter.run(options, "labkit bench jitter --simulate rtx3050", report=lambda _: None)


def measured(folder: Path | None = None) -> list[Record]:
    """The newest measured jitter record of each device, devices by name; [] when there is none.

    Args:
        folder: ``data/measured`` by default. Files that hold no such run are passed over.
    """
    found: dict[str, Record] = {}
    records, _ = read_all(sorted((folder or data_dir() / "measured").glob("*.json")))
    for record in sorted(records, key=lambda one: one.started):
        if record.kind != "measured":
            continue
        try:
            found[source_of(record).key] = record
        except (InputError, KeyError, TypeError):
            continue  # another benchmark's, or a run in which nothing counted
    return [found[key] for key in sorted(found)]


@functools.cache
def project_sources() -> tuple[Source, ...]:
    """The simulated card, then what has been measured."""
    return tuple(map(source_of, (simulated(), *measured())))


@dataclass
class SlaPareto(base.Controller):
    """A service level, and the policies that are asked.

    Attributes:
        source: key of a source. Changing it alone keeps the bounds in proportion to the baseline's gap.
        max_gap, p99_gap: ms, each one of :data:`STOPS`.
        share: least prefill rate, % of the baseline's.
        serial … adaptive: the policy is asked.
        sources: those of the project by default.
    """

    source: str = ""
    max_gap: float = 250.0
    p99_gap: float = 250.0
    share: int = 85
    serial: bool = True
    overlap: bool = True
    ticks: bool = True
    dynamic: bool = True
    mixed: bool = True
    sliced: bool = True
    adaptive: bool = True
    sources: Sequence[Source] | None = field(default=None, repr=False)
    title: str = field(default="SLA Pareto: who holds it, and at what price?", repr=False)

    def __post_init__(self) -> None:
        if self.sources is None:
            self.sources = project_sources()
        require(bool(self.sources), "sources", "none", "at least one source of points")
        self.source = self.source or self.sources[0].key
        for control in self.controls():
            control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Slider | base.Choice | base.Toggle]:
        """Source, three bounds, and a check for each policy."""
        sources = tuple((one.name, one.key) for one in self.sources or ())
        return (
            base.Choice("source", "Points", sources),
            base.Slider("max_gap", "Largest gap (ms)", values=STOPS),
            base.Slider("p99_gap", "p99 gap (ms)", values=STOPS),
            base.Slider("share", "Least rate (%)", minimum=0, maximum=150, step=5),
            *(base.Toggle(name, name) for name in POLICIES),
        )

    def update(self, **changes: Any) -> None:
        """Set controls by name; bounds that are not named move with the source."""
        before = self.now.baseline.max_gap
        super().update(**changes)
        if "source" in changes and (factor := self.now.baseline.max_gap / before) != 1:
            for name in ("max_gap", "p99_gap"):
                if name not in changes:
                    wanted = math.log(getattr(self, name) * factor)
                    setattr(self, name, min(STOPS, key=lambda stop: abs(math.log(stop) - wanted)))

    # --- numbers

    @property
    def now(self) -> Source:
        """The points that are shown."""
        return next(one for one in self.sources or () if one.key == self.source)

    @property
    def asked(self) -> list[Point]:
        """Points of the policies that are checked."""
        return [point for point in self.now.points if getattr(self, point.policy)]

    def excess(self, point: Point) -> float:
        """How far it is from the service level: the worst of its three ratios; met up to 1."""
        rate = self.share / 100 * self.now.baseline.prompt_rate
        ratios = (1e3 * point.max_gap / self.max_gap, 1e3 * point.p99_gap / self.p99_gap)
        return max(*ratios, rate / point.prompt_rate)

    def meets(self, point: Point) -> bool:
        """Whether it holds all three bounds."""
        return self.excess(point) <= 1

    @property
    def best(self) -> Point | None:
        """Of those that are asked and meet the level, the one with the highest rate, so the least TTFT."""
        met = [point for point in self.asked if self.meets(point)]
        return max(met, key=lambda one: (one.prompt_rate, -one.max_gap), default=None)

    def relative(self, point: Point) -> float:
        """Its rate in % of the baseline's."""
        return 100 * point.prompt_rate / self.now.baseline.prompt_rate

    # --- words

    def level(self) -> str:
        """The service level in one line."""
        return (
            f"largest gap ≤ {self.max_gap:g} ms, p99 ≤ {self.p99_gap:g} ms, "
            f"rate ≥ {self.share:g} % of {self.now.baseline.label}"
        )

    def verdict(self) -> str:
        """Who meets it, and at what price."""
        asked, best = self.asked, self.best
        if not asked:
            return "no policy is checked"
        if best is None:
            near = min(asked, key=self.excess)
            return f"nobody meets it; nearest is {near.label}, off by a factor of {self.excess(near):.2f}"
        met = sum(map(self.meets, asked))
        cost = 100 * (self.now.ttft(best) / self.now.ttft(self.now.baseline) - 1)
        return f"{met} of {len(asked)} meet it; best is {best.label}, TTFT {cost:+.0f} % of the baseline's"

    def describe(self, point: Point) -> str:
        """A point in one line."""
        gaps = f"max {_ms(point.max_gap)}, p99 {_ms(point.p99_gap)} ms"
        return f"{point.label}: {gaps}, {point.prompt_rate:,.0f} tokens/s ({self.relative(point):.0f} %)"

    def text(self) -> str:
        lines = [f"{self.now.name}. {self.level()}.", f"{self.verdict()}."]
        for point in sorted(self.asked, key=lambda one: -one.prompt_rate):
            lines.append(f"  {'meets ' if self.meets(point) else 'misses'} {self.describe(point)}")
        return "\n".join(lines)

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        words = "Prefill rate against the largest gap (left) and against the p99 gap (right). "
        return words + " ".join(self.text().split())

    # --- picture

    def shapes(self) -> list[scene.Shape]:
        """The picture, first shape lowest."""
        out: list[scene.Shape] = [
            scene.Words(8, 18, self.verdict(), size=14, bold=True),
            scene.Words(8, 37, self.level(), size=12),
            scene.Words(8, 55, self.now.name, size=12, color=_FAINT),
        ]
        ends = [gap for one in self.now.points for gap in (1e3 * one.max_gap, 1e3 * one.p99_gap)]
        low, high = min(ends) / 1.35, max(ends) * 1.35
        top = 1.12 * max(one.prompt_rate for one in self.now.points)
        for left, name in zip(_LEFTS, ("max_gap", "p99_gap"), strict=True):
            out += self._panel(_Axes(left, low, high, top), name)
        return [*out, *self._key()]

    def _panel(self, axes: _Axes, name: str) -> list[scene.Shape]:
        least = self.share / 100 * self.now.baseline.prompt_rate
        x, y = axes.x(getattr(self, name)), axes.y(least)
        words = "largest gap, ms" if name == "max_gap" else "p99 gap, ms"
        out: list[scene.Shape] = [scene.Box(axes.left, _TOP, x - axes.left, max(y - _TOP, 0), _FIELD)]
        out += axes.frame(words)
        out.append(scene.Path(((x, _TOP), (x, _FLOOR)), plots.RED, 1.5))
        out.append(scene.Path(((axes.left, y), (axes.left + _WIDE, y)), plots.RED, 1.5))
        front = [(axes.x(1e3 * getattr(p, name)), axes.y(p.prompt_rate)) for p in self._front(name)]
        if len(front) > 1:
            out.append(scene.Path(tuple(front), "#B9BFC7", 1.5))
        best = self.best
        # The ones that meet it lie on top.
        order = sorted(self.asked, key=lambda one: (one is best, self.meets(one)))
        places = [(axes.x(1e3 * getattr(one, name)), axes.y(one.prompt_rate)) for one in order]
        for number, (point, at) in enumerate(zip(order, places, strict=True)):
            fill = _BEST if point is best else _MEETS if self.meets(point) else _MISSES
            covered = any(abs(at[0] - x) + abs(at[1] - y) < _SIDE for x, y in places[number + 1 :])
            letter = "" if covered else LETTERS[point.policy]
            out += _mark(*at, letter, fill, self.describe(point))
        if best is not None:
            at = axes.x(1e3 * getattr(best, name)), axes.y(best.prompt_rate)
            # Above and to the left of a point that nothing beats, there is room.
            room = at[0] - axes.left > 8 * len(best.label) + _SIDE
            place, anchor = (at[0] - _SIDE / 2, "end") if room else (axes.left + 6, "start")
            out.append(scene.Words(place, at[1] - 11, best.label, 12, anchor, _BEST, bold=True))
        return out

    def _front(self, name: str) -> list[Point]:
        return pareto.front(self.asked, name)

    def _key(self) -> list[scene.Shape]:
        out: list[scene.Shape] = []
        x, y = 8.0, _FLOOR + 60
        for words, color in (("meets", _MEETS), ("best", _BEST), ("misses", _MISSES)):
            out.append(scene.Box(x, y - 11, 13, 13, color))
            out.append(scene.Words(x + 18, y, words, size=12, color=_FAINT))
            x += 30 + 6.8 * len(words)
        used = dict.fromkeys(point.policy for point in self.now.points)
        names = ", ".join(f"{LETTERS[name]} {name}" for name in used)
        out.append(scene.Words(WIDTH - 8, y, names, 12, "end", _FAINT))
        met = sorted((p for p in self.asked if self.meets(p)), key=lambda one: -one.prompt_rate)
        lines = [self.describe(point) for point in met[:3]]
        if len(met) > 3:
            lines[-1] += f"; and {len(met) - 3} more"
        for row, line in enumerate(lines):
            out.append(scene.Words(8, y + 24 + 18 * row, line, size=12))
        return out

    def picture(self) -> str:
        """The picture as SVG."""
        return scene.to_svg(WIDTH, HEIGHT, self.shapes(), label=self.alt())

    def html(self) -> str:
        return f'<div style="max-width:{WIDTH}px;background:white;color:{plots.INK}">{self.picture()}</div>'


@dataclass(frozen=True)
class _Axes:
    """One panel: gaps in ms on a logarithmic axis, rates from 0 on a linear one."""

    left: float
    low: float
    high: float
    top: float

    def x(self, ms: float) -> float:
        """Where a gap is; what lies outside is put on the edge."""
        share = math.log(ms / self.low) / math.log(self.high / self.low)
        return self.left + _WIDE * min(max(share, 0.0), 1.0)

    def y(self, rate: float) -> float:
        """Where a rate is; what lies outside is put on the edge."""
        return _FLOOR - (_FLOOR - _TOP) * min(max(rate / self.top, 0.0), 1.0)

    def frame(self, words: str) -> list[scene.Shape]:
        """Axes, ticks and their names."""
        right = self.left + _WIDE
        out: list[scene.Shape] = [
            scene.Path(((self.left, _TOP), (self.left, _FLOOR), (right, _FLOOR)), _FAINT, 1)
        ]
        for power in range(-3, 7):
            for step in (1, 2, 5):
                ms = step * 10.0**power
                if self.low <= ms <= self.high:
                    x = self.x(ms)
                    out.append(scene.Path(((x, _FLOOR), (x, _FLOOR + 4)), _FAINT, 1))
                    out.append(scene.Words(x, _FLOOR + 17, f"{ms:g}", 12, "middle", _FAINT))
        each = 10.0 ** math.floor(math.log10(self.top))
        each /= next(part for part in (1, 2, 5) if self.top / each * part >= 3)
        for number in range(int(self.top / each) + 1):
            y = self.y(number * each)
            out.append(scene.Path(((self.left - 4, y), (self.left, y)), _FAINT, 1))
            out.append(scene.Words(self.left - 7, y + 4, f"{number * each:,g}", 12, "end", _FAINT))
        out.append(scene.Words(self.left, _TOP - 10, "prompt tokens/s", 12, color=_FAINT))
        out.append(scene.Words(right, _FLOOR + 34, words, 12, "end", _FAINT))
        return out


def _mark(x: float, y: float, letter: str, fill: str, title: str) -> list[scene.Shape]:
    box = scene.Box(x - _SIDE / 2, y - _SIDE / 2, _SIDE, _SIDE, fill, stroke="white", title=title)
    words = scene.Words(x, y + 4, letter, 11, "middle", "#FFFFFF", bold=True)
    return [box, words] if letter else [box]  # one that lies on top has its own


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def draw(ax: Any, state: SlaPareto) -> None:
    """The same picture on matplotlib axes."""
    scene.to_axes(ax, WIDTH, HEIGHT, state.shapes())
