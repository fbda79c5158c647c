"""Shapes of the launches. Only :func:`slices` touches the result; everything else is speed.

The choices come from sweeps on an H200 (results/evidence/tensor_core.md); they are written for any number
of multiprocessors. On an SM86 card nothing was timed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from labkit.quant.tiles import TILE_COLUMNS

MAX_SLICES = 8
SLICED_TILES = 1024
"""K is cut in slices as long as row tiles times slices stay within this."""

NARROW_ROWS = 16
"""Most rows of x of tensor_core_narrow."""

BAND_ROWS = 64
"""Most rows of x that share a block of tensor_core_wide."""

DENSE_FROM = 256
"""From this many rows on, dequantise and let cuBLAS multiply."""

REDUCE_THREADS = 128
DENSE_WARPS = 4

_RACK_BYTES = 1024  # of a k tile and an n tile


@dataclass(frozen=True, slots=True)
class Device:
    """What a plan has to know of a GPU.

    Attributes:
        multiprocessors: how many.
        shared_bytes: most shared memory of a block, in bytes.
    """

    multiprocessors: int
    shared_bytes: int


SM86 = Device(16, 99 << 10)
"""RTX 3050 Laptop; also what the emulator is planned for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch of the product.

    Attributes:
        entry: kernel, "tensor_core_narrow" or "tensor_core_wide".
        defines: its constants, beside those of the weight.
        grid: blocks.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        planes: planes of partial sums that a second pass adds up; 0 when the first writes the result.
        round: turns between two additions (tensor_core_narrow).
    """

    entry: str
    defines: tuple[tuple[str, int], ...]
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    planes: int
    round: int = 1

    @property
    def constants(self) -> Mapping[str, int]:
        """The defines by name."""
        return dict(self.defines)


def slices(row_tiles: int, k_tiles: int) -> int:
    """Slices of K, whose sums are added in ascending order: a function of the weight's shape alone.

    Args:
        row_tiles: of 32 output rows.
        k_tiles: of 128 columns.
    """
    found = 1
    while found < MAX_SLICES and 2 * found * row_tiles <= SLICED_TILES and 2 * found <= k_tiles:
        found *= 2
    return found


@functools.lru_cache(maxsize=4096)
def plan(m: int, row_tiles: int, k_tiles: int, record_bytes: int, heavy: bool, device: Device) -> Plan:
    """The launch for M rows of x.

    Args:
        m: rows of x, >= 1.
        row_tiles, k_tiles, record_bytes: of the weight's tiles.
        heavy: small groups or offsets, which take more registers.
        device: where it runs.
    """
    parts = slices(row_tiles, k_tiles)
    if m <= NARROW_ROWS:
        return _narrow(m, row_tiles, k_tiles, record_bytes, parts, heavy, device)
    return _wide(m, row_tiles, record_bytes, parts, heavy, device)


def _narrow(
    m: int, row_tiles: int, k_tiles: int, record_bytes: int, parts: int, heavy: bool, device: Device
) -> Plan:
    n_tiles = -(-m // 8)
    # A long K with few row tiles is spread over blocks; its second pass costs less than the idle chip.
    split = parts > 1 and k_tiles > 32 and row_tiles < device.multiprocessors
    blocks = row_tiles * (parts if split else 1)
    tiles = -(-k_tiles // parts) if split else k_tiles
    k_warps = 4 if n_tiles == 2 and tiles > 16 else 2
    most = 16 if n_tiles == 1 and not heavy else 8  # 16 leave a thread 128 registers
    if n_tiles == 2 and blocks > device.multiprocessors:
        most = 4  # more than one block a multiprocessor has no room for 8
    most = min(most, tiles)

    def wanted(warps: int) -> float:
        """Warps on the whole chip below which a row tile gets twice as many."""
        if n_tiles == 2:
            return device.multiprocessors * 5
        return device.multiprocessors * (12 if warps == 2 else 8.5)

    def fits(warps: int, stages: int) -> bool:
        """Whether the stages and a rack of one turn fit in shared memory."""
        return warps * (stages * record_bytes + n_tiles * _RACK_BYTES) <= device.shared_bytes

    k_warps = max(2, min(k_warps, most))
    while 2 * k_warps <= most and blocks * k_warps < wanted(k_warps) and fits(2 * k_warps, 3):
        k_warps *= 2
    turns = -(-tiles // k_warps)
    # Room for as many blocks on a multiprocessor as it gets, as far as registers allow.
    resident = max(1, min(-(-blocks // device.multiprocessors), (24 if n_tiles == 1 else 18) // k_warps))
    room = device.shared_bytes // resident

    def total(stages: int, round_turns: int) -> int:
        rack = min(round_turns * k_warps, tiles) * n_tiles * _RACK_BYTES
        return k_warps * stages * record_bytes + rack

    stages = 4 if turns <= 8 and total(4, turns) <= room else 3
    most_turns = turns if turns <= 10 else 4
    while most_turns > 1 and total(stages, most_turns) > room:
        most_turns -= 1
    round_turns = -(-turns // -(-turns // most_turns))  # rounds of the same length
    defines = (("N_TILES", n_tiles), ("K_WARPS", k_warps), ("STAGES", stages))
    return Plan(
        "tensor_core_narrow",
        defines,
        (row_tiles, parts if split else 1, 1),
        32 * k_warps,
        total(stages, round_turns),
        parts if split else 0,
        round_turns,
    )


def _wide(m: int, row_tiles: int, record_bytes: int, parts: int, heavy: bool, device: Device) -> Plan:
    share = row_tiles * parts / device.multiprocessors  # row tiles of a multiprocessor
    turn, stages = 1, 3
    if m > BAND_ROWS and not heavy:
        n_tiles, column_warps, block_tiles = 8, 1, 4  # many bands fill the chip: a record is decoded once
    elif m <= BAND_ROWS // 2:
        n_tiles, column_warps, block_tiles = 4, 1, 4
        if share <= 8:
            turn = 2
        elif share <= 16:
            block_tiles = _up(share / 2)
    elif 6 < share <= 8 and not heavy:
        n_tiles, column_warps, block_tiles = 8, 1, 4
    elif share <= 4 and not heavy:
        n_tiles, column_warps, block_tiles, turn, stages = 4, 2, 2, 2, 2
    else:
        n_tiles, column_warps, block_tiles = 4, 2, 3
    block_tiles = max(1, min(block_tiles, row_tiles))
    band = 8 * n_tiles * column_warps
    tile_bytes = band * TILE_COLUMNS * 2 + block_tiles * record_bytes
    if stages * turn * tile_bytes > device.shared_bytes:
        turn = 1
    while stages > 2 and stages * turn * tile_bytes > device.shared_bytes:
        stages -= 1
    defines = (
        ("N_TILES", n_tiles),
        ("COLUMN_WARPS", column_warps),
        ("BLOCK_TILES", block_tiles),
        ("STAGES", stages),
        ("TURN", turn),
    )
    return Plan(
        "tensor_core_wide",
        defines,
        (-(-row_tiles // block_tiles), -(-m // band), parts),
        32 * block_tiles * column_warps,
        stages * turn * tile_bytes,
        parts if parts > 1 else 0,
    )


def _up(value: float) -> int:
    return -int(-value // 1)
