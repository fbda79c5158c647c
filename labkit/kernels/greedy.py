"""The greedy end of a decode step on the device: next token, length, history; see greedy.cu."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import require
from labkit.kernels.launch import Launch
from labkit.kernels.rmsnorm import ACTIVATIONS
from labkit.kernels.source import KernelSource
from labkit.quant.packing import describe

FILE = "greedy.cu"
THREADS = 256
_PARTS = 64
_LEAST_A_THREAD = 4  # logits; fewer are not worth a block


@functools.lru_cache(maxsize=4)
def source(dtype: torch.dtype) -> KernelSource:
    """The kernel for one dtype of the logits."""
    return KernelSource(FILE, "greedy", {"ACTIVATION": ACTIVATIONS[dtype]})


@dataclass(frozen=True)
class GreedyState:
    """What a step reads and moves on; all on one device.

    Attributes:
        tokens: int64 [B], the next input of every row.
        lengths: int32 [B], cached positions; negative for a row that takes no part.
        history: int32 [B, capacity]: history[b, p] is the token that followed position p.
        status: int32 [B], 1 once a row's logits were NaN or infinite.
        part, tickets: the kernel's own.
    """

    tokens: Tensor
    lengths: Tensor
    history: Tensor
    status: Tensor
    part: Tensor
    tickets: Tensor

    @classmethod
    def new(cls, batch: int, capacity: int, device: torch.device | str) -> GreedyState:
        """Zeros: token 0 at position 0 in every row."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            zeros(batch, dtype=torch.int64),
            zeros(batch),
            zeros(batch, capacity),
            zeros(batch),
            zeros(batch, _PARTS, dtype=torch.int64),
            zeros(batch),
        )


def greedy(logits: Tensor, state: GreedyState, *, overlap: bool = False) -> None:
    """Write the most likely token of every row (the lowest id among equals) and move the rows on.

    Args:
        logits: float16 or bfloat16 [B, V]; rows may be further apart than V.
        state: changed in place.
        overlap: start before the kernels ahead have finished.

    Raises:
        InputError: a wrong shape or dtype.
    """
    launch(logits, state, overlap).run()


def launch(logits: Tensor, state: GreedyState, overlap: bool = False) -> Launch:
    """The launch of :func:`greedy`."""
    batch, capacity = state.history.shape
    good = logits.ndim == 2 and logits.shape[0] == batch and logits.dtype in ACTIVATIONS
    good = good and logits.shape[1] >= 1 and logits.stride(1) == 1
    require(good, "logits", describe(logits), f"float16 or bfloat16 [{batch}, V], its rows without gaps")
    vocabulary, stride = logits.shape[1], logits.stride(0)
    parts = max(1, min(_PARTS, vocabulary // (THREADS * _LEAST_A_THREAD)))
    flat = logits.as_strided(((batch - 1) * stride + vocabulary,), (1,))
    part = state.part.view(-1)
    args: list[Any] = [flat, state.tokens, state.lengths, state.history, state.status, part, state.tickets]
    args += [vocabulary, stride, capacity]
    return Launch(source(logits.dtype), (parts, batch), (THREADS,), args, logits.device, overlap)
