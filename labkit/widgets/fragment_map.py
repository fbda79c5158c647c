"""Fragment viewer: which lane of a warp holds which element of ``mma.sync.m16n8k16``, and of a tile record.

:class:`FragmentMap` shows one matrix of the instruction; pick a lane, and the elements it holds light up, or
pick an element, and the lane is found. :class:`TileMap` shows a record of 32 rows × 128 columns: pick a
weight, and its lane, 16-byte vector, word and bits are named. The arithmetic is that of
:mod:`labkit.widgets.mma_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit import plots
from labkit.widgets import base, mma_layout, scene
from labkit.widgets.mma_layout import LANES, OPERANDS, Operand, Piece

WIDTH = 680
"""Width of both pictures; see their ``height``."""

_FAINT, _LIGHT, _MINE, _PICKED = "#5F6670", "#D5E8F5", plots.SKY, plots.ORANGE
# Lanes of one g share a shade, so that the pattern is seen before a number is read.
_SHADES = ("#F2F4F7", "#E3E8EE")
_LEFT, _TOP = 8.0, 66.0
_CELL = 25.0


@dataclass
class FragmentMap(base.Controller):
    """One matrix of the instruction, and one element of it.

    Attributes:
        operand: "A" (weights), "B" (activations) or "C" (sums).
        lane, register, position: the holder of the element picked.
        row, column: the element; changing either pair changes the other.
    """

    operand: str = "A"
    lane: int = 0
    register: int = 0
    position: int = 0
    row: int = 0
    column: int = 0
    title: str = field(default="Fragment viewer: who holds what in mma.sync.m16n8k16", repr=False)

    def __post_init__(self) -> None:
        for control in self.controls():
            control.accept(getattr(self, control.name))
        if (self.row, self.column) != (0, 0):
            self._follow_element()
        else:
            self._follow_holder()

    def controls(self) -> Sequence[base.Control]:
        """The matrix, the holder, the element. A number beyond a smaller matrix is taken as its last."""
        return (
            base.Choice("operand", "Matrix", tuple((_name(one), key) for key, one in OPERANDS.items())),
            base.Slider("lane", "Lane", 0, LANES - 1),
            base.Slider("register", "Register", 0, 3),
            base.Slider("position", "Position (0 low, 1 high)", 0, 1),
            base.Slider("row", "Down: row, or k of B", 0, 15),
            base.Slider("column", "Across: k of A, or batch", 0, 15),
        )

    def update(self, **changes: Any) -> None:
        """Set controls; the element follows the holder, or the holder the element where that was named."""
        super().update(**changes)
        if {"row", "column"} & changes.keys():
            self._follow_element()
        else:
            self._follow_holder()

    def _follow_holder(self) -> None:
        matrix = self.matrix
        self.register = min(self.register, matrix.registers - 1)
        self.position = min(self.position, matrix.positions - 1)
        self.row, self.column = matrix.place(self.lane, self.register, self.position)

    def _follow_element(self) -> None:
        matrix = self.matrix
        self.row, self.column = min(self.row, matrix.rows - 1), min(self.column, matrix.columns - 1)
        self.lane, self.register, self.position = matrix.holder(self.row, self.column)

    # --- numbers

    @property
    def matrix(self) -> Operand:
        """The matrix shown."""
        return OPERANDS[self.operand]

    def held(self) -> list[tuple[int, int]]:
        """(row, column) of all elements of the lane, register by register, low position first."""
        matrix = self.matrix
        each = [(r, p) for r in range(matrix.registers) for p in range(matrix.positions)]
        return [matrix.place(self.lane, register, position) for register, position in each]

    # --- words

    def describe(self) -> str:
        """The element picked and its holder."""
        down, across = self.matrix.axes
        where = f"lane {self.lane}, register {self.register}"
        if self.matrix.positions > 1:
            where += f", {('low', 'high')[self.position]} half"
        return f"{_name(self.matrix)}: {down} {self.row}, {across} {self.column} is in {where}"

    def holds(self) -> str:
        """All that the lane holds."""
        down, across = self.matrix.axes
        listed = " ".join(f"({row}, {column})" for row, column in self.held())
        return f"lane {self.lane} holds {len(self.held())} elements ({down}, {across}): {listed}"

    def text(self) -> str:
        return f"{self.describe()}. {self.holds()[0].upper()}{self.holds()[1:]}."

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        matrix = self.matrix
        return f"A grid of {matrix.rows} × {matrix.columns} cells, each with its lane. {self.text()}"

    # --- picture

    @property
    def height(self) -> float:
        """Height of the picture when it is :data:`WIDTH` wide."""
        return _TOP + 16 * _CELL + 24

    def shapes(self) -> list[scene.Shape]:
        """The picture, first shape lowest."""
        x = _LEFT + 54
        return [
            scene.Words(_LEFT, 18, self.describe(), size=14, bold=True),
            *matrix_shapes(self.matrix, x, _TOP, _CELL, lane=self.lane, picked=(self.row, self.column)),
            *self._registers(x + 16 * _CELL + 28),
        ]

    def _registers(self, x: float) -> list[scene.Shape]:
        """The lane's registers, and the element in each half."""
        out: list[scene.Shape] = [
            scene.Words(x, _TOP - 8, f"registers of lane {self.lane}", color=_FAINT, size=12)
        ]
        matrix, wide = self.matrix, 150.0
        share = wide / matrix.positions
        for register in range(matrix.registers):
            y = _TOP + 58 * register
            out.append(scene.Words(x, y + 14, f"{matrix.name.lower()}[{register}]", size=13, bold=True))
            for position in range(matrix.positions):
                at = x + (matrix.positions - 1 - position) * share  # high bits left, as numbers are written
                place = matrix.place(self.lane, register, position)
                picked = (register, position) == (self.register, self.position)
                out.append(scene.Box(at, y + 20, share - 2, 26, _PICKED if picked else _MINE))
                words = f"({place[0]}, {place[1]})"
                out.append(scene.Words(at + share / 2, y + 38, words, size=13, anchor="middle"))
        y = _TOP + 58 * matrix.registers + 8
        down, across = matrix.axes
        out.append(scene.Words(x, y + 8, f"({down}, {across})", color=_FAINT, size=12))
        if matrix.positions > 1:
            out.append(scene.Words(x, y + 26, "left: high half, right: low half", color=_FAINT, size=12))
        return out

    def picture(self) -> str:
        """The picture as SVG."""
        return scene.to_svg(WIDTH, self.height, self.shapes(), label=self.alt())

    def html(self) -> str:
        return _framed(self.picture())


