// y = x · Wᵀ for up to 8 · N_TILES rows of x: K_WARPS warps make a row tile, taking turns at its records.
//
// A record reaches shared memory by cp.async, each lane copying the codes that it reads itself, STAGES − 1 turns
// ahead; x comes straight from global memory, one turn ahead. What a record adds to the outputs is left in a rack in
// shared memory; after `round` turns all threads add up the rack, each its own cells, k tiles ascending. So the result
// does not depend on how many warps there are.
//
//   N_TILES  tiles of eight rows of x      K_WARPS  warps of a block, that is of a row tile
//   STAGES   records of a warp under way or in use
// registers: 212
#include "tensor_core.cuh"

#ifndef N_TILES
#define N_TILES 1
#endif
#ifndef K_WARPS
#define K_WARPS 4
#endif
#ifndef STAGES
#define STAGES 3
#endif
#define THREADS (32 * K_WARPS)
// Left alone, the compiler spills a few words of the larger variants for the sake of another block an SM.
#if GROUPS > 1 || OFFSET || N_TILES > K_WARPS / 2
#define BOUNDS __launch_bounds__(THREADS, 1)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif
#define CELLS (256 * N_TILES)  // sums of a row tile: [n tile][half][lane][4]
// Who adds up the rack: of W4 with few warps a warp a half of an n tile, which takes an exchange at the end; with many
// warps, whose K is short, a warp an n tile. More threads would only add instructions. W3 was a sixth slower with
// halves: the compiler then fits the kernel into 80 registers, at the price of its longer decoding.
#define WIDTH (BITS == 4 && K_WARPS <= 4 && K_WARPS >= 2 * N_TILES ? 4 : 8)  // cells of a thread
#define LOADS (WIDTH / 4)
#define FOLD_THREADS (CELLS / WIDTH)
#define AT_ONCE 4  // k tiles of the rack whose loads go out together

// A thread's cells: of the slice under way, and of the slices before it.
struct Sums {
    float total[WIDTH], slice_sum[WIDTH];
    int slice, slice_end;  // the slice under way ends before this k tile
};

__device__ __forceinline__ void close_slice(Sums& sums)
{
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        sums.total[i] = __fadd_rn(sums.total[i], sums.slice_sum[i]);
        sums.slice_sum[i] = 0.f;
    }
}

// The l-th four of a thread's cells; with WIDTH 8 they are the fragment that its lane has of an n tile.
__device__ __forceinline__ float* cells_at(float* cells, int l)
{
    const int four = WIDTH == 4 ? threadIdx.x : (threadIdx.x / 32 * 2 + l) * 32 + threadIdx.x % 32;
    return cells + 4 * four;
}

// Adds the k tiles from `begin` to `end` of the rack, whose first is `begin`; each and longer as in first_tile.
__device__ __forceinline__ void fold(Sums& sums, float* rack, int begin, int end, int each, int longer)
{
    for (int first = begin; first < end; first += AT_ONCE) {
        float4 added[AT_ONCE][LOADS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            float* cells = rack + (min(first + i, end - 1) - begin) * CELLS;
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                added[i][l] = *reinterpret_cast<const float4*>(cells_at(cells, l));
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i >= end) {
                break;
            }
            if (first + i == sums.slice_end) {
                close_slice(sums);
                ++sums.slice;
                sums.slice_end += each + (sums.slice < longer);
            }
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                float* sum = sums.slice_sum + 4 * l;
                sum[0] = __fadd_rn(sum[0], added[i][l].x);
                sum[1] = __fadd_rn(sum[1], added[i][l].y);
                sum[2] = __fadd_rn(sum[2], added[i][l].z);
                sum[3] = __fadd_rn(sum[3], added[i][l].w);
            }
        }
    }
}

