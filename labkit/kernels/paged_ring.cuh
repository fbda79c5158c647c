// How keys and values reach paged_prefill.cu: pieces of a step in a ring of places in shared memory.
//
// A step is the TURN tokens that a block takes together: one turn, or beyond FINE_TURNS the tokens of some of
// the WARPS in each of the COARSE turns of a split. It comes in units: its keys, 32 tokens each, then its
// values, 32 columns each.
#pragma once
#include "paged_order.cuh"

#ifndef BLOCK_WARPS  // 16 pairs of a query and a head each
#define BLOCK_WARPS 4
#endif
#ifndef SLOTS  // units that are in shared memory or on their way there
#define SLOTS 4
#endif

#define THREADS (32 * BLOCK_WARPS)
#define QUERIES (16 * BLOCK_WARPS / GROUP)  // of a row that a block takes together
#define KEY_UNITS (TURN / 32)
#define VALUE_UNITS CHUNKS
#define UNITS (KEY_UNITS + VALUE_UNITS)
#define TILES (TURN / TILE)             // of a step
#define PIECE (16 / (int)sizeof(stored_t))  // elements of 16 bytes

// Elements between tokens, so that a warp's reads meet no bank twice.
#define KEY_PITCH (32 * CHUNKS + (CHUNKS % 2 ? 0 : 32))
#define VALUE_PITCH (KV_INT8 ? 48 : 40)

#define KEY_BYTES (32 * KEY_PITCH * (int)sizeof(stored_t))
#define VALUE_BYTES (TURN * VALUE_PITCH * (int)sizeof(stored_t))
#define SCALE_BYTES (KV_INT8 ? 2 * 32 * 4 : 0)  // of 32 keys, then of the values of the same tokens
#define SLOT_BYTES (KEY_BYTES + SCALE_BYTES > VALUE_BYTES ? KEY_BYTES + SCALE_BYTES : VALUE_BYTES)

static_assert(16 * BLOCK_WARPS >= GROUP, "GROUP");
static_assert(SLOTS >= 2 && UNITS - SLOTS >= 1, "the next step's places are there before its first unit");
static_assert(TILES % COARSE == 0, "a step holds whole warps of a split");

struct Step {
    int turn;   // the split's first
    int warp;   // the step's first of the split's warps
    bool fine;  // a split of one turn
};

__device__ __forceinline__ Step first_step()
{
    const Step step = {0, 0, FINE_TURNS > 0};
    return step;
}

__device__ __forceinline__ bool ends_split(const Step& step)
{
    return step.fine || step.warp + TILES / COARSE == WARPS;
}

__device__ __forceinline__ Step after(const Step& step)
{
    Step next = step;
    if (ends_split(step)) {
        next.turn += step.fine ? 1 : COARSE;
        next.warp = 0;
        next.fine = next.turn < FINE_TURNS;
    } else {
        next.warp += TILES / COARSE;
    }
    return next;
}

// First token of a step's tile.
__device__ __forceinline__ int tile_token(const Step& step, int tile)
{
    const int of_split = step.fine ? tile * TILE : tile % COARSE * TURN + (step.warp + tile / COARSE) * TILE;
    return step.turn * TURN + of_split;
}

// Whether all of a step's tokens are among the first `filled`.
__device__ __forceinline__ bool is_whole(const Step& step, int filled)
{
    return tile_token(step, TILES - 1) + TILE <= filled;
}

// What a block asks the cache for: keys and values of one head of a row, tokens below `filled`.
struct Cache {
    const stored_t* keys;  // of the head, block 0
    const stored_t* values;
    const float* key_scales;
    const float* value_scales;
    const int* table;
    int filled, stride;  // stride: tokens of all heads in a block
};

// The block of a step's token i, 0 where it is not filled.
__device__ __forceinline__ int block_of(const Step& step, const Cache& cache, int i)
{
    const int token = tile_token(step, i / TILE) + i % TILE;
    return token < cache.filled ? cache.table[token / BLOCK_SIZE] : 0;
}

