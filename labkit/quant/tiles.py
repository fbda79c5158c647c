"""W4 and W3 as tensor-core tiles: records of 32 rows × 128 columns, in the order in which a warp reads them.

``tiles`` is uint8 [row_tiles, k_tiles, record_bytes]. A record is codes, then scales, then offsets:

- Codes are 16-byte vectors: vector v of lane l at byte 512*v + 16*l, so that a warp's load is 512
  neighbouring bytes. W4 has 4 vectors, W3 has 3. A lane's words are numbered 4*v + component.
- Lane l = 4*g + q holds, for half h (0, 1), chunk c (0..3), step s (0, 1), register i (0..3) and
  position e (0, 1), the code of row 16h + g + 8*(i & 1) and column 32c + 8q + 4s + 2*(i >> 1) + e: the
  registers of ``mma.m16n8k16`` in order, and for each chunk eight neighbouring columns a lane.
- W4 stores u = code + 8 at bits 4i + 16e of word 4c + 2h + s.
- W3 stores u = code + 4. Chunk c has the words 3c + b. Pair p = 8h + 4s + i < 15 is at bit 3*(p % 5) +
  16e of word b = p // 5; bit b of pair 15 is bit 15 + 16e of word b.
- Scales: float16 [128/G][8 g][4 i], entry [g][i] for row g + 8i. Offsets: the same, float16 or float32.

Rows and columns that the weight does not have hold code 0, that is a value of 0, and a scale and offset
of 0 where their whole group lies outside. A group that reaches over the last column keeps its offset: a
kernel that sums activations for the offset must read zeros there, not what follows the row.

The bits are moved in :mod:`labkit.quant.tile_bits`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from labkit.errors import InputError, refuse, require
from labkit.quant.checks import check_tensor
from labkit.quant.formats import QuantWeight
from labkit.quant.packing import pack as pack_codes
from labkit.quant.packing import unpack as unpack_codes
from labkit.quant.sizes import PACKED_FORMATS, resolve_group, round_up
from labkit.quant.tile_bits import BIAS, CODE_BYTES, decode, encode

TILE_ROWS = 32
"""Output rows of a record."""

TILE_COLUMNS = 128
"""Input columns of a record."""

ALIGNMENT = 16
"""Bytes of a lane's vector load: where the tiles may begin."""

BAND_CODES = 1 << 20
"""Codes repacked at a time, but at least one row tile. Temporaries take some 5 bytes a code."""


def record_bytes(format: str, tile_group: int, offset: torch.dtype | None) -> int:
    """Bytes of a record: codes, and a scale (and an offset) a row for each group; a multiple of 64."""
    per_scale = 2 + (offset.itemsize if offset is not None else 0)
    return CODE_BYTES[format] + TILE_COLUMNS // tile_group * TILE_ROWS * per_scale


