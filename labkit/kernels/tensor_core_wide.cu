// y = x · Wᵀ for bands of COLUMN_WARPS · 8 · N_TILES rows of x: a block makes neighbouring row tiles, all of its
// warps share x. A row tile has COLUMN_WARPS warps, each with its own n tiles of the band: they decode the same
// records, which costs integer instructions that are free while the tensor core is busy.
//
// A stage of shared memory holds TURN k tiles of the band of x and of each row tile, copied by cp.async STAGES − 1
// stages ahead. The eight activations of a lane are 16 neighbouring bytes, so that a plain 16-byte load takes the
// place of ldmatrix; pieces of odd rows are swapped in halves of 64 bytes, which spreads eight lanes over all banks.
//
//   N_TILES  tiles of eight rows of x a warp      BLOCK_TILES  row tiles of a block
//   STAGES  of shared memory      TURN  k tiles of a stage: between two barriers
// registers: 255
#include "tensor_core.cuh"

#ifndef N_TILES
#define N_TILES 4
#endif
#ifndef COLUMN_WARPS
#define COLUMN_WARPS 2
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef BLOCK_TILES
#define BLOCK_TILES 4
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif

#ifndef TURN
#define TURN 1
#endif

#define WARPS (BLOCK_TILES * COLUMN_WARPS)
#define THREADS (WARPS * 32)
#define BAND (COLUMN_WARPS * 8 * N_TILES)
#define X_BYTES (BAND * TILE_K * 2)
#define PIECES (TILE_K / 8)  // of 16 bytes in a row of a stage
#define ROWS_A_ROUND (THREADS / PIECES)
#define ROUNDS ((BAND + ROWS_A_ROUND - 1) / ROWS_A_ROUND)
#define TILE_BYTES (X_BYTES + BLOCK_TILES * RECORD_BYTES)
#define STAGE_BYTES (TURN * TILE_BYTES)

// Offset in bytes of a piece of a row of x in a stage.
__device__ __forceinline__ int place(int row, int piece)
{
    return row * (PIECES * 16) + ((piece ^ ((row & 1) << 2)) << 4);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) tensor_core_wide(
    const uint8_t* __restrict__ tiles, const activation_t* x, const activation_t* __restrict__ bias,
    const activation_t* residual, activation_t* out, float* part, int M, int N, int K, int row_tiles, int k_tiles,
    int slices, int each, long long x_stride)
{
    extern __shared__ __align__(16) uint8_t shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int own_tile = warp / COLUMN_WARPS, column_warp = warp % COLUMN_WARPS;
    const int row_tile = blockIdx.x * BLOCK_TILES + own_tile;
    const int m0 = blockIdx.y * BAND;
    const bool active = row_tile < row_tiles;
    LABKIT_ASSERT(blockDim.x == THREADS && gridDim.z == slices && each == k_tiles / slices);

    const int begin = first_tile(blockIdx.z, k_tiles, slices, each);
    const int end = first_tile(blockIdx.z + 1, k_tiles, slices, each);
    uint8_t* own_record = shared + X_BYTES + own_tile * RECORD_BYTES;

    // What this thread copies: with the first column warp, its codes of the record; of x the same piece of every
    // ROWS_A_ROUND-th row.
    const uint8_t* record_next = tiles + ((size_t)row_tile * k_tiles + begin) * RECORD_BYTES + 16 * lane;
    const int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    const activation_t* x_next = x + (m0 + row) * x_stride + begin * TILE_K + 8 * piece;
    const int rows_left = min(BAND, M - m0) - row;
    const long long x_round = ROWS_A_ROUND * x_stride;
    int x_left = K - begin * TILE_K - 8 * piece;

    auto ask_record = [&](int slot) {
        if (active && column_warp == 0) {
            copy_record(own_record + slot * TILE_BYTES + 16 * lane, record_next, lane);
        }
        record_next += RECORD_BYTES;
    };
    auto ask_x = [&](int slot) {
        const activation_t* from = x_next;
        uint8_t* to = shared + slot * TILE_BYTES + place(row, piece);
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            if (i * ROWS_A_ROUND < rows_left) {
                cp_async_16(to + i * ROWS_A_ROUND * PIECES * 16, x_left > 0 ? from : x, x_left > 0);
            }
            from += x_round;
        }
        x_next += TILE_K;
        x_left -= TILE_K;
    };

    // Rows of the band that x does not have: zeros, once.
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        if (row + i * ROWS_A_ROUND < BAND && i * ROWS_A_ROUND >= rows_left) {
#pragma unroll
            for (int s = 0; s < STAGES * TURN; ++s) {
                uint8_t* to = shared + s * TILE_BYTES + place(row + i * ROWS_A_ROUND, piece);
                *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
            }
        }
    }
    // Weights first: they may be read while the kernel before still writes x.
#pragma unroll
    for (int s = 0; s < (STAGES - 1) * TURN; ++s) {
        if (begin + s < end) {
            ask_record(s);
        }
    }
    grid_dependency_release();
    grid_dependency_wait();
#pragma unroll
    for (int s = 0; s < (STAGES - 1) * TURN; ++s) {
        if (begin + s < end) {
            ask_x(s);
        }
        if (s % TURN == TURN - 1) {
            cp_async_commit();
        }
    }
    float sum[N_TILES][2][4] = {};
    const uint8_t* x_own = shared + place(column_warp * 8 * N_TILES + lane / 4, lane % 4);
    const int flip = (lane / 4 & 1) << 6;  // chunk c lies 64·c bytes on, or in odd rows 64·(c ^ 1)
    int stage = 0;
    for (int turn = begin; turn < end; turn += TURN) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;
#pragma unroll
        for (int i = 0; i < TURN; ++i) {
            if (turn + (STAGES - 1) * TURN + i < end) {
                ask_record(free_stage * TURN + i);
                ask_x(free_stage * TURN + i);
            }
        }
        cp_async_commit();
#pragma unroll
        for (int i = 0; i < TURN; ++i) {
            if (active && turn + i < end) {
                const uint8_t* record = own_record + stage * STAGE_BYTES + i * TILE_BYTES;
                const uint8_t* x_stage = x_own + stage * STAGE_BYTES + i * TILE_BYTES;
                float contribution[N_TILES][2][4];
                multiply_record(contribution, record, [&](int t, int c) {
                    const int aside = (c & 1) == 0 ? 0 : -2 * flip;
                    return *reinterpret_cast<const uint4*>(x_stage + t * (8 * PIECES * 16) + 64 * c + aside);
                });
#pragma unroll
                for (int t = 0; t < N_TILES; ++t) {
                    add(sum[t], contribution[t]);
                }
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    if (!active) {
        return;
    }
    const Output y = {bias, residual, out, M, N};
    float* plane = part + (size_t)blockIdx.z * M * row_tiles * TILE_ROWS;
#pragma unroll
    for (int t = 0; t < N_TILES; ++t) {
        const int m = m0 + (column_warp * N_TILES + t) * 8;
        if (slices == 1) {
            finish_fragment(y, load_extras(y, row_tile, m), row_tile, m, sum[t]);
        } else {
            store_partial(plane, M, row_tiles, row_tile, m, sum[t]);
        }
    }
}
