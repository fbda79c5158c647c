// Attention of chunks of new tokens over paged keys and values with tall tiles: a prompt's prefill. The order
// of every sum, and so every bit, is that of paged_attention.cu; here a key and a value that are read serve
// 16 BLOCK_WARPS pairs of a query and a head, there 16.
// registers: 248
//
// Layouts (H = kv_heads * GROUP query heads, D = HEAD_DIM, B rows, T new tokens)
//   q          activation_t [T, H D] after rope
//   keys, values              stored_t [blocks, kv_heads, BLOCK_SIZE, D], keys after rope
//   key_scales, value_scales  float [blocks, kv_heads, BLOCK_SIZE]; null unless KV_INT8
//   tables     int [B, table_width]     block ids; those beyond a row's tokens are not followed
//   lengths    int [B]                  tokens of a row before its new ones
//   query_starts int [B + 1]            first new token of a row; the last is T
//   out        activation_t [T, H D]
// Alignment: 16 bytes.
//
// Launch: grid (tiles of QUERIES queries of a row, or more; kv_heads), block THREADS; dynamic shared memory:
// SHARED bytes. A row of fewer than `least` new tokens or of negative length, and a tile that reaches
// `capacity`, are left alone.
//
// How
//   A warp has 16 rows of the product, with their running total in shared memory. Keys and values come by
//   cp.async through a ring of SLOTS units; a barrier a unit says that one has come and one is free.
//   Scores of all of a step first, as probabilities in registers; then, 32 columns at a time, the output.
//   Tokens beyond the tile's last are zeros in shared memory and masked in the score.
//   A value that is no number at a position that some queries of a tile see and others do not would meet a
//   zero of those: then the queries are taken one after the other (`each`).

#include "paged_tall.cuh"

// Shared memory, in bytes: the ring, then of each warp its running total, its fragments of q, its factors.
#define QUERY_BYTES (2 * CHUNKS * 32 * 16)
#define RUNNING_AT (SLOTS * SLOT_BYTES)
#define QUERY_AT (RUNNING_AT + BLOCK_WARPS * 4 * RUNNING)
#define FACTORS_AT (QUERY_AT + BLOCK_WARPS * QUERY_BYTES)
#define PLACES_AT (FACTORS_AT + BLOCK_WARPS * (int)sizeof(RowFactors))
#define SHARED (PLACES_AT + 2 * 4 * TURN)

