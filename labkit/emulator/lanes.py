"""Where the lanes of one warp instruction went: sectors of global memory, banks of shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LANES = 32
BANKS = 32
_SECTOR = 32


@dataclass(frozen=True)
class Sample:
    """One recorded warp instruction.

    Args:
        file: file of the line.
        line: source line.
        kind: kind of access.
        buffer: what it touched.
        space: ``global`` or ``shared``.
        size: bytes a lane.
        block: block it ran in.
        warp: warp of the block.
        offsets: byte offset in the buffer of every lane; None for an inactive lane.
        phase: byte offset of the buffer from the sector or bank row it starts in.
    """

    file: str
    line: int
    kind: str
    buffer: str
    space: str
    size: int
    block: tuple[int, int, int]
    warp: int
    offsets: tuple[int | None, ...]
    phase: int = 0


@dataclass(frozen=True)
class LaneMap:
    """One warp instruction, lane by lane.

    Args:
        buffer: what it touched.
        kind: kind of access.
        size: bytes a lane.
        offsets: byte offset in the buffer of every lane; None for an inactive lane.
        sectors: the 32-byte sectors touched, counted from the buffer's first (global; else empty).
        banks: bank of every lane's first word (shared; else empty).
        wavefronts: passes through the banks (shared; else 0).
        block: block it ran in.
        warp: warp of the block.
        space: ``global`` or ``shared``.
    """

    buffer: str
    kind: str
    size: int
    offsets: list[int | None]
    sectors: list[int]
    banks: list[int | None]
    wavefronts: int
    block: tuple[int, int, int]
    warp: int
    space: str


def lane_map(sample: Sample) -> LaneMap:
    """Sectors or banks of a recorded instruction, by the hardware's rules."""
    sectors: list[int] = []
    banks: list[int | None] = []
    wavefronts = 0
    if sample.space == "global":
        touched: set[int] = set()
        for offset in sample.offsets:
            if offset is not None:
                start = offset + sample.phase
                touched.update(range(start // _SECTOR, (start + sample.size - 1) // _SECTOR + 1))
        sectors = sorted(touched)
    else:
        banks = [
            None if offset is None else (offset + sample.phase) // 4 % BANKS for offset in sample.offsets
        ]
        wavefronts = sum(_passes(sample))
    return LaneMap(
        buffer=sample.buffer,
        kind=sample.kind,
        size=sample.size,
        offsets=list(sample.offsets),
        sectors=sectors,
        banks=banks,
        wavefronts=wavefronts,
        block=sample.block,
        warp=sample.warp,
        space=sample.space,
    )


def _passes(sample: Sample) -> Iterator[int]:
    """Wavefronts of each phase: 8-byte accesses go by half warps, 16-byte ones by quarters."""
    phases = 1 if sample.size <= 4 else 2 if sample.size == 8 else 4
    lanes = LANES // phases
    for start in range(0, LANES, lanes):
        words: dict[int, set[int]] = {}
        for offset in sample.offsets[start : start + lanes]:
            if offset is None:
                continue
            first = offset + sample.phase
            for word in range(first // 4, (first + sample.size - 1) // 4 + 1):
                words.setdefault(word % BANKS, set()).add(word)
        yield max((len(distinct) for distinct in words.values()), default=0)
