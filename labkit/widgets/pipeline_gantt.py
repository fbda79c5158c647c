"""Pipeline picture: copies that run ahead of the products, and the bubbles where a step waits for its copy.

A model of one block of ``lesson/mma_w4.cu``, with constant times: a copy arrives ``latency`` after it is
started, or ``transfer`` if that is longer, and memory delivers one tile each ``transfer`` at best; a product
takes ``compute``. Step t waits for tile t, starts the copy of tile t + stages − 1, and multiplies. With one
stage a copy starts only when the product before it is done. Simulated: no GPU is asked.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit import plots
from labkit.errors import require
from labkit.widgets import base, scene

WIDTH = 680
"""Width of the picture; see :attr:`PipelineGantt.height`."""

STAGE_BYTES = 11008
"""Shared memory of one stage of ``lesson/mma_w4.cu``."""

_FAINT, _COPY, _COMPUTE, _BUBBLE = "#5F6670", plots.SKY, plots.BLUE, plots.RED
_READ = "#9CC3E0"
_KEY = (
    (_COPY, "copy under way"),
    (plots.PALE, "there, must wait"),
    (_READ, "being read"),
    (_COMPUTE, "product"),
    (_BUBBLE, "bubble"),
)
_LEFT, _RIGHT, _TOP, _ROW = 92.0, 12.0, 70.0, 22.0


@dataclass(frozen=True)
class Step:
    """One tile on its way through a block; times in the model's units.

    Attributes:
        tile: its number.
        issued: when its copy is started.
        arrived: when the copy is there.
        began, ended: of the product.
        waited: how long the block stood still before it, for this copy.
    """

    tile: int
    issued: float
    arrived: float
    began: float
    ended: float
    waited: float


def schedule(stages: int, latency: float, transfer: float, compute: float, tiles: int) -> list[Step]:
    """The steps of one block, in order.

    Args:
        stages: tiles that fit in shared memory at once, at least 1.
        latency: from the start of a copy to its arrival, when memory is not busy.
        transfer: least time between two arrivals (bandwidth).
        compute: of one product.
        tiles: how many.

    Raises:
        InputError: fewer than one stage or tile, or a negative time.
    """
    for name, value in (("stages", stages), ("tiles", tiles)):
        require(value >= 1, name, value, "at least 1")
    for name, time in (("latency", latency), ("transfer", transfer), ("compute", compute)):
        require(time >= 0, name, time, "0 or more")
    steps: list[Step] = []
    for tile in range(tiles):
        before = steps[-1].ended if steps else 0.0
        # the copy of this tile is started by the step stages - 1 before it, or ahead of all steps
        ahead = tile - (stages - 1)
        issued = before if stages == 1 else (steps[ahead].began if ahead >= 0 else 0.0)
        arrived = max(issued + max(latency, transfer), steps[-1].arrived + transfer if steps else 0.0)
        began = max(before, arrived)
        steps.append(Step(tile, issued, arrived, began, began + compute, began - before))
    return steps


@dataclass
class PipelineGantt(base.Controller):
    """The pipeline of one block.

    Attributes:
        stages: tiles in shared memory at once.
        latency, transfer, compute: times of the model, see :func:`schedule`; think of 10 ns.
        tiles: steps along K.
    """

    stages: int = 3
    latency: int = 60
    transfer: int = 10
    compute: int = 20
    tiles: int = 10
    title: str = field(default="Pipeline: copies ahead of products (simulated)", repr=False)

    def __post_init__(self) -> None:
        for control in self.controls():
            control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Control]:
        """Stages, three times, tiles."""
        return (
            base.Slider("stages", "Stages", 1, 8),
            base.Slider("latency", "Latency of a copy", 0, 200, 5),
            base.Slider("transfer", "Transfer of a tile", 0, 50),
            base.Slider("compute", "Product of a tile", 1, 80),
            base.Slider("tiles", "Tiles along K", 2, 16),
        )

    # --- numbers

    @property
    def steps(self) -> list[Step]:
        """The schedule."""
        return schedule(self.stages, self.latency, self.transfer, self.compute, self.tiles)

    @property
    def total(self) -> float:
        """Time of all steps."""
        return self.steps[-1].ended

    @property
    def bubbles(self) -> float:
        """Time that the block stands still after its first tile came; the first wait nobody can hide."""
        return sum(step.waited for step in self.steps[1:])

    @property
    def copy(self) -> float:
        """Time of one copy when memory is not busy."""
        return max(self.latency, self.transfer)

    @property
    def period(self) -> float:
        """Time of a step in the long run: the slowest of product, transfer, and a latency that is shared
        by the copies under way."""
        if self.stages == 1:
            return self.compute + self.copy
        return max(self.compute, self.transfer, self.copy / (self.stages - 1))

    @property
    def limit(self) -> str:
        """What the period is made of: "latency", "bandwidth" or "products"."""
        if self.period > max(self.compute, self.transfer):
            return "latency"
        return "bandwidth" if self.transfer > self.compute else "products"

    @property
    def enough(self) -> int:
        """The fewest stages that hide the latency; more change nothing."""
        return 1 + math.ceil(self.copy / max(self.compute, self.transfer))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block of the lesson kernel."""
        return self.stages * STAGE_BYTES

    # --- words

    def describe(self) -> str:
        """The inputs in one line."""
        stages = f"{self.stages} stage{'' if self.stages == 1 else 's'}"
        return f"{stages}, latency {self.latency}, transfer {self.transfer}, product {self.compute}"

    def verdict(self) -> str:
        """What comes of it."""
        stages = (
            f"{self.enough} stages hide the latency" if self.period > max(self.compute, self.transfer) else ""
        )
        tail = f"; {stages}" if stages else ""
        return (
            f"{self.tiles} tiles in {self.total:g}, bubbles {self.bubbles:g}; in the long run a step takes "
            f"{self.period:.3g}, limited by {self.limit}{tail}"
        )

    def text(self) -> str:
        return f"{self.describe()}: {self.verdict()}. {self.shared_bytes:,} bytes of shared memory a block."

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        return f"A row of copies for each stage, a row of products with gaps where they wait. {self.text()}"

    # --- picture

    @property
    def height(self) -> float:
        """Height of the picture when it is :data:`WIDTH` wide."""
        return _TOP + _ROW * (self.stages + 1) + 36

    def shapes(self) -> list[scene.Shape]:
        """The picture, first shape lowest."""
        words = textwrap.wrap(self.verdict(), 105)
        out: list[scene.Shape] = [scene.Words(8, 18, self.describe(), size=14, bold=True)]
        out += [scene.Words(8, 38 + 17 * i, line, size=12) for i, line in enumerate(words)]
        return [*out, *self.bars(_TOP), *self.key(self.height - 12)]

    def bars(self, top: float, span: float | None = None) -> list[scene.Shape]:
        """Only the rows and the axis, from ``top`` on.

        Args:
            top: where the first row begins.
            span: time that the width stands for; the total when left out, so that pictures can share a scale.
        """
        steps = self.steps
        scale = (WIDTH - _LEFT - _RIGHT) / (span or self.total)
        out: list[scene.Shape] = []
        for stage in range(self.stages):
            y = top + _ROW * stage
            out.append(scene.Words(_LEFT - 8, y + 15, f"stage {stage}", size=12, anchor="end"))
        low = top + _ROW * self.stages
        out.append(scene.Words(_LEFT - 8, low + 15, "products", size=12, anchor="end", bold=True))
        for step in steps:
            y = top + _ROW * (step.tile % self.stages)
            x, wide = _LEFT + step.issued * scale, (step.arrived - step.issued) * scale
            tip = f"copy of tile {step.tile}: started at {step.issued:g}, there at {step.arrived:g}"
            out.append(scene.Box(x, y + 2, max(wide - 0.6, 0.6), _ROW - 4, _COPY, title=tip))
            held = (step.began - step.arrived) * scale
            if held > 0.5:
                tip = f"tile {step.tile} is there, and waits for its turn"
                out.append(scene.Box(x + wide, y + 2, held, _ROW - 4, plots.PALE, title=tip))
            busy = (step.ended - step.began) * scale
            for row, title in ((y, f"tile {step.tile} is read"), (low, f"product of tile {step.tile}")):
                fill = _COMPUTE if row == low else _READ
                out.append(
                    scene.Box(
                        _LEFT + step.began * scale, row + 2, max(busy - 0.6, 0.6), _ROW - 4, fill, title=title
                    )
                )
            if busy >= 12:
                middle = _LEFT + (step.began + step.ended) / 2 * scale
                label = scene.Words(
                    middle, low + 15, str(step.tile), size=11, anchor="middle", color="#FFFFFF"
                )
                out.append(label)
            if step.waited > 0:
                x = _LEFT + (step.began - step.waited) * scale
                tip = f"bubble of {step.waited:g}: waits for tile {step.tile}"
                out.append(scene.Box(x, low + 8, step.waited * scale, _ROW - 16, _BUBBLE, title=tip))
        return out

    def key(self, y: float) -> list[scene.Shape]:
        """What the colours mean, on one line."""
        out: list[scene.Shape] = []
        x = _LEFT
        for color, name in _KEY:
            out += [scene.Box(x, y - 10, 12, 12, color), scene.Words(x + 17, y, name, size=12)]
            x += 36 + 6.6 * len(name)
        return out

    def picture(self) -> str:
        """The picture as SVG."""
        return scene.to_svg(WIDTH, self.height, self.shapes(), label=self.alt())

    def html(self) -> str:
        return f'<div style="max-width:{WIDTH}px;background:white;color:{plots.INK}">{self.picture()}</div>'


def draw(ax: Any, *states: PipelineGantt) -> None:
    """Pipelines below each other on one time scale, each headed by its numbers, as a static figure."""
    span = max(state.total for state in states)
    shapes: list[scene.Shape] = []
    top = 0.0
    for state in states:
        head = f"{state.describe()}: total {state.total:g}, bubbles {state.bubbles:g}"
        shapes += [scene.Words(8, top + 16, head, size=13, bold=True), *state.bars(top + 26, span)]
        top += _drawn(state)
    scene.to_axes(ax, WIDTH, draw_height(*states), [*shapes, *states[0].key(top + 12)])


def draw_height(*states: PipelineGantt) -> float:
    """Height of :func:`draw`'s picture when it is :data:`WIDTH` wide."""
    return sum(_drawn(state) for state in states) + 22


def _drawn(state: PipelineGantt) -> float:
    return 26 + _ROW * (state.stages + 1) + 14
