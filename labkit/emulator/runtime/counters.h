// From accesses of lanes to requests of warps. Each lane keeps a list of its accesses; at barriers the 32
// lists of a warp are walked together, in lockstep by lowest code address, and every step is one request
// whose lanes are known.
#pragma once
#include "epochs.h"

static const size_t EVENT_LIMIT = 2048;  // a lane whose list is full waits for the others
static bool count_requests = true;
static long long event_count, request_count, basic_block_requests, basic_block_lanes;

static void keep_sample(AccessPoint& point, Event* const* lane_event, uint32_t active)
{
    if (point.sample_count >= MAX_SAMPLES) return;
    if (!point.samples) {
        point.samples = (Sample*)malloc(MAX_SAMPLES * sizeof(Sample));
        if (!point.samples) emu::out_of_memory();
    }
    Sample& sample = point.samples[point.sample_count++];
    sample.block = block_id;
    for (int lane = 0; lane < WARP; lane++)
        sample.offset[lane] =
            active >> lane & 1 ? (long long)(lane_event[lane]->address - point.region->low) : -1;
}

// Global memory moves 32-byte sectors in 128-byte lines; a request pays for each distinct one once.
static void count_global(AccessPoint& point, Event* const* lane_event, uint32_t active)
{
    uint64_t sector[2 * WARP];
    uint32_t used_bytes[2 * WARP];
    int sectors = 0, lines = 0;
    for (uint32_t rest = active; rest; rest &= rest - 1) {
        const Event& event = *lane_event[__builtin_ctz(rest)];
        const uint64_t end = event.address + event.size;
        for (uint64_t address = event.address; address < end;) {
            const uint64_t id = address >> 5, stop = emu::smaller(end, (id + 1) << 5);
            const uint64_t bytes = stop - address;
            const uint32_t mask = (uint32_t)(((1ull << bytes) - 1) << (address & 31));
            int i = sectors - 1;
            while (i >= 0 && sector[i] != id) i--;
            if (i >= 0) {
                used_bytes[i] |= mask;
            } else {
                sector[sectors] = id;
                used_bytes[sectors++] = mask;
            }
            address = stop;
        }
    }
    Region& region = *point.region;
    for (int i = 0; i < sectors; i++) {
        point.useful_bytes += __builtin_popcount(used_bytes[i]);
        bool new_line = true;
        for (int j = 0; j < i && new_line; j++) new_line = sector[j] >> 2 != sector[i] >> 2;
        lines += new_line;
        const size_t index = (size_t)(sector[i] - (region.low >> 5));
        if (index >= region.sector_block.size()) continue;
        if (region.sector_block[index] != block_start) {
            region.sector_block[index] = block_start;
            region.block_sectors++;
        }
        if (region.sector_launch[index] != launch_start) {
            region.sector_launch[index] = launch_start;
            region.launch_sectors++;
        }
    }
    point.sectors += sectors;
    point.cache_lines += lines;
}

// Shared memory has 32 banks of 4 bytes. 8-byte accesses go by half warps and 16-byte ones by quarter warps;
// in each part a bank delivers one word a wavefront (the same word to any number of lanes), or does one
// lane's atomic.
static void count_shared(AccessPoint& point, Event* const* lane_event, uint32_t active)
{
    const unsigned size = point.size;
    const int parts = size <= 4 ? 1 : size <= 8 ? 2 : 4, lanes_a_part = WARP / parts;
    for (int part = 0; part < parts; part++) {
        uint32_t lanes = active >> (part * lanes_a_part);
        if (lanes_a_part < WARP) lanes &= (1u << lanes_a_part) - 1;
        if (!lanes) continue;
        uint32_t words[32][WARP];
        int depth[32] = {0}, degree = 0;
        for (; lanes; lanes &= lanes - 1) {
            const Event& event = *lane_event[part * lanes_a_part + __builtin_ctz(lanes)];
            const uint64_t last = (event.address + size - 1) >> 2;
            for (uint64_t word = event.address >> 2; word <= last; word++) {
                const int bank = (int)(word & 31);
                int i = 0;
                while (i < depth[bank] && (point.kind == ATOMIC || words[bank][i] != (uint32_t)word)) i++;
                if (i < depth[bank] || i >= WARP) continue;
                words[bank][depth[bank]++] = (uint32_t)word;
                degree = emu::larger(degree, depth[bank]);
            }
        }
        point.wavefronts += degree;
        point.ideal_wavefronts++;
        point.worst_degree = emu::larger(point.worst_degree, degree);
    }
}

