// cp.async: the data lands when it is waited for, which is as late as the program allows. A forgotten wait
// therefore reads what was there before (0xFF at first), and the trace knows the cells to be in flight.
//
// Sectors are those of the source. Measured on an H200: Nsight Compute counts the 32-byte granules of the
// shared destination instead, so that a row that begins at 16 modulo 32 costs one more; copies that only fill
// with zeros count nothing in either.
#pragma once
#include "scheduler.h"

extern "C" {
EMU_NOINLINE void cuemu_cp_async(void* destination, const void* source, int bytes, int source_bytes)
{
    const void* pc = EMU_CALLER;
    Thread* me = current;
    if (bytes != 4 && bytes != 8 && bytes != 16)
        fail_at("invalid cp.async: it copies 4, 8 or 16 bytes", me, pc);
    if (((uintptr_t)destination | (uintptr_t)source) & (uintptr_t)(bytes - 1))
        fail_at("misaligned: a cp.async address is not a multiple of the copy's size", me, pc);
    source_bytes = source_bytes < 0 ? 0 : emu::smaller(source_bytes, bytes);
    CpAsync copy = {(char*)destination, (const char*)source, bytes, source_bytes, 0, 0, 0};
    if (tracing) {
        // A copy of which nothing is read makes no request, and its address may be anything.
        if (source_bytes) copy.source_point = record(source, (unsigned)source_bytes, CP_READ, pc);
        copy.point = record(destination, (unsigned)bytes, CP_WRITE, pc);
        copy.epoch = epoch;
    }
    me->copies.push_back(copy);
}

void cuemu_cp_commit()
{
    Thread* me = current;
    int uncommitted = (int)me->copies.size();
    for (int group : me->copy_groups) uncommitted -= group;
    me->copy_groups.push_back(uncommitted);
}

void cuemu_cp_wait(int pending_groups)
{
    Thread* me = current;
    while ((int)me->copy_groups.size() > pending_groups) {
        const int count = me->copy_groups.front();
        me->copy_groups.erase_front(1);
        for (int i = 0; i < count; i++) {
            const CpAsync& copy = me->copies[i];
            memcpy(copy.destination, copy.source, (size_t)copy.source_bytes);
            memset(copy.destination + copy.source_bytes, 0, (size_t)(copy.bytes - copy.source_bytes));
            if (tracing && check_races) cp_async_arrived(copy);
        }
        me->copies.erase_front((size_t)count);
    }
}
}
