// INT8: q as two digits of eight bits, so that a key's codes meet it as they are and a score is an exact sum
// of integers: no code is widened, and no order of adding changes a bit.
//
// q = step (256 high + low), both digits signed, step a power of two: the row's largest magnitude is below
// 2^14 steps. Exact for float16 within a factor of 8 of that, for bfloat16 of 64; else within half a step.
// Of columns 4i to 4i + 3 of a row, eight bytes: the high digits, then the low ones. A product of 16 rows
// has the high digits of eight rows and the low ones of the same.
#pragma once
#include "paged_order.cuh"

#if KV_INT8
// Exponent field of a row's step, from the bits of its largest magnitude; 255 where q is no number. A row
// below 2^-63 has fewer bits in its digits, down to none: its step stays far from where a product of it would
// be flushed to zero.
__device__ __forceinline__ int digit_exponent(unsigned largest)
{
    const int exponent = static_cast<int>(largest >> 23);
    return exponent == 255 ? 255 : max(exponent, 64) - 13;
}

__device__ __forceinline__ float step_of(int exponent)
{
    return __uint_as_float(exponent == 255 ? 0x7fc00000u : static_cast<unsigned>(exponent) << 23);
}

__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Digits of four columns.
__device__ __forceinline__ uint2 digits_of(float2 first, float2 second, int exponent)
{
    const bool odd = exponent == 255;
    const float inverse = __uint_as_float(odd ? 0u : static_cast<unsigned>(254 - exponent) << 23);
    const float x[4] = {first.x, first.y, second.x, second.y};
    uint2 digits = make_uint2(0u, 0u);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int steps = odd ? 0 : __float2int_rn(__fmul_rn(x[i], inverse));
        const int low = static_cast<signed char>(steps & 0xff), high = (steps - low) / 256;
        digits.x |= (static_cast<unsigned>(high) & 0xffu) << 8 * i;
        digits.y |= (static_cast<unsigned>(low) & 0xffu) << 8 * i;
    }
    return digits;
}

// Digits of a head that a warp holds as rope_head does, written to a row of shared memory; its step.
__device__ __forceinline__ float store_digits(void* row, unsigned low_word, unsigned high_word, int lane)
{
    const float2 low = to_floats(pair_of(low_word)), high = to_floats(pair_of(high_word));
    unsigned largest = max(max(magnitude(low.x), magnitude(low.y)), max(magnitude(high.x), magnitude(high.y)));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    const int exponent = digit_exponent(largest);
    const uint2 digits = digits_of(low, high, exponent);
    if (lane < WORDS) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = half * (HEAD_DIM / 2) + 2 * lane;
            uint16_t* to = static_cast<uint16_t*>(row) + column / 4 * 4 + column % 4 / 2;
            to[0] = static_cast<uint16_t>(digits.x >> 16 * half);
            to[2] = static_cast<uint16_t>(digits.y >> 16 * half);
        }
    }
    return step_of(exponent);
}

// Adds the products of 32 more columns: digits of a row's columns 8q to 8q + 7 against the pieces of a
// lane's keys.
__device__ __forceinline__ void add_products(
    int (&product)[GROUPS8][4], const uint4& digits, const piece_t (&key)[GROUPS8])
{
    const unsigned a[4] = {digits.x, digits.y, digits.z, digits.w};
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {
        const unsigned b[2] = {key[t].x, key[t].y};
        mma_m16n8k32_s8(product[t], a, b, product[t]);
    }
}

// Scores of row tile h, in steps of q, from its products.
__device__ __forceinline__ void scores_of(
    float (&score)[GROUPS8][4], int h, const int (&product)[GROUPS8][4], const TileScales& scales)
{
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int both = 256 * product[t][e] + product[t][2 + e];
            const float of_key = e == 0 ? scales.key[t].x : scales.key[t].y;
            score[t][2 * h + e] = __fmul_rn(__int2float_rn(both), of_key);
        }
    }
}
#endif
