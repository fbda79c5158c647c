"""One decode step of a static batch on the tensor-core family: every buffer and every launch, in order.

A layer is seven launches: RMSNorm, QKV with its bias, rope + append + attention, output projection with
the residual, RMSNorm, gate and up with SiLU, down projection with the residual. Nothing else runs between
them and nothing is allocated, so a CUDA graph can hold the whole step (labkit.models.graph_decoder).

B batch, d hidden size, F inner size, H query heads, Hkv key/value heads, D head width, S capacity,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import InputError, refuse, require
from labkit.kernels import decode_attention as attention
from labkit.kernels.greedy import GreedyState, greedy
from labkit.kernels.rmsnorm import ACTIVATIONS, rmsnorm
from labkit.models.config import ModelConfig
from labkit.models.kv import KVCache
from labkit.nn.rope import inverse_frequencies
from labkit.quant.formats import QuantWeight, concat_rows
from labkit.quant.grouped import GroupedWeight

HEAD_ROWS = 8
"""A dense head is computed for at least so many rows: cuBLAS gives a row the same bits for each batch up to
here, and a product that reads V x d weights costs no more for eight rows than for one."""


@dataclass(frozen=True)
class Products:
    """Where the products over quantised weights come from.

    Attributes:
        linear: ``linear(x, weight, *, bias, residual, out)``: x [M, K], writes and returns out [M, N];
            of a paired weight silu(gate) * up [M, N / 2].
        repack: ``repack(weight, paired=)``: a QuantWeight as ``linear`` reads it.
    """

    linear: Callable[..., Tensor]
    repack: Callable[..., Any]

    @classmethod
    def tensor_core(cls) -> Products:
        """The tensor-core family."""
        from labkit.kernels.tensor_core import linear
        from labkit.quant.tiles import repack

        return cls(linear, repack)


@dataclass(frozen=True)
class LayerWeights:
    """One layer: norms [d], biases or None, and four weights as :attr:`Products.linear` reads them."""

    input_norm: Tensor
    qkv: Any
    qkv_bias: Tensor | None
    out: Any
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Any  # paired
    down: Any
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class StepWeights:
    """A whole model.

    Attributes:
        embedding: [V, d] in the activation dtype: a step looks rows up by ids that only the device knows.
        layers: one for each layer.
        norm: the last norm [d].
        head: a tensor [V, d] for a dense product, or a weight for :attr:`Products.linear`.
    """

    embedding: Tensor
    layers: Sequence[LayerWeights]
    norm: Tensor
    head: Any


def why_not(config: ModelConfig, *, capacity: int, dtype: torch.dtype) -> str:
    """Why a model cannot be decoded by this step, or an empty string."""
    if dtype not in ACTIVATIONS:
        return f"activations of {str(dtype).removeprefix('torch.')}; it has float16 and bfloat16"
    if reason := attention.why_not(config.head_dim, config.group):
        return reason
    if config.mlp_bias:
        return "mlp_bias: gate and up with a bias"
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "dynamic" and capacity > config.max_position_embeddings:
        return (
            f"dynamic rope_scaling and a capacity of {capacity} beyond the context of "
            f"{config.max_position_embeddings}: the angles would depend on the length"
        )
    return ""


def check(config: ModelConfig, *, capacity: int, dtype: torch.dtype) -> None:
    """Raise InputError with the reason of :func:`why_not`, if there is one."""
    reason = why_not(config, capacity=capacity, dtype=dtype)
    require(not reason, "model", reason, "what the decode step has kernels for", "use the Decoder")


class DecodeStep:
    """Buffers and launches of one step; see the module.

    Args:
        config, weights: the model.
        batch: rows, fixed.
        capacity: positions of the cache.
        products: the tensor-core family by default.

    Attributes:
        cache: keys and values [L, B, Hkv, S, D]; its own ``length`` is not used by a step.
        state: tokens, lengths and what else lives on the device between steps.
        logits: [B, V] of the last step, a view.
        hidden: [B, d] after the last norm, a view.

    Raises:
        InputError: a feature of the model that the step does not have, by name.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: StepWeights,
        *,
        batch: int = 1,
        capacity: int,
        products: Products | None = None,
    ) -> None:
        for name, value in (("batch", batch), ("capacity", capacity)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole and value >= 1, name, repr(value), "a whole number of at least 1")
        dtype, device = weights.embedding.dtype, weights.embedding.device
        reason = why_not(config, capacity=capacity, dtype=dtype)
        require(
            not reason, "model", reason, "a model that the decode step has kernels for", "use the Decoder"
        )
        require(len(weights.layers) == config.num_layers, "weights", len(weights.layers), "every layer")
        self.config, self.weights, self.products = config, weights, products or Products.tensor_core()
        self.batch, self.capacity, self.dtype, self.device = batch, capacity, dtype, device
        self.cache = KVCache(config, capacity, batch=batch, device=device, dtype=dtype)
        self.state = GreedyState.new(batch, capacity, device)
        self._cos, self._sin = _angles(config, capacity, device)
        self._scratch = attention.Scratch.new(
            batch, config.num_kv_heads, config.group, config.head_dim, capacity, device
        )

        def buffer(rows: int, width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=device)

        heads = config.num_heads * config.head_dim
        self._x, self._y = buffer(batch, config.hidden_size), buffer(batch, config.hidden_size)
        self._normed = buffer(batch, config.hidden_size)
        self._qkv = buffer(batch, heads + 2 * config.num_kv_heads * config.head_dim)
        self._attended = buffer(batch, heads)
        self._inner = buffer(batch, config.intermediate_size)
        rows = max(batch, HEAD_ROWS) if isinstance(weights.head, Tensor) else batch
        self._hidden, self._logits = buffer(rows, config.hidden_size), buffer(rows, config.vocab_size)
        self.hidden, self.logits = self._hidden[:batch], self._logits[:batch]

    @torch.inference_mode()
    def forward(self) -> None:
        """Logits of ``state.tokens`` at ``state.lengths``; keys and values go to the cache there."""
        weights, linear, eps = self.weights, self.products.linear, self.config.rms_norm_eps
        x, y, normed = self._x, self._y, self._normed
        # torch's kernel overlaps nothing: after it all that the step before wrote is there, so those that
        # follow may read lengths and cached positions before the kernels ahead of them have finished.
        torch.index_select(weights.embedding, 0, self.state.tokens, out=x)
        for i, layer in enumerate(weights.layers):
            rmsnorm(x, layer.input_norm, eps, out=normed, overlap=True)
            linear(normed, layer.qkv, bias=layer.qkv_bias, out=self._qkv)
            attention.decode_attention(
                self._qkv,
                self.cache.keys[i],
                self.cache.values[i],
                self._cos,
                self._sin,
                self.state.lengths,
                self._scratch,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
                out=self._attended,
                overlap=True,
            )
            linear(self._attended, layer.out, bias=layer.out_bias, residual=x, out=y)
            rmsnorm(y, layer.mlp_norm, eps, out=normed, overlap=True)
            linear(normed, layer.gate_up, out=self._inner)
            linear(self._inner, layer.down, residual=y, out=x)
        rmsnorm(x, weights.norm, eps, out=self.hidden, overlap=True)
        if isinstance(weights.head, Tensor):
            torch.mm(self._hidden, weights.head.t(), out=self._logits)
        else:
            linear(self._hidden, weights.head, out=self._logits)

    @torch.inference_mode()
    def advance(self) -> None:
        """The most likely tokens become the next input, and every length is one more."""
        greedy(self.logits, self.state, overlap=True)

    def run(self) -> None:
        """One step: :meth:`forward`, then :meth:`advance`."""
        self.forward()
        self.advance()

    def read_bytes(self, context: int) -> int:
        """Bytes that a step at ``context`` cached positions a row must read: weights once, keys, values."""
        weights = self.weights
        total = _bytes(weights.norm) + _bytes(weights.head) + self.batch * weights.embedding[0].nbytes
        for layer in weights.layers:
            total += sum(_bytes(value) for value in vars(layer).values() if value is not None)
        a_position = 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim
        return total + self.batch * context * a_position * self.dtype.itemsize


