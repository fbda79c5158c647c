"""A decoder's weights as steps on the tensor-core family read them: repacked, joined, dense where looked up.

d hidden size, F inner size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.errors import InputError, refuse, require
from labkit.quant.formats import QuantWeight, concat_rows
from labkit.quant.grouped import GroupedWeight

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
        embedding: [V, d]: a tensor in the activation dtype, or quantised.
        layers: one for each layer.
        norm: the last norm [d].
        head: a tensor [V, d] for a dense product, or a weight for :attr:`Products.linear`.
    """

    embedding: Tensor | QuantWeight | GroupedWeight
    layers: Sequence[LayerWeights]
    norm: Tensor
    head: Any

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.norm.device

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the embedding."""
        held = self.embedding
        return held[0].nbytes if isinstance(held, Tensor) else held.nbytes // held.n

    def embed(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows [T, d] for int64 ids [T], which only the device knows: they are not checked."""
        if isinstance(self.embedding, Tensor):
            if out is None:
                return torch.index_select(self.embedding, 0, ids)
            return torch.index_select(self.embedding, 0, ids, out=out)
        rows = self.embedding.gather_unchecked(ids, self.dtype).contiguous()
        return rows if out is None else out.copy_(rows)


class Released(nn.Module):
    """Stands where a module was whose packed weights live on as tiles alone."""

    def forward(self, *args: Any) -> Tensor:
        """Refuses."""
        refuse("decoder", "weights that were released", "a decoder that holds them", "load the model again")


def step_weights(decoder: Any, *, products: Products | None = None, release: bool = False) -> StepWeights:
    """A decoder's weights as a step reads them.

    The packed matrices are repacked, a second copy; a quantised embedding becomes a dense table, which is
    faster to read.

    Args:
        decoder: a labkit.models.decoder.Decoder with W4 or W3 matrices.
        products: whose ``repack`` to use.
        release: drop every layer of the decoder as soon as it is repacked, so that no more than one is held
            twice, and leave a quantised embedding as it is where the head does not multiply by its table; the
            decoder cannot compute any more.

    Raises:
        InputError: a matrix in another format, or q, k, v (gate, up) that cannot be joined; its name. With
            ``release`` too nothing is dropped then, unless a repacking itself failed.
    """
    products = products or Products.tensor_core()
    dtype = decoder.dtype
    for layer in decoder.layers if release else ():
        check_layer(layer)
    table = decoder.embedding
    head = decoder.head_linear.weight
    by_table = decoder.config.tie_word_embeddings and isinstance(head, GroupedWeight)
    if not isinstance(table, Tensor) and (by_table or not release):
        table = dense_table(table, dtype)
    if isinstance(head, QuantWeight):
        head = products.repack(head)
    elif isinstance(head, GroupedWeight):
        head = table if by_table else dense_table(head, dtype)
    layers = []
    if release:
        decoder.embedding, decoder.head_linear = table, Released()
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


def _plain(weight: Any) -> Any:
    return weight.detach() if isinstance(weight, Tensor) else weight
