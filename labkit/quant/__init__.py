"""Quantised weights: storage formats, quantisers, and files."""

from __future__ import annotations

from labkit.quant.checks import check_shape
from labkit.quant.formats import GroupedWeight, QuantWeight, concat_rows
from labkit.quant.packing import pack_w3, pack_w4, unpack_w3, unpack_w4
from labkit.quant.quantize import quantize
from labkit.quant.sizes import FORMATS, GROUP_SIZES, packed_bytes, padded_k
from labkit.quant.store import Stored, load_quantized, save_quantized

__all__ = [
    "FORMATS",
    "GROUP_SIZES",
    "GroupedWeight",
    "QuantWeight",
    "Stored",
    "check_shape",
    "concat_rows",
    "load_quantized",
    "pack_w3",
    "pack_w4",
    "packed_bytes",
    "padded_k",
    "quantize",
    "save_quantized",
    "unpack_w3",
    "unpack_w4",
]
