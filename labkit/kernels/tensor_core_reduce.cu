// The second pass of the tensor-core family: y = the planes of partial sums in ascending order, then the epilogue.
// A thread adds up two rows of a row tile, 16 apart: two outputs, or with PAIRED gate and up of one.
// registers: 48
#include "tensor_core.cuh"

#define THREADS 128

__device__ __forceinline__ float sum_of_slices(const float* cell, size_t plane, int slices)
{
    float sum = cell[0];
#pragma unroll 8
    for (int slice = 1; slice < slices; ++slice) {
        sum = __fadd_rn(sum, cell[slice * plane]);
    }
    return sum;
}

// part [slices][M][row_tiles · 32]
extern "C" __global__ void __launch_bounds__(THREADS) tensor_core_reduce(
    const float* part, const activation_t* __restrict__ bias, const activation_t* residual, activation_t* out, int M,
    int N, int row_tiles, int slices)
{
    grid_dependency_release();
    grid_dependency_wait();
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long pairs = (long long)row_tiles * (TILE_ROWS / 2);
    if (index >= M * pairs) {
        return;
    }
    const int m = index / pairs, row_tile = index % pairs / (TILE_ROWS / 2), row = index % (TILE_ROWS / 2);
    const size_t plane = (size_t)M * row_tiles * TILE_ROWS;
    const float* cell = part + ((size_t)m * row_tiles + row_tile) * TILE_ROWS + row;
    const Output y = {bias, residual, out, M, N};
    float bias_of[2], added[2];
    load_extras(bias_of, added, y, row_tile, row, m);
    const float sum[2] = {sum_of_slices(cell, plane, slices), sum_of_slices(cell + 16, plane, slices)};
    finish(y, bias_of, added, row_tile, row, m, sum);
}
