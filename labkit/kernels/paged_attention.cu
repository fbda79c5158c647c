// Attention over paged keys and values, grouped query heads: chunks of new tokens, decode rows, or a mix.
// FUSED is the decode step of one new token a row, with its rope and its append, in one launch.
// registers: 255
//
// Layouts (H = kv_heads * GROUP query heads, D = HEAD_DIM, B rows, T new tokens)
//   q          activation_t [T, H D] after rope; FUSED: qkv [B, (H + 2 kv_heads) D] before rope
//   keys, values              stored_t [blocks, kv_heads, BLOCK_SIZE, D], keys after rope
//   key_scales, value_scales  float [blocks, kv_heads, BLOCK_SIZE]; null unless KV_INT8
//   tables     int [B, table_width]     block ids; those beyond a row's tokens are not followed
//   lengths    int [B]                  tokens of a row before its new ones
//   query_starts int [B + 1]            first new token of a row; null if FUSED
//   tiles      int [n, 2]               row, first query of the row; null if FUSED
//   cos, sin   float [positions, D/2]   null unless FUSED
//   q_norm, k_norm  activation_t [D]    null unless QK_NORM
//   out        activation_t [T, H D]
//   part       float [units, splits, ROW_TILES, ITEMS, 4], part_ml float [units, splits, 2, ROWS_PADDED] and
//   tickets    unsigned [units], units = n kv_heads: partial results; tickets are zero before and after a
//              launch; unused where one block has all of a row
// Alignment: 16 bytes for activations, keys, values, out and part; 8 for cos, sin and scales.
//
// Launch: grid (n tiles, or B if FUSED; kv_heads; ranges), block 32 WARPS; shared memory is static.
// A row of `below` new tokens or more is left alone: paged_prefill.cu has it.
// FUSED: a row whose length is negative or not below capacity is left alone. The kernel may overlap those
// ahead of it (ptx.cuh) as long as none of them writes lengths, tables, angles, norms or positions below
// lengths[b]: all that is read before they have finished. qkv, which the kernel ahead writes, is not
// __restrict__.
//
// Order. The rows of a product are pairs of a query and a head. A turn is TURN tokens, a tile of TILE tokens
// a warp. A split is one turn, beyond FINE_TURNS turns it is COARSE of them: a warp adds up its tiles in
// ascending order, then the warps are added one after the other, then the splits one after the other, into a
// running total. Which token goes where depends on its position alone. Whether one block walks over all or
// many leave partial results for the last to arrive changes no bit; nor do the other rows of the product:
// a token beyond a query's position is masked, and a split without tokens is passed over.
//
// How
//   Scores: A = q, B = the keys as they lie in memory: a lane's 16 bytes of a row are one load and two
//   k-steps of the product, q being permuted the same way.
//   Output, transposed: A = the values (16 columns of D are the rows), B = the probabilities, which lie in
//   the scores' registers as B wants them. So nothing of the cache passes through shared memory.
//   The keys of the next tile are on their way as soon as those of this one are used, the values likewise.
//   Tokens beyond the tile's last are masked in the score and not read: a free block may hold anything.
//   A value beyond a query's position that is no number meets a zero: see add_values_apart.
//   f32 scores, softmax in base 2; a probability is rounded to activation_t before it meets V, and the
//   rounded one is what the sum counts. INT8: q is two digits of eight bits, scores are sums of integers
//   (paged_digits.cuh); the key's scale multiplies the score, the value's the probability, over a power of
//   two near the largest so far (unit), so that small scales lose nothing.