extern "C" __global__ void BOUNDS tensor_core_narrow(
    const uint8_t* __restrict__ tiles, const activation_t* x, const activation_t* __restrict__ bias,
    const activation_t* residual, activation_t* out, float* part, int M, int N, int K, int row_tiles, int k_tiles,
    int slices, int each, int round, long long x_stride)
{
    extern __shared__ __align__(16) uint8_t shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_tile = blockIdx.x;
    LABKIT_ASSERT(blockDim.x == THREADS && K_WARPS >= N_TILES && round >= 1);
    LABKIT_ASSERT((gridDim.y == 1 || gridDim.y == slices) && each == k_tiles / slices);
    const int slice0 = gridDim.y == 1 ? 0 : blockIdx.y;
    const int begin = first_tile(slice0, k_tiles, slices, each);
    const int end = gridDim.y == 1 ? k_tiles : first_tile(slice0 + 1, k_tiles, slices, each);
    uint8_t* ring = shared + warp * STAGES * RECORD_BYTES;
    float* rack = reinterpret_cast<float*>(shared + K_WARPS * STAGES * RECORD_BYTES);  // [k tile][CELLS]

    int tile = begin + warp;
    int to_ask = end - tile;  // k tiles from the next one to ask for
    const uint8_t* next = tiles + ((size_t)row_tile * k_tiles + tile) * RECORD_BYTES + 16 * lane;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (to_ask > 0) {
            copy_record(ring + s * RECORD_BYTES + 16 * lane, next, lane);
        }
        cp_async_commit();
        to_ask -= K_WARPS;
        next += K_WARPS * RECORD_BYTES;
    }
    grid_dependency_release();
    grid_dependency_wait();
    const activation_t* x_next = x + lane / 4 * x_stride + 8 * (lane % 4) + tile * TILE_K;
    int left[N_TILES];
    columns_left(left, M, min(K, end * TILE_K), tile * TILE_K);
    uint4 x_now[N_TILES][CHUNKS];
    load_x(x_now, x_next, x_stride, left);

    const int longer = k_tiles - slices * each;  // so many slices, the first ones, have one k tile more
    Sums sums = {{}, {}, slice0, first_tile(slice0 + 1, k_tiles, slices, each)};
    int stage = 0, base = begin;  // k tile of the first place of the rack
    for (int turn = begin; turn < end; turn += K_WARPS) {
        if (turn - base == round * K_WARPS) {
            __syncthreads();
            if (threadIdx.x < FOLD_THREADS) {
                fold(sums, rack, base, turn, each, longer);
            }
            __syncthreads();
            base = turn;
        }
        // Before the wait: a load behind it would be moved down to its use, and its latency would be paid.
        uint4 x_after[N_TILES][CHUNKS];
        x_next += K_WARPS * TILE_K;
#pragma unroll
        for (int t = 0; t < N_TILES; ++t) {
            left[t] -= K_WARPS * TILE_K;
        }
        load_x(x_after, x_next, x_stride, left);
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        if (to_ask > 0) {
            const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;
            copy_record(ring + free_stage * RECORD_BYTES + 16 * lane, next, lane);
        }
        cp_async_commit();
        to_ask -= K_WARPS;
        next += K_WARPS * RECORD_BYTES;

        if (tile < end) {
            const uint8_t* record = ring + stage * RECORD_BYTES;
            float contribution[N_TILES][2][4];
            multiply_record(contribution, record, [&](int t, int c) { return x_now[t][c]; });
            float4* at = reinterpret_cast<float4*>(rack + (tile - base) * CELLS) + lane;
#pragma unroll
            for (int i = 0; i < 2 * N_TILES; ++i) {
                const float (&v)[4] = contribution[i / 2][i % 2];
                at[32 * i] = make_float4(v[0], v[1], v[2], v[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < N_TILES * CHUNKS; ++i) {
            x_now[i / CHUNKS][i % CHUNKS] = x_after[i / CHUNKS][i % CHUNKS];
        }
        tile += K_WARPS;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    const Output y = {bias, residual, out, M, N};
    Extras extras = {};
    if (gridDim.y == 1 && warp < N_TILES) {
        extras = load_extras(y, row_tile, 8 * warp);  // on their way while the rack is added up
    }
    __syncthreads();
    if (threadIdx.x < FOLD_THREADS) {
        fold(sums, rack, base, end, each, longer);
        close_slice(sums);
    }
#if WIDTH == 4
    if (threadIdx.x < FOLD_THREADS) {  // a place that this thread alone has read
        reinterpret_cast<float4*>(rack)[threadIdx.x] =
            make_float4(sums.total[0], sums.total[1], sums.total[2], sums.total[3]);
    }
    __syncthreads();
#endif
    if (warp >= N_TILES) {
        return;
    }
    float result[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#if WIDTH == 4
        const float4 four = reinterpret_cast<const float4*>(rack)[(warp * 2 + h) * 32 + lane];
        memcpy(result[h], &four, sizeof(four));
#else
        memcpy(result[h], &sums.total[4 * h], sizeof(result[h]));
#endif
    }
    if (gridDim.y == 1) {
        finish_fragment(y, extras, row_tile, 8 * warp, result);
    } else {
        float* plane = part + (size_t)blockIdx.y * M * row_tiles * TILE_ROWS;
        store_partial(plane, M, row_tiles, row_tile, 8 * warp, result);
    }
}
