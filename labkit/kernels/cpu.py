"""Kernels made of torch operations. None needs CuPy; the first runs on any device.

* dequant_matmul: dequantise a chunk of rows, multiply, forget it. Bounded temporaries, any weight.
* dense: one dense copy in the activation dtype, kept within a memory budget; CPU.
* int4pack: torch's 4-bit CPU kernel, bfloat16 activations; reads W4 and W3 codes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit.kernels.registry import Request, Unavailable, register
from labkit.quant.formats import QuantWeight
from labkit.quant.grouped import GroupedWeight

_INT4_GROUPS = (32, 64, 128, 256)
_INT4_ROWS = 16
_PROBE_ROWS = 64


class Chunked(NamedTuple):
    """A weight and the temporaries that :func:`dequant_matmul` may use for it, bytes."""

    weight: QuantWeight | GroupedWeight
    temp_bytes: int


def dequant_matmul(x: Tensor, prepared: Chunked) -> Tensor:
    """y = x @ dequantise(weight).T, a block of rows of each at a time.

    On the CPU half types are computed in float32: more exact than half arithmetic, and faster.

    Args:
        x: float [M, K].
        prepared: the weight [N, K] and the bound on temporaries.

    Returns:
        [M, N] of x's dtype. Temporaries stay under ``temp_bytes`` as long as that holds one row.
    """
    weight, temp_bytes = prepared
    (m, k), n = x.shape, weight.n
    dtype = torch.float32 if x.device.type == "cpu" and x.dtype.itemsize < 4 else x.dtype
    order = weight.k_order
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    rows, block = _chunks(m, n, k, weight.k_padded, dtype.itemsize, temp_bytes)
    for start in range(0, n, rows):
        chosen = slice(start, min(start + rows, n))
        # Each format in the order it is stored in: turning a chunk costs more than multiplying it.
        if isinstance(weight, QuantWeight):
            values = weight.dequantize_stored(dtype, chosen).t()
        else:
            values = weight.dequantize_t(dtype, chosen)
        # Blocks of x inside: gathering one again costs less than dequantising a chunk again.
        for first in range(0, m, block):
            part = x[first : first + block]
            if order is not None:
                part = part[:, order]
            y[first : first + block, chosen] = part.to(dtype) @ values
        del values  # or the next chunk is made while this one lives
    return y


def _chunks(m: int, n: int, k: int, kp: int, itemsize: int, temp_bytes: int) -> tuple[int, int]:
    """Rows of weight and rows of x at a time: three quarters of the temporaries for the weight."""
    # Unpacked int8 codes and float32 values, then the values with their copy in a half type.
    row_bytes = 6 * kp
    rows = max(1, min(n, temp_bytes * 3 // 4 // row_bytes))
    # x in stored order and in the compute dtype, and the product before it is rounded into y.
    x_bytes = 2 * k * itemsize + rows * itemsize
    return rows, max(1, min(m, temp_bytes // 4 // x_bytes))


def _prepare_dequant(request: Request) -> Chunked:
    return Chunked(request.weight, request.temp_bytes)


class DenseCopy:
    """The dense copy of one weight; its bytes return to the budget when it is freed."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


def dense(x: Tensor, prepared: DenseCopy) -> Tensor:
    """y = x @ W.T with a kept dense copy W [N, K] of x's dtype."""
    return linear(x, prepared.values)


def _prepare_dense(request: Request) -> DenseCopy:
    weight, dtype = request.weight, getattr(torch, request.dtype)
    size = weight.n * weight.k * dtype.itemsize
    budget = request.budget
    if not budget.take(size):
        raise Unavailable(
            f"a dense copy needs {size / 2**20:.1f} MiB, {budget.left / 2**20:.1f} MiB left of the budget "
            f"of {budget.limit / 2**20:.1f} MiB"
        )
    try:
        values = torch.empty(weight.n, weight.k, dtype=dtype, device=weight.device)
        rows, _ = _chunks(1, weight.n, weight.k, weight.k_padded, 4, request.temp_bytes // 2)
        for start in range(0, weight.n, rows):
            chosen = slice(start, min(start + rows, weight.n))
            values[chosen] = weight.dequantize(dtype, chosen)
    except BaseException:
        budget.give(size)
        raise
    copy = DenseCopy(values)
    budget.give_when_gone(copy, size)
    return copy


def _dense_available(request: Request) -> str:
    return "" if request.device == "cpu" else "keeps a dense copy in CPU memory only"


class Int4Pack(NamedTuple):
    """A weight in torch's CPU int4 layout."""

    packed: Tensor
    scales_and_zeros: Tensor  # bfloat16 [K/G, N, 2]; the kernel computes (u - 8) * scale + zero
    group_size: int
    k_order: Tensor | None


def int4pack(x: Tensor, prepared: Int4Pack) -> Tensor:
    """y = x @ W.T by torch's int4 CPU kernel; x bfloat16 [M, K], y bfloat16 [M, N]."""
    if prepared.k_order is not None:
        x = x[:, prepared.k_order]
    return torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.contiguous(), prepared.packed, prepared.group_size, prepared.scales_and_zeros
    )


