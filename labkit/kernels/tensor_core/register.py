"""The tensor-core family under its name in the dispatch table. Importing this loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.kernels.registry import Request, Unavailable, find, loading, register
from labkit.kernels.tensor_core.launch import linear, load
from labkit.quant import tiles
from labkit.quant.sizes import PACKED_FORMATS
from labkit.quant.tiles import TileWeight

NAME = "tensor_core"
LEAST_CAPABILITY = (8, 0)
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Prepared:
    """What ``run`` reads: the tiles, and how much dense weight a call with many rows may hold."""

    weight: TileWeight
    temp_bytes: int


def register_kernel() -> None:
    """Add ``tensor_core``; a second call changes nothing."""
    if find(NAME) is None:
        register(NAME, run, available=available, prepare=prepare)


def available(request: Request) -> str:
    """Why the family cannot serve a request, or an empty string; loads no kernel."""
    if request.format not in PACKED_FORMATS:
        return "W4 and W3 weights only"
    if request.dtype not in DTYPES:
        return "float16 and bfloat16 activations only"
    if why := tiles.why_not(request.weight):
        return why
    if request.device == "cpu":
        return ""
    if request.capability is None or request.capability < LEAST_CAPABILITY:
        return "needs compute capability 8.0 or newer"
    from labkit.kernels import gpu

    return gpu.why_not()


def prepare(request: Request) -> Prepared:
    """Repack the weight and load the kernels, before a CUDA graph could be captured.

    Raises:
        Unavailable: no compiler, no CuPy, or no room for the tiles beside the weight; the reason.
    """
    weight = request.weight
    needed = tiles.tile_bytes(weight)
    if not request.budget.take(needed):
        raise Unavailable(f"its tiles take {needed >> 20} MiB more, and the budget has no room")
    try:
        packed = tiles.repack(weight)
        with loading(weight.device):
            load(packed, getattr(torch, request.dtype))
    except BaseException:
        request.budget.give(needed)
        raise
    request.budget.give_when_gone(packed.tiles, needed)
    return Prepared(packed, request.temp_bytes)


def run(x: Tensor, prepared: Prepared) -> Tensor:
    """y [M, N] of x's dtype."""
    return linear(x, prepared.weight, temp_bytes=prepared.temp_bytes)
