"""One decode step of a static batch on the tensor-core family: every buffer and every launch, in order.

A layer is seven launches: RMSNorm, QKV with its bias, rope + append + attention, output projection with
the residual, RMSNorm, gate and up with SiLU, down projection with the residual. Nothing else runs between
them and nothing is allocated, so a CUDA graph can hold the whole step (labkit.models.graph_decoder).

B batch, d hidden size, F inner size, H query heads, Hkv key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.cache.paged import PagedKV
from labkit.cache.static import StaticCache
from labkit.errors import InputError, refuse, require
from labkit.kernels import paged_attention as attention
from labkit.kernels.greedy import GreedyState, greedy
from labkit.kernels.rmsnorm import ACTIVATIONS, rmsnorm
from labkit.models.config import ModelConfig
from labkit.nn.angles import angles, stretches
from labkit.quant.formats import QuantWeight, concat_rows
from labkit.quant.grouped import GroupedWeight

HEAD_ROWS = 8
"""In a step of its own a dense head is computed for at least so many rows: cuBLAS gives a row the same bits
for each batch up to here, and a product that reads V x d weights costs no more for eight rows than one."""

_PROJECTIONS = ("qkv", "out", "gate_up", "down")
BAND_BYTES = 64 << 20
"""Of a quantised table in float32 at a time, while it is made dense."""


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
    def tensor_core(cls, **options: Any) -> Products:
        """The tensor-core family; options of its ``linear``, such as ``dense_from=None``."""
        from labkit.kernels.tensor_core import linear
        from labkit.quant.tiles import repack

        return cls(functools.partial(linear, **options) if options else linear, repack)


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


def why_not(
    config: ModelConfig,
    *,
    capacity: int,
    dtype: torch.dtype,
    block_size: int = 16,
    kv_dtype: torch.dtype | None = None,
) -> str:
    """Why a model cannot be decoded by this step, or an empty string."""
    if dtype not in ACTIVATIONS:
        return f"activations of {str(dtype).removeprefix('torch.')}; it has float16 and bfloat16"
    if reason := attention.why_not(config.head_dim, config.group, block_size, dtype, kv_dtype):
        return reason
    if config.mlp_bias:
        return "mlp_bias: gate and up with a bias"
    if stretches(config, capacity):
        return (
            f"dynamic rope_scaling and a capacity of {capacity} beyond the context of "
            f"{config.max_position_embeddings}: the angles would depend on the length"
        )
    return ""


def check(config: ModelConfig, **options: Any) -> None:
    """Raise InputError with the reason of :func:`why_not`, if there is one; the same options."""
    reason = why_not(config, **options)
    require(not reason, "model", reason, "what the decode step has kernels for", "use the Decoder")


@dataclass(frozen=True)
class StepBuffers:
    """Activations of a step of so many rows at most; steps that follow each other on a stream share them.

    Attributes:
        x, y, normed: [B, d]. qkv: [B, (H + 2 Hkv) D]. attended: [B, H D]. inner: [B, F].
        hidden, logits: [R, d] and [R, V], R a multiple of ``head_rows``.
        head_rows: rows of every call of a dense head; 1 for one of the tensor-core family.
    """

    x: Tensor
    y: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    inner: Tensor
    hidden: Tensor
    logits: Tensor
    head_rows: int

    @classmethod
    def new(cls, config: ModelConfig, weights: StepWeights, rows: int, head_rows: int) -> StepBuffers:
        """Zeros for ``rows`` rows, on the device and in the dtype of the weights."""

        def buffer(rows: int, width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=weights.embedding.dtype, device=weights.embedding.device)

        heads, d = config.num_heads * config.head_dim, config.hidden_size
        widths = (d, d, d, heads + 2 * config.num_kv_heads * config.head_dim, heads, config.intermediate_size)
        head_rows = head_rows if isinstance(weights.head, Tensor) else 1
        padded = _padded(rows, head_rows)
        x, y, normed, qkv, attended, inner = (buffer(rows, width) for width in widths)
        hidden, logits = buffer(padded, d), buffer(padded, config.vocab_size)
        return cls(x, y, normed, qkv, attended, inner, hidden, logits, head_rows)

    def first(self, rows: int) -> StepBuffers:
        """Those of a step of fewer rows, as views."""
        padded = _padded(rows, self.head_rows)
        return StepBuffers(
            self.x[:rows],
            self.y[:rows],
            self.normed[:rows],
            self.qkv[:rows],
            self.attended[:rows],
            self.inner[:rows],
            self.hidden[:padded],
            self.logits[:padded],
            self.head_rows,
        )


class DecodeStep:
    """Buffers and launches of one step; see the module.

    Args:
        config, weights: the model.
        batch: rows, fixed.
        capacity: positions of the cache.
        products: the tensor-core family by default.
        block_size: token slots a block of the cache.
        kv_dtype: of the cache: None for the activations' dtype, or torch.int8.
        paged: storage and block tables int32 [B, NB] of others, in place of a cache of its own; block_size
            and kv_dtype are then the storage's.
        inputs: ids int64 [B] to compute, where they are not ``state.tokens``.
        state, buffers, scratch, tables: made here by default; steps of one stream may share all but the
            state. ``tables`` are cos and sin of at least ``capacity`` positions.

    Attributes:
        kv, block_tables: storage, and where each row's tokens are in it.
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
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
        paged: tuple[PagedKV, Tensor] | None = None,
        inputs: Tensor | None = None,
        state: GreedyState | None = None,
        buffers: StepBuffers | None = None,
        scratch: attention.Scratch | None = None,
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        if paged is not None:
            block_size, kv_dtype = paged[0].block_size, paged[0].kv_dtype
        for name, value in (("batch", batch), ("capacity", capacity)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole and value >= 1, name, repr(value), "a whole number of at least 1")
        dtype, device = weights.embedding.dtype, weights.embedding.device
        check(config, capacity=capacity, dtype=dtype, block_size=block_size, kv_dtype=kv_dtype)
        require(len(weights.layers) == config.num_layers, "weights", len(weights.layers), "every layer")
        self.config, self.weights, self.products = config, weights, products or Products.tensor_core()
        self.batch, self.capacity, self.dtype, self.device = batch, capacity, dtype, device
        self._cache: StaticCache | None = None
        if paged is None:
            self._cache = StaticCache(
                config,
                capacity,
                batch=batch,
                device=device,
                dtype=dtype,
                block_size=block_size,
                kv_dtype=kv_dtype,
                head_major=False,
            )
            paged = self._cache.kv, self._cache.block_tables
        self.kv, self.block_tables = paged
        self.state = GreedyState.new(batch, capacity, device) if state is None else state
        self.inputs = self.state.tokens if inputs is None else inputs
        self._cos, self._sin = angles(config, capacity, device) if tables is None else tables
        self._scratch = scratch or attention.Scratch.new(
            batch,
            config.num_kv_heads,
            config.group,
            config.head_dim,
            capacity,
            device,
            int8=self.kv.kv_dtype == torch.int8,
        )
        self.buffers = buffers or StepBuffers.new(config, weights, batch, max(batch, HEAD_ROWS))
        self.hidden, self.logits = self.buffers.hidden[:batch], self.buffers.logits[:batch]

    @property
    def cache(self) -> StaticCache:
        """The step's own cache."""
        if self._cache is None:
            refuse("cache", "storage of others", "a step with a cache of its own")
        return self._cache

    @torch.inference_mode()
    def forward(self) -> None:
        """Logits of ``state.tokens`` at ``state.lengths``; keys and values go to the cache there."""
        weights, linear, eps = self.weights, self.products.linear, self.config.rms_norm_eps
        to = self.buffers
        x, y, normed = to.x, to.y, to.normed
        # torch's kernel overlaps nothing: after it all that the step before wrote is there, so those that
        # follow may read lengths and cached positions before the kernels ahead of them have finished.
        torch.index_select(weights.embedding, 0, self.inputs, out=x)
        for i, layer in enumerate(weights.layers):
            rmsnorm(x, layer.input_norm, eps, out=normed, overlap=True)
            linear(normed, layer.qkv, bias=layer.qkv_bias, out=to.qkv)
            attention.decode_attention(
                to.qkv,
                self.kv.layer(i),
                self.block_tables,
                self.state.lengths,
                self._cos,
                self._sin,
                self._scratch,
                capacity=self.capacity,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
                out=to.attended,
                overlap=True,
            )
            linear(to.attended, layer.out, bias=layer.out_bias, residual=x, out=y)
            rmsnorm(y, layer.mlp_norm, eps, out=normed, overlap=True)
            linear(normed, layer.gate_up, out=to.inner)
            linear(to.inner, layer.down, residual=y, out=x)
        rmsnorm(x, weights.norm, eps, out=self.hidden, overlap=True)
        if isinstance(weights.head, Tensor):
            dense_head(to.hidden, weights.head, to.logits, to.head_rows)
        else:
            linear(to.hidden, weights.head, out=to.logits)

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
        kv = self.kv
        a_position = kv.block_bytes(self.config, kv.block_size, kv.kv_dtype) // kv.block_size
        return total + self.batch * context * a_position


