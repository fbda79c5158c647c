// char1 … double4, dim3 and make_*: CUDA's vector types with CUDA's sizes and alignments.
#pragma once
#include <initializer_list>
#include "abi.h"
#include "qualifiers.h"

// Compilers split struct copies into scalar ones, and the trace would then count four loads where a GPU does
// one. In the traced build copying a vector is therefore one opaque call of the whole width. Default
// construction stays trivial, so that shared arrays need no constructor.
#if CUEMU_TRACE
#define CUEMU_COPY_AS_ONE(Name, bytes)                                                                       \
    Name() = default;                                                                                        \
    __attribute__((always_inline)) Name(const Name& other) { cuemu_copy(this, &other, bytes); }              \
    __attribute__((always_inline)) Name& operator=(const Name& other)                                        \
    {                                                                                                        \
        cuemu_copy(this, &other, bytes);                                                                     \
        return *this;                                                                                        \
    }
#else
#define CUEMU_COPY_AS_ONE(Name, bytes)                                                                       \
    Name() = default;                                                                                        \
    Name(const Name&) = default;                                                                             \
    Name& operator=(const Name&) = default;
#endif

// CUDA's vectors are aggregates: `float4 sum = {0};` leaves the rest zero.
namespace cuemu {
template <class T> CUEMU_INLINE constexpr T listed(std::initializer_list<T> values, size_t i)
{
    return i < values.size() ? values.begin()[i] : T();
}
}  // namespace cuemu

#define CUEMU_ALIGNMENT(bytes) ((bytes) > 16 ? 16 : (bytes))

#define CUEMU_VECTOR1(Name, T)                                                                               \
    struct Name {                                                                                            \
        T x;                                                                                                 \
    };                                                                                                       \
    CUEMU_INLINE Name make_##Name(T x) { return Name{x}; }

#define CUEMU_VECTOR2(Name, T)                                                                               \
    struct __attribute__((aligned(2 * sizeof(T)))) Name {                                                    \
        T x, y;                                                                                              \
        constexpr Name(T x_, T y_) : x(x_), y(y_) {}                                                         \
        constexpr Name(std::initializer_list<T> v) : x(cuemu::listed(v, 0)), y(cuemu::listed(v, 1)) {}       \
        CUEMU_COPY_AS_ONE(Name, 2 * sizeof(T))                                                               \
    };                                                                                                       \
    CUEMU_INLINE Name make_##Name(T x, T y) { return Name(x, y); }

// Three elements have the alignment of one: a GPU reads them one by one, and so do we.
#define CUEMU_VECTOR3(Name, T)                                                                               \
    struct Name {                                                                                            \
        T x, y, z;                                                                                           \
    };                                                                                                       \
    CUEMU_INLINE Name make_##Name(T x, T y, T z) { return Name{x, y, z}; }

#define CUEMU_VECTOR4(Name, T)                                                                               \
    struct __attribute__((aligned(CUEMU_ALIGNMENT(4 * sizeof(T))))) Name {                                   \
        T x, y, z, w;                                                                                        \
        constexpr Name(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}                               \
        constexpr Name(std::initializer_list<T> v)                                                           \
            : x(cuemu::listed(v, 0)), y(cuemu::listed(v, 1)), z(cuemu::listed(v, 2)), w(cuemu::listed(v, 3)) \
        {                                                                                                    \
        }                                                                                                    \
        CUEMU_COPY_AS_ONE(Name, 4 * sizeof(T))                                                               \
    };                                                                                                       \
    CUEMU_INLINE Name make_##Name(T x, T y, T z, T w) { return Name(x, y, z, w); }

#define CUEMU_VECTORS(name, T)                                                                               \
    CUEMU_VECTOR1(name##1, T) CUEMU_VECTOR2(name##2, T) CUEMU_VECTOR3(name##3, T) CUEMU_VECTOR4(name##4, T)

typedef unsigned char uchar;
#ifndef __USE_MISC  // glibc's <sys/types.h> has these three
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
#endif

CUEMU_VECTORS(char, signed char)
CUEMU_VECTORS(uchar, unsigned char)
CUEMU_VECTORS(short, short)
CUEMU_VECTORS(ushort, unsigned short)
CUEMU_VECTORS(int, int)
CUEMU_VECTORS(uint, unsigned)
CUEMU_VECTORS(long, long)
CUEMU_VECTORS(ulong, unsigned long)
CUEMU_VECTORS(longlong, long long)
CUEMU_VECTORS(ulonglong, unsigned long long)
CUEMU_VECTORS(float, float)
CUEMU_VECTORS(double, double)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// threadIdx and friends are calls to const functions behind a name.
namespace cuemu {
CUEMU_INLINE uint3 thread_index() { return uint3{cuemu_thread_x(), cuemu_thread_y(), cuemu_thread_z()}; }
CUEMU_INLINE uint3 block_index() { return uint3{cuemu_block_x(), cuemu_block_y(), cuemu_block_z()}; }
CUEMU_INLINE uint3 block_size()
{
    return uint3{cuemu_block_dim_x(), cuemu_block_dim_y(), cuemu_block_dim_z()};
}
CUEMU_INLINE uint3 grid_size() { return uint3{cuemu_grid_dim_x(), cuemu_grid_dim_y(), cuemu_grid_dim_z()}; }
}  // namespace cuemu
#define threadIdx (cuemu::thread_index())
#define blockIdx (cuemu::block_index())
#define blockDim (cuemu::block_size())
#define gridDim (cuemu::grid_size())
