"""Overlap lab: flip the overlap and the policy of a living engine, and see who ran beside whom.

The state is a :class:`labkit.widgets.overlap_run.Run`: measured on two CUDA streams on a GPU, and on the
simulated clock of a cost model elsewhere; every picture says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit import plots
from labkit.errors import require
from labkit.widgets import base, scene
from labkit.widgets.overlap_run import CHUNKS, POLICIES, SIZES, Block, Run, machine

WIDTH = 680
"""Width of the picture; see :attr:`OverlapLab.height`."""

COLORS = {"decode": plots.BLUE, "prefill": plots.ORANGE, "mixed": plots.GREEN}
"""Fill of a work by its kind."""

_FAINT = "#5F6670"
_LEFT, _RIGHT, _LANE, _HEAD = 96.0, 14.0, 30.0, 66.0
_LANES = ("decode", "prefill")
_KEY = (("decode step", COLORS["decode"]), ("chunk", COLORS["prefill"]), ("both in one", COLORS["mixed"]))


@dataclass
class OverlapLab(base.Controller):
    """One document among streams that decode.

    Attributes:
        policy, overlap, chunk: of the engine.
        where: "cuda", or a cost model: "rtx3050" or "h200"; one engine each, shared by all labs.
    """

    policy: str = "overlap"
    overlap: bool = True
    chunk: int = 128
    where: str = "rtx3050"
    title: str = field(default="Overlap lab: is it really overlapping, and does it help?", repr=False)

    def __post_init__(self) -> None:
        require(self.where in SIZES, "where", repr(self.where), "one of " + ", ".join(SIZES))
        for control in self.controls():
            if not isinstance(control, base.Button):
                control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Control]:
        """Overlap, policy, chunk; and a second measurement where there is something to measure."""
        found: list[base.Control] = [
            base.Toggle("overlap", "Overlap on"),
            base.Choice("policy", "Policy", tuple((name, name) for name in POLICIES)),
            base.Slider("chunk", "Chunk size (tokens)", values=CHUNKS),
        ]
        return [*found, base.Button("again", "Measure again")] if self.where == "cuda" else found

    def press(self, name: str) -> None:
        """Measure the present state once more."""
        require(name == "again" and self.where == "cuda", "button", repr(name), "'again', on a GPU")
        machine(self.where).forget(self.policy, self.overlap, self.chunk)

    # --- numbers

    @property
    def run(self) -> Run:
        """The run of the present state."""
        return machine(self.where).run(self.policy, self.overlap, self.chunk)

    # --- words

    def head(self) -> str:
        """The state in one line."""
        return f"{self.policy}, chunk {self.chunk}, overlap {'on' if self.overlap else 'off'}"

    def verdict(self) -> str:
        """Gaps and the price."""
        now = self.run
        assert now.gaps.max is not None and now.gaps.p99 is not None
        return (
            f"gap max {_ms(now.gaps.max)}, p99 {_ms(now.gaps.p99)} (a step alone {_ms(now.step)}); "
            f"prefill {now.prompt_rate:,.0f} tokens/s"
        )

    def counted(self) -> str:
        """Both counters, and the time side by side."""
        now = self.run
        return (
            f"overlap steps {now.overlap_steps}, on two streams {now.stream_overlap_steps}; "
            f"both lanes busy for {_ms(now.busy_both)} of the document's {_ms(now.ttft)}"
        )

    def source(self) -> str:
        """Where the figures are from."""
        streams, document = SIZES[self.where]
        real = "" if self.where == "cuda" else "; lanes are pretended: no stream counts"
        device = self.run.device.split(" (")[0].split(",")[0]
        return f"{self.run.origin}, {device}; {streams} streams, a document of {document}{real}"

    def text(self) -> str:
        return f"{self.head()}: {self.verdict()}.\n{self.counted()}.\n({self.source()}.)"

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        return (
            f"Two lanes with their works, and the tokens of one stream. {' '.join(self.text().split())} "
            f"Blocks: {_count(self.run.blocks)}."
        )

    # --- picture

    @property
    def height(self) -> float:
        """Height of the picture when it is :data:`WIDTH` wide."""
        return _HEAD + _DRAWN + 24

    def shapes(self) -> list[scene.Shape]:
        """The picture, first shape lowest."""
        return [*_heading(self, 0), *self.timeline(_HEAD, _span(self.run)), *key(self.height - 8)]

    def timeline(self, top: float, span: tuple[float, float]) -> list[scene.Shape]:
        """Lanes, tokens of one stream and the axis, from ``top`` on; ``span`` fills the width."""
        now, (low, high) = self.run, span
        scale = (WIDTH - _LEFT - _RIGHT) / (high - low)

        def at(seconds: float) -> float:
            return _LEFT + (min(max(seconds, low), high) - low) * scale

        out: list[scene.Shape] = []
        for row, name in enumerate((*_LANES, "one stream")):
            y = top + row * _LANE
            out.append(scene.Words(8, y + 17, name, size=12, bold=True))
            out.append(scene.Box(_LEFT, y, WIDTH - _LEFT - _RIGHT, _LANE - 6, "#F7F8F9"))
        for block in now.blocks:
            y, x = top + _LANES.index(block.lane) * _LANE, at(block.start)
            wide = max(at(block.end) - x, 0.7)
            stroke = "white" if wide > 3 else "none"
            out.append(scene.Box(x, y, wide, _LANE - 6, COLORS[block.kind], stroke=stroke, title=block.title))
        y = top + 2 * _LANE
        for tick in now.ticks:
            out.append(scene.Path(((at(tick), y + 2), (at(tick), y + _LANE - 8)), plots.BLUE, 1.2))
        start, end = now.largest_gap
        tip = f"longest gap of this stream: {_ms(end - start)}"
        out.append(scene.Box(at(start), y + _LANE - 9, at(end) - at(start), 3, plots.RED, title=tip))
        for seconds, label in _axis(low, high):
            x = at(seconds)
            out.append(scene.Path(((x, y + _LANE - 4), (x, y + _LANE)), _FAINT, 1))
            out.append(scene.Words(x, y + _LANE + 12, label, size=11, anchor="middle", color=_FAINT))
        return out

    def picture(self) -> str:
        """The picture as SVG."""
        return scene.to_svg(WIDTH, self.height, self.shapes(), label=self.alt())

    def html(self) -> str:
        return f'<div style="max-width:{WIDTH}px;background:white;color:{plots.INK}">{self.picture()}</div>'


_DRAWN = 3 * _LANE + 14
"""Height of a timeline."""


def _heading(lab: OverlapLab, top: float) -> list[scene.Shape]:
    return [
        scene.Words(8, top + 17, lab.verdict(), size=13, bold=True),
        scene.Words(8, top + 36, lab.counted(), size=12),
        scene.Words(8, top + 54, lab.source(), size=11.5, color=_FAINT),
    ]


def _span(*runs: Run) -> tuple[float, float]:
    starts = [block.start for run in runs for block in run.blocks]
    return min(starts), max(block.end for run in runs for block in run.blocks)


def _axis(low: float, high: float) -> list[tuple[float, str]]:
    """Marks in ms or s, the unit at zero."""
    unit, scale = ("s", 1.0) if high - low >= 2 else ("ms", 1e3)
    wide = scale * (high - low)
    step = next(m * 10**e for e in range(-3, 6) for m in (1, 2, 5) if wide / (m * 10**e) <= 10)
    first, last = int(-(-low * scale // step)), int(high * scale // step)
    numbers = [number * step for number in range(first, last + 1)]
    return [(value / scale, f"0 {unit}" if value == 0 else f"{value:g}") for value in numbers]


def key(y: float) -> list[scene.Shape]:
    """What the colours mean, on one line."""
    out: list[scene.Shape] = []
    x = 8.0
    for words, color in _KEY:
        out += [scene.Box(x, y - 10, 12, 12, color), scene.Words(x + 16, y, words, size=12, color=_FAINT)]
        x += 32 + 6.6 * len(words)
    words = "line: a token; red: longest gap; at 0 the document comes"
    return [*out, scene.Words(WIDTH - 8, y, words, 12, "end", color=_FAINT)]


def draw(ax: Any, *states: OverlapLab) -> None:
    """Several states below each other on one time axis, each headed by its numbers."""
    shapes: list[scene.Shape] = []
    top, span = 0.0, _span(*(state.run for state in states))
    for state in states:
        shapes.append(scene.Words(8, top + 14, state.head(), size=13, bold=True))
        shapes.append(scene.Words(8, top + 31, state.verdict(), size=12))
        shapes.append(scene.Words(8, top + 47, state.counted(), size=12))
        shapes += state.timeline(top + 56, span)
        top += 56 + _DRAWN + 10
    shapes += [scene.Words(8, top + 8, states[0].source(), size=11.5, color=_FAINT), *key(top + 28)]
    scene.to_axes(ax, WIDTH, draw_height(*states), shapes)


def draw_height(*states: OverlapLab) -> float:
    """Height of :func:`draw`'s picture when it is :data:`WIDTH` wide."""
    return len(states) * (66 + _DRAWN) + 34


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _count(blocks: Sequence[Block]) -> str:
    kinds = [block.kind for block in blocks]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in COLORS if kind in kinds)
