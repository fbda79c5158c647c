// The tensor-core family: one tile layout of W4 and W3 weights (labkit/quant/tiles.py), one product of a tile.
//
// A record is 32 output rows × 128 columns: codes as [16-byte vector][32 lanes], then the scales of its groups,
// then their offsets. Weights are the 16-row operand of mma.m16n8k16, eight rows of x the 8-column operand, so
// one to eight rows of x cost the same. With lane = 4g + q, a lane holds rows g, g+8, g+16, g+24 of the tile
// and, of every 32 columns, the eight from 8q on: its activations are one 16-byte load, and every step of 16
// columns of a product lies in one group.
//
// Order of every sum (the same for any M, grid and runner): steps of 16 columns ascending in a group, in the
// tensor core; groups ascending in a record: its contribution; contributions ascending in a slice of K; slices
// ascending. Slices are a function of (N, K).
//
//   BITS    4 or 3          GROUP   columns of a scale: 128, 64 or 32
//   OFFSET  0: none; 1: half; 2: float          BF16   0: activations are half; 1: bfloat16
//   PAIRED  1: rows 0–15 of a tile are gate rows, 16–31 the up rows of the same outputs: y = silu(gate) · up
//   FP16_SUMS  1: sums of a group in half, for speed on 8.6 and 8.9; less exact, and half activations only
//
// What the kernel ahead in the stream may still write (x, residual, partial sums) is never __restrict__: a load
// that the compiler takes for constant it may move above grid_dependency_wait.
#pragma once
#include <cuda_bf16.h>
#include "ptx.cuh"

#ifndef BITS
#define BITS 4
#endif
#ifndef GROUP
#define GROUP 128
#endif
#ifndef OFFSET
#define OFFSET 0
#endif
#ifndef BF16
#define BF16 0
#endif
#ifndef PAIRED
#define PAIRED 0
#endif
#ifndef FP16_SUMS
#define FP16_SUMS 0
#endif

#define TILE_ROWS 32
#define TILE_K 128
#define CHUNKS 4                       // of 32 columns
#define GROUPS (TILE_K / GROUP)        // of a record
#define GROUP_CHUNKS (GROUP / 32)
#define VECTORS BITS                   // 16-byte vectors of a lane: four (W4), three (W3)
#define CODE_BYTES (VECTORS * 512)
#define SCALE_BYTES (GROUPS * 64)
#define OFFSET_BYTES (OFFSET * GROUPS * 64)
#define RECORD_BYTES (CODE_BYTES + SCALE_BYTES + OFFSET_BYTES)
#define EXTRA_VECTORS ((SCALE_BYTES + OFFSET_BYTES) / 16)

#if BF16
typedef __nv_bfloat16 activation_t;
__device__ __forceinline__ float to_float(activation_t value) { return __bfloat162float(value); }
__device__ __forceinline__ activation_t from_float(float value) { return __float2bfloat16_rn(value); }
#define ONES 0x3f803f80u
#else
typedef half activation_t;
__device__ __forceinline__ float to_float(activation_t value) { return __half2float(value); }
__device__ __forceinline__ activation_t from_float(float value) { return __float2half_rn(value); }
#define ONES 0x3c003c00u
#endif

// ---- codes to numbers. A field of a few bits in the mantissa of a power of two is that power plus the field
// times its place: 0x6400 | u << s is 1024 + 2^s·u in half, 0x4300 | u << s is 128 + 2^s·u in bfloat16, as long
// as it fits the 10 or 7 bits. One fused multiply-add takes both away, exactly.

__device__ __forceinline__ unsigned fma_pair(unsigned pair, float times, float plus)
{
    unsigned result;
#if BF16
    __nv_bfloat162 value;
    memcpy(&value, &pair, 4);
    value = __hfma2(value, __float2bfloat162_rn(times), __float2bfloat162_rn(plus));
#else
    half2 value;
    memcpy(&value, &pair, 4);
    value = times == 1.f ? __hadd2(value, __float2half2_rn(plus))
                         : __hfma2(value, __float2half2_rn(times), __float2half2_rn(plus));
#endif
    memcpy(&result, &value, 4);
    return result;
}

// The two fields of BITS bits at bit SHIFT of both halves of a word, less the bias of the code.
template <int SHIFT>
__device__ __forceinline__ unsigned field(unsigned word)
{
    const unsigned mask = ((1u << BITS) - 1u) * 0x00010001u << SHIFT;
    const float scale = 1.f / (1 << SHIFT);
    const float bias = 1 << (BITS - 1);
#if BF16
    return fma_pair(lop3_and_or(word, mask, 0x43004300u), scale, -(128.f * scale + bias));
#else
    return fma_pair(lop3_and_or(word, mask, 0x64006400u), scale, -(1024.f * scale + bias));
#endif
}

