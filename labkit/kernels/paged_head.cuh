// What the kernels over paged keys and values share: the activation type, pieces of eight columns as they are
// stored and as an mma wants them, one head of a new token (norm, rope, INT8 codes).
//
// A piece is 8 neighbouring columns of one token: 16 bytes of activation_t, or 8 INT8 codes.
// INT8: value = code * scale, one scale a token and head: largest magnitude / 127 (0: scale 0, codes 0).
#pragma once
#include "ptx.cuh"

#define ACTIVATION_HALF 1
#define ACTIVATION_BFLOAT16 2
#ifndef ACTIVATION
#define ACTIVATION ACTIVATION_HALF
#endif
#ifndef KV_INT8  // keys and values are INT8 codes with scales
#define KV_INT8 0
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef BLOCK_SIZE  // tokens of a block of the cache
#define BLOCK_SIZE 16
#endif
#ifndef QK_NORM  // an RMSNorm of every q and k head before rope
#define QK_NORM 0
#endif
#define WORDS (HEAD_DIM / 4)  // pairs of columns in half a head: one a lane

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 32 && HEAD_DIM <= 128, "HEAD_DIM is 32 to 128, whole 16s");
static_assert(BLOCK_SIZE == 8 || BLOCK_SIZE == 16 || BLOCK_SIZE == 32 || BLOCK_SIZE == 64, "BLOCK_SIZE");

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

#if KV_INT8
typedef int8_t stored_t;
typedef uint2 piece_t;
#else
typedef activation_t stored_t;
typedef uint4 piece_t;
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

__device__ __forceinline__ unsigned load_word(const activation_t* p)
{
    return *reinterpret_cast<const unsigned*>(p);
}

__device__ __forceinline__ void store_word(activation_t* p, unsigned word)
{
    *reinterpret_cast<unsigned*>(p) = word;
}

__device__ __forceinline__ uint4 load_16(const activation_t* p) { return *reinterpret_cast<const uint4*>(p); }

__device__ __forceinline__ unsigned word_of(const uint2& v, int i) { return i == 0 ? v.x : v.y; }

__device__ __forceinline__ unsigned word_of(const uint4& v, int i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The two codes in bytes 0, 1 (SELECTORS 0x4140) or 2, 3 (0x4342) of a word, as a pair of activations: exact.
template <unsigned SELECTORS>
__device__ __forceinline__ unsigned widen(unsigned codes)
{
#if ACTIVATION == ACTIVATION_BFLOAT16
    // 0x43 above a byte is 128 + its low seven bits, and 256 in place of 128 with its sign bit alone.
    const unsigned both = prmt(codes, 0x43434343u, SELECTORS);
    return bits_of(__hsub2(pair_of(both & 0xff7fff7fu), pair_of(both & 0xff80ff80u)));
#else
    // 0x64 above a byte is 1024 + the byte, and the byte is code + 128.
    const unsigned both = prmt(codes ^ 0x80808080u, 0x64646464u, SELECTORS);
    return bits_of(__hsub2(pair_of(both), pair_of(0x64806480u)));
#endif
}

// Columns 2i (low) and 2i + 1 (high) of what is loaded of two tokens, the tokens side by side.
template <typename T>
__device__ __forceinline__ void token_pairs(
    const T& first, const T& second, int i, unsigned& low, unsigned& high)
{
#if KV_INT8
    const unsigned a = word_of(first, i / 2), b = word_of(second, i / 2);
    const unsigned codes = i % 2 == 0 ? prmt(a, b, 0x5140) : prmt(a, b, 0x7362);
    low = widen<0x4140>(codes);
    high = widen<0x4342>(codes);
#else
    const unsigned a = word_of(first, i), b = word_of(second, i);
    low = prmt(a, b, 0x5410);
    high = prmt(a, b, 0x7632);
#endif
}

// One head of a new token, a warp at work: columns 2 lane, +1 of the lower half and of the upper half of the
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

#if KV_INT8
__device__ __forceinline__ unsigned code_of(float x, float scale)
{
    const int code = scale > 0.f ? __float2int_rn(x / scale) : 0;
    return static_cast<unsigned>(max(-127, min(127, code))) & 0xffu;
}

// Codes of a head that a warp holds as rope_head does: two bytes of the lower half in low, two of the upper
// in high; the scale comes back. A NaN anywhere makes the scale NaN, so that it shows.
__device__ __forceinline__ float quantise_head(
    unsigned low_word, unsigned high_word, unsigned& low, unsigned& high)
{
    const float2 a = to_floats(pair_of(low_word)), b = to_floats(pair_of(high_word));
    float most = fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y)));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
    }
    const bool odd = a.x != a.x || a.y != a.y || b.x != b.x || b.y != b.y;
    const float scale = __any_sync(0xffffffffu, odd) ? __int_as_float(0x7fc00000) : most / 127.f;
    low = code_of(a.x, scale) | code_of(a.y, scale) << 8;
    high = code_of(b.x, scale) | code_of(b.y, scale) << 8;
    return scale;
}
#endif

// Places that a head goes to, with the scale of its token.
template <int COUNT>
struct Head {
    stored_t* columns[COUNT];
    float* scale[COUNT];
};

// Writes a head that a warp holds as rope_head does.
template <int COUNT>
__device__ __forceinline__ void store_head(
    const Head<COUNT>& to, unsigned low_word, unsigned high_word, int lane)
{
#if KV_INT8
    unsigned low, high;
    const float scale = quantise_head(low_word, high_word, low, high);
#endif
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (lane < WORDS) {
#if KV_INT8
            uint16_t* pairs = reinterpret_cast<uint16_t*>(to.columns[i] + 2 * lane);
            pairs[0] = static_cast<uint16_t>(low);
            pairs[HEAD_DIM / 4] = static_cast<uint16_t>(high);
#else
            store_word(to.columns[i] + 2 * lane, low_word);
            store_word(to.columns[i] + HEAD_DIM / 2 + 2 * lane, high_word);
#endif
        }
#if KV_INT8
        if (lane == 0) {
            *to.scale[i] = scale;
        }
#endif
    }
}
