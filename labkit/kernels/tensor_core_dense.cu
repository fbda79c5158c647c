// Tiles to a dense weight: row tiles first … first + rows / 32 − 1, all columns, in the order of the tiles. For many
// rows of x, where a product of dense matrices is faster. A warp takes a record.
// registers: 48
#include "tensor_core.cuh"

#define WARPS 4

__device__ __forceinline__ unsigned two(float low, float high)
{
    const activation_t both[2] = {from_float(low), from_float(high)};
    unsigned word;
    memcpy(&word, both, 4);
    return word;
}

__device__ __forceinline__ float part_of(unsigned pair, int e)
{
    activation_t both[2];
    memcpy(both, &pair, 4);
    return to_float(both[e]);
}

// dense [row tiles · 32][k_tiles · 128]; grid.x · WARPS covers k_tiles, grid.y the row tiles.
extern "C" __global__ void __launch_bounds__(WARPS * 32) tensor_core_dense(
    const uint8_t* __restrict__ tiles, activation_t* dense, int first, int k_tiles)
{
    LABKIT_ASSERT(blockDim.x == WARPS * 32);
    grid_dependency_release();
    grid_dependency_wait();
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int tile = blockIdx.x * WARPS + threadIdx.x / 32;
    if (tile >= k_tiles) {
        return;
    }
    const uint8_t* record = tiles + ((size_t)(first + blockIdx.y) * k_tiles + tile) * RECORD_BYTES;
    unsigned words[4 * VECTORS];
    load_codes(words, record + 16 * lane);
    const size_t width = (size_t)k_tiles * TILE_K;
    activation_t* to = dense + (blockIdx.y * TILE_ROWS + g) * width + tile * TILE_K + 8 * q;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        unsigned a[2][2][4];
        decode(a, words + BITS * c);
        const int group = c / GROUP_CHUNKS;
        float scale[4], offset[4] = {};
        load_scales(scale, record + CODE_BYTES + group * 64 + g * 8);
#if OFFSET
        load_offsets(offset, record, group, g);
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // row g + 8 i
            unsigned out[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) {  // columns 2 w, 2 w + 1 of the eight
                const unsigned pair = a[i / 2][w / 2][i % 2 + 2 * (w % 2)];
                const float low = fmaf(part_of(pair, 0), scale[i], offset[i]);
                const float high = fmaf(part_of(pair, 1), scale[i], offset[i]);
                out[w] = two(low, high);
            }
            *reinterpret_cast<uint4*>(to + 8 * i * width + 32 * c) = make_uint4(out[0], out[1], out[2], out[3]);
        }
    }
}