// One chunk of 32 columns: a[half][step] are the registers of the 16 × 16 operand.
__device__ __forceinline__ void decode(unsigned (&a)[2][2][4], const unsigned* words)
{
#if BITS == 4
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        unsigned (&r)[4] = a[i / 2][i % 2];
        const unsigned w = words[i];
#if BF16
        r[0] = field<0>(w);
        r[1] = field<0>(w >> 4);
        r[2] = field<0>(w >> 8);
        r[3] = field<0>(w >> 12);
#else
        r[0] = field<0>(w);
        r[1] = field<4>(w);
        r[2] = field<0>(w >> 8);
        r[3] = field<4>(w >> 8);
#endif
    }
#else
    unsigned flat[16];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const unsigned w = words[i];
        flat[5 * i] = field<0>(w);
        flat[5 * i + 1] = field<3>(w);
#if BF16
        flat[5 * i + 2] = field<0>(w >> 6);
        flat[5 * i + 3] = field<3>(w >> 6);
        flat[5 * i + 4] = field<0>(w >> 12);
#else
        flat[5 * i + 2] = field<6>(w);
        flat[5 * i + 3] = field<0>(w >> 9);
        flat[5 * i + 4] = field<3>(w >> 9);
#endif
    }
    // The bits that five fields of three leave over make the sixteenth pair.
    unsigned last = (words[0] >> 15) & 0x00010001u;
    last = lop3_and_or(words[1] >> 14, 0x00020002u, last);
    last = lop3_and_or(words[2] >> 13, 0x00040004u, last);
    flat[15] = field<0>(last);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        a[i / 8][i / 4 % 2][i % 4] = flat[i];
    }
#endif
}

// ---- activations straight from global memory: eight for each chunk of a k tile, of row g of every n tile; zeros
// beyond M and K. `left` is how many columns are left from the lane's first on, at most 0 for a row that is not there.

template <int N>
__device__ __forceinline__ void load_x(
    uint4 (&values)[N][CHUNKS], const activation_t* x, long long row_stride, const int (&left)[N])
{
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            values[t][c] = make_uint4(0, 0, 0, 0);
            if (32 * c < left[t]) {
                values[t][c] = load_early_16(x + 8 * t * row_stride + 32 * c);
            }
        }
    }
}

template <int N>
__device__ __forceinline__ void columns_left(int (&left)[N], int M, int K, int first_column)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < N; ++t) {
        left[t] = 8 * t + lane / 4 < M ? K - first_column - 8 * (lane % 4) : 0;
    }
}

// ---- a record on its way through shared memory: each lane copies the codes that it reads itself, the first lanes
// the scales and offsets of all. `stage` and `record` are a lane's own addresses: 16 · lane behind the start.

__device__ __forceinline__ void copy_record(uint8_t* stage, const uint8_t* record, int lane)
{
    cp_async_16_behind<0>(stage, record);
    cp_async_16_behind<512>(stage, record);
    cp_async_16_behind<1024>(stage, record);
    if (VECTORS == 4) {
        cp_async_16_behind<1536>(stage, record);
    }
    if (lane < EXTRA_VECTORS) {
        cp_async_16_behind<CODE_BYTES>(stage, record);
    }
    if (EXTRA_VECTORS > 32 && lane < EXTRA_VECTORS - 32) {
        cp_async_16_behind<CODE_BYTES + 512>(stage, record);
    }
}

// The codes of a lane; `at` is its own address in a record, in shared or global memory.
__device__ __forceinline__ void load_codes(unsigned (&words)[4 * VECTORS], const uint8_t* at)
{
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const uint4 four = *reinterpret_cast<const uint4*>(at + v * 512);
        words[4 * v] = four.x;
        words[4 * v + 1] = four.y;
        words[4 * v + 2] = four.z;
        words[4 * v + 3] = four.w;
    }
}

// ---- the product of one record

// The sums of a group in one 16 × 8 tile: four floats, or two pairs of halves.
#if FP16_SUMS
typedef unsigned sum_t;
#define SUMS 2
#else
typedef float sum_t;
#define SUMS 4
#endif

