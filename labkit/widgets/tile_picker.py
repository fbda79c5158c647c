"""Tile picker: what a tile of the W4 or W3 GEMM costs in shared memory, registers and loads, and what
that leaves of a card's occupancy.

The tile is that of ``gemm_tiled_w4.cu`` and ``gemm_tiled_w3.cu``, with every size free: a block makes
``bm`` × ``bn`` outputs, ``bk`` columns of K at a time, from ``shared_a[bm][bk]`` and
``shared_b[bk][bn + pad]`` (half). Registers are the compiler's where the variant exists, else an
estimate that says so. Bank conflicts are counted by the emulator's rule
(:mod:`labkit.widgets.warp_access`), source-level: as the kernel text accesses memory, 2 bytes at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes

from labkit import device as devices
from labkit import plots
from labkit.errors import InputError, require
from labkit.kernels.occupancy import Occupancy, occupancy
from labkit.widgets import base, tile_picture
from labkit.widgets.warp_access import WarpAccess, from_offsets

SEED_TILE = (32, 64, 32, 256)
"""bm, bn, bk and threads of the compiled kernels."""

_HALF, _SECTOR, _WARP, _GROUP = 2, 32, 32, 128
_STATIC_LIMIT = 48 * 1024
_BITS = {"w4": 4, "w3": 3}

BESIDE = 26
"""Registers that the compiled seed tile takes beside its accumulators and operands (40 − 8 − 6): addresses,
loop, unpacking. The estimate for other tiles takes the same number."""


@dataclass(frozen=True)
class Registers:
    """Registers a thread, and whether a compiler gave them.

    Attributes:
        count: 32-bit registers a thread.
        origin: such as "compiled, NVRTC 12.9 for sm_86" or "estimate: 8 accumulators + …".
        compiled: False for an estimate.
    """

    count: int
    origin: str
    compiled: bool


@functools.lru_cache(maxsize=64)
def compiled_registers(tile: tuple[int, int, int, int], pad: int, format: str, card: str) -> Registers | None:
    """The compiler's count where labkit has this variant; None where it has not, or no NVRTC is here."""
    if tile != SEED_TILE:
        return None
    from labkit.kernels import resources
    from labkit.kernels.source import KernelSource

    name = f"gemm_tiled_{format}"
    try:
        source = KernelSource(f"{name}.cu", name, {"PAD": pad})
        found = resources.usage(source, devices.get_device(card).capability)
    except InputError:
        return None
    return Registers(found.registers, f"compiled, {found.compiler} for {found.arch}", True)


