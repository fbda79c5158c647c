// The second pass of the tensor-core family: y = the planes of partial sums in ascending order, then the epilogue.
// A thread adds up two rows of a row tile, 16 apart: two outputs, or with PAIRED gate and up of one.
// registers: 40
#include "tensor_core.cuh"

#define THREADS 128
#define MAX_SLICES 8  // rule.MAX_SLICES

// All loads go out together: one after the other, each would cost the latency of a trip to the L2 cache.
__device__ __forceinline__ void load_slices(float (&values)[MAX_SLICES], const float* cell, size_t plane, int slices)
{
#pragma unroll
    for (int slice = 0; slice < MAX_SLICES; ++slice) {
        values[slice] = slice < slices ? cell[slice * plane] : 0.f;
    }
}

__device__ __forceinline__ float sum_of_slices(const float (&values)[MAX_SLICES], int slices)
{
    float sum = values[0];
#pragma unroll
    for (int slice = 1; slice < MAX_SLICES; ++slice) {
        sum = slice < slices ? __fadd_rn(sum, values[slice]) : sum;
    }
    return sum;
}

// part [slices][M][row_tiles · 32]; grid.y is the row of x.
extern "C" __global__ void __launch_bounds__(THREADS) tensor_core_reduce(
    const float* part, const activation_t* __restrict__ bias, const activation_t* residual, activation_t* out, int M,
    int N, int row_tiles, int slices)
{
    LABKIT_ASSERT(slices <= MAX_SLICES && gridDim.y == M);
    grid_dependency_release();
    const int pair = blockIdx.x * THREADS + threadIdx.x, m = blockIdx.y;
    const int row_tile = pair / (TILE_ROWS / 2), row = pair % (TILE_ROWS / 2);
    grid_dependency_wait();
    if (row_tile >= row_tiles) {
        return;
    }
    const size_t plane = (size_t)M * row_tiles * TILE_ROWS;
    const float* cell = part + ((size_t)m * row_tiles + row_tile) * TILE_ROWS + row;
    const Output y = {bias, residual, out, M, N};
    float low[MAX_SLICES], high[MAX_SLICES], bias_of[2], added[2];
    load_slices(low, cell, plane, slices);
    load_slices(high, cell + 16, plane, slices);
    load_extras(bias_of, added, y, row_tile, row, m);
    const float sum[2] = {sum_of_slices(low, slices), sum_of_slices(high, slices)};
    finish(y, bias_of, added, row_tile, row, m, sum);
}
