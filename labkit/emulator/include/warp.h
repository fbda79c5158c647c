// Barriers, fences and warp operations.
#pragma once
#include "abi.h"
#include "bits.h"

#define CUEMU_FULL_MASK 0xffffffffu

#define __syncthreads() ((void)cuemu_barrier(CUEMU_BARRIER_PLAIN, 0, __COUNTER__))
#define __syncthreads_count(p) cuemu_barrier(CUEMU_BARRIER_COUNT, !!(p), __COUNTER__)
#define __syncthreads_and(p) cuemu_barrier(CUEMU_BARRIER_AND, !!(p), __COUNTER__)
#define __syncthreads_or(p) cuemu_barrier(CUEMU_BARRIER_OR, !!(p), __COUNTER__)

#define __threadfence_block() cuemu_fence(0)
#define __threadfence() cuemu_fence(1)
#define __threadfence_system() cuemu_fence(2)
#define __nanosleep(ns) ((void)(ns), cuemu_yield())

CUEMU_INLINE void __syncwarp(unsigned mask = CUEMU_FULL_MASK) { cuemu_warp(CUEMU_WARP_SYNC, mask, 0, 0, 32); }
CUEMU_INLINE unsigned __activemask() { return cuemu_activemask(); }

// Any type of up to 8 bytes: integers, float, double, half, half2, bfloat16.
#define CUEMU_SHUFFLE(name, op, Parameter)                                                                   \
    template <class T> CUEMU_INLINE T name(unsigned mask, T value, Parameter parameter, int width = 32)      \
    {                                                                                                        \
        return cuemu::from_bits<T>(cuemu_warp(op, mask, cuemu::bits(value), (int)parameter, width));         \
    }
CUEMU_SHUFFLE(__shfl_sync, CUEMU_WARP_SHFL_IDX, int)
CUEMU_SHUFFLE(__shfl_up_sync, CUEMU_WARP_SHFL_UP, unsigned)
CUEMU_SHUFFLE(__shfl_down_sync, CUEMU_WARP_SHFL_DOWN, unsigned)
CUEMU_SHUFFLE(__shfl_xor_sync, CUEMU_WARP_SHFL_XOR, int)

CUEMU_INLINE unsigned __ballot_sync(unsigned mask, int p)
{
    return (unsigned)cuemu_warp(CUEMU_WARP_BALLOT, mask, p != 0, 0, 32);
}
CUEMU_INLINE int __any_sync(unsigned mask, int p)
{
    return (int)cuemu_warp(CUEMU_WARP_ANY, mask, p != 0, 0, 32);
}
CUEMU_INLINE int __all_sync(unsigned mask, int p)
{
    return (int)cuemu_warp(CUEMU_WARP_ALL, mask, p != 0, 0, 32);
}

template <class T> CUEMU_INLINE unsigned __match_any_sync(unsigned mask, T value)
{
    return (unsigned)cuemu_warp(CUEMU_WARP_MATCH_ANY, mask, cuemu::bits(value), 0, 32);
}
template <class T> CUEMU_INLINE unsigned __match_all_sync(unsigned mask, T value, int* all_equal)
{
    const unsigned lanes = (unsigned)cuemu_warp(CUEMU_WARP_MATCH_ALL, mask, cuemu::bits(value), 0, 32);
    *all_equal = lanes != 0;
    return lanes;
}

#define CUEMU_REDUCE(name, op, T)                                                                            \
    CUEMU_INLINE T name(unsigned mask, T value) { return (T)cuemu_warp(op, mask, (uint32_t)value, 0, 32); }
CUEMU_REDUCE(__reduce_add_sync, CUEMU_WARP_REDUCE_ADD, int)
CUEMU_REDUCE(__reduce_add_sync, CUEMU_WARP_REDUCE_ADD, unsigned)
CUEMU_REDUCE(__reduce_min_sync, CUEMU_WARP_REDUCE_MIN, int)
CUEMU_REDUCE(__reduce_min_sync, CUEMU_WARP_REDUCE_UMIN, unsigned)
CUEMU_REDUCE(__reduce_max_sync, CUEMU_WARP_REDUCE_MAX, int)
CUEMU_REDUCE(__reduce_max_sync, CUEMU_WARP_REDUCE_UMAX, unsigned)
CUEMU_REDUCE(__reduce_and_sync, CUEMU_WARP_REDUCE_AND, unsigned)
CUEMU_REDUCE(__reduce_or_sync, CUEMU_WARP_REDUCE_OR, unsigned)
CUEMU_REDUCE(__reduce_xor_sync, CUEMU_WARP_REDUCE_XOR, unsigned)
