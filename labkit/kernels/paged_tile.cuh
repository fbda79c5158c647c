// Shape of a block of paged_attention.cu and of the tile that a warp of it holds in registers, and its loads.
#pragma once
#include "paged_order.cuh"

#ifndef QUERIES  // queries of a row that a block takes together
#define QUERIES 1
#endif
#ifndef FUSED
#define FUSED 0
#endif
#ifndef VALUES_EARLY  // the next tile's values are on their way before its turn
#define VALUES_EARLY (KV_INT8 || GROUP * QUERIES <= 8 || HEAD_DIM <= 64)
#endif

#ifndef BLOCKS  // on a multiprocessor: what the registers are cut to
#define BLOCKS (GROUP * QUERIES <= 8 && HEAD_DIM <= 64 ? 3 : 2)
#endif

// The sums of the next split are zero as soon as those of one are written: else every turn selects zeros.
// Of two row tiles they would wait where registers are short.
#define CLEAR_EARLY (KV_INT8 || GROUP * QUERIES <= 8)

#define THREADS (32 * WARPS)
#define ROWS (GROUP * QUERIES)
#define ROW_TILES ((ROWS + 7) / 8)
#define ROWS_PADDED (8 * ROW_TILES)

// A lane loads 16 bytes at once: what its warp asks for are whole sectors, and of a line as many as can be.
#define KEY_COLUMNS (16 / (int)sizeof(stored_t))  // of a token's key, of four lanes
#define KEY_SPAN (4 * KEY_COLUMNS)
#define KEY_PIECES ((HEAD_DIM + KEY_SPAN - 1) / KEY_SPAN)
#define VALUE_COLUMNS (KV_INT8 && HEAD_DIM > 64 ? 16 : 8)  // of a token's value, of eight lanes
#define VALUE_SPAN (8 * VALUE_COLUMNS)
#define VALUE_PIECES ((HEAD_DIM + VALUE_SPAN - 1) / VALUE_SPAN)
#define PRODUCTS (VALUE_PIECES * VALUE_COLUMNS / 2)  // of 16 columns
#define Q_COLUMNS (KEY_SPAN * KEY_PIECES)
// No bank conflict: rows are 64 bytes apart modulo 128, those of digits 16.
#define Q_PITCH (KV_INT8 ? Q_COLUMNS + 8 : Q_COLUMNS + (CHUNKS % 2 ? 0 : 32))
#define ITEMS (32 * PRODUCTS)  // an item is 4 neighbouring columns of one of 8 rows
#define THREAD_ITEMS ((ITEMS + THREADS - 1) / THREADS)
#define WHOLE_ITEMS (ITEMS % THREADS == 0)  // every thread has as many
#define AT_ONCE (ROW_TILES == 1 ? 8 : 4)  // partial results that the last block has on their way
#define EARLY_KEYS (VALUES_EARLY ? GROUPS8 : FUSED ? 1 : GROUPS8 / 2)  // that do not wait for the values' use
#define IDS (BLOCK_SIZE >= TILE ? 1 : TILE / BLOCK_SIZE)  // blocks that a tile touches
#define ROUNDS ((GROUP + 2 + WARPS - 1) / WARPS)  // heads of the new token that a warp takes

static_assert(ROWS >= 1 && ROWS <= 16, "GROUP * QUERIES is 1 to 16");
static_assert(!FUSED || QUERIES == 1, "FUSED takes one query a row");

template <int BYTES>
struct Loaded {
    typedef uint4 type;
    static __device__ __forceinline__ type zero() { return make_uint4(0, 0, 0, 0); }
    static __device__ __forceinline__ type early(const void* p) { return load_early_16(p); }
};

template <>
struct Loaded<8> {
    typedef uint2 type;
    static __device__ __forceinline__ type zero() { return make_uint2(0, 0); }
    static __device__ __forceinline__ type early(const void* p) { return load_early_8(p); }
};

typedef Loaded<16> KeyPiece;
typedef Loaded<VALUE_COLUMNS * (int)sizeof(stored_t)> ValuePiece;

struct Tile {
    KeyPiece::type key[GROUPS8][KEY_PIECES];
    ValuePiece::type value[2 * GROUPS8][VALUE_PIECES];
    TileScales scales;
};

// Where a lane finds a tile: a block's place is its id times the stride, in elements.
struct Cache {
    const stored_t* keys;    // of this head and lane: token g, columns KEY_COLUMNS q
    const stored_t* values;  // token 2q, columns VALUE_COLUMNS g
    const float* key_scales;
    const float* value_scales;
    unsigned stride, scale_stride;
};

