// What a traced launch found wrong: one report for a pair of instructions, with the first place and how
// often.
#pragma once
#include "access_points.h"

struct Report {
    const char* type;
    uintptr_t pc, other_pc;
    int thread, other_thread;  // linear in their blocks; −1: nobody
    Index3 block, other_block;
    emu::text region;
    long long offset;
    unsigned size;
    long long count;
};
static emu::vector<Report> reports;
static const size_t MAX_REPORTS = 500;
static long long reports_dropped;
static bool stop_at_fault;  // end the launch at the first access that a GPU would not survive

struct Partner {
    int thread;
    uint32_t point;
    Index3 block;
};

static void add_report(const char* type, const void* pc, uintptr_t address, unsigned size,
                       const Region* region, const Partner* partner)
{
    const uintptr_t other_pc = partner && partner->point ? point_at(partner->point).pc : 0;
    for (Report& report : reports)
        if (report.type == type && report.pc == (uintptr_t)pc && report.other_pc == other_pc) {
            report.count++;
            return;
        }
    if (reports.size() >= MAX_REPORTS) {
        reports_dropped++;
        return;
    }
    Report report;
    report.type = type;
    report.pc = (uintptr_t)pc;
    report.other_pc = other_pc;
    report.thread = current->linear;
    report.other_thread = partner ? partner->thread : -1;
    report.block = block_id;
    report.other_block = partner ? partner->block : block_id;
    report.region = region ? region->name : emu::text();
    report.offset = region ? (long long)(address - region->low) : 0;
    report.size = size;
    report.count = 1;
    reports.push_back(report);
}

static const char* choose(Kind kind, const char* read, const char* write, const char* atomic)
{
    return kind == ATOMIC ? atomic : writes(kind) ? write : read;
}

// An access outside everything registered: before it happens. It may go on only where it does no harm: near a
// buffer (whose copy Python has put between red zones), or in the spare part of dynamic shared memory.
static void report_out_of_bounds(uintptr_t address, unsigned size, Kind kind, const void* pc)
{
    uintptr_t distance;
    const Region* nearest = nearest_region(address, size, &distance);
    emu::text message;
    bool fatal = stop_at_fault;
    if (address < 65536) {
        add_report(choose(kind, "null pointer read", "null pointer write", "null pointer atomic"), pc,
                   address, size, nullptr, nullptr);
        message.addf("illegal memory access: null pointer, %s of %u bytes at address %llu", verb(kind), size,
                     (unsigned long long)address);
        fatal = true;
    } else if (!nearest || distance > (1u << 30)) {
        add_report(choose(kind, "out-of-bounds read", "out-of-bounds write", "out-of-bounds atomic"), pc,
                   address, size, nullptr, nullptr);
        message.addf("out-of-bounds: %s of %u bytes at %#llx, far from every buffer", verb(kind), size,
                     (unsigned long long)address);
        fatal = true;
    } else {
        add_report(choose(kind, "out-of-bounds read", "out-of-bounds write", "out-of-bounds atomic"), pc,
                   address, size, nearest, nullptr);
        message.addf("out-of-bounds: %s of %u bytes at byte offset %lld of %s (%lld bytes)", verb(kind), size,
                     (long long)(address - nearest->low), nearest->name.c_str(),
                     (long long)(nearest->high - nearest->low));
        const uintptr_t spare = address - (uintptr_t)dynamic_shared;
        const bool harmless =
            (nearest->space == SPACE_GLOBAL && distance < 4000) || spare + size <= sizeof dynamic_shared;
        if (writes(kind) && !harmless) fatal = true;
    }
    if (fatal) fail_at(message.c_str(), current, pc);
}

// A GPU wants an access of n bytes at a multiple of n.
static void check_alignment(uintptr_t address, unsigned size, unsigned alignment, Kind kind, const void* pc)
{
    if (!(address & (alignment - 1))) return;
    const Region* region = find_region(address, size);
    add_report(choose(kind, "misaligned read", "misaligned write", "misaligned atomic"), pc, address, size,
               region, nullptr);
    if (!stop_at_fault) return;
    emu::text message;
    message.addf("misaligned: %s of %u bytes at byte offset %lld of %s, which is not a multiple of %u",
                 verb(kind), size, region ? (long long)(address - region->low) : (long long)address,
                 region ? region->name.c_str() : "memory", alignment);
    fail_at(message.c_str(), current, pc);
}
