"""What the kernels of a decode step are tested with, on the emulator and on a GPU alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.kernels import decode_attention as attention
from labkit.kernels.decode_attention import Scratch
from labkit.models.config import ModelConfig
from labkit.models.decode_step import Products
from labkit.models.decoder import Decoder
from labkit.models.model import expected_shapes, role
from labkit.nn.rope import rotate
from labkit.quant.formats import QuantWeight
from labkit.quant.quantize import quantize

DTYPES = (torch.float16, torch.bfloat16)

SHAPES = ((128, 8, 2), (64, 3, 3), (80, 1, 2), (96, 9, 1), (128, 16, 1), (64, 7, 2), (96, 4, 2))
"""Head width, query heads a key/value head, key/value heads."""

TOTALS = (1, 15, 16, 17, 127, 128, 129, 255, 256, 257)
"""Tokens that a row attends to, the new one included: both sides of a strip, a block, two blocks."""


@dataclass(frozen=True)
class Attention:
    """Inputs of one launch; whatever lies beyond a row's length is NaN."""

    qkv: Tensor
    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    lengths: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """B, H, Hkv, S, D."""
        batch, kv_heads, capacity, head_dim = self.keys.shape
        return batch, self.qkv.shape[1] // head_dim - 2 * kv_heads, kv_heads, capacity, head_dim

    def scratch(self) -> Scratch:
        batch, heads, kv_heads, capacity, head_dim = self.shape
        return Scratch.new(batch, kv_heads, heads // kv_heads, head_dim, capacity, self.qkv.device)

    def row(self, index: int, capacity: int | None = None) -> Attention:
        """One row alone, in a cache of another capacity if one is named."""
        _, _, kv_heads, old, head_dim = self.shape
        new = capacity or old
        made = []
        for cache in (self.keys, self.values):
            cut = torch.full(
                (1, kv_heads, new, head_dim), float("nan"), dtype=cache.dtype, device=cache.device
            )
            kept = min(old, new)
            cut[:, :, :kept] = cache[index : index + 1, :, :kept]
            made.append(cut)
        row = slice(index, index + 1)
        return replace(
            self, qkv=self.qkv[row].clone(), keys=made[0], values=made[1], lengths=self.lengths[row].clone()
        )

    def run(self, scratch: Scratch | None = None, **options: Any) -> Tensor:
        """The kernel's output; the caches get the new token."""
        return attention.decode_attention(
            self.qkv,
            self.keys,
            self.values,
            self.cos,
            self.sin,
            self.lengths,
            scratch or self.scratch(),
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            **options,
        )


def attention_case(
    shape: tuple[int, int, int],
    totals: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float16,
    capacity: int | None = None,
    qk_norm: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Attention:
    """Random inputs; row b attends to totals[b] tokens."""
    head_dim, group, kv_heads = shape
    source = torch.Generator().manual_seed(seed + sum(totals))
    capacity = capacity or max(totals) + 3
    batch, heads = len(totals), group * kv_heads

    def randn(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=source) * scale).to(dtype)

    qkv = randn(batch, (heads + 2 * kv_heads) * head_dim, scale=1.5)
    keys, values = (randn(batch, kv_heads, capacity, head_dim) for _ in range(2))
    for b, total in enumerate(totals):
        keys[b, :, total - 1 :] = values[b, :, total - 1 :] = float("nan")
    angles = torch.arange(capacity)[:, None] * 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    lengths = torch.tensor([total - 1 for total in totals], dtype=torch.int32)
    norms = [1 + randn(head_dim, scale=0.2) if qk_norm else None for _ in range(2)]
    tensors = (qkv, keys, values, angles.cos(), angles.sin(), lengths, *norms)
    return Attention(*(None if one is None else one.contiguous().to(device) for one in tensors))  # type: ignore[arg-type]


def reference(case: Attention, dtype: torch.dtype = torch.float64, eps: float = 1e-6) -> tuple[Tensor, ...]:
    """Output [B, H D], new keys [B, Hkv, D] and new values, as torch computes them in ``dtype``.

    In a half type everything is rounded as plain torch does it: tables, rotation, attention.
    """
    batch, heads, kv_heads, _, head_dim = case.shape
    outs, new_keys, new_values = [], [], []
    for b in range(batch):
        n = int(case.lengths[b])
        parts = case.qkv[b].to(dtype).view(1, 1, -1, head_dim)
        turned, new = parts.split((heads + kv_heads, kv_heads), 2)
        if case.q_norm is not None and case.k_norm is not None:
            q, k = turned.split((heads, kv_heads), 2)
            q = F.rms_norm(q, (head_dim,), case.q_norm.to(dtype), eps)
            turned = torch.cat((q, F.rms_norm(k, (head_dim,), case.k_norm.to(dtype), eps)), 2)
        cos = torch.cat((case.cos[n], case.cos[n])).to(dtype)[None, None]
        sin = torch.cat((-case.sin[n], case.sin[n])).to(dtype)[None, None]
        q, k = rotate(turned, cos, sin).split((heads, kv_heads), 2)
        keys = torch.cat((case.keys[b : b + 1, :, :n].to(dtype), k.transpose(1, 2)), 2)
        values = torch.cat((case.values[b : b + 1, :, :n].to(dtype), new.transpose(1, 2)), 2)
        q = q.reshape(1, kv_heads, heads // kv_heads, head_dim)
        outs.append(F.scaled_dot_product_attention(q, keys, values).reshape(-1))
        new_keys.append(k[0, 0])
        new_values.append(new[0, 0])
    return torch.stack(outs), torch.stack(new_keys), torch.stack(new_values)


def check_accurate(case: Attention) -> None:
    """Output and new keys at most twice as far from float64 as plain torch; nothing else is written."""
    exact, plain = reference(case), reference(case, case.qkv.dtype)
    before = case.keys.clone(), case.values.clone()
    guarded = torch.full_like(plain[0], float("nan"))
    y = case.run(out=guarded)
    slack = torch.finfo(case.qkv.dtype).eps
    rows = torch.arange(len(case.lengths), device=y.device)
    at = case.lengths.long()
    for mine, theirs, right in ((y, plain[0], exact[0]), (case.keys[rows, :, at], plain[1], exact[1])):
        error = (mine.double() - right).abs().max()
        bound = 2 * (theirs.double() - right).abs().max() + slack * right.abs().max()
        assert error <= bound, f"{error} against {bound}"
    assert torch.equal(case.values[rows, :, at], plain[2])
    for cache, old in zip((case.keys, case.values), before, strict=True):
        old[rows, :, at] = cache[rows, :, at]
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0)), "another position was written"