// Place in its block of the first of the tile's 8 tokens t.
__device__ __forceinline__ int within(int first, int t)
{
    return BLOCK_SIZE > TILE ? first % BLOCK_SIZE + 8 * t : 8 * t % BLOCK_SIZE;
}

__device__ __forceinline__ unsigned block_of(const int (&ids)[IDS], int t)
{
    return static_cast<unsigned>(ids[IDS == 1 ? 0 : 8 * t / BLOCK_SIZE]);
}

template <typename T>
__device__ __forceinline__ const T* in_block(const T* from, unsigned block, unsigned stride)
{
    return from + static_cast<size_t>(block) * stride;
}

__device__ __forceinline__ void load_ids(int (&ids)[IDS], const int* table, int first, int blocks)
{
#pragma unroll
    for (int i = 0; i < IDS; ++i) {
        const int index = first / BLOCK_SIZE + i;
        ids[i] = index < blocks ? table[index] : 0;
    }
}

// A token of a tile that is not whole. One beyond the filled ones is read as the tile's first, with a weight
// of zero: what a free slot holds is never seen. `first` is below `filled`.
template <typename T>
__device__ __forceinline__ const T* token_of(
    const T* from, unsigned stride, int columns, const int (&ids)[IDS], int first, int filled, int t,
    int of_lane, int shift)
{
    const bool there = first + 8 * t + of_lane + shift < filled;
    return in_block(from, there ? block_of(ids, t) : block_of(ids, 0), stride)
           + (there ? within(first, t) + shift : within(first, 0) - of_lane) * columns;
}

#if KV_INT8
// Scales of two neighbouring tokens, which lie in one block.
__device__ __forceinline__ void load_scales(
    float2 (&scales)[GROUPS8], const float* from, unsigned stride, const int (&ids)[IDS], int first,
    int filled, bool whole, int q)
{
    if (whole) {
#pragma unroll
        for (int t = 0; t < GROUPS8; ++t) {
            const uint2 pair = load_early_8(in_block(from, block_of(ids, t), stride) + within(first, t));
            scales[t] = make_float2(__uint_as_float(pair.x), __uint_as_float(pair.y));
        }
        return;
    }
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {
        scales[t].x = *token_of(from, stride, 1, ids, first, filled, t, 2 * q, 0);
        scales[t].y = *token_of(from, stride, 1, ids, first, filled, t, 2 * q, 1);
    }
}
#endif

// Columns beyond the head's are its first: such of a key meet a zero of q, such of a value are not written.
__device__ __forceinline__ void load_key(KeyPiece::type (&key)[KEY_PIECES], const stored_t* p, int q)
{
#pragma unroll
    for (int c = 0; c < KEY_PIECES; ++c) {
        const bool there = HEAD_DIM % KEY_SPAN == 0 || KEY_SPAN * c + KEY_COLUMNS * q < HEAD_DIM;
        key[c] = KeyPiece::early(p + (there ? KEY_SPAN * c : -KEY_COLUMNS * q));
    }
}

__device__ __forceinline__ void load_value(
    ValuePiece::type (&value)[VALUE_PIECES], const stored_t* p, int g)
{
#pragma unroll
    for (int b = 0; b < VALUE_PIECES; ++b) {
        const bool there = HEAD_DIM % VALUE_SPAN == 0 || VALUE_SPAN * b + VALUE_COLUMNS * g < HEAD_DIM;
        value[b] = ValuePiece::early(p + (there ? VALUE_SPAN * b : -VALUE_COLUMNS * g));
    }
}

// Its tokens from 8 FROM to 8 TO; `whole` if all of the tile's are filled.
template <int FROM, int TO>
__device__ __forceinline__ void load_keys(
    Tile& tile, const Cache& cache, const int (&ids)[IDS], int first, int filled, bool whole, int g, int q)
{
    if (whole) {
#pragma unroll
        for (int t = FROM; t < TO; ++t) {
            const stored_t* p = in_block(cache.keys, block_of(ids, t), cache.stride);
            load_key(tile.key[t], p + within(first, t) * HEAD_DIM, q);
        }
    } else if (!FUSED || first < filled) {
#pragma unroll
        for (int t = FROM; t < TO; ++t) {
            const stored_t* p = token_of(cache.keys, cache.stride, HEAD_DIM, ids, first, filled, t, g, 0);
            load_key(tile.key[t], p, q);
        }
    } else {  // the new token alone
#pragma unroll
        for (int t = FROM; t < TO; ++t) {
#pragma unroll
            for (int c = 0; c < KEY_PIECES; ++c) {
                tile.key[t][c] = KeyPiece::zero();
            }
#if KV_INT8
            tile.scales.key[t] = make_float2(0.f, 0.f);
#endif
        }
        return;
    }
#if KV_INT8
    load_scales(tile.scales.key, cache.key_scales, cache.scale_stride, ids, first, filled, whole, q);
#endif
}

