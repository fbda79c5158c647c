"""Unsigned 4-bit codes with integer zero points (GPTQ, AWQ) as W4 with an offset, exactly.

Both formats mean ``w = (u - z) * s`` with u, z in 0..15 and an FP16 scale s. With the signed code
``q = u - 8`` that is ``w = q * s + (8 - z) * s``: the same scale and the offset ``(8 - z) * s``.
A 4-bit integer times an 11-bit significand has at most 15 bits: FP32 holds the offset and every
sum exactly, FP16 does not, so the offset is kept in FP32. Where every z is 8 there is no offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.errors import ModelFileError
from labkit.quant.formats import QuantWeight
from labkit.quant.packing import PACK_MULTIPLE
from labkit.quant.sizes import GROUP_SIZES, round_up

CODES_PER_WORD = 8


def unpack_words(words: Tensor, dim: int) -> Tensor:
    """Split int32 words into eight nibbles each, lowest first, along ``dim``.

    Args:
        words: int32 [A, B].
        dim: 0 -> uint8 [8A, B]; 1 -> uint8 [A, 8B].
    """
    a, b = words.shape
    shape = (a, CODES_PER_WORD, b) if dim == 0 else (a, b, CODES_PER_WORD)
    out = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for i in range(CODES_PER_WORD):  # one int32 temporary of the size of `words`, not eight
        out.select(1 if dim == 0 else 2, i).copy_((words >> (4 * i)) & 0xF)
    return out.view(a * CODES_PER_WORD, b) if dim == 0 else out.view(a, b * CODES_PER_WORD)


def fp16_scales(where: str, scales: Tensor) -> Tensor:
    """``scales`` as FP16 when that is exact; refused otherwise, and when one is not finite."""
    if not bool(torch.isfinite(scales).all()):
        raise ModelFileError(where, "scales with NaN or infinity", "finite scales", "the file is damaged")
    half = scales.to(torch.float16)
    if not torch.equal(half.double(), scales.double()):
        raise ModelFileError(
            where,
            f"{str(scales.dtype).removeprefix('torch.')} scales that FP16 cannot hold exactly",
            "FP16 scales (or values that FP16 holds)",
            "convert the checkpoint's scales to FP16 with the tool that made it",
        )
    return half


def exact_w4(
    where: str,
    codes: Tensor,
    zeros: Tensor,
    scales: Tensor,
    *,
    group_size: int,
    k_order: Tensor | None = None,
) -> QuantWeight:
    """Build the W4 weight whose value is ``(codes - zeros) * scales`` exactly.

    Args:
        where: file and tensor, for error messages.
        codes: uint8 [N, K], 0..15, columns in stored order.
        zeros: uint8 [N, groups], 0..15.
        scales: floating [N, groups].
        group_size: columns a group; any size >= K is one group for the whole row. A size that W4 does
            not have (256, 1024, ...) is split into smaller groups with the same scale, which is exact.
        k_order: see :class:`~labkit.quant.formats.QuantWeight`.
    """
    k = codes.shape[1]
    half = fp16_scales(where, scales)
    offset = (8.0 - zeros.to(torch.float32)) * half.to(torch.float32)
    plain = bool((zeros == 8).all())
    if group_size >= k:
        group_size = round_up(k, PACK_MULTIPLE["w4"])
    elif group_size not in GROUP_SIZES:
        divisors = [size for size in GROUP_SIZES if group_size % size == 0]
        if not divisors:
            raise ModelFileError(where, f"group size {group_size}", "a multiple of 16, or one group a row")
        count = -(-k // divisors[-1])
        repeat = group_size // divisors[-1]
        half = half.repeat_interleave(repeat, dim=1)[:, :count].contiguous()
        offset = offset.repeat_interleave(repeat, dim=1)[:, :count].contiguous()
        group_size = divisors[-1]
    signed = codes.view(torch.int8) - 8
    return QuantWeight.from_codes(
        "w4",
        signed,
        half.contiguous(),
        None if plain else offset.contiguous(),
        group_size=group_size,
        k_order=k_order,
    )


def check_part(where: str, part: str, value: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return ``value`` when it has this shape and kind of dtype ("int32" or "float")."""
    good = value.dtype == torch.int32 if dtype == "int32" else value.is_floating_point()
    if not good or tuple(value.shape) != shape:
        raise ModelFileError(
            f"{where}.{part}",
            f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}",
            f"{dtype} {list(shape)}",
        )
    return value
