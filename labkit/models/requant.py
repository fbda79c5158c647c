"""Quantise the weights of a loaded model again: the same model in W4, W3, a mix, Q8 or float."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.errors import require
from labkit.models.layer_bits import LayerBits, layer_bits
from labkit.models.model import Model, ModelFile, Weight, role
from labkit.quant.formats import GroupedWeight
from labkit.quant.quantize import quantize


def requantise_weights(
    weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]],
    *,
    bits: str | None = "w4",
    group_size: int | str = 32,
    offset: bool = False,
    per_layer: Mapping[str, str] | None = None,
    progress: Callable[[str], object] | None = None,
) -> dict[str, Weight]:
    """Round every matrix to its format; norms and biases stay.

    Each matrix is dequantised, rounded to nearest and dropped before the next, so the float copy
    in memory is one matrix. Rounding errors add up: the result of a Q4_1 source differs from one
    made of the float original.

    Args:
        weights: canonical name -> weight, or (name, weight) pairs.
        bits: "w4" | "w3" | "mixed" | "q8" | "none" (float32), see :mod:`labkit.models.layer_bits`;
            None leaves everything that no rule of per_layer names as it is.
        group_size: of W4 and W3: 16, 32, 64, 128 or "row". Q8 groups are always 32.
        offset: W4 and W3 get an offset a group (asymmetric rounding).
        per_layer: rules that win over the preset, in order: a short name ("attn", "mlp", "head",
            "embed") or a pattern on weight names ("model.layers.0.*", "*.down_proj") -> format.
            ``{"mlp": "w3", "attn": "w4"}`` is a mix.
        progress: called with each matrix name when done.

    Raises:
        InputError: unknown bits or format, a pattern that matches nothing, a bad group size.
    """
    require(isinstance(offset, bool), "offset", repr(offset), "true or false")
    pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
    matrices = [name for name, _ in pairs if role(name) not in ("norm", "bias")]
    formats = layer_bits(bits, per_layer).plan(matrices)
    if bits is None:
        own = LayerBits(tuple((pattern, "w4") for pattern in per_layer or {}))
        formats = {name: form for name, form in formats.items() if own.format_of(name) == "w4"}
    result: dict[str, Weight] = {}
    for name, weight in pairs:
        if name not in formats:
            result[name] = weight
            continue
        result[name] = _converted(weight, formats[name], group_size, offset)
        if progress is not None:
            progress(name)
    return result


def requantise(
    model: Model | ModelFile,
    *,
    bits: str | None = "w4",
    group_size: int | str = 32,
    offset: bool = False,
    per_layer: Mapping[str, str] | None = None,
    progress: Callable[[str], object] | None = None,
) -> Model:
    """A new model with the weights of ``model`` rounded again; the old one is left as it is.

    Takes and raises what :func:`requantise_weights` does. ``info`` gains "requantised".
    """
    source: Any = model.weights if isinstance(model, ModelFile) else model.decoder.named_weights()
    weights = requantise_weights(
        source, bits=bits, group_size=group_size, offset=offset, per_layer=per_layer, progress=progress
    )
    settings = {
        "bits": bits,
        "group_size": group_size,
        "offset": offset,
        "per_layer": dict(per_layer or {}),
    }
    file = ModelFile(model.config, weights, model.tokenizer, {**model.info, "requantised": settings})
    if isinstance(model, ModelFile):
        return Model.build(file)
    return Model.build(file, device=model.decoder.device, dtype=model.decoder.dtype)


def _converted(weight: Weight, form: str, group_size: int | str, offset: bool) -> Weight:
    if form == "q8" and isinstance(weight, GroupedWeight) and weight.format == "q8_0":
        return weight  # already what is asked for, without another rounding
    values = weight.float() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    if form == "none":
        return values
    if form == "q8":
        return quantize(values, "q8_0", 32)
    return quantize(values, form, group_size, offset=offset)
