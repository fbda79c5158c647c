// Blocks run one after another; within a block threads run until they wait for each other. A thread that ends
// without ever waiting hands its stack to the next one: no switch at all for kernels without barriers.
#pragma once
#include "trace.h"

static bool thread_order_reversed;  // for tests: verdicts must not depend on who runs first

static Thread* next_runnable(const Thread* from)
{
    const int step = thread_order_reversed ? thread_count - 1 : 1;
    int i = from->linear;
    for (int tried = 0; tried < thread_count; tried++) {
        i += step;
        if (i >= thread_count) i -= thread_count;
        if (threads[i].state <= READY) return &threads[i];
    }
    return nullptr;
}

static void run_fiber();
static void finish_warp_operations(const Thread* exited);  // collectives.h
static bool block_uses_warp_operations;

static void give_stack(Thread* thread)
{
    thread->stack = free_stacks.back();
    free_stacks.pop_back();
    if (!stacks.open(thread->stack)) fail("invalid configuration: no memory for the threads' stacks");
    thread->stack_pointer = prepare_stack(stacks.base(thread->stack), stacks.usable, run_fiber);
}
static void switch_to(Thread* thread)
{
    Thread* me = current;
    if (thread->state == UNSTARTED) give_stack(thread);
    switch_count++;
    current = thread;
    cuemu_switch(&me->stack_pointer, thread->stack_pointer);
}

// Everyone who has not exited has arrived: compare where, answer, let go.
static void release_barrier()
{
    int count = 0, all = 1, any = 0;
    const Thread* first = nullptr;
    for (int i = 0; i < thread_count; i++) {
        const Thread& thread = threads[i];
        if (thread.state != AT_BARRIER) continue;
        count += thread.barrier_predicate;
        all &= thread.barrier_predicate;
        any |= thread.barrier_predicate;
        if (!first) first = &thread;
        if (thread.barrier_id == first->barrier_id) continue;
        emu::text m("divergent __syncthreads: ");
        m += where(first);
        m += " waits at ";
        m += at_code(first->wait_pc);
        m += " but ";
        m += where(&thread);
        m += " waits at ";
        m += at_code(thread.wait_pc);
        fail(m);
    }
    barrier_count++;
    if (tracing) trace_barrier();
    for (int i = 0; i < thread_count; i++) {
        Thread& thread = threads[i];
        if (thread.state != AT_BARRIER) continue;
        thread.barrier_result = thread.barrier_op == CUEMU_BARRIER_COUNT ? count
                                : thread.barrier_op == CUEMU_BARRIER_AND ? all
                                                                         : any;
        thread.state = READY;
    }
    arrived_count = 0;
}

static const char* warp_op_name(int op)
{
    static const char* const names[] = {
        "__syncwarp",        "__shfl_sync",       "__shfl_up_sync",    "__shfl_down_sync",
        "__shfl_xor_sync",   "__ballot_sync",     "__any_sync",        "__all_sync",
        "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync",
        "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync",  "__reduce_xor_sync",
        "__match_any_sync",  "__match_all_sync",  "ldmatrix",          "mma.sync",
        "mma.sync",          "mma.sync",          "mma.sync"};
    return names[op];
}

// Lanes that wait for each other in different operations (or with different masks) never meet.
static void report_mismatched_lanes()
{
    for (int i = 0; i < thread_count; i++) {
        const Thread& a = threads[i];
        if (a.state != IN_WARP) continue;
        const Thread* warp = threads + a.warp * WARP;
        for (int lane = 0; lane < lanes_in_warp(a.warp); lane++) {
            const Thread& b = warp[lane];
            if (!(a.warp_mask >> lane & 1) || b.state != IN_WARP) continue;
            if (b.warp_mask == a.warp_mask && b.warp_op == a.warp_op) continue;
            emu::text m("warp mismatch: lanes of one warp wait in different warp operations: ");
            m += where(&a);
            m.addf(" in %s with mask %08x at ", warp_op_name(a.warp_op), a.warp_mask);
            m += at_code(a.wait_pc);
            m += ", ";
            m += where(&b);
            m.addf(" in %s with mask %08x at ", warp_op_name(b.warp_op), b.warp_mask);
            m += at_code(b.wait_pc);
            fail(m);
        }
    }
}

