// Correct kernels as CUDA's guides and tutorials write them: right results, and no fault in a trace.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// The programming guide's own loops around atomicCAS begin with a plain read.
__device__ float atomic_max(float* address, float value)
{
    int* word = (int*)address;
    int old = *word, assumed;
    do {
        assumed = old;
        old = atomicCAS(word, assumed, __float_as_int(fmaxf(value, __int_as_float(assumed))));
    } while (assumed != old);
    return __int_as_float(old);
}
__device__ double atomic_add(double* address, double value)
{
    unsigned long long* word = (unsigned long long*)address;
    unsigned long long old = *word, assumed;
    do {
        assumed = old;
        old = atomicCAS(word, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
    } while (assumed != old);
    return __longlong_as_double(old);
}
__global__ void compare_and_swap(const float* x, float* most, double* sum)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomic_max(most, x[i]);
    atomic_add(sum, x[i]);
}

// Each block waits for the one before it, through a volatile flag and fences.
__global__ void chain(volatile int* flag, volatile float* data)
{
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        data[0] = 5;
    } else {
        while (flag[blockIdx.x - 1] == 0) {
        }
        __threadfence();
        data[blockIdx.x] = data[blockIdx.x - 1] + 1;
    }
    __threadfence();
    flag[blockIdx.x] = 1;
}

// The last block to come adds up what all have left. All count in one variable, on however many cores.
__device__ unsigned blocks_done = 0;
__global__ void last_block(float* part, float* out)
{
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        part[blockIdx.x] = blockIdx.x + 1;
        __threadfence();
        is_last = atomicInc(&blocks_done, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last || threadIdx.x) return;
    float sum = 0;
    for (int i = 0; i < gridDim.x; i++) sum += part[i];
    out[0] = sum;
}

// Copies of structs with holes between their members.
struct Tagged {
    char tag;
    int value;
};
struct Point {
    float3 at;
    char tag;
};
__global__ void padded_structs(int* out)
{
    __shared__ Tagged tagged[32];
    __shared__ Point point[32];
    const int t = threadIdx.x;
    tagged[t].tag = 1;
    tagged[t].value = 2 * t;
    point[t].at = make_float3(t, t, t);
    point[t].tag = 3;
    __syncthreads();
    const Tagged a = tagged[31 - t];
    const Point b = point[31 - t];
    out[t] = a.tag + a.value + (int)b.at.z + b.tag;
}

// Lanes that have returned need not come to a warp operation whose mask names them.
__global__ void early_return(int* out, int n)
{
    const int t = threadIdx.x;
    if (t >= n) return;
    const unsigned even = __ballot_sync(0xffffffffu, t % 2 == 0);
    __syncwarp();
    out[t] = __popc(even) + __shfl_sync(0xffffffffu, t, 0);
}

struct Accumulator {
    float4 sum;
    int count;
};
enum Mode : unsigned char { ADD, MULTIPLY };
__global__ void vectors(float* out, Mode mode, const Mode* modes)
{
    const float4 zero = {0}, none = {};
    const float4 rows[2] = {{1, 2, 3, 4}, {5, 6}};
    const uchar4 bytes = {1, 2, 3, 4};
    const int2 pair{7, 8};
    Accumulator a = {{1, 2, 3, 4}, 5}, b = a;
    const float lists = zero.x + none.w + rows[0].w + rows[1].y + rows[1].z;
    const float sum = lists + bytes.z + pair.y + b.sum.y + b.count;
    out[threadIdx.x] = mode == MULTIPLY && modes[0] == ADD ? 2 * sum : sum;
}

__global__ void narrow_atomics(half2* h, __nv_bfloat162* b, int* counts)
{
    __shared__ int inside;
    if (threadIdx.x == 0) inside = 0;
    __syncthreads();
    atomicAdd_block(&inside, 1);
    atomicAdd(h, __floats2half2_rn(1, 2));
    atomicAdd(b, __floats2bfloat162_rn(0.5f, 1));
    atomicSub_system(counts, 1);
    __syncthreads();
    if (threadIdx.x == 0) counts[1] = inside;
}

// A text may ask which compiler and which GPU it is for.
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
__global__ void asks(int* out) { out[0] = __CUDA_ARCH__; }
#endif

// Volatile no longer stands for __syncwarp: the old ending of a reduction is a race, and its result is wrong.
__global__ void old_reduction(const float* x, float* out)
{
    __shared__ volatile float s[64];
    const int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    if (t < 32) {
        s[t] += s[t + 32];
        s[t] += s[t + 16];  // @race
    }
    if (t == 0) out[0] = s[0];
}
