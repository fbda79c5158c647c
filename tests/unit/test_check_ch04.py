"""Chapter 04's checks: right answers pass, near misses do not, the library's own answer is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from labkit import check
from labkit.check.ch04 import example_product
from labkit.errors import InputError
from labkit.kernels.zsplit import rule
from labkit.solutions import ch04 as reference

HEAD = """#include "types.cuh"
extern "C" __global__ void reduce_parts(const float* part, float* out, int total, int nsplit)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
"""


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (
            "slice_bounds",
            lambda z, ngroups, nsplit: (r := rule.slice_of(z, ngroups, nsplit)).start and r.stop,
        ),
        ("seed_slices", lambda blocks, ngroups, plane: rule.seed_nsplit(1, 5632, 2048)),
        ("slices_for", lambda n, k: rule.invariant_nsplit(n, k)),
        ("slices_for", lambda n, k: rule.plan(1, n, k).nsplit),
    ],
)
def test_the_library_s_own_answer_is_refused(name: str, answer: Any) -> None:
    verdict = check.find(name)(answer)
    assert verdict.state == "not yet" and "building here" in verdict.hint


def last_slice_takes_the_rest(z: int, ngroups: int, nsplit: int) -> tuple[int, int]:
    base = ngroups // nsplit
    return z * base, ngroups if z == nsplit - 1 else (z + 1) * base


def rounded_up(z: int, ngroups: int, nsplit: int) -> tuple[int, int]:
    each = -(-ngroups // nsplit)
    return z * each, min((z + 1) * each, ngroups)


def in_float64(parts: np.ndarray) -> int:
    return len({sum(float(value) for value in order) for order in itertools.permutations(parts)})


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("slice_bounds", last_slice_takes_the_rest),
        ("slice_bounds", rounded_up),
        ("slice_bounds", lambda z, ngroups, nsplit: z),
        ("slice_bounds", lambda z, ngroups, nsplit: None if z else (0, ngroups)),
        ("distinct_sums", in_float64),
        ("distinct_sums", lambda parts: 1),
        ("distinct_sums", lambda parts: len(set(parts.tolist()))),
        ("seed_slices", lambda blocks, ngroups, plane: max(1, min(512 // blocks, ngroups))),
        ("seed_slices", lambda blocks, ngroups, plane: max(1, min(-(-512 // blocks), ngroups))),
        ("seed_slices", lambda blocks, ngroups, plane: min(-(-512 // blocks), ngroups, (64 << 20) // plane)),
        ("slices_for", lambda n, k: max(1, min(512 // -(-n // 1024), -(-k // 32)))),
        ("slices_for", lambda n, k: min(-(-512 // -(-n // 1024)), k // 32)),
        ("slices_for", lambda n, k: min(-(-512 // -(-n // 256)), -(-k // 32))),
        ("slices_for", lambda n, k: -(-512 // -(-n // 1024))),
        ("slices_for", lambda n, k: 64),
    ],
)
def test_near_misses(name: str, answer: Any) -> None:
    verdict = check.find(name)(answer)
    assert verdict.state == "not yet" and verdict.hint, verdict


def test_numpy_and_torch_answers_count() -> None:
    bounds = check.find("slice_bounds").function
    assert bounds(lambda *a: np.array(reference.slice_bounds(*a))).state == "passed"
    assert bounds(lambda *a: torch.tensor(reference.slice_bounds(*a))).state == "passed"
    slices = check.find("slices_for").function
    assert slices(lambda n, k: np.int64(reference.slices_for(n, k))).state == "passed"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        # right, but the second block is not full
        (
            "float s = 0.f; for (int z = 0; z < nsplit; ++z) s += part[z * total + i]; out[i] = s;",
            "out-of-bounds",
        ),
        # the last slice first: close, and other bits
        (
            "if (i >= total) return; float s = 0.f;"
            "for (int z = nsplit - 1; z >= 0; --z) s += part[z * total + i]; out[i] = s;",
            "slice 0 first",
        ),
        # in double: closer to the exact sum, and other bits
        (
            "if (i >= total) return; double s = 0; for (int z = 0; z < nsplit; ++z) s += part[z * total + i];"
            "out[i] = s;",
            "other bits",
        ),
        # the first slice only
        ("if (i < total) out[i] = part[i];", "plane z begins"),
        # added to what was there before
        (
            "if (i < total) for (int z = 0; z < nsplit; ++z) atomicAdd(out + i, part[z * total + i]);",
            "without atomics",
        ),
        # nothing set out to zero
        ("if (i < total) for (int z = 0; z < nsplit; ++z) out[i] += part[z * total + i];", "not zero before"),
        ("if (i < total) out[i] = sum;", "sum"),
    ],
)
def test_reduce_near_misses_say_what_is_wrong(body: str, says: str) -> None:
    verdict = check.find("ordered_reduce")(f"{HEAD}    {body}\n}}\n")
    assert verdict.state == "not yet" and says in repr(verdict), verdict


def test_reduce_is_scored_by_the_sectors_of_part() -> None:
    reduce = check.find("ordered_reduce")
    assert reduce.par == reduce.function(reference.ordered_reduce).score
    # four neighbouring outputs a thread, a float at a time: each sector is asked for four times
    strided = """    for (int j = 4 * i; j < 4 * i + 4 && j < total; ++j) {
        float s = part[j];
        for (int z = 1; z < nsplit; ++z) s += part[z * total + j];
        out[j] = s;
    }
}
"""
    slow = reduce(HEAD + strided)
    assert slow.state == "not yet" and slow.score == 4 * reduce.par, slow


def test_the_reference_text_is_no_own_answer() -> None:
    verdict = check.find("ordered_reduce")(reference.ordered_reduce)
    assert verdict.state == "not yet" and "labkit.solutions" in verdict.got


def test_example_product_is_the_same_everywhere() -> None:
    x, weight = example_product(2, 48, 96)
    again, other = example_product(2, 48, 96), example_product(1, 48, 96)
    assert x.shape == (2, 96) and weight.shape == (48, 96) and x.abs().max() <= 1
    assert torch.equal(x, again[0]) and torch.equal(weight.codes_t, again[1].codes_t)
    assert torch.equal(weight.codes_t, other[1].codes_t) and torch.equal(x[:1], other[0])
    with pytest.raises(InputError, match="multiple of 32"):
        example_product(1, 16, 33)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda *a: range(*reference.slice_bounds(*a)), "two numbers"),
        (lambda z, ngroups, nsplit: (r := rounded_up(z, ngroups, nsplit))[:1] + (r[1] - 1,), "not included"),
        (last_slice_takes_the_rest, "who gets one more"),
    ],
)
def test_slices_hint_at_what_is_wrong(answer: Any, says: str) -> None:
    assert says in check.find("slice_bounds").function(answer).hint