// Nobody can go on: say who waits where, at most six places.
static void report_deadlock()
{
    report_mismatched_lanes();
    emu::text m("deadlock: no thread of the block can go on");
    bool told[MAX_THREADS] = {};
    int places = 0, exited = 0;
    for (int i = 0; i < thread_count; i++) {
        const Thread& a = threads[i];
        if (a.state == DONE) exited++;
        if (told[i] || a.state == DONE) continue;
        int count = 0;
        for (int j = i; j < thread_count; j++) {
            const Thread& b = threads[j];
            if (b.state != a.state || b.wait_pc != a.wait_pc) continue;
            told[j] = true;
            count++;
        }
        if (places++ >= 6) continue;
        m.addf("; %d wait in %s at ", count,
               a.state == AT_BARRIER ? "__syncthreads" : warp_op_name(a.warp_op));
        m += at_code(a.wait_pc);
        m += ", first ";
        m += where(&a);
        if (a.state != IN_WARP) continue;
        unsigned missing = a.warp_mask;
        const Thread* warp = threads + a.warp * WARP;
        for (int lane = 0; lane < WARP; lane++)
            if (lane >= lanes_in_warp(a.warp) || warp[lane].state == DONE || warp[lane].state == IN_WARP)
                missing &= ~(1u << lane);
        m.addf(", mask %08x, which lanes %08x do not reach", a.warp_mask, missing);
    }
    if (exited) m.addf("; %d have exited", exited);
    fail(m);
}

// Lanes whose lists of accesses are full: put them side by side with their warp's, and let them go on.
static bool drain_full_lists()
{
    bool any = false;
    for (int warp = 0; warp * WARP < thread_count; warp++) {
        bool full = false;
        for (int i = 0; i < lanes_in_warp(warp); i++) full |= threads[warp * WARP + i].state == EVENTS_FULL;
        if (!full) continue;
        count_warp(warp, false);
        for (int i = 0; i < lanes_in_warp(warp); i++)
            if (threads[warp * WARP + i].state == EVENTS_FULL) threads[warp * WARP + i].state = READY;
        any = true;
    }
    return any;
}

// The present thread waits for something: run others until it may go on.
static void sleep_until_runnable()
{
    for (;;) {
        Thread* next = next_runnable(current);
        if (next) {
            if (next != current) switch_to(next);
            return;
        }
        if (tracing && drain_full_lists()) continue;
        report_deadlock();
    }
}
static void yield_to_others()
{
    Thread* next = next_runnable(current);
    if (next && next != current) switch_to(next);
}

// A fiber: one CUDA thread after another on the same stack, as long as they end without waiting.
static void run_fiber()
{
    for (;;) {
        Thread* me = current;
        me->state = READY;
        started_count++;
        kernel_function(kernel_arguments);
        me = current;
        me->state = DONE;
        alive_count--;
        if (block_uses_warp_operations) finish_warp_operations(me);
        if (alive_count && arrived_count == alive_count) release_barrier();
        Thread* next;
        while (!(next = next_runnable(me))) {
            if (alive_count == 0) switch_to_main();
            if (tracing && drain_full_lists()) continue;
            report_deadlock();
        }
        if (next->state == UNSTARTED) {
            next->stack = me->stack;
            current = next;
            continue;
        }
        free_stacks.push_back(me->stack);
        switch_to(next);
    }
}

static void run_block(uint64_t linear)
{
    block_linear = linear;
    block_id.x = (unsigned)(linear % grid_dim.x);
    block_id.y = (unsigned)(linear / grid_dim.x % grid_dim.y);
    block_id.z = (unsigned)(linear / grid_dim.x / grid_dim.y);
    alive_count = thread_count;
    arrived_count = 0;
    block_uses_warp_operations = false;
    free_stacks.clear();
    for (int i = thread_count - 1; i >= 0; i--) free_stacks.push_back(i);
    for (int i = 0; i < thread_count; i++) {
        threads[i].state = UNSTARTED;
        threads[i].atomics_in_a_row = 0;
        threads[i].copies.clear();
        threads[i].copy_groups.clear();
    }
    // Shared memory is full of NaN at first: a read of what nobody wrote shows in the result.
    memset(dynamic_shared, 0xff, dynamic_shared_bytes);
    for (const SharedVariable& v : shared_variables) memset(v.address, 0xff, v.bytes);
    if (tracing) trace_block_begin();
    current = &threads[thread_order_reversed ? thread_count - 1 : 0];
    give_stack(current);
    cuemu_switch(&main_stack_pointer, current->stack_pointer);
    if (tracing && !failed && !stopped) trace_block_end();
}