__device__ __forceinline__ void multiply(sum_t (&sum)[SUMS], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    const unsigned b[2] = {b0, b1};
#if FP16_SUMS
    mma_m16n8k16_f16(sum, a, b, sum);
#elif BF16
    mma_m16n8k16_bf16(sum, a, b, sum);
#else
    mma_m16n8k16(sum, a, b, sum);
#endif
}

__device__ __forceinline__ float sum_at(const sum_t (&sum)[SUMS], int r)
{
#if FP16_SUMS
    return __half2float(__ushort_as_half((unsigned short)(sum[r / 2] >> (16 * (r % 2)))));
#else
    return sum[r];
#endif
}

// Scales (or half offsets) of rows g, g+8, g+16, g+24.
__device__ __forceinline__ void load_scales(float (&scale)[4], const uint8_t* at)
{
    const uint2 words = *reinterpret_cast<const uint2*>(at);
    const unsigned both[2] = {words.x, words.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        scale[i] = __half2float(__ushort_as_half((unsigned short)(both[i / 2] >> (16 * (i % 2)))));
    }
}

__device__ __forceinline__ void load_offsets(float (&offset)[4], const uint8_t* record, int group, int g)
{
#if OFFSET == 2
    const uint8_t* at = record + CODE_BYTES + SCALE_BYTES + group * 128 + g * 16;
    const float4 four = *reinterpret_cast<const float4*>(at);
    offset[0] = four.x;
    offset[1] = four.y;
    offset[2] = four.z;
    offset[3] = four.w;
#else
    load_scales(offset, record + CODE_BYTES + SCALE_BYTES + group * 64 + g * 8);
#endif
}

// sum (+)= group sums times scales: register r of half h belongs to row g + 8 (r / 2) + 16 h. The first group
// is a product, the others are fused to it.
__device__ __forceinline__ void add_group(
    float (&sum)[2][4], const sum_t (&group_sum)[2][SUMS], const float (&scale)[4], bool first)
{
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float s = scale[2 * h + r / 2];
            const float value = sum_at(group_sum[h], r);
            sum[h][r] = first ? __fmul_rn(value, s) : __fmaf_rn(value, s, sum[h][r]);
        }
    }
}

// sum += offset of the row times the sum of x over the group, of column 2q (registers 0, 2) and 2q + 1.
__device__ __forceinline__ void add_offsets(
    float (&sum)[2][4], const sum_t (&x_sum)[SUMS], const float (&offset)[4])
{
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            sum[h][r] = __fmaf_rn(sum_at(x_sum, r % 2), offset[2 * h + r / 2], sum[h][r]);
        }
    }
}

// What a record adds to 32 rows and N n tiles. `x_at(t, c)` gives the lane's eight activations of row g of n tile t
// in chunk c; the record lies in shared memory.
template <int N, typename X>
__device__ __forceinline__ void multiply_record(
    float (&contribution)[N][2][4], const uint8_t* record, const X& x_at)
{
    const int lane = threadIdx.x % 32, g = lane / 4;
    unsigned words[4 * VECTORS];
    load_codes(words, record + 16 * lane);
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
        sum_t group_sum[N][2][SUMS] = {};
#if OFFSET
        sum_t x_sum[N][SUMS] = {};
#endif
#pragma unroll
        for (int c = j * GROUP_CHUNKS; c < (j + 1) * GROUP_CHUNKS; ++c) {
            unsigned a[2][2][4];
            decode(a, words + BITS * c);
            uint4 x[N];
#pragma unroll
            for (int t = 0; t < N; ++t) {
                x[t] = x_at(t, c);
            }
            // Products that depend on each other as far apart as possible: a warp issues them in order.
#pragma unroll
            for (int s = 0; s < 2; ++s) {
#pragma unroll
                for (int t = 0; t < N; ++t) {
                    const unsigned b0 = s == 0 ? x[t].x : x[t].z, b1 = s == 0 ? x[t].y : x[t].w;
                    multiply(group_sum[t][0], a[0][s], b0, b1);
                    multiply(group_sum[t][1], a[1][s], b0, b1);
#if OFFSET
                    const unsigned ones[4] = {ONES, ONES, ONES, ONES};
                    multiply(x_sum[t], ones, b0, b1);
#endif
                }
            }
        }
        float scale[4];
        load_scales(scale, record + CODE_BYTES + j * 64 + g * 8);
#pragma unroll
        for (int t = 0; t < N; ++t) {
            add_group(contribution[t], group_sum[t], scale, j == 0);
        }
#if OFFSET
        float offset[4];
        load_offsets(offset, record, j, g);
#pragma unroll
        for (int t = 0; t < N; ++t) {
            add_offsets(contribution[t], x_sum[t], offset);
        }
#endif
    }
}

