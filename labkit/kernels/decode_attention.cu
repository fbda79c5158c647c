// Decode attention: rope on the new q and k, the append of the new k and v, and attention over all tokens so far,
// for one new token a row, in one launch; a static cache, grouped query heads.
// registers: 176
//
// Layouts (H = kv_heads * GROUP query heads, D = HEAD_DIM, S = capacity)
//   qkv        activation_t [B, (H + 2 kv_heads) D]   q heads, k heads, v heads of the new token, before rope
//   k_cache    activation_t [B, kv_heads, S, D]       keys after rope; row lengths[b] is written here
//   v_cache    activation_t [B, kv_heads, S, D]
//   cos, sin   float [positions, D/2]                 angle of pair (i, i + D/2); positions >= S
//   lengths    int [B]                                tokens in the cache before this one = its position
//   q_norm, k_norm  activation_t [D]                  RMSNorm of every head before rope; null unless QK_NORM
//   out        activation_t [B, H D]
//   part       float [B, kv_heads, splits, HEAD_TILES, ITEMS, 4]  unused (may be null) when splits == 1
//   part_ml    float [B, kv_heads, splits, 2, 8 HEAD_TILES]       maximum and sum of each split, the same
//   tickets    unsigned [B, kv_heads]                 zero before the first launch, and zero after each
// Alignment: 16 bytes for qkv, the caches, out and part; 8 for cos and sin.
//
// Launch: grid (splits, kv_heads, B), splits = ceil(S / SPLIT); block 32 WARPS; shared memory is static.
// A row whose length is negative or not below S is left alone: nothing is read, appended or written for it.
// It may overlap the kernels ahead of it (ptx.cuh), as long as none of them writes lengths, the angles, the norms
// or the positions below lengths[b]: all that is read before they have finished. A decode step begins with a
// kernel that overlaps nothing, so whatever the step before wrote is there. qkv, which the kernel ahead writes, is
// not __restrict__: a compiler may move a load of constant data ahead of the wait.
//
// Order. A warp takes STRIP neighbouring tokens, a block SPLIT = WARPS * STRIP; strips are added in ascending
// order, then splits in ascending order, by the last block of the row and head to arrive. Which token goes
// where depends on its position alone, so neither the batch, the capacity nor the arrival changes a bit.
//
// How
//   Scores: A = q (heads are the rows), B = the keys as they lie in memory: a lane's 8 neighbours of a row are
//   one 16-byte load and two k-steps of the product, q being permuted the same way.
//   Output, transposed: A = the values (16 columns of D are the rows), B = the probabilities, which lie in the
//   scores' registers as B wants them. So nothing of the cache passes through shared memory.
//   Tokens beyond the row's are loaded as zero and masked in the score: free cache may hold anything.
//   f32 scores, softmax in base 2; a probability is rounded to activation_t before it meets V, and the
//   rounded one is what the sum counts.

#include "ptx.cuh"

#define ACTIVATION_HALF 1
#define ACTIVATION_BFLOAT16 2
#ifndef ACTIVATION
#define ACTIVATION ACTIVATION_HALF
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef GROUP  // query heads a key/value head
#define GROUP 8
#endif
#ifndef QK_NORM
#define QK_NORM 0
#endif

#define WARPS 8
#define STRIP 16
#define SPLIT (WARPS * STRIP)
#define THREADS (32 * WARPS)
#define HEAD_TILES ((GROUP + 7) / 8)
#define CHUNKS ((HEAD_DIM + 31) / 32)   // of 32 columns: a lane's 16-byte load of a key
#define BLOCKS64 ((HEAD_DIM + 63) / 64) // of 64 columns: a lane's 16-byte load of a value
#define Q_ROWS (8 * HEAD_TILES)
#define Q_PITCH (32 * CHUNKS + (CHUNKS % 2 ? 0 : 32))  // rows 64 bytes apart modulo 128: no bank conflict
#define ITEMS (BLOCKS64 * 128)          // an item is 4 neighbouring columns of one of 8 heads
#define CELLS (4 * ITEMS)
#define WORDS (HEAD_DIM / 4)            // pairs of columns in half a head: one a lane
#define ROUNDS ((Q_ROWS + 2 + WARPS - 1) / WARPS)  // heads of the new token that a warp takes

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 32 && HEAD_DIM <= 128, "HEAD_DIM is 32 to 128, whole 16s");
static_assert(GROUP >= 1 && GROUP <= 16, "GROUP is 1 to 16");

#define MINUS_INFINITY (-__int_as_float(0x7f800000))

