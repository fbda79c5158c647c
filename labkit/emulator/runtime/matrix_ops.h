// ldmatrix and mma.sync, with the register fragments of the PTX manual. g = lane / 4 is a row (or, of B, a
// column), q = lane % 4 a pair of neighbours in it.
#pragma once
#include "../include/half_bits.h"
#include "trace.h"

// x1, x2 or x4 matrices of 8 × 8 16-bit elements; lane 8m + r holds the address of row r of matrix m.
static void load_matrices(Thread* lane)
{
    const int matrices = lane[0].warp_parameter & 255;
    const bool transposed = lane[0].warp_parameter & 256;
    Thread* me = current;
    for (int i = 0; i < 8 * matrices; i++) {
        const void* row = lane[i].warp_pointer[0];
        current = &lane[i];  // the access is the lane's whose address it is
        if ((uintptr_t)row & 15) {
            check_alignment((uintptr_t)row, 16, 16, LDMATRIX, lane[i].wait_pc);
            fail_at("misaligned: an ldmatrix row is not at a multiple of 16 bytes", &lane[i],
                    lane[i].wait_pc);
        }
        if (tracing) record(row, 16, LDMATRIX, lane[i].wait_pc, false);
    }
    current = me;
    uint32_t result[WARP][4];
    for (int m = 0; m < matrices; m++) {
        uint16_t matrix[8][8];
        for (int r = 0; r < 8; r++) memcpy(matrix[r], lane[8 * m + r].warp_pointer[0], 16);
        for (int i = 0; i < WARP; i++) {
            const int g = i / 4, q = i % 4;
            const uint16_t low = transposed ? matrix[2 * q][g] : matrix[g][2 * q];
            const uint16_t high = transposed ? matrix[2 * q + 1][g] : matrix[g][2 * q + 1];
            result[i][m] = low | (uint32_t)high << 16;
        }
    }
    for (int i = 0; i < WARP; i++) memcpy(lane[i].warp_out_pointer, result[i], 4 * (size_t)matrices);
}

static float element(uint32_t pair, int which, bool bfloat)
{
    const uint16_t pattern = (uint16_t)(which ? pair >> 16 : pair);
    return bfloat ? cuemu::bfloat_to_float(pattern) : cuemu::half_to_float(pattern);
}

// m16n8k16: D[16, 8] = A[16, 16] · B[16, 8] + C[16, 8]. Products are exact, the sum is made in double and
// rounded once: a tensor core rounds a little more often, so results agree to float (or half) rounding and
// not to the bit.
static void multiply_matrices(Thread* lane, int op)
{
    const bool bfloat = op == CUEMU_WARP_MMA_BF16_F32, half_sum = op == CUEMU_WARP_MMA_F16_F16;
    float a[16][16], b[16][8];
    for (int i = 0; i < WARP; i++) {
        const int g = i / 4, q = i % 4;
        const uint32_t* fa = (const uint32_t*)lane[i].warp_pointer[0];
        const uint32_t* fb = (const uint32_t*)lane[i].warp_pointer[1];
        for (int e = 0; e < 2; e++) {
            for (int r = 0; r < 4; r++)
                a[g + 8 * (r & 1)][2 * q + 8 * (r >> 1) + e] = element(fa[r], e, bfloat);
            for (int r = 0; r < 2; r++) b[2 * q + 8 * r + e][g] = element(fb[r], e, bfloat);
        }
    }
    float start[16][8];
    for (int i = 0; i < WARP; i++) {
        const int g = i / 4, q = i % 4;
        for (int r = 0; r < 4; r++) {
            float& c = start[g + 8 * (r >> 1)][2 * q + (r & 1)];
            if (half_sum) c = element(((const uint32_t*)lane[i].warp_pointer[2])[r >> 1], r & 1, false);
            else c = ((const float*)lane[i].warp_pointer[2])[r];
        }
    }
    double sum[16][8];
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) sum[row][column] = (double)start[row][column];
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++)
                sum[row][column] += (double)a[row][k] * (double)b[k][column];
    for (int i = 0; i < WARP; i++) {
        const int g = i / 4, q = i % 4;
        for (int r = 0; r < 4; r++) {
            const double value = sum[g + 8 * (r >> 1)][2 * q + (r & 1)];
            if (half_sum)
                ((uint16_t*)lane[i].warp_out_pointer)[r] = cuemu::float_to_half(cuemu::round_to_odd(value));
            else ((float*)lane[i].warp_out_pointer)[r] = (float)value;
        }
    }
}

// m16n8k32: signed bytes, four a register, 32-bit sums that wrap.
static void multiply_byte_matrices(Thread* lane)
{
    int a[16][32], b[32][8];
    for (int i = 0; i < WARP; i++) {
        const int g = i / 4, q = i % 4;
        const int8_t* fa = (const int8_t*)lane[i].warp_pointer[0];
        const int8_t* fb = (const int8_t*)lane[i].warp_pointer[1];
        for (int e = 0; e < 4; e++) {
            for (int r = 0; r < 4; r++) a[g + 8 * (r & 1)][4 * q + 16 * (r >> 1) + e] = fa[4 * r + e];
            for (int r = 0; r < 2; r++) b[4 * q + 16 * r + e][g] = fb[4 * r + e];
        }
    }
    uint32_t result[WARP][4];
    for (int i = 0; i < WARP; i++)
        for (int r = 0; r < 4; r++) {
            const int row = i / 4 + 8 * (r >> 1), column = 2 * (i % 4) + (r & 1);
            uint32_t sum = ((const uint32_t*)lane[i].warp_pointer[2])[r];
            for (int k = 0; k < 32; k++) sum += (uint32_t)(a[row][k] * b[k][column]);
            result[i][r] = sum;
        }
    for (int i = 0; i < WARP; i++) memcpy(lane[i].warp_out_pointer, result[i], 16);
}
