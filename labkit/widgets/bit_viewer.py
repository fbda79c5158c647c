"""Bit viewer: which bits of which byte hold each of eight W4 or W3 codes, and what weight each code means.

:class:`BitViewer` is pure Python. It knows the storage formats from their definition (DESIGN.md, "Storage
formats") and not from ``labkit.quant``, so that a test can hold the two against each other.
"""

from __future__ import annotations

import html as _html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.errors import require
from labkit.widgets import base

COUNT = 8
"""Codes shown at a time: the smallest number of W3 codes that fills whole bytes."""

TINTS = ("#f4d797", "#aadaf4", "#8cd3c0", "#f8f2a0", "#abd1e6", "#ecb78c", "#e8c3d7", "#d0d2d6")
"""One light colour a code: the colours of ``labkit.plots`` mixed with white, so that dark text is readable.
Every cell also carries its index: colour is never the only sign."""

_CODE_BITS = {"w3": 3, "w4": 4}
_GROUPS: tuple[int | str, ...] = (16, 32, 64, 128, "row")
_NO_OFFSET = "none"
_OFFSETS: tuple[float | str, ...] = (_NO_OFFSET, -0.2, -0.1, 0.0, 0.1, 0.2)
_FAINT, _MARK = "#5f6670", "#b3261e"


@dataclass(frozen=True)
class Piece:
    """A run of bits that one byte holds of one code.

    ``width`` bits of byte ``byte`` from bit ``low`` up are the bits of the code from bit ``at`` up.
    """

    byte: int
    low: int
    width: int
    at: int

    @property
    def expression(self) -> str:
        """The piece as an integer expression, in the notation of the storage format."""
        mask = (1 << self.width) - 1
        if self.at:  # the rest of a code that began in the byte before: it starts at bit 0
            return f"(b{self.byte} & {mask}) << {self.at}"
        return f"(b{self.byte} >> {self.low}) & {mask}" if self.low else f"b{self.byte} & {mask}"

    @property
    def words(self) -> str:
        """The piece in words, such as ``bits 7–6 of b0``."""
        high = self.low + self.width - 1
        return f"bit {high} of b{self.byte}" if self.width == 1 else f"bits {high}–{self.low} of b{self.byte}"


@dataclass(frozen=True)
class Field:
    """One code as it lies in the bytes: its pieces, its raw unsigned bits, its signed value."""

    index: int
    pieces: tuple[Piece, ...]
    bits: int
    raw: int
    code: int

    @property
    def expression(self) -> str:
        """How to read the raw bits out of the bytes."""
        return " | ".join(piece.expression for piece in self.pieces)

    @property
    def raw_bits(self) -> str:
        """The raw bits, high bit first."""
        return format(self.raw, f"0{self.bits}b")

    @property
    def crosses(self) -> bool:
        """Whether the code lies in two bytes."""
        return len(self.pieces) > 1

    @property
    def sign_words(self) -> str:
        """Two's complement, spelled out."""
        half = 1 << (self.bits - 1)
        if self.raw < half:
            return f"{self.raw} < {half}, so q = {_signed(self.code)}"
        return f"{self.raw} ≥ {half}, so q = {self.raw} − {2 * half} = {_signed(self.code)}"


def pieces_of(code_bits: int, index: int) -> tuple[Piece, ...]:
    """Where code ``index`` lies, low bits first: the bytes are one little-endian number of equal fields."""
    pieces: list[Piece] = []
    at = 0
    while at < code_bits:
        byte, low = divmod(index * code_bits + at, 8)
        width = min(8 - low, code_bits - at)
        pieces.append(Piece(byte, low, width, at))
        at += width
    return tuple(pieces)


