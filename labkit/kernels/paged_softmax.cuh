// Softmax of a tile's scores, a warp at work; ROW_TILES, tiles of 8 rows that it has, comes from the
// includer.
#pragma once
#include "paged_order.cuh"

// What a lane knows of its rows g (and g + 8) in the split: the largest score, its share of the sum of the
// probabilities, and for INT8 the power of two that the output is a multiple of.
struct Sums {
    float largest[ROW_TILES], sum[ROW_TILES];
#if KV_INT8
    float unit[ROW_TILES];
#endif
};

__device__ __forceinline__ void clear(Sums& sums)
{
#pragma unroll
    for (int h = 0; h < ROW_TILES; ++h) {
        sums.largest[h] = MINUS_INFINITY;
        sums.sum[h] = 0.f;
#if KV_INT8
        sums.unit[h] = 0x1p-100f;
#endif
    }
}

// Probabilities as the output's product wants them; rescale is what the rows' sums so far are multiplied by,
// and the result says whether any of it is not one. `token` is a lane's first. Without MASKED no token is
// beyond its row's limit, or its score is minus infinity already.
template <bool MASKED = true>
__device__ __forceinline__ bool find_weights(
    unsigned (&weight)[ROW_TILES][GROUPS8], float (&rescale)[ROW_TILES], Sums& sums,
    float (&score)[GROUPS8][4], const TileScales& scales, int token, const int (&limit)[ROW_TILES],
    float scale_log2)
{
    bool moved = false;
#pragma unroll
    for (int h = 0; h < ROW_TILES; ++h) {
        float top = MINUS_INFINITY;
#if KV_INT8
        float scale_top = 0.f;
#endif
#pragma unroll
        for (int t = 0; t < GROUPS8; ++t) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& s = score[t][2 * h + e];
                const bool seen = !MASKED || token + 8 * t + e <= limit[h];
                s = seen ? __fmul_rn(s, scale_log2) : MINUS_INFINITY;
                top = fmaxf(top, s);
#if KV_INT8
                const float of_value = e == 0 ? scales.value[t].x : scales.value[t].y;
                scale_top = fmaxf(scale_top, seen ? of_value : 0.f);
#endif
            }
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top = fmaxf(top, sums.largest[h]);
        const float base = top == MINUS_INFINITY ? 0.f : top;
        const float factor = exp2_approx(__fadd_rn(sums.largest[h], -base));
        rescale[h] = factor;
        moved = moved || top != sums.largest[h];
        sums.largest[h] = top;
#if KV_INT8
        scale_top = fmaxf(scale_top, __shfl_xor_sync(0xffffffffu, scale_top, 1));
        scale_top = fmaxf(scale_top, __shfl_xor_sync(0xffffffffu, scale_top, 2));
        // The next power of two, of a normal number below 2^100.
        const unsigned above = __float_as_uint(fminf(scale_top, 0x1p100f)) + 0x007fffffu;
        const float wider = fmaxf(sums.unit[h], __uint_as_float(above & 0x7f800000u));
        const float inverse = __uint_as_float(0x7f000000u - __float_as_uint(wider));  // exact
        rescale[h] = __fmul_rn(factor, __fmul_rn(sums.unit[h], inverse));
        moved = moved || wider != sums.unit[h];
        sums.unit[h] = wider;
#endif
        float added = 0.f;
#pragma unroll
        for (int t = 0; t < GROUPS8; ++t) {
            const float a = exp2_approx(__fadd_rn(score[t][2 * h], -base));
            const float b = exp2_approx(__fadd_rn(score[t][2 * h + 1], -base));
#if KV_INT8
            // Zero times a scale that was never written must stay zero.
            const float va = token + 8 * t <= limit[h] ? __fmul_rn(scales.value[t].x, inverse) : 0.f;
            const float vb = token + 8 * t + 1 <= limit[h] ? __fmul_rn(scales.value[t].y, inverse) : 0.f;
            weight[h][t] = bits_of(from_floats(__fmul_rn(a, va), __fmul_rn(b, vb)));
            added = __fadd_rn(added, __fadd_rn(a, b));
#else
            const activation2_t p = from_floats(a, b);
            weight[h][t] = bits_of(p);
            const float2 rounded = to_floats(p);
            added = __fadd_rn(added, __fadd_rn(rounded.x, rounded.y));
#endif
        }
        sums.sum[h] = __fmaf_rn(sums.sum[h], factor, added);
    }
    return moved;
}
