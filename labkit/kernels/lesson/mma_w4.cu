// LESSON ONLY (chapter 08): W4 times up to eight rows of x on the tensor cores, with copies that run ahead.
// Never registered, never dispatched; labkit/kernels/tensor_core*.cu are the kernels in use.
// registers: 72
//
//   x      half [M, K]                       activations, M <= 8
//   tiles  uint8 [N/32][K/128][2112]         records of labkit/quant/tiles.py: W4, groups of 128, no offset
//   out    half [M, N]                       every cell is written once
//
// grid (N / 128), block 128: a warp has 32 output rows, and eight columns of sums, one for each row of x.
// Shared memory (static): STAGES * 11008 bytes (with PAD 32). Step t multiplies 128 columns of K while the copies
// of the next STAGES - 1 steps are under way. A stage holds the records of four warps, and x for all of them.
//
//   NO_WAIT      leaves out the wait for this thread's own copies
//   SHORT_WAIT   waits for one group of copies fewer than it must
//   NO_BARRIER   leaves out the barrier: other threads' copies, and stages that others still read
//   EARLY_COPY   starts the next copies before the barrier
//
// Invariants: N % 128 == 0; K % 128 == 0; x and tiles begin at multiples of 16 bytes.
#include "ptx.cuh"

#ifndef STAGES
#define STAGES 3
#endif
#ifndef PAD
#define PAD 32           // halves: two neighbouring rows of x begin 16 banks apart
#endif
#define WARPS 4
#define ROWS 8           // of x: the mma's n
#define TILE_K 128       // columns of a record: one group
#define CODES 2048       // bytes of codes in a record; 32 scales follow
#define RECORD (CODES + 64)

#ifdef SHORT_WAIT
#define PENDING (STAGES - 1)
#else
#define PENDING (STAGES - 2)
#endif

// Eight codes of a word to four pairs of halves, exactly. 0x6400 | u is the half 1024 + u, as long as u stays in
// the mantissa; four bits higher the same code reads 1024 + 16u, which a multiplication brings back.
__device__ __forceinline__ void dequantize(unsigned word, unsigned pairs[4])
{
    const half2 one = __float2half2_rn(-1032.0f);        // -(1024 + 8)
    const half2 sixteenth = __float2half2_rn(0.0625f);
    const half2 sixteen = __float2half2_rn(-72.0f);      // -(1024 / 16 + 8)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned mask = i & 1 ? 0x00f000f0u : 0x000f000fu;
        const unsigned bits = lop3_and_or(word >> 8 * (i >> 1), mask, 0x64006400u);
        half2 pair;
        memcpy(&pair, &bits, 4);
        pair = i & 1 ? __hfma2(pair, sixteenth, sixteen) : __hadd2(pair, one);
        memcpy(&pairs[i], &pair, 4);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) mma_w4(const half* __restrict__ x,
                                                                const uint8_t* __restrict__ tiles,
                                                                half* __restrict__ out, int M, int N, int K)
{
    __shared__ __align__(16) uint8_t records[STAGES][WARPS][RECORD];
    __shared__ __align__(16) half rows[STAGES][ROWS][TILE_K + PAD];

    LABKIT_ASSERT(blockDim.x == 32 * WARPS && N % (32 * WARPS) == 0 && K % TILE_K == 0 && M <= ROWS);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int q = lane % 4;
    const int steps = K / TILE_K;
    const int row_tile = WARPS * blockIdx.x + warp;
    const uint8_t* mine = tiles + (size_t)row_tile * steps * RECORD;

    auto copy = [&](int step) {
        const int stage = step % STAGES;
        const uint8_t* from = mine + (size_t)step * RECORD + 16 * lane;
        uint8_t* to = records[stage][warp] + 16 * lane;
#pragma unroll
        for (int vector = 0; vector < 4; ++vector) {  // 512 neighbouring bytes a warp
            cp_async_16(to + 512 * vector, from + 512 * vector);
        }
        if (lane < 4) {
            cp_async_16(to + CODES, from + CODES);
        }
        const int row = threadIdx.x / 16;
        const int k = 8 * (threadIdx.x % 16);
        const bool inside = row < M;  // rows that x does not have are filled with zeros
        cp_async_16(&rows[stage][row][k], x + (size_t)(inside ? row : 0) * K + step * TILE_K + k, inside);
    };

    float sums[2][4] = {};  // [half of the 32 rows][register of the fragment]
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) {
            copy(step);
        }
        cp_async_commit();
    }
    for (int step = 0; step < steps; ++step) {
#ifdef EARLY_COPY
        if (step + STAGES - 1 < steps) {
            copy(step + STAGES - 1);
        }
        cp_async_commit();
        cp_async_wait<PENDING + 1>();
#elif !defined(NO_WAIT)
        cp_async_wait<PENDING>();  // my copies of this step have come
#endif
#ifndef NO_BARRIER
        __syncthreads();  // everybody's have; and nobody reads the last stage any more
#endif
#ifndef EARLY_COPY
        if (step + STAGES - 1 < steps) {
            copy(step + STAGES - 1);
        }
        cp_async_commit();  // also when nothing was copied: the wait counts groups
#endif

        const int stage = step % STAGES;
        const uint4* codes = reinterpret_cast<const uint4*>(records[stage][warp]);
        const half* scales = reinterpret_cast<const half*>(records[stage][warp] + CODES) + 4 * g;
        float partial[2][4] = {};
#pragma unroll
        for (int chunk = 0; chunk < TILE_K / 32; ++chunk) {
            const uint4 x8 = *reinterpret_cast<const uint4*>(&rows[stage][g][32 * chunk + 8 * q]);
            const uint4 w = codes[32 * chunk + lane];
            const unsigned b[4] = {x8.x, x8.y, x8.z, x8.w};
            const unsigned words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // half i / 2 of the rows, 16 columns of the chunk each
                unsigned a[4];
                dequantize(words[i], a);
                mma_m16n8k16(partial[i / 2], a, b + 2 * (i % 2), partial[i / 2]);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // one scale for the whole group: after the products
            sums[i / 4][i % 4] = fmaf(partial[i / 4][i % 4], __half2float(scales[i / 2]), sums[i / 4][i % 4]);
        }
    }

#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int n = 32 * row_tile + 16 * (i / 4) + g + 8 * (i % 4 / 2);
        const int m = 2 * q + i % 2;
        if (m < M) {
            out[(size_t)m * N + n] = __float2half(sums[i / 4][i % 4]);
        }
    }
}
