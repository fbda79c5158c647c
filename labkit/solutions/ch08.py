"""Reference solutions of chapter 08."""

from __future__ import annotations


# Lane = 4 g + q: g is a row, q two neighbouring k. Bit 0 of the register's number adds 8 rows, bit 1 8 k.
def fragment_map(lane, register, position):
    """(row, k) of the element."""
    g, q = lane // 4, lane % 4
    return g + 8 * (register & 1), 2 * q + position + 8 * (register >> 1)


halves_from_bits = r"""// Eight W4 codes of a word (u = code + 8) to four pairs of halves: the codes.
#include "ptx.cuh"

extern "C" __global__ void halves(const uint32_t* words, half* out, int count)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const uint32_t word = words[i];
    half2* pairs = reinterpret_cast<half2*>(out) + 4 * i;  // pairs[p] = nibbles p and p + 4, each minus 8
    for (int p = 0; p < 4; p += 2) {
        const uint32_t w = word >> 4 * p;
        const uint32_t low = (w & 0x000f000f) | 0x64006400;   // 1024 + u
        const uint32_t high = (w & 0x00f000f0) | 0x64006400;  // 1024 + 16 u, with no shift
        half2 first, second;
        memcpy(&first, &low, 4);
        memcpy(&second, &high, 4);
        pairs[p] = __hadd2(first, __float2half2_rn(-1032.0f));
        pairs[p + 1] = __hfma2(second, __float2half2_rn(0.0625f), __float2half2_rn(-72.0f));  // 64 + u - 72
    }
}
"""


# Five fields of three bits fill 15 bits of a half-word. The bits that three words have left are one more.
def w3_field(words, pair, position):
    """The field as a number, 0 to 7."""
    if pair < 15:
        return words[pair // 5] >> (3 * (pair % 5) + 16 * position) & 7
    return sum((word >> (15 + 16 * position) & 1) << b for b, word in enumerate(words))


# Three groups are under way when a step begins; its own is the oldest, so two may stay. The barrier has two
# jobs: the other threads' copies are there, and nobody reads the stage that the next copy writes.
wait_and_meet = r"""// y = W x, a row a thread; tiles of 128 x 32 come through a ring of four stages.
#include "ptx.cuh"
#define STAGES 4

extern "C" __global__ void gemv_ring(const half* w, const half* x, half* out, int K)
{
    __shared__ __align__(16) half tile[STAGES][128][32 + 8];
    const int row = threadIdx.x, steps = K / 32;
    auto copy = [&](int step) {  // neighbouring threads copy neighbouring pieces: not their own row
        for (int piece = threadIdx.x; piece < 512; piece += 128) {
            const int r = piece / 4, k = 8 * (piece % 4);
            cp_async_16(&tile[step % STAGES][r][k], &w[r * K + 32 * step + k]);
        }
    };
    for (int step = 0; step < STAGES - 1; ++step) {
        copy(step);
        cp_async_commit();
    }
    float sum = 0.0f;
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();  // my pieces of this tile are here
        __syncthreads();              // everybody's are; and the stage before this one is free
        if (step + STAGES - 1 < steps) copy(step + STAGES - 1);
        cp_async_commit();
        for (int k = 0; k < 32; ++k) {
            sum += __half2float(tile[step % STAGES][row][k]) * __half2float(x[32 * step + k]);
        }
    }
    out[row] = __float2half(sum);
}
"""
