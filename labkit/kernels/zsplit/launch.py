"""torch tensors in, torch tensors out: the z-split GEMM on a GPU or in the emulator.

Launches go to torch's current stream; partial sums come from torch's allocator, so they belong to that
stream and a CUDA graph can capture the call. Sizes beyond what a grid takes are done in bands of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from labkit.errors import refuse, require
from labkit.kernels.launch import Launch
from labkit.kernels.source import KernelSource
from labkit.kernels.zsplit import rule as rules
from labkit.kernels.zsplit.rule import GROUP, MAX_BAND_ROWS, MAX_GRID_X, REDUCE_THREADS, Plan, plan
from labkit.quant.grouped import GroupedWeight
from labkit.quant.packing import describe

ACTIVATIONS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The define ACTIVATION of zsplit.cu for each dtype of x and of the result."""

FILE = "zsplit.cu"


@functools.lru_cache(maxsize=64)
def source(entry: str, dtype: torch.dtype, defines: tuple[tuple[str, int], ...] = ()) -> KernelSource:
    """A kernel of zsplit.cu for one activation dtype; ``defines`` are the file's other constants."""
    return KernelSource(FILE, entry, {"ACTIVATION": ACTIVATIONS[dtype], **dict(defines)})


def zsplit_gemm(
    x: Tensor,
    weight: GroupedWeight,
    *,
    rule: str = "invariant",
    nsplit: int | None = None,
    defines: tuple[tuple[str, int], ...] = (),
) -> Tensor:
    """y = x @ W.T, products and sums in float32.

    Args:
        x: float16, bfloat16 or float32 [M, K] on the weight's device; M >= 0, any strides.
        weight: Q8_0 or Q4_0, [N, K].
        rule: "invariant" (slices, and runs of slices, by (N, K)) or "seed" (slices by M as well, no runs);
            see :func:`rule.plan`.
        nsplit: a number of slices instead of the rule's, without runs.
        defines: constants of zsplit.cu, such as (("CODES_A_LOAD", 1),).

    Returns:
        [M, N] of x's dtype.

    Raises:
        InputError: a wrong shape, dtype or device, by name.
    """
    x = _checked(x, weight)
    out = torch.empty(x.shape[0], weight.n, dtype=x.dtype, device=x.device)
    for launch in gemm_launches(x, weight, out, rule=rule, nsplit=nsplit, defines=defines):
        launch.run()
    return out


