// What the emulated operations compute, for comparison with NumPy and torch. One warp unless a test says
// otherwise.
#include <cuda_bf16.h>
#include "ptx.cuh"

#define T ((int)threadIdx.x)
#define FULL 0xffffffffu

// out[32 * i + lane] is the i-th result.
extern "C" __global__ void collectives(const int* in, int* out)
{
    const int v = in[T];
    int i = 0;
    const auto put = [&](int result) { out[32 * i++ + T] = result; };
    put(__shfl_sync(FULL, v, 5));
    put(__shfl_sync(FULL, v, T + 1, 8));
    put(__shfl_up_sync(FULL, v, 3));
    put(__shfl_down_sync(FULL, v, 3, 16));
    put(__shfl_xor_sync(FULL, v, 9));
    put((int)__ballot_sync(FULL, v > 0));
    put(__any_sync(FULL, v > 1000) * 2 + __any_sync(FULL, v > 0));
    put(__all_sync(FULL, v > -1000) * 2 + __all_sync(FULL, v > 0));
    put(__reduce_add_sync(FULL, v));
    put(__reduce_min_sync(FULL, v));
    put(__reduce_max_sync(FULL, v));
    put((int)__reduce_max_sync(FULL, (unsigned)v));
    put((int)__reduce_and_sync(FULL, (unsigned)v));
    put((int)__reduce_or_sync(FULL, (unsigned)v));
    put((int)__reduce_xor_sync(FULL, (unsigned)v));
    put((int)__match_any_sync(FULL, v & 3));
    int same;
    put((int)__match_all_sync(FULL, v & 3, &same) + same);
    put((int)__match_all_sync(FULL, 7, &same) - same);
    put((int)(__shfl_xor_sync(FULL, (long long)v << 33, 1) >> 33));
    put((int)__half2float(__shfl_xor_sync(FULL, __int2half_rn(T), 1)));
    put((int)__low2float(__shfl_down_sync(FULL, __floats2half2_rn((float)T, 0.f), 1)));
    put((int)__shfl_xor_sync(FULL, (double)v, 2));
    put(T < 16 ? __reduce_add_sync(0xffffu, v) : (int)__ballot_sync(0xffff0000u, T & 1));
}

// Blocks of 64.
extern "C" __global__ void block_votes(const int* in, int* out)
{
    const int v = in[T];
    out[T] = __syncthreads_count(v > 0);
    out[64 + T] = __syncthreads_and(v > -1000) * 2 + __syncthreads_and(v > 0);
    out[128 + T] = __syncthreads_or(v > 1000) * 2 + __syncthreads_or(v > 0);
}

// out is [operation][n]
template <class Scalar, class Pair>
__device__ void scalar_operations(const Scalar* a, const Scalar* b, const Scalar* c, Scalar* out, int n)
{
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    int i = 0;
    const auto put = [&](Scalar result) { out[(size_t)n * i++ + t] = result; };
    put(a[t] + b[t]);
    put(a[t] - b[t]);
    put(a[t] * b[t]);
    put(a[t] / b[t]);
    put(__hfma(a[t], b[t], c[t]));
    put(-a[t]);
    put(__habs(a[t]));
    put(__hmax(a[t], b[t]));
    put(__hmin(a[t], b[t]));
    Scalar x = a[t];
    x += b[t];
    x *= c[t];
    put(x);
    const Pair p = __hfma2(Pair(a[t], b[t]), Pair(b[t], c[t]), Pair(c[t], a[t]));
    put(p.x);
    put(p.y);
    const Pair q = Pair(a[t], b[t]) * Pair(c[t], c[t]) - Pair(b[t], a[t]);
    put(q.x);
    put(q.y);
    put((a[t] < b[t]) ? a[t] : b[t]);
    const Pair greater = __hgt2(Pair(a[t], b[t]), Pair(b[t], c[t]));
    put(greater.x);
    put(greater.y);
}
extern "C" __global__ void half_operations(const half* a, const half* b, const half* c, half* out, int n)
{
    scalar_operations<half, half2>(a, b, c, out, n);
}
extern "C" __global__ void bfloat_operations(const __nv_bfloat16* a, const __nv_bfloat16* b,
                                             const __nv_bfloat16* c, __nv_bfloat16* out, int n)
{
    scalar_operations<__nv_bfloat16, __nv_bfloat162>(a, b, c, out, n);
}

