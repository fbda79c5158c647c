// The products of a tile and what lies between them: scores, softmax, output. See paged_attention.cu.
#pragma once
#include "paged_digits.cuh"
#include "paged_tile.cuh"

#include "paged_softmax.cuh"

// q of a row, which a warp holds as rope_head does, to its place in shared memory; INT8: and its step.
__device__ __forceinline__ void put_query(
    activation_t* q_shared, float* steps, int row, unsigned low, unsigned high, int lane)
{
#if KV_INT8
    const float step = store_digits(q_shared + row * Q_PITCH, low, high, lane);
    if (lane == 0) {
        steps[row] = step;
    }
#else
    if (lane < WORDS) {
        store_word(q_shared + row * Q_PITCH + 2 * lane, low);
        store_word(q_shared + row * Q_PITCH + HEAD_DIM / 2 + 2 * lane, high);
    }
#endif
}

// Lane (g, q) gets the scores of rows g (and g + 8) at tokens 8t + 2q, +1. q_shared has Q_PITCH a row:
// activations, or for INT8 digits.
__device__ __forceinline__ void find_scores(
    float (&score)[GROUPS8][4], const Tile& tile, const activation_t* q_shared, int g, int q)
{
#if KV_INT8
#pragma unroll
    for (int h = 0; h < ROW_TILES; ++h) {
        int product[GROUPS8][4];
#pragma unroll
        for (int t = 0; t < GROUPS8; ++t) {
            product[t][0] = product[t][1] = product[t][2] = product[t][3] = 0;
        }
#pragma unroll
        for (int c = 0; c < 2 * KEY_PIECES; ++c) {  // eight columns of a lane's 16 at a time
            const activation_t* digits = q_shared + (8 * h + g) * Q_PITCH + c / 2 * KEY_SPAN + 16 * q;
            piece_t key[GROUPS8];
#pragma unroll
            for (int t = 0; t < GROUPS8; ++t) {
                const KeyPiece::type both = tile.key[t][c / 2];
                key[t] = c % 2 == 0 ? make_uint2(both.x, both.y) : make_uint2(both.z, both.w);
            }
            add_products(product, load_16(digits + 8 * (c % 2)), key);
        }
        scores_of(score, h, product, tile.scales);
    }
#else
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {
        score[t][0] = score[t][1] = score[t][2] = score[t][3] = 0.f;
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const uint4 a = load_16(q_shared + g * Q_PITCH + 32 * c + 8 * q);
        uint4 b = make_uint4(0, 0, 0, 0);
        if (ROW_TILES == 2) {
            b = load_16(q_shared + (ROWS_PADDED - 8 + g) * Q_PITCH + 32 * c + 8 * q);
        }
        const unsigned a0[4] = {a.x, b.x, a.y, b.y}, a1[4] = {a.z, b.z, a.w, b.w};
        piece_t key[GROUPS8];
#pragma unroll
        for (int t = 0; t < GROUPS8; ++t) {
            key[t] = tile.key[t][c];
        }
        add_scores(score, a0, a1, key);
    }
#endif
}

// A split begins.
__device__ __forceinline__ void clear(float (&acc)[ROW_TILES][PRODUCTS][4], Sums& sums)
{
#pragma unroll
    for (int h = 0; h < ROW_TILES; ++h) {
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            acc[h][i][0] = acc[h][i][1] = acc[h][i][2] = acc[h][i][3] = 0.f;
        }
    }
    clear(sums);
}

__device__ __forceinline__ void scale_rows(
    float (&acc)[ROW_TILES][PRODUCTS][4], const float (&rescale)[ROW_TILES], int q)
{
#pragma unroll
    for (int h = 0; h < ROW_TILES; ++h) {
        const float f0 = __shfl_sync(0xffffffffu, rescale[h], 8 * q);
        const float f1 = __shfl_sync(0xffffffffu, rescale[h], 8 * q + 4);
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            acc[h][i][0] = __fmul_rn(acc[h][i][0], f0);
            acc[h][i][1] = __fmul_rn(acc[h][i][1], f1);
            acc[h][i][2] = __fmul_rn(acc[h][i][2], f0);
            acc[h][i][3] = __fmul_rn(acc[h][i][3], f1);
        }
    }
}

