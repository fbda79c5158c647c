// The order in which attention adds up a row's tokens, the same for every kernel: what goes where depends on
// a token's position alone. See paged_attention.cu.
#pragma once
#include "paged_head.cuh"

#ifndef GROUP  // query heads a key/value head
#define GROUP 8
#endif

// A turn is a tile of TILE tokens for each of WARPS. INT8 pieces are half as long: more warps with shorter
// tiles take half the registers a warp.
#ifndef WARPS
#define WARPS (KV_INT8 ? 8 : 4)
#endif
#ifndef TILE
#define TILE (KV_INT8 ? 16 : 32)
#endif
#define TURN (WARPS * TILE)
#define FINE_TURNS 16
#define COARSE 4
#define CHUNKS ((HEAD_DIM + 31) / 32)  // of 32 columns: a lane's piece of a key
#define GROUPS8 (TILE / 8)             // of 8 tokens

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

// Scores of a tile, of 32 columns more: two k-steps of q (a0, a1) against the pieces of a lane's keys.
__device__ __forceinline__ void add_scores(
    float (&score)[GROUPS8][4], const unsigned (&a0)[4], const unsigned (&a1)[4],
    const piece_t (&key)[GROUPS8])
{
    uint4 k[GROUPS8];
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {  // products that wait for each other stand apart
        k[t] = columns_of(key[t]);
        const unsigned b0[2] = {k[t].x, k[t].y};
        multiply(score[t], a0, b0);
    }
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {
        const unsigned b1[2] = {k[t].z, k[t].w};
        multiply(score[t], a1, b1);
    }
}

// INT8: scores of codes become scores.
__device__ __forceinline__ void scale_scores(float (&score)[GROUPS8][4], const TileScales& scales)
{
#if KV_INT8
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {
        score[t][0] = __fmul_rn(score[t][0], scales.key[t].x);
        score[t][1] = __fmul_rn(score[t][1], scales.key[t].y);
        score[t][2] = __fmul_rn(score[t][2], scales.key[t].x);
        score[t][3] = __fmul_rn(score[t][3], scales.key[t].y);
    }
#endif
}

// What a part (a warp of a split, a split) adds to a row's total so far, of largest score `most`. One without
// tokens has the sum zero and changes nothing.
struct Factors {
    float total, part;
};

__device__ __forceinline__ Factors add_sum(float& most, float& sum, float of_part, float weight)
{
    const float both = fmaxf(most, of_part), base = both == MINUS_INFINITY ? 0.f : both;
    Factors by = {exp2_approx(__fadd_rn(most, -base)), exp2_approx(__fadd_rn(of_part, -base))};
    const bool none = weight == 0.f;
    by.total = none ? 1.f : by.total;
    by.part = none ? 0.f : by.part;
    sum = __fmaf_rn(weight, by.part, __fmul_rn(sum, by.total));
    most = none ? most : both;
    return by;
}

__device__ __forceinline__ void add_part(float4& total, const float4& value, const Factors& by)
{
    total.x = __fmaf_rn(value.x, by.part, __fmul_rn(total.x, by.total));
    total.y = __fmaf_rn(value.y, by.part, __fmul_rn(total.y, by.total));
    total.z = __fmaf_rn(value.z, by.part, __fmul_rn(total.z, by.total));
    total.w = __fmaf_rn(value.w, by.part, __fmul_rn(total.w, by.total));
}
