// Tiled GEMM over W4 weights: out = x * W^T. The seed kernel of M > 8, kept as its article describes it.
//
//   x        half [M, K]           activations, row-major
//   packed   uint8 [N, Kp/2]       W4 codes: low nibble = even column, high nibble = odd column
//   scales   half [N, groups]      one for each group of columns of a row
//   offset   offset_t [N, groups]  see unpack.cuh; null without OFFSET
//   out      half [M, N]           every cell is written once
//
// grid (ceil(N / 64), ceil(M / 32)), block 256; shared memory (static) 2,048 + 64 * (64 + PAD) bytes.
// A block makes a tile of 32 x 64 outputs, a thread 2 x 4 of them, in float, K ascending, 32 at a time.
// shared_a holds x as it comes, shared_b the weights, dequantised in float and rounded to half,
// turned round so that the 16 threads of a row of outputs read neighbours.
// PAD makes a row of shared_b an odd number of 2-byte cells: without it the 16 lanes that unpack one
// row of the weight store into one bank.
//
// Invariants: a group holds a multiple of 2 columns; K <= Kp, Kp % 2 == 0; nothing is read of a column
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

extern "C" __global__ void __launch_bounds__(THREADS, 6) gemm_tiled_w4(
    const half* __restrict__ x, const uint8_t* __restrict__ packed, const half* __restrict__ scales,
    const offset_t* __restrict__ offset, half* __restrict__ out, int M, int N, int K, int Kp, int group_shift)
{
    __shared__ half shared_a[TILE_M][TILE_K];
    __shared__ half shared_b[TILE_K][TILE_N + PAD];

    LABKIT_ASSERT(blockDim.x == THREADS && group_shift >= 1 && Kp % 2 == 0 && K <= Kp);
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
        // A warp unpacks two rows of the weight: lanes 0-15 the 16 bytes of the first, 16-31 the second.
        const int byte = lane & 15;
        const int k = 2 * byte;
        for (int n = 2 * warp + (lane >> 4); n < TILE_N; n += 2 * (THREADS / 32)) {
            const size_t row = first_n + n;
            float low = 0.0f;
            float high = 0.0f;
            if (row < N && first_k + k < K) {
                const uint32_t codes = packed[row * (Kp / 2) + first_k / 2 + byte];
                const size_t group = row * groups + ((first_k + k) >> group_shift);
                const float scale = __half2float(scales[group]);
                const float shift = load_offset(offset, group);
                low = dequantize(code_w4(codes, 0), scale, shift);
                high = first_k + k + 1 < K ? dequantize(code_w4(codes, 1), scale, shift) : 0.0f;
            }
            shared_b[k][n] = __float2half(low);
            shared_b[k + 1][n] = __float2half(high);
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
