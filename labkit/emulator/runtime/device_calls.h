// The small calls: built-in variables, barriers, fences, output, copies.
#pragma once
#include "scheduler.h"

extern "C" {
unsigned cuemu_thread_x() { return current->index.x; }
unsigned cuemu_thread_y() { return current->index.y; }
unsigned cuemu_thread_z() { return current->index.z; }
unsigned cuemu_block_x() { return block_id.x; }
unsigned cuemu_block_y() { return block_id.y; }
unsigned cuemu_block_z() { return block_id.z; }
unsigned cuemu_block_dim_x() { return block_dim.x; }
unsigned cuemu_block_dim_y() { return block_dim.y; }
unsigned cuemu_block_dim_z() { return block_dim.z; }
unsigned cuemu_grid_dim_x() { return grid_dim.x; }
unsigned cuemu_grid_dim_y() { return grid_dim.y; }
unsigned cuemu_grid_dim_z() { return grid_dim.z; }
unsigned cuemu_lane() { return (unsigned)current->lane; }
long long cuemu_clock() { return nanoseconds_now(); }
EMU_NOINLINE void cuemu_yield()
{
    check_interrupts(EMU_CALLER);
    yield_to_others();
}

EMU_NOINLINE int cuemu_barrier(int op, int predicate, int id)
{
    Thread* me = current;
    me->wait_pc = EMU_CALLER;
    check_interrupts(me->wait_pc);
    me->barrier_op = op;
    me->barrier_predicate = predicate;
    me->barrier_id = id;
    me->state = AT_BARRIER;
    arrived_count++;
    if (arrived_count == alive_count) {
        release_barrier();
        yield_to_others();
    } else {
        sleep_until_runnable();
    }
    return me->barrier_result;
}

void cuemu_fence(int)
{
    if (tracing) on_fence();
}

void* cuemu_dyn_shared() { return dynamic_shared; }
int cuemu_first_block() { return in_first_block; }
static SharedVariable& shared_variable(const char* name, void* address, size_t bytes, size_t element)
{
    for (SharedVariable& v : shared_variables)
        if (v.address == address) return v;
    SharedVariable added = {name, (char*)address, bytes, element, 0};
    shared_variables.push_back(added);
    memset(address, 0xff, bytes);
    if (tracing) add_shared_region(name, (char*)address, bytes, element);
    return shared_variables.back();
}
EMU_NOINLINE void cuemu_shared_var(const char* name, void* address, size_t bytes, size_t element, const char*)
{
    SharedVariable& variable = shared_variable(name, address, bytes, element);
    if (variable.launch == launch_number) return;
    variable.launch = launch_number;
    static_shared_bytes += bytes;
    if (static_shared_bytes <= MAX_STATIC_SHARED) return;
    emu::text m;
    m.addf("too much shared memory: the __shared__ arrays take %zu bytes, and a GPU has %zu for them",
           static_shared_bytes, MAX_STATIC_SHARED);
    fail_at(m.c_str(), current, EMU_CALLER);
}
void cuemu_device_var(const char* name, void* address, size_t bytes)
{
    DeviceVariable added = {name, (char*)address, bytes};
    device_variables.push_back(added);
}

EMU_NOINLINE int cuemu_printf(const char* format, ...)
{
    check_interrupts(EMU_CALLER);
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    static const char cut[] = "\n[the rest of the output was cut]\n";
    if (printed.size() < MAX_PRINTED) {
        printed += line;
        if (printed.size() >= MAX_PRINTED) printed += cut;
    }
    return length;
}
EMU_NOINLINE void cuemu_assert(const char* what, const char* file, int line)
{
    emu::text m;
    m.addf("assert: %s is false at %s:%d", what, file, line);
    fail_at(m.c_str(), current, EMU_CALLER);
}
EMU_NOINLINE void cuemu_trap() { fail_at("trap: the kernel called __trap()", current, EMU_CALLER); }

// Vector types in the traced build: one access of the whole width on each side. Wider than 16 bytes goes in
// halves.
EMU_NOINLINE void cuemu_copy(void* destination, const void* source, unsigned bytes)
{
    const void* pc = EMU_CALLER;
    if (tracing) {
        const unsigned piece = emu::smaller(bytes, 16u);
        check_alignment((uintptr_t)source, bytes, piece, READ, pc);
        check_alignment((uintptr_t)destination, bytes, piece, WRITE, pc);
        for (unsigned done = 0; done < bytes; done += piece) {
            record((const char*)source + done, piece, READ, pc);
            record((char*)destination + done, piece, WRITE, pc);
        }
    }
    switch (bytes) {
        case 2: memcpy(destination, source, 2); break;
        case 4: memcpy(destination, source, 4); break;
        case 8: memcpy(destination, source, 8); break;
        case 16: memcpy(destination, source, 16); break;
        default: memmove(destination, source, bytes);
    }
}
EMU_NOINLINE void* cuemu_memcpy(void* destination, const void* source, size_t bytes)
{
    if (tracing && bytes) {
        record_range(source, bytes, READ, EMU_CALLER);
        record_range(destination, bytes, WRITE, EMU_CALLER);
    }
    return memmove(destination, source, bytes);
}
EMU_NOINLINE void* cuemu_memset(void* destination, int value, size_t bytes)
{
    if (tracing && bytes) record_range(destination, bytes, WRITE, EMU_CALLER);
    return memset(destination, value, bytes);
}
}