def dense_head(normed: Tensor, head: Tensor, logits: Tensor, rows: int) -> None:
    """``normed`` [n, d] @ ``head`` [V, d].T into ``logits`` [n, V] by calls of ``rows`` rows, which divide n.

    cuBLAS picks its kernel, and so the bits, by the shape of a call.
    """
    for part, out in zip(normed.split(rows), logits.split(rows), strict=True):
        torch.mm(part, head.t(), out=out)


class Released(nn.Module):
    """Stands where a module was whose packed weights live on as tiles alone."""

    def forward(self, *args: Any) -> Tensor:
        """Refuses."""
        refuse("decoder", "weights that were released", "a decoder that holds them", "load the model again")


def step_weights(decoder: Any, *, products: Products | None = None, release: bool = False) -> StepWeights:
    """A decoder's weights as a step reads them.

    The packed matrices are repacked, a second copy; a quantised embedding becomes a dense table.

    Args:
        decoder: a labkit.models.decoder.Decoder with W4 or W3 matrices.
        products: whose ``repack`` to use.
        release: drop every layer of the decoder as soon as it is repacked, so that no more than one is held
            twice; the decoder cannot compute any more.

    Raises:
        InputError: a matrix in another format, or q, k, v (gate, up) that cannot be joined; its name. With
            ``release`` too nothing is dropped then, unless a repacking itself failed.
    """
    products = products or Products.tensor_core()
    dtype = decoder.dtype
    for layer in decoder.layers if release else ():
        check_layer(layer)
    embedding = decoder.embedding
    table = embedding if isinstance(embedding, Tensor) else dense_table(embedding, dtype)
    head = decoder.head_linear.weight
    if isinstance(head, QuantWeight):
        head = products.repack(head)
    elif isinstance(head, GroupedWeight):
        tied = decoder.config.tie_word_embeddings
        head = table if tied else dense_table(head, dtype)
    layers = []
    if release:
        decoder.embedding, decoder.head_linear = table, Released()
        del embedding
    for index, layer in enumerate(decoder.layers):
        layers.append(layer_weights(layer, products))
        if release:
            decoder.layers[index] = Released()
    return StepWeights(table, layers, decoder.norm.weight.detach(), _plain(head))


