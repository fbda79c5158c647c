// The emulator's runtime, one translation unit: compiled once (without instrumentation) and linked into each
// kernel's shared object, so that every loaded copy of an object has threads, shared memory and statics of
// its own.
//
//   platform.h       exported names, pages, clock        access_points.h  counts by instruction
//   containers.h     vector, text                        reports.h        what was found wrong
//   fiber.h          stacks and the switch               epochs.h         which access came first
//   state.h          threads, block, shared memory       races.h          shadow cells
//   faults.h         ending a launch with a line         counters.h       lanes to requests
//   signals.h        wild pointers, time limit           trace.h          record(): the traced build's door
//   regions.h        memory that may be touched          trace_json.h     the trace for Python
//   scheduler.h      blocks, barriers, deadlocks         cp_async.h       copies under way
//   collectives.h    warp operations                     device_calls.h   built-ins, barriers, printf
//   matrix_ops.h     ldmatrix, mma.sync                  sanitizer_callbacks.h
//   atomic_ops.h     atomics                             launch.h         what Python calls
//
// CUEMU_TRACE_BUILD adds the sanitizer callbacks: for kernels compiled with CUEMU_TRACE=1.

// A fortified longjmp would refuse to leave a fiber's stack.
#undef _FORTIFY_SOURCE

#include "platform.h"
#include "containers.h"
#include "fiber.h"
#include "state.h"
#include "faults.h"
#include "signals.h"
#include "regions.h"
#include "access_points.h"
#include "reports.h"
#include "epochs.h"
#include "races.h"
#include "counters.h"
#include "trace.h"
#include "trace_json.h"
#include "scheduler.h"
#include "matrix_ops.h"
#include "collectives.h"
#include "atomic_ops.h"
#include "cp_async.h"
#include "device_calls.h"
#include "sanitizer_callbacks.h"
#include "launch.h"

// Linkers that bring no start files (lld called directly) have no such symbol; where there is one, it wins.
extern "C" {
__attribute__((weak, visibility("hidden"))) void* __dso_handle = nullptr;
}
