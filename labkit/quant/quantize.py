"""Round-to-nearest quantisers, symmetric and with an offset.

Symmetric W4/W3/Q4_0: w = q * scale. The side of zero that reaches further takes the code
that has no partner (-8 or -4), with a negative scale when that side is the positive one, so
the whole code range is used and no weight is further than scale/2 from its code.

Asymmetric W4/W3: w = q * scale + offset. The offset is rounded to float16 first, and the
scale is then chosen to reach both ends from the rounded offset. Zero need not be one of the codes:
on SmolLM2 that costs W3 more perplexity than the smaller weight error gains (measured in chapter 09).

Scales are rounded to float16 before the codes are chosen, so the codes are nearest for the
scale that is stored. Very small scales are rounded up to a float16 subnormal, not to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.errors import refuse, require
from labkit.quant.formats import QuantWeight
from labkit.quant.grouped import GroupedWeight
from labkit.quant.packing import CODE_RANGE, describe, pack
from labkit.quant.sizes import GROUPED_FORMATS, GROUPED_GROUP_SIZE, check_format, resolve_group, round_up

_CHUNK_BYTES = 32 << 20
_SMALLEST_NORMAL = 2.0**-14
_SUBNORMAL_STEP = 2.0**-24
_FP16_MAX = 65504.0


def quantize(
    weight: Tensor,
    format: str,
    group_size: int | str = GROUPED_GROUP_SIZE,
    *,
    offset: bool = False,
    argument: str = "weight",
) -> QuantWeight | GroupedWeight:
    """Quantise a weight by rounding each value to the nearest code.

    Works through the rows in chunks of about 32 MiB, so temporaries do not grow with N.

    Args:
        weight: float16, bfloat16, float32 or float64 [N, K], finite.
        format: "w4", "w3", "q8_0" or "q4_0".
        group_size: 16, 32, 64, 128 or "row" (W4, W3); 32 (Q8_0, Q4_0).
        offset: asymmetric, with a float16 offset a group (W4 and W3 only).
        argument: what the error messages call the weight, such as its tensor name.

    Returns:
        :class:`QuantWeight` for W4 and W3, :class:`GroupedWeight` for Q8_0 and Q4_0. Each
        weight is within |scale|/2, plus the float16 rounding of scale, of its dequantised value.

    Raises:
        InputError: NaN or Inf in the weight; values so large that the float16 scale or offset
            would be infinite; an unknown format or group size; an offset with Q8_0 or Q4_0.
    """
    check_format(format)
    require(
        isinstance(weight, Tensor) and weight.is_floating_point() and weight.ndim == 2 and weight.numel() > 0,
        argument,
        describe(weight),
        "float16, bfloat16 or float32 [N, K], not empty",
    )
    require(isinstance(offset, bool), "offset", repr(offset), "True or False")
    weight = weight.detach()  # of a Parameter, scales would keep the whole autograd graph alive
    n, k = weight.shape
    group = resolve_group(format, k, group_size)
    kp = round_up(k, group)
    if format in GROUPED_FORMATS:
        require(not offset, "offset", True, f"False: {format} has no offset")
    scale_dtype = torch.float32 if format in GROUPED_FORMATS else torch.float16
    scales = torch.empty(n, kp // group, dtype=scale_dtype, device=weight.device)
    offsets = torch.empty_like(scales) if offset else None
    parts: list[Tensor] = []
    step = max(1, _CHUNK_BYTES // (4 * kp))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        values = _grouped_rows(weight[rows], group, kp, argument, start)
        row_scales, row_offsets = _scales(values, format, offset, argument, start)
        codes = _codes(values, row_scales, row_offsets, format)
        codes = codes.view(-1, kp)
        codes[:, k:] = 0
        scales[rows] = row_scales
        if offsets is not None and row_offsets is not None:
            offsets[rows] = row_offsets
        parts.append(codes[:, :k] if format in GROUPED_FORMATS else pack(codes, format))
    stored = torch.cat(parts) if len(parts) > 1 else parts[0]
    if format in GROUPED_FORMATS:
        return GroupedWeight.from_rows(format, stored, scales)
    return QuantWeight(format, stored, scales, offsets, n, k, group)


def _grouped_rows(rows: Tensor, group: int, kp: int, argument: str, start: int) -> Tensor:
    """Rows as float32 [R, groups, G]; padding repeats the last column, so it never widens a group."""
    values = rows.to(torch.float32, copy=True)  # the caller's weight must not be rounded in place
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        row, column = (int(i) for i in (~finite).nonzero()[0])
        found = rows[row, column].item()
        refuse(argument, f"{found} at [{start + row}, {column}]", "finite values (of float32 range)")
    k = values.shape[1]
    if kp != k:
        values = torch.cat([values, values[:, -1:].expand(-1, kp - k)], dim=1)
    return values.reshape(values.shape[0], kp // group, group)


def _scales(
    values: Tensor, format: str, offset: bool, argument: str, start: int
) -> tuple[Tensor, Tensor | None]:
    """Scales (and offsets) [R, groups] as they are stored."""
    low, high = CODE_RANGE[format]
    smallest, largest = values.amin(-1), values.amax(-1)
    if format == "q8_0":
        return torch.maximum(largest, -smallest) / high, None
    if not offset:
        smallest, largest = smallest.clamp(max=0.0), largest.clamp(min=0.0)
        turned = largest > -smallest
        reach = torch.maximum(largest, -smallest)
        other = torch.minimum(largest, -smallest)
        size = torch.maximum(reach / -low, other / high)
        scale = torch.where(turned, -size, size)
        return (scale if format == "q4_0" else _to_fp16(scale, "scale", argument, start)), None
    # Halves first: largest - smallest may overflow float32.
    width = largest / (high - low) - smallest / (high - low)
    middle = _to_fp16(smallest - low * width, "offset", argument, start)
    above = (largest - middle.float()).clamp(min=0.0) / high
    below = (middle.float() - smallest).clamp(min=0.0) / -low
    return _to_fp16(torch.maximum(above, below), "scale", argument, start), middle


def _to_fp16(value: Tensor, what: str, argument: str, start: int) -> Tensor:
    """Round to float16; scales that would be subnormal are rounded away from zero."""
    rounded = value.to(torch.float16)
    if what == "scale":
        steps = (value.abs() / _SUBNORMAL_STEP).ceil() * _SUBNORMAL_STEP
        small = value.abs() < _SMALLEST_NORMAL
        rounded = torch.where(small, torch.copysign(steps, value).to(torch.float16), rounded)
    finite = torch.isfinite(rounded)
    if not bool(finite.all()):
        row, group = (int(i) for i in (~finite).nonzero()[0])
        refuse(
            argument,
            f"{what} {value[row, group].item():.4g} at row {start + row}, group {group}",
            f"values whose {what} fits float16 (at most {_FP16_MAX:.0f})",
            "scale the weight down",
        )
    return rounded


def _codes(values: Tensor, scales: Tensor, offsets: Tensor | None, format: str) -> Tensor:
    """Nearest codes, int8 [R, groups, G]; ``values`` is used up."""
    low, high = CODE_RANGE[format]
    if offsets is not None:
        values -= offsets.float()[..., None]
    divisor = scales.float()[..., None]
    # An all-zero (or exactly constant) group has scale 0: its codes are 0.
    values /= torch.where(divisor == 0, torch.ones_like(divisor), divisor)
    return values.round_().clamp_(low, high).to(torch.int8)
