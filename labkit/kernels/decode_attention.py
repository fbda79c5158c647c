"""Attention of a decode step over a static cache: rope, append and attention in one kernel.

B batch, H query heads, Hkv key/value heads, D head width, S capacity of the cache.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import require
from labkit.kernels.launch import Launch
from labkit.kernels.rmsnorm import ACTIVATIONS
from labkit.kernels.source import KernelSource
from labkit.quant.packing import describe

FILE = "decode_attention.cu"
HEAD_DIMS = (64, 80, 96, 128)
MOST_GROUP = 16
WARPS, STRIP = 8, 16
SPLIT = WARPS * STRIP
"""Tokens that one block attends to."""


@functools.lru_cache(maxsize=64)
def source(dtype: torch.dtype, head_dim: int, group: int, qk_norm: bool = False) -> KernelSource:
    """The kernel for one dtype, head width and number of query heads a key/value head."""
    defines = {"ACTIVATION": ACTIVATIONS[dtype], "HEAD_DIM": head_dim, "GROUP": group}
    return KernelSource(FILE, "decode_attention", {**defines, "QK_NORM": int(qk_norm)})


def why_not(head_dim: int, group: int) -> str:
    """Why the kernel cannot serve a model, or an empty string."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}; it has {', '.join(map(str, HEAD_DIMS))}"
    if not 1 <= group <= MOST_GROUP:
        return f"{group} query heads a key/value head; it has 1 to {MOST_GROUP}"
    return ""


