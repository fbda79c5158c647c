"""The z-split GEMM without a compiler: slices, the rules for their number, the reference, the registry."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import quoted
from labkit.errors import InputError
from labkit.kernels import gpu, registry, zsplit
from labkit.kernels.registry import Request
from labkit.kernels.source import kernels_dir
from labkit.kernels.zsplit import launch, reference, register, rule
from labkit.quant import quantize

sizes = st.integers(1, 200_000)


# --- slices and their number ---------------------------------------------------------------------------


@given(ngroups=st.integers(1, 4096), data=st.data())
def test_slices_take_every_group_once_and_the_first_ones_the_remainder(
    ngroups: int, data: st.DataObject
) -> None:
    nsplit = data.draw(st.integers(1, ngroups))
    slices = [zsplit.slice_of(z, ngroups, nsplit) for z in range(nsplit)]
    assert [group for part in slices for group in part] == list(range(ngroups))
    lengths = [len(part) for part in slices]
    base, remainder = divmod(ngroups, nsplit)
    assert lengths == [base + 1] * remainder + [base] * (nsplit - remainder)


@given(ngroups=st.integers(1, 4096), data=st.data())
def test_runs_take_every_group_once_and_in_order(ngroups: int, data: st.DataObject) -> None:
    nsplit = data.draw(st.integers(1, ngroups))
    runs = data.draw(st.integers(1, nsplit))
    taken = [zsplit.run_of(index, nsplit, runs) for index in range(runs)]
    groups = [group for run in taken for z in run for group in zsplit.slice_of(z, ngroups, nsplit)]
    assert groups == list(range(ngroups))
    assert min(map(len, taken)) >= 1 and max(map(len, taken)) - min(map(len, taken)) <= 1
    assert max(map(len, taken)) == len(taken[0])


@given(m=st.integers(1, 100_000), n=sizes, k=sizes)
def test_seed_rule_is_the_articles(m: int, n: int, k: int) -> None:
    # The article's loop, word for word: up to 512 blocks, at most one slice a group, then down to the cap.
    ngroups = -(-k // 32)
    blocks = -(-n // 1024) if m == 1 else -(-n // 256) * -(-m // 4)
    expected = 1
    if blocks < 512 and ngroups > 1:
        expected = min(-(-512 // blocks), ngroups)
    while expected > 1 and expected * m * n * 4 > 64 * 2**20:
        expected -= 1
    assert zsplit.seed_nsplit(m, n, k) == expected


def test_numbers_are_those_that_the_article_gives() -> None:
    split = quoted.table(quoted.KESTREL, "z_split")
    assert split.value("target_blocks") == rule.TARGET_BLOCKS
    assert split.value("part_cap_mib") * 2**20 == rule.PART_CAP_BYTES
    # Qwen3-VL-2B: 2048 columns are 64 groups, and a projection of 2048 rows takes two blocks at M = 1.
    assert zsplit.seed_nsplit(1, 2048, 2048) == split.value("largest_nsplit_seen")
    mapping = quoted.table(quoted.KESTREL, "mapping")
    assert tuple(
        mapping.value(item) for item in ("threads_n", "threads_m", "columns_per_thread", "group_size")
    ) == (rule.THREADS_N, rule.THREADS_M, rule.COLUMNS, rule.GROUP)
    text = (kernels_dir() / "zsplit.cu").read_text(encoding="utf-8")
    for name in ("THREADS_N", "THREADS_M", "COLUMNS", "GROUP"):
        assert int(re.findall(rf"#define {name} (\d+)", text)[0]) == getattr(rule, name)
    assert rule.REDUCE_THREADS == rule.THREADS_N * rule.THREADS_M


@given(m=st.integers(1, 100_000), n=sizes, k=sizes, which=st.sampled_from(rule.RULES))
@settings(max_examples=300)
def test_every_plan_fits_grid_and_cap(m: int, n: int, k: int, which: str) -> None:
    planned = zsplit.plan(m, n, k, rule=which)
    x, y, z = planned.grid
    assert x * 256 * (4 if m == 1 else 1) >= n and y * 4 >= min(m, 4) and y * 4 >= m * (m > 1)
    assert x <= rule.MAX_GRID_X and y <= rule.MAX_GRID_YZ and z <= rule.MAX_GRID_YZ
    assert 1 <= planned.runs <= planned.nsplit <= rule.groups_of(k)
    assert z == planned.planes and z in {1, planned.runs, planned.nsplit}
    assert planned.split == (z > 1)
    assert planned.part_bytes == (z * m * n * 4 if planned.split else 0)
    assert planned.part_bytes <= rule.PART_CAP_BYTES
    assert planned.blocks == x * y * z


@given(n=sizes, k=sizes, m=st.integers(1, rule.MAX_BAND_ROWS))
def test_the_default_rule_does_not_look_at_m(n: int, k: int, m: int) -> None:
    planned, alone = zsplit.plan(m, n, k), zsplit.plan(1, n, k)
    assert planned.nsplit == alone.nsplit == zsplit.invariant_nsplit(n, k)
    assert planned.runs == alone.runs == zsplit.invariant_runs(n, k)


@given(n=sizes, k=sizes)
def test_at_m_1_the_default_rule_launches_what_the_articles_does(n: int, k: int) -> None:
    ours, theirs = zsplit.plan(1, n, k), zsplit.plan(1, n, k, rule="seed")
    assert ours.nsplit == theirs.nsplit
    if ours.runs * ours.grid[0] < rule.TARGET_BLOCKS:
        assert (ours.grid, ours.part_bytes) == (theirs.grid, theirs.part_bytes)


@given(m=st.integers(1, 100_000), n=sizes, k=sizes)
@settings(max_examples=300)
def test_the_grid_is_the_smallest_that_is_full_and_the_cap_never_stops_it(m: int, n: int, k: int) -> None:
    planned = zsplit.plan(m, n, k)
    x, y, z = planned.grid
    smaller = [planes for planes in (1, planned.runs, planned.nsplit) if planes < z]
    assert all(x * y * planes < rule.TARGET_BLOCKS for planes in smaller)
    if planned.blocks < rule.TARGET_BLOCKS and z < planned.nsplit:
        # A plane a slice would cost more traffic than the weight, and more than a small L2 keeps.
        traffic = 2 * planned.nsplit * m * n * 4
        assert z == planned.runs and traffic > max(36 * rule.groups_of(k) * n, 2 << 20)
    if z == 1:
        assert x * y >= rule.TARGET_BLOCKS or planned.nsplit == 1


@pytest.mark.parametrize(
    ("m", "n", "k", "nsplit", "runs", "grid"),
    [
        (1, 5632, 2048, 64, 16, (6, 1, 64)),
        (4, 5632, 2048, 64, 16, (22, 1, 64)),
        (8, 5632, 2048, 64, 16, (22, 2, 16)),
        (128, 5632, 2048, 64, 16, (22, 32, 1)),
        (8, 2048, 5632, 176, 32, (8, 2, 32)),
        (64, 3584, 18944, 128, 32, (14, 16, 32)),
        (1, 151936, 2048, 4, 4, (149, 1, 4)),
        (2, 151936, 2048, 4, 4, (594, 1, 1)),
        (1, 576, 576, 18, 16, (1, 1, 18)),
        (7, 40, 20, 1, 1, (1, 2, 1)),
    ],
)
def test_plans_of_known_shapes(
    m: int, n: int, k: int, nsplit: int, runs: int, grid: tuple[int, int, int]
) -> None:
    planned = zsplit.plan(m, n, k)
    assert (planned.nsplit, planned.runs, planned.grid) == (nsplit, runs, grid)


def test_past_the_cap_fewer_planes_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k = 4, 5632, 2048
    planes = {}
    for cap in (64, 32, 2, 1):
        monkeypatch.setattr(rule, "PART_CAP_BYTES", cap * m * n * 4)
        monkeypatch.setattr(rule, "seed_nsplit", lambda *sizes: 64)  # the cap enters the article's rule too
        planned = zsplit.plan(m, n, k)
        planes[cap] = planned.planes
        assert (planned.nsplit, planned.runs) == (64, 16)
    assert planes == {64: 64, 32: 16, 2: 1, 1: 1}


def test_an_asked_number_of_slices_has_no_runs_and_obeys_the_cap() -> None:
    small = zsplit.plan(8, 3584, 18944, nsplit=100)
    assert (small.nsplit, small.runs, small.planes) == (100, 100, 100)
    large = zsplit.plan(64, 3584, 18944, nsplit=100)  # 87 MiB
    assert (large.nsplit, large.runs, large.planes, large.part_bytes) == (100, 100, 1, 0)


def test_the_seeds_rule_looks_at_m() -> None:
    assert zsplit.plan(1, 3584, 3584, rule="seed").nsplit != zsplit.plan(8, 3584, 3584, rule="seed").nsplit


@given(n=sizes, k=sizes)
def test_runs_of_the_default_rule_have_four_groups_when_there_are_enough(n: int, k: int) -> None:
    nsplit, runs = zsplit.invariant_nsplit(n, k), zsplit.invariant_runs(n, k)
    assert runs <= rule.MOST_RUNS and (runs == nsplit or runs >= rule.LEAST_RUNS)
    if runs > rule.LEAST_RUNS:
        assert rule.groups_of(k) // runs >= rule.RUN_GROUPS
    # A plane a slice is for few outputs, which the reduce shares out among several threads each.
    for m in (1, 4, 40, 124):
        planned = zsplit.plan(m, n, k)
        assert planned.planes <= planned.runs or m * n <= rule.REDUCE_FEW_OUTPUTS


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"m": 0, "n": 1, "k": 1}, "m"),
        ({"m": 1, "n": 0, "k": 1}, "n"),
        ({"m": 1, "n": 1, "k": True}, "k"),
        ({"m": 1, "n": 1, "k": 64, "nsplit": 3}, "nsplit"),
        ({"m": 1, "n": 1, "k": 64, "nsplit": 0}, "nsplit"),
        ({"m": 1, "n": 1, "k": 64, "rule": "best"}, "rule"),
        ({"m": rule.MAX_BAND_ROWS + 1, "n": 1, "k": 64}, "m"),
        ({"m": 1, "n": 2**31 - 1, "k": 64}, "n"),
    ],
)
def test_bad_plans_are_refused_by_name(arguments: dict, named: str) -> None:
    with pytest.raises(InputError) as error:
        zsplit.plan(**arguments)
    assert error.value.argument == named


# --- the reference ----------------------------------------------------------------------------------------


def nearest_float32(value: Fraction) -> np.float32:
    """The float32 next to an exact value, ties to even."""
    guess = np.float32(float(value))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    even = {candidate: int(candidate.view(np.uint32)) & 1 for candidate in near}
    return min(near, key=lambda candidate: (abs(Fraction(float(candidate)) - value), even[candidate]))


def exact_fma(a: float, b: float, c: float) -> np.float32:
    return nearest_float32(Fraction(a) * Fraction(b) + Fraction(c))


def one_fma(a: float, b: float, c: float) -> float:
    return reference.fma(*(torch.tensor([value], dtype=torch.float32) for value in (a, b, c))).item()


finite = st.floats(-(2.0**60), 2.0**60, width=32)


@given(a=finite, b=finite, c=finite)
@settings(max_examples=400)
def test_fma_is_rounded_once(a: float, b: float, c: float) -> None:
    assert one_fma(a, b, c) == exact_fma(a, b, c)


@given(a=finite, b=finite, shift=st.integers(-30, 30), last=st.integers(-3, 3))
@settings(max_examples=400)
def test_fma_is_rounded_once_near_cancellation_and_ties(a: float, b: float, shift: int, last: int) -> None:
    with np.errstate(over="ignore"):
        near = np.float32(-a * b) * np.float32(2.0**shift)
    c = float((np.array([near], np.float32).view(np.int32) + last).view(np.float32)[0])
    if np.isfinite(c) and abs(a * b + c) < 2.0**127:  # both neighbours of the result are finite
        assert one_fma(a, b, c) == exact_fma(a, b, c)


def test_fma_where_float64_alone_would_round_twice() -> None:
    a, b, c = (1 + 2.0**-23) * 2.0**-24, 1 - 2.0**-23, 1 + 2.0**-23
    assert np.float32(a * b + c) == np.float32(1 + 2.0**-22)  # a sum in float64 lands on the tie
    assert one_fma(a, b, c) == exact_fma(a, b, c) == np.float32(1 + 2.0**-23)


def test_fma_passes_infinity_and_nan_on() -> None:
    assert one_fma(float("inf"), 2.0, 1.0) == float("inf")
    assert one_fma(float("inf"), 0.0, 1.0) != one_fma(float("inf"), 0.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_is_close_to_float64(dtype: torch.dtype) -> None:
    weight = quantize(torch.randn(33, 200, generator=torch.Generator().manual_seed(0)), "q8_0")
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = x.double() @ weight.dequantize(torch.float64).t()
    for nsplit, runs in ((1, 1), (3, 3), (7, 7), (7, 3)):
        error = (reference.float_reference(x, weight, nsplit, runs).double() - exact).abs()
        assert (error <= torch.finfo(dtype).eps * exact.abs() + 1e-4).all()


def test_reference_adds_the_runs_and_in_them_the_slices() -> None:
    # Scales of 1, one x of 1 a group: a slice's sum is its code. 2**24 swallows a single 1, not a 2.
    weight = quantize(torch.ones(16, 32 * 4), "q8_0")
    weight.codes_t.fill_(1)
    weight.scales_t.fill_(1)
    x = torch.zeros(1, 128)
    x[0, ::32] = torch.tensor([2.0**24, 1.0, 1.0, 1.0])
    plain = reference.float_reference(x, weight, 4)
    in_runs = reference.float_reference(x, weight, 4, 2)  # (2**24 + 1) + (1 + 1)
    assert (plain == 2.0**24).all() and (in_runs == 2.0**24 + 2).all()


def test_quantised_activations_of_known_values() -> None:
    x = torch.zeros(5, 40)
    x[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])  # scale 1: ties go to the even code
    x[1, 32] = -6.0
    x[2, 3], x[3, 3] = float("nan"), float("inf")
    x[4, :3] = torch.tensor([1.9e-43, -1.9e-43, 1e-45])  # the scale is one step above zero
    codes, scales = reference.quantize_reference(x)
    assert codes.shape == (5, 64) and scales.shape == (5, 2)
    assert codes[0, :4].tolist() == [127, 0, 2, -2] and scales[0].tolist() == [1.0, 0.0]
    assert codes[1, 32].item() == -127 and not codes[:, 40:].any()
    assert scales[2, 0].isnan() and scales[3, 0].isinf() and not codes[2:4].any()
    assert codes[4, :2].tolist() == [127, -127]


@given(values=st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=70))
def test_quantised_activations_are_within_half_a_step(values: list[float]) -> None:
    x = torch.tensor([values])
    codes, scales = reference.quantize_reference(x)
    back = (codes.view(1, -1, 32).double() * scales[..., None]).view(1, -1)[:, : len(values)]
    step = scales.double().repeat_interleave(32, 1)[:, : len(values)]
    assert ((back - x.double()).abs() <= step * (0.5 + 1e-5) + 1e-43).all()


def test_group_dots_are_integers_and_complete() -> None:
    weight = quantize(torch.randn(9, 96, generator=torch.Generator().manual_seed(2)), "q8_0")
    codes = torch.randint(-127, 128, (3, 96), generator=torch.Generator().manual_seed(3)).to(torch.int8)
    dots = reference.group_dots(codes, weight)
    assert dots.dtype == torch.int64
    assert torch.equal(dots.sum(0), codes.long() @ weight.codes().long().t())


# --- registry ---------------------------------------------------------------------------------------------


def request(**changes: object) -> Request:
    asked = Request("cpu", None, "q8_0", "float16", 1, None, 1, None)
    return replace(asked, **changes)  # type: ignore[arg-type]


def test_registered_under_two_names_and_the_lesson_under_none() -> None:
    names = registry.names()
    assert {"zsplit", "zsplit_int8"} <= set(names)
    assert not any("atomic" in name for name in names)
    code = (kernels_dir() / "zsplit.cu").read_text(encoding="utf-8")
    assert "atomicAdd" not in code
    assert "LESSON ONLY" in (kernels_dir() / "lesson" / "zsplit_atomic.cu").read_text(encoding="utf-8")


def test_other_formats_and_old_cards_are_passed_over_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Q8_0 and Q4_0" in registry.why_not("zsplit", request(format="w4"))
    assert "8.0" in registry.why_not("zsplit_int8", request(device="cuda", capability=(7, 5)))
    monkeypatch.setattr(gpu, "why_not", lambda: "no GPU here")
    assert registry.why_not("zsplit", request(device="cuda", capability=(8, 6))) == "no GPU here"
    monkeypatch.setattr(gpu, "why_not", lambda: "")
    assert registry.why_not("zsplit", request(device="cuda", capability=(8, 6))) == ""
    assert registry.why_not("zsplit_int8", request()) == ""


def test_a_kernel_that_cannot_be_loaded_is_passed_over_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(source: object, device: object) -> None:
        raise InputError("compiler", "none", "a C++ compiler", "install one")

    monkeypatch.setattr(register.runner, "load", refused)
    weight = quantize(torch.ones(16, 32), "q8_0")
    with pytest.raises(registry.Unavailable, match="C\\+\\+ compiler"):
        registry.get("zsplit").prepare(request(weight=weight))


def test_weights_that_start_anywhere_are_copied_to_where_vector_loads_may_go() -> None:
    weight = quantize(torch.randn(16, 32, generator=torch.Generator().manual_seed(4)), "q8_0")
    shifted = torch.empty(weight.codes_t.numel() + 1, dtype=torch.int8)[1:].view(weight.codes_t.shape)
    shifted.copy_(weight.codes_t)
    moved = type(weight)(weight.format, shifted, weight.scales_t, weight.n, weight.k)
    assert moved.codes_t.data_ptr() % 16 != 0
    assert launch.aligned(moved).codes_t.data_ptr() % 16 == 0
    assert torch.equal(launch.aligned(moved).codes_t, weight.codes_t)
    assert launch.aligned(weight) is weight


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(2, 31), "x: got float32"),
        (torch.zeros(32), "x: got float32"),
        (torch.zeros(2, 32, dtype=torch.float64), "x: got float64"),
        (torch.zeros(2, 32, device="meta"), "x: got on meta"),
        ([1.0], "x: got list"),
    ],
)
def test_bad_activations_are_refused_by_name(x: object, said: str) -> None:
    weight = quantize(torch.ones(16, 32), "q8_0")
    with pytest.raises(InputError, match=re.escape(said)):
        zsplit.zsplit_gemm(x, weight)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=re.escape(said)):
        zsplit.zsplit_gemm_int8(x, weight)  # type: ignore[arg-type]


def test_other_weights_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="weight"):
        zsplit.zsplit_gemm(torch.zeros(1, 32), quantize(torch.ones(16, 32), "w4", 32))  # type: ignore[arg-type]
