// Values as 64-bit patterns: how operands travel to the runtime and back.
#pragma once
#include <stdint.h>
#include "qualifiers.h"

namespace cuemu {
template <class T> CUEMU_INLINE uint64_t bits(T value)
{
    static_assert(sizeof(T) <= 8, "at most 8 bytes can go through a warp operation or an atomic");
    uint64_t pattern = 0;
    __builtin_memcpy(&pattern, &value, sizeof(T));
    return pattern;
}

template <class T> CUEMU_INLINE T from_bits(uint64_t pattern)
{
    T value;
    __builtin_memcpy((void*)&value, &pattern, sizeof(T));
    return value;
}

// A parameter of this type takes no part in template deduction: __stcs(float*, 1) is a float store.
template <class T> struct Same {
    typedef T type;
};
}  // namespace cuemu
