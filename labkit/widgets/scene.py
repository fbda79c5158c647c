"""A picture as plain shapes, so that a widget's SVG and its printed figure are the same drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.widgets import base

INK = "#22262B"


@dataclass(frozen=True)
class Box:
    """A rectangle; ``title`` shows on hover in the widget."""

    x: float
    y: float
    w: float
    h: float
    fill: str
    stroke: str = "none"
    title: str = ""


@dataclass(frozen=True)
class Path:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    color: str
    width: float = 1.5


@dataclass(frozen=True)
class Words:
    """Text; ``anchor`` is start, middle or end, ``y`` its baseline, ``size`` in units of the picture."""

    x: float
    y: float
    text: str
    size: float = 13
    anchor: str = "start"
    color: str = INK
    bold: bool = False


Shape = Box | Path | Words
_SIDE = {"start": "left", "middle": "center", "end": "right"}


def to_svg(width: float, height: float, shapes: Sequence[Shape], *, label: str) -> str:
    """One inline ``<svg>``; ``label`` is read by screen readers."""
    return base.svg(width, height, [_svg(shape) for shape in shapes], label=label)


def _svg(shape: Shape) -> str:
    if isinstance(shape, Box):
        place = (shape.x, shape.y, shape.w, shape.h)
        return base.rect(*place, shape.fill, stroke=shape.stroke, title=shape.title)
    if isinstance(shape, Path):
        return base.line(shape.points, shape.color, width=shape.width)
    return base.label(
        shape.x,
        shape.y,
        shape.text,
        size=shape.size,
        anchor=shape.anchor,
        color=shape.color,
        bold=shape.bold,
    )


def to_axes(ax: Any, width: float, height: float, shapes: Sequence[Shape]) -> None:
    """The same picture on matplotlib axes, which it fills; the axes' own frame and ticks go.

    Text keeps its size relative to the picture when the axes are as wide as their column of the figure.
    """
    from matplotlib.patches import Rectangle

    columns = spec.get_gridspec().ncols if (spec := ax.get_subplotspec()) is not None else 1
    points = 0.96 * 72 * ax.figure.get_figwidth() / columns / width
    for shape in shapes:
        if isinstance(shape, Box):
            edge = "none" if shape.stroke == "none" else shape.stroke
            box = Rectangle((shape.x, shape.y), shape.w, shape.h, facecolor=shape.fill, edgecolor=edge)
            box.set_linewidth(points)
            ax.add_patch(box)
        elif isinstance(shape, Path):
            xs, ys = zip(*shape.points, strict=True)
            ax.plot(xs, ys, color=shape.color, linewidth=shape.width * points, solid_capstyle="butt")
        else:
            ax.text(
                shape.x,
                shape.y,
                shape.text,
                fontsize=shape.size * points,
                ha=_SIDE[shape.anchor],
                va="baseline",
                color=shape.color,
                fontweight="bold" if shape.bold else "normal",
            )
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.set_aspect("equal")
    ax.axis("off")
