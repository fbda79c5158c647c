// Warp operations: each lane leaves its operands and sleeps; the last lane of the mask computes for all.
#pragma once
#include "matrix_ops.h"
#include "scheduler.h"

static uint64_t reduce(const Thread* lane, int op, unsigned live)
{
    uint32_t result = (uint32_t)lane[__builtin_ctz(live)].warp_in;
    for (unsigned rest = live & (live - 1); rest; rest &= rest - 1) {
        const uint32_t value = (uint32_t)lane[__builtin_ctz(rest)].warp_in;
        switch (op) {
            case CUEMU_WARP_REDUCE_ADD: result += value; break;
            case CUEMU_WARP_REDUCE_MIN:
                result = (uint32_t)emu::smaller((int32_t)result, (int32_t)value);
                break;
            case CUEMU_WARP_REDUCE_MAX:
                result = (uint32_t)emu::larger((int32_t)result, (int32_t)value);
                break;
            case CUEMU_WARP_REDUCE_UMIN: result = emu::smaller(result, value); break;
            case CUEMU_WARP_REDUCE_UMAX: result = emu::larger(result, value); break;
            case CUEMU_WARP_REDUCE_AND: result &= value; break;
            case CUEMU_WARP_REDUCE_OR: result |= value; break;
            case CUEMU_WARP_REDUCE_XOR: result ^= value; break;
        }
    }
    return result;
}

// `width` cuts the warp into segments; a lane whose source lies outside its segment keeps its own value.
static int shuffle_source(int op, int lane, int parameter, int width)
{
    const int segment = lane & ~(width - 1);
    switch (op) {
        case CUEMU_WARP_SHFL_IDX: return segment + (parameter & (width - 1));
        case CUEMU_WARP_SHFL_UP: return lane - parameter >= segment ? lane - parameter : lane;
        case CUEMU_WARP_SHFL_DOWN: return lane + parameter < segment + width ? lane + parameter : lane;
        default: return (lane ^ parameter) < segment + width ? lane ^ parameter : lane;
    }
}
static void shuffle(Thread* lane, int op, unsigned live)
{
    for (unsigned rest = live; rest; rest &= rest - 1) {
        const int i = __builtin_ctz(rest);
        const int source = shuffle_source(op, i, lane[i].warp_parameter, lane[i].warp_width);
        if (!(live >> source & 1)) {
            emu::text m;
            m.addf("warp mismatch: %s reads lane %d, which is not in the mask or has exited",
                   warp_op_name(op), source);
            fail_at(m.c_str(), &lane[i], lane[i].wait_pc);
        }
        lane[i].warp_out = lane[source].warp_in;
    }
}

static void execute_warp_op(Thread* lane, int op, unsigned mask, unsigned live)
{
    uint64_t result = 0;
    switch (op) {
        case CUEMU_WARP_SYNC:
            if (tracing) epochs_warp_sync(lane->warp, live);
            return;
        case CUEMU_WARP_SHFL_IDX:
        case CUEMU_WARP_SHFL_UP:
        case CUEMU_WARP_SHFL_DOWN:
        case CUEMU_WARP_SHFL_XOR: shuffle(lane, op, live); return;
        case CUEMU_WARP_BALLOT:
        case CUEMU_WARP_ANY:
        case CUEMU_WARP_ALL: {
            unsigned votes = 0;
            for (unsigned rest = live; rest; rest &= rest - 1)
                if (lane[__builtin_ctz(rest)].warp_in) votes |= rest & -rest;
            result = op == CUEMU_WARP_BALLOT ? votes : op == CUEMU_WARP_ANY ? votes != 0 : votes == live;
            break;
        }
        case CUEMU_WARP_MATCH_ANY:
            for (unsigned rest = live; rest; rest &= rest - 1) {
                Thread& me = lane[__builtin_ctz(rest)];
                me.warp_out = 0;
                for (unsigned others = live; others; others &= others - 1)
                    if (lane[__builtin_ctz(others)].warp_in == me.warp_in) me.warp_out |= others & -others;
            }
            return;
        case CUEMU_WARP_MATCH_ALL: {
            result = mask;
            for (unsigned rest = live; rest; rest &= rest - 1)
                if (lane[__builtin_ctz(rest)].warp_in != lane[__builtin_ctz(live)].warp_in) result = 0;
            break;
        }
        case CUEMU_WARP_LDMATRIX: load_matrices(lane); return;
        case CUEMU_WARP_MMA_F16_F32:
        case CUEMU_WARP_MMA_BF16_F32:
        case CUEMU_WARP_MMA_F16_F16: multiply_matrices(lane, op); return;
        case CUEMU_WARP_MMA_S8_S32: multiply_byte_matrices(lane); return;
        default: result = reduce(lane, op, live);
    }
    for (unsigned rest = live; rest; rest &= rest - 1) lane[__builtin_ctz(rest)].warp_out = result;
}

