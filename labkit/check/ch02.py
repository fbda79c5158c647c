"""Checks of chapter 02: fields across bytes, the sign, the cost of a scale, the offset, a layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from labkit.check import Verdict, exercise, forbid_calls, not_yet, passed
from labkit.check.normalise import pair, plain_int
from labkit.check.traced import OPERATORS, HiddenWork, count_operations

GIVEN = ("example_weight", "stand_in_weights", "relative_error")
"""What notebooks import from here: an answer may use it."""

BUDGET_BITS = 4.3
"""What exercise 02.5 allows for one weight, scales and offsets included."""

_UNPACKERS = ("unpack_w3", "unpack_w4", "unpack", "unpack_fast", "unpack_loop", "BitViewer", "pieces_of")


def _byte_triples() -> Iterator[tuple[int, int, int]]:
    """Every setting of the six bits that q2 and q5 own, under three settings of all others."""
    for q2, q5 in itertools.product(range(8), range(8)):
        own = q2 << 6 | q5 << 15
        for others in (0x000000, 0xFFFFFF, 0x5A5A5A):
            word = others & ~(7 << 6 | 7 << 15) | own
            yield word & 255, word >> 8 & 255, word >> 16


@exercise("02.1", title="q2 and q5 across the byte edges", par=8, limit=10, unit="operations")
def q2_and_q5(answer: Any) -> Verdict:
    """``q2_and_q5(b0, b1, b2)`` gives the raw fields (0..7) of q2 and q5; scored in operators used."""
    forbid_calls(answer, _UNPACKERS)
    for b0, b1, b2 in _byte_triples():
        came = answer(b0, b1, b2)
        if (two := pair(came)) is None:
            return not_yet("two values, (q2, q5)", repr(came), "end with: return q2, q5")
        got = (plain_int(two[0]), plain_int(two[1]))
        word = b0 | b1 << 8 | b2 << 16
        expected = (word >> 6 & 7, word >> 15 & 7)
        if got != expected:
            given = f"bytes {b0:08b} {b1:08b} {b2:08b} (each written high bit first)"
            wrong = 0 if got[0] != expected[0] else 1
            hint = _field_hint(wrong, got[wrong], b0, b1, b2)
            return not_yet(f"{expected} for {given}", repr(got), hint)
    samples = ((0, 0, 0), (255, 255, 255), (99, 174, 194))
    try:
        score = max(count_operations(answer, *sample)[0] for sample in samples)
    except HiddenWork:
        return _uncounted()
    return passed("both fields are right for all values of their bits", score=score)


def _uncounted() -> Verdict:
    """For an answer that is right on plain ints and fails on the numbers that count."""
    return not_yet(
        f"operators that can be counted: {OPERATORS}",
        "your result is right, but its operators could not be counted",
        "no table, text, float or divmod: the score is the number of operators",
    )


def _field_hint(which: int, got: Any, b0: int, b1: int, b2: int) -> str:
    """One hint for q2 (``which`` 0, begins in b0) or q5 (1, begins in b1)."""
    name, first, rest, held = (("q2", b0, b1, 2), ("q5", b1, b2, 1))[which]
    low = first >> (8 - held)
    high = rest & ((1 << (3 - held)) - 1)
    raw = low | high << held
    if isinstance(got, int) and got < 0 and got + 8 == raw:
        return f"{name} is right but signed; this exercise wants the raw bits, 0..7"
    if got == low:
        return f"{name} is not complete: the low end of b{which + 1} is its high end"
    if got == low << (3 - held) | high:
        return f"{name}: the byte that comes first holds the LOW bits"
    if isinstance(got, int) and got & 7 == raw:
        return f"{name}: bits of a neighbour are still in it; mask them away"
    return f"{name} is {held} bit(s) from the top of b{which} and {3 - held} from the bottom of b{which + 1}"


@exercise("02.2", title="Sign extension", par=2, limit=4, unit="operations")
def sign_extend(answer: Any) -> Verdict:
    """``sign_extend(raw, bits)``: raw field to signed code, for an int and for a tensor alike."""
    import torch

    forbid_calls(answer, (*_UNPACKERS, "_sign_extend"))
    for bits in (3, 4, 8):
        half = 1 << (bits - 1)
        for raw in range(2 * half):
            got, expected = answer(raw, bits), raw - 2 * half if raw >= half else raw
            if isinstance(got, bool) or got != expected:
                hint = f"raw {half} and up stand for negative codes: {half} is {-half}, {2 * half - 1} is -1"
                if got == raw:
                    hint = f"the top bit weighs -{half}, not +{half}"
                return not_yet(f"{expected} for raw {raw} of {bits} bits", repr(got), hint)
    raws = torch.arange(8, dtype=torch.int16)
    expected_codes = [0, 1, 2, 3, -4, -3, -2, -1]
    try:
        got_codes = answer(raws, 3)
    except (RuntimeError, TypeError) as error:
        first_line = str(error).splitlines()[0]
        hint = "an `if` looks at one number; use operators, which work on all elements at once"
        return not_yet("a tensor of 8 codes for a tensor of 8 raw fields", first_line, hint)
    given = got_codes.tolist() if isinstance(got_codes, torch.Tensor) else got_codes
    if given != expected_codes:
        hint = "no branch and no int(): operators only"
        return not_yet(f"{expected_codes} for an int16 tensor of 0..7", repr(given), hint)
    # bits is known in advance, so work on it alone is not counted
    try:
        score = max(count_operations(lambda traced: answer(traced, 3), raw)[0] for raw in (1, 5))
    except HiddenWork:
        return _uncounted()
    return passed("right for 3, 4 and 8 bits, on numbers and on tensors", score=score)


@exercise("02.3", title="What one weight costs")
def stored_bits(answer: Any) -> Verdict:
    """``stored_bits(code_bits, group_size, has_offset)``: bits of a weight, all included."""
    forbid_calls(answer, ("bits_per_weight", "bytes_per_weight", "packed_bytes", "Roofline", "MachineCard"))
    for code_bits, group, has_offset in itertools.product((3, 4), (16, 32, 64, 576), (False, True)):
        expected = code_bits + (32 if has_offset else 16) / group
        got = answer(code_bits, group, has_offset)
        if not _close(got, expected):
            hint = "the 16 bits of a scale are shared by the weights of one group"
            if has_offset and _close(got, code_bits + 16 / group):
                hint = "an offset is a second 16-bit number for each group"
            elif _close(got, code_bits + (4 if has_offset else 2) / group):
                hint = "FP16 is 2 bytes, and you count bits"
            case = f"{code_bits}-bit codes, groups of {group}, {'with' if has_offset else 'no'} offset"
            return not_yet(f"{expected:g} for {case}", repr(got), hint)
    return passed("the cost of every layout is right")


@exercise("02.4", title="Scale and offset of a group")
def scale_and_offset(answer: Any) -> Verdict:
    """``scale_and_offset(low, high, code_bits)``: the smallest code means ``low``, the largest ``high``."""
    forbid_calls(answer, ("quantize",))
    ranges = ((-0.7, 0.7), (0.25, 2.0), (-3.0, -1.25), (-0.2, 1.0))
    for (low, high), bits in itertools.product(ranges, (3, 4)):
        smallest, largest = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        got = answer(low, high, bits)
        if (two := pair(got)) is None:
            return not_yet("two values, (scale, offset)", repr(got), "end with: return scale, offset")
        scale, offset = two
        expected_scale = (high - low) / (largest - smallest)
        expected_offset = low - smallest * expected_scale
        if _close(scale, expected_scale) and _close(offset, expected_offset):
            continue
        hint = f"two equations: {smallest} * scale + offset = {low}, {largest} * scale + offset = {high}"
        if _close(scale, (high - low) / (largest - smallest + 1)):
            hint = f"{largest - smallest + 1} codes have {largest - smallest} steps between them"
        elif _close(scale, expected_scale) and _close(offset, low):
            hint = f"the offset is what code 0 means; {low} is what code {smallest} means"
        wanted = f"scale {_short(expected_scale)} and offset {_short(expected_offset)}"
        came = f"scale {_short(scale)} and offset {_short(offset)}"
        return not_yet(f"{wanted} for {low}..{high} in {bits} bits", came, hint)
    return passed("both ends of the group are met in every case")


@exercise("02.5", title=f"The best layout under {BUDGET_BITS} bits", par=11.5, limit=12, unit="% error")
def best_layout(answer: Any) -> Verdict:
    """``(format, group_size, offset)`` of the smallest error on :func:`example_weight` in the budget."""
    from labkit.errors import InputError
    from labkit.quant import quantize

    form = '("w4", 32, False): format, group size, offset'
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        return not_yet(form, repr(answer), "one tuple of three values")
    format, group, offset = answer
    weight = example_weight()
    try:
        stored = quantize(weight, format, group, offset=offset)
    except InputError as error:
        return not_yet(form, repr(tuple(answer)), str(error))
    bits, error_percent = stored.bits_per_weight, round(relative_error(weight, stored.dequantize()), 1)
    if bits > BUDGET_BITS or format not in ("w3", "w4"):
        hint = "every group brings a scale: larger groups cost less"
        return not_yet(f"at most {BUDGET_BITS} bits per weight", f"{bits:.3f} bits for {tuple(answer)}", hint)
    kind = "with" if offset else "without"
    message = f"{format.upper()}, group {group}, {kind} offset: {bits:.3f} bits per weight"
    return passed(message, score=error_percent)


def example_weight() -> Any:
    """A weight with a few outliers, the same on every machine: float32 [256, 512].

    Nearly normal values of spread 0.05; one of five hundred is six times as large, as in trained layers.
    """
    import torch

    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(256, 512, generator=generator) * 0.05
    outlier = torch.rand(256, 512, generator=generator) < 0.002
    return torch.where(outlier, 6 * weight, weight)


def stand_in_weights() -> dict[str, Any]:
    """Float32 weights for the chapter when no model is installed, shaped and stored as SmolLM2's.

    ``"head"`` [256, 576] was never rounded, ``"up"`` [256, 576] was stored as W4 in groups of 32 with an
    offset, ``"down"`` [256, 1536] has a K that is a multiple of 128.
    """
    from labkit.quant import quantize

    weight = example_weight()
    head = weight.repeat(1, 2)[:, :576]
    up = quantize(head, "w4", 32, offset=True).dequantize()
    return {"head": head, "up": up, "down": weight.repeat(1, 3)}


def relative_error(weight: Any, restored: Any) -> float:
    """Root mean square of the error, in percent of the root mean square of ``weight``."""
    return 100 * math.sqrt(float((restored - weight).square().mean() / weight.square().mean()))


def _close(got: Any, expected: float) -> bool:
    if isinstance(got, bool) or not isinstance(got, int | float):
        try:
            got = float(got)  # a numpy or torch scalar
        except (TypeError, ValueError, RuntimeError):
            return False
    return math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9)


def _short(value: Any) -> str:
    try:
        return f"{float(value):.4g}"  # NumPy's and torch's scalars too
    except (TypeError, ValueError, RuntimeError):
        return repr(value)
