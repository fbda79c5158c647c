"""Attention over paged keys and values: the exact torch reference, and what a decoder calls.

T new tokens of all rows, B rows, H query heads, Hkv key/value heads, group = H / Hkv, D head width,
S tokens that a row attends to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.cache.paged import PagedKV, Places, as_range
from labkit.cache.views import KVView
from labkit.errors import require
from labkit.kernels import paged_attention
from labkit.kernels.paged_layer import PagedLayer, dequantise
from labkit.models.config import ModelConfig
from labkit.nn.angles import Angles, own_angles, stretches
from labkit.nn.rope import Rotary, rotate
from labkit.quant.packing import describe

_KEYS_AT_ONCE = 1024  # tokens of a chunk of the reference, at absolute positions
_QUERIES_AT_ONCE = 256
_MASK_ELEMENTS = 1 << 22  # bounds a mask [queries, S] of the torch path


# --- the meaning ------------------------------------------------------------------------------------------


@torch.inference_mode()
def paged_attention_reference(
    q: Tensor, layer: PagedLayer, view: KVView, scale: float | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Attention of every new token over its row's tokens up to itself; slow, exact, of bounded memory.

    Softmax is summed up online over chunks of 1024 tokens, so a long context needs no more memory. Only
    the slots of a row's own tokens are read: whatever else lies in the pool does not matter.

    Args:
        q: [T, H, D], after rope, any float dtype.
        layer: keys and values, the new ones included; any dtype and memory order.
        view: the step.
        scale: of the scores; None for 1 / sqrt(D).
        dtype: to compute in and to return: float64 is the truth of a test. None computes in float32 and
            rounds once to q's dtype.

    Returns:
        [T, H, D].

    Raises:
        InputError: q of another shape than the view and the layer say.
    """
    kv_heads, head_dim = layer.kv_heads, layer.head_dim
    good = q.ndim == 3 and q.shape[0] == view.tokens and q.shape[2] == head_dim and q.is_floating_point()
    good = good and q.shape[1] % kv_heads == 0
    require(good, "q", describe(q), f"float [{view.tokens}, {kv_heads} x group, {head_dim}]")
    require(
        view.block_size == layer.block_size, "view", f"blocks of {view.block_size}", f"{layer.block_size}"
    )
    require(
        view.num_blocks <= layer.num_blocks,
        "view",
        f"{view.num_blocks} blocks",
        f"at most {layer.num_blocks}",
    )
    work = torch.float32 if dtype is None else dtype
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out = torch.empty(q.shape, dtype=work, device=q.device)
    first = 0
    for row, (count, context) in enumerate(zip(view.counts, view.contexts, strict=True)):
        for start in range(0, count, _QUERIES_AT_ONCE):
            stop = min(start + _QUERIES_AT_ONCE, count)
            part = q[first + start : first + stop].to(work) * scale
            positions = torch.arange(context - count + start, context - count + stop, device=q.device)
            tables = view.block_tables[row]
            out[first + start : first + stop] = _online(part, layer, tables, positions, work)
        first += count
    return out if dtype is not None else out.to(q.dtype)


def _online(q: Tensor, layer: PagedLayer, table: Tensor, positions: Tensor, work: torch.dtype) -> Tensor:
    """Scaled queries [t, H, D] at ``positions`` [t] of one row, in order: [t, H, D]."""
    t, heads, head_dim = q.shape
    kv_heads, size = layer.kv_heads, layer.block_size
    q = q.view(t, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)  # [Hkv, group, t, D]
    most = torch.full((*q.shape[:3], 1), -math.inf, dtype=work, device=q.device)
    total, mixed = torch.zeros_like(most), torch.zeros_like(q)
    context = int(positions[-1]) + 1
    blocks_at_once = _KEYS_AT_ONCE // size
    for begin in range(0, context, _KEYS_AT_ONCE):
        length = min(context - begin, _KEYS_AT_ONCE)
        ids = table[begin // size : begin // size + min(blocks_at_once, -(-length // size))].long()
        k, v = (
            _tokens(stored, scales, ids, length).to(work)[:, None]  # [Hkv, 1, length, D]
            for stored, scales in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales))
        )
        scores = q @ k.transpose(-1, -2)  # [Hkv, group, t, length]
        places = torch.arange(begin, begin + length, device=q.device)
        scores = scores.masked_fill(places[None] > positions[:, None], -math.inf)
        # Position 0 is in the first chunk and seen by all, so the maximum is finite from there on.
        larger = torch.maximum(most, scores.amax(-1, keepdim=True))
        shrink, weights = (most - larger).exp(), (scores - larger).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + _mixed(weights, v, places[None] > positions[:, None])
        most = larger
    return (mixed / total).permute(2, 0, 1, 3).reshape(t, heads, head_dim)


