// The running block: its threads, its sizes, its shared memory.
#pragma once
#include "../include/abi.h"
#include "containers.h"
#include "fiber.h"

static const int MAX_THREADS = 1024;
static const int WARP = 32;
static const size_t MAX_DYNAMIC_SHARED =
    227 * 1024;  // sm_90 and sm_100; what a given GPU has is Python's to say

enum ThreadState : uint8_t {
    UNSTARTED,
    READY,        // everything up to here can run
    AT_BARRIER,   // in __syncthreads
    IN_WARP,      // in a warp operation
    EVENTS_FULL,  // traced: its list of accesses is full, the other lanes have to catch up
    DONE,
};

struct Index3 {
    unsigned x, y, z;
};

struct CpAsync {
    char* destination;
    const char* source;
    int bytes, source_bytes;
    uint32_t point;         // access point of the write (traced)
    uint32_t source_point;  // … and of the read
    uint32_t epoch;         // block epoch of the issue
};

// One access of one lane, kept until the warp's lanes are put side by side.
struct Event {
    uint64_t address;
    uint32_t point;
    uint32_t size;
};

struct Thread {
    void* stack_pointer;
    int stack;
    ThreadState state;
    int linear, warp, lane;
    Index3 index;

    // What it waits for.
    void* wait_pc;
    int barrier_op, barrier_predicate, barrier_id, barrier_result;
    int warp_op, warp_parameter, warp_width;
    unsigned warp_mask;
    uint64_t warp_in, warp_out;
    void* warp_out_pointer;
    const void* warp_pointer[3];
    int atomics_in_a_row;  // a thread that does nothing but atomics spins: let others run

    emu::vector<CpAsync> copies;   // cp.async not waited for, oldest first
    emu::vector<int> copy_groups;  // how many of them each committed group has
    emu::vector<Event> events;
    size_t events_done;  // the first so many are counted already
};

static Thread threads[MAX_THREADS];
static Thread* current;
static int thread_count, alive_count, arrived_count;
static Index3 block_dim, grid_dim, block_id;
static uint64_t block_linear;
static void (*kernel_function)(void**);
static void** kernel_arguments;
static void* main_stack_pointer;
static emu::vector<int> free_stacks;

// Results of a launch.
enum LaunchResult { LAUNCH_OK = 0, LAUNCH_FAULT = 1, LAUNCH_INVALID = 2, LAUNCH_STOPPED = 3 };
static bool failed, stopped;
static emu::text error_message, printed;
static const size_t MAX_PRINTED = 1 << 20;
static long long switch_count, barrier_count, warp_operation_count, started_count;

// Set from outside: another thread (cuemu_stop) or the timer.
static volatile sig_atomic_t stop_requested, time_is_up;
// The runtime is at work for longer than a moment: no time to be interrupted by force.
static volatile sig_atomic_t counting;

alignas(256) static char dynamic_shared[MAX_DYNAMIC_SHARED + 256];
static size_t dynamic_shared_bytes;
struct SharedVariable {
    emu::text name;
    char* address;
    size_t bytes, element;
    long long launch;  // the latest in which it was seen
};
static const size_t MAX_STATIC_SHARED = 48 * 1024;  // on every GPU; more is to be had dynamically only
static long long launch_number;
static size_t static_shared_bytes;  // of the variables that this launch has met
static emu::vector<SharedVariable> shared_variables;
struct DeviceVariable {
    emu::text name;
    char* address;
    size_t bytes;
};
static emu::vector<DeviceVariable> device_variables;
static int in_first_block;
static bool tracing;

static int lanes_in_warp(int warp) { return emu::smaller(WARP, thread_count - warp * WARP); }
