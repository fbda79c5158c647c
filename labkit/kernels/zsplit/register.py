"""The z-split kernels under their names in the dispatch table. Importing this loads nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from labkit.kernels import runner
from labkit.kernels.registry import Request, Unavailable, find, loading, register
from labkit.kernels.zsplit.launch import aligned, source, zsplit_gemm, zsplit_gemm_int8
from labkit.quant.grouped import GroupedWeight
from labkit.quant.sizes import GROUPED_FORMATS

LEAST_CAPABILITY = (8, 0)

ENTRIES = {
    "zsplit": ("zsplit_gemm", "zsplit_reduce"),
    "zsplit_int8": ("zsplit_quantize", "zsplit_gemm_int8", "zsplit_reduce"),
}
"""Dispatch name to the kernels that a call may launch."""

_RUN: dict[str, Callable[[Tensor, GroupedWeight], Tensor]] = {
    "zsplit": zsplit_gemm,
    "zsplit_int8": zsplit_gemm_int8,
}


def register_kernels() -> None:
    """Add ``zsplit`` and ``zsplit_int8``; a second call changes nothing."""
    for name, run in _RUN.items():
        if find(name) is None:
            register(name, run, available=available, prepare=functools.partial(prepare, name))


def available(request: Request) -> str:
    """Why a z-split kernel cannot serve a request, or an empty string; loads no kernel."""
    if request.format not in GROUPED_FORMATS:
        return "Q8_0 and Q4_0 weights only"
    if request.device == "cpu":
        return ""
    if request.capability is None or request.capability < LEAST_CAPABILITY:
        return "needs compute capability 8.0 or newer"
    from labkit.kernels import gpu

    return gpu.why_not()


def prepare(name: str, request: Request) -> GroupedWeight:
    """Compile and load the kernels, before a CUDA graph could be captured; align the weight.

    Raises:
        Unavailable: no compiler, no CuPy, or no room for an aligned copy; the reason.
    """
    weight: GroupedWeight = request.weight
    ready = aligned(weight)
    if ready is not weight:
        if not request.budget.take(ready.nbytes):
            raise Unavailable("its codes start at an odd address, and the budget has no room for a copy")
        request.budget.give_when_gone(ready, ready.nbytes)
    with loading(weight.device):
        for entry in ENTRIES[name]:
            runner.load(source(entry, getattr(torch, request.dtype)), weight.device)
    return ready
