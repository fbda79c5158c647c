// Codes, scales and offsets of the W4 and W3 storage formats, and 8 activations at a time.
//
// One weight is code * scale (+ offset); a scale (and an offset) belongs to a group of columns of one row.
//   OFFSET       0: no offset; 1: offset is half; 2: offset is float
//   VECTOR_X     1: every row of x starts at a multiple of 16 bytes and K % 8 == 0, so that eight
//                activations are one 16-byte load; 0: any K and any address, two bytes at a time
// group_shift: log2 of the columns of a group, or 31 when one group is the whole row: column >> 31 is 0.
#pragma once
#include <cuda_fp16.h>
#include "types.cuh"

#ifndef OFFSET
#define OFFSET 0
#endif
#ifndef VECTOR_X
#define VECTOR_X 1
#endif

#if OFFSET == 2
typedef float offset_t;
#else
typedef half offset_t;
#endif

__device__ __forceinline__ int groups_of_row(int Kp, int group_shift)
{
    return ((Kp - 1) >> group_shift) + 1;
}

// Eight W4 codes lie in a word, four bits each, lowest column lowest. Two shifts bring the sign along.
__device__ __forceinline__ int code_w4(uint32_t word, int index)
{
    return (int)(word << (28 - 4 * index)) >> 28;
}

// Eight W3 codes lie in three bytes, three bits each, lowest column lowest; codes 2 and 5 cross a byte.
__device__ __forceinline__ int code_w3(uint32_t triple, int index)
{
    return (int)(triple << (29 - 3 * index)) >> 29;
}

__device__ __forceinline__ uint32_t load_triple(const uint8_t* bytes)
{
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16;
}

__device__ __forceinline__ float load_offset(const offset_t* offset, size_t index)
{
#if OFFSET == 2
    return offset[index];
#elif OFFSET == 1
    return __half2float(offset[index]);
#else
    return 0.0f;
#endif
}

// code * scale is exact in float (4 by 11 bits), so this rounds once, as the torch reference does.
__device__ __forceinline__ float dequantize(int code, float scale, float offset)
{
    return fmaf((float)code, scale, offset);
}

// Columns k .. k+7 of a row of x as floats; columns from K on are the padding of the weight: zero.
__device__ __forceinline__ void load_x8(float values[8], const half* __restrict__ x_row, int k, int K)
{
#if VECTOR_X
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (k < K) {
        eight = *reinterpret_cast<const uint4*>(x_row + k);
    }
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = __half2float(__ushort_as_half((unsigned short)(words[i] & 0xffff)));
        values[2 * i + 1] = __half2float(__ushort_as_half((unsigned short)(words[i] >> 16)));
    }
#else
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        values[i] = k + i < K ? __half2float(x_row[k + i]) : 0.0f;
    }
#endif
}

// sum += scale * (codes . x) + offset * (sum of x) for eight columns of one group, in a fixed order.
__device__ __forceinline__ float add_eight(float sum, const float codes[8], const float x[8], float scale,
                                           float offset)
{
    float dot = codes[0] * x[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) {
        dot = fmaf(codes[i], x[i], dot);
    }
    sum = fmaf(dot, scale, sum);
#if OFFSET
    float total = x[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) {
        total += x[i];
    }
    sum = fmaf(total, offset, sum);
#endif
    return sum;
}

// Sum over the 32 lanes of a warp, always in the same order; every lane gets it.
__device__ __forceinline__ float warp_sum(float value)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}
