// Which of two accesses came before the other, whatever order the fibers happened to run in.
//
//   block epoch  One number for all blocks of all launches, one more at each barrier and each block's start.
//                Within a block, accesses of different epochs are ordered by the barrier between them.
//   warp clock   One more at each __syncwarp of that warp (any mask). known[w][b][a] is the clock up to which
//                lane a's accesses are ordered before lane b's present: 32 vector clocks a warp, joined at
//                each __syncwarp. Exact for full masks and for groups of lanes that always meet among
//                themselves; chains of overlapping partial masks may give a false alarm, since a cell keeps
//                one clock for several readers.
//   release      __threadfence, then an atomic on A by the same thread, publishes what was ordered before the
//                fence; whoever does an atomic on A later has acquired it, and after its next barrier so has
//                its block. A fence by every thread of a block followed by a barrier publishes all of it
//                through anyone's atomic. There is no transitivity through a third block: false alarms there.
#pragma once
#include "access_points.h"

static const int MAX_WARPS = MAX_THREADS / WARP;
static uint32_t epoch = 1, block_start = 1, launch_start = 1;
static uint32_t warp_clock[MAX_WARPS], known[MAX_WARPS][WARP][WARP];

struct StartedBlock {
    uint32_t epoch;
    Index3 id;
};
static emu::vector<StartedBlock> started_blocks;  // of this launch
static int current_block() { return (int)started_blocks.size() - 1; }
static int block_of_epoch(uint32_t e)
{
    int first = 0, last = (int)started_blocks.size();
    while (first < last) {
        const int middle = (first + last) / 2;
        if (e < started_blocks[middle].epoch) last = middle;
        else first = middle + 1;
    }
    return first - 1;
}
static Index3 block_id_of_epoch(uint32_t e)
{
    const int b = block_of_epoch(e);
    return b >= 0 ? started_blocks[b].id : block_id;
}

// ---- release and acquire
struct Release {
    void* address;
    int block, thread;
    uint32_t all_before;  // everything of its block in earlier epochs …
    uint32_t epoch;       // … and in this one what its warp's clocks say
    uint32_t clocks[WARP];
    uint32_t own_clock;
    int next_at_address;  // in the same hash bucket
};
struct Fence {
    uint32_t epoch;  // 0: none yet in this block
    uint32_t own_clock;
    uint32_t clocks[WARP];
};
struct Acquired {
    int release;
    int thread;
    uint32_t epoch, clock;
    int next_of_block;  // another one that publishes the same block
};
static const int BUCKETS = 1024;
static int release_bucket[BUCKETS];
static emu::vector<Release> releases;
static emu::vector<Acquired> acquired;      // by the present block
static emu::vector<int> acquired_of_block;  // publisher → latest in `acquired`, −1: none
static Fence fences[MAX_THREADS];
static int fences_in_epoch;     // threads that have fenced since the last barrier
static uint32_t fenced_by_all;  // everything in epochs before this one has been fenced by every thread

static int bucket_of(void* address)
{
    return (int)(((uintptr_t)address >> 2) * 2654435761u >> 8 & (BUCKETS - 1));
}

static void on_fence()
{
    Fence& fence = fences[current->linear];
    if (fence.epoch != epoch) fences_in_epoch++;
    fence.epoch = epoch;
    fence.own_clock = warp_clock[current->warp];
    memcpy(fence.clocks, known[current->warp][current->lane], sizeof fence.clocks);
    warp_clock[current->warp]++;  // so that what follows the fence can be told from what came before
}

