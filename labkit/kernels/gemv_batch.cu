// GEMV of up to BATCH_TILE rows of x that share one read of the weight: a warp for each column of the output.
// gemv_batch_w4 is the seed kernel of M = 2 .. 8; gemv_batch_w3 is its article's experiment that came out
// slower than reading the weight once a row (gemv_row.cu), kept to be examined, and off by default.
//
//   x        half [M, K]           activations, row-major
//   packed   uint8 [N, Kp/2]       W4 codes (gemv_batch_w4): low nibble = even column, high nibble = odd
//            uint8 [N, 3 * Kp/8]   W3 codes (gemv_batch_w3): 8 columns in 3 bytes, lowest column lowest
//   scales   half [N, groups]      one for each group of columns of a row
//   offset   offset_t [N, groups]  see unpack.cuh; null without OFFSET
//   out      half [M, N]           every cell is written once
//
// grid (ceil(N / 8), ceil(M / BATCH_TILE)), block 256 = 8 warps; no shared memory.
// A lane decodes 8 columns of the weight once and uses them for every row; loads of the weight and the order
// of every row's sum are those of gemv_row.cu, so a row's bits do not depend on the batch.
//
//   BATCH_TILE   rows of x a block can hold: that many sums a thread
//   ROLLED       1, for the experiment only: the loop over the rows has the run-time bound and is not
//                unrolled. No register can be indexed at run time, so every step selects its sum out of
//                all of them, and the loads of one row wait for the sums of the row before.
//
//   MIN_BLOCKS   blocks an SM must be able to hold; 4 are a limit of 64 registers a thread, and with it no
//                build spills (left alone, the compiler saves registers in some and spills 8 bytes)
//
// Invariants: as in gemv_row.cu.
// registers: 64
#include <cuda_fp16.h>
#include "types.cuh"
#include "unpack.cuh"

#ifndef BATCH_TILE
#define BATCH_TILE 8
#endif
#ifndef ROLLED
#define ROLLED 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 4
#endif

#define WARPS 8

// One step of every row: eight columns from k on, decoded already; those from ``bound`` on are padding.
__device__ __forceinline__ void add_to_rows(float sums[BATCH_TILE], const float codes[8], const half* x_first,
                                            int rows, int k, int K, int bound, float scale, float shift)
{
#if ROLLED
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
        float activations[8];
        load_x8(activations, x_first + (size_t)i * K, k, bound);
        sums[i] = add_eight(sums[i], codes, activations, scale, shift);
    }
#else
#pragma unroll
    for (int i = 0; i < BATCH_TILE; ++i) {
        if (i < rows) {
            float activations[8];
            load_x8(activations, x_first + (size_t)i * K, k, bound);
            sums[i] = add_eight(sums[i], codes, activations, scale, shift);
        }
    }
#endif
}

__device__ __forceinline__ void store_rows(const float sums[BATCH_TILE], half* out_first, int rows, int N, int lane)
{
#pragma unroll
    for (int i = 0; i < BATCH_TILE; ++i) {
        const float sum = warp_sum(sums[i]);
        if (lane == 0 && i < rows) {
            out_first[(size_t)i * N] = __float2half(sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) gemv_batch_w4(
    const half* __restrict__ x, const uint8_t* __restrict__ packed, const half* __restrict__ scales,
    const offset_t* __restrict__ offset, half* __restrict__ out, int M, int N, int K, int Kp, int group_shift)
{
    LABKIT_ASSERT(blockDim.x == 32 * WARPS && group_shift >= 3 && Kp % 8 == 0 && K <= Kp);
    const int lane = threadIdx.x & 31;
    const int n = blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (n >= N) {
        return;  // whole warps leave, so no shuffle misses a lane
    }
    const int first_m = blockIdx.y * BATCH_TILE;
    const int rows = min(BATCH_TILE, M - first_m);
    const half* x_first = x + (size_t)first_m * K;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(packed + (size_t)n * (Kp / 2));
    const size_t first_group = (size_t)n * groups_of_row(Kp, group_shift);

    float sums[BATCH_TILE] = {};
    // Eight columns from ``first`` on; those from ``bound`` on are padding.
    auto add_columns = [&](int first, int bound) {
        const uint32_t word = words[first / 8];
        const size_t group = first_group + (first >> group_shift);
        const float scale = __half2float(scales[group]);
        const float shift = load_offset(offset, group);
        float codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            codes[i] = (float)code_w4(word, i);
        }
        add_to_rows(sums, codes, x_first, rows, first, K, bound, scale, shift);
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
    store_rows(sums, out + (size_t)first_m * N + n, rows, N, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) gemv_batch_w3(
    const half* __restrict__ x, const uint8_t* __restrict__ packed, const half* __restrict__ scales,
    const offset_t* __restrict__ offset, half* __restrict__ out, int M, int N, int K, int Kp, int group_shift)
{
    LABKIT_ASSERT(blockDim.x == 32 * WARPS && group_shift >= 3 && Kp % 8 == 0 && K <= Kp);
    const int lane = threadIdx.x & 31;
    const int n = blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (n >= N) {
        return;  // whole warps leave, so no shuffle misses a lane
    }
    const int first_m = blockIdx.y * BATCH_TILE;
    const int rows = min(BATCH_TILE, M - first_m);
    const half* x_first = x + (size_t)first_m * K;
    const uint8_t* triples = packed + (size_t)n * (Kp / 8 * 3);
    const size_t first_group = (size_t)n * groups_of_row(Kp, group_shift);

    float sums[BATCH_TILE] = {};
    // Eight columns from ``first`` on; those from ``bound`` on are padding.
    auto add_columns = [&](int first, int bound) {
        const uint32_t triple = load_triple(triples + first / 8 * 3);
        const size_t group = first_group + (first >> group_shift);
        const float scale = __half2float(scales[group]);
        const float shift = load_offset(offset, group);
        float codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            codes[i] = (float)code_w3(triple, i);
        }
        add_to_rows(sums, codes, x_first, rows, first, K, bound, scale, shift);
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
    store_rows(sums, out + (size_t)first_m * N + n, rows, N, lane);
}