extern "C" __global__ void __launch_bounds__(THREADS, 2) paged_prefill(
    const activation_t* __restrict__ query, const stored_t* __restrict__ keys,
    const stored_t* __restrict__ values, const float* __restrict__ key_scales,
    const float* __restrict__ value_scales, const int* __restrict__ tables, const int* __restrict__ lengths,
    const int* __restrict__ query_starts, activation_t* __restrict__ out, int rows, int kv_heads,
    int table_width, int capacity, int least, float scale_log2)
{
    extern __shared__ __align__(16) unsigned char shared[];
    LABKIT_ASSERT(blockDim.x == THREADS && gridDim.y == kv_heads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float4* running = reinterpret_cast<float4*>(shared + RUNNING_AT) + warp * (RUNNING / 4);
    RowFactors& factors = reinterpret_cast<RowFactors*>(shared + FACTORS_AT)[warp];
    unsigned* places = reinterpret_cast<unsigned*>(shared + PLACES_AT);  // of the tokens of two steps

    grid_dependency_release();
    grid_dependency_wait();
    int row, of_row;
    // The later queries have more to read: they begin.
    if (!find_tile(query_starts, rows, least, gridDim.x - 1 - blockIdx.x, row, of_row)) {
        return;
    }
    const int start = query_starts[row], count = min(QUERIES, query_starts[row + 1] - start - of_row);
    const int length = lengths[row] + of_row;
    if (lengths[row] < 0 || length + count > capacity) {
        return;
    }
    const int kv_head = blockIdx.y, heads = kv_heads * GROUP;
    const size_t of_head = static_cast<size_t>(kv_head) * BLOCK_SIZE;
    Cache cache;
    cache.stride = kv_heads * BLOCK_SIZE;
    cache.keys = keys + of_head * HEAD_DIM;
    cache.values = values + of_head * HEAD_DIM;
    cache.key_scales = key_scales + of_head;
    cache.value_scales = value_scales + of_head;
    cache.table = tables + static_cast<size_t>(row) * table_width;

    const size_t first_place = ((static_cast<size_t>(start) + of_row) * heads + kv_head * GROUP) * HEAD_DIM;
    // q of a lane's rows, as the fragments of its products; a row beyond the last has its q and is not
    // written. They are read anew for every step: meanwhile the values need the registers.
    uint4* fragments = reinterpret_cast<uint4*>(shared + QUERY_AT + warp * QUERY_BYTES) + lane;
    uint4 of_rows[CHUNKS][2];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = min(16 * warp + 8 * h + g, count * GROUP - 1), column = 32 * c + 8 * q;
            const size_t of_head_row = static_cast<size_t>(at / GROUP) * heads + at % GROUP;
            const size_t place = first_place + of_head_row * HEAD_DIM;
            const bool there = HEAD_DIM % 32 == 0 || column < HEAD_DIM;
            of_rows[c][h] = there ? load_16(query + place + column) : make_uint4(0, 0, 0, 0);
        }
    }
    float scale[2] = {scale_log2, scale_log2};
    put_fragments(fragments, scale, of_rows);
    // Where a lane reads and writes in a unit and in the factors: kept, not computed anew at every use.
    const unsigned of_keys = pinned((g * KEY_PITCH + 8 * q) * sizeof(stored_t));
    const unsigned of_values = pinned(value_offset(lane) * sizeof(stored_t));

    const bool each = has_odd_value(cache, length + 1, length + count);
    const int passes = each ? count : 1;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
        const int last = length + (each ? pass : count - 1);
        const int first_row = each ? pass * GROUP : 0, behind_row = each ? first_row + GROUP : count * GROUP;
        const bool at_work = 16 * warp < behind_row && 16 * warp + 16 > first_row;
        cache.filled = last + 1;
        const int used = last / TURN + 1;  // turns that hold a token
        int limit[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            limit[h] = min(length + (16 * warp + 8 * h + g) / GROUP, last);
        }

        // The ring starts: the places of the first step's tokens, then the first units.
        Step step = first_step();
        bool whole = is_whole(step, cache.filled);
        unsigned* places_now = places;  // those of the next step are in the other half
        for (int i = threadIdx.x; i < TURN; i += THREADS) {
            places[i] = place_of(step, cache, i, block_of(step, cache, i));
        }
        __syncthreads();
        int turned = 0;  // the ring's place of the step's first unit
        auto slot_of = [&](int unit) {
            if (UNITS % SLOTS == 0) {
                return shared + unit % SLOTS * SLOT_BYTES;
            }
            const int at = turned + unit % SLOTS;
            return shared + (at < SLOTS ? at : at - SLOTS) * SLOT_BYTES;
        };
        // Unit `unit` of the step, or of the next one where it is beyond.
        auto request = [&](int unit, const unsigned* of, bool wanted, bool all_there) {
            unsigned char* to = slot_of(unit);
            if (wanted) {
                unit = unit < UNITS ? unit : unit - UNITS;
                if (unit < KEY_UNITS) {
                    request_keys(to, cache, of, unit, all_there);
                } else if (unit == KEY_UNITS) {
                    request_values<0>(to, cache, of, all_there);
                } else if (VALUE_UNITS > 1 && unit == KEY_UNITS + 1) {
                    request_values<1 % VALUE_UNITS>(to, cache, of, all_there);
                } else if (VALUE_UNITS > 2 && unit == KEY_UNITS + 2) {
                    request_values<2 % VALUE_UNITS>(to, cache, of, all_there);
                } else if (VALUE_UNITS > 3) {
                    request_values<3 % VALUE_UNITS>(to, cache, of, all_there);
                }
            }
            cp_async_commit();
        };
#pragma unroll
        for (int unit = 0; unit < SLOTS - 1; ++unit) {
            request(unit, places, true, whole);
        }

        float most[2], total[2];              // of the splits so far
        float split_most[2], split_total[2];  // of the split's warps so far
        float value[VALUE_UNITS][2][2][4];    // likewise: unit, row tile, product
        Sums sums;
