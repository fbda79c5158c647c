"""One decode step of a static batch on the tensor-core family: every buffer and every launch, in order.

A layer is seven launches: RMSNorm, QKV with its bias, rope + append + attention, output projection with
the residual, RMSNorm, gate and up with SiLU, down projection with the residual. Nothing else runs between
them and nothing is allocated, so a CUDA graph can hold the whole step (labkit.models.graph_decoder).

B batch, d hidden size, F inner size, H query heads, Hkv key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.cache.paged import PagedKV
from labkit.cache.static import StaticCache
from labkit.errors import refuse, require
from labkit.kernels import paged_attention as attention
from labkit.kernels.greedy import GreedyState, greedy
from labkit.kernels.rmsnorm import ACTIVATIONS, rmsnorm
from labkit.models.config import ModelConfig
from labkit.models.step_weights import (
    BAND_BYTES,
    LayerWeights,
    Products,
    StepWeights,
    layer_weights,
    step_weights,
)
from labkit.nn.angles import angles, stretches

__all__ = [
    "BAND_BYTES",
    "HEAD_ROWS",
    "DecodeStep",
    "LayerWeights",
    "Products",
    "StepBuffers",
    "StepWeights",
    "check",
    "dense_head",
    "layer_weights",
    "step_weights",
    "why_not",
]

HEAD_ROWS = 8
"""In a step of its own a dense head is computed for at least so many rows: cuBLAS gives a row the same bits
for each batch up to here, and a product that reads V x d weights costs no more for eight rows than one."""


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
            return torch.zeros(rows, width, dtype=weights.dtype, device=weights.device)

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
        dtype, device = weights.dtype, weights.device
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
        weights.embed(self.inputs, out=x)
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
        total = _bytes(weights.norm) + _bytes(weights.head) + self.batch * weights.row_bytes
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


def _padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def _bytes(value: Any) -> int:
    return int(value.nbytes)
