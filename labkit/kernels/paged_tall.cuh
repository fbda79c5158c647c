// A block's tall tile in paged_prefill.cu: which it is, its scores, its values, what becomes of them.
#pragma once
#include "paged_ring.cuh"
#define ROW_TILES 2
#include "paged_digits.cuh"
#include "paged_softmax.cuh"

#define RUNNING (16 * 32 * VALUE_UNITS)  // floats of a warp's running total

// Of a warp's 16 rows in a step: how a tile's sum so far is scaled, and how a warp of the split joins it.
struct RowFactors {
    float rescale[TILES][16], total[TILES][16], part[TILES][16];
};

// Row and first query of the block's tile; false where there is none.
__device__ __forceinline__ bool find_tile(
    const int* query_starts, int rows, int least, int tile, int& row, int& of_row)
{
    const int lane = threadIdx.x % 32;
    for (int first = 0; first < rows; first += 32) {
        const int mine = min(first + lane, rows - 1);
        const int count = first + lane < rows ? query_starts[mine + 1] - query_starts[mine] : 0;
        const int tiles = count < least ? 0 : (count + QUERIES - 1) / QUERIES;
        int behind = tiles;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, behind, distance);
            behind += lane >= distance ? other : 0;
        }
        const unsigned found = __ballot_sync(0xffffffffu, behind > tile);
        const int at = found ? __ffs(found) - 1 : 31;
        const int before = __shfl_sync(0xffffffffu, behind - tiles, at);
        const int all = __shfl_sync(0xffffffffu, behind, 31);
        if (found) {
            row = first + at;
            of_row = (tile - before) * QUERIES;
            return true;
        }
        tile -= all;
    }
    return false;
}

// Whether a value at positions begin to before end is infinite or no number.
__device__ __forceinline__ bool has_odd_value(const Cache& cache, int begin, int end)
{
    bool odd = false;
#if !KV_INT8  // codes are numbers; the scale of a token that a query does not see is not used
    const unsigned above = ACTIVATION == ACTIVATION_BFLOAT16 ? 0x00800080u : 0x04000400u;
    for (int i = threadIdx.x; i < (end - begin) * (HEAD_DIM / 8); i += THREADS) {
        const int token = begin + i / (HEAD_DIM / 8);
        const size_t block = static_cast<unsigned>(cache.table[token / BLOCK_SIZE]);
        const uint4 piece = load_16(
            cache.values + (block * cache.stride + token % BLOCK_SIZE) * HEAD_DIM + i % (HEAD_DIM / 8) * 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // an exponent of ones carries into the place of the sign
            odd = odd || (((word_of(piece, j) & 0x7fff7fffu) + above) & 0x80008000u) != 0;
        }
    }
#endif
    return __syncthreads_or(odd);
}

// q of a lane's rows g and g + 8, eight columns of every 32, as find_scores wants it; INT8: `scale` is made
// each row's.
__device__ __forceinline__ void put_fragments(
    uint4* fragments, float (&scale)[2], const uint4 (&of_rows)[CHUNKS][2])
{
#if KV_INT8
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < 4 * CHUNKS; ++i) {
            const float2 pair = to_floats(pair_of(word_of(of_rows[i / 4][h], i % 4)));
            largest = max(largest, max(magnitude(pair.x), magnitude(pair.y)));
        }
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const int exponent = digit_exponent(largest);
        scale[h] = __fmul_rn(step_of(exponent), scale[h]);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const uint4 word = of_rows[c][h];
            const uint2 first = digits_of(to_floats(pair_of(word.x)), to_floats(pair_of(word.y)), exponent);
            const uint2 second = digits_of(to_floats(pair_of(word.z)), to_floats(pair_of(word.w)), exponent);
            fragments[(2 * c + h) * 32] = make_uint4(first.x, first.y, second.x, second.y);
        }
    }
#else
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const uint4 a = of_rows[c][0], b = of_rows[c][1];
        fragments[2 * c * 32] = make_uint4(a.x, b.x, a.y, b.y);
        fragments[(2 * c + 1) * 32] = make_uint4(a.z, b.z, a.w, b.w);
    }
