"""What the kernels over paged keys and values are tested with, on the emulator and on a GPU alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.kernels import paged_attention as paged
from labkit.kernels.paged_layer import PagedLayer, dequantise, quantise
from labkit.nn.rope import rotate

DTYPES = (torch.float16, torch.bfloat16)

SHAPES = ((128, 8, 2), (64, 3, 3), (80, 1, 2), (96, 9, 1), (128, 16, 1), (64, 7, 2), (96, 4, 2))
"""Head width, query heads a key/value head, key/value heads."""

TOTALS = (1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257)
"""Tokens that a row attends to, the new one included: both sides of an mma, a tile, a turn, two turns."""

NAN = float("nan")
EPS = 1e-6


@dataclass(frozen=True)
class Paged:
    """A step: every slot of the pool that no row has filled is NaN (INT8: its scales, and codes of 127).

    Row b has lengths[b] tokens in the cache and counts[b] new ones, whose q, k, v are rows of qkv.
    """

    qkv: Tensor
    layer: PagedLayer
    tables: Tensor
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    @property
    def heads(self) -> int:
        return self.qkv.shape[1] // self.layer.head_dim - 2 * self.layer.kv_heads

    @property
    def group(self) -> int:
        return self.heads // self.layer.kv_heads

    @property
    def capacity(self) -> int:
        return self.tables.shape[1] * self.layer.block_size

    @property
    def max_context(self) -> int:
        return max(n + c for n, c in zip(self.lengths, self.counts, strict=True))

    def int32(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.qkv.device)

    @property
    def positions(self) -> Tensor:
        return self.int32([n + i for n, c in zip(self.lengths, self.counts, strict=True) for i in range(c)])

    @property
    def slots(self) -> Tensor:
        size, found = self.layer.block_size, []
        for row, (n, c) in enumerate(zip(self.lengths, self.counts, strict=True)):
            table = self.tables[row].tolist()
            found += [table[p // size] * size + p % size for p in range(n, n + c)]
        return torch.tensor(found, dtype=torch.int64, device=self.qkv.device)

    @property
    def starts(self) -> list[int]:
        return [sum(self.counts[:row]) for row in range(len(self.counts) + 1)]

    def tiles(self) -> Tensor:
        step = paged.query_tile(self.group)
        found = [(row, i) for row, count in enumerate(self.counts) for i in range(0, count, step)]
        return self.int32(found).reshape(-1, 2)

    def append(self) -> Tensor:
        """Rope and append by the kernel; q [T, H D]."""
        return paged.rope_append(
            self.qkv, self.layer, self.cos, self.sin, self.positions, self.slots,
            q_norm=self.q_norm, k_norm=self.k_norm, eps=EPS,
        )  # fmt: skip

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """Attention of all new tokens, which are in the cache."""
        return paged.paged_attention(
            q, self.layer, self.tables, self.int32(self.lengths), self.int32(self.starts), self.tiles(),
            **({"max_context": self.max_context} | options),
        )  # fmt: skip

    def chunks(self, q: Tensor, out: Tensor) -> paged.Chunks:
        """The same, to be launched."""
        return paged.Chunks(
            q, self.layer, self.tables, self.int32(self.lengths), self.int32(self.starts), self.tiles(),
            self.max_context, out,
        )  # fmt: skip

    def scratch(self, planned: paged.Plan | None = None, capacity: int | None = None) -> paged.Scratch:
        """For the fused step."""
        layer = self.layer
        return paged.Scratch.new(
            len(self.counts), layer.kv_heads, self.group, layer.head_dim, capacity or self.capacity,
            self.qkv.device, int8=layer.quantised, planned=planned,
        )  # fmt: skip

    def fused(self, scratch: paged.Scratch | None = None, **options: Any) -> Tensor:
        """The decode step in one launch."""
        chosen = {"capacity": self.capacity, "q_norm": self.q_norm, "k_norm": self.k_norm, "eps": EPS}
        scratch = scratch or self.scratch(options.get("planned"), options.get("capacity"))
        return paged.decode_attention(
            self.qkv, self.layer, self.tables, self.int32(self.lengths), self.cos, self.sin, scratch,
            **(chosen | options),
        )  # fmt: skip

    def fresh(self) -> Paged:
        """The same with a pool of its own."""
        held = (self.layer.keys, self.layer.values, self.layer.key_scales, self.layer.value_scales)
        layer = PagedLayer(*(None if one is None else one.clone() for one in held))  # type: ignore[arg-type]
        return replace(self, layer=layer)

    def row(self, index: int, first: int = 0, count: int | None = None) -> Paged:
        """Some of one row's new tokens, those before them appended already."""
        count = self.counts[index] - first if count is None else count
        start = self.starts[index] + first
        return replace(
            self,
            qkv=self.qkv[start : start + count].clone(),
            tables=self.tables[index : index + 1].clone(),
            lengths=(self.lengths[index] + first,),
            counts=(count,),
        )

    def moved(self, block_size: int, seed: int) -> Paged:
        """The same cached tokens in a pool of other blocks."""
        moved = empty_case(self, block_size, seed)
        for row, length in enumerate(self.lengths):
            old, new = self.places(row, length), moved.places(row, length)
            for mine, theirs in zip(held(moved.layer), held(self.layer), strict=True):
                mine[new[0], :, new[1]] = theirs[old[0], :, old[1]]
        return moved

    def places(self, row: int, stop: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Blocks and offsets of positions of a row."""
        positions = torch.arange(start, stop, device=self.tables.device)
        size = self.layer.block_size
        return self.tables[row].long()[positions // size], positions % size


def held(layer: PagedLayer) -> list[Tensor]:
    """The tensors of a layer."""
    tensors = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
    return [one for one in tensors if one is not None]


def empty_layer(
    blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: Any
) -> PagedLayer:
    """A pool of NaN."""
    shape = (blocks, kv_heads, block_size, head_dim)
    if dtype != torch.int8:
        return PagedLayer(*(torch.full(shape, NAN, dtype=dtype, device=device) for _ in range(2)))
    codes = [torch.full(shape, 127, dtype=torch.int8, device=device) for _ in range(2)]
    scales = [torch.full(shape[:3], NAN, device=device) for _ in range(2)]
    return PagedLayer(*codes, *scales)


def empty_case(like: Paged, block_size: int, seed: int, spare: int = 3) -> Paged:
    """A pool of NaN and block tables in random order with room for every row."""
    need = [-(-(n + c) // block_size) for n, c in zip(like.lengths, like.counts, strict=True)]
    order = torch.randperm(sum(need) + spare, generator=torch.Generator().manual_seed(seed))
    tables = torch.zeros(len(need), max(need), dtype=torch.int32)
    start = 0
    for row, count in enumerate(need):
        tables[row, :count] = order[start : start + count]
        start += count
    old, device = like.layer, like.qkv.device
    layer = empty_layer(len(order), old.kv_heads, block_size, old.head_dim, old.dtype, device)
    return replace(like, layer=layer, tables=tables.to(device))


def paged_case(
    shape: tuple[int, int, int],
    rows: tuple[tuple[int, int], ...],
    *,
    dtype: torch.dtype = torch.float16,
    int8: bool = False,
    block_size: int = 16,
    qk_norm: bool = False,
    device: str = "cpu",
    seed: int = 0,
    scale: float = 1.5,
) -> Paged:
    """Random inputs; ``rows`` are (cached tokens, new tokens)."""
    head_dim, group, kv_heads = shape
    source = torch.Generator().manual_seed(seed + sum(map(sum, rows)))

    def randn(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=source) * scale).to(dtype).to(device)

    lengths, counts = tuple(n for n, _ in rows), tuple(c for _, c in rows)
    qkv = randn(sum(counts), (group + 2) * kv_heads * head_dim, scale=scale)
    most = max(n + c for n, c in rows)
    angles = torch.arange(most + 64)[:, None] * 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    norms = [1 + randn(head_dim, scale=0.2) if qk_norm else None for _ in range(2)]
    kv_dtype = torch.int8 if int8 else dtype
    layer = empty_layer(1, kv_heads, block_size, head_dim, kv_dtype, device)
    tables = torch.zeros(len(rows), 1, dtype=torch.int32, device=device)
    cos, sin = (one.contiguous().to(device) for one in (angles.cos(), angles.sin()))
    case = Paged(qkv, layer, tables, lengths, counts, cos, sin, *norms)
    case = empty_case(case, block_size, seed)
    for row, length in enumerate(lengths):
        block, offset = case.places(row, length)
        for at in range(2):
            x = randn(length, kv_heads, head_dim)
            codes, scales = quantise(x) if int8 else (x, None)
            held(case.layer)[at][block, :, offset] = codes
            if scales is not None:
                held(case.layer)[2 + at][block, :, offset] = scales
    return case


def turned(case: Paged, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D], k and v [T, Hkv, D] of the new tokens as torch computes them in ``dtype``."""
    layer, heads = case.layer, case.heads
    parts = case.qkv.to(dtype).view(len(case.qkv), -1, layer.head_dim)
    q, k, v = parts.split((heads, layer.kv_heads, layer.kv_heads), 1)
    if case.q_norm is not None and case.k_norm is not None:
        q = F.rms_norm(q, (layer.head_dim,), case.q_norm.to(dtype), EPS)
        k = F.rms_norm(k, (layer.head_dim,), case.k_norm.to(dtype), EPS)
    cos, sin = (table[case.positions.long()] for table in (case.cos, case.sin))
    cos, sin = torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
    both = rotate(torch.cat((q, k), 1)[:, None], cos[:, None, None], sin[:, None, None])[:, 0]
    return *both.split((heads, layer.kv_heads), 1), v


def reference(case: Paged, q: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Attention [T, H D] in ``dtype`` over the cache as it now is; q [T, H, D]."""
    layer, outs, at = case.layer, [], 0
    for row, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        block, offset = case.places(row, length + count)
        keys, values = layer.keys[block, :, offset], layer.values[block, :, offset]  # [S, Hkv, D]
        if layer.key_scales is not None and layer.value_scales is not None:
            keys = dequantise(keys, layer.key_scales[block, :, offset])
            values = dequantise(values, layer.value_scales[block, :, offset])
        seen = torch.ones(count, length + count, dtype=torch.bool, device=q.device).tril(length)
        mine = q[at : at + count].to(dtype).transpose(0, 1)[None]
        keys, values = (one.to(dtype).transpose(0, 1)[None] for one in (keys, values))
        keys, values = (one.repeat_interleave(case.group, 1) for one in (keys, values))
        out = F.scaled_dot_product_attention(mine, keys, values, attn_mask=seen)
        outs.append(out[0].transpose(0, 1).reshape(count, -1))
        at += count
    return torch.cat(outs)


def near(mine: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype, factor: float = 2.0) -> None:
    """At most ``factor`` times as far from float64 as plain torch, and half a rounding of the largest."""
    error = (mine.double() - exact).abs().max()
    bound = factor * (plain.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert error <= bound, f"{error} against {bound}"


def check_append(case: Paged) -> Tensor:
    """New q, keys and values of rope_append; nothing else of the pool is written. Returns q [T, H D]."""
    dtype, layer = case.qkv.dtype, case.layer
    before = [one.clone() for one in held(layer)]
    q = case.append()
    exact, plain = turned(case, torch.float64), turned(case, dtype)
    near(q.view(exact[0].shape), plain[0], exact[0], dtype)
    block, offset = case.slots // layer.block_size, case.slots % layer.block_size
    keys, values = layer.keys[block, :, offset], layer.values[block, :, offset]
    if layer.quantised:
        assert layer.key_scales is not None and layer.value_scales is not None
        found = layer.value_scales[block, :, offset]
        codes, scales = quantise(plain[2])
        assert torch.equal(values, codes) and torch.equal(found, scales), "the rule of paged_layer.quantise"
        scales = layer.key_scales[block, :, offset]
        slack = 0.51 * scales[..., None] + torch.finfo(dtype).eps * exact[1].abs().max()
        assert ((dequantise(keys, scales).double() - exact[1]).abs() <= slack).all()
    else:
        near(keys, plain[1], exact[1], dtype)
        assert torch.equal(values, plain[2])
    for tensor, old in zip(held(layer), before, strict=True):
        old[block, :, offset] = tensor[block, :, offset]
        assert torch.equal(tensor.nan_to_num(7.0), old.nan_to_num(7.0)), "another slot was written"
    return q


def check_accurate(case: Paged, **options: Any) -> Tensor:
    """rope_append and paged_attention against float64; returns the output."""
    q = check_append(case)
    out = torch.full_like(q, NAN)
    assert case.attend(q, out=out, **options) is out
    wide = q.view(len(q), case.heads, -1)
    near(out, reference(case, wide, q.dtype), reference(case, wide), q.dtype)
    return out


def check_fused(case: Paged, **options: Any) -> Tensor:
    """One new token a row: the fused step is rope_append and paged_attention, bit for bit, cache included."""
    apart = case.fresh()
    expected = check_accurate(apart)
    out = torch.full_like(expected, NAN)
    assert case.fused(out=out, **options) is out
    assert torch.equal(out, expected), f"{(out - expected).abs().max()}"
    for mine, theirs in zip(held(case.layer), held(apart.layer), strict=True):
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))
    return out


PLANS = (paged.WALK, paged.Plan(1, 4), paged.Plan(3, 8), paged.Plan(16, 4), paged.Plan(20, 4))


def check_invariant(
    shape: tuple[int, int, int], dtype: torch.dtype, *, int8: bool = False, device: str = "cpu", long: int = 0
) -> None:
    """Chunks, batch, block size, block ids, capacity and plan change no bit; nor does used scratch."""
    rows = ((0, 150), (200, 40), (257, 1), (0, 1), (100, 29), (long, 35))
    case = paged_case(shape, rows, dtype=dtype, int8=int8, device=device)
    y = case.attend(case.append())
    assert torch.isfinite(y).all()
    q = case.fresh().append()
    for planned in PLANS:
        scratch = paged.Scratch.new(
            len(case.tiles()), case.layer.kv_heads, case.group, case.layer.head_dim, case.max_context, device,
            queries=paged.query_tile(case.group), planned=planned,
        )  # fmt: skip
        for _ in range(2):
            for tensor in (scratch.part, scratch.part_ml):
                tensor.fill_(NAN)
            assert torch.equal(case.attend(q, scratch=scratch), y), f"{planned}"
        assert not scratch.tickets.any()
    for block_size in (8, 32, 64):
        other = case.moved(block_size, block_size)
        assert torch.equal(other.attend(other.append()), y), f"block size {block_size}"
    for index, first, count in (
        (0, 0, 20),
        (0, 20, 77),
        (0, 97, 53),
        (1, 3, 1),
        (1, 38, 2),
        (5, 0, 1),
        (5, 1, 34),
    ):
        chunk = case.row(index, first, count)
        start = case.starts[index] + first
        expected = y[start : start + count]
        assert torch.equal(chunk.attend(q[start : start + count].clone()), expected), f"{index} {first}"
    # Tokens one after the other, alone and fused, in tables of any width.
    for index, at in ((0, 0), (0, 31), (0, 130), (1, 39), (2, 0), (3, 0), (5, 20)):
        alone = case.row(index, at, 1)
        expected = y[case.starts[index] + at]
        for planned, spare in zip(PLANS, (0, 9, 1, 40, 0), strict=True):
            wider = replace(alone, tables=F.pad(alone.tables, (0, spare)))
            long_enough = F.pad(case.cos, (0, 0, 0, 700)), F.pad(case.sin, (0, 0, 0, 700))
            wider = replace(wider, cos=long_enough[0], sin=long_enough[1])
            assert torch.equal(wider.fused(planned=planned)[0], expected), f"row {index} + {at}, {planned}"


def check_tall(case: Paged) -> Tensor:
    """Tall tiles have the bits of the others, and write nothing else; returns them."""
    q = case.append()
    expected = case.attend(q)
    guard = 3  # rows behind the tokens
    room = torch.full((len(q) + guard, q.shape[1]), NAN, dtype=q.dtype, device=q.device)
    out = room[: len(q)]
    assert case.attend(q, out=out, tall_from=1) is out
    assert torch.equal(out, expected), f"{(out - expected).abs().max()}"
    assert room[len(q) :].isnan().all()
    return out


def check_odd_value(case: Paged, odd: float, *, tall: bool = False) -> None:
    """Zero times an infinite value or NaN is no zero: queries before it have the bits that they have without.

    Row 0 has 12 new tokens at least.
    """
    kv_heads, head_dim, count, at = case.layer.kv_heads, case.layer.head_dim, case.counts[0], 9
    clean = case.attend(case.append(), tall_from=int(tall))
    column = (case.heads + kv_heads) * head_dim + 5  # of the first head's value
    case.qkv[at, column] = odd
    case.qkv[at + 2, column + 3] = -odd
    y = case.attend(case.append(), tall_from=int(tall))
    bad = torch.zeros(len(y), kv_heads, case.group, head_dim, dtype=torch.bool, device=y.device)
    bad[at:count, 0, :, 5] = bad[at + 2 : count, 0, :, 8] = True
    bad = bad.view_as(y)
    assert torch.equal(y.isfinite(), ~bad)
    assert torch.equal(y[~bad], clean[~bad])


QUERY_SIZES = ((0, 1), (1e-6, 1), (1e-3, 30), (1, 1e3), (300, 100), (2e4, 1))
"""Factor of q, and of one of its columns: zero, subnormal halves, up to the largest."""


def check_query_sizes(dtype: torch.dtype, size: float, outlier: float, device: str = "cpu") -> None:
    """INT8 at a q of any size, one column of which is ``outlier`` times as large, is as near as torch."""
    case = paged_case((64, 4, 1), ((300, 5), (2100, 1)), dtype=dtype, int8=True, device=device)
    q = case.append().float() * size
    q[:, 7::64] *= outlier
    q = q.clamp(-6e4, 6e4).to(dtype)
    wide = q.view(len(q), 4, 64)
    out = case.attend(q)
    near(out, reference(case, wide, dtype), reference(case, wide), dtype)
    assert torch.equal(case.attend(q, tall_from=1), out)


def check_odd_query(odd: float, *, int8: bool, device: str = "cpu") -> None:
    """A q that is no number shows in its own head of its own token, and changes no other bit."""
    case = paged_case((64, 4, 2), ((200, 12), (30, 1)), int8=int8, device=device)
    q = case.append()
    clean = case.attend(q)
    q.view(len(q), 8, 64)[[4, 12], [1, 6], [60, 3]] = odd
    bad = torch.zeros(len(q), 8, 64, dtype=torch.bool, device=q.device)
    bad[4, 1] = bad[12, 6] = True
    bad = bad.view_as(q)
    for tall_from in (0, 1):
        y = case.attend(q, tall_from=tall_from)
        assert y[bad].isnan().all()
        assert torch.equal(y[~bad], clean[~bad])
