// GEMV of one row of x: out[m, :] = x[m, :] * W^T, a warp for each output. The seed kernels of M = 1, and
// for W3 of M = 2 .. 8 as well: every row of x is a row of blocks (grid.y) and reads the weight again.
//
//   x        half [M, K]           activations, row-major
//   packed   uint8 [N, Kp/2]       W4 codes (gemv_row_w4): low nibble = even column, high nibble = odd
//            uint8 [N, 3 * Kp/8]   W3 codes (gemv_row_w3): 8 columns in 3 bytes, lowest column lowest
//   scales   half [N, groups]      one for each group of columns of a row
//   offset   offset_t [N, groups]  see unpack.cuh; null without OFFSET
//   out      half [M, N]           every cell is written once
//
// grid (ceil(N / 8), M), block 256 = 8 warps; no shared memory.
// A lane takes 8 columns at a time: one word of W4, three bytes of W3; a warp 256 neighbouring columns,
// so 128 (96) contiguous bytes of weight. Sums are float; lanes are added in one fixed order.
//
// Invariants: group a multiple of 8 columns; Kp % 8 == 0; K <= Kp; packed starts at a multiple of 4 bytes;
// nothing of x is read beyond column K. VECTOR_X as in unpack.cuh.
// registers: 40
#include <cuda_fp16.h>
#include "types.cuh"
#include "unpack.cuh"

#define WARPS 8

extern "C" __global__ void __launch_bounds__(32 * WARPS) gemv_row_w4(
    const half* __restrict__ x, const uint8_t* __restrict__ packed, const half* __restrict__ scales,
    const offset_t* __restrict__ offset, half* __restrict__ out, int M, int N, int K, int Kp, int group_shift)
{
    LABKIT_ASSERT(blockDim.x == 32 * WARPS && gridDim.y == M && group_shift >= 3 && Kp % 8 == 0 && K <= Kp);
    const int lane = threadIdx.x & 31;
    const int n = blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (n >= N) {
        return;  // whole warps leave, so no shuffle misses a lane
    }
    const half* x_row = x + (size_t)blockIdx.y * K;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(packed + (size_t)n * (Kp / 2));
    const size_t first_group = (size_t)n * groups_of_row(Kp, group_shift);

    float sum = 0.0f;
    // Eight columns from ``first`` on; those from ``bound`` on are padding.
    auto add_columns = [&](int first, int bound) {
        const uint32_t word = words[first / 8];
        const size_t group = first_group + (first >> group_shift);
        const float scale = __half2float(scales[group]);
        const float shift = load_offset(offset, group);
        float activations[8];
        float codes[8];
        load_x8(activations, x_row, first, bound);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            codes[i] = (float)code_w4(word, i);
        }
        sum = add_eight(sum, codes, activations, scale, shift);
    };
    // Steps of the whole warp first: lanes that left one loop at different trips would load apart.
    int k = 8 * lane;
    for (int steps = K / (8 * 32); steps > 0; --steps) {
        add_columns(k, k + 8);
        k += 8 * 32;
    }
    if (k < K) {
        add_columns(k, K);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        out[(size_t)blockIdx.y * N + n] = __float2half(sum);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) gemv_row_w3(
    const half* __restrict__ x, const uint8_t* __restrict__ packed, const half* __restrict__ scales,
    const offset_t* __restrict__ offset, half* __restrict__ out, int M, int N, int K, int Kp, int group_shift)
{
    LABKIT_ASSERT(blockDim.x == 32 * WARPS && gridDim.y == M && group_shift >= 3 && Kp % 8 == 0 && K <= Kp);
    const int lane = threadIdx.x & 31;
    const int n = blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (n >= N) {
        return;  // whole warps leave, so no shuffle misses a lane
    }
    const half* x_row = x + (size_t)blockIdx.y * K;
    const uint8_t* triples = packed + (size_t)n * (Kp / 8 * 3);
    const size_t first_group = (size_t)n * groups_of_row(Kp, group_shift);

    float sum = 0.0f;
    // Eight columns from ``first`` on; those from ``bound`` on are padding.
    auto add_columns = [&](int first, int bound) {
        const uint32_t triple = load_triple(triples + first / 8 * 3);
        const size_t group = first_group + (first >> group_shift);
        const float scale = __half2float(scales[group]);
        const float shift = load_offset(offset, group);
        float activations[8];
        float codes[8];
        load_x8(activations, x_row, first, bound);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            codes[i] = (float)code_w3(triple, i);
        }
        sum = add_eight(sum, codes, activations, scale, shift);
    };
    // Steps of the whole warp first: lanes that left one loop at different trips would load apart.
    int k = 8 * lane;
    for (int steps = K / (8 * 32); steps > 0; --steps) {
        add_columns(k, k + 8);
        k += 8 * 32;
    }
    if (k < K) {
        add_columns(k, K);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        out[(size_t)blockIdx.y * N + n] = __float2half(sum);
    }
}
