"""One memory instruction of a warp: which bytes its lanes touch, and what that costs.

The counting rules are those of the emulator's trace (``labkit/emulator/runtime``), and a test compares them:

- global memory moves whole sectors of 32 bytes; four sectors make a cache line of 128;
- shared memory has 32 banks, each 4 bytes wide. A wavefront serves one word a bank; lanes that want the
  same word share it. Accesses of 8 bytes go by half warps, of 16 bytes by quarter warps.

Only where things are counts: there is no cache and no time here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.errors import require

LANES, SECTOR, CACHE_LINE = 32, 32, 128
BANKS, WORD = 32, 4
SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Wavefront:
    """What shared memory serves at once.

    Attributes:
        part: which half or quarter of the warp it belongs to, from 0.
        words: bank -> lanes that get the word it gives, ascending.
    """

    part: int
    words: dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class WarpAccess:
    """One instruction of up to 32 lanes.

    Attributes:
        offsets: byte offset of each lane from the start of the buffer, None for a lane that takes no part.
        size: bytes that a lane reads or writes at once: 1, 2, 4, 8 or 16.

    Buffers start at a multiple of 256 bytes, so that an offset says the sector and the bank.

    Raises:
        InputError: not 32 offsets, a negative one, no active lane, or another size.
    """

    offsets: tuple[int | None, ...]
    size: int

    def __post_init__(self) -> None:
        count = len(self.offsets)
        require(count == LANES, "offsets", f"{count} values", f"{LANES}, one for each lane")
        require(self.size in SIZES, "size", self.size, "1, 2, 4, 8 or 16 bytes")
        known = [offset for offset in self.offsets if offset is not None]
        require(bool(known), "offsets", "no active lane", "at least one offset")
        require(min(known) >= 0, "offsets", min(known), "0 or more bytes from the start of the buffer")

    @classmethod
    def strided(
        cls, element: int, stride: int = 1, base: int = 0, width: int = 1, lanes: int = LANES
    ) -> WarpAccess:
        """Lane i touches ``width`` neighbouring elements from element ``base + i * stride``.

        Args:
            element: bytes of one element: 1, 2, 4, 8 or 16.
            stride: elements from one lane to the next; 0 for all lanes at the same place.
            base: first element of lane 0.
            width: elements in one access (``char4`` has 4); element · width is at most 16 bytes.
            lanes: active lanes, the first ones.
        """
        require(1 <= lanes <= LANES, "lanes", lanes, f"1 to {LANES}")
        require(stride >= 0 and base >= 0, "stride, base", (stride, base), "0 or more elements")
        used = [(base + lane * stride) * element for lane in range(lanes)]
        return cls((*used, *[None] * (LANES - lanes)), element * width)

    @property
    def lanes(self) -> tuple[int, ...]:
        """The active lanes."""
        return tuple(lane for lane, offset in enumerate(self.offsets) if offset is not None)

    def _ranges(self) -> list[tuple[int, int, int]]:
        """(lane, first byte, byte after the last) of each active lane."""
        return [
            (lane, offset, offset + self.size)
            for lane, offset in enumerate(self.offsets)
            if offset is not None
        ]

    @property
    def misaligned(self) -> tuple[int, ...]:
        """Lanes whose address is no multiple of the access size: a GPU stops the kernel there."""
        return tuple(lane for lane, start, _ in self._ranges() if start % self.size)

    # --- global memory

    @property
    def sectors(self) -> tuple[int, ...]:
        """Numbers of the 32-byte sectors that are moved, ascending; sector s holds bytes 32s … 32s + 31."""
        ends = [(start // SECTOR, (end - 1) // SECTOR) for _, start, end in self._ranges()]
        return tuple(sorted({sector for low, high in ends for sector in range(low, high + 1)}))

    @property
    def cache_lines(self) -> tuple[int, ...]:
        """Numbers of the 128-byte lines that the sectors belong to, ascending."""
        return tuple(sorted({sector * SECTOR // CACHE_LINE for sector in self.sectors}))

    def used(self, sector: int) -> list[tuple[int, int, int]]:
        """(lane, first byte, byte after the last) inside a sector, 0 … 32, by lane."""
        low = sector * SECTOR
        cut = [(lane, max(start - low, 0), min(end - low, SECTOR)) for lane, start, end in self._ranges()]
        return [(lane, start, end) for lane, start, end in cut if start < end]

    @property
    def bytes_useful(self) -> int:
        """Different bytes that lanes asked for."""
        return len({byte for _, start, end in self._ranges() for byte in range(start, end)})

    @property
    def bytes_moved(self) -> int:
        """Bytes of all sectors touched."""
        return SECTOR * len(self.sectors)

    @property
    def efficiency(self) -> float:
        """Useful of moved bytes, above 0 to 1."""
        return self.bytes_useful / self.bytes_moved

    @property
    def fewest_sectors(self) -> int:
        """Sectors that the useful bytes would fill if they lay side by side."""
        return -(-self.bytes_useful // SECTOR)

    # --- shared memory

    @property
    def parts(self) -> int:
        """Turns that the access takes by its size: 1, or 2 half warps, or 4 quarter warps."""
        return max(1, self.size // 4)

    @property
    def wavefronts(self) -> tuple[Wavefront, ...]:
        """What shared memory serves one after another; bank conflicts make more of them."""
        out = []
        for part, banks in self._words_by_part():
            depth = max(len(words) for words in banks.values())
            for turn in range(depth):
                served = {
                    bank: tuple(sorted(words[word]))
                    for bank, words in sorted(banks.items())
                    for at, word in enumerate(words)
                    if at == turn
                }
                out.append(Wavefront(part, served))
        return tuple(out)

    def _words_by_part(self) -> list[tuple[int, dict[int, dict[int, list[int]]]]]:
        """(part, bank -> word -> lanes that want it), parts without an active lane left out."""
        out = []
        each = LANES // self.parts
        for part in range(self.parts):
            banks: dict[int, dict[int, list[int]]] = {}
            for lane, start, end in self._ranges():
                if lane // each != part:
                    continue
                for word in range(start // WORD, (end - 1) // WORD + 1):
                    banks.setdefault(word % BANKS, {}).setdefault(word, []).append(lane)
            if banks:
                out.append((part, banks))
        return out

    @property
    def ideal_wavefronts(self) -> int:
        """Wavefronts with no conflict: one for each part of the warp that has an active lane."""
        return len(self._words_by_part())

    @property
    def degree(self) -> int:
        """Different words wanted of the busiest bank in one part: 1 is free of conflicts."""
        return max(len(words) for _, banks in self._words_by_part() for words in banks.values())


def from_offsets(offsets: Sequence[int | None], size: int) -> WarpAccess:
    """An access from any sequence of offsets (shorter ones are filled with lanes that take no part).

    Args:
        offsets: byte offsets, None or -1 for a lane that takes no part.
    """
    given = [None if offset is None or offset < 0 else int(offset) for offset in offsets]
    return WarpAccess((*given, *[None] * (LANES - len(given))), size)
