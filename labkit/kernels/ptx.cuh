// All inline PTX of the project, behind functions with plain C++ meaning. The emulator (__CUEMU__) has bodies
// of its own; nothing else in a kernel's text knows which runner it is on. Needs sm_80.
//
//   cp_async_4, _8, _16    copy global → shared behind the threads' backs; !ok fills with zeros, reads nothing
//   cp_async_16_behind     the same 16 bytes a constant behind both addresses
//   cp_async_commit        closes a group of copies; cp_async_wait<N> waits until at most N are under way
//   ldmatrix_x1, _x2, _x4  8 × 8 matrices of 16-bit elements from shared memory to fragments; _trans transposes
//   mma_m16n8k16, …        tensor-core product of fragments
//   load_streaming_16, _8  bytes that are read once: past the L1 cache, through the read-only path
//   load_early_16, _8      a load that is not moved down to its use
//   grid_dependency_wait, _release  programmatic dependent launch (sm_90): what may run beside the kernel ahead
//   exp2_approx            2^x in one instruction
//   pinned                 a value that is kept in a register
//   lop3<table>, prmt      any logic function of three words; any four of eight bytes
#pragma once
#include <cuda_fp16.h>
#include "types.cuh"

#ifdef __CUEMU__
#define LAB_FN static inline __attribute__((always_inline))
#else
#define LAB_FN static __device__ __forceinline__
// The 32-bit address that PTX wants for shared memory.
LAB_FN unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
#endif

// ---- cp.async. A thread sees its copies after cp_async_wait, the other threads of the block after the
// __syncthreads that follows.

// 16 bytes go past the L1 cache (.cg), which 4 and 8 cannot.
LAB_FN void cp_async_16(void* shared, const void* global, bool ok = true)
{
#ifdef __CUEMU__
    cuemu_cp_async(shared, global, 16, ok ? 16 : 0);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 ::"r"(shared_address(shared)), "l"(global), "r"(ok ? 16 : 0) : "memory");
#endif
}

// As cp_async_16, BYTES behind both addresses: one pair of registers serves several copies.
template <int BYTES>
LAB_FN void cp_async_16_behind(void* shared, const void* global)
{
#ifdef __CUEMU__
    cuemu_cp_async(static_cast<char*>(shared) + BYTES, static_cast<const char*>(global) + BYTES, 16, 16);
#else
    asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %2], 16;\n"
                 ::"r"(shared_address(shared)), "l"(global), "n"(BYTES) : "memory");
#endif
}

// Copies `bytes` (0 … 16) and fills the rest of the 16 with zeros: the end of a row.
LAB_FN void cp_async_16_partial(void* shared, const void* global, int bytes)
{
#ifdef __CUEMU__
    cuemu_cp_async(shared, global, 16, bytes);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 ::"r"(shared_address(shared)), "l"(global), "r"(bytes) : "memory");
#endif
}

LAB_FN void cp_async_8(void* shared, const void* global, bool ok = true)
{
#ifdef __CUEMU__
    cuemu_cp_async(shared, global, 8, ok ? 8 : 0);
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n"
                 ::"r"(shared_address(shared)), "l"(global), "r"(ok ? 8 : 0) : "memory");
#endif
}

LAB_FN void cp_async_4(void* shared, const void* global, bool ok = true)
{
#ifdef __CUEMU__
    cuemu_cp_async(shared, global, 4, ok ? 4 : 0);
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n"
                 ::"r"(shared_address(shared)), "l"(global), "r"(ok ? 4 : 0) : "memory");
#endif
}

