// The shadow of memory: for each cell the last plain write, the readers, the atomics and whether a cp.async
// is under way.
//
// A pair of unordered accesses (epochs.h) of which at least one is a plain write, or one is atomic and the
// other plain, is a race. Both orders of a pair are checked, so the verdict does not depend on which fiber
// ran first; only whether a report says "read after write" or "write after read" does. Writing the same value
// twice is a race too, as it is in CUDA. One lane never races with itself; two lanes of a warp do, unless a
// __syncwarp lies between them.
#pragma once
#include "epochs.h"
#include "reports.h"

static int atomic_op = -1;  // of the atomic that is being recorded

static Partner partner_of(int thread, uint32_t point, uint32_t access_epoch)
{
    Partner partner = {thread, point, block_id_of_epoch(access_epoch)};
    return partner;
}

static void add_access(AccessSet& set, uint32_t point)
{
    const int me = current->linear;
    const uint32_t now = warp_clock[current->warp], bit = 1u << current->lane;
    if (set.epoch && set.epoch < block_start) {  // an earlier block's: keep one of them
        set.block_epoch = set.epoch;
        set.block_thread = (uint16_t)set.thread;
        set.block_point = set.point;
    }
    if (set.epoch != epoch) {
        set.epoch = epoch;
        set.thread = (uint16_t)me;
        set.point = point;
        set.time = now;
        set.lanes = bit;
        set.has_other = 0;
    } else if (set.thread / WARP == current->warp) {
        if (set.time != now) {  // forget the lanes whose accesses are ordered before this one
            uint32_t kept = 0;
            for (uint32_t rest = set.lanes; rest; rest &= rest - 1) {
                const int lane = __builtin_ctz(rest);
                if (set.time >= known[current->warp][current->lane][lane]) kept |= 1u << lane;
            }
            set.lanes = kept;
            set.time = now;
        }
        set.lanes |= bit;
        set.thread = (uint16_t)me;
        set.point = point;
    } else {
        set.other_thread = (uint16_t)me;
        set.other_point = point;
        set.has_other = 1;
    }
}

// Does anyone in the set stand unordered to the present thread? Says who.
static bool conflicts(const AccessSet& set, Space space, Partner* partner)
{
    if (set.block_epoch >= launch_start && order(set.block_epoch, 0, set.block_thread, space) == UNORDERED) {
        *partner = partner_of(set.block_thread, set.block_point, set.block_epoch);
        return true;
    }
    if (set.epoch < launch_start) return false;
    if (set.epoch == epoch && set.thread / WARP == current->warp) {
        for (uint32_t rest = set.lanes & ~(1u << current->lane); rest; rest &= rest - 1) {
            const int thread = current->warp * WARP + __builtin_ctz(rest);
            if (order(set.epoch, set.time, thread, space) == UNORDERED) {
                *partner = partner_of(thread, set.point, set.epoch);
                return true;
            }
        }
    } else if (order(set.epoch, set.time, set.thread, space) == UNORDERED) {
        *partner = partner_of(set.thread, set.point, set.epoch);
        return true;
    }
    if (set.epoch == epoch && set.has_other && set.other_thread / WARP != current->warp &&
        order(set.epoch, set.time, set.other_thread, space) == UNORDERED) {
        *partner = partner_of(set.other_thread, set.other_point, set.epoch);
        return true;
    }
    return false;
}

static bool write_conflicts(const Cell& cell, Space space, Partner* partner)
{
    if (cell.epoch < launch_start || order(cell.epoch, cell.time, cell.thread, space) == ORDERED)
        return false;
    *partner = partner_of(cell.thread, cell.point, cell.epoch);
    return true;
}

static bool never_written(const Cell& cell, const AccessSet* atomics)
{
    return cell.epoch < block_start && !(atomics && atomics->epoch >= block_start);
}