def _mixed(weights: Tensor, v: Tensor, unseen: Tensor) -> Tensor:
    """weights [Hkv, group, t, S] @ v [Hkv, 1, S, D], where zero times an infinite value or NaN is zero."""
    if not unseen.any() or v.isfinite().all():
        return weights @ v
    parts = zip(weights.split(1, 2), unseen, strict=True)
    return torch.cat([part @ v.masked_fill(later[:, None], 0) for part, later in parts], 2)


def _tokens(stored: Tensor, scales: Tensor | None, ids: Tensor, length: int) -> Tensor:
    rows = stored[ids].transpose(0, 1).flatten(1, 2)[:, :length]  # [Hkv, length, D]
    if scales is None:
        return rows
    return dequantise(rows, scales[ids].transpose(0, 1).flatten(1, 2)[:, :length])


# --- the choice -------------------------------------------------------------------------------------------


def why_no_kernels(
    config: ModelConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Why a decoder attends with torch, or an empty string where it uses the paged kernels."""
    if device.type != "cuda":
        return f"on {device.type}: torch is faster there than the emulator"
    return no_kernels_for(config, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype)


def no_kernels_for(config: ModelConfig, *, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Why the paged kernels cannot serve a model, wherever it is, or an empty string."""
    return paged_attention.why_not(config.head_dim, config.group, block_size, dtype, kv_dtype)


def query_tile(group: int) -> int:
    """Queries of a tile of the prefill kernel; 1 where no kernel has the group."""
    return paged_attention.query_tile(group) if group <= paged_attention.MOST_GROUP else 1


def scratch_for(config: ModelConfig, kv: PagedKV, view: KVView) -> paged_attention.Scratch:
    """What the kernels need for one step; its layers follow each other on the stream, and share it.

    Raises:
        InputError: a view whose tiles are made for another group of query heads.
    """
    tiles, queries = view.tiles.shape[0], paged_attention.query_tile(config.group)
    fits = view.query_tile in (0, queries) or tiles == view.tokens
    require(fits, "view", f"tiles of {view.query_tile} queries", f"{queries}", "query_tile(config.group)")
    return paged_attention.Scratch.new(
        tiles,
        config.num_kv_heads,
        config.group,
        config.head_dim,
        view.max_context,
        kv.device,
        queries=1 if tiles == view.tokens else queries,
        int8=kv.kv_dtype == torch.int8,
    )


# --- what a decoder calls ---------------------------------------------------------------------------------


class CausalAttention:
    """Of [B, T] tokens from position 0 on, without a cache: one window of a text.

    Args:
        config: heads.
        cos, sin: [T, 1, D] from :meth:`Rotary.tables`.
    """

    def __init__(self, config: ModelConfig, cos: Tensor, sin: Tensor) -> None:
        self.config, self.cos, self.sin = config, cos, sin

    def __call__(self, index: int, qkv: Tensor, q_norm: Any, k_norm: Any) -> Tensor:
        """[B, T, (H + 2 Hkv) D] of layer ``index`` to [B, T, H D]."""
        batch, length, _ = qkv.shape
        q, k, v = _heads(self.config, qkv, self.cos, self.sin, q_norm, k_norm)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, T, D]
        if length == 1:
            return _one_query(q, k, v, self.config).reshape(batch, 1, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.config.group > 1)
        return y.transpose(1, 2).reshape(batch, length, -1)


