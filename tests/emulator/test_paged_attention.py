"""Attention over paged keys and values in the emulator: values, bits, appends, races."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import paged_cases as cases
import pytest
import torch
from paged_cases import paged_case

from labkit.errors import InputError
from labkit.kernels import paged_attention as paged
from labkit.kernels.paged_layer import PagedLayer, quantise

FP16, BF16 = cases.DTYPES


@pytest.mark.parametrize("shape", cases.SHAPES)
@pytest.mark.parametrize(("dtype", "int8"), [(FP16, False), (BF16, False), (FP16, True), (BF16, True)])
def test_error_is_at_most_twice_that_of_plain_torch(
    shape: tuple[int, int, int], dtype: torch.dtype, int8: bool
) -> None:
    cases.check_accurate(paged_case(shape, ((5, 9), (140, 21), (0, 1)), dtype=dtype, int8=int8))


@pytest.mark.parametrize("shape", [(128, 8, 1), (64, 3, 2), (80, 1, 1), (96, 12, 1)])
@pytest.mark.parametrize(("dtype", "int8"), [(FP16, False), (BF16, True)])
def test_the_fused_step_is_append_and_attention(
    shape: tuple[int, int, int], dtype: torch.dtype, int8: bool
) -> None:
    case = paged_case(shape, ((0, 1), (31, 1), (150, 1)), dtype=dtype, int8=int8, qk_norm=shape[0] != 64)
    cases.check_fused(case, planned=paged.Plan(1, 4), scratch=case.scratch(paged.Plan(1, 4)))


@pytest.mark.parametrize("total", [*cases.TOTALS, 4097])
@pytest.mark.parametrize("int8", [False, True])
def test_every_length_with_a_free_pool_of_nan(total: int, int8: bool) -> None:
    cases.check_fused(paged_case((64, 3, 1), ((total - 1, 1),), int8=int8))
    new = min(total, 20)
    cases.check_accurate(paged_case((64, 3, 1), ((total - new, new), (4, 1)), int8=int8))


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group(group: int) -> None:
    cases.check_accurate(paged_case((64, group, 2), ((20, 3), (150, 1))))
    cases.check_fused(paged_case((64, group, 1), ((20, 1), (150, 1)), int8=group % 2 == 0))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("int8", [False, True])
def test_every_block_size(block_size: int, int8: bool) -> None:
    cases.check_fused(paged_case((64, 4, 2), ((170, 1), (63, 1), (64, 1)), int8=int8, block_size=block_size))


@pytest.mark.parametrize(("shape", "dtype", "int8"), [((64, 3, 1), FP16, False), ((64, 3, 1), BF16, True)])
def test_bits_depend_on_a_token_and_its_past_alone(
    shape: tuple[int, int, int], dtype: torch.dtype, int8: bool
) -> None:
    cases.check_invariant(shape, dtype, int8=int8, long=2600)


@pytest.mark.parametrize(("shape", "int8"), [((128, 8, 2), False), ((80, 12, 1), True), ((96, 5, 1), True)])
def test_no_race_and_nothing_out_of_bounds(shape: tuple[int, int, int], int8: bool) -> None:
    case = paged_case(shape, ((0, 1), (127, 1), (300, 1)), int8=int8, qk_norm=shape[0] == 96)
    whole = case.fresh()
    expected = whole.fused()
    for planned in (paged.WALK, paged.Plan(1, 4)):
        mine, out = case.fresh(), torch.full_like(expected, cases.NAN)
        launch = paged.decode_launch(
            mine.qkv, mine.layer, mine.tables, mine.int32(mine.lengths), mine.cos, mine.sin,
            mine.scratch(planned), mine.capacity, mine.q_norm, mine.k_norm, cases.EPS, out,
        )  # fmt: skip
        trace = launch.trace()
        assert trace.ok, trace.faults
        assert torch.equal(out, expected)
    chunk = paged_case(shape, ((0, 3), (126, 7)), int8=int8, qk_norm=shape[0] == 96)
    q = torch.full((10, expected.shape[1]), cases.NAN, dtype=FP16)
    launch = paged.rope_launch(
        chunk.qkv, chunk.layer, chunk.cos, chunk.sin, chunk.positions, chunk.slots,
        chunk.q_norm, chunk.k_norm, cases.EPS, q,
    )  # fmt: skip
    trace = launch.trace()
    assert trace.ok, trace.faults
    out = torch.full_like(q, cases.NAN)
    launch = chunk.chunks(q, out).launch(planned=paged.Plan(1, 4))
    trace = launch.trace()
    assert trace.ok, trace.faults
    assert torch.equal(out, chunk.attend(q))


def test_large_scores_zero_queries_and_equal_values() -> None:
    for int8 in (False, True):
        case = paged_case((64, 4, 1), ((200, 9),), int8=int8)
        case.qkv.mul_(200)  # scores far beyond 65504: one probability is 1, the rest underflow
        cases.check_accurate(case)
    case = paged_case((64, 4, 1), ((200, 3),))
    q = case.append()
    y = case.attend(torch.zeros_like(q))
    block, offset = case.places(0, 203)
    for i in range(3):  # a mean over the past
        mean = case.layer.values[block, 0, offset][: 201 + i].double().mean(0).repeat(4)
        assert (y[i].double() - mean).abs().max() <= 2e-3 * mean.abs().max()
    case.layer.values[:] = 0.75
    assert torch.equal(case.attend(q), torch.full_like(q, 0.75)), "a mean of equals is that value"


def test_keys_and_queries_near_the_largest_half() -> None:
    case = paged_case((64, 4, 1), ((60, 2),))
    q = case.append()
    block, offset = case.places(0, 62)
    case.layer.keys[block, :, offset] = case.layer.keys[block, :, offset].sign() * 6e4
    q = q.sign() * 6e4
    wide = q.view(2, 4, 64)
    cases.near(case.attend(q), cases.reference(case, wide, FP16), cases.reference(case, wide), FP16)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_int8_scales_of_any_size_lose_nothing(scale: float) -> None:
    case = paged_case((64, 4, 1), ((300, 5),), int8=True)
    q = case.append()
    assert case.layer.value_scales is not None
    case.layer.value_scales.mul_(scale)
    wide = q.view(5, 4, 64)
    # Against torch in float32: half cannot hold the plain result's intermediate steps at every scale.
    exact = cases.reference(case, wide)
    error = (case.attend(q).double() - exact).abs().max()
    assert error <= 2e-3 * exact.abs().max() + 6e-8


@pytest.mark.parametrize(("size", "outlier"), cases.QUERY_SIZES)
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_int8_takes_a_query_of_any_size(dtype: torch.dtype, size: float, outlier: float) -> None:
    cases.check_query_sizes(dtype, size, outlier)


@pytest.mark.parametrize("odd", [cases.NAN, float("inf")])
@pytest.mark.parametrize("int8", [False, True])
def test_a_query_that_is_no_number_shows_in_its_head_alone(int8: bool, odd: float) -> None:
    cases.check_odd_query(odd, int8=int8)


def test_int8_is_near_what_was_quantised() -> None:
    shape, rows = (64, 4, 1), ((0, 200),)
    plain, small = paged_case(shape, rows), paged_case(shape, rows, int8=True)
    y, z = plain.attend(plain.append()), small.attend(small.append())
    # Half a code of every value, and scores off by half a code of every key.
    assert (y - z).abs().max() <= 0.05 * y.abs().max()
    assert not torch.equal(y, z)


def test_the_rule_of_codes() -> None:
    x = torch.tensor([[0.0, 0.0], [127.0, -63.5], [1.0, 2.54], [-254.0, 3.0]])
    codes, scales = quantise(x)
    assert codes.tolist() == [[0, 0], [127, -64], [50, 127], [-127, 2]]
    assert torch.equal(scales, torch.tensor([0.0, 127, 2.54, 254]) / 127)
    case = paged_case((64, 2, 1), ((3, 2),), int8=True)
    case.qkv[0] = 0
    case.append()
    block, offset = case.slots[0] // 16, case.slots[0] % 16
    assert not case.layer.keys[block, :, offset].any() and case.layer.key_scales is not None
    assert case.layer.key_scales[block, :, offset] == 0 and torch.isfinite(case.attend(case.append())).all()


@pytest.mark.parametrize("int8", [False, True])
def test_nan_in_a_used_position_shows(int8: bool) -> None:
    case = paged_case((64, 4, 1), ((40, 1), (40, 1), (40, 1)), int8=int8)
    q = case.append()
    (block, offset), (other, at) = case.places(0, 41), case.places(2, 41)
    if int8:
        assert case.layer.key_scales is not None and case.layer.value_scales is not None
        case.layer.key_scales[block[7], 0, offset[7]] = cases.NAN
        case.layer.value_scales[other[40], 0, at[40]] = cases.NAN
    else:
        case.layer.keys[block[7], 0, offset[7], 3] = cases.NAN
        case.layer.values[other[40], 0, at[40]] = cases.NAN
    y = case.attend(q)
    assert y[0].isnan().all() and y[1].isfinite().all() and y[2].isnan().all()


@pytest.mark.parametrize("shape", [(64, 4, 1), (128, 8, 1), (80, 1, 2), (96, 3, 1)])
@pytest.mark.parametrize(("dtype", "odd"), [(FP16, cases.NAN), (BF16, cases.NAN), (FP16, float("inf"))])
def test_a_value_that_is_no_number_shows_from_its_token_on_alone(
    shape: tuple[int, int, int], dtype: torch.dtype, odd: float
) -> None:
    cases.check_odd_value(paged_case(shape, ((25, 14), (40, 3)), dtype=dtype), odd)


@pytest.mark.parametrize("int8", [False, True])
def test_a_new_token_of_nan_shows(int8: bool) -> None:
    case = paged_case((64, 4, 1), ((40, 1), (40, 1)), int8=int8)
    case.qkv[0, -128:] = cases.NAN  # k and v
    y = case.fused()
    assert y[0].isnan().all() and y[1].isfinite().all()


def test_rows_without_room_or_out_of_use_are_left_alone() -> None:
    case = paged_case((64, 4, 1), ((30, 1), (30, 1), (30, 1)))
    idle = replace(case.fresh(), lengths=(-1, 30, 32))
    before = [one.clone() for one in cases.held(idle.layer)]
    out = torch.full((3, 256), 3.0).half()
    y = idle.fused(out=out, capacity=32)
    assert torch.equal(y[::2], torch.full((2, 256), 3.0).half()) and torch.isfinite(y[1]).all()
    assert torch.equal(y[1], case.fused()[1])
    block, offset = case.places(1, 31, 30)
    for tensor, old in zip(cases.held(idle.layer), before, strict=True):
        old[block, :, offset] = tensor[block, :, offset]
        assert torch.equal(tensor.nan_to_num(7.0), old.nan_to_num(7.0))


def test_a_step_without_rows_launches_nothing() -> None:
    case = paged_case((64, 4, 1), ((5, 1), (5, 1)))
    none = replace(case, qkv=case.qkv[:0], tables=case.tables[:0], lengths=(), counts=())
    assert none.fused(case.scratch()).shape == (0, 256)


def test_a_negative_slot_is_left_alone() -> None:
    case = paged_case((64, 4, 1), ((30, 4),))
    slots = case.slots
    slots[1] = -1
    before = [one.clone() for one in cases.held(case.layer)]
    q = torch.full((4, 256), 3.0).half()
    paged.rope_append(case.qkv, case.layer, case.cos, case.sin, case.positions, slots, q_out=q)
    assert torch.equal(q[1], torch.full((256,), 3.0).half()) and not (q[0] == 3).all()
    block, offset = case.slots[1] // 16, case.slots[1] % 16
    for tensor, old in zip(cases.held(case.layer), before, strict=True):
        assert torch.equal(tensor[block, :, offset].nan_to_num(7.0), old[block, :, offset].nan_to_num(7.0))


def test_plans_share_out_every_turn() -> None:
    for tokens in (1, 128, 129, 2048, 2049, 2560, 2561, 40_000):
        for planned in cases.PLANS:
            assert planned.ranges(tokens) >= 1
        assert paged.WALK.ranges(tokens) == 1
        assert paged.Plan(1, 4).ranges(tokens) == paged.splits(tokens)
    assert paged.Plan(20, 8).ranges(20 * 128) == 1 and paged.Plan(20, 8).ranges(20 * 128 + 1) == 2
    for fine, coarse in ((0, 4), (17, 4), (22, 4), (1, 3), (1, 0), (-1, 4)):
        with pytest.raises(InputError, match="planned"):
            paged.Plan(fine, coarse)


def test_the_plan_fills_the_device() -> None:
    assert paged.plan(1, 100) == paged.plan(10_000, 32_768) == paged.WALK
    assert paged.plan(2, 2048, 132) == paged.plan(2, 8192, 132) == paged.Plan(1, 4)
    assert paged.plan(32, 8192, 132) == paged.Plan(8, 8) and paged.plan(8, 8192, 132) == paged.Plan(4, 4)
    assert paged.plan(128, 8192, 132) == paged.WALK  # a block a multiprocessor
    assert paged.plan(128, 8192, 132, int8=True) == paged.Plan(32, 32)
    for units in (1, 2, 7, 33, 127, 300, 900, 2000):
        for tokens in (300, 2048, 9000, 40_000):
            for int8 in (False, True):
                chosen = paged.plan(units, tokens, 132, int8=int8)
                assert chosen.ranges(tokens) <= paged.splits(tokens)


def refusals() -> list[tuple[dict[str, Any], str]]:
    case = paged_case((64, 4, 1), ((5, 1), (5, 1)))
    return [
        ({"qkv": case.qkv[:, :-1].contiguous()}, "qkv"),
        ({"qkv": case.qkv.float()}, "qkv"),
        ({"qkv": case.qkv.bfloat16()}, "qkv"),
        ({"qkv": case.qkv[:, ::2]}, "qkv"),
        ({"tables": case.tables.long()}, "block_tables"),
        ({"tables": case.tables[:1]}, "block_tables"),
        ({"cos": case.cos[:4]}, "sin"),
        ({"cos": case.cos[:4], "sin": case.sin[:4]}, "cos"),
        ({"q_norm": case.qkv[0, :64].clone()}, "q_norm"),
    ]


@pytest.mark.parametrize(("changes", "message"), refusals())
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    case = paged_case((64, 4, 1), ((5, 1), (5, 1)))
    with pytest.raises(InputError, match=message):
        replace(case, **changes).fused(case.scratch())


def test_what_the_kernel_has_not_is_refused_by_name() -> None:
    for shape, reason in (((64, 17, 1), "17 query heads"), ((32, 4, 1), "head_dim 32")):
        with pytest.raises(InputError, match=reason):
            paged_case(shape, ((5, 1),)).fused()
    case = paged_case((64, 4, 1), ((5, 2), (5, 1)))
    q = case.append()
    with pytest.raises(InputError, match="max_context"):
        case.attend(q, max_context=17)
    with pytest.raises(InputError, match="out"):
        case.attend(q, out=q[:1])
    long = paged_case((64, 4, 1), ((600, 1), (5, 1)))
    with pytest.raises(InputError, match="scratch"):
        long.fused(case.scratch(), planned=paged.Plan(1, 4))
    with pytest.raises(InputError, match="capacity"):
        long.fused(capacity=10_000)
    assert paged.why_not(64, 4, 12, FP16) and paged.why_not(64, 4, 16, torch.float32)
    assert paged.why_not(64, 4, 16, FP16, BF16) and not paged.why_not(64, 4, 16, FP16, torch.int8)


def test_layers_that_do_not_agree_are_refused_by_name() -> None:
    keys = torch.zeros(3, 2, 16, 64)
    codes, scales = torch.zeros(3, 2, 16, 64, dtype=torch.int8), torch.zeros(3, 2, 16)
    given: list[tuple[tuple[Any, ...], str]] = [
        ((keys[0], keys), "keys"),
        ((keys.double(), keys.double()), "keys"),
        ((keys[:, :, :12].contiguous(), keys), "block_size"),
        ((keys, keys.half()), "values"),
        ((keys, keys, scales, scales), "key_scales"),
        ((codes, codes), "key_scales"),
        ((codes, codes, scales, scales[:2]), "value_scales"),
    ]
    for tensors, name in given:
        with pytest.raises(InputError, match=name):
            PagedLayer(*tensors)
    layer = PagedLayer(codes, codes, scales, scales)
    assert layer.nbytes == 2 * (3 * 2 * 16 * 64 + 4 * 3 * 2 * 16) and layer.quantised
