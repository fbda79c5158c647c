// Tiled GEMM over W3 weights: out = x * W^T. The seed kernel of M > 8, kept as its article describes it.
//
//   x        half [M, K]           activations, row-major
//   packed   uint8 [N, 3 * Kp/8]   W3 codes: 8 columns in 3 bytes, lowest column in the lowest bits
//   scales   half [N, groups]      one for each group of columns of a row
//   offset   offset_t [N, groups]  see unpack.cuh; null without OFFSET
//   out      half [M, N]           every cell is written once
//
// grid (ceil(N / 64), ceil(M / 32)), block 256; shared memory (static) 2,048 + 64 * (64 + PAD) bytes.
// As gemm_tiled_w4.cu, but for the unpacking: here a warp takes eight rows of the weight at once, four
// lanes a row (lane >> 2 is the row, lane & 3 the group of eight columns), so no lane is idle although
// 32 columns are only 12 bytes.
//
// Invariants: a group holds a multiple of 8 columns; K <= Kp, Kp % 8 == 0; nothing is read of a column
// from K on, and the weight counts as zero there.
// At least 6 blocks an SM are asked for, which is a limit of 42 registers: 48 of 48 warps on sm_86.
// registers: 40
#include <cuda_fp16.h>
#include "types.cuh"
#include "unpack.cuh"

#ifndef PAD
#define PAD 1
#endif

#define TILE_M 32
#define TILE_N 64
#define TILE_K 32
#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS, 6) gemm_tiled_w3(
    const half* __restrict__ x, const uint8_t* __restrict__ packed, const half* __restrict__ scales,
    const offset_t* __restrict__ offset, half* __restrict__ out, int M, int N, int K, int Kp, int group_shift)
{
    __shared__ half shared_a[TILE_M][TILE_K];
    __shared__ half shared_b[TILE_K][TILE_N + PAD];

    static_assert(THREADS / 4 == TILE_N, "four threads for each row of the weight tile");
    LABKIT_ASSERT(blockDim.x == THREADS && group_shift >= 3 && Kp % 8 == 0 && K <= Kp);
    const int tid = threadIdx.x;
    const int lane = tid & 31;
    const int warp = tid >> 5;
    const int first_m = blockIdx.y * TILE_M;
    const int first_n = blockIdx.x * TILE_N;
    const int thread_m = 2 * (tid >> 4);
    const int thread_n = 4 * (tid & 15);
    const int groups = groups_of_row(Kp, group_shift);
    float sums[2][4] = {};

    for (int first_k = 0; first_k < K; first_k += TILE_K) {
        // A warp brings one row of x at a time: 64 contiguous bytes.
        for (int cell = tid; cell < TILE_M * TILE_K; cell += THREADS) {
            const int m = cell / TILE_K;
            const int k = cell % TILE_K;
            const bool inside = first_m + m < M && first_k + k < K;
            shared_a[m][k] = inside ? x[(size_t)(first_m + m) * K + first_k + k] : __float2half(0.0f);
        }
        // Three bytes and eight weights a lane: the 8 warps cover the 64 rows in one go.
        const int n = 8 * warp + (lane >> 2);
        const int k = 8 * (lane & 3);
        const size_t row = first_n + n;
        uint32_t codes = 0;
        float scale = 0.0f;
        float shift = 0.0f;
        if (row < N && first_k + k < K) {
            codes = load_triple(packed + row * (Kp / 8 * 3) + (first_k + k) / 8 * 3);
            const size_t group = row * groups + ((first_k + k) >> group_shift);
            scale = __half2float(scales[group]);
            shift = load_offset(offset, group);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float weight = dequantize(code_w3(codes, i), scale, shift);
            shared_b[k + i][n] = __float2half(first_k + k + i < K ? weight : 0.0f);
        }
        __syncthreads();  // both tiles are whole

#pragma unroll
        for (int step = 0; step < TILE_K; ++step) {
            const float a0 = __half2float(shared_a[thread_m][step]);
            const float a1 = __half2float(shared_a[thread_m + 1][step]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float b = __half2float(shared_b[step][thread_n + j]);
                sums[0][j] = fmaf(a0, b, sums[0][j]);
                sums[1][j] = fmaf(a1, b, sums[1][j]);
            }
        }
        __syncthreads();  // nobody reads the tiles any more
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int m = first_m + thread_m + i;
            const int n = first_n + thread_n + j;
            if (m < M && n < N) {
                out[(size_t)m * N + n] = __float2half(sums[i][j]);
            }
        }
    }
}
