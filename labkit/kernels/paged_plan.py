"""How attention over paged keys and values is shared out over blocks, and the scratch that this takes.

The order of every sum is fixed by the tokens' positions (paged_attention.cu); a plan is a matter of speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import require

TURN = 128
"""Tokens that a block takes at a time, a tile of TURN / WARPS a warp."""

WARPS = 4
"""Warps of a block."""

FINE_TURNS, COARSE = 16, 4
"""The first turns are a split each; beyond them a split is so many turns."""

MOST_TILE_BYTES = 32 << 20
"""Of partial results where a block has more than eight rows, as in a prefill: beyond, one block walks."""

_BLOCKS_A_MULTIPROCESSOR = 2
_NOMINAL_MULTIPROCESSORS = 16  # what the emulator is planned for: an RTX 3050 Laptop


@dataclass(frozen=True, slots=True)
class Plan:
    """How the turns of a row are shared out over blocks: a matter of speed alone.

    Attributes:
        fine: turns of the first block, and of the others among the first :data:`FINE_TURNS` turns; beyond
            those whole :data:`COARSE`\\ s. 0: one block walks over all of a row.
        coarse: turns of a block beyond max(fine, FINE_TURNS), whole :data:`COARSE`\\ s.

    Raises:
        InputError: other numbers.
    """

    fine: int = 0
    coarse: int = 0

    def __post_init__(self) -> None:
        whole = self.fine <= FINE_TURNS or self.fine % COARSE == 0
        fits = self.fine >= 1 and whole and self.coarse >= COARSE and self.coarse % COARSE == 0
        text = (
            f"fine 1 to {FINE_TURNS} or a multiple of {COARSE}, and coarse a multiple of {COARSE}; or both 0"
        )
        require(fits or (self.fine, self.coarse) == (0, 0), "planned", (self.fine, self.coarse), text)

    def ranges(self, max_context: int) -> int:
        """Blocks of one row and head."""
        turns = -(-max_context // TURN)
        if not self.fine:
            return 1
        fine_end = max(self.fine, FINE_TURNS)
        if turns <= fine_end:
            return -(-turns // self.fine)
        return -(-fine_end // self.fine) + -(-(turns - fine_end) // self.coarse)


WALK = Plan()
"""One block walks over all of a row."""


def splits(max_context: int) -> int:
    """Partial results of one row and head at most."""
    turns = -(-max_context // TURN)
    return min(turns, FINE_TURNS) + -(-max(turns - FINE_TURNS, 0) // COARSE)


def plan(
    units: int, max_context: int, multiprocessors: int = _NOMINAL_MULTIPROCESSORS, *, int8: bool = False
) -> Plan:
    """The launch's choice, from sweeps on an H200.

    Float keys and values saturate the memory from one walking block a multiprocessor on; INT8 needs two.

    Args:
        units: tiles (or rows) times key/value heads.
        max_context: most tokens that a row attends to.
        multiprocessors: of the device.
        int8: the keys and values are.
    """
    slots = _BLOCKS_A_MULTIPROCESSOR * multiprocessors
    turns = -(-max_context // TURN)
    full = 0.9 * (slots if int8 else multiprocessors)
    if turns == 1 or full <= units <= slots or units >= 4 * slots:
        return WALK
    # A wave of blocks that are as long as can be; above one wave, several, so that the last costs little.
    wanted = slots // units if units < slots else -(-4 * slots // units)
    if wanted <= 1:
        return WALK
    each = -(-turns // wanted)
    if units >= 8 and turns > FINE_TURNS:
        each = max(each, COARSE)  # more partial results would cost more than the idle blocks
    coarse = -(-each // COARSE) * COARSE
    return Plan(each if each <= FINE_TURNS else coarse, coarse)


@dataclass(frozen=True)
class Scratch:
    """Partial results of one launch at a time; layers that follow each other on a stream share it.

    Attributes:
        part: float32, each split's output.
        part_ml: float32, each split's maximum and sum.
        tickets: int32: arrivals, zero between launches.
        planned: the launch's choice that it has room for.
    """

    part: Tensor
    part_ml: Tensor
    tickets: Tensor
    planned: Plan

    @classmethod
    def new(
        cls,
        batch: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        capacity: int,
        device: Any,
        *,
        queries: int = 1,
        int8: bool = False,
        planned: Plan | None = None,
    ) -> Scratch:
        """For ``batch`` rows (or tiles of ``queries`` queries) that attend to ``capacity`` tokens at most.

        ``int8`` says that keys and values are: the plan for them is another. Unless it is given, a plan
        whose partial results would grow with the chunk and the context alike, beyond
        :data:`MOST_TILE_BYTES`, gives way to :data:`WALK`.
        """
        units, rows = batch * kv_heads, group * queries
        chosen = planned
        if chosen is None:
            chosen = plan(max(units, 1), capacity, multiprocessors_of(torch.device(device)), int8=int8)
            if rows > 8 and partial_bytes(units, rows, head_dim, capacity) > MOST_TILE_BYTES:
                chosen = WALK
        part, part_ml = _cells(units, rows, head_dim, capacity, chosen)
        return cls(
            torch.empty(max(4, part), dtype=torch.float32, device=device),
            torch.empty(max(4, part_ml), dtype=torch.float32, device=device),
            torch.zeros(units, dtype=torch.int32, device=device),
            chosen,
        )


def partial_bytes(units: int, rows: int, head_dim: int, capacity: int) -> int:
    """Bytes of the partial results of ``units`` tiles (or rows) times key/value heads, if they are split.

    ``rows`` are pairs of a query and a head; a context of one split leaves none.
    """
    most = Plan(1, COARSE)
    return 4 * sum(_cells(units, rows, head_dim, capacity, most))


def _cells(units: int, rows: int, head_dim: int, capacity: int, chosen: Plan) -> tuple[int, int]:
    if chosen.ranges(capacity) == 1:
        return 0, 0
    tiles, items = -(-rows // 8), -(-head_dim // 64) * 128
    count = units * splits(capacity)
    return count * tiles * items * 4, count * 2 * 8 * tiles


def multiprocessors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return _NOMINAL_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_scratch(
    scratch: Scratch, units: int, rows: int, head_dim: int, capacity: int, chosen: Plan
) -> None:
    part, part_ml = _cells(units, rows, head_dim, capacity, chosen)
    held = (scratch.part.numel(), scratch.part_ml.numel(), scratch.tickets.numel())
    fits = held[0] >= part and held[1] >= part_ml and held[2] >= units
    require(fits, "scratch", f"room for {held}", f"at least {(part, part_ml, units)}", "Scratch.new(…)")