static void count_request(Event* const* lane_event, uint32_t active, uint32_t index, int warp)
{
    const Event& first = *lane_event[__builtin_ctz(active)];
    const int lanes = __builtin_popcount(active);
    if (point_at(index).kind == BASIC_BLOCK) {
        AccessPoint& block = point_at(index);
        block.requests++;
        block.lanes += lanes;
        basic_block_requests++;
        basic_block_lanes += lanes;
        return;
    }
    Region* region = find_region(first.address, 1);
    if (!region) return;
    AccessPoint& point = point_for(index, region);
    point.size = first.size;
    point.requests++;
    point.lanes += lanes;
    point.full_requests += lanes == WARP;
    point.bytes += (long long)lanes * first.size;
    request_count++;
    if (region->space == SPACE_GLOBAL) count_global(point, lane_event, active);
    else count_shared(point, lane_event, active);
    if (point.sample_count < MAX_SAMPLES) {
        keep_sample(point, lane_event, active);
        point.samples[point.sample_count - 1].warp = warp;
    }
}

// Walk a warp's lists as far as they are known. Where a lane with a full list stands at its end, the others
// may not pass.
static void count_warp(int warp, bool block_has_arrived)
{
    Event *next[WARP], *end[WARP];
    bool more_to_come[WARP];
    const int lanes = lanes_in_warp(warp);
    Thread* lane_thread = threads + warp * WARP;
    counting = 1;
    for (int i = 0; i < lanes; i++) {
        emu::vector<Event>& events = lane_thread[i].events;
        next[i] = events.data() + lane_thread[i].events_done;
        end[i] = events.data() + events.size();
        more_to_come[i] = !block_has_arrived && lane_thread[i].state == EVENTS_FULL;
    }
    for (;;) {
        uint32_t active = 0, point = 0;
        bool must_wait = false, diverged = false;
        for (int i = 0; i < lanes; i++) {
            if (next[i] == end[i]) {
                must_wait |= more_to_come[i];
                continue;
            }
            if (!active) point = next[i]->point;
            else if (next[i]->point != point) diverged = true;
            active |= 1u << i;
        }
        if (must_wait || !active) break;
        if (diverged) {  // the lowest address goes first, and the others wait to meet it again
            uintptr_t lowest = ~(uintptr_t)0;
            for (uint32_t rest = active; rest; rest &= rest - 1) {
                const uint32_t candidate = next[__builtin_ctz(rest)]->point;
                if (point_at(candidate).pc < lowest) {
                    lowest = point_at(candidate).pc;
                    point = candidate;
                }
            }
            for (int i = 0; i < lanes; i++)
                if (active >> i & 1 && next[i]->point != point) active &= ~(1u << i);
        }
        count_request(next, active, point, warp);
        for (; active; active &= active - 1) next[__builtin_ctz(active)]++;
    }
    for (int i = 0; i < lanes; i++) {
        Thread& thread = lane_thread[i];
        thread.events_done = (size_t)(next[i] - thread.events.data());
        if (next[i] == end[i]) {
            thread.events.clear();
            thread.events_done = 0;
        } else if (thread.events_done > EVENT_LIMIT) {
            thread.events.erase_front(thread.events_done);
            thread.events_done = 0;
        }
    }
    counting = 0;
}
static void count_all_warps()
{
    for (int warp = 0; warp * WARP < thread_count; warp++) count_warp(warp, true);
}
static void forget_events()
{
    for (Thread& thread : threads) {
        thread.events.clear();
        thread.events_done = 0;
    }
}