// The lanes of `mask` that take part, if all that have not exited are there; else 0.
static unsigned lanes_that_met(int warp, int op, unsigned mask)
{
    const Thread* lane = threads + warp * WARP;
    const int lanes = lanes_in_warp(warp);
    unsigned live = 0;
    for (int i = 0; i < lanes; i++) {
        if (!(mask >> i & 1) || lane[i].state == DONE) continue;
        if (lane[i].state != IN_WARP || lane[i].warp_mask != mask || lane[i].warp_op != op) return 0;
        live |= 1u << i;
    }
    return live;
}

static void complete_warp_operation(Thread* lane, int op, unsigned mask, unsigned live)
{
    if (op >= CUEMU_WARP_LDMATRIX && live != 0xffffffffu) {
        const Thread& first = lane[__builtin_ctz(live)];
        emu::text m;
        m.addf("warp mismatch: %s needs all 32 lanes, mask of those that came: %08x", warp_op_name(op), live);
        fail_at(m.c_str(), &first, first.wait_pc);
    }
    execute_warp_op(lane, op, mask, live);
    for (unsigned rest = live; rest; rest &= rest - 1) lane[__builtin_ctz(rest)].state = READY;
}

// A lane that exits may be the one that the others waited for.
static void finish_warp_operations(const Thread* exited)
{
    Thread* lane = threads + exited->warp * WARP;
    for (int i = 0; i < lanes_in_warp(exited->warp); i++) {
        if (lane[i].state != IN_WARP || !(lane[i].warp_mask >> exited->lane & 1)) continue;
        const int op = lane[i].warp_op;
        const unsigned mask = lane[i].warp_mask, live = lanes_that_met(exited->warp, op, mask);
        if (live) complete_warp_operation(lane, op, mask, live);
    }
}

static void warp_operation(int op, unsigned mask, const void* pc)
{
    block_uses_warp_operations = true;
    Thread* me = current;
    me->warp_op = op;
    me->warp_mask = mask;
    me->wait_pc = (void*)pc;
    warp_operation_count++;
    check_interrupts(pc);
    if (!(mask >> me->lane & 1)) {
        emu::text m;
        m.addf("warp mismatch: a lane calls %s with mask %08x, in which it is not itself", warp_op_name(op),
               mask);
        fail_at(m.c_str(), me, pc);
    }
    me->state = IN_WARP;
    Thread* lane = threads + me->warp * WARP;
    const unsigned live = lanes_that_met(me->warp, op, mask);
    if (!live) {
        sleep_until_runnable();
        return;
    }
    complete_warp_operation(lane, op, mask, live);
    // Go on with the warp's first lane, so that lanes keep their order and warps their locality.
    Thread* first = &lane[__builtin_ctz(live)];
    if (first != me) switch_to(first);
}

extern "C" {
EMU_NOINLINE uint64_t cuemu_warp(int op, unsigned mask, uint64_t value, int parameter, int width)
{
    Thread* me = current;
    me->warp_in = value;
    me->warp_parameter = parameter;
    me->warp_width = width;
    warp_operation(op, mask, EMU_CALLER);
    return me->warp_out;
}
EMU_NOINLINE void cuemu_warp_pointers(int op, unsigned mask, void* out, const void* a, const void* b,
                                      const void* c, int parameter)
{
    Thread* me = current;
    me->warp_out_pointer = out;
    me->warp_pointer[0] = a;
    me->warp_pointer[1] = b;
    me->warp_pointer[2] = c;
    me->warp_parameter = parameter;
    warp_operation(op, mask, EMU_CALLER);
}
unsigned cuemu_activemask()
{
    unsigned mask = 0;
    const Thread* lane = threads + current->warp * WARP;
    for (int i = 0; i < lanes_in_warp(current->warp); i++)
        if (lane[i].state != DONE) mask |= 1u << i;
    return mask;
}
}
