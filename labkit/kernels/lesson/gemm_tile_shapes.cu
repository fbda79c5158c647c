// LESSON ONLY (chapter 05): gemm_tiled_w4.cu with every size of its tile free, to see what each one costs.
// Never registered, never dispatched.
// registers: 40
//
//   x        half [M, K]        activations, row-major
//   packed   uint8 [N, K/2]     W4 codes: low nibble = even column, high nibble = odd column
//   scales   half [N, groups]   one for each group of 2^group_shift columns of a row
//   out      half [M, N]        every cell is written once
//
// grid (ceil(N / TILE_N), ceil(M / TILE_M)), block THREADS; shared memory (static)
// 2 * TILE_M * (TILE_K + PAD_A) + 2 * TILE_K * (TILE_N + PAD_B) bytes. A thread makes THREAD_M x THREAD_N outputs.
// BLOCKS: how many of them the compiler must keep room for on an SM (it limits the registers).
// Invariants: K % TILE_K == 0; a group holds a multiple of 2 columns.
#include <cuda_fp16.h>
#include "types.cuh"
#include "unpack.cuh"

#ifndef TILE_M
#define TILE_M 32
#endif
#ifndef TILE_N
#define TILE_N 64
#endif
#ifndef TILE_K
#define TILE_K 32
#endif
#ifndef THREAD_M
#define THREAD_M 2
#endif
#ifndef THREAD_N
#define THREAD_N 4
#endif
#ifndef BLOCKS
#define BLOCKS 6
#endif
#ifndef PAD_A
#define PAD_A 0
#endif
#ifndef PAD_B
#define PAD_B 1
#endif

#define THREADS_N (TILE_N / THREAD_N)
#define THREADS (TILE_M / THREAD_M * THREADS_N)

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gemm_tile_shapes(
    const half* __restrict__ x, const uint8_t* __restrict__ packed, const half* __restrict__ scales,
    half* __restrict__ out, int M, int N, int K, int group_shift)
{
    __shared__ half shared_a[TILE_M][TILE_K + PAD_A];
    __shared__ half shared_b[TILE_K][TILE_N + PAD_B];

    static_assert(TILE_M % THREAD_M == 0 && TILE_N % THREAD_N == 0, "a thread's outputs lie in the tile");
    LABKIT_ASSERT(blockDim.x == THREADS && K % TILE_K == 0);
    const int tid = threadIdx.x;
    const int first_m = blockIdx.y * TILE_M;
    const int first_n = blockIdx.x * TILE_N;
    const int thread_m = THREAD_M * (tid / THREADS_N);
    const int thread_n = THREAD_N * (tid % THREADS_N);
    const int groups = groups_of_row(K, group_shift);
    float sums[THREAD_M][THREAD_N] = {};

    for (int first_k = 0; first_k < K; first_k += TILE_K) {
// Unrolled further, these loops would take more registers than the sums leave.
#pragma unroll 2
        for (int cell = tid; cell < TILE_M * TILE_K; cell += THREADS) {
            const int m = cell / TILE_K;
            const int k = cell % TILE_K;
            const bool inside = first_m + m < M;
            shared_a[m][k] = inside ? x[(size_t)(first_m + m) * K + first_k + k] : __float2half(0.0f);
        }
        // One byte, two weights a thread; neighbouring threads take neighbouring bytes of a row.
#pragma unroll 2
        for (int cell = tid; cell < TILE_N * TILE_K / 2; cell += THREADS) {
            const int n = cell / (TILE_K / 2);
            const int k = 2 * (cell % (TILE_K / 2));
            const size_t row = first_n + n;
            uint32_t codes = 0;
            float scale = 0.0f;
            if (row < N) {
                codes = packed[row * (K / 2) + (first_k + k) / 2];
                scale = __half2float(scales[row * groups + ((first_k + k) >> group_shift)]);
            }
            shared_b[k][n] = __float2half(dequantize(code_w4(codes, 0), scale, 0.0f));
            shared_b[k + 1][n] = __float2half(dequantize(code_w4(codes, 1), scale, 0.0f));
        }
        __syncthreads();  // both tiles are whole

#pragma unroll 8
        for (int step = 0; step < TILE_K; ++step) {
            float a[THREAD_M];
#pragma unroll
            for (int i = 0; i < THREAD_M; ++i) {
                a[i] = __half2float(shared_a[thread_m + i][step]);
            }
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) {
                const float b = __half2float(shared_b[step][thread_n + j]);
#pragma unroll
                for (int i = 0; i < THREAD_M; ++i) {
                    sums[i][j] = fmaf(a[i], b, sums[i][j]);
                }
            }
        }
        __syncthreads();  // nobody reads the tiles any more
    }

#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) {
            const int m = first_m + thread_m + i;
            const int n = first_n + thread_n + j;
            if (m < M && n < N) {
                out[(size_t)m * N + n] = __float2half(sums[i][j]);
            }
        }
    }
}
