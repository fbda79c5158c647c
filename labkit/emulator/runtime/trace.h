// The traced build's one door: record() sees every access before it happens, checks it and keeps it for the
// counts.
#pragma once
#include "counters.h"
#include "races.h"

static bool check_races = true, trace_basic_blocks;
static void sleep_until_runnable();  // scheduler.h

static void keep_event(uintptr_t address, unsigned size, uint32_t point, bool may_wait)
{
    Thread* me = current;
    event_count++;
    if (me->events.size() == 0) me->events.reserve(EVENT_LIMIT + 64);
    Event event = {address, point, size};
    me->events.push_back(event);
    if (may_wait && me->events.size() - me->events_done >= EVENT_LIMIT && me->state == READY) {
        me->state = EVENTS_FULL;
        sleep_until_runnable();
    }
}

// A volatile access to global memory is what PTX calls relaxed: for the race check it is an atomic, and with
// a fence it releases and acquires. (In shared memory it stays a plain one: volatile once stood for
// __syncwarp there, and no longer does.)
static void check_races_of(Region* region, uintptr_t address, unsigned size, Kind kind, uint32_t point,
                           bool is_volatile)
{
    if (!is_volatile || region->space != SPACE_GLOBAL) {
        check_cells(region, address, size, kind, point);
        return;
    }
    check_cells(region, address, size, ATOMIC, point);
    on_atomic((void*)address);
}

// Returns the access point. `may_wait`: the thread may be put to sleep here (not inside a warp operation).
static uint32_t record(const void* pointer, unsigned size, Kind kind, const void* pc, bool may_wait = true,
                       bool is_volatile = false)
{
    const uintptr_t address = (uintptr_t)pointer;
    if (address - (uintptr_t)stacks.base(current->stack) < stacks.usable)
        return 0;  // the thread's own locals
    check_interrupts(pc);
    const uint32_t index = find_point(pc, kind);
    Region* region = index ? point_at(index).cached : nullptr;
    if (!region || !region->contains(address, size)) {
        region = find_region(address, size);
        if (!region) {
            last_traced_pc = pc;
            report_out_of_bounds(address, size, kind, pc);
            return 0;
        }
        if (index) point_at(index).cached = region;
    }
    if (region->space == SPACE_CONSTANT || !index) return 0;
    last_traced_pc = pc;
    if (region->space == SPACE_GLOBAL && writes(kind) && !region->writable)
        add_report("write to a const buffer", pc, address, size, region, nullptr);
    if (check_races && region->checked) check_races_of(region, address, size, kind, index, is_volatile);
    if (count_requests) keep_event(address, size, index, may_wait);
    return index;
}

[[maybe_unused]] static void record_basic_block(const void* pc)
{
    if (!trace_basic_blocks || !current) return;
    check_interrupts(pc);
    if (const uint32_t index = find_point(pc, BASIC_BLOCK)) keep_event(0, 0, index, true);
}

// A copy of any length: a GPU moves it in pieces of the largest size that divides it.
static void record_range(const void* pointer, size_t bytes, Kind kind, const void* pc)
{
    unsigned piece = 16;
    while (bytes % piece) piece /= 2;
    for (size_t done = 0; done < bytes; done += piece) record((const char*)pointer + done, piece, kind, pc);
}

static void trace_block_begin()
{
    epochs_block_begin();
    forget_events();
}
static void trace_barrier()
{
    report_suspects();
    count_all_warps();
    epochs_barrier();
}
static void trace_block_end()
{
    report_suspects();
    count_all_warps();
}

// ---- what Python calls around a traced launch
EMU_EXPORT void cuemu_trace_begin(int races, int counts, int stop, int basic_blocks)
{
    tracing = true;
    check_races = races;
    count_requests = counts;
    stop_at_fault = stop;
    trace_basic_blocks = basic_blocks;
    epochs_launch_begin();
    clear_regions();
    clear_points();
    forget_events();
    reports.clear();
    reports_dropped = 0;
    event_count = request_count = basic_block_requests = basic_block_lanes = 0;
    for (const SharedVariable& v : shared_variables)
        add_shared_region(v.name.c_str(), v.address, v.bytes, v.element);
    for (const DeviceVariable& v : device_variables)
        add_region(v.name.c_str(), v.address, v.bytes, SPACE_GLOBAL, true, 4);
}
// What the next trace does not need is given back: a process may hold many traced kernels.
EMU_EXPORT void cuemu_trace_end()
{
    report_suspects();  // of a block that did not come to its end
    tracing = false;
    for (Thread& thread : threads) thread.events.release();
    for (Region* region : regions) {
        region->checked = false;
        region->cells.clear();
        region->atomics.clear();
        region->sector_block.release();
        region->sector_launch.release();
    }
    parameter_range.low = parameter_range.high = 0;
}
EMU_EXPORT void cuemu_trace_dyn(size_t bytes)
{
    // Also with no bytes, so that an access to it can be named.
    add_shared_region("dynamic shared memory", dynamic_shared, bytes, 4);
}
EMU_EXPORT void cuemu_trace_buffer(const char* name, void* start, size_t bytes, int writable)
{
    if (bytes) add_region(name, start, bytes, SPACE_GLOBAL, writable != 0, 4);
}
EMU_EXPORT void cuemu_trace_params(void* start, size_t bytes)
{
    parameter_range.low = (uintptr_t)start;
    parameter_range.high = (uintptr_t)start + bytes;
}
EMU_EXPORT void cuemu_trace_module(void* start, size_t bytes)
{
    AddressRange range = {(uintptr_t)start, (uintptr_t)start + bytes};
    constant_ranges.push_back(range);
}
