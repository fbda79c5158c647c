// cuda_bf16.h: __nv_bfloat16 and __nv_bfloat162.
#pragma once
#include "half.h"

struct __nv_bfloat16_raw {
    unsigned short x;
};

struct __nv_bfloat16 : cuemu::Arithmetic16<__nv_bfloat16> {
    unsigned short bits;

    __nv_bfloat16() = default;
    __nv_bfloat16(float f) : bits(cuemu::float_to_bfloat(f)) {}
    __nv_bfloat16(double d) : bits(cuemu::float_to_bfloat(cuemu::round_to_odd(d))) {}
    __nv_bfloat16(int i) : __nv_bfloat16((double)i) {}
    __nv_bfloat16(unsigned i) : __nv_bfloat16((double)i) {}
    __nv_bfloat16(short i) : __nv_bfloat16((float)i) {}
    __nv_bfloat16(unsigned short i) : __nv_bfloat16((float)i) {}
    explicit __nv_bfloat16(__half h) : __nv_bfloat16((float)h) {}
    constexpr __nv_bfloat16(__nv_bfloat16_raw raw) : bits(raw.x) {}
    operator float() const { return cuemu::bfloat_to_float(bits); }
    operator __nv_bfloat16_raw() const { return __nv_bfloat16_raw{bits}; }

    static __attribute__((always_inline)) __nv_bfloat16 round(float f) { return __nv_bfloat16(f); }
    static __attribute__((always_inline)) float fused(float a, float b, float c)
    {
        return cuemu::fused_to_odd(a, b, c);
    }
    static __attribute__((always_inline)) __nv_bfloat16 with_pattern(unsigned pattern)
    {
        return __nv_bfloat16(__nv_bfloat16_raw{(unsigned short)pattern});
    }
    __attribute__((always_inline)) unsigned short pattern() const { return bits; }
};
typedef __nv_bfloat16 nv_bfloat16;

struct __attribute__((aligned(4))) __nv_bfloat162 : cuemu::PairArithmetic16<__nv_bfloat162, __nv_bfloat16> {
    __nv_bfloat16 x, y;
    __nv_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) : x(low), y(high) {}
    CUEMU_COPY_AS_ONE(__nv_bfloat162, 4)
};
typedef __nv_bfloat162 nv_bfloat162;

CUEMU_INLINE float __bfloat162float(__nv_bfloat16 b) { return (float)b; }
CUEMU_INLINE __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
CUEMU_INLINE __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
CUEMU_INLINE __nv_bfloat16 __double2bfloat16(double d) { return __nv_bfloat16(d); }
CUEMU_INLINE __nv_bfloat16 __short_as_bfloat16(short s)
{
    return __nv_bfloat16::with_pattern((unsigned short)s);
}
CUEMU_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short s) { return __nv_bfloat16::with_pattern(s); }
CUEMU_INLINE short __bfloat16_as_short(__nv_bfloat16 b) { return (short)b.bits; }
CUEMU_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.bits; }

#define CUEMU_BFLOAT_INTEGER(name, T)                                                                        \
    CUEMU_INLINE __nv_bfloat16 __##name##2bfloat16_rn(T i) { return __nv_bfloat16((double)i); }              \
    CUEMU_INLINE T __bfloat162##name##_rn(__nv_bfloat16 b) { return (T)rintf((float)b); }                    \
    CUEMU_INLINE T __bfloat162##name##_rz(__nv_bfloat16 b) { return (T)(float)b; }
CUEMU_BFLOAT_INTEGER(short, short)
CUEMU_BFLOAT_INTEGER(ushort, unsigned short)
CUEMU_BFLOAT_INTEGER(int, int)
CUEMU_BFLOAT_INTEGER(uint, unsigned)

CUEMU_INLINE __nv_bfloat162 make_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high)
{
    return __nv_bfloat162(low, high);
}
CUEMU_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high)
{
    return __nv_bfloat162(low, high);
}
CUEMU_INLINE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 both) { return __nv_bfloat162(both, both); }
CUEMU_INLINE __nv_bfloat162 __float2bfloat162_rn(float both) { return __nv_bfloat162(both, both); }
CUEMU_INLINE __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return __nv_bfloat162(low, high); }
CUEMU_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 f) { return __nv_bfloat162(f.x, f.y); }
CUEMU_INLINE float2 __bfloat1622float2(__nv_bfloat162 b) { return float2((float)b.x, (float)b.y); }
CUEMU_INLINE __nv_bfloat16 __low2bfloat16(__nv_bfloat162 b) { return b.x; }
CUEMU_INLINE __nv_bfloat16 __high2bfloat16(__nv_bfloat162 b) { return b.y; }
CUEMU_INLINE __nv_bfloat162 __low2bfloat162(__nv_bfloat162 b) { return __nv_bfloat162(b.x, b.x); }
CUEMU_INLINE __nv_bfloat162 __high2bfloat162(__nv_bfloat162 b) { return __nv_bfloat162(b.y, b.y); }
