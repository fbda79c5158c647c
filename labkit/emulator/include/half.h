// cuda_fp16.h: __half and __half2.
#pragma once
#include "float16.h"
#include "vector_types.h"

struct __half_raw {
    unsigned short x;
};
struct __half2_raw {
    unsigned short x, y;
};

struct __half : cuemu::Arithmetic16<__half> {
    cuemu::half_storage value;

    __half() = default;
    CUEMU_HALF_CONSTEXPR __half(float f) : value(cuemu::nearest_half(f)) {}
    __half(double d) : value(cuemu::nearest_half(cuemu::round_to_odd(d))) {}
    CUEMU_HALF_CONSTEXPR __half(int i) : value(cuemu::nearest_half((float)i)) {}
    CUEMU_HALF_CONSTEXPR __half(unsigned i) : value(cuemu::nearest_half((float)i)) {}
    CUEMU_HALF_CONSTEXPR __half(short i) : value(cuemu::nearest_half((float)i)) {}
    CUEMU_HALF_CONSTEXPR __half(unsigned short i) : value(cuemu::nearest_half((float)i)) {}
    CUEMU_HALF_CONSTEXPR __half(long long i) : value(cuemu::nearest_half((float)i)) {}
    CUEMU_HALF_CONSTEXPR __half(unsigned long long i) : value(cuemu::nearest_half((float)i)) {}
    __half(__half_raw raw) { __builtin_memcpy(this, &raw, 2); }
    CUEMU_HALF_CONSTEXPR operator float() const { return (float)value; }
    operator __half_raw() const { return __half_raw{pattern()}; }

    static __attribute__((always_inline)) __half round(float f) { return __half(f); }
    // A product of halves is exact in float; the error of the sum says where to find the odd neighbour.
    static __attribute__((always_inline)) float fused(float a, float b, float c)
    {
        const float product = a * b, sum = product + c, added = sum - product;
        const float error = (product - (sum - added)) + (c - added);
        uint32_t pattern = cuemu::pattern_of_float(sum);
        if ((error < 0.f || error > 0.f) && !(pattern & 1u))
            pattern += (error > 0.f) == (sum > 0.f) ? 1u : ~0u;
        return cuemu::float_of_pattern(pattern);
    }
    static __attribute__((always_inline)) __half with_pattern(unsigned pattern)
    {
        return __half(__half_raw{(unsigned short)pattern});
    }
    __attribute__((always_inline)) unsigned short pattern() const
    {
        unsigned short bits;
        __builtin_memcpy(&bits, this, 2);
        return bits;
    }
};
typedef __half half;
typedef __half nv_half;

struct __attribute__((aligned(4))) __half2 : cuemu::PairArithmetic16<__half2, __half> {
    __half x, y;
    CUEMU_HALF_CONSTEXPR __half2(__half low, __half high) : x(low), y(high) {}
    __half2(__half2_raw raw) : x(__half_raw{raw.x}), y(__half_raw{raw.y}) {}
    CUEMU_COPY_AS_ONE(__half2, 4)
};
typedef __half2 half2;
typedef __half2 nv_half2;

// Conversions.
CUEMU_INLINE float __half2float(__half h) { return (float)h; }
CUEMU_INLINE __half __float2half(float f) { return __half(f); }
CUEMU_INLINE __half __float2half_rn(float f) { return __half(f); }
CUEMU_INLINE __half __double2half(double d) { return __half(d); }
CUEMU_INLINE __half __short_as_half(short s) { return __half(__half_raw{(unsigned short)s}); }
CUEMU_INLINE __half __ushort_as_half(unsigned short s) { return __half(__half_raw{s}); }
CUEMU_INLINE short __half_as_short(__half h) { return (short)h.pattern(); }
CUEMU_INLINE unsigned short __half_as_ushort(__half h) { return h.pattern(); }

// Toward zero: the nearest, and one step back where that lies beyond.
CUEMU_INLINE __half __float2half_rz(float f)
{
    const __half nearest(f);
    return fabsf((float)nearest) > fabsf(f) ? __half::with_pattern(nearest.pattern() - 1u) : nearest;
}

#define CUEMU_HALF_INTEGER(name, T)                                                                          \
    CUEMU_INLINE __half __##name##2half_rn(T i) { return __half((float)i); }                                 \
    CUEMU_INLINE T __half2##name##_rn(__half h) { return (T)rintf((float)h); }                               \
    CUEMU_INLINE T __half2##name##_rz(__half h) { return (T)(float)h; }                                      \
    CUEMU_INLINE T __half2##name##_rd(__half h) { return (T)floorf((float)h); }                              \
    CUEMU_INLINE T __half2##name##_ru(__half h) { return (T)ceilf((float)h); }
CUEMU_HALF_INTEGER(short, short)
CUEMU_HALF_INTEGER(ushort, unsigned short)
CUEMU_HALF_INTEGER(int, int)
CUEMU_HALF_INTEGER(uint, unsigned)
CUEMU_HALF_INTEGER(ll, long long)
CUEMU_HALF_INTEGER(ull, unsigned long long)

CUEMU_INLINE __half2 make_half2(__half low, __half high) { return __half2(low, high); }
CUEMU_INLINE __half2 __halves2half2(__half low, __half high) { return __half2(low, high); }
CUEMU_INLINE __half2 __half2half2(__half both) { return __half2(both, both); }
CUEMU_INLINE __half2 __float2half2_rn(float both) { return __half2(__half(both), __half(both)); }
CUEMU_INLINE __half2 __floats2half2_rn(float low, float high) { return __half2(__half(low), __half(high)); }
CUEMU_INLINE __half2 __float22half2_rn(float2 f) { return __half2(__half(f.x), __half(f.y)); }
CUEMU_INLINE float2 __half22float2(__half2 h) { return float2((float)h.x, (float)h.y); }
