"""The tall-tile kernel of attention over paged keys and values: paged_prefill.cu, for chunks of a prompt.

Same order of every sum as paged_attention.cu, so the same bits; a matter of speed alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from labkit.kernels.paged_plan import TURN, multiprocessors_of
from labkit.kernels.paged_plan import WARPS as TILES  # of a turn
from labkit.kernels.rmsnorm import ACTIVATIONS
from labkit.kernels.source import KernelSource

FILE = "paged_prefill.cu"

WARPS = 4
"""Of a block; each has 16 pairs of a query and a head."""

ENOUGH_BLOCKS = 1.5
"""Blocks a multiprocessor, resident and to do, from which tall tiles are taken.

Timed on an H200 (results/evidence/paged_attention.md): with one a multiprocessor they are 1.1 to 1.3 times
slower than the other kernel, a block's four warps waiting for their own results; with two, both resident,
1.4 to 1.5 times faster.
"""

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


def tall_from(
    counts: Sequence[int], kv_heads: int, head_dim: int, group: int, device: torch.device, *, int8: bool
) -> int:
    """New tokens from which a step's rows are to be taken in tall tiles; 0: none of them.

    Args:
        counts: new tokens of each row, or of all rows together where no more is known.
        kv_heads, head_dim, group, int8: of the cache and its queries.
        device: where; on a CPU, whose emulator has no speed to gain, none.
    """
    if device.type != "cuda":
        return 0
    multiprocessors, shared = _facts(device)
    step = queries(group)
    blocks = kv_heads * sum(-(-count // step) for count in counts if count >= step)
    # A block has some bytes of its own beside what it asks for.
    resident = shared // (shared_bytes(head_dim, int8=int8) + 1024)
    return step if min(resident, blocks / multiprocessors) >= ENOUGH_BLOCKS else 0


@functools.lru_cache(maxsize=64)
def _facts(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory of each."""
    properties = torch.cuda.get_device_properties(device)
    # Where torch does not say, no two blocks are known to fit.
    return multiprocessors_of(device), getattr(properties, "shared_memory_per_multiprocessor", 0)


def shared_bytes(head_dim: int, *, int8: bool = False) -> int:
    """Dynamic shared memory of a block: the ring, running totals, factors, places (SHARED of the kernel)."""
    chunks, size = -(-head_dim // 32), 1 if int8 else 2
    key = 32 * (32 * chunks + (0 if chunks % 2 else 32)) * size + (256 if int8 else 0)
    value = TURN * (48 if int8 else 40) * size
    factors = 3 * TILES * 16 * 4
    query, running = 2 * chunks * 32 * 16, 4 * 16 * 32 * chunks
    return SLOTS * max(key, value) + WARPS * (running + query + factors) + 8 * TURN
