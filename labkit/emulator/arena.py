"""One piece of memory that holds all buffers of a launch, far apart and aligned as on a GPU.

Traced and isolated launches work on copies: an access past a buffer's end must not land in the next
one, sector counts must not depend on where numpy put an array, and a wild write must not reach the
caller's memory.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.emulator.arguments import Buffer

PAGE = 4096
WIDE = 16 * PAGE
"""Spare memory around every buffer of a traced launch, which goes on after an access out of bounds."""
_ALIGNED = 256  # cudaMalloc's promise
_POISON = 0xFF
_NEAR = 1 << 32  # bytes; an address further off belongs to no buffer


@dataclass(frozen=True)
class Region:
    """A stretch of the arena: one buffer, or several that share memory.

    Args:
        name: parameter; several are joined with ``/``.
        source: address of its first byte in the caller's memory.
        offset: where it starts in the arena.
        size: bytes.
        writable: whether any of its buffers is.
        itemsize: bytes an element.
    """

    name: str
    source: int
    offset: int
    size: int
    writable: bool
    itemsize: int


@dataclass(frozen=True)
class Layout:
    """Where everything lies.

    Args:
        regions: stretches in ascending order.
        places: for every buffer (index of its region, byte offset in it).
        size: bytes of the arena.
    """

    regions: tuple[Region, ...]
    places: tuple[tuple[int, int], ...]
    size: int

    @property
    def offsets(self) -> list[int]:
        """Offset of every region."""
        return [region.offset for region in self.regions]

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """(offset, bytes) of the whole pages that belong to no region."""
        gaps, end = [], 0
        for region in self.regions:
            start = region.offset // PAGE * PAGE
            gaps.append((end, start - end))
            end = -(-(region.offset + max(region.size, 1)) // PAGE) * PAGE
        gaps.append((end, self.size - end))
        return [gap for gap in gaps if gap[1] > 0]


def arrange(buffers: Sequence[Buffer], gap: int = PAGE) -> Layout:
    """A place for every buffer: at the end of a page, so that the page after it catches an overrun.

    Args:
        buffers: the launch's buffers; those that share bytes get one region.
        gap: bytes of spare memory before, between and after them, whole pages.
    """
    groups = _overlapping(buffers)
    regions: list[Region] = []
    places = [(0, 0)] * len(buffers)
    position = gap
    for group in groups:
        low = min(buffers[i].address for i in group)
        high = max(buffers[i].address + buffers[i].size for i in group)
        first = min(group, key=lambda i: buffers[i].address)
        size, phase = high - low, buffers[first].phase
        room = -(-(phase + size) // _ALIGNED) * _ALIGNED
        offset = -(-(position + room) // PAGE) * PAGE - room + phase
        for i in group:
            places[i] = (len(regions), buffers[i].address - low)
        names = dict.fromkeys(buffers[i].name for i in sorted(group))
        writable = any(buffers[i].writable for i in group)
        region = Region("/".join(names), low, offset, size, writable, buffers[first].itemsize)
        regions.append(region)
        position = offset + size + gap
    return Layout(tuple(regions), tuple(places), -(-position // PAGE) * PAGE + PAGE)


def _overlapping(buffers: Sequence[Buffer]) -> list[list[int]]:
    """Indices of buffers, those that share bytes together."""
    groups: list[list[int]] = []
    end = -1
    for i in sorted(range(len(buffers)), key=lambda i: (buffers[i].address, -buffers[i].size)):
        buffer = buffers[i]
        if buffer.size and groups and buffer.address < end:
            groups[-1].append(i)
            end = max(end, buffer.address + buffer.size)
        elif buffer.size:
            groups.append([i])
            end = buffer.address + buffer.size
    groups += [[i] for i, buffer in enumerate(buffers) if not buffer.size]
    return groups


def address_of(memory: mmap.mmap) -> int:
    """Address of a mapping in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def fill(layout: Layout, base: int) -> None:
    """Copy the caller's buffers into the arena at ``base`` and poison what lies around them."""
    for region in layout.regions:
        ctypes.memset(base + region.offset - _ALIGNED, _POISON, _ALIGNED)
        ctypes.memset(base + region.offset + region.size, _POISON, _ALIGNED)
        if region.size:
            ctypes.memmove(base + region.offset, region.source, region.size)


def overrun(layout: Layout, base: int) -> tuple[Region, int] | None:
    """The first region beside which something was written, and the byte offset from its start."""
    clean = bytes([_POISON]) * _ALIGNED
    for region in layout.regions:
        for start in (region.size, -_ALIGNED):
            around = ctypes.string_at(base + region.offset + start, _ALIGNED)
            if around != clean:
                changed = [i for i, byte in enumerate(around) if byte != _POISON]
                return region, start + (changed[0] if start >= 0 else changed[-1])
    return None


def take_back(layout: Layout, base: int) -> None:
    """Copy the regions that the kernel may write back to the caller."""
    for region in layout.regions:
        if region.writable and region.size:
            ctypes.memmove(region.source, base + region.offset, region.size)


def nearest(layout: Layout, offset: int, address: int) -> dict[str, Any] | None:
    """What an illegal address is: null, or so many bytes past a buffer; None when it is near none.

    Args:
        layout: the launch's layout.
        offset: the address, counted from the arena's start.
        address: the address itself.
    """
    if 0 <= address < PAGE:
        text = f"a null pointer plus {address}" if address else "a null pointer"
        return {"buffer": "", "offset": None, "text": text}
    best: tuple[int, Region] | None = None
    for region in layout.regions:
        past = offset - region.offset
        distance = -past if past < 0 else max(0, past - region.size + 1)
        if best is None or distance < best[0]:
            best = (distance, region)
    if best is None or best[0] > _NEAR:
        return None
    region = best[1]
    past = offset - region.offset
    text = element(region.name, past, region.size, region.itemsize)
    return {"buffer": region.name, "offset": past, "text": text}


def element(name: str, offset: int, size: int, itemsize: int) -> str:
    """A place outside a buffer, in elements."""
    item = max(itemsize, 1)
    return f"{name}[{offset // item}], but {name} has {many(size // item, 'element')}"


def many(count: int, noun: str) -> str:
    """``1 element``, ``2 elements``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