#if ACTIVATION == ACTIVATION_BFLOAT16
#include <cuda_bf16.h>
typedef __nv_bfloat16 activation_t;
typedef __nv_bfloat162 activation2_t;
__device__ __forceinline__ float2 to_floats(activation2_t pair) { return __bfloat1622float2(pair); }
__device__ __forceinline__ activation2_t from_floats(float a, float b) { return __floats2bfloat162_rn(a, b); }
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    mma_m16n8k16_bf16(d, a, b, d);
}
#else
typedef half activation_t;
typedef half2 activation2_t;
__device__ __forceinline__ float2 to_floats(activation2_t pair) { return __half22float2(pair); }
__device__ __forceinline__ activation2_t from_floats(float a, float b) { return __floats2half2_rn(a, b); }
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    mma_m16n8k16(d, a, b, d);
}
#endif

__device__ __forceinline__ unsigned bits_of(activation2_t pair)
{
    unsigned word;
    memcpy(&word, &pair, 4);
    return word;
}

__device__ __forceinline__ activation2_t pair_of(unsigned word)
{
    activation2_t pair;
    memcpy(&pair, &word, 4);
    return pair;
}

__device__ __forceinline__ unsigned word_of(const uint4& v, int i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ unsigned load_word(const activation_t* p)
{
    return *reinterpret_cast<const unsigned*>(p);
}

__device__ __forceinline__ void store_word(activation_t* p, unsigned word)
{
    *reinterpret_cast<unsigned*>(p) = word;
}

__device__ __forceinline__ uint4 load_16(const activation_t* p) { return *reinterpret_cast<const uint4*>(p); }

// One head of the new token, a warp at work: columns 2 lane, +1 of the lower half and of the upper half of the
// head. Normalised if the model does so, then turned by the angles; rounded once.
__device__ __forceinline__ void rope_head(
    unsigned& low_word, unsigned& high_word, float2 cosine, float2 sine, const activation_t* norm, float eps,
    int lane)
{
    float2 low = to_floats(pair_of(low_word)), high = to_floats(pair_of(high_word));
#if QK_NORM
    float squares = __fmul_rn(low.x, low.x);
    squares = __fmaf_rn(low.y, low.y, squares);
    squares = __fmaf_rn(high.x, high.x, squares);
    squares = __fmaf_rn(high.y, high.y, squares);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        squares = __fadd_rn(squares, __shfl_xor_sync(0xffffffffu, squares, distance));
    }
    const float factor = rsqrtf(__fadd_rn(squares / HEAD_DIM, eps));
    if (lane < WORDS) {
        const float2 low_norm = to_floats(pair_of(load_word(norm + 2 * lane)));
        const float2 high_norm = to_floats(pair_of(load_word(norm + HEAD_DIM / 2 + 2 * lane)));
        low.x = __fmul_rn(__fmul_rn(low.x, factor), low_norm.x);
        low.y = __fmul_rn(__fmul_rn(low.y, factor), low_norm.y);
        high.x = __fmul_rn(__fmul_rn(high.x, factor), high_norm.x);
        high.y = __fmul_rn(__fmul_rn(high.y, factor), high_norm.y);
    }
#endif
    low_word = bits_of(from_floats(
        __fmaf_rn(low.x, cosine.x, -__fmul_rn(high.x, sine.x)),
        __fmaf_rn(low.y, cosine.y, -__fmul_rn(high.y, sine.y))));
    high_word = bits_of(from_floats(
        __fmaf_rn(high.x, cosine.x, __fmul_rn(low.x, sine.x)),
        __fmaf_rn(high.y, cosine.y, __fmul_rn(low.y, sine.y))));
}

