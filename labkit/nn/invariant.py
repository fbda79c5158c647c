"""A decoder's layers on a CPU with bits that depend on nothing but the row itself.

torch's products give a row other last bits in another batch (one row, two rows, sixteen …). Here every
row-wise operation runs on blocks of one fixed number of rows, the last block padded with zeros, in buffers
that begin on the same alignment; every query attends alone. So a token has the same bits whatever the batch,
the chunk, the policy, the neighbours, the block ids, and after a preemption too. On one machine, with one
number of threads.

T new tokens of all rows, d hidden size, V vocabulary, S tokens that a query attends to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.cache.paged import PagedKV
from labkit.cache.views import KVView
from labkit.errors import refuse, require
from labkit.nn.rope import rotate

DEFAULT_ROWS = 4
"""Rows of a block: a compromise. Fewer cost less for one request alone, more cost less for many and for
prompts."""

_GRAIN = 1 << 15  # elements that torch gives a thread at least (at::internal::GRAIN_SIZE)


class InvariantLayers:
    """The layers of a decoder, row by row the same bits.

    Args:
        decoder: a labkit.models.decoder.Decoder on a CPU.
        rows: of a block, at least 1; part of the meaning: another number gives other bits.

    Attributes:
        config, device, dtype: the decoder's.

    Raises:
        InputError: a decoder on a GPU, or no rows.
    """

    def __init__(self, decoder: Any, *, rows: int = DEFAULT_ROWS) -> None:
        if decoder.device.type != "cpu":
            refuse("device", decoder.device, "cpu: on a GPU labkit.models.step_model is invariant as it is")
        whole = type(rows) is int and rows >= 1
        require(whole, "rows", repr(rows), "a whole number of at least 1")
        self.decoder, self.rows = decoder, rows
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
        """Layers first … last - 1 of a step; as labkit.models.step_model.StepModel.forward."""
        first, last = (0, self.config.num_layers) if layers is None else layers
        x = self._embedded(tokens) if hidden is None else hidden
        places = kv.places(view.slots)
        for layer in self.decoder.layers[first:last]:
            qkv = self._blocks(lambda block, layer=layer: layer.qkv(layer.input_norm(block)), x)
            attended = self._attend(layer, qkv, kv, view, places)
            x = self._blocks(lambda a, b, layer=layer: _rest_of_layer(layer, a, b), x, attended)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, d], the last norm included."""
        return self._blocks(lambda block: self.decoder.head(self.decoder.norm(block)), hidden)

    def _embedded(self, tokens: Tensor) -> Tensor:
        table = self.decoder.embedding
        if isinstance(table, Tensor):
            return F.embedding(tokens, table)
        return self._blocks(lambda ids: table.gather_rows(ids, self.dtype), tokens)

    def _blocks(self, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """``work`` on blocks of rows of the inputs, each in memory of its own; the results again as one."""
        count, rows = inputs[0].shape[0], self.rows
        found = []
        for first in range(0, count, rows):
            stop = min(first + rows, count)
            # Copies: the start of a slice would have another alignment, which products may go by.
            blocks = [one.new_zeros(rows, *one.shape[1:]) for one in inputs]
            for block, one in zip(blocks, inputs, strict=True):
                block[: stop - first] = one[first:stop]
            found.append(work(*blocks)[: stop - first])
        return torch.cat(found) if found else inputs[0]

    def _attend(self, layer: Any, qkv: Tensor, kv: PagedKV, view: KVView, places: Any) -> Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        cos, sin = self.decoder.rotary.tables(0, view.max_context)

        def turned(block: Tensor, at: Tensor) -> Tensor:
            """q and k of a block [rows, heads, D], normed and turned, and v."""
            parts = block.view(block.shape[0], -1, config.head_dim)
            q, k, v = parts.split((heads, kv_heads, kv_heads), 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = layer.q_norm(q), layer.k_norm(k)
            return torch.cat((_elementwise(rotate, torch.cat((q, k), 1), cos[at], sin[at]), v), 1)

        parts = self._blocks(turned, qkv, view.positions.long())
        q, k, v = parts.split((heads, kv_heads, kv_heads), 1)
        kv.put(layer.index, k, v, places)
        out = torch.empty(len(qkv), heads * config.head_dim, dtype=qkv.dtype)
        token = 0
        for row, (count, context) in enumerate(zip(view.counts, view.contexts, strict=True)):
            used = -(-context // kv.block_size)
            blocks = view.block_tables[row, :used].tolist()
            # Whole blocks: so heads lie apart by a multiple of a block in a copy as in the pool.
            keys, values = kv.gather(layer.index, blocks, used * kv.block_size)
            for length in range(context - count + 1, context + 1):
                # [1, Hkv, group, D]: the heads of a group are rows of one small product.
                one = q[token].clone().view(1, kv_heads, config.group, config.head_dim)
                seen = keys[None, :, :length], values[None, :, :length]
                out[token] = F.scaled_dot_product_attention(one, *seen).reshape(-1)
                token += 1
        return out


def _rest_of_layer(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    x = x + layer.out(attended)
    gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, -1)
    return x + layer.down(_elementwise(F.silu, gate).mul_(up))


def _elementwise(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function`` of blocks; row by row where torch would share the block out over threads.

    It cuts a block anywhere, and computes the elements beside a cut by other instructions than those that
    stand in a vector.
    """
    if inputs[0].numel() < _GRAIN:
        return function(*inputs)
    return torch.cat([function(*rows) for rows in zip(*(one.split(1) for one in inputs), strict=True)])
