"""Theoretical occupancy: how many blocks of a kernel fit an SM, and what stops more.

The rules are those of NVIDIA's ``cuda_occupancy.h`` for compute capability 8.0 and later; the
limits of each device, with their source, are in ``data/devices.json``. Occupancy says how much
latency can be hidden; it is no measure of speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.device import Device, get_device
from labkit.errors import require

WARP = 32


@dataclass(frozen=True)
class Waves:
    """A grid shared out over all SMs of a device.

    Attributes:
        grid_blocks: blocks of the grid.
        slots: blocks that run at one time on the whole device.
        waves: ``grid_blocks / slots``.
        tail_blocks: blocks of the last wave, 0 when it is full.
    """

    grid_blocks: int
    slots: int

    @property
    def waves(self) -> float:
        return self.grid_blocks / self.slots

    @property
    def tail_blocks(self) -> int:
        return self.grid_blocks % self.slots

    @property
    def rounds(self) -> int:
        """Waves, the last one counted whole."""
        return -(-self.grid_blocks // self.slots)

    @property
    def utilisation(self) -> float:
        """Share of the slots that hold a block, over all rounds; 1 without a tail."""
        return self.grid_blocks / (self.rounds * self.slots)


@dataclass(frozen=True)
class Occupancy:
    """Blocks of one kernel on one SM.

    Attributes:
        device: whose limits.
        threads: threads a block.
        blocks: blocks an SM holds; 0 when the kernel cannot be launched.
        limits: blocks that each resource alone would allow: "warps", "blocks", "registers",
            "shared memory". A resource that is not used at all is missing.
        limited_by: the resources that allow no more than ``blocks``.
    """

    device: Device
    threads: int
    blocks: int
    limits: Mapping[str, int]
    limited_by: tuple[str, ...]

    @property
    def warps(self) -> int:
        """Warps an SM holds."""
        return self.blocks * -(-self.threads // WARP)

    @property
    def max_warps(self) -> int:
        """Warps that an SM of this device can hold."""
        return self.device.warps_per_sm

    @property
    def fraction(self) -> float:
        """Occupancy: warps of the most possible, 0 to 1."""
        return self.warps / self.max_warps

    def waves(self, grid_blocks: int) -> Waves:
        """How ``grid_blocks`` blocks fill the device, over and over.

        Raises:
            InputError: no block fits, or the grid is empty.
        """
        require(self.blocks > 0, "occupancy", "0 blocks an SM", "a kernel that fits the device")
        require(grid_blocks >= 1, "grid_blocks", grid_blocks, "at least 1")
        return Waves(int(grid_blocks), self.blocks * self.device.sms)

    def __str__(self) -> str:
        return (
            f"{self.device.name}: {self.blocks} blocks an SM, {self.warps} of {self.max_warps} warps "
            f"({self.fraction:.0%}), limited by {' and '.join(self.limited_by)}"
        )


def occupancy(
    registers: int, shared_bytes: int, threads: int, device: str | Device = "rtx3050-laptop"
) -> Occupancy:
    """Blocks an SM holds of a kernel with these needs.

    Args:
        registers: 32-bit registers a thread.
        shared_bytes: shared memory a block, static and dynamic together, bytes.
        threads: threads a block, 1 to 1024.
        device: key of ``data/devices.json``, or a Device.

    Raises:
        InputError: an unknown device, a negative need, or a block of impossible size.
    """
    card = get_device(device) if isinstance(device, str) else device
    require(registers >= 0, "registers", registers, "at least 0")
    require(shared_bytes >= 0, "shared_bytes", shared_bytes, "at least 0 bytes")
    most = card.threads_per_block
    require(1 <= threads <= most, "threads", threads, f"1 to {most} threads a block")
    warps = -(-threads // WARP)
    limits = {"warps": card.warps_per_sm // warps, "blocks": card.blocks_per_sm}
    if registers:
        limits["registers"] = _by_registers(registers, warps, card)
    if shared_bytes:
        limits["shared memory"] = _by_shared(shared_bytes, card)
    blocks = min(limits.values())
    return Occupancy(card, threads, blocks, limits, tuple(name for name, n in limits.items() if n == blocks))


def _by_registers(registers: int, warps: int, card: Device) -> int:
    a_warp = _round_up(registers * WARP, card.register_granule)
    # The launch check counts as if every part of the SM got as many warps as the fullest one.
    if registers > card.registers_per_thread:
        return 0
    if a_warp * _round_up(warps, card.warp_granule) > card.registers_per_sm:
        return 0
    # A warp's registers lie in one part of the SM, so what is left over in each part is lost.
    warps_a_part = card.registers_per_sm // card.warp_granule // a_warp
    return warps_a_part * card.warp_granule // warps


def _by_shared(shared_bytes: int, card: Device) -> int:
    if shared_bytes > card.shared_kib_per_block * 1024:
        return 0
    a_block = _round_up(shared_bytes + card.shared_reserved_per_block, card.shared_granule)
    return card.shared_kib_per_sm * 1024 // a_block


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