// Writes an item, divided by its head's sum.
__device__ __forceinline__ void store_item(
    activation_t* out_of_group, int tile, int item, float4 value, float sum)
{
    const int head = tile * 8 + item % 8;
    const int column = item / 128 * 64 + item / 8 % 8 * 8 + item / 64 % 2 * 4;
    if (head < GROUP && column < HEAD_DIM) {
        uint2 words;
        words.x = bits_of(from_floats(value.x / sum, value.y / sum));
        words.y = bits_of(from_floats(value.z / sum, value.w / sum));
        *reinterpret_cast<uint2*>(out_of_group + head * HEAD_DIM + column) = words;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_attention(
    const activation_t* qkv, activation_t* k_cache, activation_t* v_cache,
    const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ lengths,
    const activation_t* __restrict__ q_norm, const activation_t* __restrict__ k_norm,
    activation_t* __restrict__ out, float* part, float* part_ml, unsigned* tickets,
    int kv_heads, int capacity, float scale_log2, float eps)
{
    __shared__ alignas(16) activation_t q_shared[Q_ROWS * Q_PITCH];
    __shared__ alignas(16) activation_t k_shared[32 * CHUNKS];
    __shared__ alignas(16) float strip_out[WARPS * CELLS];
    __shared__ float strip_max[WARPS * Q_ROWS];
    __shared__ float strip_sum[WARPS * Q_ROWS];
    __shared__ float split_max[Q_ROWS];
    __shared__ float split_sum[Q_ROWS];
    __shared__ unsigned arrived;
    LABKIT_ASSERT(blockDim.x == THREADS && gridDim.x == (capacity + SPLIT - 1) / SPLIT);

    const int row = blockIdx.z, kv_head = blockIdx.y, split = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    grid_dependency_release();
    const int length = lengths[row];
    if (length < 0 || length >= capacity || split * SPLIT > length) {
        grid_dependency_wait();  // no kernel may seem done before those ahead of it are
        return;
    }
    const int used = length / SPLIT + 1;  // splits that hold a token
    const bool newest = split == used - 1;
    const int heads = kv_heads * GROUP;
    const activation_t* new_row = qkv + static_cast<size_t>(row) * (heads + 2 * kv_heads) * HEAD_DIM;
    const activation_t* new_v = new_row + (heads + kv_heads + kv_head) * HEAD_DIM;
    const size_t first_of_head = (static_cast<size_t>(row) * kv_heads + kv_head) * capacity * HEAD_DIM;
    activation_t* keys = k_cache + first_of_head;
    activation_t* values = v_cache + first_of_head;

    // All loads of the cache leave at once, before anything waits; the new token's k and v come later.
    const int first = split * SPLIT + warp * STRIP;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 key[2][CHUNKS], value[4][BLOCKS64];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        const int token = first + 8 * t + g;
        const activation_t* p = keys + static_cast<size_t>(token) * HEAD_DIM + 8 * q;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            key[t][c] = token < length && 32 * c + 8 * q < HEAD_DIM ? load_16(p + 32 * c) : zero;
        }
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const int token = first + 2 * q + t % 2 + 8 * (t / 2);
        const activation_t* p = values + static_cast<size_t>(token) * HEAD_DIM + 8 * g;
#pragma unroll
        for (int b = 0; b < BLOCKS64; ++b) {
            value[t][b] = token < length && 64 * b + 8 * g < HEAD_DIM ? load_16(p + 64 * b) : zero;
        }
    }

    // The new token: a warp a head. Its k and v go to the cache from the block that owns its position.
    float2 cosine = make_float2(0.f, 0.f), sine = make_float2(0.f, 0.f);
    if (lane < WORDS) {
        const size_t angle = static_cast<size_t>(length) * (HEAD_DIM / 2) + 2 * lane;
        cosine = *reinterpret_cast<const float2*>(cos + angle);
        sine = *reinterpret_cast<const float2*>(sin + angle);
    }
    grid_dependency_wait();
    unsigned low[ROUNDS], high[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {  // all loads before the first store
        const int head = r * WARPS + warp;  // of q, then k, then v
        low[r] = high[r] = 0;
        if (lane < WORDS && (head < GROUP || (newest && (head == Q_ROWS || head == Q_ROWS + 1)))) {
            const int of_row = head < Q_ROWS ? kv_head * GROUP + head
                                             : heads + kv_head + (head - Q_ROWS) * kv_heads;
            const activation_t* p = new_row + of_row * HEAD_DIM + 2 * lane;
            low[r] = load_word(p);
            high[r] = load_word(p + HEAD_DIM / 2);
        }
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int head = r * WARPS + warp;
        const bool is_q = head < Q_ROWS, is_k = newest && head == Q_ROWS, is_v = newest && head == Q_ROWS + 1;
        if (is_q || is_k) {
            rope_head(low[r], high[r], cosine, sine, is_q ? q_norm : k_norm, eps, lane);
            activation_t* to = is_q ? q_shared + head * Q_PITCH : k_shared;
            if (lane < WORDS) {
                store_word(to + 2 * lane, low[r]);
                store_word(to + HEAD_DIM / 2 + 2 * lane, high[r]);
            } else if (HEAD_DIM % 32 != 0 && lane < WORDS + 8) {
                store_word(to + HEAD_DIM + 2 * (lane - WORDS), 0);  // the last chunk's other half
            }
        }
        if ((is_k || is_v) && lane < WORDS) {
            activation_t* to = (is_k ? keys : values) + static_cast<size_t>(length) * HEAD_DIM;
            store_word(to + 2 * lane, low[r]);
            store_word(to + HEAD_DIM / 2 + 2 * lane, high[r]);
        }
    }
    __syncthreads();

    // Scores of the strip: lane (g, q) holds heads g (and g + 8) at tokens 8t + 2q, +1.
    float acc[HEAD_TILES][4 * BLOCKS64][4];
#pragma unroll
    for (int h = 0; h < HEAD_TILES; ++h) {
#pragma unroll
        for (int i = 0; i < 4 * BLOCKS64; ++i) {
            acc[h][i][0] = acc[h][i][1] = acc[h][i][2] = acc[h][i][3] = 0.f;
        }
    }
    float largest[HEAD_TILES], sum[HEAD_TILES];
#pragma unroll
    for (int h = 0; h < HEAD_TILES; ++h) {
        largest[h] = MINUS_INFINITY;
        sum[h] = 0.f;
    }
    if (first <= length) {  // the whole warp
        if (length < first + STRIP) {
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                if (first + 2 * q + t % 2 + 8 * (t / 2) == length) {
#pragma unroll
                    for (int b = 0; b < BLOCKS64; ++b) {
                        value[t][b] = 64 * b + 8 * g < HEAD_DIM ? load_16(new_v + 64 * b + 8 * g) : zero;
                    }
                }
            }
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                if (first + 8 * t + g == length) {
#pragma unroll
                    for (int c = 0; c < CHUNKS; ++c) {
                        key[t][c] = load_16(k_shared + 32 * c + 8 * q);
                    }
                }
            }
        }
        __syncwarp();
        float score[2][4];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            score[t][0] = score[t][1] = score[t][2] = score[t][3] = 0.f;
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const uint4 low = load_16(q_shared + g * Q_PITCH + 32 * c + 8 * q);
            const uint4 high = HEAD_TILES == 2 ? load_16(q_shared + (Q_ROWS - 8 + g) * Q_PITCH + 32 * c + 8 * q)
                                               : zero;
            const unsigned a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const unsigned b0[2] = {key[t][c].x, key[t][c].y}, b1[2] = {key[t][c].z, key[t][c].w};
                multiply(score[t], a0, b0);
                multiply(score[t], a1, b1);
            }
        }
        unsigned weight[HEAD_TILES][2];
