"""Reference solutions of chapter 05."""

from __future__ import annotations


# At one k a thread reads its rows of A and its columns of B, and multiplies each with each.
def loads_per_fma(rows, columns):
    """Reads over products."""
    return (rows + columns) / (rows * columns)


second_barrier = r"""// out[m][n] = sum of x[m][k] * w[n][k]: a tile of 16 x 16 outputs, one for each thread.
#include <cuda_fp16.h>

extern "C" __global__ void gemm_16(const half* x, const half* w, half* out, int M, int N, int K)
{
    __shared__ half shared_a[16][16];
    __shared__ half shared_b[16][17];
    const int col = threadIdx.x;
    const int row = threadIdx.y;
    const int m = 16 * blockIdx.y + row;
    const int n = 16 * blockIdx.x;
    float sum = 0.0f;
    for (int first_k = 0; first_k < K; first_k += 16) {
        shared_a[row][col] = x[m * K + first_k + col];
        shared_b[col][row] = w[(n + row) * K + first_k + col];
        __syncthreads();
        for (int k = 0; k < 16; ++k) {
            sum += __half2float(shared_a[row][k]) * __half2float(shared_b[k][col]);
        }
        __syncthreads();  // before anybody overwrites a tile, everybody has read it
    }
    out[m * N + n + col] = __float2half(sum);
}
"""


# A row of 64 + 2 halves is 33 words: every row begins one bank further on, and stays on a whole word.
# With PAD 1 a row is 32.5 words: the odd rows begin inside a word, and their stores need two wavefronts.
padded_tile = r"""// Unpacks W4 weights [N, K] and writes them turned round: out [K, N].
#include <cuda_fp16.h>
#include "unpack.cuh"

#define PAD 2  // 66 halves are 33 words: an odd number, so the banks of 16 rows differ

extern "C" __global__ void turn_w4(const uint8_t* packed, const half* scales, half* out, int N, int K,
                                   int group_shift)
{
    __shared__ half tile[32][64 + PAD];  // [k][n]
    const int lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5;
    const int first_n = 64 * blockIdx.x;
    const int k = 2 * (lane & 15);
    const int column = 32 * blockIdx.y + k;
    for (int n = 2 * warp + (lane >> 4); n < 64; n += 16) {
        const int row = first_n + n;
        const uint32_t codes = packed[row * (K / 2) + column / 2];
        const int group = row * groups_of_row(K, group_shift) + (column >> group_shift);
        const float scale = __half2float(scales[group]);
        tile[k][n] = __float2half(code_w4(codes, 0) * scale);
        tile[k + 1][n] = __float2half(code_w4(codes, 1) * scale);
    }
    __syncthreads();
    for (int cell = threadIdx.x; cell < 32 * 64; cell += 256) {
        out[(32 * blockIdx.y + cell / 64) * N + first_n + cell % 64] = tile[cell / 64][cell % 64];
    }
}
"""


# Four lanes bring the 12 bytes of a row; a warp has eight rows.
def w3_lane(warp, lane):
    """Row of the tile, and group of eight columns."""
    return 8 * warp + (lane >> 2), lane & 3
