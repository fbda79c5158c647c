// RMSNorm: y = x * rsqrt(mean(x^2) + eps) * weight for every row, statistics in float32.
// registers: 48
//
// Layouts
//   x, y    activation_t [M, d]   y may be x
//   weight  activation_t [d]
// Alignment: with VECTOR 16 bytes and d a multiple of 8; without, that of an element.
//
// Launch: grid M, block THREADS; 8 KiB of shared memory. It may overlap the kernels ahead of it (ptx.cuh), as
// long as none of them writes weight.
//
// Order: thread t takes elements 8v … 8v + 7 for v = t, t + THREADS, … in ascending order; lanes are added in
// a butterfly, warps in ascending order. It depends on d alone: not on M, and not on VECTOR.

#include "ptx.cuh"

#define ACTIVATION_HALF 1
#define ACTIVATION_BFLOAT16 2
#ifndef ACTIVATION
#define ACTIVATION ACTIVATION_HALF
#endif
#ifndef VECTOR  // 1: 16-byte loads
#define VECTOR 1
#endif

#define THREADS 256
#define KEPT 2  // vectors of 8 that a thread keeps in registers between the two passes: d up to 4096

#if ACTIVATION == ACTIVATION_BFLOAT16
#include <cuda_bf16.h>
typedef __nv_bfloat16 activation_t;
__device__ __forceinline__ float to_float(activation_t value) { return __bfloat162float(value); }
__device__ __forceinline__ activation_t from_float(float value) { return __float2bfloat16_rn(value); }
#else
typedef half activation_t;
__device__ __forceinline__ float to_float(activation_t value) { return __half2float(value); }
__device__ __forceinline__ activation_t from_float(float value) { return __float2half_rn(value); }
#endif

struct Eight {
    uint4 words;
};

// Elements 8v … 8v + 7 of a row of d; zero beyond it.
__device__ __forceinline__ Eight load(const activation_t* row, int v, int d)
{
    Eight eight = {make_uint4(0, 0, 0, 0)};
#if VECTOR
    if (8 * v < d) {
        eight.words = *reinterpret_cast<const uint4*>(row + 8 * v);
    }
#else
    unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (8 * v + i < d) {
            uint16_t bits;
            memcpy(&bits, row + 8 * v + i, 2);
            words[i / 2] |= static_cast<unsigned>(bits) << (16 * (i % 2));
        }
    }
    eight.words = make_uint4(words[0], words[1], words[2], words[3]);
#endif
    return eight;
}

__device__ __forceinline__ float element(const Eight& eight, int i)
{
    const unsigned word = i < 2 ? eight.words.x : i < 4 ? eight.words.y : i < 6 ? eight.words.z : eight.words.w;
    const uint16_t bits = static_cast<uint16_t>(word >> (16 * (i % 2)));
    activation_t value;
    memcpy(&value, &bits, 2);
    return to_float(value);
}

__device__ __forceinline__ float add_squares(float sum, const Eight& x)
{
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum = __fmaf_rn(element(x, i), element(x, i), sum);
    }
    return sum;
}

__device__ __forceinline__ unsigned scaled(const Eight& x, const Eight& weight, float factor, int i)
{
    const activation_t y = from_float(__fmul_rn(__fmul_rn(element(x, i), factor), element(weight, i)));
    uint16_t bits;
    memcpy(&bits, &y, 2);
    return bits;
}

__device__ __forceinline__ void store(
    activation_t* row, int v, int d, const Eight& x, const Eight& weight, float factor)
{
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = scaled(x, weight, factor, 2 * i) | scaled(x, weight, factor, 2 * i + 1) << 16;
    }
#if VECTOR
    if (8 * v < d) {
        *reinterpret_cast<uint4*>(row + 8 * v) = make_uint4(words[0], words[1], words[2], words[3]);
    }
#else
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (8 * v + i < d) {
            const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
            memcpy(row + 8 * v + i, &bits, 2);
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm(
    const activation_t* x, const activation_t* __restrict__ weight, activation_t* y, int d, float eps)
{
    __shared__ float of_warp[THREADS / 32];
    LABKIT_ASSERT(blockDim.x == THREADS && (!VECTOR || d % 8 == 0));
    const activation_t* x_row = x + static_cast<size_t>(blockIdx.x) * d;
    activation_t* y_row = y + static_cast<size_t>(blockIdx.x) * d;

    grid_dependency_release();
#if VECTOR
    // The weight is on its way before the kernel ahead has finished; a plain load would be put off until after.
    __shared__ uint4 weight_ahead[KEPT * THREADS];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const int v = threadIdx.x + i * THREADS;
        cp_async_16(weight_ahead + v, weight + (8 * v < d ? 8 * v : 0), 8 * v < d);
    }
    cp_async_commit();
#endif
    grid_dependency_wait();
    Eight kept[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        kept[i] = load(x_row, threadIdx.x + i * THREADS, d);
    }
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        sum = add_squares(sum, kept[i]);
    }
    for (int v = threadIdx.x + KEPT * THREADS; 8 * v < d; v += THREADS) {
        sum = add_squares(sum, load(x_row, v, d));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
    }
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    float total = of_warp[0];
#pragma unroll
    for (int w = 1; w < THREADS / 32; ++w) {
        total = __fadd_rn(total, of_warp[w]);
    }
    const float factor = rsqrtf(__fadd_rn(total / d, eps));
#if VECTOR
    cp_async_wait<0>();  // a thread reads its own copies: no barrier
#endif
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const int v = threadIdx.x + i * THREADS;
#if VECTOR
        const Eight of_weight = {weight_ahead[v]};
#else
        const Eight of_weight = load(weight, v, d);
#endif
        store(y_row, v, d, kept[i], of_weight, factor);
    }
    for (int v = threadIdx.x + KEPT * THREADS; 8 * v < d; v += THREADS) {
        store(y_row, v, d, load(x_row, v, d), load(weight, v, d), factor);
    }
}
