"""What the z-split kernels compute, in torch: the same operations in the same order, so the same bits.

Slow on purpose (one step of k at a time, in float64): the meaning of the kernels, for tests and for
chapter 04. Runs on any device.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from labkit.kernels.zsplit.rule import GROUP, run_of, slice_of
from labkit.quant.grouped import GroupedWeight


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 tensors, rounded once, as the instruction does.

    In float64 the product is exact and the sum is not; rounding it to float32 after that would round
    twice. So the float64 sum is rounded to odd first: when it was inexact, its last bit is made 1.
    With 53 bits against 24 the second rounding then gives what one rounding gives.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.contiguous().view(torch.int64)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & torch.isfinite(total) & (bits & 1 == 0)
    return torch.where(inexact, bits + towards, bits).view(torch.float64).float()


def float_reference(x: Tensor, weight: GroupedWeight, nsplit: int, runs: int | None = None) -> Tensor:
    """Bits of ``zsplit_gemm``, whatever its grid.

    Args:
        x: float16, bfloat16 or float32 [M, K].
        weight: [N, K].
        nsplit: slices of K.
        runs: runs of slices, 1 to nsplit; None: nsplit of them, the plain sum of all slices.

    Returns:
        [M, N] of x's dtype.
    """
    values = x.float()
    codes = weight.codes_t[:, : weight.n].float()

    def group_sum(group: int) -> Tensor:
        dot = torch.zeros(x.shape[0], weight.n, device=x.device)
        for k in range(group * GROUP, min((group + 1) * GROUP, weight.k)):
            dot = fma(codes[k].expand_as(dot), values[:, k, None].expand_as(dot), dot)
        return dot

    def add(total: Tensor, group: int) -> Tensor:
        scale = weight.scales_t[group, : weight.n]
        return fma(group_sum(group), scale.expand_as(total), total)

    return _slices(add, x.shape[0], weight, nsplit, runs or nsplit).to(x.dtype)


def int8_reference(
    x_codes: Tensor,
    x_scales: Tensor,
    weight: GroupedWeight,
    nsplit: int,
    dtype: torch.dtype,
    runs: int | None = None,
) -> Tensor:
    """Bits of ``zsplit_gemm_int8``, whatever its grid.

    Args:
        x_codes: int8 [M, Kp].
        x_scales: float32 [M, Kp/32].
        weight: [N, K].
        nsplit: slices of K.
        dtype: of the result [M, N].
        runs: as in :func:`float_reference`.
    """
    dots = group_dots(x_codes, weight)

    def add(total: Tensor, group: int) -> Tensor:
        scale = x_scales[:, group, None] * weight.scales_t[group, : weight.n]
        return total + dots[group].float() * scale

    return _slices(add, x_codes.shape[0], weight, nsplit, runs or nsplit).to(dtype)


def group_dots(x_codes: Tensor, weight: GroupedWeight) -> Tensor:
    """The integer dot of every group: int64 [groups, M, N]; x_codes int8 [M, Kp]."""
    groups = weight.k_padded // GROUP
    left = x_codes.view(x_codes.shape[0], groups, GROUP).permute(1, 0, 2)
    right = weight.codes_t[:, : weight.n].reshape(groups, GROUP, weight.n)
    # Exact: products and sums are integers below 2**53. CUDA has no integer matmul.
    return (left.double() @ right.double()).to(torch.int64)


def quantize_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bits of ``zsplit_quantize``: scale = absmax / 127 of a group of 32, code = x / scale to nearest even.

    Args:
        x: float16, bfloat16 or float32 [M, K].

    Returns:
        int8 [M, Kp] and float32 [M, Kp/32]. A group with Inf or NaN has codes 0 and that as its scale.
    """
    m, k = x.shape
    groups = -(-k // GROUP)
    values = torch.zeros(m, groups * GROUP, device=x.device)
    values[:, :k] = x.float()
    values = values.view(m, groups, GROUP)
    # Not "/ 127": with a Python number torch multiplies by the reciprocal on a GPU.
    largest = values.abs().amax(-1)
    scales = largest / torch.full_like(largest, 127)
    usable = (scales > 0) & torch.isfinite(scales)
    quotient = values / torch.where(usable, scales, 1)[..., None]
    codes = torch.where(usable[..., None], quotient.round().clamp(-127, 127), 0)
    return codes.view(m, groups * GROUP).to(torch.int8), scales


def _slices(  # type: ignore[no-untyped-def]
    add, m: int, weight: GroupedWeight, nsplit: int, runs: int
) -> Tensor:
    """Groups ascending in a slice, slices ascending in a run, runs ascending."""
    groups = weight.k_padded // GROUP

    def of_slice(z: int) -> Tensor:
        total = torch.zeros(m, weight.n, device=weight.device)
        for group in slice_of(z, groups, nsplit):
            total = add(total, group)
        return total

    def of_run(index: int) -> Tensor:
        return functools.reduce(torch.add, map(of_slice, run_of(index, nsplit, runs)))

    return functools.reduce(torch.add, map(of_run, range(runs)))
