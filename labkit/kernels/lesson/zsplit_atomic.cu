// LESSON ONLY (chapter 04): never registered, never dispatched. The house rule is: no floating-point atomics.
// z-split GEMM whose slices are added with atomicAdd, in the order in which blocks happen to finish: right
// within rounding, and other bits from run to run. zsplit.cu does the same sums in a fixed order.
// registers: 40
//
//   codes_t      int8  [Kp, Npad]   as in zsplit.cu
//   scales_t     float [Kp/32, Npad]
//   x            float [M, K]
//   out          float [M, N]       zero before the launch
//   slice_order  int   [nsplit]     block z takes slice slice_order[z]; null: slice z. A permutation stands
//                                   for the order in which a GPU would run the blocks; launch one z at a
//                                   time (grid z = 1, slice_order + z) to have exactly that order.
//
// grid (ceil(N/256), ceil(M/4), nsplit), block (64, 4); no shared memory. A thread has one row and four
// columns.
#include "types.cuh"

#define GROUP 32
#define THREADS_N 64
#define THREADS_M 4
#define COLUMNS 4

extern "C" __global__ void __launch_bounds__(THREADS_N * THREADS_M, 6) zsplit_gemm_atomic(
    const int8_t* __restrict__ codes_t, const float* __restrict__ scales_t, const float* __restrict__ x,
    float* __restrict__ out, const int* __restrict__ slice_order, int M, int N, int Npad, int K, int nsplit)
{
    const int n0 = (blockIdx.x * THREADS_N + threadIdx.x) * COLUMNS;
    const int m = blockIdx.y * THREADS_M + threadIdx.y;
    if (n0 >= N || m >= M) {
        return;
    }
    const int slice = slice_order == nullptr ? blockIdx.z : slice_order[blockIdx.z];
    const int ngroups = (K + GROUP - 1) / GROUP;
    const int base = ngroups / nsplit;
    const int remainder = ngroups % nsplit;
    const int first = slice * base + (slice < remainder ? slice : remainder);
    const int last = first + base + (slice < remainder ? 1 : 0);
    const float* x_row = x + static_cast<size_t>(m) * K;

    float total[COLUMNS] = {0.f, 0.f, 0.f, 0.f};
    for (int group = first; group < last; ++group) {
        const int k0 = group * GROUP;
        const int count = min(GROUP, K - k0);
        const int8_t* codes = codes_t + static_cast<size_t>(k0) * Npad + n0;
        float dot[COLUMNS] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
        for (int i = 0; i < count; ++i) {
            const float value = x_row[k0 + i];
            const char4 code = *reinterpret_cast<const char4*>(codes + static_cast<size_t>(i) * Npad);
            dot[0] = __fmaf_rn(static_cast<float>(code.x), value, dot[0]);
            dot[1] = __fmaf_rn(static_cast<float>(code.y), value, dot[1]);
            dot[2] = __fmaf_rn(static_cast<float>(code.z), value, dot[2]);
            dot[3] = __fmaf_rn(static_cast<float>(code.w), value, dot[3]);
        }
        const float* scales = scales_t + static_cast<size_t>(group) * Npad + n0;
        const float4 scale = *reinterpret_cast<const float4*>(scales);
        total[0] = __fmaf_rn(dot[0], scale.x, total[0]);
        total[1] = __fmaf_rn(dot[1], scale.y, total[1]);
        total[2] = __fmaf_rn(dot[2], scale.z, total[2]);
        total[3] = __fmaf_rn(dot[3], scale.w, total[3]);
    }
    float* result = out + static_cast<size_t>(m) * N + n0;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        if (n0 + j < N) {
            atomicAdd(result + j, total[j]);
        }
    }
}
