"""RMSNorm of the rows of a matrix, as one kernel: torch tensors in, torch tensors out."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from labkit.errors import require
from labkit.kernels.launch import Launch
from labkit.kernels.source import KernelSource
from labkit.quant.packing import describe

FILE = "rmsnorm.cu"
THREADS = 256
ACTIVATIONS = {torch.float16: 1, torch.bfloat16: 2}
"""The define ACTIVATION of rmsnorm.cu, paged_attention.cu and greedy.cu."""


@functools.lru_cache(maxsize=16)
def source(dtype: torch.dtype, vector: bool) -> KernelSource:
    """The kernel for one dtype; ``vector`` for rows that start on 16 bytes."""
    return KernelSource(FILE, "rmsnorm", {"ACTIVATION": ACTIVATIONS[dtype], "VECTOR": int(vector)})


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, overlap: bool = False
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` for every row, in float32, rounded once.

    Args:
        x: float16 or bfloat16 [M, d], contiguous.
        weight: [d] of the same dtype and device.
        eps: added to the mean square.
        out: where to write [M, d], may be x; a new tensor by default.
        overlap: start before the kernels ahead have finished, none of which writes ``weight``.

    Returns:
        [M, d]; a row's bits do not depend on the others.

    Raises:
        InputError: a wrong shape, dtype or device, by name.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    made = launch(x, weight, eps, out, overlap)
    if x.shape[0]:
        made.run()
    return out


def launch(x: Tensor, weight: Tensor, eps: float, out: Tensor, overlap: bool = False) -> Launch:
    """The launch of :func:`rmsnorm`."""
    good = isinstance(x, Tensor) and x.ndim == 2 and x.dtype in ACTIVATIONS and x.shape[1] >= 1
    require(good and x.is_contiguous(), "x", describe(x), "contiguous float16 or bfloat16 [M, d]")
    m, d = x.shape
    for name, tensor, shape in (("weight", weight, (d,)), ("out", out, (m, d))):
        right = tuple(tensor.shape) == shape and tensor.dtype == x.dtype and tensor.device == x.device
        expected = f"contiguous {str(x.dtype).removeprefix('torch.')} {list(shape)} on {x.device}"
        require(right and tensor.is_contiguous(), name, f"{describe(tensor)} on {tensor.device}", expected)
    vector = d % 8 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight, out))
    args = [x, weight, out, d, float(eps)]
    return Launch(source(x.dtype, vector), (max(m, 1),), (THREADS,), args, x.device, overlap)