#endif
}

// Lane (g, q) gets the scores of rows g and g + 8 at tokens 8t + 2q, +1 of a tile; `keys` is token g, column
// 8q. `query`, of 32 columns each: two k-steps of both rows, or for INT8 the digits of either.
__device__ __forceinline__ void find_scores(
    float (&score)[GROUPS8][4], const stored_t* keys, const TileScales& scales,
    const uint4 (&query)[CHUNKS][2], int q)
{
#if KV_INT8
    int product[2][GROUPS8][4];
#endif
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#if KV_INT8
            product[0][t][i] = product[1][t][i] = 0;
#else
            score[t][i] = 0.f;
#endif
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        // Columns beyond the head's meet a zero of q.
        const int column = HEAD_DIM % 32 == 0 || 32 * c + 8 * q < HEAD_DIM ? 32 * c : 0;
        piece_t key[GROUPS8];
#pragma unroll
        for (int t = 0; t < GROUPS8; ++t) {
            key[t] = *reinterpret_cast<const piece_t*>(keys + 8 * t * KEY_PITCH + column);
        }
        const uint4 a = query[c][0], b = query[c][1];
#if KV_INT8
        add_products(product[0], a, key);
        add_products(product[1], b, key);
#else
        const unsigned a0[4] = {a.x, a.y, a.z, a.w}, a1[4] = {b.x, b.y, b.z, b.w};
        add_scores(score, a0, a1, key);
#endif
    }
#if KV_INT8
    scores_of(score, 0, product[0], scales);
    scores_of(score, 1, product[1], scales);
#endif
}

// A tile's scores become weights, of a lane's rows g and g + 8; `sums` goes on. Whether what these rows have
// summed up so far moves by `rescale`. `keys` as for find_scores; the tile begins at token `first`.
__device__ __forceinline__ bool weigh_tile(
    unsigned (&weight)[2][TILES * GROUPS8], int tile, float (&rescale)[2], Sums& sums, const stored_t* keys,
    const float* scales_of_keys, const uint4 (&query)[CHUNKS][2], int first, int seen_by_all,
    const int (&limit)[2], const float (&scale)[2], int q)
{
    TileScales scales;
    float score[GROUPS8][4];
#if KV_INT8
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {
        scales.key[t] = *reinterpret_cast<const float2*>(scales_of_keys + 8 * t + 2 * q);
        scales.value[t] = *reinterpret_cast<const float2*>(scales_of_keys + 32 + 8 * t + 2 * q);
    }
#endif
    find_scores(score, keys, scales, query, q);
    const bool whole = first + TILE - 1 <= seen_by_all;
    unsigned of_tile[2][GROUPS8];
    const bool moved =
        find_weights(of_tile, rescale, sums, score, scales, first + 2 * q, whole, limit, scale);
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {
        weight[0][tile * GROUPS8 + t] = of_tile[0][t];
        weight[1][tile * GROUPS8 + t] = of_tile[1][t];
    }
    return moved;
}

// Column of a lane's product i (0, 1) in a unit of values: of row g and of row g + 8 of the transposed
// output.
__device__ __forceinline__ int column_of(int i, int upper, int g)
{
    return KV_INT8 ? 4 * g + 2 * i + upper : 16 * i + 8 * upper + g;
}

// A warp of the split is done: how it joins the others goes to `factors`. Whether their sum is scaled by
// that.
__device__ __forceinline__ bool join_warp(
    RowFactors& factors, int tile, float (&most)[2], float (&total)[2], const Sums& sums, int g, int q)
{
    bool grown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float all = sums.sum[h];
        all = __fadd_rn(all, __shfl_xor_sync(0xffffffffu, all, 1));
        all = __fadd_rn(all, __shfl_xor_sync(0xffffffffu, all, 2));
        const Factors by = add_sum(most[h], total[h], sums.largest[h], all);
        grown = grown || by.total != 1.f;
        if (q == 0) {
            factors.total[tile][8 * h + g] = by.total;
#if KV_INT8
            factors.part[tile][8 * h + g] = __fmul_rn(by.part, sums.unit[h]);
#else
            factors.part[tile][8 * h + g] = by.part;
#endif
        }
    }
    return __any_sync(0xffffffffu, grown);
}