@dataclass
class TilePicker(base.Controller):
    """One tile of the GEMM on one card.

    Attributes:
        bm, bn, bk: rows of x, output columns and columns of K of a tile.
        threads: threads a block.
        pad: unused cells at the end of each row of ``shared_b``.
        format: weight format, "w4" or "w3".
        card: key of ``data/devices.json``.
        compiled: gives the compiler's registers of a variant, or None.
    """

    bm: int = 32
    bn: int = 64
    bk: int = 32
    threads: int = 256
    pad: int = 1
    format: str = "w4"
    card: str = "rtx3050-laptop"
    compiled: Callable[..., Registers | None] = field(default=compiled_registers, repr=False)
    title: str = field(default="Tile picker: what a tile costs, and what still fits an SM", repr=False)

    def __post_init__(self) -> None:
        for control in self.controls():
            control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Control]:
        """Tile sizes, threads, padding, format, card."""
        cards = tuple((card.name, card.key) for card in devices.devices().values())
        return (
            base.Slider("bm", "BM (rows of x)", values=(16, 32, 64, 128), fmt="{:.0f}"),
            base.Slider("bn", "BN (output columns)", values=(32, 64, 128, 256), fmt="{:.0f}"),
            base.Slider("bk", "BK (columns of K)", values=(16, 32, 64, 128, 256), fmt="{:.0f}"),
            base.Slider("threads", "Threads a block", values=(64, 128, 256, 512, 1024), fmt="{:.0f}"),
            base.Slider("pad", "Padding of shared_b", 0, 8),
            base.Choice("format", "Weight format", (("W4", "w4"), ("W3", "w3"))),
            base.Choice("card", "Card", cards),
        )

    # ---- one thread ----

    @property
    def problem(self) -> str:
        """Why this tile cannot be built at all; "" when it can."""
        if self.bm * self.bn < self.threads:
            outputs = f"{self.bm}×{self.bn} = {self.bm * self.bn} outputs"
            return f"{outputs} for {self.threads} threads: some would have none"
        most = devices.get_device(self.card).threads_per_block
        return f"{self.threads} threads, and a block has at most {most}" if self.threads > most else ""

    @property
    def thread_tile(self) -> tuple[int, int]:
        """(rows, columns) of outputs a thread holds: as square as it gets, and wider than high."""
        require(not self.problem, "tile", self.problem, "at least one output for each thread")
        outputs = self.bm * self.bn // self.threads
        pairs = [
            (rows, outputs // rows)
            for rows in range(1, self.bm + 1)
            if outputs % rows == 0 and self.bm % rows == 0 and self.bn % (outputs // rows) == 0
        ]
        return min(pairs, key=lambda pair: (pair[0] + pair[1], pair[0]))

    @property
    def threads_along_n(self) -> int:
        """Threads that lie side by side along the columns of the tile."""
        return self.bn // self.thread_tile[1]

    @property
    def outputs_per_thread(self) -> int:
        """Accumulators of a thread."""
        rows, columns = self.thread_tile
        return rows * columns

    @property
    def loads_per_fma(self) -> float:
        """Elements read from shared memory for one multiply-add."""
        rows, columns = self.thread_tile
        return (rows + columns) / (rows * columns)

    # ---- memory ----

    @property
    def shared_bytes(self) -> int:
        """Shared memory a block: both tiles, in half."""
        return _HALF * (self.bm * self.bk + self.bk * (self.bn + self.pad))

    @property
    def bytes_per_flop(self) -> float:
        """Global bytes a full tile asks for, x and weights (with the scales of groups of 128), per FLOP."""
        weights = self.bn * devices.bytes_per_weight(_BITS[self.format], _GROUP)
        return (_HALF * self.bm + weights) / (2 * self.bm * self.bn)

    @property
    def sector_use(self) -> float:
        """Share of the 32-byte sectors that a row of packed weights uses in one K step, on average."""
        row = self.bk * _BITS[self.format] // 8
        starts = range(0, row * _SECTOR, row)
        sectors = sum((start + row - 1) // _SECTOR - start // _SECTOR + 1 for start in starts)
        return row * _SECTOR / (_SECTOR * sectors)

    # ---- bank conflicts: one warp instruction of each kind ----

    def store_b(self) -> WarpAccess:
        """Warp 0 stores unpacked weights: as in the kernels, lanes lie along K first, then along n."""
        columns = 2 if self.format == "w4" else 8
        along_k = min(self.bk // columns, _WARP)
        offsets = []
        for lane in range(_WARP):
            k, n = columns * (lane % along_k), lane // along_k
            offsets.append(_HALF * (k * (self.bn + self.pad) + n))
        return from_offsets(offsets, _HALF)

    def read_a(self) -> WarpAccess:
        """Warp 0 reads its first row of x at one k."""
        rows = self.thread_tile[0]
        lanes = [rows * (lane // self.threads_along_n) for lane in range(_WARP)]
        return from_offsets([_HALF * self.bk * row for row in lanes], _HALF)

    def read_b(self) -> WarpAccess:
        """Warp 0 reads its first column of the weights at one k."""
        columns = self.thread_tile[1]
        lanes = [columns * (lane % self.threads_along_n) for lane in range(_WARP)]
        return from_offsets([_HALF * column for column in lanes], _HALF)

    def accesses(self) -> dict[str, WarpAccess]:
        """What is done → the access, in the order of the kernel."""
        return {
            "store to shared_b": self.store_b(),
            "read of shared_a": self.read_a(),
            "read of shared_b": self.read_b(),
        }

    # ---- the card ----

    @property
    def registers(self) -> Registers:
        """The compiler's where the variant exists, else an estimate."""
        tile = (int(self.bm), int(self.bn), int(self.bk), int(self.threads))
        found = self.compiled(tile, int(self.pad), self.format, self.card)
        if found is not None:
            return found
        rows, columns = self.thread_tile
        accumulators, operands = rows * columns, rows + columns
        origin = f"estimate: {accumulators} accumulators + {operands} operands + {BESIDE} beside"
        return Registers(accumulators + operands + BESIDE, origin, False)

    @property
    def resident(self) -> Occupancy:
        """Blocks an SM of the card holds, and what stops more."""
        return occupancy(self.registers.count, self.shared_bytes, int(self.threads), self.card)

    def why_not(self) -> str:
        """Why no block of this tile runs on the card; "" when one does."""
        if self.problem:
            return self.problem
        if self.resident.blocks:
            return ""
        card = devices.get_device(self.card)
        most = card.shared_kib_per_block
        if self.shared_bytes > most * 1024:
            wanted = f"{self.shared_bytes / 1024:.1f} KiB of shared memory"
            return f"{wanted}, and a block on {card.name} has at most {most}"
        registers = self.registers
        return (
            f"{registers.count} registers ({registers.origin}) × {self.threads} threads; at most "
            f"{card.registers_per_thread} a thread and {card.registers_per_sm} an SM"
        )

    # ---- words and pictures ----

    def facts(self) -> list[tuple[str, str]]:
        """(name, value) of every figure, in words."""
        if self.problem:
            return [("not possible", self.problem)]
        rows, columns = self.thread_tile
        registers, resident = self.registers, self.resident
        lines = [
            ("outputs a thread", f"{self.outputs_per_thread} ({rows} × {columns})"),
            ("shared loads per FMA", f"{self.loads_per_fma:.3g}"),
            ("global bytes per FLOP", f"{self.bytes_per_flop:.3g}"),
            ("weight sectors used", f"{100 * self.sector_use:.0f} %"),
            ("shared memory", f"{self.shared_bytes:,} B{self._opt_in()}"),
            ("registers", f"{registers.count}{'' if registers.compiled else ' (estimate)'}"),
        ]
        if self.why_not():
            return [*lines, ("does not fit", self.why_not())]
        warps = f"{resident.warps} of {resident.max_warps} warps ({resident.fraction:.0%})"
        return [
            *lines,
            ("blocks an SM", f"{resident.blocks}, {warps}"),
            ("limited by", " and ".join(resident.limited_by)),
        ]

    def _opt_in(self) -> str:
        return " (by opt-in)" if self.shared_bytes > _STATIC_LIMIT else ""

    def text(self) -> str:
        card = devices.get_device(self.card).name
        head = (
            f"Tile {self.bm}×{self.bn}×{self.bk} (BM×BN×BK), {self.threads} threads, padding {self.pad}, "
            f"{self.format.upper()}, {card}: "
        )
        lines = "; ".join(f"{name} {value}" for name, value in self.facts())
        if self.problem:
            return f"{head}{lines}."
        parts = [f"{what} {len(access.wavefronts)}" for what, access in self.accesses().items()]
        origin = self.registers.origin
        return f"{head}{lines}. Registers: {origin}. Wavefronts a warp (source-level): {', '.join(parts)}."

    def html(self) -> str:
        width = tile_picture.WIDTH
        return f'<div style="max-width:{width}px;background:white;color:{plots.INK}">{self.picture()}</div>'

    def picture(self) -> str:
        """SVG: the tile and one thread's share, the figures, and the banks of three accesses."""
        return tile_picture.svg(self)


def draw(ax: Axes, state: TilePicker) -> None:
    """The tile as a static figure: both shared tiles, the outputs, and one thread's share.

    Raises:
        InputError: the tile is not possible.
    """
    require(not state.problem, "tile", state.problem, "at least one output for each thread")
    tile_picture.draw_tile(ax, state)


def draw_banks(ax: Axes, state: TilePicker) -> None:
    """Words that one warp wants of each of the 32 banks, one row an access.

    Raises:
        InputError: the tile is not possible.
    """
    require(not state.problem, "tile", state.problem, "at least one output for each thread")
    tile_picture.draw_banks(ax, state)
