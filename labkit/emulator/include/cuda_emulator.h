// CUDA C++'s device side on a CPU. Included before the unmodified kernel text; cuda_fp16.h and the other CUDA
// headers in this folder only lead here.
//   CUEMU_TRACE=0   fast build: for results
//   CUEMU_TRACE=1   traced build: every access is seen by the runtime (sanitizer callbacks and cuemu_copy)
#pragma once
#define __CUEMU__ 1
#ifndef CUEMU_TRACE
#define CUEMU_TRACE 0
#endif

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>
#include <utility>

#include "abi.h"
#include "qualifiers.h"
#include "bits.h"
#include "vector_types.h"
#include "warp.h"
#include "memory_access.h"
#include "device_math.h"
#include "half.h"
#include "bfloat16.h"
#include "atomics.h"
#include "kernel_export.h"

// What a text may ask about its compiler. Not before this: the C library's headers ask as well.
#define __CUDACC__ 1
#define __CUDA_ARCH__ 860

#define printf(...) cuemu_printf(__VA_ARGS__)
#undef assert
#ifdef NDEBUG
#define assert(condition) ((void)0)
#else
#define assert(condition) ((condition) ? (void)0 : cuemu_assert(#condition, __FILE__, __LINE__))
#endif
