// How partial results of paged_attention.cu become one: splits of a row, in ascending order.
#pragma once
#include "paged_tile.cuh"

// Row of its tile that an item is of: as lanes hold them, two rows each.
__device__ __forceinline__ int row_of(int item) { return 2 * (item % 4) + item / 32 % 2; }

// Writes an item, divided by its row's sum.
__device__ __forceinline__ void store_item(
    activation_t* out_of_tile, int heads, int row_tile, int item, int rows, const float4& value, float sum)
{
    const int row = row_tile * 8 + row_of(item);
    const int of_lane = item / 64 * 4;  // of the columns of the lanes whose rows these are
    const int piece = of_lane / VALUE_COLUMNS * VALUE_SPAN + item / 4 % 8 * VALUE_COLUMNS;
    const int column = piece + of_lane % VALUE_COLUMNS;
    if (row < rows && column < HEAD_DIM) {
        uint2 words;
        words.x = bits_of(from_floats(value.x / sum, value.y / sum));
        words.y = bits_of(from_floats(value.z / sum, value.w / sum));
        const size_t of_query = static_cast<size_t>(row / GROUP) * heads + row % GROUP;
        *reinterpret_cast<uint2*>(out_of_tile + of_query * HEAD_DIM + column) = words;
    }
}

// Partial results of a row and head, place 0 and `next_split` to before `behind`, all threads at work.
__device__ __forceinline__ void merge_splits(
    const float* part, const float* part_ml, size_t first_place, int next_split, int behind,
    activation_t* out_of_tile, int heads, int rows)
{
#pragma unroll 1
    for (int h = 0; h < ROW_TILES; ++h) {
        if (!WHOLE_ITEMS && threadIdx.x >= ITEMS) {
            break;
        }
        const float* ml = part_ml + first_place * 2 * ROWS_PADDED + 8 * h + row_of(threadIdx.x);
        const float4* from = reinterpret_cast<const float4*>(part) + (first_place * ROW_TILES + h) * ITEMS
                             + threadIdx.x;
        float4 value[THREAD_ITEMS];
#pragma unroll
        for (int k = 0; k < THREAD_ITEMS; ++k) {
            value[k] = __ldcg(from + k * THREADS);
        }
        float top = __ldcg(ml), all = __ldcg(ml + ROWS_PADDED);
        for (int s = next_split; s < behind; s += AT_ONCE) {  // all loads before the first is used
            float4 next[AT_ONCE][THREAD_ITEMS];
            float of_split[AT_ONCE], weight[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = min(s + i, behind - 1);
                of_split[i] = __ldcg(ml + static_cast<size_t>(at) * 2 * ROWS_PADDED);
                weight[i] = __ldcg(ml + static_cast<size_t>(at) * 2 * ROWS_PADDED + ROWS_PADDED);
#pragma unroll
                for (int k = 0; k < THREAD_ITEMS; ++k) {
                    next[i][k] = __ldcg(from + static_cast<size_t>(at) * ROW_TILES * ITEMS + k * THREADS);
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (s + i < behind) {
                    const Factors by = add_sum(top, all, of_split[i], weight[i]);
#pragma unroll
                    for (int k = 0; k < THREAD_ITEMS; ++k) {
                        add_part(value[k], next[i][k], by);
                    }
                }
            }
        }
#pragma unroll
        for (int k = 0; k < THREAD_ITEMS; ++k) {
            store_item(out_of_tile, heads, h, threadIdx.x + k * THREADS, rows, value[k], all);
        }
    }
}
