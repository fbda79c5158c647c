"""The decode attention kernel in the emulator: values, bits, appends, races."""

from __future__ import annotations

from dataclasses import replace

import decode_cases as cases
import pytest
import torch
from decode_cases import attention_case

from labkit.errors import InputError
from labkit.kernels import decode_attention as attention


@pytest.mark.parametrize("shape", cases.SHAPES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_error_is_at_most_twice_that_of_plain_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    cases.check_accurate(attention_case(shape, (1, 16, 129, 300), dtype=dtype))


@pytest.mark.parametrize("total", cases.TOTALS)
def test_every_length_with_a_free_cache_of_nan(total: int) -> None:
    cases.check_accurate(attention_case((64, 4, 1), (total,), capacity=total))
    cases.check_accurate(attention_case((64, 4, 1), (total, 5), capacity=total + 200))


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group(group: int) -> None:
    cases.check_accurate(attention_case((64, group, 2), (20, 150)))


@pytest.mark.parametrize(("shape", "dtype"), [((128, 8, 1), torch.float16), ((80, 10, 2), torch.bfloat16)])
def test_heads_normalised_before_rope(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    cases.check_accurate(attention_case(shape, (1, 33, 140), dtype=dtype, qk_norm=True))


@pytest.mark.parametrize("shape", [(128, 8, 2), (96, 12, 1)])
def test_bits_depend_on_neither_batch_nor_capacity(shape: tuple[int, int, int]) -> None:
    cases.check_invariant(shape, torch.float16)


@pytest.mark.parametrize("shape", cases.SHAPES)
def test_no_race_and_nothing_out_of_bounds(shape: tuple[int, int, int]) -> None:
    case = attention_case(shape, (1, 128, 300), qk_norm=shape[0] == 96)
    expected = case.run()
    out = torch.full_like(expected, float("nan"))
    launch = attention.launch(
        case.qkv, case.keys, case.values, case.cos, case.sin, case.lengths, case.scratch(), out,
        case.q_norm, case.k_norm,
    )  # fmt: skip
    trace = launch.trace()
    assert trace.ok, trace.faults
    assert torch.equal(out, expected)


def test_large_scores_and_equal_values() -> None:
    case = attention_case((64, 4, 1), (200,))
    case.qkv.mul_(200)  # scores in the thousands: one probability is 1, the rest underflow
    cases.check_accurate(case)
    flat = attention_case((64, 4, 1), (200,))
    flat.values[:, :, :199] = 0.75
    flat.qkv[:, -64:] = 0.75
    assert torch.equal(flat.run(), torch.full((1, 256), 0.75).half()), "a mean of equals is that value"


def test_nan_in_a_used_position_shows() -> None:
    case = attention_case((64, 4, 1), (40, 40))
    case.keys[0, 0, 7, 3] = float("nan")
    y = case.run()
    assert y[0].isnan().all() and y[1].isfinite().all()


def test_rows_without_room_or_out_of_use_are_left_alone() -> None:
    case = attention_case((64, 4, 1), (30, 30, 30), capacity=64)
    lengths = case.lengths.clone()
    lengths[0], lengths[2] = -1, 64
    idle = replace(case, lengths=lengths)
    before = idle.keys.clone(), idle.values.clone()
    out = torch.full((3, 256), 3.0).half()
    y = idle.run(out=out)
    assert torch.equal(y[::2], torch.full((2, 256), 3.0).half()) and torch.isfinite(y[1]).all()
    for cache, old in zip((idle.keys, idle.values), before, strict=True):
        assert torch.equal(cache[::2].nan_to_num(7.0), old[::2].nan_to_num(7.0))


def test_what_does_not_fit_is_refused_by_name() -> None:
    case = attention_case((64, 4, 1), (5, 5))
    for changes, message in (
        ({"qkv": case.qkv[:, :-64]}, "qkv"),
        ({"qkv": case.qkv.float()}, "qkv"),
        ({"qkv": case.qkv[:, :-1]}, "qkv"),
        ({"values": case.values[:, :, :-1]}, "v_cache"),
        ({"keys": case.keys[0]}, "k_cache"),
        ({"lengths": case.lengths.long()}, "lengths"),
        ({"cos": case.cos[:4]}, "sin"),
        ({"cos": case.cos[:4], "sin": case.sin[:4]}, "cos"),
        ({"q_norm": case.qkv[0, :64].clone()}, "q_norm"),
    ):
        with pytest.raises(InputError, match=message):
            replace(case, **changes).run(case.scratch())
    with pytest.raises(InputError, match="scratch"):
        case.run(case.row(0).scratch())
    with pytest.raises(InputError, match="17 query heads"):
        attention_case((64, 17, 1), (5,)).run()
    with pytest.raises(InputError, match="head_dim 32"):
        attention_case((32, 4, 1), (5,)).run()