#pragma unroll 1
        while (true) {
            const Step next = after(step);
            const bool more = next.turn < used, next_whole = is_whole(next, cache.filled);
            unsigned* places_next = places_now == places ? places + TURN : places;
            // A unit has come for all, and one is free for the one that is asked for now.
            auto turn_ring = [&](int unit) {
                cp_async_wait<SLOTS - 2>();
                __syncthreads();
                const int ahead = unit + SLOTS - 1;
                if (ahead < UNITS) {
                    request(ahead, places_now, true, whole);
                } else {
                    request(ahead, places_next, more, next_whole);
                }
            };
            int blocks[TURN / THREADS];  // of the next step's tokens: asked for now, written a unit later
#pragma unroll
            for (int i = 0; i < TURN / THREADS; ++i) {
                blocks[i] = block_of(next, cache, i * THREADS + threadIdx.x);
            }
            if (step.warp == 0) {
                split_most[0] = split_most[1] = NOTHING;
                split_total[0] = split_total[1] = 0.f;
#pragma unroll
                for (int i = 0; i < 16 * VALUE_UNITS; ++i) {
                    value[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = 0.f;
                }
            }
            uint4 mine[CHUNKS][2];
#pragma unroll
            for (int i = 0; i < 2 * CHUNKS; ++i) {
                const uint4 a = fragments[i * 32];
                mine[i / 2][i % 2] = make_uint4(pinned(a.x), pinned(a.y), pinned(a.z), pinned(a.w));
            }
            unsigned weight[2][TILES * GROUPS8];
            unsigned moved = 0, grown = 0;  // a bit a tile, see add_values
#pragma unroll
            for (int unit = 0; unit < KEY_UNITS; ++unit) {
                turn_ring(unit);
                const stored_t* unit_keys = reinterpret_cast<const stored_t*>(slot_of(unit) + of_keys);
                const float* unit_scales = reinterpret_cast<const float*>(slot_of(unit) + KEY_BYTES);
#pragma unroll
                for (int part = 0; part < 32 / TILE && at_work; ++part) {
                    const int tile = unit * (32 / TILE) + part, first = tile_token(step, tile);
                    const bool fresh = step.fine || tile % COARSE == 0;
                    if (fresh) {
                        clear(sums);
                    }
                    if (first <= last) {
                        float rescale[2];
                        const bool by_lane = weigh_tile(
                            weight, tile, rescale, sums, unit_keys + part * TILE * KEY_PITCH,
                            unit_scales + part * TILE, mine, first, length, limit, scale, q);
                        if (!fresh && __any_sync(0xffffffffu, by_lane)) {
                            moved |= 1u << tile;
                            if (q == 0) {
                                factors.rescale[tile][g] = rescale[0];
                                factors.rescale[tile][g + 8] = rescale[1];
                            }
                        }
                    }
                    if (step.fine || tile % COARSE == COARSE - 1) {
                        const bool grows = join_warp(factors, tile, split_most, split_total, sums, g, q);
                        grown |= grows ? 1u << tile : 0u;
                    }
                }
                if (unit == 0) {
#pragma unroll
                    for (int i = 0; i < TURN / THREADS; ++i) {
                        const int at = i * THREADS + threadIdx.x;
                        places_next[at] = place_of(next, cache, at, blocks[i]);
                    }
                }
            }
#pragma unroll
            for (int unit = 0; unit < VALUE_UNITS; ++unit) {
                turn_ring(KEY_UNITS + unit);
                if (at_work) {
                    const stored_t* slot =
                        reinterpret_cast<const stored_t*>(slot_of(KEY_UNITS + unit) + of_values);
                    add_values(value[unit], weight, factors, moved, grown, step, last, slot, unit, lane);
                }
            }
            if (ends_split(step) && at_work) {
                join_split(
                    value, most, total, split_most, split_total, factors, running, step.turn == 0, !more,
                    lane);
            }
            if (!more) {
                break;
            }
            step = next;
            whole = next_whole;
            places_now = places_next;
            turned = (turned + UNITS) % SLOTS;
        }
        if (at_work) {
            store_rows(
                out + first_place, value, total, running, factors, heads, first_row, behind_row, warp, lane);
        }
        __syncthreads();  // the ring may start anew
    }
}
