// y = x · Wᵀ for up to 8 · N_TILES rows of x: K_WARPS warps make a row tile, taking turns at its records.
//
// A record reaches shared memory by cp.async, each lane copying the codes that it reads itself, STAGES − 1 turns
// ahead; x comes straight from global memory, one turn ahead. What a record adds to the outputs is left in a rack in
// shared memory; after `round` turns all warps add up the rack, each some of the outputs, k tiles ascending. So the
// result does not depend on how many warps there are.
//
//   N_TILES  tiles of eight rows of x      K_WARPS  warps of a block, that is of a row tile
//   STAGES   records of a warp under way or in use
// registers: 242
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
// Left alone, the compiler spills a few words of the larger variants for the sake of another block an SM, and takes
// a few registers too many for a second block of eight warps.
#if GROUPS > 1 || OFFSET
#define BOUNDS __launch_bounds__(THREADS, 1)
#elif K_WARPS == 8
#define BOUNDS __launch_bounds__(THREADS, 2)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

// The rack: [k tile][place][half][lane], with a place for each register of a half's fragment in each n tile. A lane of
// the warp that has a place adds up two outputs: rows `row` and `row` + 16 of the row tile, row `m` of x.
#define PLACES (4 * N_TILES)
#define OWN_PLACES ((PLACES + K_WARPS - 1) / K_WARPS)
#define AT_ONCE (OWN_PLACES > 2 ? 2 : 4)  // k tiles whose loads go out together

struct Place {
    int index, row, m;
};

__device__ __forceinline__ Place own_place(int i)
{
    const int lane = threadIdx.x % 32, index = threadIdx.x / 32 + i * K_WARPS, r = index % 4;
    const Place place = {index, lane / 4 + 8 * (r / 2), 8 * (index / 4) + 2 * (lane % 4) + r % 2};
    return place;
}

extern "C" __global__ void BOUNDS tensor_core_narrow(
    const uint8_t* __restrict__ tiles, const activation_t* x, const activation_t* __restrict__ bias, const activation_t* residual,
    activation_t* out, float* part,
    int M, int N, int K, int row_tiles, int k_tiles, int slices, int each, int round, long long x_stride)
{
    extern __shared__ __align__(16) uint8_t shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_tile = blockIdx.x;
    LABKIT_ASSERT(blockDim.x == THREADS && (gridDim.y == 1 || gridDim.y == slices) && round >= 1);
    LABKIT_ASSERT(each == k_tiles / slices);
    const int slice0 = gridDim.y == 1 ? 0 : blockIdx.y;
    const int begin = first_tile(slice0, k_tiles, slices, each);
    const int end = gridDim.y == 1 ? k_tiles : first_tile(slice0 + 1, k_tiles, slices, each);
    const int turns = (end - begin + K_WARPS - 1) / K_WARPS;
    uint8_t* ring = shared + warp * STAGES * RECORD_BYTES;
    float* rack = reinterpret_cast<float*>(shared + K_WARPS * STAGES * RECORD_BYTES);

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

    const Output y = {bias, residual, out, M, N};
    float total[OWN_PLACES][2] = {}, slice_sum[OWN_PLACES][2] = {};
    float extra[OWN_PLACES][2] = {}, bias_of[OWN_PLACES][2] = {};
    const int longer = k_tiles - slices * each;  // so many slices, the first ones, have one k tile more
    int slice = slice0, slice_end = first_tile(slice0 + 1, k_tiles, slices, each);
    int stage = 0, base = begin;  // k tile of the first place of the rack
    for (int turn = 0; turn < turns; ++turn) {
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
            float* at = rack + (tile - base) * PLACES * 64 + lane;
#pragma unroll
            for (int i = 0; i < 8 * N_TILES; ++i) {
                const int place = i / 2, h = i % 2;
                at[32 * i] = contribution[place / 4][h][place % 4];
            }
        }
#pragma unroll
        for (int i = 0; i < N_TILES * CHUNKS; ++i) {
            x_now[i / CHUNKS][i % CHUNKS] = x_after[i / CHUNKS][i % CHUNKS];
        }
        tile += K_WARPS;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        const int done = min(end, begin + (turn + 1) * K_WARPS);
        if (done < end && done - base < round * K_WARPS) {
            continue;
        }
        if (done == end && gridDim.y == 1) {
            // On their way while the rack is added up.
#pragma unroll
            for (int i = 0; i < OWN_PLACES; ++i) {
                const Place place = own_place(i);
                if (place.index < PLACES) {
                    load_extras(bias_of[i], extra[i], y, row_tile, place.row, place.m);
                }
            }
        }
        __syncthreads();
        for (int first = base; warp < PLACES && first < done; first += AT_ONCE) {
            float added[AT_ONCE][OWN_PLACES][2];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const float* at = rack + (min(first + j, done - 1) - base) * PLACES * 64 + warp * 64 + lane;
#pragma unroll
                for (int i = 0; i < OWN_PLACES; ++i) {
                    const bool mine = warp + i * K_WARPS < PLACES;
                    added[j][i][0] = mine ? at[i * K_WARPS * 64] : 0.f;
                    added[j][i][1] = mine ? at[i * K_WARPS * 64 + 32] : 0.f;
                }
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                if (first + j >= done) {
                    break;
                }
                const bool ends = first + j == slice_end;
#pragma unroll
                for (int i = 0; i < OWN_PLACES; ++i) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float& sum = slice_sum[i][h];
                        if (ends) {
                            total[i][h] = slice == slice0 ? sum : __fadd_rn(total[i][h], sum);
                        }
                        sum = __fadd_rn(ends ? 0.f : sum, added[j][i][h]);
                    }
                }
                if (ends) {
                    ++slice;
                    slice_end += each + (slice < longer);
                }
            }
        }
        base = done;
        if (done < end) {
            __syncthreads();
        }
    }
#pragma unroll
    for (int i = 0; i < OWN_PLACES; ++i) {
        const Place place = own_place(i);
        if (place.index >= PLACES || place.m >= M) {
            continue;
        }
        float sum[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] = slice == slice0 ? slice_sum[i][h] : __fadd_rn(total[i][h], slice_sum[i][h]);
        }
        if (gridDim.y == 1) {
            finish(y, bias_of[i], extra[i], row_tile, place.row, place.m, sum);
        } else {
            const size_t cell = (((size_t)blockIdx.y * M + place.m) * row_tiles + row_tile) * TILE_ROWS + place.row;
            part[cell] = sum[0];
            part[cell + 16] = sum[1];
        }
    }
}
