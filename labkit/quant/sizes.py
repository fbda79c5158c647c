"""Sizes of the storage formats, by formula, and the rules for groups and padding."""

from __future__ import annotations

import torch

from labkit.errors import refuse, require
from labkit.quant.packing import PACK_MULTIPLE

PACKED_FORMATS = ("w4", "w3")
GROUPED_FORMATS = ("q8_0", "q4_0")
FORMATS = PACKED_FORMATS + GROUPED_FORMATS

GROUP_SIZES = (16, 32, 64, 128)
"""Group sizes of W4 and W3; a whole row ("row") is also allowed."""

GROUPED_GROUP_SIZE = 32
"""The group of Q8_0 and Q4_0 blocks."""

N_ALIGN = 16
"""Q8_0/Q4_0 columns are padded to this many, so that 16-byte loads of codes stay aligned."""


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def check_format(format: str, argument: str = "format") -> str:
    """Return ``format``, or raise :class:`InputError` when it is not a storage format."""
    require(format in FORMATS, argument, repr(format), "one of " + ", ".join(FORMATS))
    return format


def resolve_group(format: str, k: int, group_size: int | str) -> int:
    """Group size in codes: ``"row"`` becomes the padded length of a row.

    Raises:
        InputError: a group size that the format does not have.
    """
    check_format(format)
    require(isinstance(k, int) and k >= 1, "k", k, "a whole number >= 1")
    if format in GROUPED_FORMATS:
        require(
            group_size == GROUPED_GROUP_SIZE and not isinstance(group_size, bool),
            "group_size",
            repr(group_size),
            f"{GROUPED_GROUP_SIZE} (the block of {format})",
        )
        return GROUPED_GROUP_SIZE
    row = round_up(k, PACK_MULTIPLE[format])
    if group_size == "row":
        return row
    if isinstance(group_size, int) and not isinstance(group_size, bool) and group_size in (*GROUP_SIZES, row):
        return group_size
    refuse("group_size", repr(group_size), f'16, 32, 64, 128 or "row" ({row} codes here)')


def padded_k(format: str, k: int, group_size: int | str) -> int:
    """K rounded up so that it holds whole groups and fills whole bytes."""
    return round_up(k, resolve_group(format, k, group_size))


def packed_bytes(
    format: str, n: int, k: int, group_size: int | str, offset_dtype: torch.dtype | None = None
) -> int:
    """Bytes of a stored weight, by formula.

    W4: N * Kp/2, W3: N * 3Kp/8, plus 2 bytes of scale (and 2 or 4 of offset) a group.
    Q8_0 and Q4_0 hold one byte a code and 4 bytes of scale a group, for N padded to 16.

    Args:
        format: "w4", "w3", "q8_0" or "q4_0".
        n: rows (output features).
        k: columns (input features) before padding.
        group_size: codes a scale, or "row".
        offset_dtype: float16, float32, or None for a symmetric weight.

    Returns:
        Bytes of codes, scales and offsets together (without an act-order column list).
    """
    require(isinstance(n, int) and n >= 1, "n", n, "a whole number >= 1")
    group = resolve_group(format, k, group_size)
    kp = round_up(k, group)
    require(
        offset_dtype in (None, torch.float16, torch.float32),
        "offset_dtype",
        offset_dtype,
        "float16, float32 or None",
    )
    if format in GROUPED_FORMATS:
        require(offset_dtype is None, "offset_dtype", offset_dtype, f"None: {format} has no offset")
        npad = round_up(n, N_ALIGN)
        return npad * kp + 4 * npad * (kp // group)
    code_bytes = kp // 2 if format == "w4" else kp // 8 * 3
    per_group = 2 + (offset_dtype.itemsize if offset_dtype is not None else 0)
    return n * (code_bytes + per_group * (kp // group))
