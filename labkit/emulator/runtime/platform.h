// What differs between Linux, macOS and Windows: exported names, pages of memory, the clock.
#pragma once
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#define EMU_EXPORT extern "C" __declspec(dllexport)
#else
#include <pthread.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <ucontext.h>
#endif
#define EMU_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#define EMU_NOINLINE __attribute__((noinline))
#define EMU_CALLER __builtin_return_address(0)

static long long nanoseconds_now()
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

// Address space that may not be touched until it is opened.
static char* reserve_pages(size_t bytes)
{
#ifdef _WIN32
    return (char*)VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_NOACCESS);
#else
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    void* pages = mmap(nullptr, bytes, PROT_NONE, flags, -1, 0);
    return pages == MAP_FAILED ? nullptr : (char*)pages;
#endif
}
static bool open_pages(char* start, size_t bytes)
{
#ifdef _WIN32
    return VirtualAlloc(start, bytes, MEM_COMMIT, PAGE_READWRITE) != nullptr;
#else
    return mprotect(start, bytes, PROT_READ | PROT_WRITE) == 0;
#endif
}
static void release_pages(char* start, size_t bytes)
{
#ifdef _WIN32
    (void)bytes;
    VirtualFree(start, 0, MEM_RELEASE);
#else
    munmap(start, bytes);
#endif
}
