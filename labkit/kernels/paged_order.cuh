// The order in which attention adds up a row's tokens, the same for every kernel: what goes where depends on
// a token's position alone. See paged_attention.cu.
#pragma once
#include "paged_head.cuh"

#ifndef GROUP  // query heads a key/value head
#define GROUP 8
#endif

// A turn is a tile of TILE tokens for each of WARPS.
#ifndef WARPS
#define WARPS 4
#endif
#ifndef TILE
#define TILE 32
#endif
#define TURN (WARPS * TILE)
#define FINE_TURNS 16
#define COARSE 4
#define CHUNKS ((HEAD_DIM + 31) / 32)  // of 32 columns
#define GROUPS8 (TILE / 8)             // of 8 tokens

// What a row's exponents count from before it has seen a token: below every score, and a number, so that the
// difference of two is none either.
#define NOTHING (-0x1p127f)

__device__ __forceinline__ int split_of(int turn)
{
    return turn < FINE_TURNS ? turn : FINE_TURNS + (turn - FINE_TURNS) / COARSE;
}

// Scales of a lane's tokens 8t + 2q, +1 of a tile.
struct TileScales {
#if KV_INT8
    float2 key[GROUPS8], value[GROUPS8];
#endif
};

#if !KV_INT8
// Scores of a tile, of 32 columns more: two k-steps of q (a0, a1) against the pieces of a lane's keys.
__device__ __forceinline__ void add_scores(
    float (&score)[GROUPS8][4], const unsigned (&a0)[4], const unsigned (&a1)[4],
    const piece_t (&key)[GROUPS8])
{
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {  // products that wait for each other stand apart
        const unsigned b0[2] = {key[t].x, key[t].y};
        multiply(score[t], a0, b0);
    }
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {
        const unsigned b1[2] = {key[t].z, key[t].w};
        multiply(score[t], a1, b1);
    }
}
#endif

// What a part (a warp of a split, a split) adds to a row's total so far, `most` being what the total's
// exponents count from, `of_part` the part's. One without tokens has the sum zero, counts from NOTHING and
// changes nothing.
struct Factors {
    float total, part;
};

__device__ __forceinline__ Factors add_sum(float& most, float& sum, float of_part, float weight)
{
    const float both = fmaxf(most, of_part);
    const Factors by = {exp2_approx(__fadd_rn(most, -both)), exp2_approx(__fadd_rn(of_part, -both))};
    sum = __fmaf_rn(weight, by.part, __fmul_rn(sum, by.total));
    most = both;
    return by;
}

__device__ __forceinline__ void add_part(float4& total, const float4& value, const Factors& by)
{
    total.x = __fmaf_rn(value.x, by.part, __fmul_rn(total.x, by.total));
    total.y = __fmaf_rn(value.y, by.part, __fmul_rn(total.y, by.total));
    total.z = __fmaf_rn(value.z, by.part, __fmul_rn(total.z, by.total));
    total.w = __fmaf_rn(value.w, by.part, __fmul_rn(total.w, by.total));
}
