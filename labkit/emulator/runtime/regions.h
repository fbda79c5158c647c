// Memory that a traced kernel may touch: registered buffers, shared arrays, device variables, the module's
// constants.
#pragma once
#include "containers.h"
#include "state.h"

enum Space { SPACE_CONSTANT = 0, SPACE_SHARED = 1, SPACE_GLOBAL = 3 };

// Who read (or did atomics on) a cell since the last barrier. Enough to name a partner for any later
// unordered write:
//   - two representatives of two different warps: a writer differs in its warp from at least one of them;
//   - if all came from one warp, the lanes of that warp since its last __syncwarp.
// So nothing is missed however many threads read; only the partner that a report names is one of several.
struct AccessSet {
    uint32_t epoch;  // block epoch (see races.h) of the accesses; 0: none
    uint32_t time;   // warp clock of the latest of them
    uint32_t lanes;  // of the first representative's warp
    uint32_t point, other_point;
    uint16_t thread, other_thread;
    uint16_t has_other;     // other_thread, of another warp, is there
    uint16_t block_thread;  // a reader in an earlier block of this launch …
    uint32_t block_epoch;   // … and its epoch; 0: none
    uint32_t block_point;
};

// What is known of `granule` bytes.
struct Cell {
    uint32_t epoch, time, point;  // last plain write; epoch 0: never
    uint16_t thread;
    uint16_t in_flight;  // a cp.async writes it and has not been waited for
    AccessSet readers;
};

// Cells and sets are made in pages on first touch: a buffer of 64 MB of which a traced block writes a tile
// costs little.
template <class T> class Paged {
    static const size_t PAGE = 1024;
    emu::vector<T*> pages;

public:
    ~Paged() { clear(); }
    void clear()
    {
        for (T* page : pages) free(page);
        pages.clear();
    }
    void size_for(size_t count)
    {
        clear();
        const size_t wanted = (count + PAGE - 1) / PAGE;
        pages.reserve(wanted);
        for (size_t i = 0; i < wanted; i++) pages.push_back(nullptr);
    }
    T* find(size_t i) { return pages[i / PAGE] ? pages[i / PAGE] + i % PAGE : nullptr; }
    T& at(size_t i)
    {
        T*& page = pages[i / PAGE];
        if (!page && !(page = (T*)calloc(PAGE, sizeof(T)))) emu::out_of_memory();
        return page[i % PAGE];
    }
    size_t page_count() const { return pages.size(); }
    void swap(Paged& other)
    {
        emu::vector<T*> t(pages);
        pages = other.pages;
        other.pages = t;
    }
};

struct Region {
    uintptr_t low, high;
    Space space;
    bool writable, checked;  // checked: has cells
    emu::text name;
    unsigned granule, element;  // bytes a cell, bytes an element of a shared array
    Paged<Cell> cells;
    Paged<AccessSet> atomics;
    // Which sectors this block and this launch have touched: their numbers are the compulsory traffic.
    emu::vector<uint32_t> sector_block, sector_launch;
    long long block_sectors, launch_sectors;

    bool contains(uintptr_t address, size_t size) const { return low <= address && address + size <= high; }
    size_t cell_count() const { return (size_t)(high - low + granule - 1) / granule; }
};
static emu::vector<Region*> regions;  // by address

struct AddressRange {
    uintptr_t low, high;
};
static emu::vector<AddressRange> constant_ranges;  // read-only parts of the kernel's module
static AddressRange parameter_range;               // the launch's arguments
static Region constant_region;

static Region* find_region(uintptr_t address, size_t size)
{
    size_t first = 0, last = regions.size();
    while (first < last) {
        const size_t middle = (first + last) / 2;
        if (regions[middle]->high <= address) first = middle + 1;
        else last = middle;
    }
    if (first < regions.size() && regions[first]->contains(address, size)) return regions[first];
    if (parameter_range.low <= address && address + size <= parameter_range.high) return &constant_region;
    for (const AddressRange& range : constant_ranges)
        if (range.low <= address && address + size <= range.high) return &constant_region;
    return nullptr;
}

// For messages about an address that lies nowhere.
static Region* nearest_region(uintptr_t address, size_t size, uintptr_t* distance)
{
    Region* nearest = nullptr;
    *distance = ~(uintptr_t)0;
    for (Region* region : regions) {
        const uintptr_t d = address >= region->high         ? address - region->high
                            : address + size <= region->low ? region->low - address
                                                            : 0;
        if (d < *distance) {
            *distance = d;
            nearest = region;
        }
    }
    return nearest;
}

static void forget_cached_regions();  // access points remember where they last were

static Region* add_region(const char* name, void* start, size_t bytes, Space space, bool writable,
                          unsigned granule, size_t element = 4)
{
    Region* region = (Region*)calloc(1, sizeof(Region));
    if (!region) emu::out_of_memory();
    new (region, emu::Place()) Region();
    region->low = (uintptr_t)start;
    region->high = region->low + bytes;
    region->space = space;
    region->writable = writable;
    region->name = name;
    region->granule = granule;
    region->element = (unsigned)element;
    region->block_sectors = region->launch_sectors = 0;
    region->checked = writable;
    if (region->checked) {
        region->cells.size_for(region->cell_count());
        region->atomics.size_for(region->cell_count());
    }
    if (space == SPACE_GLOBAL) {
        const size_t sectors = (size_t)(((region->high + 31) >> 5) - (region->low >> 5));
        region->sector_block.resize(sectors);
        region->sector_launch.resize(sectors);
    }
    regions.push_back(region);
    emu::sort(regions, [](Region* a, Region* b) { return a->low < b->low; });
    forget_cached_regions();
    return region;
}
static void add_shared_region(const char* name, char* start, size_t bytes, size_t element)
{
    for (Region* region : regions)
        if (region->low == (uintptr_t)start && region->space == SPACE_SHARED) return;
    const unsigned granule = element >= 4 ? 4 : element == 2 ? 2 : 1;
    add_region(name, start, bytes, SPACE_SHARED, true, granule, element);
}
static void clear_regions()
{
    for (Region* region : regions) {
        region->~Region();
        free(region);
    }
    regions.clear();
}

// An access narrower than the granule, or across its edge: finer cells, each starting as a copy of the one it
// was part of.
template <class T> static void split_pages(Paged<T>& pages, size_t old_count, unsigned factor)
{
    Paged<T> finer;
    finer.size_for(old_count * factor);
    for (size_t i = 0; i < old_count; i++)
        if (const T* old = pages.find(i))
            for (unsigned k = 0; k < factor; k++) finer.at(i * factor + k) = *old;
    pages.swap(finer);
}
static void refine(Region* region, unsigned granule)
{
    const size_t count = region->cell_count();
    const unsigned factor = region->granule / granule;
    split_pages(region->cells, count, factor);
    split_pages(region->atomics, count, factor);
    region->granule = granule;
}
