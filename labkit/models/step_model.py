"""The layers of a step with any mix of rows, in slices: by the decoder's modules, or by kernels.

:class:`StepModel` runs prompt chunks, mixed steps and single tokens on the kernels and the weights of the
decode step (labkit.models.decode_step): a token has the same bits in each. :class:`DecoderLayers` is the
same interface over the torch decoder; labkit.nn.invariant has a third.

T new tokens of all rows, R rows whose logits are wanted, d hidden size, V vocabulary.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.cache.paged import PagedKV
from labkit.cache.views import KVView
from labkit.errors import require
from labkit.kernels import paged_attention as attention
from labkit.kernels.paged_layer import BLOCK_SIZES
from labkit.kernels.rmsnorm import rmsnorm
from labkit.models.config import ModelConfig
from labkit.models.decode_step import check, dense_head
from labkit.models.step_weights import LayerWeights, Products, StepWeights
from labkit.nn.angles import angles
from labkit.nn.attention import PagedAttention, attention_kernels, scratch_for
from labkit.quant.tiles import TileWeight

HEAD_ROWS = 64
"""Rows of every call of a dense head: cuBLAS picks its kernel, and so the bits, by the shape of the call."""


class Layers(Protocol):
    """What an executor computes with."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    def forward(
        self,
        tokens: Tensor,
        kv: PagedKV,
        view: KVView,
        *,
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Layers first … last - 1 of a step.

        Args:
            tokens: int64 [T], row after row as ``view`` has them.
            kv: the storage; keys and values of the new tokens are written to it.
            view: what the rows hold and where their tokens go.
            layers: (first, last); None for all.
            hidden: what the slice before gave; None begins with the embedding. It may be overwritten.

        Returns:
            The residual stream [T, d], before the last norm.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of rows [R, d] of the residual stream behind the last layer; R at least 1."""
        ...


class DecoderLayers:
    """A labkit.models.decoder.Decoder, a slice of layers at a time."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.config, self.device, self.dtype = decoder.config, decoder.device, decoder.dtype

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        kv: PagedKV,
        view: KVView,
        *,
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """See :class:`Layers`."""
        decoder = self.decoder
        first, last = (0, self.config.num_layers) if layers is None else layers
        attend = PagedAttention(self.config, kv, view, decoder.rotary, decoder.angles)
        if hidden is None:
            hidden = decoder.embed(tokens)
        with attention_kernels(self.device):
            for layer in decoder.layers[first:last]:
                hidden = layer(hidden, attend)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See :class:`Layers`."""
        return self.decoder.head(self.decoder.norm(hidden))


class StepModel:
    """The kernels of the decode step, for any rows.

    Args:
        config, weights: the model.
        max_context: most tokens of a sequence.
        products: those of the tensor-core family, exact for any number of rows, by default; others must give
            a row the same bits for any number of rows too.

    Raises:
        InputError: a feature of the model that the kernels do not have, by name.
    """

    def __init__(
        self, config: ModelConfig, weights: StepWeights, *, max_context: int, products: Products | None = None
    ) -> None:
        self.config, self.weights, self.max_context = config, weights, max_context
        self.dtype, self.device = weights.dtype, weights.device
        check(config, capacity=max_context, dtype=self.dtype)
        require(len(weights.layers) == config.num_layers, "weights", len(weights.layers), "every layer")
        self.products = products or Products.tensor_core(dense_from=None)
        # As far as block tables reach, whatever the size of a block.
        positions = -(-max_context // max(BLOCK_SIZES)) * max(BLOCK_SIZES)
        self.cos, self.sin = angles(config, positions, self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        kv: PagedKV,
        view: KVView,
        *,
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """See :class:`Layers`. Everything is queued on the current stream, temporaries belong to it."""
        first, last = (0, self.config.num_layers) if layers is None else layers
        # torch's kernel overlaps nothing: behind it, kernels may start before those ahead have finished.
        if hidden is None:
            hidden = self.weights.embed(tokens)
        else:
            hidden = hidden.clone()
        scratch = scratch_for(self.config, kv, view)
        for index in range(first, last):
            hidden = self._layer(self.weights.layers[index], index, hidden, kv, view, scratch)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See :class:`Layers`. A dense head is computed :data:`HEAD_ROWS` rows at a time.

        Args:
            out: where to write them, [at least head_rows(R), V]; a new tensor by default.
        """
        weights, count = self.weights, hidden.shape[0]
        rows = self.head_rows(count)
        if out is None:
            out = torch.empty(rows, self.config.vocab_size, dtype=self.dtype, device=self.device)
        normed = rmsnorm(hidden.contiguous(), weights.norm, self.config.rms_norm_eps)
        if isinstance(weights.head, Tensor):
            normed = F.pad(normed, (0, 0, 0, rows - count))
            dense_head(normed, weights.head, out[:rows], HEAD_ROWS)
        else:
            self.products.linear(normed, weights.head, out=out[:count])
        return out[:count]

    def head_rows(self, count: int) -> int:
        """Rows that the head computes for ``count``: whole calls where it is dense."""
        return -(-count // HEAD_ROWS) * HEAD_ROWS if isinstance(self.weights.head, Tensor) else count

    def load(self) -> None:
        """Compile and load the products' kernels for any number of rows now, side by side."""
        from labkit.kernels.tensor_core import launch

        held = [self.weights.head]
        for layer in self.weights.layers:
            held += [layer.qkv, layer.out, layer.gate_up, layer.down]
        kinds = {}
        for weight in held:
            if isinstance(weight, TileWeight):
                kinds[launch.weight_defines(weight, self.dtype, False), weight.shape] = weight
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda weight: launch.load(weight, self.dtype), kinds.values()))

    def _layer(
        self,
        layer: LayerWeights,
        index: int,
        x: Tensor,
        kv: PagedKV,
        view: KVView,
        scratch: attention.Scratch,
    ) -> Tensor:
        linear, eps, stored = self.products.linear, self.config.rms_norm_eps, kv.layer(index)
        qkv = linear(rmsnorm(x, layer.input_norm, eps, overlap=True), layer.qkv, bias=layer.qkv_bias)
        q = attention.rope_append(
            qkv,
            stored,
            self.cos,
            self.sin,
            view.positions,
            view.slots,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=eps,
            overlap=True,
        )
        attended = attention.paged_attention(
            q,
            stored,
            view.block_tables,
            view.lengths,
            view.query_starts,
            view.tiles,
            max_context=view.max_context,
            scratch=scratch,
            counts=None if view.padded else view.counts,
        )
        x = linear(attended, layer.out, bias=layer.out_bias, residual=x)
        inner = linear(rmsnorm(x, layer.mlp_norm, eps, overlap=True), layer.gate_up)
        return linear(inner, layer.down, residual=x)
