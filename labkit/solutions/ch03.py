"""Reference solutions of chapter 03."""

from __future__ import annotations


# Up to 32 bytes apart, every sector from the first byte to the last is touched. Further apart, each lane
# has a sector of its own.
def request_sectors(size, stride):
    """Bytes from the first to the last, in whole sectors, and never more than one a lane."""
    return min(32, -(-(31 * stride + size) // 32))


# Lane 0 reads word 0, lane 1 word 1, ...: 32 lanes, 128 neighbouring bytes, 4 sectors.
neighbours = r"""#include "unpack.cuh"

__global__ void gemv(const uint8_t* packed, const half* scales, const half* x, half* out,
                     int N, int K, int group_shift)
{
    const int lane = threadIdx.x % 32;
    const int n = (blockIdx.x * blockDim.x + threadIdx.x) / 32;  // a warp for each row
    const uint32_t* words = reinterpret_cast<const uint32_t*>(packed + n * (K / 2));
    float sum = 0.0f;
    for (int w = lane; w < K / 8; w += 32) {  // the next lane reads the next word
        const uint32_t word = words[w];
        const float scale = __half2float(scales[n * (K >> group_shift) + (8 * w >> group_shift)]);
        for (int i = 0; i < 8; ++i) {
            sum += code_w4(word, i) * scale * __half2float(x[8 * w + i]);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        out[n] = __float2half(sum);
    }
}
"""


# Two guards. The first sends whole warps home, so that warp_sum still finds all 32 lanes.
ragged = r"""#include "unpack.cuh"

__global__ void gemv(const uint8_t* packed, const half* scales, const half* x, half* out,
                     int N, int K, int Kp, int group_shift)
{
    const int lane = threadIdx.x % 32;
    const int n = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (n >= N) {  // more warps than rows
        return;
    }
    const uint32_t* words = reinterpret_cast<const uint32_t*>(packed + n * (Kp / 2));
    float sum = 0.0f;
    for (int w = lane; w < Kp / 8; w += 32) {
        const uint32_t word = words[w];
        const float scale = __half2float(scales[n * (Kp >> group_shift) + (8 * w >> group_shift)]);
        for (int i = 0; i < 8; ++i) {
            if (8 * w + i < K) {  // more codes than columns
                sum += code_w4(word, i) * scale * __half2float(x[8 * w + i]);
            }
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        out[n] = __float2half(sum);
    }
}
"""


# One barrier in every round, outside of the if: all 128 threads must come to it.
shares = r"""__global__ void shares(const float* values, float* out)
{
    __shared__ float part[128];
    const int t = threadIdx.x;
    const float mine = values[128 * blockIdx.x + t];
    part[t] = mine;
    __syncthreads();
    for (int half_way = 64; half_way > 0; half_way /= 2) {
        if (t < half_way) {
            part[t] += part[t + half_way];
        }
        __syncthreads();  // the next round reads what other threads wrote in this one
    }
    out[128 * blockIdx.x + t] = mine / part[0];
}
"""


# Sixteen bytes a lane are 512 bytes a warp: the same sectors in a quarter of the instructions.
wide_loads = r"""#include "unpack.cuh"

__global__ void gemv(const uint8_t* packed, const half* scales, const half* x, half* out,
                     int N, int K, int group_shift)
{
    const int lane = threadIdx.x % 32;
    const int n = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const uint4* pieces = reinterpret_cast<const uint4*>(packed + n * (K / 2));
    float sum = 0.0f;
    for (int p = lane; p < K / 32; p += 32) {
        const uint4 piece = pieces[p];  // one load, 32 codes
        const uint32_t four[4] = {piece.x, piece.y, piece.z, piece.w};
        const float scale = __half2float(scales[n * (K >> group_shift) + (32 * p >> group_shift)]);
        for (int j = 0; j < 4; ++j) {
            for (int i = 0; i < 8; ++i) {
                sum += code_w4(four[j], i) * scale * __half2float(x[32 * p + 8 * j + i]);
            }
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        out[n] = __float2half(sum);
    }
}
"""
