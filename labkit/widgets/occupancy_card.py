"""Occupancy card: registers, shared memory, threads and grid → the warps that one SM holds, and that work.

The SM is drawn as its slots for warps, one colour a block. Rules and limits: :mod:`labkit.kernels.occupancy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit import device as devices
from labkit import plots
from labkit.kernels.occupancy import Occupancy, occupancy
from labkit.widgets import base

_WIDTH, _HEIGHT = 640, 300
_CELL, _GAP, _LEFT, _TOP = 34, 4, 24, 40
_ACROSS = 16
_SHADES = (plots.BLUE, plots.SKY)


@dataclass
class OccupancyCard(base.Controller):
    """One kernel on one SM.

    Attributes:
        registers: 32-bit registers a thread.
        threads: threads a block.
        shared_kib: shared memory a block, KiB.
        grid: blocks of the launch.
        card: key of ``data/devices.json``.
    """

    registers: int = 40
    threads: int = 256
    shared_kib: int = 0
    grid: int = 704
    card: str = "rtx3050-laptop"
    title: str = field(default="Occupancy: which limit is the smallest?", repr=False)

    def __post_init__(self) -> None:
        for control in self.controls():
            control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Control]:
        """Registers, threads, shared memory, grid, card."""
        cards = tuple((card.name, card.key) for card in devices.devices().values())
        grids = tuple(sorted({16, 64, 128, 256, 704, 1408, 2816, 5632, self.grid}))
        return (
            base.Slider("registers", "Registers a thread", 16, 128),
            base.Slider("threads", "Threads a block", values=(32, 64, 128, 256, 512, 1024), fmt="{:.0f}"),
            base.Slider("shared_kib", "Shared memory a block (KiB)", 0, 48),
            base.Slider("grid", "Blocks of the grid", values=grids, fmt="{:.0f}"),
            base.Choice("card", "Card", cards),
        )

    # ---- numbers ----

    @property
    def resident(self) -> Occupancy:
        """What fits an SM."""
        return occupancy(int(self.registers), int(self.shared_kib) * 1024, int(self.threads), self.card)

    @property
    def working_blocks(self) -> float:
        """Blocks an SM has to do at one time: as many as fit, or its share of a smaller grid."""
        return min(float(self.resident.blocks), self.grid / devices.get_device(self.card).sms)

    @property
    def working_warps(self) -> float:
        """Warps at work on an SM, on average over the SMs, while the grid lasts."""
        return self.working_blocks * -(-int(self.threads) // 32)

    # ---- words and picture ----

    def text(self) -> str:
        fits = self.resident
        head = (
            f"{fits.device.name}: {self.registers:.0f} registers × {self.threads:.0f} threads, "
            f"{self.shared_kib:.0f} KiB of shared memory. "
        )
        if not fits.blocks:
            return f"{head}No block fits."
        limits = ", ".join(f"{name} {blocks}" for name, blocks in fits.limits.items())
        waves = fits.waves(int(self.grid))
        return (
            f"{head}Blocks that each limit allows: {limits}. So {fits.blocks} blocks, {fits.warps} of "
            f"{fits.max_warps} warps ({fits.fraction:.0%}). {self.grid:.0f} blocks are {waves.waves:.2f} "
            f"waves; {self.working_warps:.1f} warps work on an SM."
        )

    def html(self) -> str:
        return self._svg()

    def _svg(self) -> str:
        fits = self.resident
        a_block = -(-int(self.threads) // 32)
        parts = [
            base.label(_LEFT, 24, f"{fits.device.name}: one SM, {fits.max_warps} slots for warps", bold=True)
        ]
        for slot in range(fits.max_warps):
            block = slot // a_block
            filled = block < fits.blocks
            idle = filled and block >= self.working_blocks
            color = plots.PALE if not filled else plots.GREY if idle else _SHADES[block % 2]
            at_x = _LEFT + (slot % _ACROSS) * (_CELL + _GAP)
            at_y = _TOP + slot // _ACROSS * (_CELL + _GAP)
            what = "empty" if not filled else f"block {block}" + (", no work left for it" if idle else "")
            parts.append(base.rect(at_x, at_y, _CELL, _CELL, color, title=f"slot {slot}: {what}"))
        y = _TOP + -(-fits.max_warps // _ACROSS) * (_CELL + _GAP) + 22
        for words in self._lines():
            parts.append(base.label(_LEFT, y, words))
            y += 21
        return base.svg(_WIDTH, max(_HEIGHT, y), parts, label=self.text())

    def _lines(self) -> list[str]:
        fits = self.resident
        limits = ", ".join(f"{name} {blocks}" for name, blocks in fits.limits.items())
        if not fits.blocks:
            return [f"blocks by limit: {limits}", "no block fits"]
        waves = fits.waves(int(self.grid))
        return [
            f"blocks by limit: {limits}",
            f"fits: {fits.blocks} blocks = {fits.warps} warps ({fits.fraction:.0%}), "
            f"limited by {' and '.join(fits.limited_by)}",
            f"grid: {self.grid:.0f} blocks = {waves.waves:.2f} waves; {self.working_warps:.1f} warps at work",
            "blue: a block at work; grey: fits, but the grid has no block for it; pale: empty",
        ]
