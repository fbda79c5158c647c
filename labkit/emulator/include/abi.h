// What a compiled kernel calls in the emulator's runtime (runtime/emulator.cpp). Plain C names: the kernel,
// the runtime and Python (ctypes) meet here. Everything a student sees is built on top of this in the other
// headers.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Calls on two lines must stay two calls, or a fault would have no line. (g++ has no such attribute, and
// merges them rarely.)
#if defined(__clang__)
#define CUEMU_OWN_LINE __attribute__((nomerge))
#else
#define CUEMU_OWN_LINE
#endif

// Built-in variables. `const`: they never change during one CUDA thread's life, so compilers may hoist the
// calls.
#define CUEMU_CONST __attribute__((const))
unsigned cuemu_thread_x(void) CUEMU_CONST;
unsigned cuemu_thread_y(void) CUEMU_CONST;
unsigned cuemu_thread_z(void) CUEMU_CONST;
unsigned cuemu_block_x(void) CUEMU_CONST;
unsigned cuemu_block_y(void) CUEMU_CONST;
unsigned cuemu_block_z(void) CUEMU_CONST;
unsigned cuemu_block_dim_x(void) CUEMU_CONST;
unsigned cuemu_block_dim_y(void) CUEMU_CONST;
unsigned cuemu_block_dim_z(void) CUEMU_CONST;
unsigned cuemu_grid_dim_x(void) CUEMU_CONST;
unsigned cuemu_grid_dim_y(void) CUEMU_CONST;
unsigned cuemu_grid_dim_z(void) CUEMU_CONST;
unsigned cuemu_lane(void) CUEMU_CONST;

// Block barrier. `id` names the barrier in the text (__COUNTER__): compilers duplicate and merge calls, so
// return addresses would not tell one barrier from another.
enum { CUEMU_BARRIER_PLAIN, CUEMU_BARRIER_COUNT, CUEMU_BARRIER_AND, CUEMU_BARRIER_OR };
CUEMU_OWN_LINE int cuemu_barrier(int op, int predicate, int id);

// Warp operations: every lane of the mask leaves its operands and sleeps; the last one computes for all.
enum {
    CUEMU_WARP_SYNC,
    CUEMU_WARP_SHFL_IDX,
    CUEMU_WARP_SHFL_UP,
    CUEMU_WARP_SHFL_DOWN,
    CUEMU_WARP_SHFL_XOR,
    CUEMU_WARP_BALLOT,
    CUEMU_WARP_ANY,
    CUEMU_WARP_ALL,
    CUEMU_WARP_REDUCE_ADD,
    CUEMU_WARP_REDUCE_MIN,  // signed
    CUEMU_WARP_REDUCE_MAX,
    CUEMU_WARP_REDUCE_UMIN,  // unsigned
    CUEMU_WARP_REDUCE_UMAX,
    CUEMU_WARP_REDUCE_AND,
    CUEMU_WARP_REDUCE_OR,
    CUEMU_WARP_REDUCE_XOR,
    CUEMU_WARP_MATCH_ANY,
    CUEMU_WARP_MATCH_ALL,
    // From here on all 32 lanes must take part.
    CUEMU_WARP_LDMATRIX,      // out: registers, a: row address; parameter = matrices | 256 if transposed
    CUEMU_WARP_MMA_F16_F32,   // m16n8k16: f16 × f16 + f32
    CUEMU_WARP_MMA_BF16_F32,  // m16n8k16: bf16 × bf16 + f32
    CUEMU_WARP_MMA_F16_F16,   // m16n8k16: f16 × f16 + f16
    CUEMU_WARP_MMA_S8_S32,    // m16n8k32: s8 × s8 + s32
};
CUEMU_OWN_LINE uint64_t cuemu_warp(int op, unsigned mask, uint64_t value, int parameter, int width);
CUEMU_OWN_LINE void cuemu_warp_pointers(int op, unsigned mask, void* out, const void* a, const void* b,
                                        const void* c, int parameter);
unsigned cuemu_activemask(void);

// Atomics. Values travel as 64-bit patterns; the old value comes back.
enum {
    CUEMU_ATOMIC_ADD,
    CUEMU_ATOMIC_MIN,
    CUEMU_ATOMIC_MAX,
    CUEMU_ATOMIC_AND,
    CUEMU_ATOMIC_OR,
    CUEMU_ATOMIC_XOR,
    CUEMU_ATOMIC_EXCHANGE,
    CUEMU_ATOMIC_CAS,
    CUEMU_ATOMIC_INC,
    CUEMU_ATOMIC_DEC,
};
enum { CUEMU_I32, CUEMU_U32, CUEMU_I64, CUEMU_U64, CUEMU_F32, CUEMU_F64, CUEMU_F16X2, CUEMU_BF16X2 };
CUEMU_OWN_LINE uint64_t cuemu_atomic(int op, int type, void* address, uint64_t value, uint64_t compare);
void cuemu_fence(int scope);  // 0 block, 1 device, 2 system

// cp.async: bytes is 4, 8 or 16; source_bytes of them are read, the rest is filled with zeros.
CUEMU_OWN_LINE void cuemu_cp_async(void* destination, const void* source, int bytes, int source_bytes);
void cuemu_cp_commit(void);
void cuemu_cp_wait(int pending_groups);

// Traced build: a vector copy is one access of its whole width on each side; memory copies of other sizes in
// pieces.
CUEMU_OWN_LINE void cuemu_copy(void* destination, const void* source, unsigned bytes);
CUEMU_OWN_LINE void* cuemu_memcpy(void* destination, const void* source, size_t bytes);
CUEMU_OWN_LINE void* cuemu_memset(void* destination, int value, size_t bytes);

// Shared memory and device variables.
void* cuemu_dyn_shared(void) CUEMU_CONST;
int cuemu_first_block(void);
void cuemu_shared_var(const char* name, void* address, size_t bytes, size_t element, const char* dims);
void cuemu_device_var(const char* name, void* address, size_t bytes);

int cuemu_printf(const char* format, ...);
CUEMU_OWN_LINE void cuemu_assert(const char* what, const char* file, int line);
CUEMU_OWN_LINE void cuemu_trap(void);
long long cuemu_clock(void);
void cuemu_yield(void);

#ifdef __cplusplus
}
#endif
