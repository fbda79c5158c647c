// CUDA's arithmetic functions and integer intrinsics that a C++ library does not have. Approximate ones
// (__expf …) are as exact as the library's here.
#pragma once
#include <math.h>
#include <type_traits>
#include "abi.h"
#include "bits.h"
#include "vector_types.h"

template <class A, class B> CUEMU_INLINE constexpr typename std::common_type<A, B>::type min(A a, B b)
{
    typedef typename std::common_type<A, B>::type C;
    return (C)b < (C)a ? (C)b : (C)a;
}
template <class A, class B> CUEMU_INLINE constexpr typename std::common_type<A, B>::type max(A a, B b)
{
    typedef typename std::common_type<A, B>::type C;
    return (C)a < (C)b ? (C)b : (C)a;
}

// float. `volatile` keeps the compiler from fusing what CUDA promises to round.
CUEMU_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
CUEMU_INLINE float __fadd_rn(float a, float b)
{
    volatile float r = a + b;
    return r;
}
CUEMU_INLINE float __fsub_rn(float a, float b)
{
    volatile float r = a - b;
    return r;
}
CUEMU_INLINE float __fmul_rn(float a, float b)
{
    volatile float r = a * b;
    return r;
}
CUEMU_INLINE float __fdiv_rn(float a, float b) { return a / b; }
CUEMU_INLINE float __fdividef(float a, float b) { return a / b; }
CUEMU_INLINE float fdividef(float a, float b) { return a / b; }
CUEMU_INLINE float __frcp_rn(float a) { return 1.0f / a; }
CUEMU_INLINE float __fsqrt_rn(float a) { return sqrtf(a); }
CUEMU_INLINE float __frsqrt_rn(float a) { return 1.0f / sqrtf(a); }
CUEMU_INLINE float __saturatef(float a) { return a > 0.f ? (a < 1.f ? a : 1.f) : 0.f; }
CUEMU_INLINE double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
namespace cuemu {
CUEMU_INLINE float reciprocal_sqrt(float a) { return 1.0f / sqrtf(a); }
CUEMU_INLINE double reciprocal_sqrt(double a) { return 1.0 / sqrt(a); }
}  // namespace cuemu
// Macros, since C libraries declare some of these names themselves.
#define rsqrtf(a) cuemu::reciprocal_sqrt((float)(a))
#define rsqrt(a) cuemu::reciprocal_sqrt((double)(a))
#define exp10f(a) powf(10.0f, a)
#define __expf(a) expf(a)
#define __exp10f(a) powf(10.0f, a)
#define __logf(a) logf(a)
#define __log2f(a) log2f(a)
#define __log10f(a) log10f(a)
#define __powf(a, b) powf(a, b)
#define __sinf(a) sinf(a)
#define __cosf(a) cosf(a)
#define __tanf(a) tanf(a)

