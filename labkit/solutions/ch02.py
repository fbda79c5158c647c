"""Reference solutions of chapter 02."""

from __future__ import annotations


def q2_and_q5(b0, b1, b2):
    """Raw fields of q2 and q5. The low bits are in the byte that comes first."""
    q2 = b0 >> 6 | (b1 & 1) << 2  # a byte has 8 bits: after >> 6 only two are left, no mask needed
    q5 = b1 >> 7 | (b2 & 3) << 1
    return q2, q5


def sign_extend(raw, bits):
    """Signed code of a raw field: flip the top bit, then subtract its weight."""
    half = 1 << (bits - 1)
    return (raw ^ half) - half


def stored_bits(code_bits, group_size, has_offset):
    """Bits of one weight: its code, and its share of one or two 16-bit numbers."""
    numbers = 2 if has_offset else 1
    return code_bits + 16 * numbers / group_size


def scale_and_offset(low, high, code_bits):
    """Scale and offset so that the smallest code means low and the largest high."""
    smallest = -(1 << (code_bits - 1))
    largest = (1 << (code_bits - 1)) - 1
    scale = (high - low) / (largest - smallest)
    offset = low - smallest * scale
    return scale, offset


# Found by trying all. ("w4", 64, False) costs the same 4.25 bits and is as good: here one offset
# for 128 weights buys what a second scale buys.
best_layout = ("w4", 128, True)