static void on_atomic(void* address)
{
    const int me = current->linear, block = current_block(), bucket = bucket_of(address);
    bool mine_is_there = false;
    const Fence& fence = fences[me];
    const bool can_release = fence.epoch || fenced_by_all;
    const uint32_t all_before = emu::larger(fence.epoch, fenced_by_all);
    for (int i = release_bucket[bucket]; i >= 0; i = releases[i].next_at_address) {
        Release& release = releases[i];
        if (release.address != address) continue;
        if (release.block == block && release.thread == me) {
            release.all_before = all_before;
            release.epoch = fence.epoch;
            release.own_clock = fence.own_clock;
            memcpy(release.clocks, fence.clocks, sizeof release.clocks);
            mine_is_there = true;
            continue;
        }
        while ((int)acquired_of_block.size() <= release.block) acquired_of_block.push_back(-1);
        bool known_already = false;
        for (int a = acquired_of_block[release.block]; a >= 0 && !known_already;
             a = acquired[a].next_of_block)
            known_already = acquired[a].release == i && acquired[a].thread == me;
        if (known_already) continue;
        Acquired entry = {i, me, epoch, warp_clock[current->warp], acquired_of_block[release.block]};
        acquired_of_block[release.block] = (int)acquired.size();
        acquired.push_back(entry);
    }
    if (!can_release || mine_is_there) return;
    Release release = {
        address, block, me, all_before, fence.epoch, {}, fence.own_clock, release_bucket[bucket]};
    memcpy(release.clocks, fence.clocks, sizeof release.clocks);
    release_bucket[bucket] = (int)releases.size();
    releases.push_back(release);
}

// Was an access of `thread` in `access_epoch` published to the present thread?
static bool acquired_access(uint32_t access_epoch, uint32_t access_clock, int thread)
{
    if (acquired.empty()) return false;
    const int block = block_of_epoch(access_epoch);
    if (block < 0 || block >= (int)acquired_of_block.size()) return false;
    const int me = current->linear;
    for (int a = acquired_of_block[block]; a >= 0; a = acquired[a].next_of_block) {
        const Acquired& entry = acquired[a];
        const bool reached_me = entry.thread == me || entry.epoch < epoch ||
                                (entry.thread / WARP == me / WARP &&
                                 entry.clock < known[me / WARP][me % WARP][entry.thread % WARP]);
        if (!reached_me) continue;
        const Release& release = releases[entry.release];
        if (access_epoch < release.all_before) return true;
        if (access_epoch != release.epoch || thread / WARP != release.thread / WARP) continue;
        if (thread == release.thread ? access_clock <= release.own_clock
                                     : access_clock < release.clocks[thread % WARP])
            return true;
    }
    return false;
}

enum Order { ORDERED, UNORDERED };
static Order order(uint32_t access_epoch, uint32_t access_clock, int thread, Space space)
{
    if (access_epoch < launch_start) return ORDERED;
    if (access_epoch < block_start) {
        if (space == SPACE_SHARED) return ORDERED;
        return acquired_access(access_epoch, access_clock, thread) ? ORDERED : UNORDERED;
    }
    if (access_epoch < epoch || thread == current->linear) return ORDERED;
    if (thread / WARP == current->warp && access_clock < known[current->warp][current->lane][thread % WARP])
        return ORDERED;
    return acquired_access(access_epoch, access_clock, thread) ? ORDERED : UNORDERED;
}

// ---- what moves the clocks
static void epochs_launch_begin()
{
    epoch++;
    launch_start = block_start = epoch;
    started_blocks.clear();
    releases.clear();
    for (int& head : release_bucket) head = -1;
}
static void epochs_block_begin()
{
    epoch++;
    block_start = epoch;
    StartedBlock started = {epoch, block_id};
    started_blocks.push_back(started);
    acquired.clear();
    acquired_of_block.clear();
    for (int i = 0; i < thread_count; i++) fences[i].epoch = 0;
    fences_in_epoch = 0;
    fenced_by_all = 0;
}
static void epochs_barrier()
{
    epoch++;
    if (fences_in_epoch >= alive_count) fenced_by_all = epoch;
    fences_in_epoch = 0;
}
static void epochs_warp_sync(int warp, unsigned mask)
{
    const uint32_t now = ++warp_clock[warp];
    uint32_t joined[WARP];
    for (int a = 0; a < WARP; a++) {
        joined[a] = 0;
        for (int m = 0; m < WARP; m++)
            if (mask >> m & 1) joined[a] = emu::larger(joined[a], known[warp][m][a]);
        if (mask >> a & 1) joined[a] = now;
    }
    for (int b = 0; b < WARP; b++)
        if (mask >> b & 1) memcpy(known[warp][b], joined, sizeof joined);
}