@dataclass(frozen=True, eq=False)
class TileWeight:
    """A W4 or W3 weight of N output rows and K input columns in the tile layout of this module.

    Attributes:
        format: "w4" or "w3".
        tiles: uint8 [row_tiles, k_tiles, record_bytes], contiguous, on a 16-byte boundary (one that is
            not is copied). Scales and offsets inside are finite.
        n: output rows; for a paired weight 2F.
        k: input columns, without padding.
        group_size: G of the storage format, which :func:`unpack` restores.
        tile_group: columns of a scale inside a record: 32, 64 or 128.
        offset: None, torch.float16 or torch.float32: dtype of the offsets.
        k_order: None, or int32 [K]: tile column j holds input column ``k_order[j]``.
        paired: the first F rows are a gate, the last F its up projection, and row tile t holds gate
            rows 16t..16t+15 as its half 0 and the same rows of up as its half 1.

    Raises:
        InputError: a wrong shape, dtype, group size or non-finite scale, by name.
    """

    format: str
    tiles: Tensor
    n: int
    k: int
    group_size: int
    tile_group: int
    offset: torch.dtype | None = None
    k_order: Tensor | None = None
    paired: bool = False

    def __post_init__(self) -> None:
        require(self.format in PACKED_FORMATS, "format", repr(self.format), "w4 or w3")
        for name in ("n", "k"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole and value >= 1, name, value, "a whole number >= 1")
        require(isinstance(self.group_size, int), "group_size", repr(self.group_size), "a whole number")
        resolve_group(self.format, self.k, self.group_size)
        group = _checked_group(self.group_size, self.k_padded)
        require(
            self.tile_group == group,
            "tile_group",
            self.tile_group,
            f"{group} for groups of {self.group_size}",
        )
        require(
            self.offset in (None, torch.float16, torch.float32),
            "offset",
            self.offset,
            "None, float16 or float32",
        )
        _check_paired(self.paired, self.n)
        shape = (self.row_tiles, self.k_tiles, self.record_bytes)
        check_tensor("tiles", self.tiles, (torch.uint8,), shape)
        tiles = self.tiles.detach().contiguous()
        if tiles.device.type != "meta" and tiles.data_ptr() % ALIGNMENT:
            tiles = tiles.clone()  # a fresh allocation is aligned; a view into a file need not be
        object.__setattr__(self, "tiles", tiles)
        _check_finite("scales", self.scale_view())
        if (offsets := self.offset_view()) is not None:
            _check_finite("offset", offsets)
        if self.k_order is not None:
            object.__setattr__(self, "k_order", _checked_order(self.k_order, self.k, tiles.device))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), without padding."""
        return self.n, self.k

    @property
    def outputs(self) -> int:
        """Columns of a product's result: N, or F = N/2 for a paired weight."""
        return self.n // 2 if self.paired else self.n

    @property
    def k_padded(self) -> int:
        """Kp of the storage format: K rounded up to whole groups and whole bytes."""
        return round_up(self.k, self.group_size)

    @property
    def row_tiles(self) -> int:
        """ceil(N/32); for a paired weight ceil(F/16)."""
        return _row_tiles(self.n, self.paired)

    @property
    def k_tiles(self) -> int:
        """ceil(Kp/128)."""
        return -(-self.k_padded // TILE_COLUMNS)

    @property
    def record_groups(self) -> int:
        """Groups of a record: 128 / tile_group."""
        return TILE_COLUMNS // self.tile_group

    @property
    def record_bytes(self) -> int:
        """Bytes of a record: a multiple of 64."""
        return record_bytes(self.format, self.tile_group, self.offset)

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.tiles.nbytes + (0 if self.k_order is None else self.k_order.nbytes)

    @property
    def bits_per_weight(self) -> float:
        """Bits held for each of the N*K weights."""
        return 8 * self.nbytes / (self.n * self.k)

    @property
    def device(self) -> torch.device:
        """Device of the tiles."""
        return self.tiles.device

    def code_view(self) -> Tensor:
        """The code bytes as they lie: uint8 [row_tiles, k_tiles, 2048 or 1536], a view."""
        return self.tiles[..., : CODE_BYTES[self.format]]

    def scale_view(self) -> Tensor:
        """The scales as they lie: float16 [row_tiles, k_tiles, groups, 8 g, 2 h, 2 r], a view.

        The entry is that of row 16h + 8r + g of the row tile.
        """
        start = CODE_BYTES[self.format]
        return self._group_view(start, torch.float16)

    def offset_view(self) -> Tensor | None:
        """The offsets, in the order of :meth:`scale_view` and of dtype ``offset``; None without offsets."""
        if self.offset is None:
            return None
        start = CODE_BYTES[self.format] + self.record_groups * TILE_ROWS * torch.float16.itemsize
        return self._group_view(start, self.offset)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Weights as floats, [N, K] of ``dtype``, columns in input order; a paired one as gate above up.

        Goes through :func:`unpack`, and gives the bits of :meth:`QuantWeight.dequantize`.
        """
        return unpack(self).dequantize(dtype)

    def to(self, device: torch.device | str) -> TileWeight:
        """The same weight on ``device``; itself when it is there already."""
        if torch.device(device) == self.device:
            return self
        order = None if self.k_order is None else self.k_order.to(device)
        return replace(self, tiles=self.tiles.to(device), k_order=order)

    def _group_view(self, start: int, dtype: torch.dtype) -> Tensor:
        held = self.tiles[..., start : start + self.record_groups * TILE_ROWS * dtype.itemsize]
        return held.view(dtype).unflatten(-1, (self.record_groups, 8, 2, 2))


def why_not(weight: object, *, paired: bool = False) -> str:
    """Why :func:`repack` would refuse ``weight``, in one line; empty when it would take it."""
    try:
        _checked_weight(weight, paired)
    except InputError as error:
        return str(error)
    return ""


def tile_bytes(weight: QuantWeight, *, paired: bool = False) -> int:
    """Bytes that :func:`repack` would hold; the weight is one that it takes."""
    group = _checked_group(weight.group_size, weight.k_padded)
    dtype = None if weight.offset is None else weight.offset.dtype
    k_tiles = -(-weight.k_padded // TILE_COLUMNS)
    return _row_tiles(weight.n, paired) * k_tiles * record_bytes(weight.format, group, dtype)


def repack(weight: QuantWeight, *, paired: bool = False) -> TileWeight:
    """Tiles of a stored weight, on its device. Values do not change; no code is requantised.

    Args:
        weight: W4 or W3 with groups of 32, 64, 128, a multiple of 128, or a whole row.
        paired: the weight is gate above up, [2F, K]; see :class:`TileWeight`.

    Returns:
        The tiles. What the weight holds in columns from K on is not read: the tiles hold code 0 there.

    Raises:
        InputError: another kind of weight, a group size without tiles, or a paired weight of odd N.
    """
    _checked_weight(weight, paired)
    group = _checked_group(weight.group_size, weight.k_padded)
    row_tiles, k_tiles = _row_tiles(weight.n, paired), -(-weight.k_padded // TILE_COLUMNS)
    dtype = None if weight.offset is None else weight.offset.dtype
    record = record_bytes(weight.format, group, dtype)
    tiles = torch.zeros(row_tiles, k_tiles, record, dtype=torch.uint8, device=weight.device)
    made = TileWeight(
        weight.format, tiles, weight.n, weight.k, weight.group_size, group, dtype, weight.k_order, paired
    )
    codes, scales, offsets = made.code_view(), made.scale_view(), made.offset_view()
    columns = _stored_groups(made)
    for band, blocks in _bands(made):
        stage = _stage(made, band, k_tiles * TILE_COLUMNS, torch.int8)
        for block, rows in enumerate(blocks):
            stage[block, : rows.stop - rows.start, : weight.k] = unpack_codes(
                weight.packed[rows], weight.k, weight.format
            )
        stage += BIAS[weight.format]
        encode(_tile_rows(stage.view(torch.int64)).unflatten(-1, (k_tiles, 4, 4)), codes[band], weight.format)
        for source, target in ((weight.scales, scales), (weight.offset, offsets)):
            if source is None or target is None:
                continue
            stage = _stage(made, band, k_tiles * made.record_groups, source.dtype)
            for block, rows in enumerate(blocks):
                stage[block, : rows.stop - rows.start, : columns.numel()] = source[rows][:, columns]
            by_row = _tile_rows(stage).unflatten(-1, (k_tiles, made.record_groups))
            target[band].copy_(by_row.permute(0, 4, 5, 3, 1, 2))
    if tiles.is_cuda:
        # A kernel may read its weight before those ahead of it in the stream have finished (overlapped.py).
        torch.cuda.current_stream(tiles.device).synchronize()
    return made


def unpack(tiles: TileWeight) -> QuantWeight:
    """Undo :func:`repack`: the stored weight, on the device of the tiles.

    Its packed codes, scales, offsets, sizes and column order are those that were repacked, bit for bit;
    only codes of the padding columns, which no result depends on, come back as zeros (as
    :meth:`QuantWeight.from_codes` makes them) whatever was there.
    """
    require(isinstance(tiles, TileWeight), "tiles", type(tiles).__name__, "a TileWeight")
    n, kp, k_tiles, format = tiles.n, tiles.k_padded, tiles.k_tiles, tiles.format
    width = kp // 2 if format == "w4" else kp // 8 * 3
    packed = torch.empty(n, width, dtype=torch.uint8, device=tiles.device)
    groups = (n, kp // tiles.group_size)
    scales = torch.empty(groups, dtype=torch.float16, device=tiles.device)
    offset = None if tiles.offset is None else torch.empty(groups, dtype=tiles.offset, device=tiles.device)
    code_view, scale_view, offset_view = tiles.code_view(), tiles.scale_view(), tiles.offset_view()
    # Any tile group of a stored group has its scale: the first is read.
    columns = torch.arange(groups[1], device=tiles.device) * tiles.group_size // tiles.tile_group
    for band, blocks in _bands(tiles):
        stage = _stage(tiles, band, k_tiles * TILE_COLUMNS, torch.int8)
        decode(code_view[band], _tile_rows(stage.view(torch.int64)).unflatten(-1, (k_tiles, 4, 4)), format)
        stage -= BIAS[format]
        for block, rows in enumerate(blocks):
            packed[rows] = pack_codes(stage[block, : rows.stop - rows.start, :kp], format)
        for source, target in ((scale_view, scales), (offset_view, offset)):
            if source is None or target is None:
                continue
            stage = _stage(tiles, band, k_tiles * tiles.record_groups, target.dtype)
            by_row = _tile_rows(stage).unflatten(-1, (k_tiles, tiles.record_groups))
            by_row.copy_(source[band].permute(0, 4, 5, 3, 1, 2))
            for block, rows in enumerate(blocks):
                target[rows] = stage[block, : rows.stop - rows.start, columns]
    return QuantWeight(format, packed, scales, offset, n, tiles.k, tiles.group_size, tiles.k_order)


# --- bands of rows ------------------------------------------------------------------------------


def _row_tiles(n: int, paired: bool) -> int:
    blocks = 2 if paired else 1
    return -(-(n // blocks) // (TILE_ROWS // blocks))


def _bands(tiles: TileWeight) -> Iterator[tuple[slice, list[slice]]]:
    """Row tiles to treat at a time, and their rows of the weight: one block, or gate's and up's."""
    blocks = 2 if tiles.paired else 1
    height, rows = TILE_ROWS // blocks, tiles.n // blocks
    step = max(1, BAND_CODES // (TILE_ROWS * TILE_COLUMNS * tiles.k_tiles))
    for first in range(0, tiles.row_tiles, step):
        last = min(first + step, tiles.row_tiles)
        start, stop = first * height, min(last * height, rows)
        yield slice(first, last), [slice(b * rows + start, b * rows + stop) for b in range(blocks)]


def _stage(tiles: TileWeight, band: slice, width: int, dtype: torch.dtype) -> Tensor:
    """Zeros for the rows of a band: [blocks, rows of a block, width]."""
    blocks = 2 if tiles.paired else 1
    rows = (band.stop - band.start) * TILE_ROWS // blocks
    return torch.zeros(blocks, rows, width, dtype=dtype, device=tiles.device)


def _tile_rows(stage: Tensor) -> Tensor:
    """[blocks, rows, width] as [T, h, r, g, width], a view: row 16h + 8r + g of row tile T."""
    if stage.shape[0] == 1:
        return stage[0].unflatten(0, (-1, 2, 2, 8))
    return stage.unflatten(1, (-1, 2, 8)).transpose(0, 1)


def _stored_groups(tiles: TileWeight) -> Tensor:
    """For each tile group that begins inside Kp, the stored group it lies in: int64 [tile groups]."""
    begin = torch.arange(tiles.k_tiles * tiles.record_groups, device=tiles.device) * tiles.tile_group
    held = -(-tiles.k_padded // tiles.tile_group)
    return begin[:held] // tiles.group_size


# --- refusals -----------------------------------------------------------------------------------


def _checked_weight(weight: Any, paired: bool) -> None:
    if not isinstance(weight, QuantWeight):
        format = getattr(weight, "format", None)
        received = type(weight).__name__ + (f" of {format}" if isinstance(format, str) else "")
        refuse("weight", received, "a QuantWeight of w4 or w3")
    _checked_group(weight.group_size, weight.k_padded)
    _check_paired(paired, weight.n)


def _checked_group(group_size: int, k_padded: int) -> int:
    """Columns of a scale inside a record, for a group of the storage format."""
    if group_size in (32, 64, 128):
        return group_size
    # One group a row may have any length: the columns behind it hold code 0.
    if group_size % TILE_COLUMNS == 0 or group_size == k_padded:
        return TILE_COLUMNS
    refuse(
        "group_size",
        group_size,
        "32, 64, 128, a multiple of 128 or a whole row",
        "quantise with one of these, or use a kernel of the storage format",
    )


def _check_paired(paired: bool, n: int) -> None:
    require(isinstance(paired, bool), "paired", repr(paired), "True or False")
    require(not paired or n % 2 == 0, "paired", f"N = {n}", "an even N: the rows of gate, then those of up")


def _check_finite(name: str, values: Tensor) -> None:
    if values.device.type == "meta":
        return
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        row_tile, k_tile = (int(i) for i in (~finite).nonzero()[0][:2])
        refuse(name, f"nan or inf in row tile {row_tile}, k tile {k_tile}", "finite values")


def _checked_order(order: Tensor, k: int, device: torch.device) -> Tensor:
    check_tensor("k_order", order, (torch.int32, torch.int64), (k,))
    order = order.to(device, torch.int32).contiguous()
    if device.type == "meta":
        return order
    whole = torch.equal(order.sort().values, torch.arange(k, dtype=torch.int32, device=device))
    require(whole, "k_order", "not a permutation", f"each of 0..{k - 1} once")
    return order