@dataclass
class BitViewer(base.Controller):
    """Eight codes, their bytes, and the weights that they mean. Change it through ``update``.

    Args:
        format: ``"w3"`` (codes −4..3, three bytes) or ``"w4"`` (codes −8..7, four bytes).
        codes: eight signed codes.
        selected: index of the code whose bits are marked.
        byte: index of the byte that the byte slider changes.
        scale: weight of one code step.
        offset: added after scaling; None for the symmetric format, which stores none.
        group_size: weights that share a scale: 16, 32, 64, 128 or ``"row"``.
        row_length: K, for the bits per weight when ``group_size`` is ``"row"``.

    Raises:
        InputError: a value outside these.
    """

    format: str = "w3"
    codes: tuple[int, ...] = (3, -4, 1, -1, 2, -3, 0, -2)
    selected: int = 2
    byte: int = 0
    scale: float = 0.05
    offset: float | None = None
    group_size: int | str = 32
    row_length: int = 576

    title = "Bit viewer: eight codes in their bytes"

    def __post_init__(self) -> None:
        require(self.format in _CODE_BITS, "format", repr(self.format), '"w3" or "w4"')
        low, high = self.bounds
        require(
            len(self.codes) == COUNT and all(isinstance(c, int) and low <= c <= high for c in self.codes),
            "codes",
            list(self.codes),
            f"{COUNT} whole numbers from {low} to {high} in {self.format.upper()}",
        )
        require(self.selected in range(COUNT), "selected", self.selected, f"0 to {COUNT - 1}")
        require(self.byte in range(self.code_bits), "byte", self.byte, f"0 to {self.code_bits - 1}")
        require(self.scale > 0, "scale", self.scale, "a number above 0")
        require(self.group_size in _GROUPS, "group_size", repr(self.group_size), "16, 32, 64, 128 or 'row'")
        require(self.row_length > 0, "row_length", self.row_length, "a whole number above 0")

    # ---- controls ----

    def controls(self) -> Sequence[base.Control]:
        """Format, code and its value, byte and its value, scale, offset, group size."""
        groups = tuple((f"{g} weights" if g != "row" else "one row", g) for g in _GROUPS)
        formats = (("W3: 8 codes in 3 bytes", "w3"), ("W4: 8 codes in 4 bytes", "w4"))
        offsets = tuple((o if isinstance(o, str) else f"{o:+.1f}", o) for o in _OFFSETS)
        return (
            base.Choice("format", "format", formats),
            base.Slider("selected", "code number", 0, COUNT - 1),
            base.Slider("code", "code value", -8, 7),
            base.Slider("byte", "byte number", 0, 3),
            base.Slider("byte_value", "byte value", 0, 255),
            base.Slider("scale", "scale", 0.01, 0.2, 0.01),
            base.Choice("stored_offset", "offset", offsets),
            base.Choice("group_size", "share one scale", groups),
        )

    def update(self, **changes: Any) -> None:
        """Set controls by name. What the format cannot hold moves to the nearest value that it can."""
        if "format" in changes and changes["format"] in _CODE_BITS:
            # First, because the range of a code and the number of bytes depend on it.
            super().update(format=changes.pop("format"))
            self.codes = tuple(self._clamped(code) for code in self.codes)
            self.byte = min(self.byte, self.code_bits - 1)
        super().update(**changes)

    @property
    def code(self) -> int:
        """The selected code; setting it keeps it within the format's range."""
        return self.codes[self.selected]

    @code.setter
    def code(self, value: int) -> None:
        i = self.selected
        self.codes = (*self.codes[:i], self._clamped(int(value)), *self.codes[i + 1 :])

    @property
    def byte_value(self) -> int:
        """The byte ``byte``; setting it changes the codes that it holds."""
        return self.data[self.byte]

    @byte_value.setter
    def byte_value(self, value: int) -> None:
        data = bytearray(self.data)
        data[self.byte] = int(value)
        self.set_data(bytes(data))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "byte" and "byte" in self.__dict__:  # the slider has a stop for b3, which W3 lacks
            value = min(int(value), self.code_bits - 1)
        super().__setattr__(name, value)

    @property
    def stored_offset(self) -> float | str:
        """The offset as the drop-down names it: a drop-down takes None for "nothing chosen"."""
        return _NO_OFFSET if self.offset is None else self.offset

    @stored_offset.setter
    def stored_offset(self, value: float | str) -> None:
        self.offset = None if isinstance(value, str) else value

    def set_data(self, data: bytes) -> None:
        """Set all bytes at once, b0 first; the codes follow."""
        require(len(data) == self.code_bits, "data", f"{len(data)} bytes", f"{self.code_bits} bytes")
        word, bits = int.from_bytes(data, "little"), self.code_bits
        raws = [(word >> (bits * i)) & ((1 << bits) - 1) for i in range(COUNT)]
        self.codes = tuple(raw - (1 << bits) if raw >> (bits - 1) else raw for raw in raws)

    def _clamped(self, code: int) -> int:
        low, high = self.bounds
        return max(low, min(high, code))

    # ---- numbers ----

    @property
    def code_bits(self) -> int:
        """Bits of one code; also the number of bytes that eight codes fill."""
        return _CODE_BITS[self.format]

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest code."""
        half = 1 << (self.code_bits - 1)
        return -half, half - 1

    @property
    def word(self) -> int:
        """The bytes as one little-endian number: code i is its bits from ``code_bits · i`` up."""
        mask = (1 << self.code_bits) - 1
        return sum((code & mask) << (self.code_bits * i) for i, code in enumerate(self.codes))

    @property
    def data(self) -> bytes:
        """The stored bytes, b0 first."""
        return self.word.to_bytes(self.code_bits, "little")

    @property
    def fields(self) -> tuple[Field, ...]:
        """The eight codes with the bits that hold them."""
        bits = self.code_bits
        mask = (1 << bits) - 1
        return tuple(Field(i, pieces_of(bits, i), bits, c & mask, c) for i, c in enumerate(self.codes))

    @property
    def weights(self) -> tuple[float, ...]:
        """What the codes mean: code · scale + offset."""
        return tuple(code * self.scale + (self.offset or 0.0) for code in self.codes)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of a weight: its code, and its share of a 16-bit scale and of a 16-bit offset."""
        group = self.row_length if isinstance(self.group_size, str) else self.group_size
        return self.code_bits + (16 if self.offset is None else 32) / group

    # ---- pictures ----

    def text(self) -> str:
        """Where the selected code lies, its sign, its weight, and the cost of a weight."""
        field, weight = self.fields[self.selected], self.weights[self.selected]
        where = " and ".join(piece.words for piece in reversed(field.pieces))
        crossing = " It crosses a byte edge." if field.crosses else ""
        plus = "" if self.offset is None else f" + ({_signed(self.offset, '.3f')})"
        return (
            f"q{field.index} is in {where}: {field.raw_bits}.{crossing} Sign: {field.sign_words}. "
            f"Weight: {_signed(field.code)} × {self.scale:.3f}{plus} = {_signed(weight, '.3f')}. "
            f"Bits per weight: {self._cost()} = {self.bits_per_weight:.3f}."
        )

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        data = ", ".join(f"b{i} = 0x{value:02X}" for i, value in enumerate(self.data))
        crossing = [f"q{field.index}" for field in self.fields if field.crosses]
        ends = f"{' and '.join(crossing)} cross a byte edge" if crossing else "no code crosses a byte edge"
        return f"Bit map of eight {self.format.upper()} codes in {len(self.data)} bytes ({data}); {ends}."

    def picture(self) -> str:
        """SVG: the bytes bit by bit, and below them the same bits as one number, codes side by side."""
        count = len(self.data)
        cell, gap, small = (28.0, 14.0, 10.0) if count == 3 else (21.0, 12.0, 8.5)
        width = 8 * cell * count + gap * (count - 1) + 8
        parts = []
        for i, value in enumerate(self.data):
            left = 4 + i * (8 * cell + gap)
            title = f"b{i} = 0x{value:02X} = {value}"
            parts.append(base.label(left + 4 * cell, 16, title, anchor="middle", bold=True))
            for bit in range(8):
                index, at = divmod(8 * i + bit, self.code_bits)
                x = left + (7 - bit) * cell
                middle = x + cell / 2
                parts.append(base.label(middle, 32, str(bit), size=10, anchor="middle", color=_FAINT))
                parts.append(self._cell(x, 37, cell, (value >> bit) & 1, index))
                name = f"q{index}.{at}"
                parts.append(base.label(middle, 81, name, size=small, anchor="middle", color=_FAINT))
        bits = 8 * count
        step = (width - 8) / bits
        shifts = " | ".join(f"b{i} << {8 * i}" if i else "b0" for i in range(count))
        caption = f"the same bits as one number, high bit first: {shifts} = 0x{self.word:0{2 * count}X}"
        parts.append(base.label(4, 112, caption, size=12))
        for position in range(bits):
            x = 4 + (bits - 1 - position) * step
            index = position // self.code_bits
            parts.append(self._cell(x, 120, step, (self.word >> position) & 1, index))
        for field in self.fields:
            x = 4 + (bits - (field.index + 0.5) * self.code_bits) * step
            name = f"q{field.index} = {_signed(field.code)}"
            chosen = field.index == self.selected
            parts.append(base.label(x, 168, name, anchor="middle", bold=chosen))
        return base.svg(width, 176, parts, label=self.alt())

    def html(self) -> str:
        """The picture, the selected code in words, and all eight codes in a table."""
        heads = ("code", "how to read it", "bits", "raw", "signed q", "weight")
        head = "".join(f'<th scope="col" style="{_PAD}">{name}</th>' for name in heads)
        pairs = zip(self.fields, self.weights, strict=True)
        rows = "".join(self._row(field, weight) for field, weight in pairs)
        style = "border-collapse:collapse;font-size:13px;color:inherit"
        return (
            f'<div style="max-width:744px;background:white;color:#22262B;padding:4px">{self.picture()}'
            f'<p style="margin:8px 0;line-height:1.4">{self.text()}</p>'
            f'<table style="{style}"><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )

    def _cost(self) -> str:
        group = f"{self.row_length} (one row)" if isinstance(self.group_size, str) else str(self.group_size)
        shared = "16" if self.offset is None else "(16 + 16)"
        return f"{self.code_bits} + {shared} / {group}"

    def _cell(self, x: float, y: float, size: float, bit: int, index: int) -> str:
        chosen = index == self.selected
        stroke, width = (_MARK, 2.5) if chosen else ("white", 1.0)
        return (
            f'<rect x="{x + width / 2:.2f}" y="{y + width / 2:.2f}" width="{size - width:.2f}" '
            f'height="{30 - width:.2f}" fill="{TINTS[index]}" stroke="{stroke}" stroke-width="{width:g}"/>'
            + base.label(x + size / 2, y + 20, str(bit), size=14, anchor="middle", bold=chosen)
        )

    def _row(self, field: Field, weight: float) -> str:
        chosen = field.index == self.selected
        style = f"background:{TINTS[field.index]};color:#22262B" + (";font-weight:bold" if chosen else "")
        cells = (
            f"{'▶ ' if chosen else ''}q{field.index}",
            f'<code style="background:none;color:inherit">{_html.escape(field.expression)}</code>',
            field.raw_bits,
            str(field.raw),
            _signed(field.code),
            _signed(weight, "+.3f"),
        )
        body = "".join(f'<td style="{_PAD}">{cell}</td>' for cell in cells)
        return f'<tr style="{style}">{body}</tr>'


_PAD = "padding:2px 10px;text-align:left"


def _signed(value: float, spec: str = "") -> str:
    """A number with a minus sign that is not a hyphen; what rounds to zero has none."""
    text = format(value, spec)
    if not text.strip("-+0."):
        text = text.replace("-", "+" if "+" in spec else "")
    return text.replace("-", "−")
