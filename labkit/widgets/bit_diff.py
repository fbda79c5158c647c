"""Bit-diff: which outputs of two runs differ in their bits, and by how many units in the last place.

:func:`compare` gives the numbers, :func:`draw` and :func:`draw_strips` a static figure, and
:class:`BitDiff` the widget. "Equal to six decimals" and "the same bits" are different claims; this
picture is about the second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from labkit import plots
from labkit.errors import require
from labkit.widgets import base

# Classes of a pair of outputs, in the order of the legend. Darker is farther apart, so it reads in grey.
SAME, ZERO, ONE, FEW, MANY, FAR, SPECIAL = range(7)
NAMES = ("same bits", "+0 and −0", "1 ulp", "2–3 ulps", "4–15 ulps", "16 ulps or more", "NaN or inf")
COLORS = (plots.PALE, plots.YELLOW, "#A9DAF6", plots.SKY, plots.BLUE, "#00304A", plots.RED)
_LOWEST_ULPS = ((FAR, 16), (MANY, 4), (FEW, 2), (ONE, 1))

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_FRACTION = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
_COLUMNS, _MAX_CELLS, _STRIP_CELLS = 64, 2048, 640
_WIDTH, _INK, _FAINT, _MARK = 680, plots.INK, "#5F6670", plots.RED


@dataclass(frozen=True, eq=False)
class Difference:
    """Two arrays of one shape and dtype, output by output.

    Attributes:
        shape, dtype: of both arrays; ``dtype`` is "float16", "bfloat16", "float32" or "float64".
        bits_a, bits_b: raw bits, flat, int64.
        ulps: steps from one value to the other through the representable numbers, flat, float64 (exact
            below 2**53); 0 for +0 and −0, NaN where just one of the two is NaN or infinite.
        kinds: class of each pair, flat: an index into :data:`NAMES`.
    """

    shape: tuple[int, ...]
    dtype: str
    bits_a: np.ndarray
    bits_b: np.ndarray
    ulps: np.ndarray
    kinds: np.ndarray

    @property
    def size(self) -> int:
        """Outputs compared."""
        return int(self.kinds.size)

    @property
    def differing(self) -> int:
        """Outputs whose bits differ."""
        return int(np.count_nonzero(self.kinds))

    @property
    def identical(self) -> bool:
        """Whether every bit is the same."""
        return self.differing == 0

    @property
    def max_ulps(self) -> int:
        """Greatest distance; pairs with a NaN or an infinity are left out."""
        known = self.ulps[~np.isnan(self.ulps)]
        return int(known.max()) if known.size else 0

    def counts(self) -> dict[str, int]:
        """Outputs by class; classes that do not occur are left out."""
        found = np.bincount(self.kinds, minlength=len(NAMES))
        return {name: int(n) for name, n in zip(NAMES, found, strict=True) if n}

    def value(self, index: int, which: str = "a") -> float:
        """Output ``index`` (flat) of array "a" or "b"."""
        return _decode(int((self.bits_a if which == "a" else self.bits_b)[index]), self.dtype)

    def text(self) -> str:
        """Counts in one sentence."""
        if self.identical:
            return f"All {self.size} outputs have the same bits ({self.dtype})."
        share = 100 * self.differing / self.size
        parts = ", ".join(f"{name}: {n}" for name, n in self.counts().items())
        return (
            f"{self.differing} of {self.size} outputs ({share:.1f} %) differ in bits ({self.dtype}), "
            f"by {self.max_ulps} ulps at most; {parts}."
        )


def compare(a: Any, b: Any) -> Difference:
    """Compare bits.

    Args:
        a, b: torch tensors or numpy arrays of the same shape and the same dtype, float16, bfloat16
            (torch), float32 or float64, at least one element; a tensor may lie on any device.

    Raises:
        InputError: another dtype, different dtypes or shapes, or nothing to compare.
    """
    shape_a, dtype_a, bits_a = _raw(a, "a")
    shape_b, dtype_b, bits_b = _raw(b, "b")
    require(shape_a == shape_b, "b", f"shape {shape_b}", f"the shape of a, {shape_a}")
    require(dtype_a == dtype_b, "b", dtype_b, f"the dtype of a, {dtype_a}")
    require(bits_a.size > 0, "a", f"shape {shape_a}", "at least one element")
    special = _not_finite(bits_a, dtype_a) | _not_finite(bits_b, dtype_a)
    place_a, place_b = _place(bits_a, dtype_a), _place(bits_b, dtype_a)
    # In Python's terms int64 − int64 can overflow for float64 of opposite sign; float64 cannot.
    ulps = np.abs(place_a.astype(np.float64) - place_b.astype(np.float64))
    near = (place_a >= 0) == (place_b >= 0)
    ulps[near] = np.abs(place_a[near] - place_b[near])
    same = bits_a == bits_b
    kinds = np.full(bits_a.shape, SAME, dtype=np.int8)
    kinds[~same & (ulps == 0)] = ZERO
    for kind, lowest in reversed(_LOWEST_ULPS):
        kinds[ulps >= lowest] = kind
    kinds[special & ~same] = SPECIAL
    ulps[special & ~same] = np.nan
    kinds[same] = SAME
    ulps[same] = 0
    return Difference(shape_a, dtype_a, bits_a, bits_b, ulps, kinds)


def _raw(array: Any, argument: str) -> tuple[tuple[int, ...], str, np.ndarray]:
    """Shape, dtype name and raw bits (flat int64) of a tensor or an array."""
    name = str(getattr(array, "dtype", type(array).__name__)).removeprefix("torch.")
    require(name in _DTYPES, argument, name, "a tensor or array of " + ", ".join(_DTYPES))
    if not isinstance(array, np.ndarray):
        import torch

        whole = {16: torch.int16, 32: torch.int32, 64: torch.int64}[_BITS[name]]
        array = array.detach().cpu().contiguous().view(whole).numpy()
    shape = tuple(int(n) for n in array.shape)
    flat = np.ascontiguousarray(array).reshape(-1).view(f"int{_BITS[name]}")
    return shape, name, flat.astype(np.int64)


def _place(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Position of each value among the representable numbers: neighbours differ by one, ±0 are both 0."""
    magnitude = bits & ((1 << (_BITS[dtype] - 1)) - 1)
    return np.where(bits < 0, -magnitude, magnitude)


