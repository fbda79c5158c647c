// z-split grouped GEMM (Q8_0, Q4_0): out[M, N] = x[M, K] * (codes * scales)^T, K cut into slices of groups.
// registers: 40
//
// Fixed by the second seed (kestrel-llm-cuda, article 04): 64 threads along n, 4 along m, 4 columns a
// thread, a sweep along K; at M = 1 all 256 threads go along n; blockIdx.z takes whole groups of 32.
//
// Layouts
//   codes_t  int8  [Kp, Npad]      K-major; Kp = K up to whole groups of 32, Npad = N up to a multiple of 16;
//                                  padding is zero; Q4_0 is stored as Q8_0 is, so both run the same kernel
//   scales_t float [Kp/32, Npad]
//   x        activation_t [M, K]   zsplit_gemm; nothing beyond column K is read
//   x_codes  int8  [M, Kp]         zsplit_gemm_int8; zero beyond K
//   x_scales float [M, Kp/32]      zsplit_gemm_int8
//   out      activation_t [M, N]
//   part     float [z, M, N]       one plane for each z of the grid; may be null when z == 1
// Alignment: codes_t, x_codes 4 bytes, scales_t 16 bytes.
//
// Order of the sums
//   The groups of K are cut into `slices` slices of neighbours, and the slices into `runs` runs of
//   neighbours (first_of: as even as whole numbers allow). k ascending in a group, groups ascending in a
//   slice, slices ascending in a run, runs ascending. runs == slices is the plain sum of all slices.
//   slice_groups = groups / slices and run_slices = slices / runs, rounded down, come from the host: as
//   constants they cost no register, and a division in the kernel would cost several.
//
// Launch
//   zsplit_gemm, zsplit_gemm_int8   block (64, 4); grid (ceil(N/256), ceil(M/4), z), at M = 1
//                                   (ceil(N/1024), 1, z); no shared memory.
//                                   z = slices: block z writes slice z to part; zsplit_reduce follows.
//                                   z = runs:   block z adds the slices of run z, and writes that.
//                                   z = 1:      a block adds everything, and writes out itself.
//   zsplit_reduce                   block (256 / w, w), w = 1 to 16 threads an output; grid ceil(M*N*w/256);
//                                   1 KiB of shared memory. planes = z; runs = planes after z = runs.
//   zsplit_quantize                 block 256; grid ceil(M*Kp/256); a warp takes one group of one row
//
// Invariants
//   The order depends on K, slices and runs; the grid does not change it. So all three z give the same
//   bits; other slices or runs give others.
//   Every rounding is written out (__fmaf_rn, __fmul_rn, __fadd_rn): a compiler may not fuse or split one.
//   The integer dot of a group is complete before it is scaled, hence exact. No atomics.

#include <cuda_fp16.h>
#include "types.cuh"

#define ACTIVATION_FLOAT 0
#define ACTIVATION_HALF 1
#define ACTIVATION_BFLOAT16 2
#ifndef ACTIVATION
#define ACTIVATION ACTIVATION_HALF
#endif

// 4: one char4 load for the four columns. 1: four byte loads, as the seed's float kernel has it: the same
// sectors, asked for four times (kept for the lesson).
#ifndef CODES_A_LOAD
#define CODES_A_LOAD 4
#endif

// 1: __dp4a on four k of one column, after a 4 x 4 transpose of bytes. 0: a multiply-add a code. The integers
// are the same.
#ifndef DOT_BY_DP4A
#define DOT_BY_DP4A 1
#endif

// Loads in flight: so many steps of k are unrolled.
#ifndef UNROLL
#define UNROLL 8
#endif

#define LARGEST_FLOAT 3.402823466e38f

#define GROUP 32
#define THREADS_N 64
#define THREADS_M 4
#define COLUMNS 4
#define THREADS (THREADS_N * THREADS_M)
#define BLOCKS 6  // on an SM: the 1536 threads that sm_86, sm_89 and sm_120 hold, at 40 registers