class PagedAttention:
    """Of one step's tokens over paged KV: rope, append and attention, layer by layer.

    Kernels do it on a GPU where they have the model; else torch, one row after the other, so that a row's
    bits do not depend on the others.

    Args:
        config: the decoder's.
        kv: the storage of such a model; written.
        view: the step.
        rotary: the decoder's, for the torch path.
        angles: the decoder's, for the kernels.
        kernels: None lets the device decide; True takes the kernels, on a CPU in the emulator.

    Attributes:
        reason: why torch attends, or an empty string.

    Raises:
        InputError: a view that the storage cannot serve; or kernels that were asked for and do not exist.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv: PagedKV,
        view: KVView,
        rotary: Rotary,
        angles: Angles,
        *,
        kernels: bool | None = None,
    ) -> None:
        shapes = [(one.num_layers, one.num_kv_heads, one.head_dim) for one in (kv.config, config)]
        text = "{} layers, {} KV heads of {}"
        require(shapes[0] == shapes[1], "kv", text.format(*shapes[0]), text.format(*shapes[1]))
        require(view.block_size == kv.block_size, "view", f"blocks of {view.block_size}", f"{kv.block_size}")
        enough = view.num_blocks <= kv.num_blocks
        require(enough, "view", f"tables into {view.num_blocks} blocks", f"at most {kv.num_blocks}, the pool")
        require(view.device == kv.device, "view", f"on {view.device}", f"on {kv.device}")
        sizes: dict[str, Any] = {"block_size": kv.block_size, "dtype": kv.dtype, "kv_dtype": kv.kv_dtype}
        if kernels is None:
            self.reason = why_no_kernels(config, device=kv.device, **sizes)
        else:
            self.reason = no_kernels_for(config, **sizes) if kernels else "asked for"
            require(not (kernels and self.reason), "kernels", self.reason, "a model that they have")
        self.config, self.kv, self.view = config, kv, view
        if self.reason:
            self._prepare_torch(rotary)
        else:
            self._prepare_kernels(angles)

    def __call__(self, index: int, qkv: Tensor, q_norm: Any, k_norm: Any) -> Tensor:
        """[T, (H + 2 Hkv) D] of layer ``index`` to [T, H D]; the new keys and values are stored.

        Args:
            q_norm, k_norm: RMSNorm of each head before rope, or None.
        """
        if self.reason:
            return self._torch(index, qkv, q_norm, k_norm)
        return self._kernels(index, qkv, q_norm, k_norm)

    # --- kernels

    def _prepare_kernels(self, angles: Angles) -> None:
        view, config, kv = self.view, self.config, self.kv
        require(not kv.head_major, "kv", "head-major storage", "PagedKV(head_major=False) for kernels")
        self._scratch = scratch_for(config, kv, view)
        self._positions = view.positions
        if not stretches(config, view.max_context):
            self._cos, self._sin = angles.tables(view.max_context)
            return
        self._cos, self._sin = own_angles(config, view.counts, view.contexts, kv.device)
        # A table of this step's tokens: each looks up its own row.
        self._positions = torch.arange(view.tokens, dtype=torch.int32, device=kv.device)

    def _kernels(self, index: int, qkv: Tensor, q_norm: Any, k_norm: Any) -> Tensor:
        view, layer = self.view, self.kv.layer(index)
        norms = [None if norm is None else norm.weight for norm in (q_norm, k_norm)]
        q = paged_attention.rope_append(
            qkv,
            layer,
            self._cos,
            self._sin,
            self._positions,
            view.slots,
            q_norm=norms[0],
            k_norm=norms[1],
            eps=self.config.rms_norm_eps,
        )
        return paged_attention.paged_attention(
            q,
            layer,
            view.block_tables,
            view.lengths,
            view.query_starts,
            view.tiles,
            max_context=view.max_context,
            scratch=self._scratch,
            counts=None if view.padded else view.counts,
        )

    # --- torch

    def _prepare_torch(self, rotary: Rotary) -> None:
        kv, view = self.kv, self.view
        self._places: Places = kv.places(view.slots)
        self._last_mask: tuple[tuple[int, int, int], Tensor] | None = None
        self._blocks: list[Sequence[int] | Tensor]
        used = [-(-context // kv.block_size) for context in view.contexts]
        if kv.device.type == "cpu":
            tables = view.block_tables.tolist()
            self._blocks = [as_range(table[:n]) for table, n in zip(tables, used, strict=True)]
            self._blocks = [
                one if isinstance(one, range) else torch.tensor(one, dtype=torch.int64)
                for one in self._blocks
            ]
        else:
            self._blocks = [table[:n] for table, n in zip(view.block_tables, used, strict=True)]
        rows = [(context - count, context) for count, context in zip(view.counts, view.contexts, strict=True)]
        if len(rows) == 1:
            self._cos, self._sin = rotary.tables(*rows[0])
        elif stretches(self.config, view.max_context):
            tables = [rotary.tables(*row) for row in rows]
            self._cos, self._sin = (torch.cat(one) for one in zip(*tables, strict=True))
        else:
            cos, sin = rotary.tables(0, view.max_context)
            self._cos, self._sin = cos[view.positions], sin[view.positions]  # [T, 1, D]

    def _torch(self, index: int, qkv: Tensor, q_norm: Any, k_norm: Any) -> Tensor:
        kv, view, config = self.kv, self.view, self.config
        q, k, v = _heads(config, qkv, self._cos, self._sin, q_norm, k_norm)  # [T, heads, D]
        kv.put(index, k, v, self._places)
        if len(view.counts) == 1:
            return self._row(index, 0, q, k, v)
        parts = [one.split(view.counts) for one in (q, k, v)]
        return torch.cat(
            [self._row(index, row, *three) for row, three in enumerate(zip(*parts, strict=True))]
        )

    def _row(self, index: int, row: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[t, H, D] and the new keys and values [t, Hkv, D] of one row: [t, H D]."""
        config, kv, count, context = self.config, self.kv, self.view.counts[row], self.view.contexts[row]
        if count == context and not kv.head_major and kv.kv_dtype == k.dtype:
            k, v = k.transpose(0, 1), v.transpose(0, 1)  # as stored: nothing to gather
        else:
            k, v = kv.gather(index, self._blocks[row], context)
        q, k, v = q.transpose(0, 1)[None], k[None], v[None]  # [1, heads, t or S, D]
        if count == 1:
            return _one_query(q, k, v, config).reshape(1, -1)
        gqa = config.group > 1
        if count == context:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        else:
            step = max(1, _MASK_ELEMENTS // context)
            parts = []
            for first in range(0, count, step):
                mask = self._mask(context - count + first, min(step, count - first), context)
                part = q[:, :, first : first + step]
                parts.append(F.scaled_dot_product_attention(part, k, v, attn_mask=mask, enable_gqa=gqa))
            y = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
        return y[0].transpose(0, 1).reshape(count, -1)

    def _mask(self, start: int, count: int, context: int) -> Tensor:
        """bool [count, S]: position start + i sees 0 … start + i. The last one is kept, for other layers."""
        if self._last_mask is None or self._last_mask[0] != (start, count, context):
            mask = torch.ones(count, context, dtype=torch.bool, device=self.kv.device).tril(start)
            self._last_mask = (start, count, context), mask
        return self._last_mask[1]


def _heads(
    config: ModelConfig, qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: Any, k_norm: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """[..., T, (H + 2 Hkv) D] to q, k, v [..., T, heads, D], q and k normed and turned."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    parts = qkv.view(*qkv.shape[:-1], -1, config.head_dim)
    turned, v = parts.split((heads + kv_heads, kv_heads), -2)
    if q_norm is not None and k_norm is not None:
        q, k = turned.split((heads, kv_heads), -2)
        turned = torch.cat((q_norm(q), k_norm(k)), -2)
    q, k = rotate(turned, cos, sin).split((heads, kv_heads), -2)
    return q, k, v


def _one_query(q: Tensor, k: Tensor, v: Tensor, config: ModelConfig) -> Tensor:
    """q [B, H, 1, D]: it sees all keys, so the query heads of a group are rows of one small product."""
    q = q.reshape(-1, config.num_kv_heads, config.group, config.head_dim)
    return F.scaled_dot_product_attention(q, k, v)


def attention_kernels(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU, every SDPA kernel but cuDNN's, which plans anew for each number of cached positions.

    Measured on an H200 (torch 2.11, results/evidence): with it a step of SmolLM2's shape takes 2.1 to
    3.6 times as long in BF16 and FP16.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
