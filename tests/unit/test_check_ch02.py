"""The exercises of chapter 02: own answers pass, common mistakes get their hint."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from labkit import check
from labkit.check import ch02
from labkit.check.traced import TracedInt, count_operations
from labkit.quant import quantize
from labkit.solutions import ch02 as reference

NAMES = ("q2_and_q5", "sign_extend", "stored_bits", "scale_and_offset", "best_layout")


@pytest.mark.parametrize("name", [name for name in NAMES if callable(getattr(reference, name))])
def test_a_function_that_returns_nothing_is_told_so(name: str) -> None:
    parameters = inspect.signature(getattr(reference, name)).parameters
    scope: dict[str, Any] = {"__name__": "a_notebook"}
    exec(f"def {name}({', '.join(parameters)}):\n    x = {next(iter(parameters))}\n", scope)
    verdict = check.find(name)(scope[name])
    assert (verdict.state, verdict.got) == ("not yet", "your function returned None")


def test_fields_scores_operations_against_par() -> None:
    def wordy(b0, b1, b2):
        q2 = ((b0 >> 6) & 3) | ((b1 & 1) << 2)
        q5 = ((b1 >> 7) & 1) | ((b2 & 3) << 1)
        return q2, q5

    verdict = check.q2_and_q5(wordy)
    assert (verdict.state, verdict.score, verdict.par) == ("passed", 10, 8)

    def long_way(b0, b1, b2):
        word = b0 + b1 * 256 + b2 * 65536
        return word // 64 % 8 + 0 * b0, word // 32768 % 8 + 0 * b1

    assert check.q2_and_q5(long_way).state == "not yet"  # right, but over the limit


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda b0, b1, b2: (b0 >> 6, (b1 >> 7) | (b2 & 3) << 1), "not complete"),
        (lambda b0, b1, b2: ((b0 >> 6) << 1 | b1 & 1, (b1 >> 7) | (b2 & 3) << 1), "LOW bits"),
        (lambda b0, b1, b2: (b0 >> 6 | b1 << 2, (b1 >> 7) | (b2 & 3) << 1), "mask"),
        (lambda b0, b1, b2: (b0 >> 6 | (b1 & 1) << 2, 0), "q5"),
        (lambda b0, b1, b2: b0, "return q2, q5"),
    ],
)
def test_fields_hint_names_the_mistake(answer: Any, hint: str) -> None:
    verdict = check.q2_and_q5(answer)
    assert verdict.state == "not yet"
    assert hint in verdict.hint


def own_fields(b0, b1, b2):
    return b0 >> 6 | (b1 & 1) << 2, b1 >> 7 | (b2 & 3) << 1


@pytest.mark.parametrize("dress", [list, np.array, iter])
def test_fields_may_come_as_any_two_integers(dress: Any) -> None:
    verdict = check.q2_and_q5(lambda b0, b1, b2: dress(own_fields(b0, b1, b2)))
    assert (verdict.state, verdict.score) == ("passed", 8), verdict


@pytest.mark.parametrize("dress", [list, np.array, lambda two: torch.tensor(two, dtype=torch.float64)])
def test_scale_and_offset_may_come_as_an_array(dress: Any) -> None:
    def answer(low, high, bits):
        scale = (high - low) / (2**bits - 1)
        return dress((scale, low + 2 ** (bits - 1) * scale))

    assert check.scale_and_offset(answer).state == "passed"


@pytest.mark.parametrize(
    "read",
    [
        lambda b0, b1: divmod(b0, 64)[0] | (b1 & 1) << 2,
        lambda b0, b1: int(b0 / 64) | (b1 & 1) << 2,
        lambda b0, b1: int(b0 * 0.015625) | (b1 & 1) << 2,
        lambda b0, b1: int(f"{b1:08b}"[-1] + f"{b0:08b}"[:2], 2),
        lambda b0, b1: int(str(b0)) >> 6 | (b1 & 1) << 2,
        lambda b0, b1: (b0 >= 63.5) + (b0 >= 127.5) + (b0 >= 191.5) | (b1 & 1) << 2,
        lambda b0, b1: (b0 == 0.5) + (b0 >> 6) | (b1 & 1) << 2,
    ],
)
def test_a_right_answer_that_cannot_be_counted_is_told_so(read: Any) -> None:
    verdict = check.q2_and_q5(lambda b0, b1, b2: (read(b0, b1), b1 >> 7 | (b2 & 3) << 1))
    assert verdict.state == "not yet"
    assert verdict.got == "your result is right, but its operators could not be counted"
    assert "divmod" in verdict.hint and ">>" in verdict.expected and "Traced" not in repr(verdict)


def test_a_sign_that_cannot_be_counted_is_told_so() -> None:
    verdict = check.sign_extend(lambda raw, bits: raw - (raw >= 2 ** (bits - 1) - 0.5) * 2**bits)
    assert "could not be counted" in verdict.got and "Traced" not in repr(verdict)


def test_the_librarys_cost_of_a_weight_is_refused() -> None:
    from labkit import device as cards

    verdict = check.stored_bits(lambda bits, group, has: 8 * cards.bytes_per_weight(bits, group, has))
    assert verdict.state == "not yet" and "bytes_per_weight" in verdict.got


def test_signed_fields_are_recognised() -> None:
    def signed(b0, b1, b2):
        return tuple((raw ^ 4) - 4 for raw in own_fields(b0, b1, b2))

    assert "signed" in check.q2_and_q5(signed).hint


def test_the_librarys_answer_is_refused() -> None:
    from labkit.widgets.bit_viewer import BitViewer

    def borrowed(b0, b1, b2):
        viewer = BitViewer()
        viewer.set_data(bytes((b0, b1, b2)))
        return viewer.fields[2].raw, viewer.fields[5].raw

    verdict = check.q2_and_q5(borrowed)
    assert verdict.state == "not yet"
    assert "BitViewer" in verdict.got


def test_work_hidden_from_the_count_is_refused() -> None:
    table = list(range(256))

    def by_table(b0, b1, b2):
        return table[b0] >> 6 | (b1 & 1) << 2, b1 >> 7 | (b2 & 3) << 1

    verdict = check.q2_and_q5(by_table)
    assert verdict.state == "not yet"
    assert "could not be counted" in verdict.got


def test_a_branch_does_not_extend_the_sign_of_a_tensor() -> None:
    def branch(raw, bits):
        return raw - (1 << bits) if raw >= 1 << (bits - 1) else raw

    assert "`if` looks at one number" in check.sign_extend(branch).hint
    assert "weighs -4" in check.sign_extend(lambda raw, bits: raw).hint
    by_comparison = check.sign_extend(lambda raw, bits: raw - ((raw >= 1 << (bits - 1)) << bits))
    assert (by_comparison.state, by_comparison.score) == ("passed", 3)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda bits, group, has: bits + 16 / group, "second 16-bit number"),
        (lambda bits, group, has: bits + (4 if has else 2) / group, "2 bytes"),
        (lambda bits, group, has: bits, "shared"),
        (lambda bits, group, has: "many", "shared"),
    ],
)
def test_cost_hint_names_the_mistake(answer: Any, hint: str) -> None:
    verdict = check.stored_bits(answer)
    assert verdict.state == "not yet"
    assert hint in verdict.hint


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda low, high, bits: ((high - low) / 2**bits, low), "steps between"),
        (lambda low, high, bits: ((high - low) / (2**bits - 1), low), "code 0"),
        (lambda low, high, bits: (1.0, 0.0), "two equations"),
        (lambda low, high, bits: 1.0, "return scale, offset"),
    ],
)
def test_offset_hint_names_the_mistake(answer: Any, hint: str) -> None:
    verdict = check.scale_and_offset(answer)
    assert verdict.state == "not yet"
    assert hint in verdict.hint


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (("w4", 64, False), "passed"),
        (("w4", 128, True), "passed"),
        (("w4", 128, False), "not yet"),
        (("w3", 16, False), "not yet"),
        (("w4", 16, False), "not yet"),
        (("w5", 16, False), "not yet"),
        (("q8_0", 32, False), "not yet"),
        ("w4", "not yet"),
    ],
)
def test_layout(answer: Any, state: str) -> None:
    verdict = check.best_layout(answer)
    assert verdict.state == state, verdict


def test_par_of_the_layout_is_the_best_there_is() -> None:
    weight = ch02.example_weight()
    found = []
    for format in ("w4", "w3"):
        for group in (16, 32, 64, 128, "row"):
            for offset in (False, True):
                stored = quantize(weight, format, group, offset=offset)
                if stored.bits_per_weight <= ch02.BUDGET_BITS:
                    found.append(ch02.relative_error(weight, stored.dequantize()))
    assert round(min(found), 1) == check.find("best_layout").par


def test_stand_in_weights_show_what_the_chapter_says() -> None:
    weights = ch02.stand_in_weights()
    assert {name: tuple(weight.shape)[1] for name, weight in weights.items()} == {
        "head": 576,
        "up": 576,
        "down": 1536,
    }
    errors = {}
    for name in ("head", "up"):
        stored = quantize(weights[name], "w4", 32, offset=True)
        errors[name] = ch02.relative_error(weights[name], stored.dequantize())
    assert errors["up"] < 0.1 < 5 < errors["head"]


def test_relative_error() -> None:
    weight = ch02.example_weight()
    assert ch02.relative_error(weight, weight) == 0
    assert ch02.relative_error(weight, 0 * weight) == pytest.approx(100)


def test_traced_int_counts_and_matches_plain_ints() -> None:
    def mixed(a, b):
        return ((a & 12) | (3 ^ b) << 2) + (a >> 1) - ~b * 2 // 3 % 7 + (-a) + (b >= 2) + (1 - a)

    count, value = count_operations(mixed, 13, 6)
    assert value.value == int(mixed(13, 6))
    assert count == 17


def test_traced_int_refuses_conversions() -> None:
    from collections import Counter

    number = TracedInt(3, Counter())
    for use in (int, [1, 2, 3, 4].__getitem__, lambda n: {3: 1}[n], lambda n: f"{n:b}", lambda n: n + 0.5):
        with pytest.raises(TypeError):
            use(number)
