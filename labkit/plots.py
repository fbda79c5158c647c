"""Figures of the course: one look, a text for readers who cannot see them, the same bytes on every run.

A figure is drawn on ``matplotlib.figure.Figure`` without pyplot, so nothing is displayed twice
and nothing stays open. Labels are English: matplotlib's bundled font has no CJK glyphs.
"""

from __future__ import annotations

import base64
import html
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter

from labkit.errors import require
from labkit.tables import ORIGINS

# Okabe-Ito: the eight colours that stay apart under the common kinds of colour blindness.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE, INK = "#8A8F98", "#E8EAED", "#22262B"
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK)

# One colour and one hatch for each kind of number, so that a black-and-white print still tells them apart.
ORIGIN_COLORS = {"measured": BLUE, "emulated": GREEN, "simulated": ORANGE, "quoted": GREY}
ORIGIN_HATCHES = {"measured": "", "emulated": "//", "simulated": "..", "quoted": "xx"}

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "hatch.linewidth": 0.6,
    "axes.prop_cycle": cycler(color=list(CYCLE)),
    "svg.hashsalt": "labkit",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@dataclass(frozen=True)
class Picture:
    """A rendered figure: PNG bytes and the text that says what it shows."""

    png: bytes
    alt: str
    width: int  # displayed width, CSS pixels

    @property
    def html(self) -> str:
        """``<img>`` with the PNG inline and ``alt`` escaped."""
        data = base64.b64encode(self.png).decode("ascii")
        style = f"width:{self.width}px;max-width:100%;background:white"
        return f'<img alt="{html.escape(self.alt)}" style="{style}" src="data:image/png;base64,{data}"/>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"Figure: {self.alt}"


def figure(width: float = 7.2, height: float = 3.6, *, rows: int = 1, cols: int = 1, **subplots: Any) -> Any:
    """A new figure in the course's style.

    Args:
        width, height: inches; 7.2 is a notebook's text width.
        rows, cols: grid of axes.
        subplots: passed to ``Figure.subplots`` (``sharex``, ``width_ratios``, …).

    Returns:
        ``(fig, ax)`` for one axes, else ``(fig, array of axes)``.
    """
    # Artists read the defaults when they are made, so the style has to be in force after this call.
    defaults: Any = mpl.rcParams
    defaults.update(_STYLE)
    fig = Figure(figsize=(width, height), dpi=144, layout="constrained")
    FigureCanvasAgg(fig)
    return fig, fig.subplots(rows, cols, **subplots)


def render(fig: Figure, alt: str) -> Picture:
    """PNG of ``fig`` at 144 dpi, the same bytes for the same drawing.

    Raises:
        InputError: ``alt`` is empty or shorter than ten characters.
    """
    require(
        isinstance(alt, str) and len(alt.strip()) >= 10,
        "alt",
        repr(alt),
        "a sentence that says what the figure shows",
        'plots.show(fig, alt="Two bars: …")',
    )
    alt = " ".join(alt.split())
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=144, metadata={"Software": None})
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close(fig)  # a figure made through pyplot would be shown a second time
    return Picture(buffer.getvalue(), alt, round(fig.get_figwidth() * 100))


def show(fig: Figure, alt: str) -> None:
    """Display ``fig`` with its alternative text; outside a notebook the text is printed."""
    picture = render(fig, alt)
    if (ipython := sys.modules.get("IPython")) is not None and ipython.get_ipython() is not None:
        ipython.display.display(picture)
    else:
        print(repr(picture))


def origin_style(origin: str) -> dict[str, Any]:
    """Keyword arguments of a bar for one kind of number: colour, hatch, edge.

    Raises:
        InputError: ``origin`` is not one of ``labkit.tables.ORIGINS``.
    """
    require(origin in ORIGINS, "origin", repr(origin), "one of " + ", ".join(ORIGINS))
    return {"facecolor": ORIGIN_COLORS[origin], "hatch": ORIGIN_HATCHES[origin], "edgecolor": "white"}


def origin_legend(ax: Axes, origins: Sequence[str], **legend: Any) -> None:
    """Legend that names the kinds of numbers in ``origins``, in the course's order.

    It stands above the axes at the right, clear of the data, unless ``legend`` says otherwise.
    """
    kinds = [kind for kind in ORIGINS if kind in origins]
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(kinds)}
    place |= {"borderaxespad": 0.2, "columnspacing": 1.2} | legend
    ax.legend(handles=[Patch(label=kind, **origin_style(kind)) for kind in kinds], **place)


def bars(
    ax: Axes,
    labels: Sequence[str],
    values: Sequence[float],
    origins: Sequence[str],
    *,
    unit: str,
    fmt: str = "{:.1f}",
    log: bool = False,
    legend: bool = True,
) -> None:
    """Horizontal bars, first label on top, each with its value written at its end.

    Args:
        labels, values, origins: one entry a bar; an origin is one of ``labkit.tables.ORIGINS``.
        unit: axis label, such as ``"weights read (GB/s)"``.
        fmt: format of the written value.
        log: logarithmic value axis (all values must be > 0).
        legend: draw :func:`origin_legend` above the axes.
    """
    require(
        len(labels) == len(values) == len(origins),
        "labels, values, origins",
        f"{len(labels)}, {len(values)}, {len(origins)} entries",
        "equal lengths",
    )
    for i, (value, origin) in enumerate(zip(values, origins, strict=True)):
        ax.barh(i, value, height=0.68, **origin_style(origin))
        ax.annotate(
            fmt.format(value), (value, i), (4, 0), textcoords="offset points", va="center", fontsize=9
        )
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    if log:
        log_axes(ax, y=False)
        ax.set_xlim(right=max(values) * 4)
    else:
        ax.set_xlim(right=max(values) * 1.16)
    ax.set_xlabel(unit)
    if legend:
        origin_legend(ax, origins)


def log_axes(ax: Axes, *, x: bool = True, y: bool = True) -> None:
    """Logarithmic axes with plain numbers (0.1, 1, 10, 1000): exponents would be too small to read."""
    for on, axis, rescale in ((x, ax.xaxis, ax.set_xscale), (y, ax.yaxis, ax.set_yscale)):
        if on:
            rescale("log")
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axis.set_minor_formatter(NullFormatter())


def cells(
    ax: Axes,
    colors: Sequence[Sequence[str | None]],
    texts: Sequence[Sequence[str]] | None = None,
    *,
    row_labels: Sequence[str] | None = None,
    fontsize: float = 9,
) -> None:
    """A grid of coloured squares, for pictures of bytes, lanes, rows and tiles.

    Args:
        colors: rows of colours, first row on top; None leaves a cell empty.
        texts: the same shape, written into the cells.
        row_labels: one a row, written at the left.
    """
    for r, row in enumerate(colors):
        for c, color in enumerate(row):
            if color is None:
                continue
            ax.add_patch(Rectangle((c, r), 1, 1, facecolor=color, edgecolor="white", linewidth=1.2))
            if texts is not None and texts[r][c]:
                ink = "white" if _is_dark(color) else INK
                ax.text(c + 0.5, r + 0.5, texts[r][c], ha="center", va="center", fontsize=fontsize, color=ink)
    ax.set_xlim(0, max(len(row) for row in colors))
    ax.set_ylim(len(colors), 0)
    ax.grid(False)
    ax.set_xticks([])
    if row_labels is None:
        ax.set_yticks([])
    else:
        ax.set_yticks([r + 0.5 for r in range(len(row_labels))], row_labels)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _is_dark(color: str) -> bool:
    red, green, blue = mpl.colors.to_rgb(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