static_assert(CODES_A_LOAD == 1 || CODES_A_LOAD == 4, "CODES_A_LOAD is 1 or 4");
static_assert(GROUP % UNROLL == 0, "UNROLL divides the group");

#if ACTIVATION == ACTIVATION_BFLOAT16
#include <cuda_bf16.h>
typedef __nv_bfloat16 activation_t;
__device__ __forceinline__ float to_float(activation_t value) { return __bfloat162float(value); }
__device__ __forceinline__ activation_t from_float(float value) { return __float2bfloat16_rn(value); }
#elif ACTIVATION == ACTIVATION_HALF
typedef half activation_t;
__device__ __forceinline__ float to_float(activation_t value) { return __half2float(value); }
__device__ __forceinline__ activation_t from_float(float value) { return __float2half_rn(value); }
#else
typedef float activation_t;
__device__ __forceinline__ float to_float(activation_t value) { return value; }
__device__ __forceinline__ activation_t from_float(float value) { return value; }
#endif

// First of this thread's four columns. M = 1 would leave three of four threads idle: there, all lie along n.
__device__ __forceinline__ int first_column(int M)
{
    if (M == 1) {
        return (blockIdx.x * THREADS + threadIdx.y * THREADS_N + threadIdx.x) * COLUMNS;
    }
    return (blockIdx.x * THREADS_N + threadIdx.x) * COLUMNS;
}

__device__ __forceinline__ int row_of_thread(int M)
{
    return M == 1 ? 0 : blockIdx.y * THREADS_M + threadIdx.y;
}

// First item of a part when `items` are dealt out in order, each = items / parts to every part and one more
// to the first items % parts. Groups to slices, and slices to runs.
__device__ __forceinline__ int first_of(int index, int items, int parts, int each)
{
    return index * each + min(index, items - parts * each);
}

// The slice at which the run-th run of this block begins; a block of one slice has that as its only run.
__device__ __forceinline__ int first_slice(int run, int slices, int runs, int run_slices)
{
    const int index = blockIdx.z + run;
    const bool one_slice = gridDim.z != 1 && gridDim.z != runs;
    return one_slice ? index : first_of(index, slices, runs, run_slices);
}

// Codes of four neighbouring columns at one k.
__device__ __forceinline__ char4 load_codes(const int8_t* codes)
{
#if CODES_A_LOAD == 4
    return *reinterpret_cast<const char4*>(codes);
#else
    return make_char4(codes[0], codes[1], codes[2], codes[3]);
#endif
}

// total += the group sums `dot`, each times its column's scale: one rounding a step.
__device__ __forceinline__ void add_scaled(
    float (&total)[COLUMNS], const float (&dot)[COLUMNS], float4 scale)
{
    total[0] = __fmaf_rn(dot[0], scale.x, total[0]);
    total[1] = __fmaf_rn(dot[1], scale.y, total[1]);
    total[2] = __fmaf_rn(dot[2], scale.z, total[2]);
    total[3] = __fmaf_rn(dot[3], scale.w, total[3]);
}

// sum = next for the first, sum + next after it: the order that zsplit_reduce has.
__device__ __forceinline__ void fold(float (&sum)[COLUMNS], const float (&next)[COLUMNS], bool first)
{
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        sum[j] = first ? next[j] : __fadd_rn(sum[j], next[j]);
    }
}

// Columns at N and beyond are padding of the weight: computed, never stored.
__device__ __forceinline__ void store(
    const float (&sum)[COLUMNS], activation_t* out, float* part, int m, int n0, int M, int N)
{
    const bool whole = gridDim.z == 1;
    const size_t at = (static_cast<size_t>(whole ? 0 : blockIdx.z) * M + m) * N + n0;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        if (n0 + j < N) {
            if (whole) {
                out[at + j] = from_float(sum[j]);
            } else {
                part[at + j] = sum[j];
            }
        }
    }
}