__device__ __forceinline__ void add(float (&sum)[2][4], const float (&added)[2][4])
{
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        sum[r / 4][r % 4] = __fadd_rn(sum[r / 4][r % 4], added[r / 4][r % 4]);
    }
}

__device__ __forceinline__ void set_zero(float (&sum)[2][4])
{
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        sum[r / 4][r % 4] = 0.f;
    }
}

// ---- outputs

struct Output {
    const activation_t* bias;      // [N], or null; PAIRED: [2N], gate first
    const activation_t* residual;  // [M, N], or null
    activation_t* out;             // [M, N]
    int M, N;                      // PAIRED: N counts the outputs
};

// Outputs of a row tile.
#define TILE_OUTPUTS (PAIRED ? TILE_ROWS / 2 : TILE_ROWS)

// What the epilogue adds to rows `row` and `row` + 16 of a row tile (with PAIRED: gate and up row of one output) for
// row m of x. Loaded ahead, many at once: each load takes as long as a record.
__device__ __forceinline__ void load_extras(
    float (&bias)[2], float (&residual)[2], const Output& y, int row_tile, int row, int m)
{
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int n = row_tile * TILE_OUTPUTS + row + (PAIRED ? 0 : 16 * h);
        const bool inside = n < y.N;
        bias[h] = y.bias != nullptr && inside ? to_float(y.bias[n + (PAIRED && h == 1 ? y.N : 0)]) : 0.f;
        const bool wanted = y.residual != nullptr && inside && m < y.M && !(PAIRED && h == 1);
        residual[h] = wanted ? to_float(y.residual[(size_t)m * y.N + n]) : 0.f;
    }
}

__device__ __forceinline__ float silu(float value) { return value / (1.f + expf(-value)); }

// The outputs of the same two rows from their sums. What is absent is added as zero.
__device__ __forceinline__ void finish(
    const Output& y, const float (&bias)[2], const float (&residual)[2], int row_tile, int row, int m,
    const float (&sum)[2])
{
    const int n = row_tile * TILE_OUTPUTS + row;
    if (m >= y.M || n >= y.N) {
        return;
    }
    activation_t* at = y.out + (size_t)m * y.N + n;
    const float low = __fadd_rn(sum[0], bias[0]), high = __fadd_rn(sum[1], bias[1]);
#if PAIRED
    *at = from_float(__fadd_rn(__fmul_rn(silu(low), high), residual[0]));
#else
    *at = from_float(__fadd_rn(low, residual[0]));
    if (n + 16 < y.N) {
        at[16] = from_float(__fadd_rn(high, residual[1]));
    }
#endif
}

// The same for the fragments of both halves, of columns m0 + 2q (registers 0, 2) and m0 + 2q + 1.
struct Extras {
    float bias[4][2], residual[4][2];
};

__device__ __forceinline__ Extras load_extras(const Output& y, int row_tile, int m0)
{
    const int lane = threadIdx.x % 32;
    Extras found;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = lane / 4 + 8 * (r / 2), m = m0 + 2 * (lane % 4) + r % 2;
        load_extras(found.bias[r], found.residual[r], y, row_tile, row, m);
    }
    return found;
}

__device__ __forceinline__ void finish_fragment(
    const Output& y, const Extras& extras, int row_tile, int m0, const float (&sum)[2][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = lane / 4 + 8 * (r / 2), m = m0 + 2 * (lane % 4) + r % 2;
        const float both[2] = {sum[0][r], sum[1][r]};
        finish(y, extras.bias[r], extras.residual[r], row_tile, row, m, both);
    }
}

// Partial sums of one slice: plane [M][row tiles · 32], in the order of the tiles.
__device__ __forceinline__ void store_partial(
    float* plane, int M, int row_tiles, int row_tile, int m0, const float (&sum)[2][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int m = m0 + 2 * (lane % 4) + r % 2;
        if (m < M) {
            float* at = plane + ((size_t)m * row_tiles + row_tile) * TILE_ROWS + lane / 4 + 8 * (r / 2);
            at[0] = sum[0][r];
            at[16] = sum[1][r];
        }
    }
}

// First k tile of a slice: k_tiles dealt out in order, each = k_tiles / slices and one more to the first ones.
__device__ __forceinline__ int first_tile(int slice, int k_tiles, int slices, int each)
{
    return slice * each + min(slice, k_tiles - slices * each);
}
