"""Lanes of a warp above the sectors, or the banks, that one of their memory instructions touches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.errors import require
from labkit.widgets import base, scene
from labkit.widgets.warp_access import (
    BANKS,
    CACHE_LINE,
    LANES,
    SECTOR,
    SIZES,
    WORD,
    WarpAccess,
    from_offsets,
)

WIDTH = 680
"""Width of the picture; see :attr:`SectorMap.height`."""

# Neighbours differ in hue and in brightness, so that they also stay apart in grey.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GREY, _PALE, _RED, _INK, _FRAME = "#5F6670", "#E8EAED", "#B3261E", "#22262B", "#B9BFC7"

_SPACES = (("global memory: sectors", "global"), ("shared memory: banks", "shared"))
_ELEMENTS = (
    ("1 byte (unsigned char)", 1),
    ("2 bytes (half)", 2),
    ("4 bytes (float, unsigned)", 4),
    ("8 bytes (double, uint2)", 8),
    ("16 bytes (uint4)", 16),
)
_WIDTHS = (1, 2, 4, 8, 16)
_STRIDES = (*range(10), 12, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 128, 256, 512, 1024)
_MOST_FIRST = 32

_LEFT = 8.0
_LANE = (WIDTH - 2 * _LEFT) / LANES
_LANE_TOP, _LANE_HIGH, _WIRES = 50.0, 22.0, 66.0
_THINNEST = 2.5
_BELOW = _LANE_TOP + _LANE_HIGH + _WIRES


@dataclass
class SectorMap(base.Controller):
    """One instruction of a warp, and what it costs in global or in shared memory.

    Attributes:
        space: "global" (32-byte sectors) or "shared" (32 banks of 4 bytes).
        element: bytes of one element.
        stride: elements from one lane to the next.
        first: first element of lane 0.
        width: elements that a lane takes at once; element · width is at most 16 bytes.
        lanes: active lanes.
        traced: (name, access, space) of real instructions, in place of the five numbers; see
            :meth:`from_lanes`. Then ``shown`` picks one and is the only control.
    """

    space: str = "global"
    element: int = 4
    stride: int = 1
    first: int = 0
    width: int = 1
    lanes: int = LANES
    traced: tuple[tuple[str, WarpAccess, str], ...] = ()
    shown: int = 0
    title: str = field(default="Lane → sector map: one instruction of a warp", repr=False)

    def __post_init__(self) -> None:
        fits = self.element * self.width in SIZES
        received = f"{self.width} elements of {self.element} bytes"
        require(fits, "width", received, f"{max(SIZES)} bytes a lane or fewer")
        whole = isinstance(self.stride, int) and self.stride >= 0
        require(whole, "stride", repr(self.stride), "0 or more elements")
        for control in self.controls():
            control.accept(getattr(self, control.name))

    @classmethod
    def from_lanes(cls, *maps: Any, names: Sequence[str] = (), **state: Any) -> SectorMap:
        """The map of traced instructions: ``SectorMap.from_lanes(trace.lanes(9), trace.lanes(14))``.

        Args:
            maps: of ``trace.lanes(line)``: their ``offsets`` (bytes, None or -1 for a lane that takes no
                part), ``size``, ``buffer``, ``kind``, ``space`` and, in shared memory, ``banks``.
            names: what each is called; without one, its kind and buffer.
        """
        require(len(maps) > 0, "maps", "none", "at least one of trace.lanes(line)")
        require(len(names) in (0, len(maps)), "names", f"{len(names)} names", f"{len(maps)}, or none")
        found = []
        for index, lanes in enumerate(maps):
            name = names[index] if names else f"{lanes.kind} of {lanes.buffer}"
            found.append((name, from_offsets(_placed(lanes), lanes.size), lanes.space))
        return cls(traced=tuple(found), **state)

    def controls(self) -> Sequence[base.Control]:
        """Space and the five numbers; for traced instructions, which one."""
        if self.traced:
            names = tuple((name, index) for index, (name, _, _) in enumerate(self.traced))
            return (base.Choice("shown", "Instruction", names),)
        strides = tuple(sorted({*_STRIDES, self.stride}))
        return (
            base.Choice("space", "Memory", _SPACES),
            base.Choice("element", "Element", _ELEMENTS),
            base.Slider("width", "Elements a lane", values=_WIDTHS, fmt="{:.0f}"),
            base.Slider("stride", "Stride (elements)", values=strides, fmt="{:.0f}"),
            base.Slider("first", "First element", 0, max(_MOST_FIRST, self.first)),
            base.Slider("lanes", "Active lanes", 1, LANES),
        )

    def update(self, **changes: Any) -> None:
        """Set controls; an access of more than 16 bytes is made narrower."""
        super().update(**changes)
        self.width = min(self.width, max(SIZES) // self.element)

    # --- numbers

    @property
    def access(self) -> WarpAccess:
        """The instruction shown, with all its counts."""
        if self.traced:
            return self.traced[self.shown][1]
        return WarpAccess.strided(self.element, self.stride, self.first, self.width, self.lanes)

    @property
    def memory(self) -> str:
        """ "global" or "shared", of the instruction shown."""
        return self.traced[self.shown][2] if self.traced else self.space

    @property
    def sectors_per_request(self) -> int:
        """Sectors of this one request."""
        return len(self.access.sectors)

    def lane_colors(self) -> list[str | None]:
        """A colour a lane: that of the first sector it touches, or of the wavefront that serves it first."""
        access = self.access
        if self.memory == "global":
            order = {sector: index for index, sector in enumerate(access.sectors)}
            first = [None if offset is None else order[offset // SECTOR] for offset in access.offsets]
        else:
            first = [None] * LANES
            for index, wavefront in enumerate(access.wavefronts):
                for lanes in wavefront.words.values():
                    for lane in lanes:
                        first[lane] = index if first[lane] is None else first[lane]
        return [None if index is None else _COLORS[index % len(_COLORS)] for index in first]

    # --- words

    def describe(self) -> str:
        """The instruction in one line."""
        access = self.access
        if self.traced:
            size = _count(access.size, "byte")
            return f"{self.traced[self.shown][0]}: {_count(len(access.lanes), 'lane')}, {size} each"
        step = self.stride * self.element
        where = "all at the same place" if step == 0 else f"{_count(step, 'byte')} apart"
        return (
            f"{_count(len(access.lanes), 'lane')}, {_count(access.size, 'byte')} each, {where}, "
            f"from byte {self.first * self.element}"
        )

    def verdict(self) -> str:
        """The counts in one line."""
        access = self.access
        if self.memory == "global":
            used = f"{access.bytes_useful} of {access.bytes_moved} bytes used"
            return (
                f"{_count(len(access.sectors), 'sector')}, {used} ({100 * access.efficiency:.3g} %), "
                f"{_count(len(access.cache_lines), 'cache line')}"
            )
        served = _count(len(access.wavefronts), "wavefront")
        if access.degree == 1:
            return f"{served}, no bank conflict"
        return f"{served} where {access.ideal_wavefronts} would do: {access.degree}-way conflict"

    def note(self) -> str:
        """What else the reader should see; may be empty."""
        access = self.access
        if access.misaligned:
            lane = access.misaligned[0]
            return (
                f"lane {lane} starts at byte {access.offsets[lane]}, no multiple of {access.size}: "
                "a GPU stops the kernel here"
            )
        if self.memory == "global" and len(access.sectors) > access.fewest_sectors:
            return f"side by side these bytes would fill {_count(access.fewest_sectors, 'sector')}"
        if self.memory == "shared" and access.parts > 1:
            part = "half" if access.parts == 2 else "quarter"
            return f"accesses of {access.size} bytes are served by {part} warps"
        return ""

    def text(self) -> str:
        place = "Global" if self.memory == "global" else "Shared"
        said = self.note()
        note = f" {said[0].upper()}{said[1:]}." if said else ""
        return f"{place} memory: {self.describe()}. {self.verdict()}.{note}"

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        sectors = self.memory == "global"
        below = "the 32-byte sectors they touch" if sectors else "the 32 banks, a row a wavefront"
        return f"32 lanes above {below}. {self.text()}"

    # --- picture

    @property
    def height(self) -> float:
        """Height of the picture when it is :data:`WIDTH` wide."""
        return self._body_bottom() + 54

    def _row_height(self) -> float:
        return min(18.0, 320.0 / len(self.access.wavefronts))

    def _body_bottom(self) -> float:
        if self.memory == "global":
            return _BELOW + 52
        return _BELOW + 22 + self._row_height() * len(self.access.wavefronts)

    def shapes(self) -> list[scene.Shape]:
        """The picture, first shape lowest."""
        body = self._sectors() if self.memory == "global" else self._banks()
        color = _RED if self.access.misaligned else _GREY
        bottom = self._body_bottom()
        return [
            scene.Words(_LEFT, 18, self.describe(), bold=True),
            *body,
            *self._lanes(),
            scene.Words(_LEFT, bottom + 24, self.verdict(), size=15, bold=True),
            scene.Words(_LEFT, bottom + 44, self.note(), color=color),
        ]

    def picture(self) -> str:
        """The picture as SVG."""
        return scene.to_svg(WIDTH, self.height, self.shapes(), label=self.alt())

    def html(self) -> str:
        return f'<div style="max-width:{WIDTH}px;background:white;color:{_INK}">{self.picture()}</div>'

    def _lanes(self) -> list[scene.Shape]:
        key = (
            "below: 32-byte sectors, coloured where used; bars: cache lines; gaps: untouched sectors"
            if self.memory == "global"
            else "below: banks, a row for each wavefront, with the lanes it serves"
        )
        out: list[scene.Shape] = [
            scene.Words(_LEFT, _LANE_TOP - 8, "lanes", size=12, color=_GREY),
            scene.Words(WIDTH - _LEFT, _LANE_TOP - 8, key, size=11, anchor="end", color=_GREY),
        ]
        wrong = set(self.access.misaligned)
        for lane, color in enumerate(self.lane_colors()):
            x, offset = _LEFT + lane * _LANE, self.access.offsets[lane]
            tip = f"lane {lane}: bytes {offset}…{(offset or 0) + self.access.size - 1}"
            tip = tip if offset is not None else f"lane {lane} takes no part"
            stroke = _RED if lane in wrong else _FRAME if color is None else "none"
            fill = color or "#FFFFFF"
            out.append(scene.Box(x + 1, _LANE_TOP, _LANE - 2, _LANE_HIGH, fill, stroke=stroke, title=tip))
            ink = _GREY if color is None else _ink_on(fill)
            out.append(_centred(x + _LANE / 2, _LANE_TOP + 15, str(lane), ink))
        return out

    def _wire(self, lane: int, x: float, color: str) -> scene.Shape:
        top = (_LEFT + (lane + 0.5) * _LANE, _LANE_TOP + _LANE_HIGH)
        return scene.Path((top, (x, _BELOW)), color, width=1.2)

    def _sectors(self) -> list[scene.Shape]:
        access = self.access
        places, wide = _place(access.sectors)
        out: list[scene.Shape] = []
        colors = {s: _COLORS[i % len(_COLORS)] for i, s in enumerate(access.sectors)}
        wired: set[int] = set()
        for sector, x in places.items():
            used = access.used(sector)
            tip = (
                f"sector {sector}: bytes {sector * SECTOR}…{sector * SECTOR + SECTOR - 1}, "
                f"{_covered(used)} used, by {_count(len(used), 'lane')}"
            )
            out.append(scene.Box(x, _BELOW, wide, 28, _PALE, title=tip))
            for start, end in _joined([(start, end) for _, start, end in used]):
                share = wide / SECTOR
                color = colors[sector]
                at = min(x + start * share, x + wide - _THINNEST)  # one byte of many must stay visible
                run = max((end - start) * share, _THINNEST)
                out.append(scene.Box(at, _BELOW, run, 28, color, title=tip))
            # light cuts show where one lane's bytes end and the next lane's begin
            if access.size * wide / SECTOR >= 4:
                cuts = {start for _, start, _ in used if start}
                lines = [x + start * wide / SECTOR for start in sorted(cuts)]
                out += [scene.Path(((at, _BELOW), (at, _BELOW + 28)), "#FFFFFF", 0.8) for at in lines]
            out.append(scene.Path(_frame(x, _BELOW, wide, 28), _FRAME, width=0.8))
            for lane, start, end in used:
                if lane not in wired:  # a lane that needs two sectors is tied to the first
                    wired.add(lane)
                    out.append(self._wire(lane, x + (start + end) / 2 * wide / SECTOR, colors[sector]))
        return [*out, *_line_marks(places, wide)]

    def _banks(self) -> list[scene.Shape]:
        access, high = self.access, self._row_height()
        colors = self.lane_colors()
        out: list[scene.Shape] = []
        for bank in range(BANKS):
            out.append(_centred(_LEFT + (bank + 0.5) * _LANE, _BELOW + 15, str(bank), _GREY))
        wired: set[int] = set()
        for index, wavefront in enumerate(access.wavefronts):
            y, color = _BELOW + 22 + index * high, _COLORS[index % len(_COLORS)]
            for bank in range(BANKS):
                x = _LEFT + bank * _LANE
                lanes = wavefront.words.get(bank, ())
                tip = f"wavefront {index}, bank {bank}: " + (f"lanes {_few(lanes)}" if lanes else "idle")
                fill = color if lanes else _PALE
                out.append(scene.Box(x + 1, y + 0.5, _LANE - 2, high - 1, fill, title=tip))
                if lanes and high >= 13:
                    said = str(lanes[0]) if len(lanes) == 1 else f"×{len(lanes)}"
                    size = 11 if len(said) < 3 else 9
                    out.append(_centred(x + _LANE / 2, y + high / 2 + 4, said, _ink_on(fill), size))
                for lane in lanes:
                    if lane not in wired:
                        wired.add(lane)
                        out.insert(0, self._wire(lane, x + _LANE / 2, colors[lane] or _GREY))
        return out


def _placed(lanes: Any) -> list[int | None]:
    """Offsets that say the bank: a shared array need not begin at bank 0."""
    offsets = [None if offset is None or offset < 0 else int(offset) for offset in lanes.offsets]
    shift = 0
    if lanes.space == "shared":
        pairs = zip(offsets, lanes.banks, strict=True)
        shift = next(WORD * ((bank - at // WORD) % BANKS) for at, bank in pairs if at is not None)
    return [None if offset is None else offset + shift for offset in offsets]


def draw(ax: Any, state: SectorMap) -> None:
    """The picture of ``state`` on matplotlib axes, for print; ``state.height / WIDTH`` is its proportion.

    Give ``plots.show`` the words of ``state.alt()``.
    """
    scene.to_axes(ax, WIDTH, state.height, state.shapes())


def _place(sectors: Sequence[int]) -> tuple[dict[int, float], float]:
    """Left edge of each sector, and the width of all; a gap stands for sectors that are not touched."""
    jumps = sum(1 for one, next_one in itertools.pairwise(sectors) if next_one != one + 1)
    room = WIDTH - 2 * _LEFT
    gap = min(14.0, 0.3 * room / max(1, jumps))
    wide = min(72.0, (room - gap * jumps) / len(sectors))
    places: dict[int, float] = {}
    x = _LEFT
    for index, sector in enumerate(sectors):
        if index:
            x += wide + (gap if sector != sectors[index - 1] + 1 else 0)
        places[sector] = x
    return places, wide


def _line_marks(places: dict[int, float], wide: float) -> list[scene.Shape]:
    """A bracket below the sectors of each cache line, with its first byte where there is room."""
    out: list[scene.Shape] = []
    per_line = CACHE_LINE // SECTOR
    free = _LEFT
    y = _BELOW + 34
    for line, group in itertools.groupby(places, key=lambda sector: sector // per_line):
        held = list(group)
        left, right = places[held[0]], places[held[-1]] + wide
        out.append(scene.Path(((left + 1, y), (right - 1, y)), _INK, width=2))
        said = f"byte {line * CACHE_LINE}"
        if left >= free and left + 6.5 * len(said) <= WIDTH:
            out.append(scene.Words(left, y + 16, said, size=11, color=_GREY))
            free = left + 6.5 * len(said) + 6
    return out


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of byte ranges."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _covered(used: Sequence[tuple[int, int, int]]) -> str:
    count = sum(end - start for start, end in _joined([(start, end) for _, start, end in used]))
    return f"{count} of {SECTOR} bytes"


def _frame(x: float, y: float, w: float, h: float) -> tuple[tuple[float, float], ...]:
    return ((x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y))


def _centred(x: float, y: float, text: str, color: str, size: float = 11) -> scene.Words:
    return scene.Words(x, y, text, size=size, anchor="middle", color=color)


def _ink_on(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#FFFFFF" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.52 else _INK


def _few(lanes: Sequence[int]) -> str:
    shown = ", ".join(map(str, lanes[:4]))
    return shown if len(lanes) <= 4 else f"{shown}, … ({len(lanes)})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
