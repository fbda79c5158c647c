"""What the tensor-core family computes, in torch: its meaning, and its order of sums.

:func:`linear_reference` is the meaning, in one matrix product. :func:`order_reference` makes every sum in
the order that ``tensor_core.cuh`` documents; it is slow, and for tests. Both run on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from labkit.kernels.tensor_core.rule import slices
from labkit.kernels.zsplit.reference import fma
from labkit.kernels.zsplit.rule import slice_of
from labkit.quant.packing import unpack as unpack_codes
from labkit.quant.tiles import TILE_COLUMNS, TileWeight, unpack

STEP = 16
"""Columns that a tensor core adds up in one instruction, in an order of its own."""


def linear_reference(
    x: Tensor,
    weight: TileWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """x @ W.T + bias + residual; with a paired weight silu(gate + bias) * (up + bias) + residual.

    Args:
        x: float [M, K].
        weight: tiles of [N, K]; paired: of [2F, K].
        bias: None or [N] (paired: [2F]).
        residual: None or [M, y's columns].
        dtype: float64 or float32; of every step.

    Returns:
        [M, N], paired [M, F], of ``dtype``.
    """
    return _epilogue(x.to(dtype) @ weight.dequantize(dtype).T, weight, bias, residual)


def order_reference(
    x: Tensor,
    weight: TileWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    parts: int | None = None,
) -> Tensor:
    """The same in float32, every sum in the kernels' order.

    Bits are the kernels' where each group of x has at most one number that is not zero: then no tensor core
    has to round a sum. (SiLU apart: its exponential is the machine's own.)

    Args:
        x: float16 or bfloat16 [M, K].
        weight, bias, residual: as in :func:`linear_reference`.
        parts: slices of K; the rule's for this weight when it is left out.

    Returns:
        [M, N], paired [M, F], of x's dtype.
    """
    stored, group = unpack(weight), weight.tile_group
    columns = weight.k_tiles * TILE_COLUMNS
    codes = unpack_codes(stored.packed, weight.k, weight.format).float()
    codes = pad(codes, (0, columns - weight.k))
    values = x.float() if weight.k_order is None else x.float().index_select(1, weight.k_order)
    values = pad(values, (0, columns - weight.k))
    # The stored group of each group of the tiles; behind the last stored one x is zero.
    first = torch.arange(0, columns, group, device=x.device)
    owner = (first // weight.group_size).clamp(max=stored.scales.shape[1] - 1)
    scales = stored.scales.float()[:, owner]
    offsets = None if stored.offset is None else stored.offset.float()[:, owner]

    def contribution(tile: int) -> Tensor:
        total = None
        for j in range(tile * TILE_COLUMNS // group, (tile + 1) * TILE_COLUMNS // group):
            partial = torch.zeros(x.shape[0], weight.n, device=x.device)
            x_sum = torch.zeros(x.shape[0], 1, device=x.device)
            for k in range(j * group, (j + 1) * group, STEP):
                step = values[:, k : k + STEP]
                partial = partial + step @ codes[:, k : k + STEP].T
                x_sum = x_sum + step.sum(1, keepdim=True)
            scale = scales[:, j].expand_as(partial)
            total = partial * scale if total is None else fma(partial, scale, total)
            if offsets is not None:
                total = fma(x_sum.expand_as(partial), offsets[:, j].expand_as(partial), total)
        assert total is not None
        return total

    parts = slices(weight.row_tiles, weight.k_tiles) if parts is None else parts
    y = None
    for part in range(parts):
        of_slice = None
        for tile in slice_of(part, weight.k_tiles, parts):
            added = contribution(tile)
            of_slice = added if of_slice is None else of_slice + added
        assert of_slice is not None
        y = of_slice if y is None else y + of_slice
    assert y is not None
    return _epilogue(y, weight, bias, residual).to(x.dtype)


def _epilogue(y: Tensor, weight: TileWeight, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    y = y if bias is None else y + bias.to(y.dtype)
    if weight.paired:
        gate, up = y.chunk(2, dim=1)
        y = silu(gate) * up
    return y if residual is None else y + residual.to(y.dtype)
