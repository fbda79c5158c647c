"""Which lane holds what: the fragments of ``mma.sync.m16n8k16``, and the tiles of the tensor-core family.

Everything here is arithmetic on small integers, the same formulas as in ``labkit/kernels/ptx.cuh`` and
``labkit/quant/tiles.py``; tests compare all three.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import require

LANES = 32
ROWS, COLUMNS = 32, 128
"""Output rows and columns of K of one record."""


@dataclass(frozen=True)
class Operand:
    """One matrix of the instruction, spread over a warp.

    Attributes:
        name: "A", "B" or "C".
        what: what the family puts there.
        rows, columns: of the matrix.
        axes: names of its two axes.
        registers: 32-bit registers a lane.
        positions: values in a register.
    """

    name: str
    what: str
    rows: int
    columns: int
    axes: tuple[str, str]
    registers: int
    positions: int

    def place(self, lane: int, register: int, position: int) -> tuple[int, int]:
        """(row, column) of the value that a lane holds.

        Args:
            lane: 0 to 31.
            register: 0 to ``registers`` − 1.
            position: 0 for the low 16 bits, 1 for the high ones; always 0 where a register is one value.

        Raises:
            InputError: a number outside its range.
        """
        for name, value, end in (
            ("lane", lane, LANES),
            ("register", register, self.registers),
            ("position", position, self.positions),
        ):
            require(0 <= value < end, name, value, f"0 to {end - 1}")
        g, q = divmod(lane, 4)
        if self.name == "A":
            return g + 8 * (register % 2), 2 * q + 8 * (register // 2) + position
        if self.name == "B":
            return 2 * q + 8 * register + position, g
        return g + 8 * (register // 2), 2 * q + register % 2

    def holder(self, row: int, column: int) -> tuple[int, int, int]:
        """(lane, register, position) of an element: the inverse of :meth:`place`.

        Raises:
            InputError: outside the matrix.
        """
        require(0 <= row < self.rows, self.axes[0], row, f"0 to {self.rows - 1}")
        require(0 <= column < self.columns, self.axes[1], column, f"0 to {self.columns - 1}")
        if self.name == "A":
            return 4 * (row % 8) + column % 8 // 2, 2 * (column // 8) + row // 8, column % 2
        if self.name == "B":
            return 4 * column + row % 8 // 2, row // 8, row % 2
        return 4 * (row % 8) + column // 2, 2 * (row // 8) + column % 2, 0


A = Operand("A", "weights", 16, 16, ("row", "k"), 4, 2)
B = Operand("B", "activations", 16, 8, ("k", "batch"), 2, 2)
C = Operand("C", "sums", 16, 8, ("row", "batch"), 4, 1)
OPERANDS = {"A": A, "B": B, "C": C}


@dataclass(frozen=True)
class Piece:
    """Where the code of one weight lies in a record.

    Attributes:
        lane: that holds it.
        chunk, half, step, register, position: of the lane's 128 codes: 32 columns, 16 rows, one mma, one
            register of its A fragment, low or high half of that.
        words: the lane's linear words that hold bits of it (W4: one; W3: one or three).
        bits: lowest bit in each of ``words``.
        width: bits in each of ``words``.
    """

    lane: int
    chunk: int
    half: int
    step: int
    register: int
    position: int
    words: tuple[int, ...]
    bits: tuple[int, ...]
    width: tuple[int, ...]

    @property
    def vector(self) -> int:
        """The 16-byte vector of the (first) word: one load of the warp."""
        return self.words[0] // 4

    @property
    def byte(self) -> int:
        """Offset of the (first) word from the start of the record."""
        return 512 * self.vector + 16 * self.lane + 4 * (self.words[0] % 4)


def locate(format: str, row: int, column: int) -> Piece:
    """The place of a weight in its record.

    Args:
        format: "w4" or "w3".
        row: 0 to 31, of the row tile.
        column: 0 to 127, of the k tile.

    Raises:
        InputError: another format, or outside the tile.
    """
    require(format in ("w4", "w3"), "format", repr(format), "w4 or w3")
    require(0 <= row < ROWS, "row", row, f"0 to {ROWS - 1}")
    require(0 <= column < COLUMNS, "column", column, f"0 to {COLUMNS - 1}")
    half, low = divmod(row, 16)
    chunk, inside = divmod(column, 32)
    q, of_eight = divmod(inside, 8)
    step, of_four = divmod(of_eight, 4)
    register, position = 2 * (of_four // 2) + low // 8, of_four % 2
    lane = 4 * (low % 8) + q
    place: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    if format == "w4":
        place = (4 * chunk + 2 * half + step,), (4 * register + 16 * position,), (4,)
    else:
        pair = 4 * (2 * half + step) + register
        if pair < 15:
            place = (3 * chunk + pair // 5,), (3 * (pair % 5) + 16 * position,), (3,)
        else:  # the bit that each half-word of three words has left
            place = tuple(3 * chunk + word for word in range(3)), (15 + 16 * position,) * 3, (1, 1, 1)
    return Piece(lane, chunk, half, step, register, position, *place)
