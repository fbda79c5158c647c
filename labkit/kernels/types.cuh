// What every kernel needs on both runners: fixed-width integers and memcpy (NVRTC has no <stdint.h> and knows
// memcpy by itself), and the check of launch shapes.
#pragma once
#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#include <string.h>
#endif

// Launch shapes and constants come from Python; a checked build asserts in the kernel that they agree.
#ifdef LABKIT_CHECKS
#define LABKIT_ASSERT(condition) assert(condition)
#else
#define LABKIT_ASSERT(condition) ((void)0)
#endif
