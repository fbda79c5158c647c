// The greedy end of a decode step: the most likely token of every row becomes the next input, the row's length
// moves on, and the token is kept. One launch.
// registers: 40
//
// Layouts
//   logits   activation_t [B, V], rows `stride` elements apart
//   tokens   int64 [B]            the next input, written
//   lengths  int [B]              one more, unless the row is left alone
//   history  int [B, capacity]    history[b][lengths[b]] = the token, at the old length
//   status   int [B]              set to 1 when a logit is NaN or the largest is infinite; never cleared here
//   part     unsigned long long [B, parts]
//   tickets  unsigned [B]         zero before the first launch, and zero after each
//
// Launch: grid (parts, B), block THREADS; parts >= 1. It may overlap the kernels ahead of it
// (ptx.cuh): so logits is not __restrict__, or a compiler might move a load ahead of the wait.
// A row whose length is negative or not below capacity is left alone, as in decode_attention.
//
// Which token: the largest logit, of equals the lowest id; a NaN counts as larger than anything. The largest of
// a set needs no order, so neither the number of parts nor the arrival changes it.

#include "ptx.cuh"

#define ACTIVATION_HALF 1
#define ACTIVATION_BFLOAT16 2
#ifndef ACTIVATION
#define ACTIVATION ACTIVATION_HALF
#endif

#define THREADS 256
#define INFINITE_KEY 0xff800000u  // of plus infinity; a NaN's is above

#if ACTIVATION == ACTIVATION_BFLOAT16
#include <cuda_bf16.h>
typedef __nv_bfloat16 activation_t;
__device__ __forceinline__ float to_float(activation_t value) { return __bfloat162float(value); }
#else
typedef half activation_t;
__device__ __forceinline__ float to_float(activation_t value) { return __half2float(value); }
#endif

// Larger for the larger logit, of equals for the lower id.
__device__ __forceinline__ uint64_t key_of(float logit, int id)
{
    const unsigned bits = __float_as_uint(__fadd_rn(logit, 0.f));  // -0 is 0
    const unsigned ordered = logit != logit ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - static_cast<unsigned>(id));
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The largest of the block, in thread 0.
__device__ __forceinline__ uint64_t largest_of_block(uint64_t key, uint64_t* of_warp)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const unsigned high = __shfl_xor_sync(0xffffffffu, static_cast<unsigned>(key >> 32), distance);
        const unsigned low = __shfl_xor_sync(0xffffffffu, static_cast<unsigned>(key), distance);
        key = larger(key, static_cast<uint64_t>(high) << 32 | low);
    }
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = key;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < THREADS / 32; ++w) {
            key = larger(key, of_warp[w]);
        }
    }
    return key;
}

extern "C" __global__ void __launch_bounds__(THREADS) greedy(
    const activation_t* logits, long long* tokens, int* lengths, int* history, int* status,
    unsigned long long* part, unsigned* tickets, int vocabulary, long long stride, int capacity)
{
    __shared__ uint64_t of_warp[THREADS / 32];
    __shared__ unsigned arrived;
    LABKIT_ASSERT(blockDim.x == THREADS);
    const int row = blockIdx.y, parts = gridDim.x;
    const activation_t* of_row = logits + row * stride;
    grid_dependency_release();
    grid_dependency_wait();
    uint64_t key = 0;
    for (int id = blockIdx.x * THREADS + threadIdx.x; id < vocabulary; id += parts * THREADS) {
        key = larger(key, key_of(to_float(of_row[id]), id));
    }
    key = largest_of_block(key, of_warp);
    if (threadIdx.x == 0) {
        part[static_cast<size_t>(row) * parts + blockIdx.x] = key;
        __threadfence();
        arrived = atomicInc(tickets + row, parts - 1);
    }
    __syncthreads();
    if (arrived != parts - 1) {
        return;
    }
    __threadfence();
    key = 0;
    for (int i = threadIdx.x; i < parts; i += THREADS) {
        key = larger(key, __ldcg(part + static_cast<size_t>(row) * parts + i));
    }
    key = largest_of_block(key, of_warp);
    if (threadIdx.x == 0) {
        const int length = lengths[row];
        if (length >= 0 && length < capacity) {
            const unsigned id = 0xffffffffu - static_cast<unsigned>(key);
            tokens[row] = id;
            history[static_cast<size_t>(row) * capacity + length] = static_cast<int>(id);
            lengths[row] = length + 1;
            const unsigned most = static_cast<unsigned>(key >> 32);
            if (most >= INFINITE_KEY || most <= ~INFINITE_KEY) {
                status[row] = 1;
            }
        }
    }
}
