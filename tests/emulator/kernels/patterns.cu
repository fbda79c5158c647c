// Access patterns whose counts can be worked out by hand. One access point a line, marked  // @name.
// in and out are 256-byte aligned floats; a block is one warp unless a test says otherwise.
#include "types.cuh"

#define CASE_PARAMETERS float *out, const float *in, int *flags
#define T ((int)threadIdx.x)

__device__ void global_loads(CASE_PARAMETERS)
{
    const char* bytes = (const char*)in;
    float v = 0.f;
    v += in[T];                               // @stride_1
    v += in[2 * T];                           // @stride_2
    v += in[32 * T];                          // @stride_32
    v += in[7];                               // @broadcast
    v += in[T + 1];                           // @unaligned
    v += in[31 - T];                          // @backwards
    v += bytes[T];                            // @bytes_1
    v += ((const short*)in)[T];               // @bytes_2
    v += ((const float2*)in)[T].x;            // @member_of_8
    const float2 pair = ((const float2*)in)[T];    // @bytes_8
    const float4 four = ((const float4*)in)[T];    // @bytes_16
    const float4 apart = ((const float4*)in)[2 * T];  // @bytes_16_stride_2
    const double2 two = __ldg((const double2*)in + T);  // @ldg_16
    v += pair.x + pair.y + four.x + four.w + apart.y + (float)two.x;
    out[T] = v;                               // @store_1
    out[8 * T] = v;                           // @store_8
    ((uint4*)out)[T] = make_uint4(1, 2, 3, 4);  // @store_16
}

__device__ void shared_accesses(CASE_PARAMETERS)
{
    __shared__ __align__(16) float s[2048];
    __shared__ float padded[32][33];
    for (int i = T; i < 2048; i += 32) s[i] = in[i % 64];
    for (int i = 0; i < 33; i++) padded[T][i] = 1.f;
    __syncwarp();
    float v = 0.f;
    v += s[T];                           // @shared_stride_1
    v += s[2 * T];                       // @shared_stride_2
    v += s[32 * T];                      // @shared_stride_32
    v += s[33 * T];                      // @shared_stride_33
    v += padded[T][5];                   // @shared_padded
    v += s[5];                           // @shared_broadcast
    v += s[T / 2];                       // @shared_pairs
    v += s[32 * (T % 4)];                // @shared_four_words
    v += ((const unsigned char*)s)[T];   // @shared_bytes
    v += ((const unsigned short*)s)[T];  // @shared_halves
    const float2 pair = ((const float2*)s)[T];        // @shared_8
    const float2 far = ((const float2*)s)[2 * T];     // @shared_8_stride_2
    const float4 four = ((const float4*)s)[T];        // @shared_16
    const float4 spread = ((const float4*)s)[8 * T];  // @shared_16_stride_8
    v += pair.x + far.y + four.z + spread.w;
    __syncwarp();
    s[T * 32] = v;  // @shared_store_32
    __syncwarp();
    if (T < 2) s[T] = v;  // @shared_two_lanes
    __syncwarp();
    out[T] = s[T] + s[32 * T];
}

__device__ void divergence(CASE_PARAMETERS)
{
    float v = 0.f;
    if (T & 1) v = in[T];          // @odd_lanes
    else v = 2.f * in[T + 64];     // @even_lanes
    for (int i = 0; i < T % 4; i++) v += in[32 * i + T];  // @loop_by_lane
    if (T < 5) v += in[T];         // @five_lanes
    out[T] = v;                    // @together_again
}

__device__ void atomics(CASE_PARAMETERS)
{
    __shared__ int s[64];
    s[T] = 0;
    s[T + 32] = 0;
    __syncthreads();
    atomicAdd(&flags[0], 1);           // @atomic_one_cell
    atomicAdd(&flags[T], 1);           // @atomic_each_its_own
    atomicAdd(&s[0], 1);               // @shared_atomic_one_cell
    atomicAdd(&s[T], 1);               // @shared_atomic_each_its_own
    atomicAdd(&s[T % 2 * 32], 1);      // @shared_atomic_one_bank
    __syncthreads();
    out[T] = s[T];
}

// Two warps, so that a block of 40 threads has one of 8 lanes.
__device__ void partial_warp(CASE_PARAMETERS)
{
    out[T] = in[T];  // @partial_warp
}

// More accesses a lane than its list holds, with lanes that do different numbers of them.
__device__ void long_lists(CASE_PARAMETERS)
{
    float v = 0.f;
    for (int i = 0; i < 5000 + 100 * (T % 2); i++) v += in[(i + T) & 63];  // @long_loop
    out[T] = v;
}

__device__ float through(const float* p) { return *p; }  // @one_line_two_buffers
__device__ void two_buffers(CASE_PARAMETERS)
{
    __shared__ float s[32];
    s[T] = in[T];
    __syncwarp();
    float v = 0.f;
    for (int i = 0; i < 2; i++) v += through(i ? (const float*)s + T : in + T);
    out[T] = v;
}

extern "C" __global__ void patterns(int which, float* out, const float* in, int* flags)
{
    switch (which) {
#define CASE(number, name) case number: name(out, in, flags); break;
        CASE(0, global_loads)
        CASE(1, shared_accesses)
        CASE(2, divergence)
        CASE(3, atomics)
        CASE(4, partial_warp)
        CASE(5, long_lists)
        CASE(6, two_buffers)
    }
}
