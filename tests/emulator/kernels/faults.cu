// Planted faults and their clean twins: one kernel, `which` picks the case, so that one compilation serves
// all tests. The line that a fault must be reported at carries  // @name.  Blocks have 64 threads unless a
// test says otherwise.
#include "ptx.cuh"

#define CASE_PARAMETERS float *out, const float *in, int *flags, int n
#define T ((int)threadIdx.x)

// ---- barriers and shared memory
__device__ void clean_reverse(CASE_PARAMETERS)
{
    __shared__ float s[64];
    s[T] = in[T];
    __syncthreads();
    out[T] = s[63 - T];
}
__device__ void no_barrier_after_write(CASE_PARAMETERS)
{
    __shared__ float s[64];
    s[T] = in[T];
    out[T] = s[63 - T];  // @no_barrier_after_write
}
__device__ void clean_refill(CASE_PARAMETERS)
{
    __shared__ float s[64];
    float sum = 0.f;
    for (int i = 0; i < 3; i++) {
        s[T] = in[T] + i;
        __syncthreads();
        sum += s[63 - T];
        __syncthreads();
    }
    out[T] = sum;
}
__device__ void no_barrier_before_refill(CASE_PARAMETERS)
{
    __shared__ float s[64];
    float sum = 0.f;
    for (int i = 0; i < 3; i++) {
        s[T] = in[T] + i;
        __syncthreads();
        sum += s[63 - T];  // @no_barrier_before_refill
    }
    out[T] = sum;
}
__device__ void uninitialised(CASE_PARAMETERS)
{
    __shared__ float s[64];
    if (T < 32) s[T] = in[T];
    __syncthreads();
    out[T] = s[T];  // @uninitialised
}
__device__ void uninitialised_atomic(CASE_PARAMETERS)
{
    __shared__ int counter;
    atomicAdd(&counter, 1);  // @uninitialised_atomic
    __syncthreads();
    out[T] = counter;
}
__device__ void divergent_barrier(CASE_PARAMETERS)
{
    if (T < 16) {
        out[T] = 1.f;
        __syncthreads();  // @divergent_barrier
    } else {
        out[T] = 2.f;
        __syncthreads();
    }
}
__device__ void clean_early_exit(CASE_PARAMETERS)
{
    if (T >= 40) return;
    __syncthreads();
    out[T] = 1.f;
}
// All warps read one cell, then one thread of warp n writes it: whoever that is, others have read it.
__device__ void writer_among_readers(CASE_PARAMETERS)
{
    __shared__ float s[1];
    if (T == 0) s[0] = 1.f;
    __syncthreads();
    out[T] = s[0];
    if (T == 32 * n + 7) s[0] = 2.f;  // @writer_among_readers
}
__device__ void same_value_twice(CASE_PARAMETERS)
{
    out[0] = 1.f;  // @same_value_twice
}
__device__ void clean_own_cell(CASE_PARAMETERS)
{
    __shared__ float s[64];
    s[T] = 1.f;
    for (int i = 0; i < 4; i++) s[T] += in[T];
    out[T] = s[T];
}

