"""What every loader returns, and the canonical names and shapes of a model's weights.

A loader (GGUF, Hugging Face folder, labkit checkpoint) returns a :class:`ModelFile`: the parsed
configuration and one flat mapping from canonical name to weight. :meth:`Model.build` turns it
into a decoder. Canonical names are those of Hugging Face checkpoints
("model.layers.0.self_attn.q_proj.weight"), with the half-split RoPE row order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from labkit.errors import ModelFileError
from labkit.models.config import ModelConfig

if TYPE_CHECKING:
    from labkit.models.decoder import Decoder
    from labkit.models.tokenizer import Tokenizer
    from labkit.quant.formats import GroupedWeight, QuantWeight

    Weight: TypeAlias = torch.Tensor | QuantWeight | GroupedWeight
else:
    Weight = Any

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ATTENTION_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")

_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class ModelFile:
    """A model as read from disk, before it can compute.

    Attributes:
        config: the architecture.
        weights: canonical name -> Tensor | QuantWeight | GroupedWeight; complete and of the right
            shapes (:func:`check_weights` has passed).
        tokenizer: None when the source has none.
        info: JSON-able facts about the source: "source" (path as given), "format"
            ("gguf" | "hf" | "labkit"), "name", and whatever the loader adds.
    """

    config: ModelConfig
    weights: Mapping[str, Weight]
    tokenizer: Tokenizer | None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Model:
    """A model that can compute: what :func:`labkit.models.zoo.load_model` returns."""

    decoder: Decoder
    tokenizer: Tokenizer | None
    config: ModelConfig
    name: str
    info: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        file: ModelFile,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        fuse: bool = True,
    ) -> Model:
        """Build the decoder of ``file`` with activations of ``dtype`` on ``device``."""
        from labkit.models.decoder import Decoder

        decoder = Decoder.from_weights(file.config, file.weights, device=device, dtype=dtype, fuse=fuse)
        name = str(file.info.get("name") or file.config.architecture)
        return cls(decoder, file.tokenizer, file.config, name, dict(file.info))


def layer_prefix(layer: int) -> str:
    """ "model.layers.{layer}." """
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight a checkpoint of ``config`` must have, by canonical name, with its shape.

    Matrices are [out, in]. "lm_head.weight" is listed only when the embedding is not tied.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        p = layer_prefix(layer)
        shapes[p + "input_layernorm.weight"] = (hidden,)
        shapes[p + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            shapes[f"{p}self_attn.{name}.weight"] = (rows, hidden)
            if config.attention_bias:
                shapes[f"{p}self_attn.{name}.bias"] = (rows,)
        shapes[p + "self_attn.o_proj.weight"] = (hidden, q_rows)
        if config.output_bias:
            shapes[p + "self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[p + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[p + "self_attn.k_norm.weight"] = (config.head_dim,)
        for name, rows, columns in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            shapes[f"{p}mlp.{name}.weight"] = (rows, columns)
            if config.mlp_bias:
                shapes[f"{p}mlp.{name}.bias"] = (rows,)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def role(name: str) -> str:
    """What a canonical name is: "attn" | "mlp" | "embed" | "head" | "norm" | "bias".

    "attn" and "mlp" are the matrices that quantisation is about.
    """
    if name == EMBEDDING:
        return "embed"
    if name == HEAD:
        return "head"
    if name.endswith(".bias"):
        return "bias"
    match = _LAYER.match(name)
    if match:
        part = match.group(2).split(".")
        if len(part) == 3 and part[0] == "self_attn" and part[1] in ATTENTION_MATRICES:
            return "attn"
        if len(part) == 3 and part[0] == "mlp" and part[1] in MLP_MATRICES:
            return "mlp"
    return "norm"


def layer_of(name: str) -> int | None:
    """The layer number in a canonical name, or None."""
    match = _LAYER.match(name)
    return int(match.group(1)) if match else None


def matrix_names(config: ModelConfig) -> Iterator[str]:
    """Names of the attention and MLP matrices in layer order."""
    return (name for name in expected_shapes(config) if role(name) in ("attn", "mlp"))


def shape_of(weight: Weight) -> tuple[int, ...]:
    """Logical shape of a Tensor, QuantWeight or GroupedWeight: [out, in] for a matrix."""
    return tuple(int(size) for size in weight.shape)


def check_weights(config: ModelConfig, weights: Mapping[str, Weight], source: str) -> None:
    """Raise ModelFileError unless ``weights`` holds exactly what ``config`` needs, in the right shapes.

    ``source`` is the path that the message names. A tied checkpoint may carry its head twice.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in weights]
    if missing:
        raise ModelFileError(
            source,
            f"{len(missing)} weights missing, the first {missing[0]!r}",
            f"all {len(expected)} weights of a {config.architecture} model of {config.num_layers} layers",
        )
    for name, weight in weights.items():
        if name not in expected:
            if config.tie_word_embeddings and name == HEAD:
                continue
            raise ModelFileError(source, f"a weight named {name!r}", f"only weights of {config.architecture}")
        if shape_of(weight) != expected[name]:
            raise ModelFileError(
                source,
                f"{name} of shape {list(shape_of(weight))}",
                f"shape {list(expected[name])}",
                "the file and its configuration do not belong together",
            )
