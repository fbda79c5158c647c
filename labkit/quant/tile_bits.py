"""The codes of a tensor-core record: 128 biased codes a lane to the words of W4 and W3, and back.

The layout is that of :mod:`labkit.quant.tiles`. On one side is ``words``, int64 [T, h, r, g, k tile, c, q],
a view of one-byte codes row by row: byte 4s + 2p + e is the code whose register is i = r + 2p. On the other
is ``records``, uint8 [T, k tile, bytes of codes], a view of the records.

Eight codes are moved as one 64-bit word, as in :mod:`labkit.quant.packing`; byte order is little-endian.
Every mask keeps the shifts to the left away from the sign bit; where a value needs bit 63, the step is
done on bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODE_BYTES: dict[str, int] = {"w4": 2048, "w3": 1536}
"""Bytes of codes in a record."""

BIAS: dict[str, int] = {"w4": 8, "w3": 4}
"""What is added to a signed code before it is stored."""

_EVERY_FOURTH_6 = 0x003F003F003F003F


def encode(words: Tensor, records: Tensor, format: str) -> None:
    """Write biased codes into records of ``format``; ``words`` is left as it is."""
    (_encode_w4 if format == "w4" else _encode_w3)(words, records)


def decode(records: Tensor, words: Tensor, format: str) -> None:
    """Undo :func:`encode`: read the records into ``words``."""
    (_decode_w4 if format == "w4" else _decode_w3)(records, words)


def _encode_w4(words: Tensor, records: Tensor) -> None:
    pairs = words[:, :, 1].view(torch.uint8) << 4
    pairs |= words[:, :, 0].view(torch.uint8)
    lanes = _swap_p_and_e(pairs.view(torch.int64))  # [T, h, g, k tile, c, q]
    _w4_view(records).copy_(lanes.permute(0, 3, 4, 2, 5, 1))


def _decode_w4(records: Tensor, words: Tensor) -> None:
    # In the order of the stage, so that the byte operations below run along whole rows.
    pairs = _swap_p_and_e(_w4_view(records).permute(0, 5, 3, 1, 2, 4).contiguous()).view(torch.uint8)
    words[:, :, 0].view(torch.uint8).copy_(pairs & 15)
    words[:, :, 1].view(torch.uint8).copy_(pairs >> 4)


def _w4_view(records: Tensor) -> Tensor:
    """uint8 [T, k tile, 2048] as int64 [T, k tile, c, g, q, h]: words (h, s=0) and (h, s=1) of a vector."""
    return records.view(torch.int64).unflatten(-1, (4, 8, 4, 2))


def _swap_p_and_e(words: Tensor) -> Tensor:
    """In place, bytes 1 and 2 of every four change places, and so do 5 and 6; its own inverse."""
    differ = words >> 8
    differ ^= words
    differ &= 0x0000FF000000FF00
    words ^= differ
    words ^= differ << 8
    return words


def _encode_w3(words: Tensor, records: Tensor) -> None:
    fields = words[:, :, 1] << 3
    fields |= words[:, :, 0]  # bytes (s, p, e) of six bits: registers r = 0 and r = 1
    halves = []
    for position in (0, 1):
        pairs = _squeeze(fields >> 8 * position)  # [T, h, g, k tile, c, q]: 24 bits, pairs 8h..8h+7
        stream = pairs[:, 1] << 24
        stream |= pairs[:, 0]
        halves.append([stream >> 15 * b & 0x7FFF | (stream >> 45 + b & 1) << 15 for b in range(3)])
    lanes = torch.stack([low | high << 16 for low, high in zip(*halves)], -1)  # [T, g, k tile, c, q, b]
    low_words = lanes.view(torch.int32)[..., ::2]  # values up to 2**32 - 1: their low four bytes
    by_lane = low_words.permute(0, 2, 1, 4, 3, 5).reshape(*records.shape[:2], 8, 4, 3, 4)
    _w3_view(records).copy_(by_lane.permute(0, 1, 4, 2, 3, 5))


def _decode_w3(records: Tensor, words: Tensor) -> None:
    by_lane = _w3_view(records).permute(0, 1, 3, 4, 2, 5).flatten(-2)  # [T, k tile, g, q, 12 words]
    lanes = by_lane.unflatten(-1, (4, 3)).permute(0, 2, 1, 4, 3, 5).to(torch.int64)
    fields = torch.zeros_like(words[:, :, 0])
    for position in (0, 1):
        stream = torch.zeros_like(lanes[..., 0])
        for b in range(3):
            half = lanes[..., b] >> 16 * position  # the sign fills bits that the masks drop
            stream |= (half & 0x7FFF) << 15 * b
            stream |= (half >> 15 & 1) << 45 + b
        for h in (0, 1):
            fields[:, h] |= _spread(stream >> 24 * h & 0xFFFFFF) << 8 * position
    words[:, :, 0] = fields & 0x0707070707070707
    words[:, :, 1] = fields >> 3 & 0x0707070707070707


def _w3_view(records: Tensor) -> Tensor:
    """uint8 [T, k tile, 1536] as int32 [T, k tile, v, g, q, component]."""
    return records.view(torch.int32).unflatten(-1, (3, 8, 4, 4))


def _squeeze(word: Tensor) -> Tensor:
    """In place, the low six bits of every sixteen become 24 neighbouring bits."""
    word &= _EVERY_FOURTH_6
    word |= word >> 10
    word &= 0x00000FFF00000FFF
    word |= word >> 20
    word &= 0x0000000000FFFFFF
    return word


def _spread(word: Tensor) -> Tensor:
    """Undo :func:`_squeeze`, in place."""
    word |= word << 20
    word &= 0x00000FFF00000FFF
    word |= word << 10
    word &= _EVERY_FOURTH_6
    return word