// Copying a struct copies the bytes between its members, which nobody writes: a hole in a word of which
// another byte was written. Only in arrays of something bigger than a word: in one of half it is a fault.
static bool is_padding(Region* region, size_t index)
{
    if (region->element <= 4 || region->granule >= 4) return false;
    const size_t cells_a_word = 4 / region->granule, first = index / cells_a_word * cells_a_word;
    for (size_t i = first; i < first + cells_a_word && i < region->cell_count(); i++)
        if (!never_written(region->cells.at(i), region->atomics.find(i))) return true;
    return false;
}

// The usual loop around atomicCAS begins with a plain read of the same word. That read may be stale, and the
// comparison finds out: no race. So a thread's plain read that meets others' atomics is only suspected until
// the thread does a compare-and-swap on the same bytes (cleared) or anything else tells (reported).
struct Suspect {
    uintptr_t low, high;  // empty: nothing suspected
    Region* region;
    uint32_t point;
    Partner partner;
};
static Suspect suspects[MAX_THREADS];

static void report_suspect(int thread)
{
    Suspect& suspect = suspects[thread];
    if (suspect.low == suspect.high) return;
    Thread* me = current;
    current = &threads[thread];  // a report is about the current thread
    add_report("race: plain read and atomic without a barrier", (const void*)point_at(suspect.point).pc,
               suspect.low, (unsigned)(suspect.high - suspect.low), suspect.region, &suspect.partner);
    current = me;
    suspect.low = suspect.high = 0;
}
static void report_suspects()
{
    for (int i = 0; i < thread_count; i++) report_suspect(i);
}
static void suspect_read(Region* region, uintptr_t address, uint32_t point, const Partner& partner)
{
    Suspect& suspect = suspects[current->linear];
    if (suspect.low != suspect.high && suspect.high == address && suspect.point == point) {
        suspect.high += region->granule;  // the next cell of the same read
        return;
    }
    report_suspect(current->linear);
    suspect = {address, address + region->granule, region, point, partner};
}
// What the present thread read itself no longer counts as a plain read. (If the set had room for only one of
// two readers, the other is forgotten with it.)
static void forget_own_read(AccessSet& set)
{
    if (set.epoch != epoch) return;
    if (set.has_other && set.other_thread == current->linear) set.has_other = 0;
    if (set.thread / WARP != current->warp) return;
    set.lanes &= ~(1u << current->lane);
    if (set.lanes) return;
    if (!set.has_other) {
        set.epoch = 0;
        return;
    }
    set.thread = set.other_thread;
    set.point = set.other_point;
    set.time = warp_clock[set.thread / WARP];
    set.lanes = 1u << (set.thread % WARP);
    set.has_other = 0;
}
static void clear_by_compare_and_swap(AccessSet& readers, uintptr_t address)
{
    forget_own_read(readers);
    Suspect& suspect = suspects[current->linear];
    if (suspect.low <= address && address < suspect.high) suspect.low = suspect.high = 0;
}

static void check_read(Region* region, size_t index, uintptr_t address, unsigned size, uint32_t point)
{
    Cell& cell = region->cells.at(index);
    AccessSet* atomics = region->atomics.find(index);
    const void* pc = (const void*)point_at(point).pc;
    Partner partner;
    if (region->space == SPACE_SHARED && never_written(cell, atomics) && !is_padding(region, index)) {
        add_report("read of uninitialised shared memory", pc, address, size, region, nullptr);
    } else if (cell.in_flight && cell.epoch >= block_start) {
        partner = partner_of(cell.thread, cell.point, cell.epoch);
        add_report("read before the cp.async that fills it was waited for", pc, address, size, region,
                   &partner);
    } else if (write_conflicts(cell, region->space, &partner)) {
        add_report("race: read after write without a barrier", pc, address, size, region, &partner);
    }
    if (atomics && conflicts(*atomics, region->space, &partner))
        suspect_read(region, address, point, partner);
    add_access(cell.readers, point);
}