#include "paged_merge.cuh"
#include "paged_product.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) paged_attention(
    const activation_t* query, stored_t* keys, stored_t* values, float* key_scales, float* value_scales,
    const int* __restrict__ tables, const int* __restrict__ lengths, const int* __restrict__ query_starts,
    const int* __restrict__ tiles, const float* __restrict__ cos, const float* __restrict__ sin,
    const activation_t* __restrict__ q_norm, const activation_t* __restrict__ k_norm,
    activation_t* __restrict__ out, float* part, float* part_ml, unsigned* tickets,
    int kv_heads, int table_width, int capacity, int splits, int fine, int coarse, float scale_log2,
    float eps, int below)
{
    __shared__ alignas(16) activation_t q_shared[ROWS_PADDED * Q_PITCH];
    __shared__ float4 warp_out[ROW_TILES * WARPS * ITEMS];
    __shared__ float4 running[ROW_TILES * ITEMS];  // of the splits so far
    __shared__ WarpSums warp_sums[WARPS * ROWS_PADDED];
#if KV_INT8
    __shared__ float steps[ROWS_PADDED];
#else
    float* const steps = nullptr;
#endif
    __shared__ unsigned arrived;
    __shared__ struct { int first_query; bool alone; } late;  // asked for late: less registers
#if FUSED
    __shared__ alignas(16) stored_t new_key[KEY_SPAN * KEY_PIECES];
    __shared__ alignas(16) stored_t new_value[VALUE_SPAN * VALUE_PIECES];
    __shared__ float new_scales[2];  // unused unless KV_INT8
#endif
    LABKIT_ASSERT(blockDim.x == THREADS && gridDim.y == kv_heads);

    const int kv_head = blockIdx.y, range = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int heads = kv_heads * GROUP;
    // Turns of this block; a row has as many as its tokens ask for.
    const int fine_ranges = fine > 0 ? max(1, (FINE_TURNS + fine - 1) / fine) : 1;
    const int coarse_from = max(fine, FINE_TURNS);
    int turn = 0, end = 0x7fffffff;
    if (fine > 0) {
        turn = range < fine_ranges ? range * fine : coarse_from + (range - fine_ranges) * coarse;
        end = range < fine_ranges ? min(turn + fine, coarse_from) : turn + coarse;
    }
    const bool prefix = range == 0;
    grid_dependency_release();
#if FUSED
    const int row = blockIdx.x, length = lengths[row], count = 1;
    const int last = length, filled = length;  // the new token's key and value come from this launch
    const bool idle = length < 0 || length >= capacity;
    const int first_query = row;
#else
    grid_dependency_wait();
    const int tile_index = gridDim.x - 1 - blockIdx.x;  // the later queries have more to read
    const int row = tiles[2 * tile_index], of_row = tiles[2 * tile_index + 1];
    const int start = query_starts[row], of_all = query_starts[row + 1] - start;
    const int count = min(QUERIES, of_all - of_row);
    const int length = lengths[row] + of_row;
    const int last = QUERIES == 1 ? length : length + count - 1, filled = last + 1;
    const bool idle = lengths[row] < 0 || count <= 0 || last >= capacity || of_all >= below;
    const int first_query = start + of_row;
#endif
    const int used = last / TURN + 1;  // turns that hold a token
    const int* table = tables + static_cast<size_t>(row) * table_width;
    int ids[IDS];
    load_ids(ids, table, turn * TURN + warp * TILE, table_width);
    if (idle || turn >= used) {
        grid_dependency_wait();  // no kernel may seem done before those ahead of it are
        return;
    }
    end = min(end, used);
    if (threadIdx.x == 0) {
        late = {first_query, prefix && end == used};  // alone: no other block has turns of this row
    }
    const int rows = QUERIES == 1 ? GROUP : count * GROUP;

    Cache cache;
    cache.scale_stride = kv_heads * BLOCK_SIZE;
    cache.stride = cache.scale_stride * HEAD_DIM;
    const size_t of_head = static_cast<size_t>(kv_head) * BLOCK_SIZE;
    cache.keys = keys + (of_head + g) * HEAD_DIM + KEY_COLUMNS * q;
    cache.values = values + (of_head + 2 * q) * HEAD_DIM + VALUE_COLUMNS * g;
    cache.key_scales = key_scales + of_head + 2 * q;
    cache.value_scales = value_scales + of_head + 2 * q;
    Tile tile;
    const int first_token = turn * TURN + warp * TILE;
    const bool whole_at_first = first_token + TILE <= filled;
    load_keys<0, GROUPS8>(tile, cache, ids, first_token, filled, whole_at_first, g, q);
#if VALUES_EARLY
    load_values(tile, cache, ids, first_token, filled, whole_at_first, g, q);
#else
    int ids_now[IDS];
#pragma unroll
    for (int i = 0; i < IDS; ++i) {
        ids_now[i] = ids[i];
    }
#endif
    load_ids(ids, table, first_token + TURN, table_width);

    // q of the rows, zero where there is none.
#if FUSED
    const bool newest = end == used;
    float2 cosine = make_float2(0.f, 0.f), sine = make_float2(0.f, 0.f);
    if (lane < WORDS) {
        const size_t angle = static_cast<size_t>(length) * (HEAD_DIM / 2) + 2 * lane;
        cosine = *reinterpret_cast<const float2*>(cos + angle);
        sine = *reinterpret_cast<const float2*>(sin + angle);
    }
    const int new_block = newest ? table[length / BLOCK_SIZE] : 0;
    grid_dependency_wait();
    const activation_t* new_row = query + static_cast<size_t>(row) * (heads + 2 * kv_heads) * HEAD_DIM;
    unsigned low[ROUNDS], high[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {  // all loads before the first store
        const int head = r * WARPS + warp;  // of q, then k, then v
        low[r] = high[r] = 0;
        if (lane < WORDS && (head < GROUP || (newest && head < GROUP + 2))) {
            const int of_token = head < GROUP ? kv_head * GROUP + head
                                              : heads + kv_head + (head - GROUP) * kv_heads;
            const activation_t* p = new_row + of_token * HEAD_DIM + 2 * lane;
            low[r] = load_word(p);
            high[r] = load_word(p + HEAD_DIM / 2);
        }
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int head = r * WARPS + warp;
        const bool is_q = head < GROUP, is_k = newest && head == GROUP, is_v = newest && head == GROUP + 1;
        if (is_q || is_k) {
            rope_head(low[r], high[r], cosine, sine, is_q ? q_norm : k_norm, eps, lane);
        }
        if (is_q) {
            put_query(q_shared, steps, head, low[r], high[r], lane);
        }
        if ((r == GROUP / WARPS || r == (GROUP + 1) / WARPS) && (is_k || is_v)) {
            const size_t block = static_cast<size_t>(new_block) * cache.scale_stride;
            const size_t place = block + of_head + length % BLOCK_SIZE;
            const Head<2> to = {{(is_k ? keys : values) + place * HEAD_DIM, is_k ? new_key : new_value},
                                {(is_k ? key_scales : value_scales) + place, new_scales + (is_k ? 0 : 1)}};
            store_head(to, low[r], high[r], lane);
        }
    }
    zero_new(new_key, new_value);
    const int filled_rows = GROUP;
#else
#pragma unroll
    for (int i = 0; i < (ROWS + WARPS - 1) / WARPS; ++i) {
        const int r = i * WARPS + warp;
        const size_t of_token = static_cast<size_t>(first_query + r / GROUP) * heads;
        const size_t of_query = of_token + kv_head * GROUP + r % GROUP;
        const bool there = r < rows && lane < WORDS;
        const activation_t* p = query + of_query * HEAD_DIM + 2 * lane;
        const unsigned low = there ? load_word(p) : 0u, high = there ? load_word(p + HEAD_DIM / 2) : 0u;
        if (r < ROWS) {
            put_query(q_shared, steps, r, low, high, lane);
        }
    }
    const int filled_rows = ROWS;
#endif
    zero_rest(q_shared, filled_rows);
#if KV_INT8
    if (threadIdx.x < ROWS_PADDED - filled_rows) {
        steps[filled_rows + threadIdx.x] = 1.f;
    }
#endif
    __syncthreads();

    // Position of a lane's rows g (and g + 8); rows that are none have the last one's.
    int limit[ROW_TILES];
    float scale[ROW_TILES];
#pragma unroll
    for (int h = 0; h < ROW_TILES; ++h) {
#if KV_INT8
        scale[h] = __fmul_rn(steps[8 * h + g], scale_log2);
#else
        scale[h] = scale_log2;
#endif
        limit[h] = QUERIES == 1 ? last : min(length + (8 * h + g) / GROUP, last);
    }
    float acc[ROW_TILES][PRODUCTS][4];
    Sums sums;
    float most[ROW_TILES] = {}, total[ROW_TILES] = {};  // of the splits so far, a thread's rows
    bool fresh = true;                                  // a split begins
    if (CLEAR_EARLY) {
        clear(acc, sums);
    }
    // A tile of this turn. `inner`: all queries see all of its tokens and of the next tile's, so that nothing is
    // asked. The two barriers also keep the compiler from waiting for the values before the scores are done.
    auto take_tile = [&](const int first, const bool inner) __attribute__((always_inline)) {
        const bool more = inner || (turn + 1 < end && first + TURN <= last);
        const bool next_whole = inner || first + TURN + TILE <= filled;
#if FUSED
        const bool here = !inner && length < first + TILE;  // the new token
        if (here) {
            put_key(tile, new_key, new_scales, length - first, g, q);
        }
#endif
        __syncwarp();
        float score[GROUPS8][4];
        find_scores(score, tile, q_shared, g, q);
#if !VALUES_EARLY
        load_values(tile, cache, ids_now, first, filled, inner || first + TILE <= filled, g, q);
#endif
        if (more) {
            load_keys<0, EARLY_KEYS>(tile, cache, ids, first + TURN, filled, next_whole, g, q);
        }
        unsigned weight[ROW_TILES][GROUPS8];
        float rescale[ROW_TILES];
        const bool whole = inner || first + TILE - 1 <= length;
        const bool moved =
            find_weights(weight, rescale, sums, score, tile.scales, first + 2 * q, whole, limit, scale);
        if (!fresh && __any_sync(0xffffffffu, moved)) {  // else all factors are one
            scale_rows(acc, rescale, q);
        }
#if FUSED
        if (here) {
            put_value(tile, new_value, length - first, g, q);
        }
#endif
        __syncwarp();
#if QUERIES > 1 && !KV_INT8
        if (!whole && __any_sync(0xffffffffu, has_odd_value(tile))) {
            add_values_apart(acc, tile, weight, first + 2 * q, length, last, q);
        } else
#endif
        {
            add_values(acc, tile, weight);
        }
        if (more) {
#if VALUES_EARLY
            load_values(tile, cache, ids, first + TURN, filled, next_whole, g, q);
#else
            load_keys<EARLY_KEYS, GROUPS8>(tile, cache, ids, first + TURN, filled, next_whole, g, q);
#pragma unroll
            for (int i = 0; i < IDS; ++i) {
                ids_now[i] = ids[i];
            }
#endif
            load_ids(ids, table, first + 2 * TURN, table_width);
        }
    };
    auto out_of_tile = [&]() {
        return out + (static_cast<size_t>(late.first_query) * heads + kv_head * GROUP) * HEAD_DIM;
    };
    for (; turn < end; ++turn) {
        const int first = turn * TURN + warp * TILE;
        if (!CLEAR_EARLY && fresh) {
            clear(acc, sums);
        }
        // The whole warp. FP16 has no registers for it, and the memory's bandwidth as it is.
        if (KV_INT8 && turn + 1 < end && first + TURN + TILE <= length) {
            take_tile(first, true);
        } else if (first <= last) {
            take_tile(first, false);
        }
        fresh = turn < FINE_TURNS || turn % COARSE == COARSE - 1;
        if (!fresh && turn + 1 < end) {
            continue;
        }

        // The split is done: its warps in ascending order, then the running total.
        const int split = split_of(turn);
        const bool done = turn + 1 == end;
        auto place = [&]() {  // of a partial result
            const size_t first_place = (static_cast<size_t>(blockIdx.x) * kv_heads + kv_head) * splits;
            return first_place + (prefix ? 0 : split);
        };
#pragma unroll
        for (int h = 0; h < ROW_TILES; ++h) {
            float all = sums.sum[h];
            all = __fadd_rn(all, __shfl_xor_sync(0xffffffffu, all, 1));
            all = __fadd_rn(all, __shfl_xor_sync(0xffffffffu, all, 2));
            if (q == 0) {
                warp_sums[warp * ROWS_PADDED + 8 * h + g] = warp_sums_of(sums, h, all);
            }
            float4* to = warp_out + (h * WARPS + warp) * ITEMS + lane;
#pragma unroll
            for (int i = 0; i < PRODUCTS; i += 2) {
                const float(&a)[4] = acc[h][i], (&b)[4] = acc[h][i + 1];
                to[32 * i] = make_float4(a[0], a[2], b[0], b[2]);
                to[32 * i + 32] = make_float4(a[1], a[3], b[1], b[3]);
            }
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < ROW_TILES; ++h) {
            const int of_tile = 8 * h + row_of(threadIdx.x);  // the row of all of this thread's items
            float top = NOTHING, all = 0.f;
            Factors of_warp[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const WarpSums its = warp_sums[w * ROWS_PADDED + of_tile];
                of_warp[w] = add_sum(top, all, its.largest, its.sum);
#if KV_INT8
                of_warp[w].part = __fmul_rn(of_warp[w].part, its.unit);
#endif
            }
            const bool first_split = !prefix || split == 0;
            Factors by = {0.f, 1.f};
            if (first_split) {
                most[h] = top;
                total[h] = all;
            } else {
                by = add_sum(most[h], total[h], top, all);
            }
#pragma unroll
            for (int k = 0; k < THREAD_ITEMS; ++k) {
                const int item = threadIdx.x + k * THREADS;
                if (!WHOLE_ITEMS && item >= ITEMS) {
                    break;
                }
                const float4* of_item = warp_out + h * WARPS * ITEMS + item;
                float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    add_part(value, of_item[w * ITEMS], of_warp[w]);
                }
                float4* so_far = running + h * ITEMS + item;
                if (!first_split) {
                    const float4 of_split = value;
                    value = *so_far;
                    add_part(value, of_split, by);
                }
                if (prefix && !done) {
                    *so_far = value;
                } else if (late.alone) {
                    store_item(out_of_tile(), heads, h, item, rows, value, total[h]);
                } else {
                    reinterpret_cast<float4*>(part)[(place() * ROW_TILES + h) * ITEMS + item] = value;
                }
            }
            // One thread of each row: see row_of.
            if (!late.alone && (!prefix || done) && threadIdx.x < 64 && threadIdx.x % 32 < 4) {
                float* ml = part_ml + place() * 2 * ROWS_PADDED + of_tile;
                ml[0] = most[h];
                ml[ROWS_PADDED] = total[h];
            }
        }
        __syncthreads();
        if (CLEAR_EARLY) {
            clear(acc, sums);
        }
    }
    if (late.alone) {
        return;
    }
    // fine_ranges is found anew, from coarse_from: kept, it would cost registers.
    const int ranges = (min(used, coarse_from) + fine - 1) / fine
                       + (max(used - coarse_from, 0) + coarse - 1) / coarse;

    // The rest of the splits, in ascending order, by the block that arrives last. The counter wraps to zero.
    const size_t unit_index = static_cast<size_t>(blockIdx.x) * kv_heads + kv_head;
    const size_t first_place = unit_index * splits;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        arrived = atomicInc(tickets + unit_index, ranges - 1);
    }
    __syncthreads();
    if (arrived != ranges - 1) {
        return;
    }
    __threadfence();
    // Place 0 has the sum of the turns below `fine`.
    const int behind = split_of(used - 1) + 1;
    merge_splits(part, part_ml, first_place, split_of(fine), behind, out_of_tile(), heads, rows);
}
