// Softmax of a tile's scores, a warp at work; ROW_TILES, tiles of 8 rows that it has, comes from the
// includer.
#pragma once
#include "paged_order.cuh"

// How far beyond what the exponents count from a score may be: a probability is at most two to this.
#define SLACK 8.f

// What a lane knows of its rows g (and g + 8) in the split: the score that their exponents count from, near
// the largest; its share of the sum of the probabilities; and for INT8 the power of two that the output is a
// multiple of.
struct Sums {
    float largest[ROW_TILES], sum[ROW_TILES];
#if KV_INT8
    float unit[ROW_TILES];
#endif
};

// A row's, of a whole warp, to be read at once.
struct alignas(KV_INT8 ? 16 : 8) WarpSums {
    float largest, sum;
#if KV_INT8
    float unit, unused;
#endif
};

__device__ __forceinline__ WarpSums warp_sums_of(const Sums& sums, int h, float all)
{
#if KV_INT8
    return {sums.largest[h], all, sums.unit[h], 0.f};
#else
    return {sums.largest[h], all};
#endif
}

__device__ __forceinline__ void clear(Sums& sums)
{
#pragma unroll
    for (int h = 0; h < ROW_TILES; ++h) {
        sums.largest[h] = NOTHING;
        sums.sum[h] = 0.f;
#if KV_INT8
        sums.unit[h] = 0x1p-100f;
#endif
    }
}

// Probabilities as the output's product wants them; rescale is what the rows' sums so far are multiplied by,
// and the result says whether any of it is not one. `scale` makes a score's unit one of base 2; `token` is a
// lane's first; unless the tile is `whole`, some are beyond a row's limit. A row counts its exponents anew
// only when a score is SLACK beyond: what a row does depends on it alone.
__device__ __forceinline__ bool find_weights(
    unsigned (&weight)[ROW_TILES][GROUPS8], float (&rescale)[ROW_TILES], Sums& sums,
    float (&score)[GROUPS8][4], const TileScales& scales, int token, bool whole,
    const int (&limit)[ROW_TILES], const float (&scale)[ROW_TILES])
{
    bool moved = false;
#if KV_INT8
    float2 of_value[ROW_TILES][GROUPS8];
#pragma unroll
    for (int i = 0; i < ROW_TILES * GROUPS8; ++i) {
        of_value[i / GROUPS8][i % GROUPS8] = scales.value[i % GROUPS8];
    }
#endif
    if (!whole) {
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES * GROUPS8; ++i) {
            const int t = i / 2 / ROW_TILES, h = i / 2 % ROW_TILES, e = i % 2;
            if (token + 8 * t + e > limit[h]) {
                score[t][2 * h + e] = MINUS_INFINITY;
#if KV_INT8  // zero times a scale that was never written must stay zero
                (e == 0 ? of_value[h][t].x : of_value[h][t].y) = 0.f;
#endif
            }
        }
    }
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
                s = __fmul_rn(s, scale[h]);
                top = fmaxf(top, s);
#if KV_INT8
                scale_top = fmaxf(scale_top, e == 0 ? of_value[h][t].x : of_value[h][t].y);
#endif
            }
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const bool grows = top > __fadd_rn(sums.largest[h], SLACK);
        const float base = grows ? top : sums.largest[h];
        const float factor = exp2_approx(__fadd_rn(sums.largest[h], -base));
        rescale[h] = factor;
        moved = moved || grows;
        sums.largest[h] = base;
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
            const float va = __fmul_rn(of_value[h][t].x, inverse), vb = __fmul_rn(of_value[h][t].y, inverse);
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