def _not_finite(bits: np.ndarray, dtype: str) -> np.ndarray:
    exponent = ((1 << (_BITS[dtype] - 1 - _FRACTION[dtype])) - 1) << _FRACTION[dtype]
    return (bits & exponent) == exponent


def _decode(bits: int, dtype: str) -> float:
    """The number that raw bits mean; bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        return float(np.array((bits & 0xFFFF) << 16, dtype=np.uint32).view(np.float32))
    return float(np.array(bits, dtype=f"int{_BITS[dtype]}").view(dtype))


# --- cells: a picture has a limited number of them --------------------------------------------------


@dataclass(frozen=True, eq=False)
class Cells:
    """The classes as a grid: ``rows`` of kinds, −1 where there is no output.

    Attributes:
        each: outputs a cell stands for; it shows the worst of them.
        columns: cells a row.
        matrix: whether rows and columns are those of the array.
    """

    rows: np.ndarray
    each: int
    columns: int
    matrix: bool

    def holds(self, index: int) -> tuple[int, int]:
        """(row, column) of the cell that shows output ``index``."""
        return divmod(index // self.each, self.columns)


def cells(difference: Difference) -> Cells:
    """A two-dimensional array of modest width keeps its rows; anything else is wrapped, row by row."""
    kinds = difference.kinds.astype(np.int64)
    shape = difference.shape
    if len(shape) == 2 and shape[1] <= 2 * _COLUMNS and difference.size <= _MAX_CELLS and shape[0] > 1:
        return Cells(kinds.reshape(shape), 1, shape[1], True)
    each = max(1, math.ceil(kinds.size / _MAX_CELLS))
    count = math.ceil(kinds.size / each)
    padded = np.full(count * each, -1, dtype=np.int64)
    padded[: kinds.size] = kinds
    worst = padded.reshape(count, each).max(axis=1)
    columns = min(_COLUMNS, count)
    grid = np.full(math.ceil(count / columns) * columns, -1, dtype=np.int64)
    grid[:count] = worst
    return Cells(grid.reshape(-1, columns), each, columns, False)


# --- static figures ---------------------------------------------------------------------------------


def draw(ax: Axes, difference: Difference, *, legend: bool = True) -> None:
    """One cell an output, coloured by class, with the counts in the legend.

    Args:
        difference: from :func:`compare`.
        legend: name the classes that occur, above the axes.
    """
    grid = cells(difference)
    colors: list[list[str | None]] = [
        [COLORS[kind] if kind >= 0 else None for kind in row] for row in grid.rows.tolist()
    ]
    plots.cells(ax, colors)
    ax.set_aspect("equal")
    ax.set_xlabel(_caption(difference, grid))
    if legend:
        _legend(ax, [difference])


def draw_strips(ax: Axes, differences: Mapping[str, Difference], *, legend: bool = True) -> None:
    """One strip a run: the same outputs from left to right, so that a column is one output.

    Args:
        differences: label of the run → its comparison with the reference; all of one shape.
        legend: name the classes that occur, above the axes.

    Raises:
        InputError: no run, or runs of different shapes.
    """
    _check_runs(differences)
    first = next(iter(differences.values()))
    each = max(1, math.ceil(first.size / _STRIP_CELLS))
    columns = math.ceil(first.size / each)
    for row, difference in enumerate(differences.values()):
        starts = np.arange(columns) * each
        worst = np.maximum.reduceat(difference.kinds, starts)
        strip = np.array([to_rgb(COLORS[kind]) for kind in worst])[None]
        extent = (0, columns, row + 0.88, row + 0.12)
        ax.imshow(strip, extent=extent, aspect="auto", interpolation="nearest")
        ax.annotate(
            f"{difference.differing}",
            (1, row + 0.5),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    ax.set_xlim(0, columns)
    ax.set_ylim(len(differences), 0)
    ax.set_yticks([row + 0.5 for row in range(len(differences))], list(differences))
    ax.set_xticks([])
    ax.grid(False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    per_cell = "" if each == 1 else f"; a cell is the worst of {each}"
    ax.set_xlabel(f"{first.size} outputs ({first.dtype}){per_cell}; at the right: outputs whose bits differ")
    if legend:
        _legend(ax, list(differences.values()))


def _legend(ax: Axes, differences: Sequence[Difference]) -> None:
    seen = sorted({int(kind) for difference in differences for kind in np.unique(difference.kinds)})
    handles = [Patch(facecolor=COLORS[kind], edgecolor=plots.GREY, label=NAMES[kind]) for kind in seen]
    ax.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=min(len(handles), 6),
        handlelength=1.2,
        borderaxespad=0.2,
        columnspacing=1.0,
    )


def _caption(difference: Difference, grid: Cells) -> str:
    wrapped = f"outputs in order, {grid.columns * grid.each} a row"
    layout = "rows and columns of the array" if grid.matrix else wrapped
    worst = "" if grid.each == 1 else f"; a cell is the worst of {grid.each}"
    return f"{difference.differing} of {difference.size} differ ({difference.dtype}); {layout}{worst}"


def _check_runs(differences: Mapping[str, Difference]) -> None:
    require(len(differences) > 0, "differences", "none", "at least one run")
    shapes = {difference.shape for difference in differences.values()}
    require(len(shapes) == 1, "differences", f"shapes {sorted(shapes)}", "one shape for all runs")


# --- the widget -------------------------------------------------------------------------------------


@dataclass
class BitDiff(base.Controller):
    """Runs against one reference: the map of one of them, and the bits of one output.

    Attributes:
        runs: label → comparison with the reference (:func:`compare`), all of one shape and dtype.
        run: label of the run that is shown.
        index: flat index of the output whose bits are written out.
    """

    runs: Mapping[str, Difference]
    run: str = ""
    index: int = 0
    title: str = field(default="Bit-diff: which outputs changed, and which bits", repr=False)

    def __post_init__(self) -> None:
        _check_runs(self.runs)
        self.run = self.run or next(iter(self.runs))
        for control in self.controls():
            if not isinstance(control, base.Button):
                control.accept(getattr(self, control.name))

    @classmethod
    def of(cls, reference: Any, **runs: Any) -> BitDiff:
        """From arrays: ``BitDiff.of(fixed, again=repeat, with_atomics=other)``; "_" is shown as a space."""
        return cls({name.replace("_", " "): compare(reference, run) for name, run in runs.items()})

    def controls(self) -> Sequence[base.Control]:
        """Run, output, and a button that goes to the next output that differs."""
        last = next(iter(self.runs.values())).size - 1
        return (
            base.Choice("run", "Run", tuple((name, name) for name in self.runs)),
            base.Slider("index", "Output", 0, last),
            base.Button("next", "Next output that differs"),
        )

    def press(self, name: str) -> None:
        """Move to the next differing output, from the start again after the last."""
        if name != "next":
            super().press(name)
        where = np.flatnonzero(self.difference.kinds)
        if where.size:
            later = where[where > self.index]
            self.index = int(later[0] if later.size else where[0])

    # ---- numbers ----

    @property
    def difference(self) -> Difference:
        """The comparison that is shown."""
        return self.runs[self.run]

    def bit_rows(self) -> tuple[str, str]:
        """Bits of the chosen output, reference and run, high bit first."""
        width = _BITS[self.difference.dtype]
        mask = (1 << width) - 1
        pair = (int(self.difference.bits_a[self.index]), int(self.difference.bits_b[self.index]))
        return format(pair[0] & mask, f"0{width}b"), format(pair[1] & mask, f"0{width}b")

    # ---- words and picture ----

    def output_words(self) -> str:
        """The chosen output in words."""
        shown = self.difference
        values = f"{shown.value(self.index):.9g} and {shown.value(self.index, 'b'):.9g}"
        kind = NAMES[int(shown.kinds[self.index])]
        ulps = shown.ulps[self.index]
        far = f" ({int(ulps)} ulps)" if ulps >= 2 else ""
        flips = sum(x != y for x, y in zip(*self.bit_rows(), strict=True))
        changed = "no bit changed" if not flips else f"{flips} bit{'s' if flips > 1 else ''} changed"
        return f"Output {self.index}: {values}; {kind}{far}, {changed}."

    def text(self) -> str:
        """Counts of the run, and the chosen output."""
        return f"{self.run} against the reference: {self.difference.text()} {self.output_words()}"

    def picture(self) -> str:
        """SVG: the map, its legend, and the bits of the chosen output."""
        grid = cells(self.difference)
        side = min((_WIDTH - 16) / grid.columns, 18.0)
        parts = [base.label(8, 18, f"{self.run}: {_caption(self.difference, grid)}", size=13, bold=True)]
        top = 28.0
        for r, row in enumerate(grid.rows.tolist()):
            for c, kind in enumerate(row):
                if kind >= 0:
                    parts.append(
                        base.rect(8 + c * side, top + r * side, side - 0.8, side - 0.8, COLORS[kind])
                    )
        r, c = grid.holds(self.index)
        box = (8 + c * side - 1, top + r * side - 1, side + 1.2, side + 1.2)
        parts.append(base.rect(*box, "none", stroke=_INK, title=self.output_words()))
        bottom = top + len(grid.rows) * side + 12
        x = 8.0
        for name, count in self.difference.counts().items():
            parts.append(base.rect(x, bottom, 12, 12, COLORS[NAMES.index(name)], stroke=_FAINT))
            text = f"{name}: {count}"
            parts.append(base.label(x + 17, bottom + 11, text, size=12))
            x += 34 + 6.6 * len(text)
        parts += self._bits(bottom + 40)
        return base.svg(_WIDTH, bottom + 104, parts, label=self.text())

    def _bits(self, top: float) -> list[str]:
        rows = self.bit_rows()
        dtype = self.difference.dtype
        exponent_from, fraction_from = 1, _BITS[dtype] - _FRACTION[dtype]
        step = min(18.0, (_WIDTH - 96) / _BITS[dtype])
        parts = [base.label(8, top, self.output_words(), size=12)]
        for name, at in (("sign, exponent", 0), ("fraction", fraction_from)):
            parts.append(base.label(88 + at * step + (at > 0) * 6, top + 16, name, size=11, color=_FAINT))
        for r, (name, row) in enumerate(zip(("reference", "run"), rows, strict=True)):
            y = top + 34 + 18 * r
            parts.append(base.label(8, y, name, size=12, color=_FAINT))
            for i, bit in enumerate(row):
                gap = 3 * (i >= exponent_from) + 3 * (i >= fraction_from)
                changed = rows[0][i] != rows[1][i]
                color = _MARK if changed else _INK
                size = 13 if step > 10 else 11
                x = 88 + i * step + gap
                parts.append(base.label(x, y, bit, size=size, color=color, bold=changed))
                if changed and r == 1:
                    parts.append(base.line([(x - 1, y + 4), (x + 8, y + 4)], _MARK, width=2))
        return parts

    def html(self) -> str:
        return f'<div style="max-width:{_WIDTH}px;background:white;color:{_INK}">{self.picture()}</div>'
