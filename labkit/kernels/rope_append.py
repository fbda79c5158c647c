"""Norm and rope of new tokens' q and k, and the append of k and v to a paged cache, in one kernel.

T new tokens, H query heads, Hkv key/value heads, D head width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from labkit.kernels.launch import Launch
from labkit.kernels.paged_checks import angles, check, group_of, norms
from labkit.kernels.paged_layer import PagedLayer
from labkit.kernels.rmsnorm import ACTIVATIONS
from labkit.kernels.source import KernelSource

FILE = "rope_append.cu"
WARPS = 8


@functools.lru_cache(maxsize=64)
def rope_source(
    dtype: torch.dtype, head_dim: int, block_size: int, *, int8: bool = False, qk_norm: bool = False
) -> KernelSource:
    """The rope and append kernel for one set of constants."""
    defines = {"ACTIVATION": ACTIVATIONS[dtype], "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}
    return KernelSource(FILE, "rope_append", {**defines, "KV_INT8": int(int8), "QK_NORM": int(qk_norm)})


def rope_append(
    qkv: Tensor,
    layer: PagedLayer,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    q_out: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """Norm and rope of q and k of new tokens; q to ``q_out``, k and v to their slots of the cache.

    Args:
        qkv: float16 or bfloat16 [T, (H + 2 Hkv) D], contiguous.
        layer: of the same dtype, or int8.
        cos, sin: float32 [positions, D/2]; half-split layout, see labkit.nn.rope.
        positions: int32 [T], each below the rows of ``cos``.
        slots: int64 [T], block * block_size + offset, no two alike; negative: nothing is written.
        q_norm, k_norm: weights [D] of an RMSNorm of every head before rope, both or neither.
        eps: of that norm.
        q_out: [T, H D] to write; a new tensor by default.
        overlap: start before the kernels ahead have finished (labkit.kernels.overlapped).

    Returns:
        ``q_out``.

    Raises:
        InputError: a shape, dtype, device, head width or block size that does not fit, by name.
    """
    group = group_of(qkv, layer)
    if q_out is None:
        width = layer.kv_heads * group * layer.head_dim
        q_out = torch.empty(qkv.shape[0], width, dtype=qkv.dtype, device=qkv.device)
    launch = rope_launch(qkv, layer, cos, sin, positions, slots, q_norm, k_norm, eps, q_out, overlap)
    if qkv.shape[0]:
        launch.run()
    return q_out


def rope_launch(
    qkv: Tensor,
    layer: PagedLayer,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    q_out: Tensor,
    overlap: bool = False,
) -> Launch:
    """The launch of :func:`rope_append`."""
    group, tokens, head_dim = group_of(qkv, layer), qkv.shape[0], layer.head_dim
    dtype, heads = qkv.dtype, layer.kv_heads * group
    check(
        qkv.device,
        ("qkv", qkv, dtype, tuple(qkv.shape)),
        ("positions", positions, torch.int32, (tokens,)),
        ("slots", slots, torch.int64, (tokens,)),
        ("q_out", q_out, dtype, (tokens, heads * head_dim)),
        *angles(cos, sin, head_dim),
        *norms(q_norm, k_norm, dtype, head_dim),
    )
    args: list[Any] = [qkv, q_norm, k_norm, cos, sin, positions, slots, q_out, layer.keys, layer.values]
    args += [layer.key_scales, layer.value_scales, tokens, heads, layer.kv_heads, float(eps)]
    blocks = -(-tokens * (heads + 2 * layer.kv_heads) // WARPS)
    kernel = rope_source(dtype, head_dim, layer.block_size, int8=layer.quantised, qk_norm=q_norm is not None)
    return Launch(kernel, (max(1, blocks),), (32 * WARPS,), args, qkv.device, overlap)
