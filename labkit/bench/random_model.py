"""A model of a published shape with random weights, made layer by layer where it is wanted.

Weights come from a seed, so the layer that is repacked, the one that a peer converts and the one that a
check multiplies in float32 are the same, and none has to be kept. Scales are such that the activations of
every layer have a variance of about one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit import quoted
from labkit.errors import require
from labkit.models.config import ModelConfig
from labkit.models.decode_step import LayerWeights, Products, StepWeights, layer_weights
from labkit.models.decoder import Layer
from labkit.models.model import expected_shapes, layer_of, role
from labkit.nn.attention import CausalAttention
from labkit.nn.norms import RMSNorm
from labkit.nn.rope import Rotary
from labkit.quant.formats import QuantWeight, concat_rows

HEADS = ("dense", "w4")
_ROWS_AT_ONCE = 1 << 14  # of a head's codes: what bounds the temporaries of a vocabulary
_EMBEDDING_STD = 0.02


def config_of(key: str) -> ModelConfig:
    """Architecture of a model of ``data/quoted/models.json``.

    What that file does not have (biases, base of the rotation) is what the family's models have; none of it
    changes how much work a step is.
    """
    shape = quoted.model(key)
    qwen = shape.key.startswith("qwen")
    return ModelConfig(
        architecture="qwen2" if qwen else "llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope_theta=1e6 if qwen else 1e4,
        tie_word_embeddings=shape.tied_embeddings,
        attention_bias=qwen,
        max_position_embeddings=32_768,
    )


@dataclass(frozen=True)
class RandomModel:
    """Weights on demand.

    Attributes:
        config: the architecture.
        format, group: of the matrices of all layers: "w4" or "w3".
        head: "dense" (the embedding itself where tied) or "w4", which the embedding is then not tied to.
        device, dtype: of everything; dtype is that of the activations.
        seed: of all random numbers.
    """

    config: ModelConfig
    format: str = "w4"
    group: int = 128
    head: str = "dense"
    device: str = "cpu"
    dtype: torch.dtype = torch.float16
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.format in ("w4", "w3"), "bits", self.format, "w4 or w3")
        require(self.head in HEADS, "head", repr(self.head), " or ".join(HEADS))

    def layer(self, index: int) -> dict[str, Any]:
        """Canonical name → weight of one layer: QuantWeight matrices, float norms and biases."""
        source = self._generator(1 + index)
        found: dict[str, Any] = {}
        for name, shape in self._shapes(index):
            kind = role(name)
            if kind in ("attn", "mlp"):
                found[name] = self._quantised(shape, self.format, source)
            else:
                value = torch.randn(shape, generator=source, device=self.device)
                found[name] = (1 + 0.1 * value if kind == "norm" else 0.1 * value).to(self.dtype)
        return found

    def embedding(self) -> Tensor:
        """[V, d]."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        table = torch.empty(shape, dtype=self.dtype, device=self.device)
        return table.normal_(0.0, _EMBEDDING_STD, generator=self._generator(-1))

    def head_weight(self, embedding: Tensor) -> Tensor | QuantWeight:
        """The head [V, d], dense or W4."""
        rows, width = self.config.vocab_size, self.config.hidden_size
        if self.head == "w4":
            source = self._generator(-2)
            starts = range(0, rows, _ROWS_AT_ONCE)
            parts = [
                self._quantised((min(_ROWS_AT_ONCE, rows - start), width), "w4", source) for start in starts
            ]
            return concat_rows(parts)
        if self.config.tie_word_embeddings:
            return embedding
        return torch.empty_like(embedding).normal_(0.0, _EMBEDDING_STD, generator=self._generator(-2))

    def norm(self) -> Tensor:
        """Weight of the last norm [d]."""
        width = self.config.hidden_size
        value = torch.randn(width, generator=self._generator(-3), device=self.device)
        return (1 + 0.1 * value).to(self.dtype)

    def step_weights(self, products: Products) -> StepWeights:
        """As the decode step reads them; one layer's packed codes at a time live beside their tiles."""
        layers: list[LayerWeights] = []
        for i in range(self.config.num_layers):
            layer = Layer(
                self.config, i, self.layer(i), device=torch.device(self.device), dtype=self.dtype, fuse=True
            )
            layers.append(layer_weights(layer, products))
        table = self.embedding()
        head = self.head_weight(table)
        return StepWeights(
            table, layers, self.norm(), products.repack(head) if isinstance(head, QuantWeight) else head
        )

    @torch.inference_mode()
    def logits(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits [B, T, V] of ``tokens`` int64 [B, T] by the torch decoder's layers on dequantised weights.

        Args:
            dtype: of weights and activations: float32 for what is right, a half type for plain torch.
        """
        config, device = self.config, torch.device(self.device)
        rotary = Rotary(
            config.head_dim, config.rope_theta, config.rope_scaling,
            context=config.max_position_embeddings, device=device, dtype=dtype,
        )  # fmt: skip
        attend = CausalAttention(config, *rotary.tables(0, tokens.shape[1]))
        table = self.embedding()
        x = F.embedding(tokens.to(device), table).to(dtype)
        for i in range(config.num_layers):
            weights = {name: _dense(weight, dtype) for name, weight in self.layer(i).items()}
            layer = Layer(config, i, weights, device=device, dtype=dtype, fuse=False)
            x = layer(x, attend)
        x = RMSNorm(self.norm(), config.rms_norm_eps, dtype=dtype)(x)
        return F.linear(x, _dense(self.head_weight(table), dtype))

    def _shapes(self, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        return ((n, s) for n, s in expected_shapes(self.config).items() if layer_of(n) == index)

    def _generator(self, part: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1_000_003 * (self.seed + 1) + part)

    def _quantised(self, shape: tuple[int, ...], format: str, source: torch.Generator) -> QuantWeight:
        rows, columns = shape
        # Not the lowest code: a mean of half a code would drive every row the same way, layer by layer.
        low, high = (-7, 8) if format == "w4" else (-3, 4)
        codes = torch.randint(low, high, shape, generator=source, device=self.device, dtype=torch.int8)
        spread = torch.rand(rows, -(-columns // self.group), generator=source, device=self.device)
        # Codes are spread evenly, with a standard deviation of (high - low) / sqrt(12).
        scales = (0.5 + spread) * 12**0.5 / (high - low) / columns**0.5
        return QuantWeight.from_codes(format, codes, scales.half(), group_size=self.group)


def _dense(weight: Any, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, QuantWeight) else weight.to(dtype)
