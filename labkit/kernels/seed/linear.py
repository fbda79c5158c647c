"""The W4 and W3 seed kernels behind names of the dispatch table; importing this compiles and loads nothing.

| name | W4 | W3 |
|---|---|---|
| gemv_single_row | gemv_row_w4, a row of blocks for each row of x | gemv_row_w3 |
| gemv_small_batch | gemv_batch_w4, up to 8 rows share a weight read | gemv_row_w3 (grid.y = rows) |
| gemm_tiled | gemm_tiled_w4 | gemm_tiled_w3 |
| gemv_batch_w3 | | gemv_batch_w3: an experiment, by ``force`` only |

Every name takes any M, so that thresholds can be moved freely.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labkit.errors import refuse, require
from labkit.kernels import runner
from labkit.kernels.registry import Request, Unavailable, loading, register
from labkit.kernels.seed.launch import GEMM_TILED, GEMV_BATCH, GEMV_ROW, SeedKernel, plan
from labkit.quant.formats import QuantWeight
from labkit.quant.packing import describe

LEAST_CAPABILITY = (8, 0)

NAMES: dict[str, Mapping[str, SeedKernel]] = {
    "gemv_single_row": GEMV_ROW,
    "gemv_small_batch": {"w4": GEMV_BATCH["w4"], "w3": GEMV_ROW["w3"]},
    "gemm_tiled": GEMM_TILED,
    "gemv_batch_w3": {"w3": GEMV_BATCH["w3"]},
}
"""Dispatch name, then format, to the kernel."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A weight that one seed kernel can read, and the temporaries a call may use, bytes."""

    kernel: SeedKernel
    weight: QuantWeight
    temp_bytes: int


def run(x: Tensor, prepared: Prepared) -> Tensor:
    """y = x @ W.T by a seed kernel.

    Args:
        x: float16 [M, K], any strides, on the weight's device.
        prepared: what :func:`prepare` made.

    Returns:
        float16 [M, N]. On CUDA everything is queued on torch's current stream and nothing waits.
    """
    kernel, weight = prepared.kernel, prepared.weight
    m, k = x.shape
    order = weight.k_order
    out = torch.empty(m, weight.n, dtype=x.dtype, device=x.device)
    # Rows do not meet in any kernel: whole tiles may go in a launch of their own, with the same bits.
    rows = kernel.max_rows
    if order is not None or not x.is_contiguous():
        # x is copied a piece at a time.
        rows = min(rows, max(1, prepared.temp_bytes // (2 * k) // kernel.tile_m) * kernel.tile_m)
    for first in range(0, m, rows):
        part = x[first : first + rows]
        part = part.contiguous() if order is None else part.index_select(1, order)
        plan(kernel, part, weight, out[first : first + rows]).run()
    return out


def prepare(name: str, request: Request) -> Prepared:
    """Compile the kernel for this weight, and copy codes that do not start at a whole word.

    Raises:
        Unavailable: no compiler, no CuPy, or a kernel that does not compile here; the reason.
    """
    weight: QuantWeight = request.weight
    kernel = NAMES[name][weight.format]
    if weight.packed.data_ptr() % 4:
        if not request.budget.take(weight.packed.nbytes):
            raise Unavailable("its codes start at an odd address, and the budget has no room for a copy")
        weight = replace(weight, packed=weight.packed.clone())
        request.budget.give_when_gone(weight.packed, weight.packed.nbytes)
    offset = None if weight.offset is None else weight.offset.dtype
    source = kernel.source(offset, vector_x=weight.k % 8 == 0)
    with loading(weight.device):
        runner.load(source, weight.device)
    return Prepared(kernel, weight, request.temp_bytes)


def available(name: str, request: Request) -> str:
    """Why the kernel of that dispatch name cannot serve a request, or an empty string; loads no kernel."""
    if request.dtype != "float16":
        return "float16 activations only"
    kernel = NAMES[name].get(request.format)
    if kernel is None:
        return f"{' and '.join(NAMES[name])} weights only"
    why = kernel.why_not(request.weight)
    if why or request.device == "cpu":
        return why
    if request.capability is None or request.capability < LEAST_CAPABILITY:
        return "needs compute capability 8.0 or newer"
    from labkit.kernels import gpu

    return gpu.why_not()


def _register() -> None:
    for name in NAMES:
        register(
            name,
            run,
            available=functools.partial(available, name),
            prepare=functools.partial(prepare, name),
        )


def _by_name(name: str, x: Tensor, weight: QuantWeight) -> Tensor:
    kernel = NAMES[name].get(getattr(weight, "format", ""))
    if kernel is None:
        refuse("weight", getattr(weight, "format", describe(weight)), " or ".join(NAMES[name]))
    ok = isinstance(x, Tensor) and x.dtype == torch.float16 and x.ndim >= 1 and x.shape[-1] == weight.k
    require(ok, "x", describe(x), f"float16 [..., {weight.k}]")
    flat = x.reshape(-1, weight.k)
    return run(flat, Prepared(kernel, weight, 16 << 20)).view(*x.shape[:-1], weight.n)


def gemv_single_row(x: Tensor, weight: QuantWeight) -> Tensor:
    """y [..., N] = x [..., K] @ W.T, a warp for each output and the weight read once a row of x."""
    return _by_name("gemv_single_row", x, weight)


def gemv_small_batch(x: Tensor, weight: QuantWeight) -> Tensor:
    """As :func:`gemv_single_row`; up to 8 rows share a weight read with W4, none do with W3."""
    return _by_name("gemv_small_batch", x, weight)


def gemm_tiled(x: Tensor, weight: QuantWeight) -> Tensor:
    """y [..., N] = x [..., K] @ W.T in tiles of 32 x 64 outputs."""
    return _by_name("gemm_tiled", x, weight)


def gemv_batch_w3(x: Tensor, weight: QuantWeight) -> Tensor:
    """The W3 batch tile that the first seed article measured to be slower; an experiment."""
    return _by_name("gemv_batch_w3", x, weight)


_register()