// Where a lane's share of 16 tokens' values begins, in elements.
__device__ __forceinline__ int value_offset(int lane)
{
    return KV_INT8 ? 2 * (lane % 4) * VALUE_PITCH + lane / 4 * 4
                   : (lane % 8 + lane / 16 * 8) * VALUE_PITCH + lane / 8 % 2 * 8;
}

// The values of 16 tokens of a unit, transposed: 16 columns are the rows of a fragment. Of 16 columns alone,
// the second fragment is not used.
__device__ __forceinline__ void load_values(unsigned (&a)[2][4], const stored_t* values, bool half, int g)
{
#if KV_INT8
    const stored_t* p = !half || g < 4 ? values : values - 4 * g;
    uint2 code[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // tokens 2q, 2q + 1, 2q + 8, 2q + 9
        code[j] = make_uint2(*reinterpret_cast<const unsigned*>(p + (j % 2 + j / 2 * 8) * VALUE_PITCH), 0u);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        token_pairs(code[0], code[1], i, a[i][0], a[i][1]);
        token_pairs(code[2], code[3], i, a[i][2], a[i][3]);
    }
#else
    ldmatrix_x4_trans(a[0], values);
    ldmatrix_x4_trans(a[1], values + (half ? 0 : 16));
#endif
}

// Adds the values of a unit: value[row tile][product] is the split's warps so far. `moved` and
// `grown` have a bit a tile: whether rescale and total are not all one. `slot` is at the lane's value_offset.
__device__ __forceinline__ void add_values(
    float (&value)[2][2][4], const unsigned (&weight)[2][TILES * GROUPS8], const RowFactors& factors,
    unsigned moved, unsigned grown, const Step& step, int last, const stored_t* slot, int unit_index,
    int lane)
{
    const int g = lane / 4, q = lane % 4;
    const bool half = 32 * unit_index + 16 == HEAD_DIM;  // a unit of 16 columns
    float acc[2][2][4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        if (step.fine || tile % COARSE == 0) {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                acc[i / 8][i / 4 % 2][i % 4] = 0.f;
            }
        } else if (moved >> tile & 1) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 by = *reinterpret_cast<const float2*>(&factors.rescale[tile][8 * h + 2 * q]);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    acc[h][i][0] = __fmul_rn(acc[h][i][0], by.x);
                    acc[h][i][1] = __fmul_rn(acc[h][i][1], by.y);
                    acc[h][i][2] = __fmul_rn(acc[h][i][2], by.x);
                    acc[h][i][3] = __fmul_rn(acc[h][i][3], by.y);
                }
            }
        }
        if (tile_token(step, tile) <= last) {
            const stored_t* values = slot + tile * TILE * VALUE_PITCH;
#pragma unroll
            for (int s = 0; s < TILE / 16; ++s) {
                unsigned a[2][4];
                load_values(a, values + 16 * s * VALUE_PITCH, half, g);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int at = tile * GROUPS8 + 2 * s;
                        const unsigned p[2] = {weight[h][at], weight[h][at + 1]};
                        multiply(acc[h][i], a[i], p);
                    }
                }
            }
        }
        if (step.fine || tile % COARSE == COARSE - 1) {
            if (grown >> tile & 1) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float2 by = *reinterpret_cast<const float2*>(&factors.total[tile][8 * h + 2 * q]);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        float& sum = value[h][i / 4][i % 4];
                        sum = __fmul_rn(sum, i % 2 ? by.y : by.x);
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 part = *reinterpret_cast<const float2*>(&factors.part[tile][8 * h + 2 * q]);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    float& sum = value[h][i / 4][i % 4];
                    sum = __fmaf_rn(acc[h][i / 4][i % 4], i % 2 ? part.y : part.x, sum);
                }
            }
        }
    }
}