def step_weights(decoder: Any, *, products: Products | None = None) -> StepWeights:
    """A decoder's weights as a step reads them.

    The packed matrices are repacked, a second copy; a quantised embedding becomes a dense table.

    Args:
        decoder: a labkit.models.decoder.Decoder with W4 or W3 matrices.
        products: whose ``repack`` to use.

    Raises:
        InputError: a matrix in another format, or q, k, v (gate, up) that cannot be joined; its name.
    """
    products = products or Products.tensor_core()
    dtype = decoder.dtype
    embedding = decoder.embedding
    table = embedding if isinstance(embedding, Tensor) else embedding.dequantize(dtype)
    head = decoder.head_linear.weight
    if isinstance(head, QuantWeight):
        head = products.repack(head)
    elif isinstance(head, GroupedWeight):
        tied = decoder.config.tie_word_embeddings
        head = table if tied else head.dequantize(dtype)
    layers = [layer_weights(layer, products) for layer in decoder.layers]
    return StepWeights(table, layers, decoder.norm.weight.detach(), _plain(head))


def layer_weights(layer: Any, products: Products) -> LayerWeights:
    """One labkit.models.decoder.Layer as a step reads it; see :func:`step_weights`."""
    made: dict[str, Any] = {}
    for field in ("qkv", "out", "gate_up", "down"):
        weight, bias = _joined(getattr(layer, field), f"layer {layer.index} {field}")
        made[field] = products.repack(weight, paired=field == "gate_up")
        if field in ("qkv", "out"):
            made[f"{field}_bias"] = bias
        else:
            require(bias is None, f"layer {layer.index} {field}", "a bias", "none")
    for field in ("q_norm", "k_norm"):
        norm = getattr(layer, field)
        made[field] = None if norm is None else norm.weight.detach()
    norms = {name: getattr(layer, name).weight.detach() for name in ("input_norm", "mlp_norm")}
    return LayerWeights(**norms, **made)


def _joined(projection: Any, name: str) -> tuple[QuantWeight, Tensor | None]:
    """One weight and bias for a Projection's parts."""
    parts = list(projection.parts)
    weights = [part.weight for part in parts]
    for weight in weights:
        if not isinstance(weight, QuantWeight):
            kind = weight.format if isinstance(weight, GroupedWeight) else "a dense weight"
            refuse(name, kind, "w4 or w3", 'load_model(..., bits="w4")')
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    bias = (torch.cat(biases) if len(biases) > 1 else biases[0]) if biases else None
    if len(weights) == 1:
        return weights[0], bias
    try:
        return concat_rows(weights), bias
    except InputError as error:
        fix = "quantise them alike"
        raise InputError(
            name, str(error), "matrices of one format and group that can be joined", fix
        ) from error


def _angles(config: ModelConfig, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, float32 [S, D/2]."""
    frequencies, factor = inverse_frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling, context=config.max_position_embeddings
    )
    angles = torch.arange(capacity, dtype=torch.float32)[:, None] * frequencies
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def _bytes(value: Any) -> int:
    return int(value.nbytes)


def _plain(weight: Any) -> Any:
    return weight.detach() if isinstance(weight, Tensor) else weight