def _name(matrix: Operand) -> str:
    return f"{matrix.name}, {matrix.what} {matrix.rows} × {matrix.columns}"


def _framed(picture: str) -> str:
    return f'<div style="max-width:{WIDTH}px;background:white;color:{plots.INK}">{picture}</div>'


def matrix_shapes(
    matrix: Operand,
    x: float,
    y: float,
    cell: float,
    *,
    lane: int | None = None,
    picked: tuple[int, int] | None = None,
) -> list[scene.Shape]:
    """A matrix as cells with their lanes; the lane's own are blue, the element picked is orange."""
    down, across = matrix.axes
    size = 0.48 * cell
    out: list[scene.Shape] = [
        scene.Words(x + matrix.columns * cell / 2, y - 24, across, size=12, anchor="middle", color=_FAINT),
        scene.Words(x - 26, y + matrix.rows * cell / 2, down, size=12, anchor="end", color=_FAINT),
    ]
    for column in range(matrix.columns):
        at = x + (column + 0.5) * cell
        out.append(scene.Words(at, y - 7, str(column), size=11, anchor="middle", color=_FAINT))
    for row in range(matrix.rows):
        out.append(scene.Words(x - 7, y + (row + 0.65) * cell, str(row), size=11, anchor="end", color=_FAINT))
        for column in range(matrix.columns):
            holder, register, position = matrix.holder(row, column)
            mine = holder == lane
            fill = _MINE if mine else _SHADES[holder // 4 % 2]
            if (row, column) == picked:
                fill = _PICKED
            half = f", {('low', 'high')[position]} half" if matrix.positions > 1 else ""
            tip = f"{down} {row}, {across} {column}: lane {holder}, register {register}{half}"
            left, top = x + column * cell, y + row * cell
            out.append(scene.Box(left + 0.5, top + 0.5, cell - 1, cell - 1, fill, title=tip))
            words = scene.Words(
                left + cell / 2, top + 0.65 * cell, str(holder), size=size, anchor="middle", bold=mine
            )
            out.append(words)
    return out


@dataclass
class TileMap(base.Controller):
    """One weight of a record: 32 rows × 128 columns of W4 or W3.

    Attributes:
        format: "w4" or "w3".
        row, column: of the weight in its tile.
    """

    format: str = "w4"
    row: int = 0
    column: int = 0
    title: str = field(default="Tile viewer: where a weight lies in a record", repr=False)

    def __post_init__(self) -> None:
        for control in self.controls():
            control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Control]:
        """Format, row and column."""
        return (
            base.Choice("format", "Format", (("W4", "w4"), ("W3", "w3"))),
            base.Slider("row", "Row of the tile", 0, mma_layout.ROWS - 1),
            base.Slider("column", "Column of the tile", 0, mma_layout.COLUMNS - 1),
        )

    @property
    def piece(self) -> Piece:
        """Where the weight lies."""
        return mma_layout.locate(self.format, self.row, self.column)

    def siblings(self) -> list[tuple[int, int]]:
        """(row, column) of the 128 weights that the same lane holds."""
        lane = self.piece.lane
        g, q = divmod(lane, 4)
        rows = [g + 8 * i for i in range(4)]
        columns = [32 * c + 8 * q + j for c in range(4) for j in range(8)]
        return [(row, column) for row in rows for column in columns]

    def bits(self) -> list[tuple[int, list[int]]]:
        """(linear word, its bits) that hold the code, lowest first."""
        piece = self.piece
        found = zip(piece.words, piece.bits, piece.width, strict=True)
        return [(word, list(range(bit, bit + width))) for word, bit, width in found]

    def describe(self) -> str:
        """The weight and its lane."""
        return f"{self.format.upper()}: row {self.row}, column {self.column} is in lane {self.piece.lane}"

    def where(self) -> str:
        """Word and bits."""
        parts = []
        for word, bits in self.bits():
            span = f"bit {bits[0]}" if len(bits) == 1 else f"bits {bits[0]}–{bits[-1]}"
            parts.append(f"{span} of word {word}")
        piece = self.piece
        half, rows = ("low", "high")[piece.position], f"{16 * piece.half}–{16 * piece.half + 15}"
        return (
            f"{', '.join(parts)}; vector {piece.vector}, byte {piece.byte} of the record; "
            f"register {piece.register}, {half} half, of the mma of rows {rows}, chunk {piece.chunk}, "
            f"step {piece.step}"
        )

    def text(self) -> str:
        return f"{self.describe()}: {self.where()}."

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        return f"A tile of 32 × 128 weights, those of one lane marked, and its words by bits. {self.text()}"

    @property
    def height(self) -> float:
        """Height of the picture when it is :data:`WIDTH` wide."""
        return _TILE_TOP + 32 * _SMALL + 66 + 22 * len(self.bits())

    def shapes(self) -> list[scene.Shape]:
        """The picture, first shape lowest."""
        x, y = _TILE_LEFT, _TILE_TOP
        out: list[scene.Shape] = [
            scene.Words(_LEFT, 18, self.describe(), size=14, bold=True),
            scene.Words(x, y - 8, "128 columns of K: four chunks of 32", size=12, color=_FAINT),
        ]
        for row in range(0, 32, 8):
            out.append(
                scene.Words(x - 6, y + (row + 1) * _SMALL + 4, str(row), size=11, anchor="end", color=_FAINT)
            )
        for half in range(2):
            for chunk in range(4):
                shade = _SHADES[(half + chunk) % 2]
                out.append(
                    scene.Box(
                        x + 32 * chunk * _SMALL, y + 16 * half * _SMALL, 32 * _SMALL, 16 * _SMALL, shade
                    )
                )
        for row, column in self.siblings():
            if column % 8 == 0:  # eight neighbours are one box
                out.append(scene.Box(x + column * _SMALL, y + row * _SMALL, 8 * _SMALL, _SMALL, _MINE))
        place = (x + self.column * _SMALL - 1, y + self.row * _SMALL - 1)
        out.append(scene.Box(*place, _SMALL + 2, _SMALL + 2, plots.RED))
        y += 32 * _SMALL + 22
        words = f"blue: the 128 weights of lane {self.piece.lane}; red: this one"
        out.append(scene.Words(x, y, words, size=12, color=_FAINT))
        y += 14
        for word, bits in self.bits():
            out += self._word(x, y, word, bits)
            y += 22
        out.append(scene.Words(x, y + 14, "bit 31 … 0", size=12, color=_FAINT))
        return out

    def _word(self, x: float, y: float, word: int, bits: Sequence[int]) -> list[scene.Shape]:
        out: list[scene.Shape] = [scene.Words(x - 6, y + 15, f"w{word}", size=12, anchor="end", bold=True)]
        wide = 128 * _SMALL / 32
        width = 4 if self.format == "w4" else 3
        for bit in range(32):
            at = x + (31 - bit) * wide
            inside = bit % 16
            shade = _SHADES[inside // width % 2] if inside < width * (16 // width) else _LIGHT
            fill = plots.RED if bit in bits else shade
            out.append(scene.Box(at + 0.5, y, wide - 1, 20, fill, title=f"bit {bit} of word {word}"))
        return out

    def picture(self) -> str:
        """The picture as SVG."""
        return scene.to_svg(WIDTH, self.height, self.shapes(), label=self.alt())

    def html(self) -> str:
        return _framed(self.picture())


_TILE_LEFT, _TILE_TOP, _SMALL = 40.0, 52.0, 5.0


def draw(ax: Any, operands: Sequence[str] = ("A", "B", "C"), lane: int = 5) -> None:
    """Matrices of the instruction side by side on matplotlib axes, one lane's elements marked.

    Args:
        ax: axes as wide as the figure, of the shape of :func:`draw_height`.
        operands: keys of :data:`labkit.widgets.mma_layout.OPERANDS`.
        lane: 0 to 31.
    """
    scene.to_axes(ax, WIDTH, draw_height(), list(_side_by_side(operands, lane)))


def draw_height() -> float:
    """Height of :func:`draw`'s picture when it is :data:`WIDTH` wide."""
    return _DRAW_TOP + 16 * _DRAWN + 30


_DRAWN, _DRAW_TOP = 15.5, 60.0


def _side_by_side(operands: Sequence[str], lane: int) -> list[scene.Shape]:
    out: list[scene.Shape] = []
    x = 50.0
    for name in operands:
        matrix = OPERANDS[name]
        out.append(scene.Words(x, 18, _name(matrix), size=13, bold=True))
        out += matrix_shapes(matrix, x, _DRAW_TOP, _DRAWN, lane=lane)
        x += matrix.columns * _DRAWN + 56
    words = f"each cell: the lane that holds the element; blue: lane {lane}"
    out.append(scene.Words(50, _DRAW_TOP + 16 * _DRAWN + 20, words, size=12, color=_FAINT))
    return out


def draw_tile(ax: Any, state: TileMap) -> None:
    """The tile and the weight's word as a static figure."""
    scene.to_axes(ax, WIDTH, state.height, state.shapes())
