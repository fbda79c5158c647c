// Loads and stores with cache hints (plain ones here), memory copies, shared memory and device variables.
#pragma once
#include "abi.h"
#include "bits.h"

// The hint is for caches, of which there are none here. All widths, vectors included.
#define CUEMU_HINTED_LOAD(name)                                                                              \
    template <class T> CUEMU_INLINE T name(const T* address) { return *address; }
CUEMU_HINTED_LOAD(__ldg)
CUEMU_HINTED_LOAD(__ldca)
CUEMU_HINTED_LOAD(__ldcg)
CUEMU_HINTED_LOAD(__ldcs)
CUEMU_HINTED_LOAD(__ldlu)
CUEMU_HINTED_LOAD(__ldcv)
#define CUEMU_HINTED_STORE(name)                                                                             \
    template <class T> CUEMU_INLINE void name(T* address, const typename cuemu::Same<T>::type& value)        \
    {                                                                                                        \
        *address = value;                                                                                    \
    }
CUEMU_HINTED_STORE(__stwb)
CUEMU_HINTED_STORE(__stcg)
CUEMU_HINTED_STORE(__stcs)
CUEMU_HINTED_STORE(__stwt)

CUEMU_INLINE size_t __cvta_generic_to_shared(const void* address) { return (size_t)address; }

#if CUEMU_TRACE
// Copies of a register's size become plain, traced accesses; a call to the C library would go unseen.
namespace cuemu {
CUEMU_INLINE void* copy_bytes(void* destination, const void* source, size_t bytes)
{
    if (__builtin_constant_p(bytes) && (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16))
        return __builtin_memcpy(destination, source, bytes);
    return cuemu_memcpy(destination, source, bytes);
}
}  // namespace cuemu
#define memcpy(destination, source, bytes) cuemu::copy_bytes(destination, source, bytes)
#define memset(destination, value, bytes) cuemu_memset(destination, value, bytes)
#endif

// Source rewriting puts one of these after every __shared__ declaration: the runtime fills the array with
// 0xFF before each block and, when tracing, watches its bounds. The traced build asks in every block, since a
// declaration may stand on a path that the first block does not take.
#if CUEMU_TRACE
#define CUEMU_SEE_SHARED 1
#else
#define CUEMU_SEE_SHARED cuemu_first_block()
#endif
#define CUEMU_REG_SHARED(name, dims)                                                                         \
    ((void)(CUEMU_SEE_SHARED &&                                                                              \
            (cuemu_shared_var(#name, (void*)&name, sizeof(name),                                             \
                              sizeof(typename std::remove_all_extents<decltype(name)>::type), dims),         \
             0)))

// The same for a `__device__` variable at file scope.
#define CUEMU_REG_DEVICE(name)                                                                               \
    __attribute__((constructor)) static void cuemu_register_##name()                                         \
    {                                                                                                        \
        cuemu_device_var(#name, (void*)&name, sizeof(name));                                                 \
    }
