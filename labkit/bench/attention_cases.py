"""Cases of ``labkit bench attention``: pools of paged keys and values, calls on them, right results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit import quoted
from labkit.kernels import paged_attention as paged
from labkit.kernels.paged_layer import PagedLayer, dequantise

MODELS = ("qwen2.5-3b", "qwen2.5-7b", "smollm2-135m")
FORMATS = ("fp16", "int8")
SDPA = "sdpa_gathered"
"""The peer: torch's own attention on keys and values that lie in one piece; gathering them is not counted."""

CHECKED_QUERIES = 2


@dataclass(frozen=True)
class Case:
    """One step: every row has ``context`` tokens, of which the last ``chunk`` are new.

    Attributes:
        model: key of ``data/quoted/models.json``, for its heads.
        batch, context, chunk: rows, tokens that the last query attends to, new tokens a row.
        block_size: of the cache.
    """

    model: str
    batch: int
    context: int
    chunk: int = 1
    block_size: int = 16

    @property
    def shape(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, head width."""
        model = quoted.model(self.model)
        return model.num_heads, model.num_kv_heads, model.head_dim

    @property
    def group(self) -> int:
        """Query heads a key/value head."""
        heads, kv_heads, _ = self.shape
        return heads // kv_heads

    def kv_bytes(self, kind: str) -> int:
        """Bytes of keys, values and scales that the step has to read once."""
        _, kv_heads, head_dim = self.shape
        a_head = head_dim + 4 if kind == "int8" else 2 * head_dim
        return 2 * self.batch * kv_heads * self.context * a_head

    @property
    def flops(self) -> float:
        """Of both products, masked pairs left out."""
        heads, _, head_dim = self.shape
        pairs = self.chunk * self.context - self.chunk * (self.chunk - 1) // 2
        return 4.0 * self.batch * heads * head_dim * pairs


@dataclass(frozen=True)
class Pool:
    """One copy of a case's cached tokens and new queries."""

    case: Case
    layer: PagedLayer
    tables: Tensor
    q: Tensor

    @classmethod
    def new(cls, case: Case, kind: str, device: str, seed: int) -> Pool:
        """Random keys and values in blocks of random order."""
        heads, kv_heads, head_dim = case.shape
        source = torch.Generator(device).manual_seed(seed)
        each = -(-case.context // case.block_size)
        shape = (case.batch * each, kv_heads, case.block_size, head_dim)
        order = torch.randperm(shape[0], generator=source, device=device).to(torch.int32)
        if kind == "int8":
            codes = [torch.empty(shape, dtype=torch.int8, device=device) for _ in range(2)]
            scales = [torch.empty(shape[:3], device=device) for _ in range(2)]
            for one in codes:
                one.random_(-127, 128, generator=source)
            for one in scales:
                one.uniform_(0.005, 0.02, generator=source)
            layer = PagedLayer(*codes, *scales)
        else:
            layer = PagedLayer(
                *(
                    torch.empty(shape, dtype=torch.float16, device=device).normal_(generator=source)
                    for _ in range(2)
                )
            )
        q = torch.empty(case.batch * case.chunk, heads * head_dim, dtype=torch.float16, device=device)
        return cls(case, layer, order.view(case.batch, each), q.normal_(generator=source))

    def row(self, row: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, S, D] of one row, in one piece."""
        ids, layer = self.tables[row].long(), self.layer
        found = []
        for stored, scales in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales)):
            part = stored[ids]
            wide = part.to(dtype) if scales is None else dequantise(part, scales[ids]).to(dtype)
            found.append(wide.transpose(0, 1).flatten(1, 2)[:, : self.case.context].contiguous())
        return found[0], found[1]

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, S, D] of all rows, float16."""
        rows = [self.row(row, torch.float16) for row in range(self.case.batch)]
        return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])