// ---- warps
__device__ void no_syncwarp(CASE_PARAMETERS)
{
    __shared__ float s[64];
    s[T] = in[T];
    out[T] = s[T ^ 1];  // @no_syncwarp
}
__device__ void clean_syncwarp(CASE_PARAMETERS)
{
    __shared__ float s[64];
    s[T] = in[T];
    __syncwarp();
    const float v = s[T ^ 1];
    __syncwarp();
    s[T ^ 3] = v;
    __syncwarp();
    out[T] = s[T];
}
__device__ void clean_half_warps(CASE_PARAMETERS)
{
    __shared__ float s[64];
    const unsigned mask = T & 16 ? 0xffff0000u : 0x0000ffffu;
    for (int i = 0; i < 3; i++) {
        s[T] = in[T] + i;
        __syncwarp(mask);
        out[T] = s[T ^ 5];
        __syncwarp(mask);
    }
}
__device__ void half_warp_is_not_enough(CASE_PARAMETERS)
{
    __shared__ float s[64];
    const unsigned mask = T & 16 ? 0xffff0000u : 0x0000ffffu;
    s[T] = in[T];
    __syncwarp(mask);
    out[T] = s[T ^ 16];  // @half_warp_is_not_enough
}
__device__ void shuffle_is_no_fence(CASE_PARAMETERS)
{
    __shared__ float s[64];
    s[T] = in[T];
    const float v = __shfl_xor_sync(0xffffffffu, in[T], 1);
    out[T] = s[T ^ 1] + v;  // @shuffle_is_no_fence
}
__device__ void deadlock(CASE_PARAMETERS)
{
    float v = in[T];
    if (T % 32 < 16) v += __shfl_xor_sync(0xffffffffu, v, 8);  // @deadlock
    __syncthreads();
    out[T] = v;
}
__device__ void warp_mismatch(CASE_PARAMETERS)
{
    if (T % 32 < 16) out[T] = (float)__ballot_sync(0xffffffffu, 1);  // @warp_mismatch
    else out[T] = (float)__any_sync(0xffffffffu, 1);
}
__device__ void shuffle_from_absent_lane(CASE_PARAMETERS)
{
    if (T < 16) out[T] = __shfl_sync(0x0000ffffu, in[T], 20);  // @shuffle_from_absent_lane
}
// One lane comes early to the second meeting while others still hold the first: no fault.
__device__ void clean_early_lane(CASE_PARAMETERS)
{
    const unsigned half = T % 32 < 16 ? 0x0000ffffu : 0;
    float v = in[T];
    if (half) v += __shfl_xor_sync(half, v, 8);
    out[T] = __shfl_sync(0xffffffffu, v, 31);
}

// ---- out of bounds
__device__ void read_past_the_end(CASE_PARAMETERS)
{
    out[T] = in[T + n];  // @read_past_the_end
}
__device__ void write_past_the_end(CASE_PARAMETERS)
{
    out[T + n] = 1.f;  // @write_past_the_end
}
__device__ void write_past_shared(CASE_PARAMETERS)
{
    __shared__ float s[64];
    s[T + n] = 1.f;  // @write_past_shared
    __syncthreads();
    out[T] = s[T];
}
__device__ void read_past_shared(CASE_PARAMETERS)
{
    __shared__ float s[64];
    s[T] = 1.f;
    __syncthreads();
    out[T] = s[T + n];  // @read_past_shared
}
__device__ void past_dynamic(CASE_PARAMETERS)
{
    extern __shared__ float buffer[];
    buffer[T] = in[T];  // @past_dynamic
    __syncthreads();
    out[T] = buffer[T];
}
__device__ void atomic_past_the_end(CASE_PARAMETERS)
{
    atomicAdd(&flags[T + n], 1);  // @atomic_past_the_end
}
__device__ void write_to_const(CASE_PARAMETERS)
{
    const_cast<float*>(in)[T] = 1.f;  // @write_to_const
}
__device__ void misaligned(CASE_PARAMETERS)
{
    const float4 v = *reinterpret_cast<const float4*>(in + n);  // @misaligned
    out[T] = v.x + v.w;
}
__device__ void null_write(CASE_PARAMETERS)
{
    float* nowhere = n ? out : nullptr;
    nowhere[T] = 1.f;  // @null_write
}
__device__ void wild_read(CASE_PARAMETERS)
{
    const float* wild = (const float*)((size_t)in ^ ((size_t)n << 36));
    out[T] = wild[T];  // @wild_read
}

