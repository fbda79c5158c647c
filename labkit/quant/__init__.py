"""Quantised weights: storage formats, quantisers, and files."""

from __future__ import annotations

from labkit.quant.checks import check_shape
from labkit.quant.formats import GroupedWeight, QuantWeight, concat_rows
from labkit.quant.packing import pack_w3, pack_w4, unpack_w3, unpack_w4
from labkit.quant.quantize import quantize
from labkit.quant.sizes import FORMATS, GROUP_SIZES, packed_bytes, padded_k
from labkit.quant.store import Stored, load_quantized, save_quantized
from labkit.quant.tiles import TileWeight, repack, unpack, why_not

__all__ = [
    "FORMATS",
    "GROUP_SIZES",
    "GroupedWeight",
    "QuantWeight",
    "Stored",
    "TileWeight",
    "check_shape",
    "concat_rows",
    "load_quantized",
    "pack_w3",
    "pack_w4",
    "packed_bytes",
    "padded_k",
    "quantize",
    "repack",
    "save_quantized",
    "unpack",
    "unpack_w3",
    "unpack_w4",
    "why_not",
]