@dataclass(frozen=True)
class Step:
    """What the calls on all copies share: lengths, tiles, scratch."""

    lengths: Tensor
    starts: Tensor
    tiles: Tensor
    scratch: paged.Scratch

    @classmethod
    def new(cls, case: Case, kind: str, device: str, planned: paged.Plan | None = None) -> Step:
        """For one case; ``planned`` is the launch's choice."""
        _, kv_heads, head_dim = case.shape
        step = paged.query_tile(case.group)
        tiles = [(row, i) for row in range(case.batch) for i in range(0, case.chunk, step)]

        def int32(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        queries = 1 if case.chunk == 1 else step
        scratch = paged.Scratch.new(
            len(tiles), kv_heads, case.group, head_dim, case.context, device,
            queries=queries, int8=kind == "int8", planned=planned,
        )  # fmt: skip
        starts = range(0, case.batch * case.chunk + 1, case.chunk)
        lengths = [case.context - case.chunk] * case.batch
        return cls(int32(lengths), int32(list(starts)), int32(tiles), scratch)

    def call(self, pool: Pool, *, tall: bool = False) -> Callable[[], Tensor]:
        """Attention on one copy; ``tall``: in tall tiles."""
        out = torch.empty_like(pool.q)
        return lambda: paged.paged_attention(
            pool.q, pool.layer, pool.tables, self.lengths, self.starts, self.tiles,
            max_context=pool.case.context, out=out, scratch=self.scratch, tall_from=int(tall),
        )  # fmt: skip

    def fused(self, pool: Pool) -> Callable[[], Tensor]:
        """The decode step with its rope and append on one copy, which gets a new last token."""
        new = New.of(pool)
        out = torch.empty_like(pool.q)
        return lambda: paged.decode_attention(
            new.qkv, pool.layer, pool.tables, self.lengths, new.cos, new.sin, self.scratch,
            capacity=pool.case.context, out=out,
        )  # fmt: skip

    def apart(self, pool: Pool) -> Tensor:
        """What :meth:`fused` gives, as rope_append and the plain kernel do it."""
        new, case = New.of(pool), pool.case
        block, offset = divmod(case.context - 1, case.block_size)
        slots = pool.tables[:, block].long() * case.block_size + offset
        q = paged.rope_append(new.qkv, pool.layer, new.cos, new.sin, self.lengths, slots)
        return paged.paged_attention(
            q, pool.layer, pool.tables, self.lengths, self.starts, self.tiles, max_context=case.context
        )


@dataclass(frozen=True)
class New:
    """New tokens of a decode step before rope."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, pool: Pool) -> New:
        """The same for the same pool."""
        case, device = pool.case, pool.q.device
        heads, kv_heads, head_dim = case.shape
        width = (heads + 2 * kv_heads) * head_dim
        source = torch.Generator(device).manual_seed(1)
        qkv = torch.empty(case.batch, width, dtype=torch.float16, device=device).normal_(generator=source)
        steps = torch.arange(0, head_dim, 2, device=device) / head_dim
        angles = torch.arange(case.context, device=device)[:, None] * 10_000.0**-steps
        return cls(qkv, angles.cos().contiguous(), angles.sin().contiguous())


def sdpa_call(pool: Pool) -> Callable[[], Tensor]:
    """torch's attention on the gathered keys and values of a copy; [B, H, chunk, D]."""
    case = pool.case
    heads, kv_heads, head_dim = case.shape
    q = pool.q.view(case.batch, case.chunk, heads, head_dim).transpose(1, 2).contiguous()
    keys, values = pool.gathered()
    if case.chunk == 1:
        # The heads of a group as queries: torch's kernels read keys and values once for all of them.
        folded = q.view(case.batch, kv_heads, case.group, head_dim)
        return lambda: F.scaled_dot_product_attention(folded, keys, values)
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(case.chunk, case.context)
    wide = (keys.repeat_interleave(case.group, 1), values.repeat_interleave(case.group, 1))
    return lambda: F.scaled_dot_product_attention(q, *wide, attn_mask=bias)


def exact(pool: Pool, dtype: torch.dtype = torch.float64) -> Tensor:
    """First and last queries of the first and the last row, [rows, CHECKED_QUERIES or fewer, H D]."""
    case = pool.case
    heads, _, head_dim = case.shape
    found = []
    for row in dict.fromkeys((0, case.batch - 1)):
        keys, values = (one.repeat_interleave(case.group, 0) for one in pool.row(row, dtype))
        outs = []
        for query in checked_queries(case):
            seen = case.context - case.chunk + query + 1
            q = pool.q[row * case.chunk + query].view(heads, 1, head_dim).to(dtype)
            out = F.scaled_dot_product_attention(q[None], keys[None, :, :seen], values[None, :, :seen])
            outs.append(out.reshape(-1))
        found.append(torch.stack(outs))
    return torch.stack(found)


def checked_queries(case: Case) -> list[int]:
    """Queries of a row that :func:`exact` computes."""
    return list(dict.fromkeys((0, case.chunk - 1)))[:CHECKED_QUERIES]


def checked(case: Case, y: Tensor) -> Tensor:
    """The same queries of a call's result [T, H D] or [B, H, chunk, D] (or folded heads), float64."""
    heads, _, head_dim = case.shape
    if y.ndim == 4:
        y = y.reshape(case.batch, heads, case.chunk, head_dim).transpose(1, 2)
    y = y.reshape(case.batch, case.chunk, -1)
    rows = list(dict.fromkeys((0, case.batch - 1)))
    return y[rows][:, checked_queries(case)].double()