def check_invariant(shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    """A row has the bits that it has alone, in a cache of any capacity, and again with used scratch."""
    totals = (257, 1, 40, 128, 129, 300)
    case = attention_case(shape, totals, dtype=dtype, capacity=400, device=device)
    scratch = case.scratch()
    y = case.run(scratch)
    assert torch.isfinite(y).all()
    for tensor in (scratch.part, scratch.part_ml):
        tensor.fill_(float("nan"))
    assert torch.equal(case.run(scratch), y)
    assert not scratch.tickets.any()
    for b, total in enumerate(totals):
        for capacity in (total, 400, 700):
            alone = case.row(b, capacity)
            if len(alone.cos) < capacity:
                more = alone.cos.new_zeros(capacity - len(alone.cos), alone.cos.shape[1])
                alone = replace(alone, cos=torch.cat((alone.cos, more)), sin=torch.cat((alone.sin, more)))
            assert torch.equal(alone.run()[0], y[b]), f"row {b} alone, capacity {capacity}"


# --- a whole step -----------------------------------------------------------------------------------------


def config(**changes: Any) -> ModelConfig:
    """A model that the emulator can run: two layers, groups of four, a bias for q, k and v."""
    values: dict[str, Any] = {
        "architecture": "qwen2",
        "vocab_size": 300,
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 64,
        "attention_bias": True,
        "max_position_embeddings": 512,
    }
    return ModelConfig(**(values | changes))


def model_weights(
    of: ModelConfig, *, seed: int = 0, group: int = 32, head: str | None = None, form: str = "w4"
) -> dict[str, Any]:
    """Random canonical weights: W4 matrices, float embedding, ``head`` a format or None for float."""
    source = torch.Generator().manual_seed(seed)
    weights: dict[str, Any] = {}
    for name, shape in expected_shapes(of).items():
        kind = role(name)
        value = torch.randn(*shape, generator=source)
        if kind == "norm":
            weights[name] = 1 + 0.2 * value
        elif kind == "bias":
            weights[name] = 0.3 * value
        elif kind in ("attn", "mlp"):
            weights[name] = quantize(value / shape[1] ** 0.5, form, group)
        else:
            weights[name] = value / shape[1] ** 0.5 if kind == "head" else value
            if head is not None and kind == "head":
                weights[name] = quantize(weights[name], head, group)
    return weights


def decoder(of: ModelConfig, dtype: torch.dtype, device: str = "cpu", **options: Any) -> Decoder:
    """The torch decoder with those weights."""
    return Decoder.from_weights(of, model_weights(of, **options), device=device, dtype=dtype)


@dataclass(frozen=True)
class Plain:
    """A weight that :func:`plain_products` reads."""

    values: Tensor  # float32 [N, K]
    paired: bool
    nbytes: int


def plain_products() -> Products:
    """The signature of the tensor-core family over torch's own product, float32 inside, rounded once.

    Row by row: torch's product gives a row other bits in another batch.
    """

    def repack(weight: QuantWeight, *, paired: bool = False) -> Plain:
        return Plain(weight.dequantize(), paired, weight.nbytes)

    def linear(
        x: Tensor,
        weight: Plain,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        y = torch.cat([row[None].float() @ weight.values.t() for row in x])
        y = y if bias is None else y + bias.float()
        if weight.paired:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        y = (y if residual is None else y + residual.float()).to(x.dtype)
        return y if out is None else out.copy_(y)

    return Products(linear, repack)
