// The kernel is compiled with -fsanitize=thread, but linked against these instead of the sanitizer: the
// compiler tells us of every access, and no sanitizer runs.
#pragma once
#include "trace.h"

#ifdef CUEMU_TRACE_BUILD
// The aligned callbacks promise alignment to their size, up to 8 bytes; the unaligned ones are for
// memcpy-like accesses, which a GPU compiler splits into bytes.
static void see(const void* address, unsigned size, Kind kind, const void* pc, bool is_volatile = false)
{
    if (!tracing) return;
    const unsigned alignment = emu::smaller(size, 8u);
    if ((uintptr_t)address & (alignment - 1)) check_alignment((uintptr_t)address, size, alignment, kind, pc);
    record(address, size, kind, pc, true, is_volatile);
}
static void see_unaligned(const void* address, unsigned size, Kind kind, const void* pc)
{
    if (tracing) record(address, size, kind, pc);
}

extern "C" {
#define EMU_CALLBACKS(n)                                                                                     \
    EMU_NOINLINE void __tsan_read##n(void* a) { see(a, n, READ, EMU_CALLER); }                               \
    EMU_NOINLINE void __tsan_write##n(void* a) { see(a, n, WRITE, EMU_CALLER); }                             \
    EMU_NOINLINE void __tsan_volatile_read##n(void* a) { see(a, n, READ, EMU_CALLER, true); }                \
    EMU_NOINLINE void __tsan_volatile_write##n(void* a) { see(a, n, WRITE, EMU_CALLER, true); }              \
    EMU_NOINLINE void __tsan_unaligned_read##n(void* a) { see_unaligned(a, n, READ, EMU_CALLER); }           \
    EMU_NOINLINE void __tsan_unaligned_write##n(void* a) { see_unaligned(a, n, WRITE, EMU_CALLER); }         \
    EMU_NOINLINE void __tsan_unaligned_volatile_read##n(void* a) { see_unaligned(a, n, READ, EMU_CALLER); }  \
    EMU_NOINLINE void __tsan_unaligned_volatile_write##n(void* a)                                            \
    {                                                                                                        \
        see_unaligned(a, n, WRITE, EMU_CALLER);                                                              \
    }                                                                                                        \
    EMU_NOINLINE void __tsan_read_write##n(void* a)                                                          \
    {                                                                                                        \
        see(a, n, READ, EMU_CALLER);                                                                         \
        see(a, n, WRITE, EMU_CALLER);                                                                        \
    }                                                                                                        \
    EMU_NOINLINE void __tsan_unaligned_read_write##n(void* a)                                                \
    {                                                                                                        \
        see_unaligned(a, n, READ, EMU_CALLER);                                                               \
        see_unaligned(a, n, WRITE, EMU_CALLER);                                                              \
    }
EMU_CALLBACKS(1)
EMU_CALLBACKS(2)
EMU_CALLBACKS(4)
EMU_CALLBACKS(8)
EMU_CALLBACKS(16)

EMU_NOINLINE void __tsan_read_range(void* a, size_t bytes)
{
    if (tracing && bytes) record_range(a, bytes, READ, EMU_CALLER);
}
EMU_NOINLINE void __tsan_write_range(void* a, size_t bytes)
{
    if (tracing && bytes) record_range(a, bytes, WRITE, EMU_CALLER);
}
EMU_NOINLINE void* __tsan_memcpy(void* to, const void* from, size_t bytes)
{
    if (tracing && bytes) {
        record_range(from, bytes, READ, EMU_CALLER);
        record_range(to, bytes, WRITE, EMU_CALLER);
    }
    return memcpy(to, from, bytes);
}
EMU_NOINLINE void* __tsan_memmove(void* to, const void* from, size_t bytes)
{
    if (tracing && bytes) {
        record_range(from, bytes, READ, EMU_CALLER);
        record_range(to, bytes, WRITE, EMU_CALLER);
    }
    return memmove(to, from, bytes);
}
EMU_NOINLINE void* __tsan_memset(void* to, int value, size_t bytes)
{
    if (tracing && bytes) record_range(to, bytes, WRITE, EMU_CALLER);
    return memset(to, value, bytes);
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

EMU_NOINLINE void __sanitizer_cov_trace_pc()
{
    if (tracing) record_basic_block(EMU_CALLER);
}
}
#endif
