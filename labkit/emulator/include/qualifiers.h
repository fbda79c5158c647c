// CUDA's declaration words, as a C++ compiler takes them.
#pragma once

// `#pragma unroll` is CUDA's, and g++ need not mention that it does not know it.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#endif

#define CUEMU_INLINE static inline __attribute__((always_inline))

// A function of its own keeps its lines in the debug information.
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__ static

// Shared arrays are static. In the traced build each starts at a multiple of more bytes than shared memory
// has, so that there is room between any two of them and one element past an array's end is no part of the
// next. (Windows and macOS align to less: an array of exactly so many bytes has its neighbour right behind it
// there.)
#if !CUEMU_TRACE
#define CUEMU_SHARED_ALIGNMENT 128
#elif defined(__ELF__)
#define CUEMU_SHARED_ALIGNMENT 131072
#else
#define CUEMU_SHARED_ALIGNMENT 8192
#endif
#ifdef __clang__
#define __shared__ static __attribute__((aligned(CUEMU_SHARED_ALIGNMENT)))
#else
// Without constinit g++ puts a guard (an atomic load a thread) on a static array of a class with constexpr
// constructors.
#define __shared__ static constinit __attribute__((aligned(CUEMU_SHARED_ALIGNMENT)))
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __maxnreg__(n)
#define __cluster_dims__(...)
#define __grid_constant__
#define warpSize 32