// ---- between blocks
__device__ void blocks_write_one_cell(CASE_PARAMETERS)
{
    if (T == 0) out[0] = (float)blockIdx.x;  // @blocks_write_one_cell
}
__device__ void block_reads_another(CASE_PARAMETERS)
{
    if (T == 0) out[blockIdx.x] = 1.f;
    __syncthreads();
    if (T == 0) out[64 + blockIdx.x] = out[(blockIdx.x + 1) % gridDim.x];  // @block_reads_another
}
// The last block to arrive adds the others' parts.
template <bool fence>
__device__ void add_in_last_block(CASE_PARAMETERS)
{
    __shared__ bool last;
    if (T == 0) {
        out[1 + blockIdx.x] = 1.f;
        if (fence) __threadfence();
        last = atomicAdd(&flags[0], 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (last && T == 1) {
        float sum = 0.f;
        for (int b = 0; b < (int)gridDim.x; b++) sum += out[1 + b];  // @no_threadfence
        out[0] = sum;
    }
}
__device__ void clean_threadfence(CASE_PARAMETERS) { add_in_last_block<true>(out, in, flags, n); }
__device__ void no_threadfence(CASE_PARAMETERS) { add_in_last_block<false>(out, in, flags, n); }
// Every thread writes, all meet, and one thread's fence covers what it has seen.
__device__ void clean_fence_after_barrier(CASE_PARAMETERS)
{
    __shared__ bool last;
    out[64 + 64 * blockIdx.x + T] = 1.f;
    __syncthreads();
    if (T == 0) {
        __threadfence();
        last = atomicAdd(&flags[0], 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    float sum = 0.f;
    for (int b = 0; b < (int)gridDim.x; b++) sum += out[64 + 64 * b + (T + 1) % 64];
    out[T] = sum;
}
// Without the barrier the one thread's fence covers only what it wrote itself.
__device__ void fence_without_barrier(CASE_PARAMETERS)
{
    __shared__ bool last;
    out[64 + 64 * blockIdx.x + T] = 1.f;
    if (T == 0) {
        __threadfence();
        last = atomicAdd(&flags[0], 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    float sum = 0.f;
    for (int b = 0; b < (int)gridDim.x; b++)
        sum += out[64 + 64 * b + (T + 1) % 64];  // @fence_without_barrier
    out[T] = sum;
}

// ---- atomics
__device__ void clean_atomics(CASE_PARAMETERS)
{
    __shared__ int counter;
    if (T == 0) counter = 0;
    __syncthreads();
    atomicAdd(&counter, 1);
    atomicAdd(&flags[1], 1);
    __syncthreads();
    out[T] = counter;
}
__device__ void plain_write_and_atomic(CASE_PARAMETERS)
{
    if (T == 40) flags[1] = 0;
    else if (T < 32) atomicAdd(&flags[1], 1);  // @plain_write_and_atomic
}
__device__ void clean_flag_between_warps(CASE_PARAMETERS)
{
    __shared__ int ready;
    __shared__ float value;
    if (T == 0) ready = 0;
    __syncthreads();
    if (T == 32) {
        value = in[1];
        __threadfence_block();
        atomicExch(&ready, 1);
    }
    if (T == 0) {
        while (atomicAdd(&ready, 0) == 0) {}
        out[0] = value;
    }
}

// ---- cp.async. Two buffers of 64 floats; 16 threads copy 16 bytes each.
template <bool wait, bool barrier_after, bool barrier_before>
__device__ void copy_pipeline(CASE_PARAMETERS)
{
    __shared__ __align__(16) float s[2][64];
    float sum = 0.f;
    if (T < 16) cp_async_16(&s[0][4 * T], in + 4 * T);
    cp_async_commit();
    for (int i = 0; i < 4; i++) {
        if (i + 1 < 4 && T < 16) cp_async_16(&s[(i + 1) & 1][4 * T], in + 4 * T);  // @copy_no_barrier_before
        cp_async_commit();
        if (wait) cp_async_wait<1>();
        if (barrier_after) __syncthreads();
        sum += s[i & 1][63 - T];  // @copy
        if (barrier_before) __syncthreads();
    }
    out[T] = sum;
}
__device__ void clean_copy(CASE_PARAMETERS) { copy_pipeline<true, true, true>(out, in, flags, n); }
__device__ void copy_no_wait(CASE_PARAMETERS) { copy_pipeline<false, true, true>(out, in, flags, n); }
__device__ void copy_no_barrier_after(CASE_PARAMETERS)
{
    copy_pipeline<true, false, true>(out, in, flags, n);
}
__device__ void copy_no_barrier_before(CASE_PARAMETERS)
{
    copy_pipeline<true, true, false>(out, in, flags, n);
}
__device__ void copy_overwritten(CASE_PARAMETERS)
{
    __shared__ __align__(16) float s[64];
    if (T < 16) cp_async_16(&s[4 * T], in + 4 * T);
    cp_async_commit();
    if (T < 16) s[4 * T] = 0.f;  // @copy_overwritten
    cp_async_wait<0>();
    __syncthreads();
    out[T] = s[T];
}
__device__ void copy_source_changed(CASE_PARAMETERS)
{
    __shared__ __align__(16) float s[64];
    if (T < 16) cp_async_16(&s[4 * T], out + 4 * T);  // @copy_source_changed
    cp_async_commit();
    __syncthreads();
    if (T >= 32) out[T] = 1.f;
    cp_async_wait<0>();
    __syncthreads();
    flags[T] = (int)s[T];
}
__device__ void copy_misaligned(CASE_PARAMETERS)
{
    __shared__ __align__(16) float s[68];
    if (T < 16) cp_async_16(&s[4 * T], in + 4 * T + n);  // @copy_misaligned
    cp_async_wait_all();
    __syncthreads();
    out[T] = s[T];
}
__device__ void clean_copy_zero_fill(CASE_PARAMETERS)
{
    __shared__ __align__(16) float s[64];
    // A copy that is not ok reads nothing: its address may lie anywhere.
    if (T < 16) cp_async_16(&s[4 * T], in + (T < n ? 4 * T : 4000 * T), T < n);
    cp_async_wait_all();
    __syncthreads();
    out[T] = s[T];
}

// ---- the program itself
__device__ void failed_assert(CASE_PARAMETERS)
{
    assert(T < n);  // @failed_assert
    out[T] = 1.f;
}
__device__ void trap(CASE_PARAMETERS)
{
    if (T == n) __trap();  // @trap
}
__device__ __noinline__ float deep(volatile const float* in, int depth)
{
    volatile float local[256];
    local[depth & 255] = in[0];
    if (depth <= 0) return local[0];
    return deep(in, depth - 1) + local[depth & 255];  // @stack_overflow
}
__device__ void stack_overflow(CASE_PARAMETERS) { out[T] = deep(in, n); }
__device__ void endless_loop(CASE_PARAMETERS)
{
    volatile int turning = 1;
    while (turning) turning += n;  // @endless_loop
    out[T] = 1.f;
}
__device__ void endless_loop_with_reads(CASE_PARAMETERS)
{
    while (((volatile const float*)in)[T] >= 0.f) out[T] += 1.f;  // @endless_loop_with_reads
}
__device__ void divide_by_zero(CASE_PARAMETERS)
{
    flags[T] = 7 / n;  // @divide_by_zero
}
__device__ void print_much(CASE_PARAMETERS)
{
    for (int i = 0; i < n; i++) printf("thread %d line %d of many that nobody will read to the end\n", T, i);
}

extern "C" __global__ void planted(int which, float* out, const float* in, int* flags, int n)
{
    switch (which) {
#define CASE(number, name) case number: name(out, in, flags, n); break;
        CASE(0, clean_reverse)
        CASE(1, no_barrier_after_write)
        CASE(2, clean_refill)
        CASE(3, no_barrier_before_refill)
        CASE(4, uninitialised)
        CASE(5, uninitialised_atomic)
        CASE(6, divergent_barrier)
        CASE(7, clean_early_exit)
        CASE(8, writer_among_readers)
        CASE(9, same_value_twice)
        CASE(10, clean_own_cell)
        CASE(11, no_syncwarp)
        CASE(12, clean_syncwarp)
        CASE(13, clean_half_warps)
        CASE(14, half_warp_is_not_enough)
        CASE(15, shuffle_is_no_fence)
        CASE(16, deadlock)
        CASE(17, warp_mismatch)
        CASE(18, shuffle_from_absent_lane)
        CASE(19, clean_early_lane)
        CASE(20, read_past_the_end)
        CASE(21, write_past_the_end)
        CASE(22, write_past_shared)
        CASE(23, read_past_shared)
        CASE(24, past_dynamic)
        CASE(25, atomic_past_the_end)
        CASE(26, write_to_const)
        CASE(27, misaligned)
        CASE(28, null_write)
        CASE(29, wild_read)
        CASE(30, blocks_write_one_cell)
        CASE(31, block_reads_another)
        CASE(32, clean_threadfence)
        CASE(33, no_threadfence)
        CASE(34, clean_fence_after_barrier)
        CASE(35, fence_without_barrier)
        CASE(36, clean_atomics)
        CASE(37, plain_write_and_atomic)
        CASE(38, clean_flag_between_warps)
        CASE(39, clean_copy)
        CASE(40, copy_no_wait)
        CASE(41, copy_no_barrier_after)
        CASE(42, copy_no_barrier_before)
        CASE(43, copy_overwritten)
        CASE(44, copy_source_changed)
        CASE(45, copy_misaligned)
        CASE(46, clean_copy_zero_fill)
        CASE(47, failed_assert)
        CASE(48, trap)
        CASE(49, stack_overflow)
        CASE(50, endless_loop)
        CASE(51, endless_loop_with_reads)
        CASE(52, divide_by_zero)
        CASE(53, print_much)
    }
}
