// Ending a launch with one readable line. Lines start with the kind of fault and ':'; an address in the code
// is written \x01hex\x02, which Python replaces with file:line.
#pragma once
#include "state.h"

static emu::text where(const Thread* thread)
{
    emu::text t;
    t.addf("block (%u,%u,%u) thread (%u,%u,%u)", block_id.x, block_id.y, block_id.z, thread->index.x,
           thread->index.y, thread->index.z);
    return t;
}
static emu::text at_code(const void* pc)
{
    emu::text t;
    t.addf("\x01%llx\x02", (unsigned long long)(uintptr_t)pc);
    return t;
}

// The last access the trace has seen: where a fault happened that struck inside the runtime.
static const void* last_traced_pc;

static void switch_to_main()
{
    void* abandoned;
    cuemu_switch(&abandoned, main_stack_pointer);
}

// Called on a fiber. The fiber is left as it is: the launch is over, and the next block starts on fresh
// stacks.
static void fail(const emu::text& message)
{
    if (!failed) {
        failed = true;
        error_message = message;
    }
    switch_to_main();
}

static void fail_at(const char* kind_and_text, const Thread* thread, const void* pc)
{
    emu::text message(kind_and_text);
    message += ", ";
    message += where(thread);
    message += ", ";
    message += at_code(pc);
    fail(message);
}

// The polite half of the time limit and of cuemu_stop: wherever the kernel calls the runtime. (A loop that
// calls nothing is ended by the timer's second tick, see signals.h.)
static void check_interrupts(const void* pc)
{
    if (__builtin_expect(time_is_up, 0)) fail_at("time limit: the kernel was still running", current, pc);
    if (__builtin_expect(stop_requested, 0)) {
        stopped = true;
        switch_to_main();
    }
}