// The split's sum joins the running total, in place of which it stays in `value`; unless `done` it is stored.
__device__ __forceinline__ void join_split(
    float (&value)[VALUE_UNITS][2][2][4], float (&most)[2], float (&total)[2], const float (&split_most)[2],
    const float (&split_total)[2], RowFactors& factors, float4* running, bool first, bool done, int lane)
{
    const int g = lane / 4, q = lane % 4;
    if (first) {
        most[0] = split_most[0];
        most[1] = split_most[1];
        total[0] = split_total[0];
        total[1] = split_total[1];
    } else {
        __syncwarp();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Factors by = add_sum(most[h], total[h], split_most[h], split_total[h]);
            if (q == 0) {
                factors.total[0][8 * h + g] = by.total;
                factors.part[0][8 * h + g] = by.part;
            }
        }
        __syncwarp();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float2 by_total = make_float2(0.f, 0.f), by_part = make_float2(0.f, 0.f);
        if (!first) {
            by_total = *reinterpret_cast<const float2*>(&factors.total[0][8 * h + 2 * q]);
            by_part = *reinterpret_cast<const float2*>(&factors.part[0][8 * h + 2 * q]);
        }
#pragma unroll
        for (int unit = 0; unit < VALUE_UNITS; ++unit) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float4* place = running + ((unit * 2 + h) * 2 + i) * 32 + lane;
                float(&sum)[4] = value[unit][h][i];
                if (!first) {
                    const float4 so_far = *place;
                    sum[0] = __fmaf_rn(sum[0], by_part.x, __fmul_rn(so_far.x, by_total.x));
                    sum[1] = __fmaf_rn(sum[1], by_part.y, __fmul_rn(so_far.y, by_total.y));
                    sum[2] = __fmaf_rn(sum[2], by_part.x, __fmul_rn(so_far.z, by_total.x));
                    sum[3] = __fmaf_rn(sum[3], by_part.y, __fmul_rn(so_far.w, by_total.y));
                }
                if (!done) {
                    *place = make_float4(sum[0], sum[1], sum[2], sum[3]);
                }
            }
        }
    }
}

// Writes a warp's rows from first_row to before behind_row, divided by their sums; `running` is free by now.
__device__ __forceinline__ void store_rows(
    activation_t* out_of_tile, const float (&value)[VALUE_UNITS][2][2][4], const float (&total)[2],
    float4* running, RowFactors& factors, int heads, int first_row, int behind_row, int warp, int lane)
{
    const int g = lane / 4, q = lane % 4, pitch = 32 * VALUE_UNITS;
    float* staged = reinterpret_cast<float*>(running);
    float* sums = factors.total[0];
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (q == 0) {
            sums[8 * h + g] = total[h];
        }
#pragma unroll
        for (int i = 0; i < 8 * VALUE_UNITS; ++i) {
            const int unit = i / 8, product = i / 4 % 2, upper = i / 2 % 2;
            float* to = staged + (8 * h + 2 * q + i % 2) * pitch + 32 * unit + column_of(product, upper, g);
            *to = value[unit][h][product][i % 4];
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 16 * (HEAD_DIM / 4); i += 32) {  // a division is long: once in the code
        const int of_warp = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4, at = 16 * warp + of_warp;
        if (at >= first_row && at < behind_row) {
            const float4 sum = *reinterpret_cast<const float4*>(staged + of_warp * pitch + column);
            const float by = sums[of_warp];
            const size_t place = (static_cast<size_t>(at / GROUP) * heads + at % GROUP) * HEAD_DIM + column;
            uint2 words;
            words.x = bits_of(from_floats(sum.x / by, sum.y / by));
            words.y = bits_of(from_floats(sum.z / by, sum.w / by));
            *reinterpret_cast<uint2*>(out_of_tile + place) = words;
        }
    }
}
