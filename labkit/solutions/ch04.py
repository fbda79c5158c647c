"""Reference solutions of chapter 04."""

from __future__ import annotations

import itertools

import numpy as np


# The first `rest` slices have one group more; every slice behind starts that much later.
def slice_bounds(z, ngroups, nsplit):
    """(first, end) of slice z: ngroups // nsplit groups, one more in the first ngroups % nsplit."""
    base, rest = divmod(ngroups, nsplit)
    first = z * base + min(z, rest)
    return first, first + base + (z < rest)


# A thread an output: neighbouring lanes read neighbouring floats of one plane, and the loop is the order.
ordered_reduce = r"""#include "types.cuh"
extern "C" __global__ void reduce_parts(const float* part, float* out, int total, int nsplit)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) {
        return;  // the last block is not full
    }
    float sum = part[i];
    for (int z = 1; z < nsplit; ++z) {
        sum = __fadd_rn(sum, part[static_cast<size_t>(z) * total + i]);  // ascending: one order, one result
    }
    out[i] = sum;
}
"""


def distinct_sums(parts):
    """Bit patterns of the float32 sum over all orders."""
    results = set()
    for order in itertools.permutations(parts):
        total = np.float32(0)
        for value in order:
            total = np.float32(total + value)
        results.add(total.tobytes())
    return len(results)


def seed_slices(blocks, ngroups, plane_bytes):
    """As many as 512 blocks need, at most one a group, at most 64 MiB of planes."""
    if blocks >= 512:
        return 1
    wanted = min(-(-512 // blocks), ngroups)
    return max(1, min(wanted, (64 << 20) // plane_bytes))


# M appears nowhere: 1024 columns a block at M = 1. The cap cannot decide there: see seed_slices.
def slices_for(n, k):
    """Slices of K for a weight [N, K]."""
    blocks = -(-n // 1024)
    groups = -(-k // 32)
    return min(-(-512 // blocks), groups)
