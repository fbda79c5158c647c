"""The tall-tile kernel of attention over paged keys and values: paged_prefill.cu, for chunks of a prompt.

Same order of every sum as paged_attention.cu, so the same bits; a matter of speed alone.
"""

from __future__ import annotations

import functools

import torch

from labkit.kernels.paged_plan import TURN, warps
from labkit.kernels.rmsnorm import ACTIVATIONS
from labkit.kernels.source import KernelSource

FILE = "paged_prefill.cu"

WARPS = 4
"""Of a block; each has 16 pairs of a query and a head."""

TALL_FROM = 0
"""New tokens of a row from which a decoder takes it in tall tiles; 0: never, for nothing was timed yet."""

SLOTS = 4
"""Units of keys or values in a block's ring."""


@functools.lru_cache(maxsize=256)
def source(
    dtype: torch.dtype, head_dim: int, group: int, block_size: int, *, int8: bool = False
) -> KernelSource:
    """The kernel for one set of constants."""
    defines = {"ACTIVATION": ACTIVATIONS[dtype], "HEAD_DIM": head_dim, "GROUP": group}
    defines |= {"BLOCK_SIZE": block_size, "KV_INT8": int(int8), "BLOCK_WARPS": WARPS, "SLOTS": SLOTS}
    return KernelSource(FILE, "paged_prefill", defines)


def queries(group: int) -> int:
    """Queries of one row that a block takes together."""
    return 16 * WARPS // group


def shared_bytes(head_dim: int, *, int8: bool = False) -> int:
    """Dynamic shared memory of a block: the ring, running totals, factors, places (SHARED of the kernel)."""
    chunks, size = -(-head_dim // 32), 1 if int8 else 2
    key = 32 * (32 * chunks + (0 if chunks % 2 else 32)) * size + (256 if int8 else 0)
    value = TURN * (48 if int8 else 40) * size
    factors = (4 if int8 else 3) * warps(int8) * 16 * 4
    query, running = 2 * chunks * 32 * 16, 4 * 16 * 32 * chunks
    return SLOTS * max(key, value) + WARPS * (running + query + factors) + 8 * TURN