extern "C" __global__ void conversions(const float* in, half* as_half, half* toward_zero,
                                       __nv_bfloat16* as_bfloat, int* rounded, float* back, int n)
{
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    as_half[t] = __float2half(in[t]);
    toward_zero[t] = __float2half_rz(in[t]);
    as_bfloat[t] = __float2bfloat16(in[t]);
    rounded[t] = __float2int_rn(in[t]);
    rounded[n + t] = __float2int_rz(in[t]);
    rounded[2 * n + t] = __float2int_rd(in[t]);
    rounded[3 * n + t] = (int)__float2uint_rn(in[t]);
    back[t] = __half2float(as_half[t]);
    back[n + t] = __bfloat162float(as_bfloat[t]);
}

extern "C" __global__ void integers(const unsigned* a, const unsigned* b, const unsigned* s, unsigned* out,
                                    int n)
{
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    int i = 0;
    const auto put = [&](unsigned result) { out[(size_t)n * i++ + t] = result; };
    put((unsigned)__popc(a[t]));
    put((unsigned)__clz((int)a[t]));
    put((unsigned)__ffs((int)a[t]));
    put(__brev(a[t]));
    put((unsigned)(__brevll((unsigned long long)a[t] << 32 | b[t]) >> 32));
    put(__byte_perm(a[t], b[t], s[t]));
    put(__funnelshift_l(a[t], b[t], s[t]));
    put(__funnelshift_r(a[t], b[t], s[t]));
    put(__umulhi(a[t], b[t]));
    put((unsigned)__mulhi((int)a[t], (int)b[t]));
    put((unsigned)__dp4a((int)a[t], (int)b[t], (int)s[t]));
    put(__dp4a(a[t], b[t], s[t]));
    put(lop3<0x6a>(a[t], b[t], s[t]));
    put(lop3<0xe8>(a[t], b[t], s[t]));
    put(prmt(a[t], b[t], 0x5140));
    put(__float_as_uint(__uint_as_float(a[t])));
}

// a [16, 16], b [16, 8] and c [16, 8] by rows; every element of a fragment is fetched by the layout of the
// PTX manual.
template <class Scalar>
__device__ void load_fragments(const Scalar* a, const Scalar* b, unsigned fa[4], unsigned fb[2])
{
    const int g = T / 4, q = T % 4;
    for (int r = 0; r < 4; r++) {
        const Scalar* first = a + (g + 8 * (r & 1)) * 16 + 2 * q + 8 * (r >> 1);
        const Scalar pair[2] = {first[0], first[1]};
        memcpy(&fa[r], pair, 4);
    }
    for (int r = 0; r < 2; r++) {
        const Scalar pair[2] = {b[(2 * q + 8 * r) * 8 + g], b[(2 * q + 8 * r + 1) * 8 + g]};
        memcpy(&fb[r], pair, 4);
    }
}
__device__ int fragment_index(int r) { return (T / 4 + 8 * (r >> 1)) * 8 + 2 * (T % 4) + (r & 1); }