LAB_FN void cp_async_commit()
{
#ifdef __CUEMU__
    cuemu_cp_commit();
#else
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

template <int N>
LAB_FN void cp_async_wait()
{
#ifdef __CUEMU__
    cuemu_cp_wait(N);
#else
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
#endif
}

LAB_FN void cp_async_wait_all()
{
#ifdef __CUEMU__
    cuemu_cp_commit();
    cuemu_cp_wait(0);
#else
    asm volatile("cp.async.wait_all;\n" ::: "memory");
#endif
}

// ---- ldmatrix. `row` is a lane's own row address (16-byte aligned): lanes 0–7 give the rows of the first
// matrix, 8–15 of the second … Lane i receives, of each matrix, elements 2(i % 4) and +1 of row i / 4 (_trans:
// of column i / 4).

LAB_FN void ldmatrix_x1(unsigned r[1], const void* row)
{
#ifdef __CUEMU__
    cuemu_warp_pointers(CUEMU_WARP_LDMATRIX, 0xffffffffu, r, row, nullptr, nullptr, 1);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];\n"
                 : "=r"(r[0]) : "r"(shared_address(row)) : "memory");
#endif
}

LAB_FN void ldmatrix_x2(unsigned r[2], const void* row)
{
#ifdef __CUEMU__
    cuemu_warp_pointers(CUEMU_WARP_LDMATRIX, 0xffffffffu, r, row, nullptr, nullptr, 2);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
#endif
}

LAB_FN void ldmatrix_x4(unsigned r[4], const void* row)
{
#ifdef __CUEMU__
    cuemu_warp_pointers(CUEMU_WARP_LDMATRIX, 0xffffffffu, r, row, nullptr, nullptr, 4);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
#endif
}

LAB_FN void ldmatrix_x1_trans(unsigned r[1], const void* row)
{
#ifdef __CUEMU__
    cuemu_warp_pointers(CUEMU_WARP_LDMATRIX, 0xffffffffu, r, row, nullptr, nullptr, 1 | 256);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];\n"
                 : "=r"(r[0]) : "r"(shared_address(row)) : "memory");
#endif
}

LAB_FN void ldmatrix_x2_trans(unsigned r[2], const void* row)
{
#ifdef __CUEMU__
    cuemu_warp_pointers(CUEMU_WARP_LDMATRIX, 0xffffffffu, r, row, nullptr, nullptr, 2 | 256);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
#endif
}

LAB_FN void ldmatrix_x4_trans(unsigned r[4], const void* row)
{
#ifdef __CUEMU__
    cuemu_warp_pointers(CUEMU_WARP_LDMATRIX, 0xffffffffu, r, row, nullptr, nullptr, 4 | 256);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
#endif
}

// ---- mma.sync: D = A · B + C for one warp, A 16 × 16 by rows, B 16 × 8 by columns. With g = lane / 4 and
// q = lane % 4:
//   a[0] = A[g][2q, 2q+1]   a[1] = A[g+8][2q, …]   a[2] = A[g][2q+8, …]   a[3] = A[g+8][2q+8, …]
//   b[0] = B[2q, 2q+1][g]   b[1] = B[2q+8, 2q+9][g]
//   c, d = C[g][2q], C[g][2q+1], C[g+8][2q], C[g+8][2q+1]
// d may be c. volatile: a warp operation must not be moved into a branch.

// f16 in, f32 sums.
LAB_FN void mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], const float c[4])
{
#ifdef __CUEMU__
    cuemu_warp_pointers(CUEMU_WARP_MMA_F16_F32, 0xffffffffu, d, a, b, c, 0);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
                   "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}

// bf16 in, f32 sums.
LAB_FN void mma_m16n8k16_bf16(float d[4], const unsigned a[4], const unsigned b[2], const float c[4])
{
#ifdef __CUEMU__
    cuemu_warp_pointers(CUEMU_WARP_MMA_BF16_F32, 0xffffffffu, d, a, b, c, 0);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
                   "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}

// f16 in, f16 sums, two a register: twice as fast on GeForce 8.6 and 8.9, and good for short sums only.
LAB_FN void mma_m16n8k16_f16(unsigned d[2], const unsigned a[4], const unsigned b[2], const unsigned c[2])
{
#ifdef __CUEMU__
    cuemu_warp_pointers(CUEMU_WARP_MMA_F16_F16, 0xffffffffu, d, a, b, c, 0);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
                 "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %9};\n"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
                   "r"(c[0]), "r"(c[1]));
#endif
}

// Signed bytes, 32-bit sums: A 16 × 32, B 32 × 8, four neighbours in k a register.
LAB_FN void mma_m16n8k32_s8(int d[4], const unsigned a[4], const unsigned b[2], const int c[4])
{
#ifdef __CUEMU__
    cuemu_warp_pointers(CUEMU_WARP_MMA_S8_S32, 0xffffffffu, d, a, b, c, 0);
#else
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
                   "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
#endif
}

// ---- loads of data that is read once: weights

LAB_FN uint4 load_streaming_16(const void* p)
{
#ifdef __CUEMU__
    return *static_cast<const uint4*>(p);
#else
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
#endif
}

// A load that stays where it is written, ahead of its use: the compiler moves an ordinary one down to it.
LAB_FN uint4 load_early_16(const void* p)
{
#ifdef __CUEMU__
    return *static_cast<const uint4*>(p);
#else
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
#endif
}

LAB_FN uint2 load_early_8(const void* p)
{
#ifdef __CUEMU__
    return *static_cast<const uint2*>(p);
#else
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];\n" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
#endif
}