// Transposed: row g of a piece's product i is the lane's column 2i, row g + 8 is 2i + 1.
__device__ __forceinline__ void add_values(
    float (&acc)[ROW_TILES][PRODUCTS][4], const Tile& tile, const unsigned (&weight)[ROW_TILES][GROUPS8])
{
#pragma unroll
    for (int s = 0; s < TILE / 16; ++s) {
#pragma unroll
        for (int b = 0; b < VALUE_PIECES; ++b) {
#pragma unroll
            for (int i = 0; i < VALUE_COLUMNS / 2; ++i) {
                unsigned a[4];
                token_pairs(tile.value[4 * s][b], tile.value[4 * s + 1][b], i, a[0], a[1]);
                token_pairs(tile.value[4 * s + 2][b], tile.value[4 * s + 3][b], i, a[2], a[3]);
#pragma unroll
                for (int h = 0; h < ROW_TILES; ++h) {
                    const unsigned p[2] = {weight[h][2 * s], weight[h][2 * s + 1]};
                    multiply(acc[h][VALUE_COLUMNS / 2 * b + i], a, p);
                }
            }
        }
    }
}

#if QUERIES > 1 && !KV_INT8
// Whether a value of the lane's is infinite or no number.
__device__ __forceinline__ bool has_odd_value(const Tile& tile)
{
    const unsigned above = ACTIVATION == ACTIVATION_BFLOAT16 ? 0x00800080u : 0x04000400u;
    unsigned carry = 0;  // of an exponent of ones into the place of the sign
#pragma unroll
    for (int t = 0; t < 2 * GROUPS8; ++t) {
#pragma unroll
        for (int b = 0; b < VALUE_PIECES; ++b) {
#pragma unroll
            for (int i = 0; i < VALUE_COLUMNS / 2; ++i) {
                carry |= (word_of(tile.value[t][b], i) & 0x7fff7fffu) + above;
            }
        }
    }
    return (carry & 0x80008000u) != 0;
}

// add_values where there is one and the queries do not see the same tokens: zero times it would not be zero.
// So each query gets a product of its own, in which tokens beyond its position are zero; the same bits.
__device__ __forceinline__ void add_values_apart(
    float (&acc)[ROW_TILES][PRODUCTS][4], const Tile& tile, const unsigned (&weight)[ROW_TILES][GROUPS8],
    int token, int length, int last, int q)
{
#pragma unroll
    for (int s = 0; s < TILE / 16; ++s) {
#pragma unroll
        for (int b = 0; b < VALUE_PIECES; ++b) {
#pragma unroll
            for (int i = 0; i < VALUE_COLUMNS / 2; ++i) {
                unsigned a[4];
                token_pairs(tile.value[4 * s][b], tile.value[4 * s + 1][b], i, a[0], a[1]);
                token_pairs(tile.value[4 * s + 2][b], tile.value[4 * s + 3][b], i, a[2], a[3]);
#pragma unroll 1
                for (int query = 0; query < QUERIES; ++query) {
                    const int seen = min(length + query, last) - token - 16 * s;  // the lane's last of these
                    const unsigned near = seen < 0 ? 0u : seen == 0 ? 0xffffu : 0xffffffffu;
                    const unsigned far = seen < 8 ? 0u : seen == 8 ? 0xffffu : 0xffffffffu;
                    const unsigned its[4] = {a[0] & near, a[1] & near, a[2] & far, a[3] & far};
#pragma unroll
                    for (int h = 0; h < ROW_TILES; ++h) {
                        const unsigned p[2] = {weight[h][2 * s], weight[h][2 * s + 1]};
                        float(&sum)[4] = acc[h][VALUE_COLUMNS / 2 * b + i];
                        float made[4] = {sum[0], sum[1], sum[2], sum[3]};
                        multiply(made, its, p);
                        const bool even = (8 * h + 2 * q) / GROUP == query;
                        const bool odd = (8 * h + 2 * q + 1) / GROUP == query;
                        sum[0] = even ? made[0] : sum[0];
                        sum[1] = odd ? made[1] : sum[1];
                        sum[2] = even ? made[2] : sum[2];
                        sum[3] = odd ? made[3] : sum[3];
                    }
                }
            }
        }
    }
}
#endif