def dense_table(weight: Any, dtype: torch.dtype) -> Tensor:
    """A quantised weight [V, d] as a tensor; float32 for a band of its rows at a time."""
    table = torch.empty(weight.n, weight.k, dtype=dtype, device=weight.device)
    rows = max(1, BAND_BYTES // (4 * weight.k))
    for first in range(0, weight.n, rows):
        band = slice(first, min(first + rows, weight.n))
        table[band] = weight.dequantize(dtype, band)
    return table


def check_layer(layer: Any) -> None:
    """Raise InputError, with the name, unless :func:`layer_weights` has what it wants."""
    for field in _PROJECTIONS:
        name, parts = f"layer {layer.index} {field}", list(getattr(layer, field).parts)
        _check_parts(parts, name)
        if field in ("gate_up", "down"):
            require(all(part.bias is None for part in parts), name, "a bias", "none")


def layer_weights(layer: Any, products: Products) -> LayerWeights:
    """One labkit.models.decoder.Layer as a step reads it; see :func:`step_weights`."""
    made: dict[str, Any] = {}
    for field in _PROJECTIONS:
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
    weights = _check_parts(parts, name)
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


def _check_parts(parts: Sequence[Any], name: str) -> list[QuantWeight]:
    for part in parts:
        weight = part.weight
        if not isinstance(weight, QuantWeight):
            kind = weight.format if isinstance(weight, GroupedWeight) else "a dense weight"
            refuse(name, kind, "w4 or w3", 'load_model(..., bits="w4")')
    return [part.weight for part in parts]


def _padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def _bytes(value: Any) -> int:
    return int(value.nbytes)


def _plain(weight: Any) -> Any:
    return weight.detach() if isinstance(weight, Tensor) else weight