LAB_FN uint2 load_streaming_8(const void* p)
{
#ifdef __CUEMU__
    return *static_cast<const uint2*>(p);
#else
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
#endif
}

// ---- programmatic dependent launch (sm_90, and launched so: labkit.kernels.gpu). Elsewhere both do nothing: the
// kernel starts when those before it in its stream have finished.

// Waits until they have, and their writes are seen. Before it, only data that no kernel under way writes may be
// read: weights. Every thread that reads or writes anything else calls it first.
LAB_FN void grid_dependency_wait()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// The next kernel of the stream may start, up to its own wait, once every block of this one has called this.
LAB_FN void grid_dependency_release()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// ---- arithmetic

// 2^x to 22 bits in one instruction; what is below 2^-126 becomes zero.
LAB_FN float exp2_approx(float x)
{
#ifdef __CUEMU__
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
#endif
}

// x, of which the compiler does not know how it came about: it is kept, not computed anew at every use.
LAB_FN unsigned pinned(unsigned x)
{
#ifndef __CUEMU__
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// ---- bits

// The table of f is f(0xf0, 0xcc, 0xaa), for instance (0xf0 & 0xcc) | 0xaa = 0xea.
template <unsigned table>
LAB_FN unsigned lop3(unsigned a, unsigned b, unsigned c)
{
#ifdef __CUEMU__
    unsigned r = 0;
    if (table & 0x01) r |= ~a & ~b & ~c;
    if (table & 0x02) r |= ~a & ~b & c;
    if (table & 0x04) r |= ~a & b & ~c;
    if (table & 0x08) r |= ~a & b & c;
    if (table & 0x10) r |= a & ~b & ~c;
    if (table & 0x20) r |= a & ~b & c;
    if (table & 0x40) r |= a & b & ~c;
    if (table & 0x80) r |= a & b & c;
    return r;
#else
    unsigned r;
    asm("lop3.b32 %0, %1, %2, %3, %4;\n" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(table));
    return r;
#endif
}
LAB_FN unsigned lop3_and_or(unsigned a, unsigned mask, unsigned bits) { return lop3<0xea>(a, mask, bits); }
LAB_FN unsigned lop3_and_xor(unsigned a, unsigned mask, unsigned bits) { return lop3<0x6a>(a, mask, bits); }

// Byte i of the result is byte `selectors >> 4i & 7` of the eight bytes b:a.
LAB_FN unsigned prmt(unsigned a, unsigned b, unsigned selectors)
{
#ifdef __CUEMU__
    return __byte_perm(a, b, selectors);
#else
    unsigned r;
    asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(r) : "r"(a), "r"(b), "r"(selectors));
    return r;
#endif
}

// Two offset-binary nibbles (q + 8) at bits 0–3 and 16–19 become half2(q0, q1): the pattern 0x6400 | n is
// 1024 + n.
LAB_FN half2 int4x2_to_half2(unsigned w)
{
    const unsigned biased = lop3_and_or(w, 0x000f000fu, 0x64006400u);
    half2 h;
    memcpy(&h, &biased, 4);
    return __hsub2(h, __float2half2_rn(1032.f));
}