#pragma unroll
        for (int h = 0; h < HEAD_TILES; ++h) {
            float most = MINUS_INFINITY;
#pragma unroll
            for (int t = 0; t < 2; ++t) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& s = score[t][2 * h + e];
                    s = first + 8 * t + 2 * q + e <= length ? __fmul_rn(s, scale_log2) : MINUS_INFINITY;
                    most = fmaxf(most, s);
                }
            }
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            const float base = most == MINUS_INFINITY ? 0.f : most;
            float total = 0.f;
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const activation2_t p = from_floats(
                    exp2f(__fadd_rn(score[t][2 * h], -base)), exp2f(__fadd_rn(score[t][2 * h + 1], -base)));
                weight[h][t] = bits_of(p);
                const float2 rounded = to_floats(p);
                total = __fadd_rn(total, __fadd_rn(rounded.x, rounded.y));
            }
            total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 1));
            total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 2));
            largest[h] = most;
            sum[h] = total;
        }
        // Output, transposed: row g of product i is column 8g + 2i, row g + 8 is column 8g + 2i + 1.
#pragma unroll
        for (int b = 0; b < BLOCKS64; ++b) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned v0 = word_of(value[0][b], i), v1 = word_of(value[1][b], i);
                const unsigned v2 = word_of(value[2][b], i), v3 = word_of(value[3][b], i);
                const unsigned a[4] = {prmt(v0, v1, 0x5410), prmt(v0, v1, 0x7632), prmt(v2, v3, 0x5410),
                                       prmt(v2, v3, 0x7632)};
#pragma unroll
                for (int h = 0; h < HEAD_TILES; ++h) {
                    multiply(acc[h][4 * b + i], a, weight[h]);
                }
            }
        }
    }
    if (q == 0) {
#pragma unroll
        for (int h = 0; h < HEAD_TILES; ++h) {
            strip_max[warp * Q_ROWS + 8 * h + g] = largest[h];
            strip_sum[warp * Q_ROWS + 8 * h + g] = sum[h];
        }
    }
    __syncthreads();

    // The strips of the split, in ascending order.
    if (threadIdx.x < Q_ROWS) {
        float most = strip_max[threadIdx.x];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) {
            most = fmaxf(most, strip_max[w * Q_ROWS + threadIdx.x]);
        }
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float factor = exp2f(__fadd_rn(strip_max[w * Q_ROWS + threadIdx.x], -most));
            total = __fmaf_rn(factor, strip_sum[w * Q_ROWS + threadIdx.x], total);
        }
        split_max[threadIdx.x] = most;
        split_sum[threadIdx.x] = total;
    }
    activation_t* out_of_group = out + (static_cast<size_t>(row) * heads + kv_head * GROUP) * HEAD_DIM;
    const size_t of_head = (static_cast<size_t>(row) * kv_heads + kv_head) * gridDim.x;
