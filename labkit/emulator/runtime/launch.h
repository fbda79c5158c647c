// A launch: what Python calls.
#pragma once
#include "collectives.h"
#include "signals.h"

static emu::vector<uint64_t> chosen_blocks;

EMU_EXPORT void cuemu_set_stack(size_t bytes)
{
    stacks.release();
    stacks.usable = (bytes + 65535) & ~(size_t)65535;  // whole pages, whatever their size
}
// Exactly these linear block ids at the next launch; none: first, first + step, … again.
EMU_EXPORT int cuemu_set_blocks(const uint64_t* ids, size_t count)
{
    chosen_blocks.clear();
    for (size_t i = 0; i < count; i++) chosen_blocks.push_back(ids[i]);
    return 0;
}
EMU_EXPORT void cuemu_set_reversed(int reversed) { thread_order_reversed = reversed != 0; }

static int refuse_launch(const char* what)
{
    error_message = "invalid configuration: ";
    error_message += what;
    chosen_blocks.clear();
    return LAUNCH_INVALID;
}
static void number_threads()
{
    for (int i = 0; i < thread_count; i++) {
        Thread& thread = threads[i];
        thread.linear = i;
        thread.warp = i / WARP;
        thread.lane = i % WARP;
        const unsigned u = (unsigned)i;
        thread.index = {u % block_dim.x, u / block_dim.x % block_dim.y, u / block_dim.x / block_dim.y};
    }
}
static void run_blocks(uint64_t first, uint64_t step, uint64_t max_blocks)
{
    const uint64_t total = (uint64_t)grid_dim.x * grid_dim.y * grid_dim.z;
    const bool chosen = !chosen_blocks.empty();
    if (chosen) max_blocks = chosen_blocks.size();
    for (uint64_t i = 0; i < max_blocks; i++) {
        const uint64_t block = chosen ? chosen_blocks[i] : first + i * step;
        if (block >= total) break;
        if (stop_requested) stopped = true;
        if (time_is_up && !failed) {
            failed = true;
            error_message = "time limit: the launch was still running between two blocks";
        }
        if (failed || stopped) break;
        run_block(block);
        in_first_block = 0;
    }
}

static int launch(void (*function)(void**), void** arguments, const unsigned* grid, const unsigned* block,
                  size_t dynamic_bytes, uint64_t first, uint64_t step, uint64_t max_blocks)
{
    failed = stopped = false;
    error_message.clear();
    stop_requested = 0;
    time_is_up = 0;
    counting = 0;
    grid_dim = {grid[0], grid[1], grid[2]};
    block_dim = {block[0], block[1], block[2]};
    const uint64_t threads_a_block = (uint64_t)block[0] * block[1] * block[2];
    if (threads_a_block < 1 || threads_a_block > MAX_THREADS)
        return refuse_launch("a block has 1 to 1024 threads");
    if (dynamic_bytes > MAX_DYNAMIC_SHARED)
        return refuse_launch("more dynamic shared memory than any GPU has (227 KiB a block)");
    for (uint64_t id : chosen_blocks)
        if (id >= (uint64_t)grid[0] * grid[1] * grid[2])
            return refuse_launch("a chosen block lies outside the grid");
    thread_count = (int)threads_a_block;
    dynamic_shared_bytes = dynamic_bytes;
    kernel_function = function;
    kernel_arguments = arguments;
    in_first_block = 1;
    launch_number++;
    static_shared_bytes = 0;
    last_traced_pc = nullptr;
    if (!stacks.reserve(thread_count)) return refuse_launch("no memory for the threads' stacks");
    number_threads();
    current = &threads[0];
    install_handlers();

#ifndef _WIN32
    static thread_local char alternate[65536];
    stack_t ours = {}, previous_stack = {};
    ours.ss_sp = alternate;
    ours.ss_size = sizeof alternate;
    sigaltstack(&ours, &previous_stack);
    kernel_thread = pthread_self();
    if (sigsetjmp(back_to_launch, 1)) {
        kernel_runs_here = 0;
        kernel_runs = 0;
        describe_fault();
    } else {
        kernel_runs_here = 1;
        kernel_runs = 1;
        start_timer();
        run_blocks(first, step, max_blocks);
        kernel_runs_here = 0;
        kernel_runs = 0;
    }
    end_timer();
    sigaltstack(&previous_stack, nullptr);
#else
    kernel_runs_here = true;
    run_blocks(first, step, max_blocks);
    kernel_runs_here = false;
#endif
    in_first_block = 0;
    chosen_blocks.clear();
    stacks.release_many();
    return failed ? LAUNCH_FAULT : stopped ? LAUNCH_STOPPED : LAUNCH_OK;
}

// One launch at a time: threads, shared memory and counts are this copy's own.
static char busy;
static volatile bool refused_while_busy;

EMU_EXPORT int cuemu_launch(void (*function)(void**), void** arguments, const unsigned* grid,
                            const unsigned* block, size_t dynamic_bytes, uint64_t first, uint64_t step,
                            uint64_t max_blocks)
{
    if (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) {
        refused_while_busy = true;
        return LAUNCH_FAULT;
    }
    const int result = launch(function, arguments, grid, block, dynamic_bytes, first, step, max_blocks);
    refused_while_busy = false;
    __atomic_clear(&busy, __ATOMIC_RELEASE);
    return result;
}

EMU_EXPORT const char* cuemu_error()
{
    return refused_while_busy ? "busy: an earlier launch of this kernel has not ended yet"
                              : error_message.c_str();
}
EMU_EXPORT const char* cuemu_output() { return printed.c_str(); }
EMU_EXPORT void cuemu_clear_output() { printed.clear(); }
// Switches, barriers, warp operations (by lane), threads started; then from zero again.
EMU_EXPORT void cuemu_counts(long long* out)
{
    out[0] = switch_count;
    out[1] = barrier_count;
    out[2] = warp_operation_count;
    out[3] = started_count;
    switch_count = barrier_count = warp_operation_count = started_count = 0;
}
// Where the library lies: Python turns code addresses into lines with it.
EMU_EXPORT void* cuemu_base() { return (void*)&cuemu_launch; }