// Float activations.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) zsplit_gemm(
    const int8_t* __restrict__ codes_t, const float* __restrict__ scales_t,
    const activation_t* __restrict__ x, activation_t* __restrict__ out, float* __restrict__ part,
    int M, int N, int Npad, int K, int slices, int runs, int slice_groups, int run_slices)
{
    LABKIT_ASSERT(blockDim.x == THREADS_N && blockDim.y == THREADS_M);
    LABKIT_ASSERT(gridDim.z == 1 || gridDim.z == runs || gridDim.z == slices);
    LABKIT_ASSERT(slice_groups == (K + GROUP - 1) / GROUP / slices && run_slices == slices / runs);
    const int n0 = first_column(M);
    const int m = row_of_thread(M);
    if (n0 >= N || m >= M) {
        return;
    }
    const int ngroups = (K + GROUP - 1) / GROUP;
    const int block_runs = gridDim.z == 1 ? runs : 1;
    const activation_t* x_row = x + static_cast<size_t>(m) * K;

    float sum[COLUMNS] = {0.f, 0.f, 0.f, 0.f};
    int slice = first_slice(0, slices, runs, run_slices);
    int group = first_of(slice, ngroups, slices, slice_groups);
    for (int run = 0; run < block_runs; ++run) {
        float of_run[COLUMNS] = {0.f, 0.f, 0.f, 0.f};
        const int begin_slice = slice;
        const int end_slice = first_slice(run + 1, slices, runs, run_slices);
        for (; slice < end_slice; ++slice) {
            float of_slice[COLUMNS] = {0.f, 0.f, 0.f, 0.f};
            const int end_group = first_of(slice + 1, ngroups, slices, slice_groups);
            for (; group < end_group; ++group) {
                const int k0 = group * GROUP;
                const int count = min(GROUP, K - k0);
                const int8_t* codes = codes_t + static_cast<size_t>(k0) * Npad + n0;
                float dot[COLUMNS] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll UNROLL
                for (int i = 0; i < count; ++i) {
                    const float value = to_float(x_row[k0 + i]);  // one address for the warp: a broadcast
                    const char4 code = load_codes(codes + static_cast<size_t>(i) * Npad);
                    dot[0] = __fmaf_rn(static_cast<float>(code.x), value, dot[0]);
                    dot[1] = __fmaf_rn(static_cast<float>(code.y), value, dot[1]);
                    dot[2] = __fmaf_rn(static_cast<float>(code.z), value, dot[2]);
                    dot[3] = __fmaf_rn(static_cast<float>(code.w), value, dot[3]);
                }
                const float* scale = scales_t + static_cast<size_t>(group) * Npad + n0;
                add_scaled(of_slice, dot, *reinterpret_cast<const float4*>(scale));
            }
            fold(of_run, of_slice, slice == begin_slice);
        }
        fold(sum, of_run, run == 0);
    }
    store(sum, out, part, m, n0, M, N);
}

__device__ __forceinline__ unsigned as_word(char4 code)
{
    unsigned word;
    memcpy(&word, &code, sizeof word);
    return word;
}

// dot[j] += four k of column j; `codes` at the first k, `x_word` holds the activation codes of the four.
__device__ __forceinline__ void add_four(int (&dot)[COLUMNS], const int8_t* codes, int Npad, int x_word)
{
    const size_t row = Npad;
    const char4 k0 = load_codes(codes);
    const char4 k1 = load_codes(codes + row);
    const char4 k2 = load_codes(codes + 2 * row);
    const char4 k3 = load_codes(codes + 3 * row);
#if DOT_BY_DP4A
    // Bytes come as (k, column); __dp4a wants the four k of a column in one word.
    const unsigned low01 = __byte_perm(as_word(k0), as_word(k1), 0x5140);
    const unsigned high01 = __byte_perm(as_word(k0), as_word(k1), 0x7362);
    const unsigned low23 = __byte_perm(as_word(k2), as_word(k3), 0x5140);
    const unsigned high23 = __byte_perm(as_word(k2), as_word(k3), 0x7362);
    dot[0] = __dp4a(static_cast<int>(__byte_perm(low01, low23, 0x5410)), x_word, dot[0]);
    dot[1] = __dp4a(static_cast<int>(__byte_perm(low01, low23, 0x7632)), x_word, dot[1]);
    dot[2] = __dp4a(static_cast<int>(__byte_perm(high01, high23, 0x5410)), x_word, dot[2]);
    dot[3] = __dp4a(static_cast<int>(__byte_perm(high01, high23, 0x7632)), x_word, dot[3]);
#else
    const int x0 = static_cast<int8_t>(x_word);
    const int x1 = static_cast<int8_t>(x_word >> 8);
    const int x2 = static_cast<int8_t>(x_word >> 16);
    const int x3 = static_cast<int8_t>(x_word >> 24);
    dot[0] += k0.x * x0 + k1.x * x1 + k2.x * x2 + k3.x * x3;
    dot[1] += k0.y * x0 + k1.y * x1 + k2.y * x2 + k3.y * x3;
    dot[2] += k0.z * x0 + k1.z * x1 + k2.z * x2 + k3.z * x3;
    dot[3] += k0.w * x0 + k1.w * x1 + k2.w * x2 + k3.w * x3;
#endif
}

