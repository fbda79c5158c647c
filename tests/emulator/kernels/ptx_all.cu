// Every function of ptx.cuh once, for the compilers of both runners.
#include "ptx.cuh"
extern "C" __global__ void every_wrapper(const char* in, float* out, int n)
{
    __shared__ __align__(16) char tile[4096];
    const int t = threadIdx.x;
    cp_async_16(tile + 16 * t, in + 16 * t, t < n);
    cp_async_16_partial(tile + 512 + 16 * t, in + 16 * t, n);
    cp_async_8(tile + 1024 + 8 * t, in + 8 * t, t < n);
    cp_async_4(tile + 1536 + 4 * t, in + 4 * t);
    cp_async_commit();
    cp_async_wait<1>();
    cp_async_wait_all();
    __syncthreads();
    unsigned a[4], b[2], c[1], h[2] = {0, 0};
    ldmatrix_x4(a, tile + 16 * t);
    ldmatrix_x2(b, tile + 16 * t);
    ldmatrix_x1(c, tile + 16 * t);
    a[0] ^= c[0];
    unsigned ta[4], tb[2];
    ldmatrix_x4_trans(ta, tile + 16 * t);
    ldmatrix_x2_trans(tb, tile + 16 * t);
    ldmatrix_x1_trans(c, tile + 16 * t);
    ta[0] ^= c[0];
    float d[4] = {0, 0, 0, 0};
    int s[4] = {0, 0, 0, 0};
    mma_m16n8k16(d, a, b, d);
    mma_m16n8k16_bf16(d, ta, tb, d);
    mma_m16n8k16_f16(h, a, b, h);
    mma_m16n8k32_s8(s, a, b, s);
    const uint4 w = load_streaming_16(in + 16 * t);
    const uint2 v = load_streaming_8(in + 8 * t);
    const unsigned bits = lop3<0x96>(w.x, w.y, w.z) ^ prmt(w.w, v.x, 0x5410u) ^ lop3_and_or(v.y, 15u, 1u);
    const half2 q = int4x2_to_half2(bits);
    out[t] = d[0] + d[1] + d[2] + d[3] + s[0] + s[1] + s[2] + s[3] + h[0] + h[1] + (float)q.x + (float)q.y;
}