// Place of that token among those of all heads and blocks; NOWHERE if it is not filled.
#define NOWHERE 0xffffffffu
__device__ __forceinline__ unsigned place_of(const Step& step, const Cache& cache, int i, int block)
{
    const int token = tile_token(step, i / TILE) + i % TILE;
    const unsigned place = static_cast<unsigned>(block) * cache.stride + token % BLOCK_SIZE;
    return token < cache.filled ? place : NOWHERE;
}

// The token of a group of PIECES threads: neighbours take tokens apart, so that what eight threads write at
// once, 128 bytes, meets no bank twice (of 64 bytes of values in VALUE_PITCH, of 32 likewise).
template <int PIECES>
__device__ __forceinline__ int spread(int group)
{
    if (PIECES == 4) {
        return (group & ~7) | (group & 1) << 2 | (group & 7) >> 1;
    }
    return PIECES == 2 ? (group & ~7) | (group & 3) << 1 | (group & 7) >> 2 : group;
}

// Copies PIECES pieces of each of TOKENS tokens, whose places are given. Unless `whole`, zeros for a token
// that is not filled.
template <int TOKENS, int PIECES, int PITCH>
__device__ __forceinline__ void request_tokens(
    unsigned char* to, const stored_t* from, const unsigned* places, bool whole)
{
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(from);
    const unsigned token_bytes = HEAD_DIM * sizeof(stored_t), pitch = PITCH * sizeof(stored_t);
    const int copies = TOKENS * PIECES / THREADS;
    if (whole && THREADS % PIECES == 0 && TOKENS * PIECES % THREADS == 0) {
        const int token = spread<PIECES>(threadIdx.x / PIECES);
        unsigned place[copies > 0 ? copies : 1];
#pragma unroll
        for (int i = 0; i < copies; ++i) {  // the copies stand together: each bout costs three idle loads
            place[i] = places[token + i * (THREADS / PIECES)];
        }
        const unsigned char* mine = bytes + threadIdx.x % PIECES * 16;
        unsigned char* mine_to = to + pinned(token * pitch + threadIdx.x % PIECES * 16);
#pragma unroll
        for (int i = 0; i < copies; ++i) {
            const unsigned char* p = mine + static_cast<unsigned long long>(place[i]) * token_bytes;
            cp_async_16_behind<0>(mine_to + i * (THREADS / PIECES) * pitch, p);
        }
        return;
    }
#pragma unroll 1  // a loop is not put in the place of the branch
    for (int i = threadIdx.x; i < TOKENS * PIECES; i += THREADS) {
        const unsigned place = places[i / PIECES], column = i % PIECES * 16;
        const bool there = place != NOWHERE;
        const unsigned long long at = static_cast<unsigned long long>(there ? place : 0u) * token_bytes;
        const unsigned char* p = bytes + at + column;
        cp_async_16(to + i / PIECES * pitch + column, p, there);
    }
}

__device__ __forceinline__ void request_keys(
    unsigned char* slot, const Cache& cache, const unsigned* places, int unit, bool whole)
{
    places += 32 * unit;
    request_tokens<32, HEAD_DIM / PIECE, KEY_PITCH>(slot, cache.keys, places, whole);
#if KV_INT8
    if (threadIdx.x < 64) {  // a token's scale, of its key or of its value
        const unsigned place = places[threadIdx.x % 32];
        const float* from = threadIdx.x < 32 ? cache.key_scales : cache.value_scales;
        float* scales = reinterpret_cast<float*>(slot + KEY_BYTES);
        cp_async_4(scales + threadIdx.x, from + (place != NOWHERE ? place : 0u), place != NOWHERE);
    }
#endif
}

template <int UNIT>
__device__ __forceinline__ void request_values(
    unsigned char* slot, const Cache& cache, const unsigned* places, bool whole)
{
    const int columns = HEAD_DIM - 32 * UNIT < 32 ? HEAD_DIM - 32 * UNIT : 32;
    request_tokens<TURN, columns / PIECE, VALUE_PITCH>(slot, cache.values + 32 * UNIT, places, whole);
}
