// What half and bfloat16 have in common: arithmetic is done in float and rounded once to 16 bits (float's 24
// bits are enough for +, −, ×, ÷ and square root to be rounded as if done directly). The functions are
// friends of the types, so that they are found by argument and take whatever converts to the type.
#pragma once
#include <math.h>
#include "half_bits.h"
#include "qualifiers.h"

#define CUEMU_FRIEND friend inline __attribute__((always_inline))

namespace cuemu {

// Self converts to float and has Self::round(float) and Self::fused(a, b, c), which is a·b + c rounded to
// odd: rounding that to 16 bits is the single rounding of a fused multiply-add.
template <class Self> struct Arithmetic16 {
    CUEMU_FRIEND Self __hadd(Self a, Self b) { return Self::round((float)a + (float)b); }
    CUEMU_FRIEND Self __hsub(Self a, Self b) { return Self::round((float)a - (float)b); }
    CUEMU_FRIEND Self __hmul(Self a, Self b) { return Self::round((float)a * (float)b); }
    CUEMU_FRIEND Self __hdiv(Self a, Self b) { return Self::round((float)a / (float)b); }
    CUEMU_FRIEND Self __hadd_rn(Self a, Self b) { return __hadd(a, b); }
    CUEMU_FRIEND Self __hsub_rn(Self a, Self b) { return __hsub(a, b); }
    CUEMU_FRIEND Self __hmul_rn(Self a, Self b) { return __hmul(a, b); }
    CUEMU_FRIEND Self __hneg(Self a) { return Self::with_pattern(a.pattern() ^ 0x8000u); }
    CUEMU_FRIEND Self __habs(Self a) { return Self::with_pattern(a.pattern() & 0x7fffu); }
    CUEMU_FRIEND Self __hfma(Self a, Self b, Self c)
    {
        return Self::round(Self::fused((float)a, (float)b, (float)c));
    }
    CUEMU_FRIEND Self __hfma_relu(Self a, Self b, Self c)
    {
        const float r = (float)__hfma(a, b, c);
        return Self::round(r > 0.f || r != r ? r : 0.f);
    }
    CUEMU_FRIEND Self __hadd_sat(Self a, Self b) { return Self::round(saturate((float)__hadd(a, b))); }
    CUEMU_FRIEND Self __hmul_sat(Self a, Self b) { return Self::round(saturate((float)__hmul(a, b))); }

    // fmaxf and fminf return the other operand when one is NaN; so do these.
    CUEMU_FRIEND Self __hmax(Self a, Self b) { return Self::round(fmaxf((float)a, (float)b)); }
    CUEMU_FRIEND Self __hmin(Self a, Self b) { return Self::round(fminf((float)a, (float)b)); }
    CUEMU_FRIEND Self __hmax_nan(Self a, Self b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmax(a, b); }
    CUEMU_FRIEND Self __hmin_nan(Self a, Self b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmin(a, b); }
    CUEMU_FRIEND bool __hisnan(Self a) { return (float)a != (float)a; }
    CUEMU_FRIEND int __hisinf(Self a) { return (float)a == INFINITY ? 1 : (float)a == -INFINITY ? -1 : 0; }

    CUEMU_FRIEND bool __heq(Self a, Self b) { return (float)a == (float)b; }
    CUEMU_FRIEND bool __hne(Self a, Self b) { return (float)a < (float)b || (float)a > (float)b; }  // ordered
    CUEMU_FRIEND bool __hlt(Self a, Self b) { return (float)a < (float)b; }
    CUEMU_FRIEND bool __hle(Self a, Self b) { return (float)a <= (float)b; }
    CUEMU_FRIEND bool __hgt(Self a, Self b) { return (float)a > (float)b; }
    CUEMU_FRIEND bool __hge(Self a, Self b) { return (float)a >= (float)b; }
    CUEMU_FRIEND bool __hneu(Self a, Self b) { return (float)a != (float)b; }  // unordered: true for NaN

    CUEMU_FRIEND Self operator+(Self a, Self b) { return __hadd(a, b); }
    CUEMU_FRIEND Self operator-(Self a, Self b) { return __hsub(a, b); }
    CUEMU_FRIEND Self operator*(Self a, Self b) { return __hmul(a, b); }
    CUEMU_FRIEND Self operator/(Self a, Self b) { return __hdiv(a, b); }
    CUEMU_FRIEND Self operator+(Self a) { return a; }
    CUEMU_FRIEND Self operator-(Self a) { return __hneg(a); }
    CUEMU_FRIEND Self& operator+=(Self& a, Self b) { return a = __hadd(a, b); }
    CUEMU_FRIEND Self& operator-=(Self& a, Self b) { return a = __hsub(a, b); }
    CUEMU_FRIEND Self& operator*=(Self& a, Self b) { return a = __hmul(a, b); }
    CUEMU_FRIEND Self& operator/=(Self& a, Self b) { return a = __hdiv(a, b); }
    CUEMU_FRIEND Self& operator++(Self& a) { return a = __hadd(a, Self::round(1.f)); }
    CUEMU_FRIEND Self& operator--(Self& a) { return a = __hsub(a, Self::round(1.f)); }
    CUEMU_FRIEND bool operator==(Self a, Self b) { return __heq(a, b); }
    CUEMU_FRIEND bool operator!=(Self a, Self b) { return __hneu(a, b); }
    CUEMU_FRIEND bool operator<(Self a, Self b) { return __hlt(a, b); }
    CUEMU_FRIEND bool operator<=(Self a, Self b) { return __hle(a, b); }
    CUEMU_FRIEND bool operator>(Self a, Self b) { return __hgt(a, b); }
    CUEMU_FRIEND bool operator>=(Self a, Self b) { return __hge(a, b); }

    CUEMU_FRIEND Self hsqrt(Self a) { return Self::round(sqrtf((float)a)); }
    CUEMU_FRIEND Self hrsqrt(Self a) { return Self::round(1.f / sqrtf((float)a)); }
    CUEMU_FRIEND Self hrcp(Self a) { return Self::round(1.f / (float)a); }
    CUEMU_FRIEND Self hexp(Self a) { return Self::round(expf((float)a)); }
    CUEMU_FRIEND Self hexp2(Self a) { return Self::round(exp2f((float)a)); }
    CUEMU_FRIEND Self hlog(Self a) { return Self::round(logf((float)a)); }
    CUEMU_FRIEND Self hlog2(Self a) { return Self::round(log2f((float)a)); }
    CUEMU_FRIEND Self hsin(Self a) { return Self::round(sinf((float)a)); }
    CUEMU_FRIEND Self hcos(Self a) { return Self::round(cosf((float)a)); }
    CUEMU_FRIEND Self htanh(Self a) { return Self::round(tanhf((float)a)); }
    CUEMU_FRIEND Self hfloor(Self a) { return Self::round(floorf((float)a)); }
    CUEMU_FRIEND Self hceil(Self a) { return Self::round(ceilf((float)a)); }
    CUEMU_FRIEND Self htrunc(Self a) { return Self::round(truncf((float)a)); }
    CUEMU_FRIEND Self hrint(Self a) { return Self::round(rintf((float)a)); }

    static float saturate(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }
};

// Two of them side by side.
template <class Pair, class Scalar> struct PairArithmetic16 {
#define CUEMU_PAIR_UNARY(name, each)                                                                         \
    CUEMU_FRIEND Pair name(Pair a) { return Pair(each(a.x), each(a.y)); }
#define CUEMU_PAIR_BINARY(name, each)                                                                        \
    CUEMU_FRIEND Pair name(Pair a, Pair b) { return Pair(each(a.x, b.x), each(a.y, b.y)); }
// One for true and zero for false, by element …
#define CUEMU_PAIR_COMPARE(name, each)                                                                       \
    CUEMU_FRIEND Pair name(Pair a, Pair b)                                                                   \
    {                                                                                                        \
        return Pair(Scalar::round(each(a.x, b.x)), Scalar::round(each(a.y, b.y)));                           \
    }
// … or whether it holds for both.
#define CUEMU_PAIR_BOTH(name, each)                                                                          \
    CUEMU_FRIEND bool name(Pair a, Pair b) { return each(a.x, b.x) && each(a.y, b.y); }

    CUEMU_PAIR_BINARY(__hadd2, __hadd)
    CUEMU_PAIR_BINARY(__hsub2, __hsub)
    CUEMU_PAIR_BINARY(__hmul2, __hmul)
    CUEMU_PAIR_BINARY(__h2div, __hdiv)
    CUEMU_PAIR_BINARY(__hadd2_rn, __hadd)
    CUEMU_PAIR_BINARY(__hsub2_rn, __hsub)
    CUEMU_PAIR_BINARY(__hmul2_rn, __hmul)
    CUEMU_PAIR_BINARY(__hmax2, __hmax)
    CUEMU_PAIR_BINARY(__hmin2, __hmin)
    CUEMU_PAIR_UNARY(__hneg2, __hneg)
    CUEMU_PAIR_UNARY(__habs2, __habs)
    CUEMU_FRIEND Pair __hfma2(Pair a, Pair b, Pair c)
    {
        return Pair(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
    }
    CUEMU_FRIEND Pair __hfma2_relu(Pair a, Pair b, Pair c)
    {
        return Pair(__hfma_relu(a.x, b.x, c.x), __hfma_relu(a.y, b.y, c.y));
    }

    CUEMU_PAIR_COMPARE(__heq2, __heq)
    CUEMU_PAIR_COMPARE(__hne2, __hne)
    CUEMU_PAIR_COMPARE(__hlt2, __hlt)
    CUEMU_PAIR_COMPARE(__hle2, __hle)
    CUEMU_PAIR_COMPARE(__hgt2, __hgt)
    CUEMU_PAIR_COMPARE(__hge2, __hge)
    CUEMU_FRIEND Pair __hisnan2(Pair a)
    {
        return Pair(Scalar::round(__hisnan(a.x)), Scalar::round(__hisnan(a.y)));
    }
    CUEMU_PAIR_BOTH(__hbeq2, __heq)
    CUEMU_PAIR_BOTH(__hbne2, __hne)
    CUEMU_PAIR_BOTH(__hblt2, __hlt)
    CUEMU_PAIR_BOTH(__hble2, __hle)
    CUEMU_PAIR_BOTH(__hbgt2, __hgt)
    CUEMU_PAIR_BOTH(__hbge2, __hge)

    CUEMU_FRIEND Pair operator+(Pair a, Pair b) { return __hadd2(a, b); }
    CUEMU_FRIEND Pair operator-(Pair a, Pair b) { return __hsub2(a, b); }
    CUEMU_FRIEND Pair operator*(Pair a, Pair b) { return __hmul2(a, b); }
    CUEMU_FRIEND Pair operator/(Pair a, Pair b) { return __h2div(a, b); }
    CUEMU_FRIEND Pair operator+(Pair a) { return a; }
    CUEMU_FRIEND Pair operator-(Pair a) { return __hneg2(a); }
    CUEMU_FRIEND Pair& operator+=(Pair& a, Pair b) { return a = __hadd2(a, b); }
    CUEMU_FRIEND Pair& operator-=(Pair& a, Pair b) { return a = __hsub2(a, b); }
    CUEMU_FRIEND Pair& operator*=(Pair& a, Pair b) { return a = __hmul2(a, b); }
    CUEMU_FRIEND Pair& operator/=(Pair& a, Pair b) { return a = __h2div(a, b); }
    CUEMU_FRIEND bool operator==(Pair a, Pair b) { return __hbeq2(a, b); }
    CUEMU_FRIEND bool operator!=(Pair a, Pair b) { return __hneu(a.x, b.x) && __hneu(a.y, b.y); }
    CUEMU_FRIEND bool operator<(Pair a, Pair b) { return __hblt2(a, b); }
    CUEMU_FRIEND bool operator<=(Pair a, Pair b) { return __hble2(a, b); }
    CUEMU_FRIEND bool operator>(Pair a, Pair b) { return __hbgt2(a, b); }
    CUEMU_FRIEND bool operator>=(Pair a, Pair b) { return __hbge2(a, b); }

    CUEMU_PAIR_UNARY(h2sqrt, hsqrt)
    CUEMU_PAIR_UNARY(h2rsqrt, hrsqrt)
    CUEMU_PAIR_UNARY(h2rcp, hrcp)
    CUEMU_PAIR_UNARY(h2exp, hexp)
    CUEMU_PAIR_UNARY(h2exp2, hexp2)
    CUEMU_PAIR_UNARY(h2log, hlog)
    CUEMU_PAIR_UNARY(h2log2, hlog2)
    CUEMU_PAIR_UNARY(h2floor, hfloor)
    CUEMU_PAIR_UNARY(h2ceil, hceil)
    CUEMU_PAIR_UNARY(h2rint, hrint)

    CUEMU_FRIEND Scalar __low2half(Pair a) { return a.x; }
    CUEMU_FRIEND Scalar __high2half(Pair a) { return a.y; }
    CUEMU_FRIEND float __low2float(Pair a) { return (float)a.x; }
    CUEMU_FRIEND float __high2float(Pair a) { return (float)a.y; }
    CUEMU_FRIEND Pair __low2half2(Pair a) { return Pair(a.x, a.x); }
    CUEMU_FRIEND Pair __high2half2(Pair a) { return Pair(a.y, a.y); }
    CUEMU_FRIEND Pair __lows2half2(Pair a, Pair b) { return Pair(a.x, b.x); }
    CUEMU_FRIEND Pair __highs2half2(Pair a, Pair b) { return Pair(a.y, b.y); }
    CUEMU_FRIEND Pair __lowhigh2highlow(Pair a) { return Pair(a.y, a.x); }
#undef CUEMU_PAIR_UNARY
#undef CUEMU_PAIR_BINARY
#undef CUEMU_PAIR_COMPARE
#undef CUEMU_PAIR_BOTH
};
}  // namespace cuemu
