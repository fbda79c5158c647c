// Norm and rope of q and k of new tokens, and the append of k and v to a paged cache.
// registers: 36
//
// Layouts (H query heads, D = HEAD_DIM, slot = block * BLOCK_SIZE + offset)
//   qkv            activation_t [T, (H + 2 kv_heads) D]   q heads, k heads, v heads of each token
//   q_norm, k_norm activation_t [D]                       null unless QK_NORM
//   cos, sin       float [positions, D/2]                 angle of pair (i, i + D/2)
//   positions      int [T]
//   slots          long long [T]                          negative: nothing is read or written for the token
//   q_out          activation_t [T, H D]
//   keys, values   stored_t [blocks, kv_heads, BLOCK_SIZE, D]
//   key_scales, value_scales  float [blocks, kv_heads, BLOCK_SIZE]  null unless KV_INT8
// Alignment: 4 bytes for activations, 8 for cos and sin.
//
// Launch: grid ceil(T (H + 2 kv_heads) / WARPS), block 32 WARPS; a warp a head of a token; no shared memory.
// The arithmetic is paged_head.cuh's, as in the fused decode step: the same bits.

#include "paged_head.cuh"

#define WARPS 8

extern "C" __global__ void __launch_bounds__(32 * WARPS) rope_append(
    const activation_t* qkv, const activation_t* __restrict__ q_norm, const activation_t* __restrict__ k_norm,
    const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ positions,
    const long long* __restrict__ slots, activation_t* q_out, stored_t* keys, stored_t* values,
    float* key_scales, float* value_scales, int tokens, int heads, int kv_heads, float eps)
{
    LABKIT_ASSERT(blockDim.x == 32 * WARPS);
    grid_dependency_release();
    const int all = heads + 2 * kv_heads, lane = threadIdx.x % 32;
    const long long unit = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32;
    const long long token = unit / all;
    const int head = static_cast<int>(unit % all);
    const bool used = token < tokens;
    const long long slot = used ? slots[token] : -1;
    if (slot < 0) {  // the whole warp
        grid_dependency_wait();
        return;
    }
    const bool is_q = head < heads, is_k = !is_q && head < heads + kv_heads;
    float2 cosine = make_float2(0.f, 0.f), sine = make_float2(0.f, 0.f);
    if (lane < WORDS && (is_q || is_k)) {
        const size_t angle = static_cast<size_t>(positions[token]) * (HEAD_DIM / 2) + 2 * lane;
        cosine = *reinterpret_cast<const float2*>(cos + angle);
        sine = *reinterpret_cast<const float2*>(sin + angle);
    }
    grid_dependency_wait();
    unsigned low = 0, high = 0;
    if (lane < WORDS) {
        const activation_t* p = qkv + (token * all + head) * HEAD_DIM + 2 * lane;
        low = load_word(p);
        high = load_word(p + HEAD_DIM / 2);
    }
    if (is_q || is_k) {
        rope_head(low, high, cosine, sine, is_q ? q_norm : k_norm, eps, lane);
    }
    if (is_q) {
        if (lane < WORDS) {
            activation_t* to = q_out + (token * heads + head) * HEAD_DIM + 2 * lane;
            store_word(to, low);
            store_word(to + HEAD_DIM / 2, high);
        }
        return;
    }
    const int kv_head = head - heads - (is_k ? 0 : kv_heads);
    const size_t place = (static_cast<size_t>(slot / BLOCK_SIZE) * kv_heads + kv_head) * BLOCK_SIZE
                         + static_cast<size_t>(slot % BLOCK_SIZE);
    const Head<1> to = {{(is_k ? keys : values) + place * HEAD_DIM},
                        {(is_k ? key_scales : value_scales) + place}};
    store_head(to, low, high, lane);
}