// Int8 activations. A group's dot is at most 32 * 128 * 128 < 2^24: exact as an integer and as a float.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) zsplit_gemm_int8(
    const int8_t* __restrict__ codes_t, const float* __restrict__ scales_t,
    const int8_t* __restrict__ x_codes, const float* __restrict__ x_scales,
    activation_t* __restrict__ out, float* __restrict__ part,
    int M, int N, int Npad, int K, int slices, int runs, int slice_groups, int run_slices)
{
    LABKIT_ASSERT(blockDim.x == THREADS_N && blockDim.y == THREADS_M);
    LABKIT_ASSERT(gridDim.z == 1 || gridDim.z == runs || gridDim.z == slices);
    LABKIT_ASSERT(slice_groups == (K + GROUP - 1) / GROUP / slices && run_slices == slices / runs);
    const int n0 = first_column(M);
    const int m = row_of_thread(M);
    if (n0 >= N || m >= M) {
        return;
    }
    const int ngroups = (K + GROUP - 1) / GROUP;
    const int block_runs = gridDim.z == 1 ? runs : 1;
    const size_t first_of_row = static_cast<size_t>(m) * ngroups;

    float sum[COLUMNS] = {0.f, 0.f, 0.f, 0.f};
    int slice = first_slice(0, slices, runs, run_slices);
    int group = first_of(slice, ngroups, slices, slice_groups);
    for (int run = 0; run < block_runs; ++run) {
        float of_run[COLUMNS] = {0.f, 0.f, 0.f, 0.f};
        const int begin_slice = slice;
        const int end_slice = first_slice(run + 1, slices, runs, run_slices);
        for (; slice < end_slice; ++slice) {
            float of_slice[COLUMNS] = {0.f, 0.f, 0.f, 0.f};
            const int end_group = first_of(slice + 1, ngroups, slices, slice_groups);
            for (; group < end_group; ++group) {
                const int8_t* codes = codes_t + static_cast<size_t>(group) * GROUP * Npad + n0;
                const int8_t* x_group = x_codes + (first_of_row + group) * GROUP;
                int dot[COLUMNS] = {0, 0, 0, 0};
#pragma unroll (UNROLL / 4)
                for (int i = 0; i < GROUP; i += 4) {
                    const int x_word = *reinterpret_cast<const int*>(x_group + i);
                    add_four(dot, codes + static_cast<size_t>(i) * Npad, Npad, x_word);
                }
                const float* scales = scales_t + static_cast<size_t>(group) * Npad + n0;
                const float4 scale = *reinterpret_cast<const float4*>(scales);
                const float column_scale[COLUMNS] = {scale.x, scale.y, scale.z, scale.w};
                const float x_scale = x_scales[first_of_row + group];
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    const float both = __fmul_rn(x_scale, column_scale[j]);
                    of_slice[j] = __fadd_rn(of_slice[j], __fmul_rn(static_cast<float>(dot[j]), both));
                }
            }
            fold(of_run, of_slice, slice == begin_slice);
        }
        fold(sum, of_run, run == 0);
    }
    store(sum, out, part, m, n0, M, N);
}

