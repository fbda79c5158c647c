// FP16 and BF16 patterns to float and back, round to nearest even. Shared by kernels and runtime.
#pragma once
#include <stdint.h>

namespace cuemu {
static inline float float_of_pattern(uint32_t pattern)
{
    float value;
    __builtin_memcpy(&value, &pattern, 4);
    return value;
}
static inline uint32_t pattern_of_float(float value)
{
    uint32_t pattern;
    __builtin_memcpy(&pattern, &value, 4);
    return pattern;
}

#if defined(__FLT16_MAX__) && !defined(CUEMU_SOFT_HALF)
// The compiler knows _Float16 (g++ ≥ 12, clang): one F16C or FP16 instruction each way. It must not see that
// a float is about to become a half: where the processor computes in FP16 it would multiply and add there,
// fused, and results would depend on the machine.
#define CUEMU_HALF_CONSTEXPR constexpr
typedef _Float16 half_storage;
static constexpr inline __attribute__((always_inline)) half_storage nearest_half(float value)
{
    if (__builtin_is_constant_evaluated() || __builtin_constant_p(value)) return (half_storage)value;
#if defined(__x86_64__)
    __asm__("" : "+x"(value));
#elif defined(__aarch64__)
    __asm__("" : "+w"(value));
#endif
    return (half_storage)value;
}
#else
#define CUEMU_HALF_CONSTEXPR inline
// In software: for compilers without _Float16.
struct half_storage {
    uint16_t pattern;
    half_storage() = default;
    explicit half_storage(float value)
    {
        const uint32_t f = pattern_of_float(value), sign = f >> 16 & 0x8000u, magnitude = f & 0x7fffffffu;
        if (magnitude > 0x7f800000u) {  // NaN, made quiet
            pattern = (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
        } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
            pattern = (uint16_t)(sign | 0x7c00u);
        } else if (magnitude < 0x38800000u) {
            // Below 2^-14: adding 0.5 leaves the subnormal's bits, rounded by the adder, at the bottom of the
            // sum.
            const uint32_t sum = pattern_of_float(float_of_pattern(magnitude) + 0.5f);
            pattern = (uint16_t)(sign | (sum - 0x3f000000u));
        } else {
            const uint32_t odd = magnitude >> 13 & 1u;
            pattern = (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
        }
    }
    explicit operator float() const
    {
        const uint32_t sign = (uint32_t)(pattern & 0x8000u) << 16, rest = pattern & 0x7fffu;
        if (rest >= 0x7c00u) return float_of_pattern(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
        const float scaled = float_of_pattern(rest << 13) * 0x1p112f;  // exact, subnormals included
        return float_of_pattern(sign | pattern_of_float(scaled));
    }
};
static inline half_storage nearest_half(float value) { return half_storage(value); }
#endif

static inline float half_to_float(uint16_t pattern)
{
    half_storage half;
    __builtin_memcpy(&half, &pattern, 2);
    return (float)half;
}
static inline uint16_t float_to_half(float value)
{
    const half_storage half = nearest_half(value);
    uint16_t pattern;
    __builtin_memcpy(&pattern, &half, 2);
    return pattern;
}

static inline float bfloat_to_float(uint16_t pattern) { return float_of_pattern((uint32_t)pattern << 16); }
static inline uint16_t float_to_bfloat(float value)
{
    const uint32_t f = pattern_of_float(value);
    if ((f & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // every NaN becomes CUDA's canonical one
    return (uint16_t)((f + 0x7fffu + (f >> 16 & 1u)) >> 16);
}

// Double to float, rounded to odd: a second rounding to a much narrower type is then the same as a single
// one. Fused multiply-adds of 16-bit types go through here, and need no __truncdfhf2 from a support library.
static inline float round_to_odd(double value)
{
    const float nearest = (float)value;
    const double back = (double)nearest;
    if (back == value || value != value) return nearest;
    uint32_t pattern = pattern_of_float(nearest);
    const bool away_from_zero = value < 0 ? back < value : back > value;
    if (away_from_zero) pattern -= 1;
    return float_of_pattern(pattern | 1u);
}
// a·b + c of floats with at most 26 significant bits between a and b, rounded to odd. The product is exact in
// double; where the sum is not, its error says on which side the odd neighbour lies.
static inline float fused_to_odd(float a, float b, float c)
{
    const double product = (double)a * (double)b, addend = (double)c;
    double sum = product + addend;
    const double added = sum - product, error = (product - (sum - added)) + (addend - added);
    if (error < 0.0 || error > 0.0) {
        uint64_t pattern;
        __builtin_memcpy(&pattern, &sum, 8);
        if (!(pattern & 1u)) pattern += (error > 0.0) == (sum > 0.0) ? 1ull : ~0ull;
        __builtin_memcpy(&sum, &pattern, 8);
    }
    return round_to_odd(sum);
}
}  // namespace cuemu
