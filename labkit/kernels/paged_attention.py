"""Attention over paged keys and values, and the rope and append that go before it.

T new tokens of a step, row after row; B rows; H query heads, Hkv key/value heads, group = H / Hkv, D head
width; NB blocks a row of the block table. A token's bits depend on its own q and on the keys and values up to
its position alone: not on batch, chunk, block size, block ids, capacity or :class:`Plan`, fused or not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import require
from labkit.kernels import paged_prefill
from labkit.kernels.launch import Launch
from labkit.kernels.paged_checks import (
    HEAD_DIMS,
    MOST_GROUP,
    angles,
    check,
    check_serves,
    group_of,
    norms,
    why_not,
)
from labkit.kernels.paged_layer import PagedLayer
from labkit.kernels.paged_plan import (
    COARSE,
    FINE_TURNS,
    TURN,
    WALK,
    WARPS,
    Plan,
    Scratch,
    check_scratch,
    plan,
    splits,
)
from labkit.kernels.rmsnorm import ACTIVATIONS
from labkit.kernels.rope_append import rope_append, rope_launch, rope_source
from labkit.kernels.source import KernelSource
from labkit.quant.packing import describe

__all__ = [
    "COARSE",
    "FINE_TURNS",
    "HEAD_DIMS",
    "MOST_GROUP",
    "TURN",
    "WALK",
    "Chunks",
    "Plan",
    "Scratch",
    "decode_attention",
    "decode_launch",
    "paged_attention",
    "plan",
    "query_tile",
    "rope_append",
    "rope_launch",
    "rope_source",
    "source",
    "splits",
    "why_not",
]

FILE = "paged_attention.cu"
_ALL = 2**31 - 1
MOST_ROWS = 16
"""Pairs of a query and a head that a block holds."""


def query_tile(group: int) -> int:
    """Queries of one row that a block of the prefill takes together."""
    return max(1, MOST_ROWS // group)


@functools.lru_cache(maxsize=256)
def source(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    *,
    int8: bool = False,
    queries: int = 1,
    fused: bool = False,
    qk_norm: bool = False,
) -> KernelSource:
    """The attention kernel for one set of constants."""
    defines = {"ACTIVATION": ACTIVATIONS[dtype], "HEAD_DIM": head_dim, "GROUP": group}
    defines |= {"BLOCK_SIZE": block_size, "KV_INT8": int(int8), "QUERIES": queries}
    return KernelSource(FILE, "paged_attention", {**defines, "FUSED": int(fused), "QK_NORM": int(qk_norm)})


def paged_attention(
    q: Tensor,
    layer: PagedLayer,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    tiles: Tensor,
    *,
    max_context: int,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    planned: Plan | None = None,
    tall_from: int | None = None,
    counts: Sequence[int] | None = None,
) -> Tensor:
    """New tokens attend to their row's cached tokens, themselves included: any mix of chunks and decode rows.

    Token i of row b stands at position lengths[b] + i and attends to positions 0 .. lengths[b] + i; its key
    and value are in the cache already.

    Args:
        q: float16 or bfloat16 [T, H D], roped, contiguous.
        layer: keys and values, of the same dtype or int8.
        block_tables: int32 [B, NB]; entries beyond a row's tokens are not used.
        lengths: int32 [B], tokens of the row before its new ones.
        query_starts: int32 [B + 1], first new token of each row; the last is T.
        tiles: int32 [n, 2]: row and first query (of that row) of each tile of ``query_tile(group)`` queries.
        max_context: host bound of lengths + new tokens; not beyond the block tables.
        out: [T, H D] to write; a new tensor by default.
        scratch: see :meth:`Scratch.new`, for n tiles; made here by default.
        planned: the launch's choice; by default the scratch's, or :func:`plan`.
        tall_from: rows of at least so many new tokens are taken in the tall tiles of
            :mod:`labkit.kernels.paged_prefill`, which need neither ``tiles`` nor scratch; 0: none. By default
            what is faster. Same bits.
        counts: new tokens of each row where the host knows them: no launch then for rows that are not there.

    Returns:
        [T, H D].

    Raises:
        InputError: a shape, dtype, device, head width, group or block size that does not fit, by name.
    """
    if out is None:
        out = torch.empty_like(q) if isinstance(q, Tensor) else q
    step = Chunks(q, layer, block_tables, lengths, query_starts, tiles, max_context, out)
    if tall_from is None:
        known = [q.shape[0]] if counts is None else counts
        shape = (layer.kv_heads, layer.head_dim, step.group)
        tall_from = paged_prefill.tall_from(known, *shape, q.device, int8=layer.quantised)
    require(tall_from >= 0, "tall_from", tall_from, "at least 0")
    some = tall_from if counts is None else max(counts, default=0)
    few = 0 if counts is None else min(counts, default=0)
    if (not tall_from or few < tall_from > 1) and tiles.shape[0]:
        step.launch(scratch, planned, tall_from).run()
    if tall_from and some >= tall_from and q.shape[0]:
        step.tall_launch(tall_from).run()
    return out


@dataclass(frozen=True, slots=True)
class Chunks:
    """Arguments of :func:`paged_attention`, checked once for both of its launches.

    Raises:
        InputError: as there.
    """

    q: Tensor
    layer: PagedLayer
    block_tables: Tensor
    lengths: Tensor
    query_starts: Tensor
    tiles: Tensor
    max_context: int
    out: Tensor

    def __post_init__(self) -> None:
        q, layer = self.q, self.layer
        width = layer.kv_heads * layer.head_dim
        good = isinstance(q, Tensor) and q.ndim == 2 and q.dtype in ACTIVATIONS and q.shape[1] % width == 0
        require(good, "q", describe(q), f"float16 or bfloat16 [T, H x {layer.head_dim}]")
        check_serves(layer, self.group, q.dtype, "q")
        rows = self.block_tables.shape[0]
        check(
            q.device,
            ("q", q, q.dtype, tuple(q.shape)),
            ("block_tables", self.block_tables, torch.int32, (rows, self.block_tables.shape[-1])),
            ("lengths", self.lengths, torch.int32, (rows,)),
            ("query_starts", self.query_starts, torch.int32, (rows + 1,)),
            ("tiles", self.tiles, torch.int32, (self.tiles.shape[0], 2)),
            ("out", self.out, q.dtype, tuple(q.shape)),
        )
        _fits_tables("max_context", self.max_context, self.block_tables, layer)

    @property
    def group(self) -> int:
        """Query heads a key/value head."""
        return self.q.shape[1] // (self.layer.kv_heads * self.layer.head_dim)

    def launch(
        self, scratch: Scratch | None = None, planned: Plan | None = None, tall_from: int = 0
    ) -> Launch:
        """For rows of fewer new tokens than ``tall_from``, or for all."""
        q, layer, group, max_context = self.q, self.layer, self.group, self.max_context
        kv_heads, head_dim, count = layer.kv_heads, layer.head_dim, self.tiles.shape[0]
        # A tile a token: rows of one token each, which need no more than their own heads.
        queries = 1 if count == q.shape[0] else query_tile(group)
        units = count * kv_heads
        if scratch is None:
            scratch = Scratch.new(
                count, kv_heads, group, head_dim, max_context, q.device,
                queries=queries, int8=layer.quantised, planned=planned,
            )  # fmt: skip
        chosen = planned or scratch.planned
        check_scratch(scratch, units, group * queries, head_dim, max_context, chosen)
        extra = (self.query_starts, self.tiles, None, None, None, None)
        args = _arguments(q, layer, self.block_tables, self.lengths, extra, self.out)
        args += [scratch.part, scratch.part_ml, scratch.tickets, kv_heads, self.block_tables.shape[1]]
        args += [max_context, splits(max_context), chosen.fine, chosen.coarse, _scale(head_dim), 0.0]
        args += [tall_from or _ALL]
        kernel = source(q.dtype, head_dim, group, layer.block_size, int8=layer.quantised, queries=queries)
        grid = (max(1, count), kv_heads, chosen.ranges(max_context))
        return Launch(kernel, grid, (32 * WARPS,), args, q.device)

    def tall_launch(self, tall_from: int = 1) -> Launch:
        """For rows of at least so many new tokens; no use for tiles."""
        q, layer, rows = self.q, self.layer, self.block_tables.shape[0]
        kernel = paged_prefill.source(
            q.dtype, layer.head_dim, self.group, layer.block_size, int8=layer.quantised
        )
        args: list[Any] = [q, layer.keys, layer.values, layer.key_scales, layer.value_scales]
        args += [self.block_tables, self.lengths, self.query_starts, self.out, rows, layer.kv_heads]
        args += [self.block_tables.shape[1], self.max_context, tall_from, _scale(layer.head_dim)]
        # As many tiles as rows of these tokens can have, however long each is: the lengths are on the device.
        grid = (q.shape[0] // paged_prefill.queries(self.group) + rows, layer.kv_heads)
        shared = paged_prefill.shared_bytes(layer.head_dim, int8=layer.quantised)
        return Launch(kernel, grid, (32 * paged_prefill.WARPS,), args, q.device, shared_bytes=shared)


def decode_attention(
    qkv: Tensor,
    layer: PagedLayer,
    block_tables: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    scratch: Scratch,
    *,
    capacity: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    overlap: bool = False,
    planned: Plan | None = None,
) -> Tensor:
    """One new token a row, one launch: rope on q and k, append k and v, attend up to the new token.

    Args:
        qkv: float16 or bfloat16 [B, (H + 2 Hkv) D], contiguous.
        layer: of the same dtype or int8; position lengths[b] of each row is written.
        block_tables: int32 [B, NB], covering position lengths[b].
        lengths: int32 [B], cached tokens; a row that is negative or at ``capacity`` is left alone, output
            included.
        cos, sin: float32 [positions, D/2], positions >= capacity.
        scratch: see :meth:`Scratch.new`.
        capacity: most tokens of a row, the new one included; not beyond the block tables.
        q_norm, k_norm: weights [D] of an RMSNorm of every head before rope, both or neither.
        eps: of that norm.
        out: [B, H D] to write; a new tensor by default.
        overlap: start before the kernels ahead have finished, none of which writes anything that is read
            here but ``qkv``.
        planned: the launch's choice; the scratch's by default.

    Returns:
        [B, H D]; the bits that rope_append and paged_attention give.

    Raises:
        InputError: a shape, dtype, device, head width, group or block size that does not fit, by name.
    """
    group = group_of(qkv, layer)
    if out is None:
        width = layer.kv_heads * group * layer.head_dim
        out = torch.empty(qkv.shape[0], width, dtype=qkv.dtype, device=qkv.device)
    launch = decode_launch(
        qkv, layer, block_tables, lengths, cos, sin, scratch, capacity, q_norm, k_norm, eps, out, overlap,
        planned,
    )  # fmt: skip
    if qkv.shape[0]:
        launch.run()
    return out


def decode_launch(
    qkv: Tensor,
    layer: PagedLayer,
    block_tables: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    scratch: Scratch,
    capacity: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    out: Tensor,
    overlap: bool = False,
    planned: Plan | None = None,
) -> Launch:
    """The launch of :func:`decode_attention`."""
    group, batch = group_of(qkv, layer), qkv.shape[0]
    kv_heads, head_dim, dtype = layer.kv_heads, layer.head_dim, qkv.dtype
    check(
        qkv.device,
        ("qkv", qkv, dtype, tuple(qkv.shape)),
        ("block_tables", block_tables, torch.int32, (batch, block_tables.shape[-1])),
        ("lengths", lengths, torch.int32, (batch,)),
        ("out", out, dtype, (batch, kv_heads * group * head_dim)),
        *angles(cos, sin, head_dim),
        *norms(q_norm, k_norm, dtype, head_dim),
    )
    _fits_tables("capacity", capacity, block_tables, layer)
    require(cos.shape[0] >= capacity, "cos", f"{cos.shape[0]} positions", f"at least {capacity}")
    chosen = planned or scratch.planned
    check_scratch(scratch, batch * kv_heads, group, head_dim, capacity, chosen)
    extra = (None, None, cos, sin, q_norm, k_norm)
    args = _arguments(qkv, layer, block_tables, lengths, extra, out)
    args += [scratch.part, scratch.part_ml, scratch.tickets, kv_heads, block_tables.shape[1], capacity]
    args += [splits(capacity), chosen.fine, chosen.coarse, _scale(head_dim), float(eps), _ALL]
    norm = q_norm is not None
    kernel = source(dtype, head_dim, group, layer.block_size, int8=layer.quantised, fused=True, qk_norm=norm)
    grid = (max(1, batch), kv_heads, chosen.ranges(capacity))
    return Launch(kernel, grid, (32 * WARPS,), args, qkv.device, overlap)


def _arguments(
    q: Tensor, layer: PagedLayer, block_tables: Tensor, lengths: Tensor, extra: tuple[Any, ...], out: Any
) -> list[Any]:
    args: list[Any] = [q, layer.keys, layer.values, layer.key_scales, layer.value_scales]
    return [*args, block_tables, lengths, *extra, out]


def _scale(head_dim: int) -> float:
    return math.log2(math.e) / math.sqrt(head_dim)


def _fits_tables(name: str, tokens: int, block_tables: Tensor, layer: PagedLayer) -> None:
    room = block_tables.shape[1] * layer.block_size
    text = f"1 to {room} tokens ({block_tables.shape[1]} blocks of {layer.block_size} a row)"
    require(1 <= tokens <= room, name, tokens, text)
