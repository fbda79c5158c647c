// atomicAdd … atomicCAS for 32- and 64-bit integers, float, double (add, exchange) and pairs of 16-bit floats
// (add), each also as _block and _system: all are atomic to everybody here.
#pragma once
#include "abi.h"
#include "bfloat16.h"
#include "bits.h"

namespace cuemu {
template <class T> struct AtomicType;
template <> struct AtomicType<int> {
    enum { value = CUEMU_I32 };
};
template <> struct AtomicType<unsigned> {
    enum { value = CUEMU_U32 };
};
template <> struct AtomicType<long long> {
    enum { value = CUEMU_I64 };
};
template <> struct AtomicType<unsigned long long> {
    enum { value = CUEMU_U64 };
};
template <> struct AtomicType<float> {
    enum { value = CUEMU_F32 };
};
template <> struct AtomicType<double> {
    enum { value = CUEMU_F64 };
};
template <> struct AtomicType<__half2> {
    enum { value = CUEMU_F16X2 };
};
template <> struct AtomicType<__nv_bfloat162> {
    enum { value = CUEMU_BF16X2 };
};

template <class T> CUEMU_INLINE T atomic(int op, T* address, T value, T compare = T())
{
    return from_bits<T>(cuemu_atomic(op, AtomicType<T>::value, address, bits(value), bits(compare)));
}
}  // namespace cuemu

#define CUEMU_ONE_ATOMIC(name, op, T)                                                                        \
    CUEMU_INLINE T name(T* address, T value) { return cuemu::atomic<T>(op, address, value); }
#define CUEMU_ATOMIC(name, op, T)                                                                            \
    CUEMU_ONE_ATOMIC(name, op, T)                                                                            \
    CUEMU_ONE_ATOMIC(name##_block, op, T) CUEMU_ONE_ATOMIC(name##_system, op, T)
#define CUEMU_INTEGER_ATOMIC(name, op)                                                                       \
    CUEMU_ATOMIC(name, op, int) CUEMU_ATOMIC(name, op, unsigned) CUEMU_ATOMIC(name, op, unsigned long long)

CUEMU_INTEGER_ATOMIC(atomicAdd, CUEMU_ATOMIC_ADD)
CUEMU_ATOMIC(atomicAdd, CUEMU_ATOMIC_ADD, float)
CUEMU_ATOMIC(atomicAdd, CUEMU_ATOMIC_ADD, double)
CUEMU_ATOMIC(atomicAdd, CUEMU_ATOMIC_ADD, __half2)
CUEMU_ATOMIC(atomicAdd, CUEMU_ATOMIC_ADD, __nv_bfloat162)
CUEMU_INTEGER_ATOMIC(atomicMin, CUEMU_ATOMIC_MIN)
CUEMU_ATOMIC(atomicMin, CUEMU_ATOMIC_MIN, long long)
CUEMU_INTEGER_ATOMIC(atomicMax, CUEMU_ATOMIC_MAX)
CUEMU_ATOMIC(atomicMax, CUEMU_ATOMIC_MAX, long long)
CUEMU_INTEGER_ATOMIC(atomicAnd, CUEMU_ATOMIC_AND)
CUEMU_INTEGER_ATOMIC(atomicOr, CUEMU_ATOMIC_OR)
CUEMU_INTEGER_ATOMIC(atomicXor, CUEMU_ATOMIC_XOR)
CUEMU_INTEGER_ATOMIC(atomicExch, CUEMU_ATOMIC_EXCHANGE)
CUEMU_ATOMIC(atomicExch, CUEMU_ATOMIC_EXCHANGE, float)
CUEMU_ATOMIC(atomicInc, CUEMU_ATOMIC_INC, unsigned)
CUEMU_ATOMIC(atomicDec, CUEMU_ATOMIC_DEC, unsigned)

// Subtraction adds the negative, which wraps around as it should.
#define CUEMU_ATOMIC_SUBTRACT(name, add)                                                                     \
    CUEMU_INLINE int name(int* address, int value) { return add(address, (int)(0u - (unsigned)value)); }     \
    CUEMU_INLINE unsigned name(unsigned* address, unsigned value) { return add(address, 0u - value); }
CUEMU_ATOMIC_SUBTRACT(atomicSub, atomicAdd)
CUEMU_ATOMIC_SUBTRACT(atomicSub_block, atomicAdd_block)
CUEMU_ATOMIC_SUBTRACT(atomicSub_system, atomicAdd_system)

#define CUEMU_ONE_COMPARE_AND_SWAP(name, T)                                                                  \
    CUEMU_INLINE T name(T* address, T compare, T value)                                                      \
    {                                                                                                        \
        return cuemu::atomic<T>(CUEMU_ATOMIC_CAS, address, value, compare);                                  \
    }
#define CUEMU_COMPARE_AND_SWAP(T)                                                                            \
    CUEMU_ONE_COMPARE_AND_SWAP(atomicCAS, T)                                                                 \
    CUEMU_ONE_COMPARE_AND_SWAP(atomicCAS_block, T) CUEMU_ONE_COMPARE_AND_SWAP(atomicCAS_system, T)
CUEMU_COMPARE_AND_SWAP(int)
CUEMU_COMPARE_AND_SWAP(unsigned)
CUEMU_COMPARE_AND_SWAP(unsigned long long)
