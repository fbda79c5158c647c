// Atomics. Real ones: two copies of the library may run two blocks of one launch on two cores.
#pragma once
#include "../include/half_bits.h"
#include "scheduler.h"

static int size_of_type(int type)
{
    return type == CUEMU_I64 || type == CUEMU_U64 || type == CUEMU_F64 ? 8 : 4;
}

template <class T> static T integer_result(int op, T old, T value, T compare)
{
    switch (op) {
        case CUEMU_ATOMIC_ADD: return (T)(old + value);
        case CUEMU_ATOMIC_MIN: return emu::smaller(old, value);
        case CUEMU_ATOMIC_MAX: return emu::larger(old, value);
        case CUEMU_ATOMIC_AND: return old & value;
        case CUEMU_ATOMIC_OR: return old | value;
        case CUEMU_ATOMIC_XOR: return old ^ value;
        case CUEMU_ATOMIC_EXCHANGE: return value;
        case CUEMU_ATOMIC_CAS: return old == compare ? value : old;
        case CUEMU_ATOMIC_INC: return old >= value ? (T)0 : (T)(old + 1);
        default: return old == 0 || old > value ? value : (T)(old - 1);  // DEC
    }
}
template <class Float, class Pattern> static Pattern float_result(int op, Pattern old, Pattern value)
{
    if (op == CUEMU_ATOMIC_EXCHANGE) return value;
    Float a, b;
    memcpy(&a, &old, sizeof a);
    memcpy(&b, &value, sizeof b);
    a += b;
    memcpy(&old, &a, sizeof a);
    return old;
}
static uint16_t sum16(uint16_t a, uint16_t b, bool bfloat)
{
    if (bfloat) return cuemu::float_to_bfloat(cuemu::bfloat_to_float(a) + cuemu::bfloat_to_float(b));
    return cuemu::float_to_half(cuemu::half_to_float(a) + cuemu::half_to_float(b));
}
static uint32_t pair_result(int op, uint32_t old, uint32_t value, bool bfloat)
{
    if (op == CUEMU_ATOMIC_EXCHANGE) return value;
    const uint32_t high = sum16((uint16_t)(old >> 16), (uint16_t)(value >> 16), bfloat);
    return high << 16 | sum16((uint16_t)old, (uint16_t)value, bfloat);
}
static uint32_t result32(int op, int type, uint32_t old, uint32_t value, uint32_t compare)
{
    if (type == CUEMU_F32) return float_result<float>(op, old, value);
    if (type == CUEMU_F16X2 || type == CUEMU_BF16X2)
        return pair_result(op, old, value, type == CUEMU_BF16X2);
    if (type == CUEMU_I32)
        return (uint32_t)integer_result<int32_t>(op, (int32_t)old, (int32_t)value, (int32_t)compare);
    return integer_result<uint32_t>(op, old, value, compare);
}
static uint64_t result64(int op, int type, uint64_t old, uint64_t value, uint64_t compare)
{
    if (type == CUEMU_F64) return float_result<double>(op, old, value);
    if (type == CUEMU_I64)
        return (uint64_t)integer_result<int64_t>(op, (int64_t)old, (int64_t)value, (int64_t)compare);
    return integer_result<uint64_t>(op, old, value, compare);
}

extern "C" EMU_NOINLINE uint64_t cuemu_atomic(int op, int type, void* address, uint64_t value,
                                              uint64_t compare)
{
    const unsigned size = (unsigned)size_of_type(type);
    const void* pc = EMU_CALLER;
    // A thread that does one atomic after the other may be waiting for a lock that another fiber holds.
    if (++current->atomics_in_a_row % 64 == 0) {
        check_interrupts(pc);
        yield_to_others();
    }
    if ((uintptr_t)address & (size - 1))
        fail_at("misaligned: an atomic needs an address that is a multiple of its size", current, pc);
    if (tracing) {
        atomic_op = op;
        record(address, size, ATOMIC, pc);
        atomic_op = -1;
        on_atomic(address);
    }
    if (size == 4) {
        uint32_t* word = (uint32_t*)address;
        uint32_t old = __atomic_load_n(word, __ATOMIC_RELAXED), changed;
        do changed = result32(op, type, old, (uint32_t)value, (uint32_t)compare);
        while (!__atomic_compare_exchange_n(word, &old, changed, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        return old;
    }
    uint64_t* word = (uint64_t*)address;
    uint64_t old = __atomic_load_n(word, __ATOMIC_RELAXED), changed;
    do changed = result64(op, type, old, value, compare);
    while (!__atomic_compare_exchange_n(word, &old, changed, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
