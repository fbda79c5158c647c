"""The reference of paged attention against dense float64, and torch's path against the reference."""

from __future__ import annotations

from typing import Any

import decode_cases as cases
import pytest
import torch
import torch.nn.functional as F

from labkit.cache.blocks import BlockTable
from labkit.cache.paged import PagedKV
from labkit.cache.views import KVView, ViewBuilder
from labkit.errors import InputError
from labkit.nn import attention as module
from labkit.nn.angles import Angles
from labkit.nn.attention import PagedAttention, paged_attention_reference
from labkit.nn.rope import Rotary, rotate

TOTALS = (1, 15, 16, 17, 255, 256, 257)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def of(heads: int = 6, kv_heads: int = 2, head_dim: int = 16, **changes: Any) -> Any:
    return cases.config(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, num_layers=1, **changes)


class Case:
    """Rows of a step over a pool in which everything else is NaN.

    Args:
        rows: (tokens before, new tokens) of each row.
        ordered: consecutive blocks, else shuffled ones.
    """

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        config: Any = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        head_major: bool = False,
        ordered: bool = False,
        seed: int = 0,
    ) -> None:
        self.config, self.rows = config or of(), rows
        source = torch.Generator().manual_seed(seed)
        used = [-(-(start + count) // block_size) for start, count in rows]
        ids = list(range(sum(used))) if ordered else torch.randperm(sum(used) + 2, generator=source).tolist()
        self.tables = [
            BlockTable([ids.pop(0) for _ in range(n)], sum(row)) for n, row in zip(used, rows, strict=True)
        ]
        self.kv = PagedKV(
            self.config, num_blocks=sum(used) + 2, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype,
            head_major=head_major,
        )  # fmt: skip
        layer = self.kv.layers[0]
        for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            if tensor is not None:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 127)
        self.builder = ViewBuilder("cpu", block_size, 4)
        config = self.config
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, dtype=dtype)
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = [(torch.randn(sum(row), width, generator=source) * 1.5).to(dtype) for row in rows]

    def view(self, rows: list[int] | None = None, chunks: list[tuple[int, int]] | None = None) -> KVView:
        """Of some rows, or of named chunks of all."""
        chosen = range(len(self.rows)) if rows is None else rows
        spans = chunks or [self.rows[row] for row in chosen]
        tables = [self.tables[row] for row in chosen]
        return self.builder.build(tables, [n for _, n in spans], starts=[start for start, _ in spans])

    def run(
        self, rows: list[int] | None = None, chunks: list[tuple[int, int]] | None = None, **o: Any
    ) -> Any:
        """Torch's path on the new tokens of some rows, in order: [T, H D]."""
        chosen = list(range(len(self.rows))) if rows is None else rows
        spans = chunks or [self.rows[row] for row in chosen]
        qkv = torch.cat([self.qkv[row][s : s + n] for row, (s, n) in zip(chosen, spans, strict=True)])
        attend = PagedAttention(
            self.config, self.kv, self.view(rows, chunks), self.rotary, Angles(self.config, self.kv.device),
            **o,
        )  # fmt: skip
        with torch.inference_mode():
            return attend(0, qkv, None, None)

    def fill(self) -> None:
        """The tokens before: every row's, one row at a time."""
        for row, (start, _) in enumerate(self.rows):
            if start:
                self.run([row], [(0, start)])

    def turned(self, row: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [tokens, heads, D] of all of a row, roped, from the inputs."""
        config, tokens = self.config, len(self.qkv[row])
        parts = self.qkv[row].view(tokens, -1, config.head_dim)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        turned, v = parts.split((heads + kv_heads, kv_heads), 1)
        q, k = rotate(turned, *self.rotary.tables(0, tokens)).split((heads, kv_heads), 1)
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def dense(self) -> torch.Tensor:
        """float64 [T, H, D] of the new tokens: torch's attention on the rows' own keys and values."""
        found = []
        for row, (start, count) in enumerate(self.rows):
            q, k, v = (one.transpose(0, 1) for one in self.turned(row, torch.float64))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            found.append(y.transpose(0, 1)[start : start + count])
        return torch.cat(found)

    def queries(self) -> torch.Tensor:
        """[T, H, D], roped, as the decoder's dtype has them."""
        dtype = self.kv.dtype
        rows = enumerate(self.rows)
        return torch.cat([self.turned(row, dtype)[0][start : start + count] for row, (start, count) in rows])


def mixed() -> list[tuple[int, int]]:
    """Decode rows at every total, a prompt, and chunks behind a history."""
    return [(total - 1, 1) for total in TOTALS] + [(0, 19), (16, 17), (250, 30), (31, 1)]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_dense_attention(
    dtype: torch.dtype, block_size: int, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(mixed(), dtype=dtype, block_size=block_size, ordered=ordered)
    case.fill()
    case.run()
    arguments = case.queries(), case.kv.layer(0), case.view()
    whole = paged_attention_reference(*arguments, dtype=torch.float64)
    assert whole.dtype == torch.float64 and whole.shape == (case.view().tokens, 6, 16)
    assert (whole - case.dense()).abs().max() < 1e-12
    # Chunks of keys and queries are a matter of memory.
    monkeypatch.setattr(module, "_KEYS_AT_ONCE", 64)
    monkeypatch.setattr(module, "_QUERIES_AT_ONCE", 5)
    assert (paged_attention_reference(*arguments, dtype=torch.float64) - whole).abs().max() < 1e-12
    rounded = paged_attention_reference(*arguments)
    assert rounded.dtype == dtype
    assert (rounded.double() - whole).abs().max() <= max(4 * torch.finfo(dtype).eps, 1e-5)


def test_a_value_that_is_no_number_shows_from_its_token_on_alone() -> None:
    """In the reference; its queries of one chunk see different tokens."""
    case = Case([(25, 14), (3, 4)])
    case.fill()
    case.run()
    layer, view, q = case.kv.layer(0), case.view(), case.queries()
    clean = paged_attention_reference(q, layer, view)
    for position, column, value in ((34, 5, float("nan")), (36, 8, float("inf"))):
        block, offset = divmod(position, case.kv.block_size)
        layer.values[case.tables[0].blocks[block], 1, offset, column] = value
    y = paged_attention_reference(q, layer, view)
    bad = torch.zeros_like(y, dtype=torch.bool)
    bad[9:14, 3:, 5] = bad[11:14, 3:, 8] = True
    assert torch.equal(y.isfinite(), ~bad)
    assert (y[~bad] - clean[~bad]).abs().max() < 1e-6


def test_the_reference_at_extremes() -> None:
    case = Case([(40, 1), (0, 5)])
    case.fill()
    case.run()
    layer, view, q = case.kv.layer(0), case.view(), case.queries()
    mean = paged_attention_reference(q * 0, layer, view)[0]
    _, v = case.kv.gather(0, case.tables[0].blocks, 41)
    assert (mean - v.mean(1).repeat_interleave(3, 0)).abs().max() < 1e-6
    scores = paged_attention_reference(q * 6e4, layer, view)  # far beyond 65504: one key wins
    assert scores.isfinite().all()
    k, v = case.kv.gather(0, case.tables[0].blocks, 41)
    best = (q[0, 0] @ k[0].t()).argmax()
    assert torch.allclose(scores[0, 0], v[0, best], atol=1e-6)
    half = paged_attention_reference(q, layer, view, scale=0.125)
    assert torch.allclose(half, paged_attention_reference(q / 2, layer, view, scale=0.25), atol=1e-6)


def test_what_does_not_fit_is_refused_by_name() -> None:
    case = Case([(4, 1), (0, 3)])
    case.fill()
    case.run()
    q, layer, view = case.queries(), case.kv.layer(0), case.view()
    for wrong in (q[:3], q[..., :8], q[:, :5], q.long(), q[0]):
        with pytest.raises(InputError, match=r"^q: "):
            paged_attention_reference(wrong, layer, view)
    other = Case([(4, 1), (0, 3)], block_size=8)
    with pytest.raises(InputError, match=r"^view: got blocks of 8"):
        paged_attention_reference(q, layer, other.view())
    with pytest.raises(InputError, match=r"^view: got blocks of 8"):
        PagedAttention(case.config, case.kv, other.view(), case.rotary, Angles(case.config, case.kv.device))
    small = PagedKV(case.config, num_blocks=1)
    with pytest.raises(InputError, match=r"^view: got tables into \d blocks; expected at most 1"):
        PagedAttention(case.config, small, case.view(), case.rotary, Angles(case.config, case.kv.device))
    with pytest.raises(InputError, match=r"^kv: got 1 layers, 2 KV heads of 16; expected 1 layers, 1 KV"):
        PagedAttention(of(6, 1), case.kv, case.view(), case.rotary, Angles(case.config, case.kv.device))
    for kernels_of, message in ((case, "head_dim 16"), (Case([(0, 1)], config=of(4, 1, 64)), "float32")):
        with pytest.raises(InputError, match=f"^kernels: got .*{message}"):
            kernels_of.run(kernels=True)
    # Tiles of 8 queries where the kernel takes 4: it would leave queries out.
    chunk = Case([(0, 20)], config=of(4, 1, 64), dtype=torch.float16)
    wrong = ViewBuilder("cpu", chunk.kv.block_size, 8).build(chunk.tables, [20])
    parts = (chunk.config, chunk.kv, wrong, chunk.rotary, Angles(chunk.config, chunk.kv.device))
    with pytest.raises(InputError, match=r"^view: got tiles of 8 queries; expected 4"):
        PagedAttention(*parts, kernels=True)
    assert PagedAttention(*parts).reason
    half = Case([(0, 1)], config=of(4, 1, 64), dtype=torch.float16, head_major=True)
    with pytest.raises(InputError, match="head-major"):
        half.run(kernels=True)


@pytest.mark.parametrize("heads", [(6, 2), (9, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_is_as_near_as_plain_torch(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    for head_major in (False, True):
        case = Case(mixed(), config=of(*heads), dtype=dtype, head_major=head_major, ordered=head_major)
        case.fill()
        y = case.run().view(-1, heads[0], 16)
        exact = case.dense()
        plain = torch.cat([_plain(case, row) for row in range(len(case.rows))]).double()
        error, bound = (y.double() - exact).abs().max(), (plain - exact).abs().max()
        assert error <= 2 * bound + torch.finfo(dtype).eps * exact.abs().max() / 4


def _plain(case: Case, row: int) -> torch.Tensor:
    start, count = case.rows[row]
    q, k, v = (one.transpose(0, 1)[None] for one in case.turned(row, case.kv.dtype))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y[0].transpose(0, 1)[start : start + count]


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_bits_that_it_has_alone(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Mates, block ids and memory order leave every bit of a row as it is."""
    rows = mixed()
    together = Case(rows, dtype=dtype, kv_dtype=kv_dtype)
    together.fill()
    y = together.run().split([count for _, count in rows])
    for head_major, ordered in ((False, True), (True, True), (True, False)):
        other = Case(rows, dtype=dtype, kv_dtype=kv_dtype, head_major=head_major, ordered=ordered, seed=0)
        other.qkv = together.qkv
        other.fill()
        for row in range(len(rows)):
            assert torch.equal(other.run([row]), y[row]), f"row {row}, {head_major}, {ordered}"


@pytest.mark.parametrize("seed", range(3))
def test_int8_is_within_its_bound(seed: int) -> None:
    """Half a step of a key's scale moves a score by at most delta = |q|_1 max(scale_k) / 2 / sqrt(D).

    Probabilities then change by factors from exp(-2 delta) to exp(2 delta), so a mean of values by at most
    (exp(2 delta) - 1) max |v|; the values themselves by half a step of theirs.
    """
    rows = [(0, 20), (200, 1), (63, 9)]
    case = Case(rows, kv_dtype=torch.int8, seed=seed, config=of(4, 2, 32))
    case.fill()
    y = case.run().view(-1, 4, 32).double()
    exact = case.dense()
    reference = paged_attention_reference(case.queries(), case.kv.layer(0), case.view(), dtype=torch.float64)
    assert (y - reference).abs().max() < 1e-5, "torch reads what is stored"
    first = 0
    for row, (_, count) in enumerate(rows):
        q, k, v = case.turned(row, torch.float64)
        q = q[-count:].view(count, 2, 2, 32)
        step_k = (k.abs().amax(-1) / 127).amax(0)  # [Hkv]
        step_v = (v.abs().amax(-1) / 127).amax(0)
        delta = q.abs().sum(-1) * step_k[:, None] / 2 / 32**0.5
        bound = torch.expm1(2 * delta) * v.abs().amax((0, 2))[:, None] + step_v[:, None] / 2
        error = (y - exact)[first : first + count].abs().amax(-1).view(count, 2, 2)
        assert (error <= bound + 1e-6).all()
        assert error.max() > 1e-5, "something was rounded"
        first += count


def test_a_long_chunk_is_computed_in_parts_of_bounded_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(30, 50), (3, 9)])
    case.fill()
    whole = case.run()
    sizes = []
    attention = F.scaled_dot_product_attention

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        mask = options.get("attn_mask")
        sizes.append(0 if mask is None else mask.numel())
        return attention(*args, **options)

    monkeypatch.setattr(module, "_MASK_ELEMENTS", 800)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    assert (case.run() - whole).abs().max() < 1e-5
    assert sizes == [800, 800, 800, 800, 800, 108]