__device__ __forceinline__ void load_values(
    Tile& tile, const Cache& cache, const int (&ids)[IDS], int first, int filled, bool whole, int g, int q)
{
    if (whole) {
#pragma unroll
        for (int t = 0; t < 2 * GROUPS8; ++t) {
            const stored_t* p = in_block(cache.values, block_of(ids, t / 2), cache.stride);
            load_value(tile.value[t], p + (within(first, t / 2) + t % 2) * HEAD_DIM, g);
        }
    } else if (!FUSED || first < filled) {
#pragma unroll
        for (int t = 0; t < 2 * GROUPS8; ++t) {
            const stored_t* p =
                token_of(cache.values, cache.stride, HEAD_DIM, ids, first, filled, t / 2, 2 * q, t % 2);
            load_value(tile.value[t], p, g);
        }
    } else {
#pragma unroll
        for (int t = 0; t < 2 * GROUPS8; ++t) {
#pragma unroll
            for (int b = 0; b < VALUE_PIECES; ++b) {
                tile.value[t][b] = ValuePiece::zero();
            }
#if KV_INT8
            tile.scales.value[t / 2] = make_float2(0.f, 0.f);
#endif
        }
        return;
    }
#if KV_INT8
    load_scales(tile.scales.value, cache.value_scales, cache.scale_stride, ids, first, filled, whole, q);
#endif
}

// Zeros of q where there is none: rows from `filled` on, and columns beyond the head's.
__device__ __forceinline__ void zero_rest(activation_t* q_shared, int filled)
{
    const uint4 zero = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < (ROWS_PADDED - filled) * (HEAD_DIM / 8); i += THREADS) {
        activation_t* row = q_shared + (filled + i / (HEAD_DIM / 8)) * Q_PITCH;
        *reinterpret_cast<uint4*>(row + i % (HEAD_DIM / 8) * 8) = zero;
    }
    const int beyond = (Q_COLUMNS - HEAD_DIM) / 8;
    for (int i = threadIdx.x; beyond > 0 && i < beyond * ROWS_PADDED; i += THREADS) {
        *reinterpret_cast<uint4*>(q_shared + i / beyond * Q_PITCH + HEAD_DIM + i % beyond * 8) = zero;
    }
}

#if FUSED
__device__ __forceinline__ void zero_new(stored_t* new_key, stored_t* new_value)
{
    for (int i = HEAD_DIM + threadIdx.x; i < KEY_SPAN * KEY_PIECES; i += THREADS) {
        new_key[i] = stored_t(0);
    }
    for (int i = HEAD_DIM + threadIdx.x; i < VALUE_SPAN * VALUE_PIECES; i += THREADS) {
        new_value[i] = stored_t(0);
    }
}

// The new token, which is token `at` of the tile, if it is there, takes its place.
__device__ __forceinline__ void put_key(
    Tile& tile, const stored_t* new_key, const float* new_scales, int at, int g, int q)
{
#pragma unroll
    for (int t = 0; t < GROUPS8; ++t) {
        if (8 * t + g == at) {
#pragma unroll
            for (int c = 0; c < KEY_PIECES; ++c) {
                const stored_t* p = new_key + KEY_SPAN * c + KEY_COLUMNS * q;
                tile.key[t][c] = *reinterpret_cast<const KeyPiece::type*>(p);
            }
        }
#if KV_INT8
        if (8 * t + 2 * q == at) {
            tile.scales.key[t].x = new_scales[0];
            tile.scales.value[t].x = new_scales[1];
        }
        if (8 * t + 2 * q + 1 == at) {
            tile.scales.key[t].y = new_scales[0];
            tile.scales.value[t].y = new_scales[1];
        }
#endif
    }
}

__device__ __forceinline__ void put_value(Tile& tile, const stored_t* new_value, int at, int g, int q)
{
#pragma unroll
    for (int t = 0; t < 2 * GROUPS8; ++t) {
        if (8 * (t / 2) + 2 * q + t % 2 == at) {
#pragma unroll
            for (int b = 0; b < VALUE_PIECES; ++b) {
                const stored_t* p = new_value + VALUE_SPAN * b + VALUE_COLUMNS * g;
                tile.value[t][b] = *reinterpret_cast<const ValuePiece::type*>(p);
            }
        }
    }
}
#endif