// Conversions. Out of range saturates and NaN gives zero, as on a GPU (a CPU would give the most negative
// integer).
namespace cuemu {
template <class Integer, class Float> CUEMU_INLINE Integer saturating_cast(Float x)
{
    const int width = 8 * (int)sizeof(Integer),
              magnitude_bits = std::is_signed<Integer>::value ? width - 1 : width;
    const Integer largest =
        (Integer)(~(Integer)0 ^ (std::is_signed<Integer>::value ? (Integer)((Integer)1 << (width - 1)) : 0));
    const Float limit =
        (Float)2 * (Float)((unsigned long long)1 << (magnitude_bits - 1));  // one past the largest
    if (!(x == x)) return 0;
    if (x >= limit) return largest;
    if (std::is_signed<Integer>::value ? x < -limit : x < 0)
        return (Integer)(std::is_signed<Integer>::value ? -largest - 1 : 0);
    return (Integer)x;
}
}  // namespace cuemu
#define CUEMU_CONVERT(name, Integer, Float, suffix)                                                          \
    CUEMU_INLINE Integer __##name##_rn(Float x) { return cuemu::saturating_cast<Integer>(rint##suffix(x)); } \
    CUEMU_INLINE Integer __##name##_rz(Float x) { return cuemu::saturating_cast<Integer>(x); }               \
    CUEMU_INLINE Integer __##name##_rd(Float x)                                                              \
    {                                                                                                        \
        return cuemu::saturating_cast<Integer>(floor##suffix(x));                                            \
    }                                                                                                        \
    CUEMU_INLINE Integer __##name##_ru(Float x) { return cuemu::saturating_cast<Integer>(ceil##suffix(x)); }
CUEMU_CONVERT(float2int, int, float, f)
CUEMU_CONVERT(float2uint, unsigned, float, f)
CUEMU_CONVERT(float2ll, long long, float, f)
CUEMU_CONVERT(float2ull, unsigned long long, float, f)
CUEMU_CONVERT(double2int, int, double, )
CUEMU_CONVERT(double2uint, unsigned, double, )
CUEMU_CONVERT(double2ll, long long, double, )
CUEMU_CONVERT(double2ull, unsigned long long, double, )
CUEMU_INLINE float __int2float_rn(int i) { return (float)i; }
CUEMU_INLINE float __uint2float_rn(unsigned i) { return (float)i; }
CUEMU_INLINE float __ll2float_rn(long long i) { return (float)i; }
CUEMU_INLINE float __ull2float_rn(unsigned long long i) { return (float)i; }
CUEMU_INLINE double __int2double_rn(int i) { return (double)i; }
CUEMU_INLINE float __double2float_rn(double d) { return (float)d; }
CUEMU_INLINE float __int_as_float(int i) { return cuemu::from_bits<float>((uint32_t)i); }
CUEMU_INLINE float __uint_as_float(unsigned i) { return cuemu::from_bits<float>(i); }
CUEMU_INLINE int __float_as_int(float f) { return (int)cuemu::bits(f); }
CUEMU_INLINE unsigned __float_as_uint(float f) { return (unsigned)cuemu::bits(f); }
CUEMU_INLINE double __longlong_as_double(long long i) { return cuemu::from_bits<double>((uint64_t)i); }
CUEMU_INLINE long long __double_as_longlong(double d) { return (long long)cuemu::bits(d); }

// Bits.
CUEMU_INLINE int __popc(unsigned a) { return __builtin_popcount(a); }
CUEMU_INLINE int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
CUEMU_INLINE int __clz(int a) { return a ? __builtin_clz((unsigned)a) : 32; }
CUEMU_INLINE int __clzll(long long a) { return a ? __builtin_clzll((unsigned long long)a) : 64; }
CUEMU_INLINE int __ffs(int a) { return __builtin_ffs(a); }
CUEMU_INLINE int __ffsll(long long a) { return __builtin_ffsll(a); }
CUEMU_INLINE unsigned __brev(unsigned a)
{
    a = (a >> 1 & 0x55555555u) | (a & 0x55555555u) << 1;
    a = (a >> 2 & 0x33333333u) | (a & 0x33333333u) << 2;
    a = (a >> 4 & 0x0f0f0f0fu) | (a & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(a);
}
CUEMU_INLINE unsigned long long __brevll(unsigned long long a)
{
    return (unsigned long long)__brev((unsigned)a) << 32 | __brev((unsigned)(a >> 32));
}
CUEMU_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift)
{
    return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
CUEMU_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift)
{
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
CUEMU_INLINE unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift)
{
    return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
CUEMU_INLINE unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift)
{
    return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}
// Four selectors of four bits: which of eight bytes, and whether to spread its sign over the byte instead.
CUEMU_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors)
{
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned selector = selectors >> (4 * i) & 0xf;
        unsigned byte = (unsigned)(bytes >> (8 * (selector & 7))) & 0xff;
        if (selector & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << (8 * i);
    }
    return result;
}

// Integer products.
CUEMU_INLINE int __mul24(int a, int b)
{
    return (int)((int64_t)((int)((unsigned)a << 8) >> 8) * ((int)((unsigned)b << 8) >> 8));
}
CUEMU_INLINE unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
CUEMU_INLINE int __mulhi(int a, int b) { return (int)(((int64_t)a * b) >> 32); }
CUEMU_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
CUEMU_INLINE long long __mul64hi(long long a, long long b) { return (long long)(((__int128)a * b) >> 64); }
CUEMU_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
CUEMU_INLINE unsigned __sad(int a, int b, unsigned c)
{
    return c + (a > b ? (unsigned)a - (unsigned)b : (unsigned)b - (unsigned)a);
}
// Dot product of four bytes added to c.
CUEMU_INLINE int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 32; i += 8)
        c += (int)(signed char)((unsigned)a >> i) * (int)(signed char)((unsigned)b >> i);
    return c;
}
CUEMU_INLINE unsigned __dp4a(unsigned a, unsigned b, unsigned c)
{
    for (int i = 0; i < 32; i += 8) c += (a >> i & 0xffu) * (b >> i & 0xffu);
    return c;
}
CUEMU_INLINE int __dp4a(char4 a, char4 b, int c) { return c + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
CUEMU_INLINE unsigned __dp4a(uchar4 a, uchar4 b, unsigned c)
{
    return c + (unsigned)(a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w);
}

// Clock, end of the program, output. Nanoseconds of the host: good for nothing but being different each time.
CUEMU_INLINE long long clock64() { return cuemu_clock(); }
CUEMU_INLINE void __trap() { cuemu_trap(); }
CUEMU_INLINE unsigned __isGlobal(const void*) { return 1; }