#pragma unroll
    for (int h = 0; h < HEAD_TILES; ++h) {
        float factor[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int head = 8 * h + 2 * q + e;
            float most = strip_max[head];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) {
                most = fmaxf(most, strip_max[w * Q_ROWS + head]);
            }
            factor[e] = exp2f(__fadd_rn(strip_max[warp * Q_ROWS + head], -most));
        }
        if (h > 0) {
            __syncthreads();  // the first heads' cells have been read
        }
#pragma unroll
        for (int i = 0; i < 4 * BLOCKS64; ++i) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                float2 cells;
                cells.x = __fmul_rn(acc[h][i][2 * odd], factor[0]);
                cells.y = __fmul_rn(acc[h][i][2 * odd + 1], factor[1]);
                *reinterpret_cast<float2*>(strip_out + warp * CELLS + (2 * i + odd) * 64 + 8 * g + 2 * q) = cells;
            }
        }
        __syncthreads();
        for (int item = threadIdx.x; item < ITEMS; item += THREADS) {
            const float* cell = strip_out + item / 64 * 256 + item % 64;
            float4 total = make_float4(cell[0], cell[64], cell[128], cell[192]);
#pragma unroll
            for (int w = 1; w < WARPS; ++w) {
                total.x = __fadd_rn(total.x, cell[w * CELLS]);
                total.y = __fadd_rn(total.y, cell[w * CELLS + 64]);
                total.z = __fadd_rn(total.z, cell[w * CELLS + 128]);
                total.w = __fadd_rn(total.w, cell[w * CELLS + 192]);
            }
            if (used == 1) {
                store_item(out_of_group, h, item, total, split_sum[8 * h + item % 8]);
            } else {
                float* to = part + (((of_head + split) * HEAD_TILES + h) * ITEMS + item) * 4;
                *reinterpret_cast<float4*>(to) = total;
            }
        }
    }
    if (used == 1) {
        return;
    }

    // The splits, in ascending order, by the block that arrives last. The counter wraps to zero by itself.
    if (threadIdx.x < Q_ROWS) {
        part_ml[(of_head + split) * 2 * Q_ROWS + threadIdx.x] = split_max[threadIdx.x];
        part_ml[(of_head + split) * 2 * Q_ROWS + Q_ROWS + threadIdx.x] = split_sum[threadIdx.x];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        arrived = atomicInc(tickets + row * kv_heads + kv_head, used - 1);
    }
    __syncthreads();
    if (arrived != used - 1) {
        return;
    }
    __threadfence();
    for (int item = threadIdx.x; item < HEAD_TILES * ITEMS; item += THREADS) {
        const int tile = item / ITEMS, head = 8 * tile + item % 8;
        const float* ml = part_ml + of_head * 2 * Q_ROWS + head;
        float most = MINUS_INFINITY;
#pragma unroll 4
        for (int s = 0; s < used; ++s) {
            most = fmaxf(most, __ldcg(ml + static_cast<size_t>(s) * 2 * Q_ROWS));
        }
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        float weights = 0.f;
#pragma unroll 4
        for (int s = 0; s < used; ++s) {
            const float* of_split = ml + static_cast<size_t>(s) * 2 * Q_ROWS;
            const float factor = exp2f(__fadd_rn(__ldcg(of_split), -most));
            const size_t place = ((of_head + s) * HEAD_TILES * ITEMS + item) * 4;
            const float4 next = __ldcg(reinterpret_cast<const float4*>(part + place));
            weights = __fmaf_rn(factor, __ldcg(of_split + Q_ROWS), weights);
            total.x = __fmaf_rn(factor, next.x, total.x);
            total.y = __fmaf_rn(factor, next.y, total.y);
            total.z = __fmaf_rn(factor, next.z, total.z);
            total.w = __fmaf_rn(factor, next.w, total.w);
        }
        store_item(out_of_group, tile, item % ITEMS, total, weights);
    }
}