def zsplit_gemm_int8(
    x: Tensor,
    weight: GroupedWeight,
    *,
    rule: str = "invariant",
    nsplit: int | None = None,
    defines: tuple[tuple[str, int], ...] = (),
) -> Tensor:
    """As :func:`zsplit_gemm`, with x rounded to int8 codes and a scale for each group of 32.

    The rounding costs accuracy (the seed quotes a perplexity 3.0 % higher, against 0.19 % with float
    activations), so no row of the dispatch table chooses it unasked.
    """
    x = _checked(x, weight)
    codes, scales = quantize_activations(x)
    out = torch.empty(x.shape[0], weight.n, dtype=x.dtype, device=x.device)
    for launch in int8_launches(codes, scales, weight, out, rule=rule, nsplit=nsplit, defines=defines):
        launch.run()
    return out


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 codes and scales of x, group by group.

    Args:
        x: float16, bfloat16 or float32 [M, K], contiguous.

    Returns:
        int8 [M, Kp] (zero beyond K) and float32 [M, Kp/32].
    """
    ok = isinstance(x, Tensor) and x.ndim == 2 and x.dtype in ACTIVATIONS and x.shape[1] >= 1
    require(ok, "x", describe(x), "float16, bfloat16 or float32 [M, K]")
    m, k = x.shape
    groups = -(-k // GROUP)
    codes = torch.empty(m, groups * GROUP, dtype=torch.int8, device=x.device)
    scales = torch.empty(m, groups, dtype=torch.float32, device=x.device)
    if m:
        quantize_launch(x.contiguous(), codes, scales).run()
    return codes, scales


def quantize_launch(x: Tensor, codes: Tensor, scales: Tensor) -> Launch:
    """The launch of :func:`quantize_activations`, into tensors that are given."""
    m, k = x.shape
    grid = -(-m * scales.shape[1] * GROUP // REDUCE_THREADS)
    require(grid <= MAX_GRID_X, "x", describe(x), f"at most {MAX_GRID_X * REDUCE_THREADS} values")
    args = [x, codes, scales, m, k]
    return Launch(source("zsplit_quantize", x.dtype), (grid,), (REDUCE_THREADS,), args, x.device)


def gemm_launches(
    x: Tensor,
    weight: GroupedWeight,
    out: Tensor,
    *,
    rule: str = "invariant",
    nsplit: int | None = None,
    defines: tuple[tuple[str, int], ...] = (),
) -> Iterator[Launch]:
    """Launches that fill ``out`` [M, N] with x @ W.T, in order: a GEMM, then its reduce when K is split.

    Args:
        x: contiguous [M, K]; the others as in :func:`zsplit_gemm`.
    """
    for first, rows, planned in _bands(x.shape[0], weight, rule, nsplit):
        band, result = x[first : first + rows], out[first : first + rows]
        part = _part(planned, rows, weight)
        args = [weight.codes_t, weight.scales_t, band, None if planned.split else result, part]
        yield _gemm("zsplit_gemm", args, rows, weight, planned, x.dtype, defines)
        if part is not None:
            yield reduce_launch(part, result, planned.runs)


def int8_launches(
    codes: Tensor,
    scales: Tensor,
    weight: GroupedWeight,
    out: Tensor,
    *,
    rule: str = "invariant",
    nsplit: int | None = None,
    defines: tuple[tuple[str, int], ...] = (),
) -> Iterator[Launch]:
    """As :func:`gemm_launches`, from int8 codes [M, Kp] and float32 scales [M, Kp/32]."""
    for first, rows, planned in _bands(codes.shape[0], weight, rule, nsplit):
        band = slice(first, first + rows)
        part = _part(planned, rows, weight)
        args: list[Any] = [weight.codes_t, weight.scales_t, codes[band], scales[band]]
        args += [None if planned.split else out[band], part]
        yield _gemm("zsplit_gemm_int8", args, rows, weight, planned, out.dtype, defines)
        if part is not None:
            yield reduce_launch(part, out[band], planned.runs)


def reduce_launch(part: Tensor, out: Tensor, runs: int) -> Launch:
    """out [M, N] = the planes of part float32 [z, M, N], as many runs of them, in ascending order.

    Few outputs get several threads each; more than the planes could not be busy.
    """
    total, planes = out.numel(), part.shape[0]
    few = total <= rules.REDUCE_FEW_OUTPUTS and planes >= rules.REDUCE_WORKERS
    workers = rules.REDUCE_WORKERS if few or runs < planes else 1
    block = (REDUCE_THREADS // workers, workers)
    args = [part, out, total, planes, runs]
    return Launch(source("zsplit_reduce", out.dtype), (-(-total // block[0]),), block, args, out.device)


def aligned(weight: GroupedWeight) -> GroupedWeight:
    """The weight itself, or a copy when its memory does not start where vector loads may."""
    if weight.codes_t.data_ptr() % 16 == 0 and weight.scales_t.data_ptr() % 16 == 0:
        return weight
    codes_t, scales_t = weight.codes_t.clone(), weight.scales_t.clone()
    return GroupedWeight(weight.format, codes_t, scales_t, weight.n, weight.k, weight.group_size)


def _gemm(
    entry: str,
    tensors: list[Any],
    rows: int,
    weight: GroupedWeight,
    planned: Plan,
    dtype: torch.dtype,
    defines: tuple[tuple[str, int], ...],
) -> Launch:
    groups = rules.groups_of(weight.k)
    args = [*tensors, rows, weight.n, weight.codes_t.shape[1], weight.k, planned.nsplit, planned.runs]
    args += [groups // planned.nsplit, planned.nsplit // planned.runs]
    return Launch(source(entry, dtype, defines), planned.grid, planned.block, args, weight.device)


def _part(planned: Plan, rows: int, weight: GroupedWeight) -> Tensor | None:
    if not planned.split:
        return None
    return torch.empty(planned.planes, rows, weight.n, dtype=torch.float32, device=weight.device)


def _bands(m: int, weight: GroupedWeight, rule: str, nsplit: int | None) -> Iterator[tuple[int, int, Plan]]:
    """First row, rows and plan of each launch; only the seed's rule looks at M, and at all of it."""
    for first in range(0, m, MAX_BAND_ROWS):
        rows = min(MAX_BAND_ROWS, m - first)
        yield first, rows, plan(rows, weight.n, weight.k, rule=rule, nsplit=nsplit)


def _checked(x: Tensor, weight: GroupedWeight) -> Tensor:
    if not isinstance(weight, GroupedWeight):
        refuse("weight", describe(weight), "a GroupedWeight (q8_0 or q4_0)")
    if not isinstance(x, Tensor) or x.dtype not in ACTIVATIONS or x.ndim != 2 or x.shape[1] != weight.k:
        refuse("x", describe(x), f"float16, bfloat16 or float32 [M, {weight.k}]")
    require(x.device == weight.device, "x", f"on {x.device}", f"on {weight.device}, where the weight is")
    return x.contiguous()