extern "C" __global__ void mma_half(const half* a, const half* b, const float* c, float* d)
{
    unsigned fa[4], fb[2];
    load_fragments(a, b, fa, fb);
    float acc[4];
    for (int r = 0; r < 4; r++) acc[r] = c[fragment_index(r)];
    mma_m16n8k16(acc, fa, fb, acc);
    for (int r = 0; r < 4; r++) d[fragment_index(r)] = acc[r];
}
extern "C" __global__ void mma_bfloat(const __nv_bfloat16* a, const __nv_bfloat16* b, const float* c,
                                      float* d)
{
    unsigned fa[4], fb[2];
    load_fragments(a, b, fa, fb);
    float acc[4];
    for (int r = 0; r < 4; r++) acc[r] = c[fragment_index(r)];
    mma_m16n8k16_bf16(acc, fa, fb, acc);
    for (int r = 0; r < 4; r++) d[fragment_index(r)] = acc[r];
}
extern "C" __global__ void mma_half_sum(const half* a, const half* b, const float* c, float* d)
{
    unsigned fa[4], fb[2], acc[2];
    load_fragments(a, b, fa, fb);
    for (int r = 0; r < 2; r++) {
        const half2 pair = __floats2half2_rn(c[fragment_index(2 * r)], c[fragment_index(2 * r + 1)]);
        memcpy(&acc[r], &pair, 4);
    }
    mma_m16n8k16_f16(acc, fa, fb, acc);
    for (int r = 0; r < 2; r++) {
        half2 pair;
        memcpy(&pair, &acc[r], 4);
        d[fragment_index(2 * r)] = __low2float(pair);
        d[fragment_index(2 * r + 1)] = __high2float(pair);
    }
}
// a [16, 32] by rows, b [32, 8] by columns: four neighbours in k make a register.
extern "C" __global__ void mma_bytes(const signed char* a, const signed char* b, const int* c, int* d)
{
    unsigned fa[4], fb[2];
    const int g = T / 4, q = T % 4;
    for (int r = 0; r < 4; r++) memcpy(&fa[r], a + (g + 8 * (r & 1)) * 32 + 4 * q + 16 * (r >> 1), 4);
    for (int r = 0; r < 2; r++) memcpy(&fb[r], b + g * 32 + 4 * q + 16 * r, 4);
    int acc[4];
    for (int r = 0; r < 4; r++) acc[r] = c[fragment_index(r)];
    mma_m16n8k32_s8(acc, fa, fb, acc);
    for (int r = 0; r < 4; r++) d[fragment_index(r)] = acc[r];
}

// in: four 8 × 8 matrices. out[lane][register][2] of x4, x4 transposed, x2, x1.
extern "C" __global__ void matrix_loads(const half* in, half* out)
{
    __shared__ __align__(16) half s[256];
    for (int i = T; i < 256; i += 32) s[i] = in[i];
    __syncwarp();
    unsigned r[4];
    int i = 0;
    const auto put = [&](int count) {
        for (int k = 0; k < count; k++) memcpy(out + 64 * i++ + 2 * T, &r[k], 4);
    };
    ldmatrix_x4(r, s + 8 * T);
    put(4);
    ldmatrix_x4_trans(r, s + 8 * T);
    put(4);
    ldmatrix_x2(r, s + 8 * (T % 16));
    put(2);
    ldmatrix_x1(r, s + 8 * (T % 8));
    put(1);
}

extern "C" __global__ void more_atomics(int* i, unsigned* u, unsigned long long* l, float* f, double* d)
{
    atomicAdd(&i[0], T);
    atomicMax(&i[1], T - 40);
    atomicMin(&i[2], T - 40);
    atomicSub(&i[3], T);
    atomicXor(&i[4], T);
    atomicCAS(&i[5], T, T + 1);
    atomicMax(&u[0], (unsigned)T);
    atomicAnd(&u[1], ~(1u << T));
    atomicOr(&u[2], 1u << T);
    atomicInc(&u[3], 9u);
    atomicDec(&u[4], 9u);
    atomicExch(&u[5], 7u);
    atomicAdd(&l[0], 1ull << 40);
    atomicMax(&l[1], (unsigned long long)T << 40);
    atomicAdd(&f[0], 0.5f);
    atomicAdd(&d[0], 0.25);
}

// A template is launched by its name with arguments; scalars of every type reach it.
template <class Scalar, int times>
__global__ void scaled(Scalar* out, const Scalar* in, bool negative, long long offset, double factor,
                       unsigned char n)
{
    if (T < n) out[T + offset] = in[T] * (Scalar)(negative ? -factor : factor) * (Scalar)times;
}
