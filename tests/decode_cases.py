"""What decode steps are tested with, on the emulator and on a GPU alike: a small model, torch's products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.models.config import ModelConfig
from labkit.models.decode_step import Products
from labkit.models.decoder import Decoder
from labkit.models.model import expected_shapes, role
from labkit.quant.formats import QuantWeight
from labkit.quant.quantize import quantize

DTYPES = (torch.float16, torch.bfloat16)


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