@dataclass(frozen=True)
class Scratch:
    """Partial results of one launch at a time; layers that follow each other share it.

    Attributes:
        part: float32, each split's output; one element when the cache is a single split.
        part_ml: float32, each split's maximum and sum.
        tickets: int32 [B, Hkv]: arrivals, zero between launches.
    """

    part: Tensor
    part_ml: Tensor
    tickets: Tensor

    @classmethod
    def new(cls, batch: int, kv_heads: int, group: int, head_dim: int, capacity: int, device: Any) -> Scratch:
        """For caches of [batch, kv_heads, capacity, head_dim]."""
        splits = -(-capacity // SPLIT)
        tiles, items = -(-group // 8), -(-head_dim // 64) * 128
        cells = batch * kv_heads * splits if splits > 1 else 0
        return cls(
            torch.empty(max(4, cells * tiles * items * 4), dtype=torch.float32, device=device),
            torch.empty(max(4, cells * 2 * 8 * tiles), dtype=torch.float32, device=device),
            torch.zeros(batch, kv_heads, dtype=torch.int32, device=device),
        )


def decode_attention(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    scratch: Scratch,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """One new token a row: rope on q and k, append k and v, attend to all tokens up to the new one.

    Args:
        qkv: float16 or bfloat16 [B, (H + 2 Hkv) D], contiguous.
        k_cache, v_cache: [B, Hkv, S, D], contiguous; position lengths[b] is written.
        cos, sin: float32 [positions, D/2], positions >= S; half-split layout, see labkit.nn.rope.
        lengths: int32 [B], cached tokens; a row that is negative or at S is left alone, output included.
        scratch: of the same shapes, see :meth:`Scratch.new`.
        q_norm, k_norm: weights [D] of an RMSNorm of every head before rope, both or neither.
        eps: of that norm.
        out: [B, H D] to write; a new tensor by default.
        overlap: start before the kernels ahead have finished, none of which writes anything that is read
            here but ``qkv``.

    Returns:
        [B, H D]; a row's bits depend neither on the other rows nor on S.

    Raises:
        InputError: a shape, dtype, device, head width or group that does not fit, by name.
    """
    batch, kv_heads, _, head_dim = _cache_shape(k_cache)
    if out is None:
        width = qkv.shape[-1] - 2 * kv_heads * head_dim
        out = torch.empty(batch, max(width, 0), dtype=qkv.dtype, device=qkv.device)
    launch(qkv, k_cache, v_cache, cos, sin, lengths, scratch, out, q_norm, k_norm, eps, overlap).run()
    return out


def launch(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    scratch: Scratch,
    out: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    overlap: bool = False,
) -> Launch:
    """The launch of :func:`decode_attention`."""
    batch, kv_heads, capacity, head_dim = _cache_shape(k_cache)
    good = isinstance(qkv, Tensor) and qkv.ndim == 2 and qkv.dtype in ACTIVATIONS
    group, rest = divmod(qkv.shape[1] - 2 * kv_heads * head_dim, kv_heads * head_dim) if good else (0, 1)
    expected = f"float16 or bfloat16 [{batch}, (H + 2 x {kv_heads}) x {head_dim}]"
    require(good and qkv.shape[0] == batch and rest == 0, "qkv", describe(qkv), expected)
    reason = why_not(head_dim, group)
    require(not reason, "qkv", reason, "a head width and a group that the kernel has")
    dtype, device = qkv.dtype, qkv.device
    checked: list[tuple[str, Tensor, torch.dtype, tuple[int, ...]]] = [
        ("qkv", qkv, dtype, tuple(qkv.shape)),
        ("k_cache", k_cache, dtype, (batch, kv_heads, capacity, head_dim)),
        ("v_cache", v_cache, dtype, (batch, kv_heads, capacity, head_dim)),
        ("lengths", lengths, torch.int32, (batch,)),
        ("out", out, dtype, (batch, kv_heads * group * head_dim)),
        ("cos", cos, torch.float32, (cos.shape[0], head_dim // 2)),
        ("sin", sin, torch.float32, (cos.shape[0], head_dim // 2)),
    ]
    require((q_norm is None) == (k_norm is None), "q_norm, k_norm", "one of them", "both or neither")
    if q_norm is not None and k_norm is not None:
        checked += [("q_norm", q_norm, dtype, (head_dim,)), ("k_norm", k_norm, dtype, (head_dim,))]
    for name, tensor, wanted, shape in checked:
        right = tensor.dtype == wanted and tuple(tensor.shape) == shape and tensor.device == device
        text = f"contiguous {str(wanted).removeprefix('torch.')} {list(shape)} on {device}"
        require(right and tensor.is_contiguous(), name, f"{describe(tensor)} on {tensor.device}", text)
        if name != "lengths":
            require(tensor.data_ptr() % 16 == 0, name, "an odd address", "alignment to 16 bytes", "clone it")
    require(cos.shape[0] >= capacity, "cos", f"{cos.shape[0]} positions", f"at least {capacity}")
    splits = -(-capacity // SPLIT)
    wanted_cells = batch * kv_heads * splits * 2 * 8 * -(-group // 8) if splits > 1 else 0
    fits = scratch.tickets.shape == (batch, kv_heads) and scratch.part_ml.numel() >= wanted_cells
    require(fits, "scratch", "of another shape", f"Scratch.new({batch}, {kv_heads}, {group}, {head_dim}, …)")
    scale = math.log2(math.e) / math.sqrt(head_dim)
    args: list[Any] = [qkv, k_cache, v_cache, cos, sin, lengths, q_norm, k_norm, out]
    args += [scratch.part, scratch.part_ml, scratch.tickets, kv_heads, capacity, scale, float(eps)]
    kernel = source(dtype, head_dim, group, q_norm is not None)
    return Launch(kernel, (splits, kv_heads, batch), (32 * WARPS,), args, device, overlap)


def _cache_shape(cache: Any) -> tuple[int, int, int, int]:
    good = isinstance(cache, Tensor) and cache.ndim == 4 and cache.numel() > 0
    require(good, "k_cache", describe(cache), "[B, Hkv, S, D]")
    batch, kv_heads, capacity, head_dim = cache.shape
    return batch, kv_heads, capacity, head_dim
