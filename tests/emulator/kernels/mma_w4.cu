// Prototype of a tensor-core product with cp.async, for the emulator's tests and for comparing its counts with
// Nsight Compute; no layer runs it. out[M, N] = a[M, K] * W^T, W4 with a scale a group.
//
//   a       half [M, K]          row-major
//   words   uint32 [N, K/8]      nibble j of a word is code + 8 of column 2j (j < 4) or 2(j - 4) + 1 (j >= 4)
//   scales  half [N, K/group]
//   out     half [M, N]
//
// grid (N / 64, ceil(M / 16)), block 128 = 4 warps of 16 columns each.
// Shared: two buffers of a 16 x 64 and of B 64 x 64 codes, filled by cp.async while the other is multiplied.
// APAD halves and BPAD bytes pad a row. A row of B lies 32 + BPAD bytes from the next: with 16 some of the
// 16-byte pieces that eight lanes write together share a bank, with 0 they do not.
// BUG_NO_WAIT, BUG_NO_SYNC1 and BUG_NO_SYNC2 leave a wait or a barrier out.
//
// Invariants: N % 64 == 0, K % 64 == 0, group % 16 == 0. Rows beyond M are filled with zeros and read nothing:
// their source address is row 0, with a size of 0.
#include "ptx.cuh"

#define TILE_M 16
#define TILE_N 64
#define TILE_K 64
#ifndef APAD
#define APAD 8
#endif
#ifndef BPAD
#define BPAD 16
#endif

extern "C" __global__ void __launch_bounds__(128) mma_w4(
    const half* __restrict__ a, const unsigned* __restrict__ words, const half* __restrict__ scales,
    half* __restrict__ out, int M, int N, int K, int group)
{
    __shared__ __align__(16) half shared_a[2][TILE_M][TILE_K + APAD];
    __shared__ __align__(16) unsigned char shared_b[2][TILE_N][TILE_K / 2 + BPAD];
    const int thread = threadIdx.x;
    const int lane = thread & 31;
    const int warp = thread >> 5;
    const int row_of_fragment = lane >> 2;
    const int quad = lane & 3;
    const int first_row = blockIdx.y * TILE_M;
    const int first_column = blockIdx.x * TILE_N;
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(words);
    float sums[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};

    auto load = [&](int buffer, int k) {
        // a: 16 rows of 8 pieces; B: 64 rows of 2 pieces; a piece is 16 bytes, one a thread.
        const int row = thread >> 3;
        const int piece = (thread & 7) * 8;
        const bool inside = first_row + row < M;
        const half* from = a + (size_t)(inside ? first_row + row : 0) * K + k + piece;
        cp_async_16(&shared_a[buffer][row][piece], from, inside);
        const int column = thread >> 1;
        const int half_row = (thread & 1) * 16;
        const unsigned char* codes = bytes + (size_t)(first_column + column) * (K / 2) + k / 2 + half_row;
        cp_async_16(&shared_b[buffer][column][half_row], codes);
        cp_async_commit();
    };

    load(0, 0);
    const int steps = K / TILE_K;
    for (int step = 0; step < steps; ++step) {
        const int buffer = step & 1;
        if (step + 1 < steps) {
            load(buffer ^ 1, (step + 1) * TILE_K);
#ifndef BUG_NO_WAIT
            cp_async_wait<1>();
#endif
        } else {
            cp_async_wait<0>();
        }
#ifndef BUG_NO_SYNC1
        __syncthreads();
#endif
        for (int k = 0; k < TILE_K; k += 16) {
            unsigned fragment_a[4];
            ldmatrix_x4(fragment_a, &shared_a[buffer][lane & 15][k + (lane >> 4) * 8]);
            for (int j = 0; j < 2; ++j) {
                const int column = warp * 16 + j * 8 + row_of_fragment;
                const uint2 codes = *reinterpret_cast<const uint2*>(&shared_b[buffer][column][k / 2]);
                const int this_group = (step * TILE_K + k) / group;
                const size_t at = (size_t)(first_column + column) * (K / group) + this_group;
                const half2 scale = __half2half2(scales[at]);
                const half2 low = __hmul2(int4x2_to_half2(codes.x >> (4 * quad)), scale);
                const half2 high = __hmul2(int4x2_to_half2(codes.y >> (4 * quad)), scale);
                unsigned fragment_b[2];
                memcpy(&fragment_b[0], &low, 4);
                memcpy(&fragment_b[1], &high, 4);
                mma_m16n8k16(sums[j], fragment_a, fragment_b, sums[j]);
            }
        }
#ifndef BUG_NO_SYNC2
        __syncthreads();
#endif
    }
    for (int j = 0; j < 2; ++j) {
        for (int i = 0; i < 4; ++i) {
            const int row = first_row + row_of_fragment + (i >> 1) * 8;
            const int column = first_column + warp * 16 + j * 8 + 2 * quad + (i & 1);
            if (row < M && column < N) {
                out[(size_t)row * N + column] = __float2half(sums[j][i]);
            }
        }
    }
}