def _int4_packed(weight: QuantWeight, rows: int) -> Tensor:
    """The codes in torch's layout, uint8 [N, K/2], packed ``rows`` rows at a time.

    torch packs int32 codes: the whole weight at once would take eight times its packed size. Its layout
    is made of blocks of 32 or 64 rows, so pieces of a multiple of 64 rows stand side by side in it.
    """
    packed = torch.empty(weight.n, weight.k // 2, dtype=torch.uint8)
    for start in range(0, weight.n, rows):
        piece = torch.arange(start, min(start + rows, weight.n))
        codes = weight.select_rows(piece).codes().to(torch.int32)
        codes += 8
        packed[start : start + rows] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
    return packed


def _int4_layout(weight: QuantWeight, temp_bytes: int) -> Int4Pack:
    # Per code: int32 and int8 codes, and packed bytes twice, are alive together.
    rows = max(64, temp_bytes // (7 * weight.k) // 64 * 64)
    packed = _int4_packed(weight, rows)
    zeros = torch.zeros_like(weight.scales) if weight.offset is None else weight.offset
    both = torch.stack([weight.scales.t().bfloat16(), zeros.t().bfloat16()], dim=-1).contiguous()
    return Int4Pack(packed, both, weight.group_size, weight.k_order)


def _int4_error(prepared: Int4Pack, weight: QuantWeight) -> tuple[float, float]:
    """Root-mean-square error on some rows, of this kernel and of plain bfloat16, against float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.k, generator=generator).bfloat16()
    rows = slice(0, min(_PROBE_ROWS, weight.n))
    exact = x.double() @ weight.dequantize(torch.float64, rows).t()
    mine = int4pack(x, prepared)[:, rows].double() - exact
    plain = linear(x, weight.dequantize(torch.bfloat16, rows)).double() - exact
    return mine.square().mean().sqrt().item(), plain.square().mean().sqrt().item()


@functools.cache
def int4pack_missing() -> str:
    """Why this torch cannot run int4pack, or an empty string; probed once with a small weight."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (144, 64), generator=generator).to(torch.int8)
    scales = (torch.rand(144, 2, generator=generator) + 0.5).half()
    weight = QuantWeight.from_codes("w4", codes, scales, -scales, group_size=32)
    try:
        mine, plain = _int4_error(_int4_layout(weight, 1 << 20), weight)
        pieces = torch.equal(_int4_packed(weight, 64), _int4_packed(weight, weight.n))
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return f"torch {torch.__version__} does not run it here: {str(error).splitlines()[0]}"
    if not pieces:
        return f"torch {torch.__version__} packs rows in another layout here"
    return "" if mine <= 2 * plain else f"error {mine:.3g} in its probe, {plain:.3g} by plain bfloat16"


def _int4_available(request: Request) -> str:
    weight = request.weight
    if request.device != "cpu" or request.dtype != "bfloat16":
        return "bfloat16 on the CPU only"
    if not isinstance(weight, QuantWeight):
        return "W4 and W3 weights only"
    if weight.group_size not in _INT4_GROUPS:
        return f"group size {weight.group_size}; it has 32, 64, 128 and 256"
    if weight.k != weight.k_padded or weight.n % _INT4_ROWS:
        return f"[{weight.n}, {weight.k}] is not whole: it needs N % 16 == 0 and K % {weight.group_size} == 0"
    return int4pack_missing()


def _prepare_int4(request: Request) -> Int4Pack:
    weight: QuantWeight = request.weight
    size = weight.n * weight.k // 2 + weight.scales.numel() * 4
    budget: Any = request.budget
    if not budget.take(size):
        raise Unavailable(f"its copy needs {size / 2**20:.1f} MiB, {budget.left / 2**20:.1f} MiB left")
    try:
        prepared = _int4_layout(weight, request.temp_bytes)
        mine, plain = _int4_error(prepared, weight)
    except BaseException:
        budget.give(size)
        raise
    budget.give_when_gone(prepared.packed, size)
    # Scale and offset are rounded to bfloat16 there: too coarse where an offset is far above its scale.
    # The absolute term is one rounding of the result, for weights that plain bfloat16 holds exactly.
    if not mine <= 2 * plain + 1e-30:
        raise Unavailable(
            f"its error on this weight is {mine / max(plain, 1e-300):.1f} times plain bfloat16's"
        )
    return prepared


register("dequant_matmul", dequant_matmul, prepare=_prepare_dequant)
register("dense", dense, available=_dense_available, prepare=_prepare_dense)
register("int4pack", int4pack, available=_int4_available, prepare=_prepare_int4)