// The planes from `first` to `end`, in ascending order; `cell` is the output's place in plane 0.
__device__ __forceinline__ float sum_of_planes(const float* cell, int first, int end, long long total)
{
    float sum = cell[first * total];
#pragma unroll 8
    for (int plane = first + 1; plane < end; ++plane) {
        sum = __fadd_rn(sum, cell[plane * total]);
    }
    return sum;
}

// out = the planes of part in `runs` runs of neighbours: ascending in a run, runs ascending. total = M*N.
// blockDim.y threads share an output: where outputs are few, a thread each would wait for one plane after the
// other. Each of them adds up a run, then one of them adds the runs.
extern "C" __global__ void __launch_bounds__(THREADS) zsplit_reduce(
    const float* __restrict__ part, activation_t* __restrict__ out, long long total, int planes, int runs)
{
    __shared__ float of_run[THREADS];
    LABKIT_ASSERT(blockDim.x * blockDim.y == THREADS && planes >= runs && runs >= 1);
    const int workers = blockDim.y;
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const bool inside = i < total;
    float sum = 0.f;
    if (workers == 1 && planes == runs) {
        if (inside) {
            sum = sum_of_planes(part + i, 0, planes, total);
        }
    } else {
        for (int first_run = 0; first_run < runs; first_run += workers) {
            const int run = first_run + threadIdx.y;
            if (inside && run < runs) {
                const int first = first_of(run, planes, runs, planes / runs);
                const int end = first_of(run + 1, planes, runs, planes / runs);
                of_run[threadIdx.y * blockDim.x + threadIdx.x] = sum_of_planes(part + i, first, end, total);
            }
            __syncthreads();
            if (inside && threadIdx.y == 0) {
                const int count = min(workers, runs - first_run);
                for (int j = 0; j < count; ++j) {
                    const float next = of_run[j * blockDim.x + threadIdx.x];
                    sum = first_run + j == 0 ? next : __fadd_rn(sum, next);
                }
            }
            __syncthreads();
        }
    }
    if (inside && threadIdx.y == 0) {
        out[i] = from_float(sum);
    }
}

// The larger; NaN when either is, so that a NaN in the input reaches the output by way of the scale.
__device__ __forceinline__ float larger_or_nan(float a, float b)
{
    return a > b || a != a ? a : b;
}

// x [M, K] to int8 codes and a scale for every group: scale = absmax / 127, code = x / scale to nearest even.
// A group of zeros has scale 0 and codes 0; so has one whose scale underflows. Infinity and NaN go to the
// scale.
extern "C" __global__ void __launch_bounds__(THREADS) zsplit_quantize(
    const activation_t* __restrict__ x, int8_t* __restrict__ x_codes, float* __restrict__ x_scales,
    int M, int K)
{
    LABKIT_ASSERT(blockDim.x == THREADS);
    const int ngroups = (K + GROUP - 1) / GROUP;
    const int lane = threadIdx.x % GROUP;
    const long long index = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) / GROUP;
    if (index >= static_cast<long long>(M) * ngroups) {
        return;  // the whole warp: a warp takes one group
    }
    const long long m = index / ngroups;
    const int k = static_cast<int>(index % ngroups) * GROUP + lane;
    const float value = k < K ? to_float(x[m * K + k]) : 0.f;
    float largest = fabsf(value);
#pragma unroll
    for (int distance = GROUP / 2; distance > 0; distance /= 2) {
        largest = larger_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    const float scale = largest / 127.f;
    int code = 0;
    if (scale > 0.f && scale <= LARGEST_FLOAT) {
        // A subnormal scale is so coarse that the quotient may pass 127.
        code = static_cast<int>(fminf(fmaxf(rintf(value / scale), -127.f), 127.f));
    }
    x_codes[index * GROUP + lane] = static_cast<int8_t>(code);
    if (lane == 0) {
        x_scales[index] = scale;
    }
}
