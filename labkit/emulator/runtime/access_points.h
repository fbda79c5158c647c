// An access point is one instruction that touches memory (its return address and kind), with its counts a
// buffer.
#pragma once
#include "regions.h"

enum Kind { READ = 0, WRITE = 1, ATOMIC = 2, LDMATRIX = 3, CP_READ = 4, CP_WRITE = 5, BASIC_BLOCK = 6 };
static bool writes(Kind kind) { return kind == WRITE || kind == ATOMIC || kind == CP_WRITE; }
static const char* verb(Kind kind) { return kind == ATOMIC ? "atomic" : writes(kind) ? "write" : "read"; }

// The first requests of a point, for pictures: byte offsets in the buffer, −1 for a lane that took no part.
struct Sample {
    Index3 block;
    int warp;
    long long offset[WARP];
};
static const int MAX_SAMPLES = 4;

struct AccessPoint {
    uintptr_t pc;
    Kind kind;
    Region* cached;  // where the last access lay
    // Counts. A point that meets several buffers (a pointer that is one or the other) has one of these for
    // each; the first is in the table, others follow by `next`.
    Region* region;
    uint32_t next;  // another AccessPoint with the same pc and kind; 0: none
    unsigned size;
    long long requests, lanes, full_requests, bytes, useful_bytes, sectors, cache_lines;
    long long wavefronts, ideal_wavefronts;
    int worst_degree;
    Sample* samples;
    int sample_count;
};

// Points live in chunks, so that they never move; index 0 is nobody.
static const uint32_t CHUNK = 1024, MAX_POINTS = 1u << 20;
static AccessPoint* point_chunks[MAX_POINTS / CHUNK];
static uint32_t point_count = 1;
static uint32_t* point_hash;
static uint32_t point_hash_size;
static long long points_dropped;  // accesses whose instruction found no place: reported, never silent

static AccessPoint& point_at(uint32_t index) { return point_chunks[index / CHUNK][index % CHUNK]; }

static uint32_t point_slot(uintptr_t pc, Kind kind)
{
    const uint64_t mixed = ((uint64_t)pc + (uint64_t)kind * 0x51ed27ull) * 0x9E3779B97F4A7C15ull;
    uint32_t slot = (uint32_t)(mixed >> 32) & (point_hash_size - 1);
    while (point_hash[slot]) {
        const AccessPoint& point = point_at(point_hash[slot]);
        if (point.pc == pc && point.kind == kind) break;
        slot = (slot + 1) & (point_hash_size - 1);
    }
    return slot;
}
static uint32_t new_point(uintptr_t pc, Kind kind)
{
    if (point_count >= MAX_POINTS) {
        points_dropped++;
        return 0;
    }
    const uint32_t index = point_count++;
    AccessPoint*& chunk = point_chunks[index / CHUNK];
    if (!chunk && !(chunk = (AccessPoint*)malloc(CHUNK * sizeof(AccessPoint)))) emu::out_of_memory();
    AccessPoint& point = point_at(index);
    memset((void*)&point, 0, sizeof point);
    point.pc = pc;
    point.kind = kind;
    return index;
}
static void rebuild_point_hash(uint32_t size)
{
    free(point_hash);
    point_hash_size = size;
    point_hash = (uint32_t*)calloc(size, sizeof(uint32_t));
    if (!point_hash) emu::out_of_memory();
    for (uint32_t i = 1; i < point_count; i++) {
        const uint32_t slot = point_slot(point_at(i).pc, point_at(i).kind);
        if (!point_hash[slot]) point_hash[slot] = i;  // variants come later and stay off the table
    }
}
static uint32_t find_point(const void* pc, Kind kind)
{
    if (point_count * 2 > point_hash_size) rebuild_point_hash(point_hash_size ? 2 * point_hash_size : 4096);
    const uint32_t slot = point_slot((uintptr_t)pc, kind);
    if (!point_hash[slot]) point_hash[slot] = new_point((uintptr_t)pc, kind);
    return point_hash[slot];
}

// The counts of a point for one buffer.
static AccessPoint& point_for(uint32_t index, Region* region)
{
    for (;;) {
        AccessPoint& point = point_at(index);
        if (!point.region) point.region = region;
        if (point.region == region) return point;
        if (!point.next) {
            const uint32_t added = new_point(point.pc, point.kind);
            if (!added) return point;
            point.next = added;
        }
        index = point.next;
    }
}

static void clear_points()
{
    for (uint32_t i = 1; i < point_count; i++) free(point_at(i).samples);
    point_count = 1;
    points_dropped = 0;
    rebuild_point_hash(4096);
    find_point(nullptr, READ);  // index 1 is never used by real code, but keeps 0 for "none"
}
static void forget_cached_regions()
{
    for (uint32_t i = 1; i < point_count; i++) point_at(i).cached = nullptr;
}