static void check_write(Region* region, size_t index, uintptr_t address, unsigned size, uint32_t point,
                        bool asynchronous)
{
    Cell& cell = region->cells.at(index);
    AccessSet* atomics = region->atomics.find(index);
    const void* pc = (const void*)point_at(point).pc;
    Partner partner;
    if (cell.in_flight && cell.epoch >= block_start) {
        partner = partner_of(cell.thread, cell.point, cell.epoch);
        add_report("write before the cp.async that fills it was waited for", pc, address, size, region,
                   &partner);
    } else if (write_conflicts(cell, region->space, &partner)) {
        add_report("race: two writes without a barrier", pc, address, size, region, &partner);
    }
    if (conflicts(cell.readers, region->space, &partner))
        add_report("race: write after read without a barrier", pc, address, size, region, &partner);
    if (atomics && conflicts(*atomics, region->space, &partner))
        add_report("race: plain write and atomic without a barrier", pc, address, size, region, &partner);
    cell.epoch = epoch;
    cell.time = warp_clock[current->warp];
    cell.thread = (uint16_t)current->linear;
    cell.point = point;
    cell.in_flight = asynchronous;
}

static void check_atomic(Region* region, size_t index, uintptr_t address, unsigned size, uint32_t point)
{
    Cell& cell = region->cells.at(index);
    AccessSet& atomics = region->atomics.at(index);
    const void* pc = (const void*)point_at(point).pc;
    Partner partner;
    if (atomic_op == CUEMU_ATOMIC_CAS) clear_by_compare_and_swap(cell.readers, address);
    const bool sees_old = atomic_op != CUEMU_ATOMIC_EXCHANGE;
    if (region->space == SPACE_SHARED && sees_old && never_written(cell, &atomics))
        add_report("read of uninitialised shared memory", pc, address, size, region, nullptr);
    if (write_conflicts(cell, region->space, &partner))
        add_report("race: plain write and atomic without a barrier", pc, address, size, region, &partner);
    if (conflicts(cell.readers, region->space, &partner))
        add_report("race: plain read and atomic without a barrier", pc, address, size, region, &partner);
    add_access(atomics, point);
}

static void check_cells(Region* region, uintptr_t address, unsigned size, Kind kind, uint32_t point)
{
    const uintptr_t offset = address - region->low;
    unsigned granule = region->granule;
    while (granule > 1 && (size % granule || offset % granule)) granule /= 2;
    if (granule != region->granule) refine(region, granule);
    for (unsigned done = 0; done < size; done += granule) {
        const size_t index = (offset + done) / granule;
        if (kind == ATOMIC) check_atomic(region, index, address + done, size, point);
        else if (writes(kind)) check_write(region, index, address + done, size, point, kind == CP_WRITE);
        else check_read(region, index, address + done, size, point);
    }
}

// The copy was waited for: from here on it is a write of the waiting thread. Its source must not have changed
// since the copy was issued, since it may have been read at any moment in between.
static void cp_async_arrived(const CpAsync& copy)
{
    const uintptr_t to = (uintptr_t)copy.destination, from = (uintptr_t)copy.source;
    Region* region = find_region(to, (size_t)copy.bytes);
    if (region && region->checked)
        for (int done = 0; done < copy.bytes; done += (int)region->granule) {
            Cell& cell = region->cells.at((to - region->low + (uintptr_t)done) / region->granule);
            if (!cell.in_flight || cell.thread != current->linear) continue;
            cell.in_flight = 0;
            cell.epoch = epoch;
            cell.time = warp_clock[current->warp];
        }
    region = copy.source_bytes ? find_region(from, (size_t)copy.source_bytes) : nullptr;
    if (!region || !region->checked || !copy.source_point) return;
    for (int done = 0; done < copy.source_bytes; done += (int)region->granule) {
        Cell& cell = region->cells.at((from - region->low + (uintptr_t)done) / region->granule);
        if (cell.epoch > copy.epoch) {
            const Partner partner = partner_of(cell.thread, cell.point, cell.epoch);
            add_report("race: source of a cp.async changed before it was waited for",
                       (const void*)point_at(copy.source_point).pc, from + (uintptr_t)done,
                       (unsigned)copy.source_bytes, region, &partner);
        }
        add_access(cell.readers,
                   copy.source_point);  // read until now: who writes before the next barrier races
    }
}
