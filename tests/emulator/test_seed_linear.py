"""The seed kernels under QuantLinear, in the emulator: choice, strides, column order, chunks, bias."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import seed_cases
import torch

from labkit.errors import InputError
from labkit.kernels.seed import launch as seed_launch
from labkit.kernels.seed import linear as seed
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear
from labkit.nn.memory import MemoryBudget
from labkit.quant import QuantWeight

PAIRS = [(name, format) for name, formats in seed.NAMES.items() for format in formats]
BY_NAME = {name: getattr(seed, name) for name in seed.NAMES}


def forced(name: str, weight: QuantWeight, bias: torch.Tensor | None = None, **options: int) -> QuantLinear:
    return QuantLinear(weight, bias, table=DispatchTable.from_params({"force": name}), **options)


def weight_of(format: str, n: int = 37, k: int = 96, group: int | str = 32) -> QuantWeight:
    return seed_cases.random_weight(format, n, k, group, torch.float16)


@pytest.mark.parametrize(("name", "format"), PAIRS)
def test_every_name_runs_every_m_and_says_so(name: str, format: str) -> None:
    layer = forced(name, weight_of(format))
    for m in (1, 3, 8, 9, 33):
        x = seed_cases.random_x(m, 96)
        y = layer(x)
        seed_cases.check_accurate(y, x, layer.weight)
        assert layer.last_choice is not None and layer.last_choice.kernel == name
        assert torch.equal(BY_NAME[name](x, layer.weight), y)
    assert layer.stats == {name: 5}
    assert "forced by an override" in layer.explain() and "calls: " + name in layer.explain()


def test_moved_thresholds_move_the_choice() -> None:
    off = {"disable": "dense, int4pack, dequant_matmul"}
    table = DispatchTable.from_params({**off, "w4.single_row_up_to": 2, "w4.small_batch_up_to": 11})
    layer = QuantLinear(weight_of("w4"), table=table)
    names = []
    for m in (2, 3, 11, 12):
        x = seed_cases.random_x(m, 96)
        seed_cases.check_accurate(layer(x), x, layer.weight)
        assert layer.last_choice is not None
        names.append(layer.last_choice.kernel)
    assert names == ["gemv_single_row", "gemv_small_batch", "gemv_small_batch", "gemm_tiled"]


@pytest.mark.parametrize(("name", "format"), [("gemv_small_batch", "w4"), ("gemv_single_row", "w3")])
def test_strides_leading_dimensions_column_order_and_bias(name: str, format: str) -> None:
    weight = weight_of(format)
    x = seed_cases.random_x(6, 96).view(2, 3, 96)
    y = forced(name, weight)(x)
    assert y.shape == (2, 3, 37)
    wide = torch.zeros(2, 3, 192, dtype=torch.float16)
    wide[..., ::2] = x
    assert torch.equal(forced(name, weight)(wide[..., ::2]), y)
    assert torch.equal(BY_NAME[name](x.transpose(0, 1), weight), y.transpose(0, 1))
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    permuted = replace(weight, k_order=order)
    flat = x.reshape(-1, 96)
    assert torch.equal(forced(name, permuted)(flat), forced(name, weight)(flat[:, order]))
    bias = torch.arange(37).half()
    assert torch.equal(forced(name, weight, bias)(x), y + bias)


@pytest.mark.parametrize("temp_bytes", [1, 2 * 96 * 70])
def test_copies_of_x_are_made_a_piece_at_a_time(temp_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = replace(weight_of("w4"), k_order=torch.arange(95, -1, -1))
    x = seed_cases.random_x(100, 96)
    expected = forced("gemm_tiled", weight)(x)
    rows = []
    original = seed.plan
    monkeypatch.setattr(
        seed, "plan", lambda kernel, x, *rest: rows.append(len(x)) or original(kernel, x, *rest)
    )
    assert torch.equal(forced("gemm_tiled", weight, temp_bytes=temp_bytes)(x), expected)
    assert rows == ([32, 32, 32, 4] if temp_bytes == 1 else [64, 36])


def test_codes_at_an_odd_address_are_copied_within_the_budget() -> None:
    weight = weight_of("w4")
    raw = torch.zeros(weight.packed.numel() + 1, dtype=torch.uint8)
    odd = raw[1:].view(weight.packed.shape)
    odd.copy_(weight.packed)
    shifted = replace(weight, packed=odd)
    assert shifted.packed.data_ptr() % 4
    x = seed_cases.random_x(2, 96)
    budget = MemoryBudget(1 << 20)
    table = DispatchTable.from_params({"force": "gemv_small_batch"})
    layer = QuantLinear(shifted, table=table, budget=budget)
    assert torch.equal(layer(x), forced("gemv_small_batch", weight)(x)) and budget.used == odd.nbytes
    with pytest.raises(InputError, match="start at an odd address"):
        QuantLinear(shifted, table=table, budget=MemoryBudget(1))(x)


def test_what_they_cannot_do_is_refused_with_the_reason() -> None:
    row = weight_of("w3", k=90, group="row")
    seed_cases.check_accurate(
        forced("gemm_tiled", row)(seed_cases.random_x(9, 90)), seed_cases.random_x(9, 90), row
    )
    w4 = seed_cases.random_weight("w4", 5, 90, "row", None)
    with pytest.raises(InputError, match="group size 90: it takes multiples of 8"):
        forced("gemv_single_row", w4)(seed_cases.random_x(1, 90))
    with pytest.raises(InputError, match="cpu, w4, float32"):  # its rows are for float16
        forced("gemm_tiled", w4)(torch.zeros(1, 90))
    with pytest.raises(InputError, match="weight: got w4; expected w3"):
        seed.gemv_batch_w3(seed_cases.random_x(1, 90), w4)


@pytest.mark.parametrize(
    ("x", "named"),
    [
        (
            torch.zeros(3, 64, dtype=torch.float16),
            "x: got float16",
        ),  # 3 x 64 is 2 x 96
        (torch.zeros(3, 96), "x: got float32"),
        (torch.tensor(1.0, dtype=torch.float16), "x: got float16"),
        ([1.0] * 96, "x: got list"),
    ],
)
def test_direct_calls_refuse_by_name(x: object, named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        seed.gemm_tiled(x, weight_of("w4"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="weight: got float32"):
        seed.gemm_tiled(torch.zeros(1, 96).half(), torch.zeros(5, 96))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "format"), PAIRS)
def test_more_rows_than_a_grid_has_are_computed_in_bands(
    name: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = weight_of(format), seed_cases.random_x(70, 96)
    expected = BY_NAME[name](x, weight)
    monkeypatch.setattr(seed_launch, "MAX_GRID_Y", 2)
    assert torch.equal(BY_NAME[name](x, weight), expected)
    assert torch.equal(forced(name, weight)(x), expected)


def test_a_hundred_thousand_rows() -> None:
    weight = seed_cases.random_weight("w4", 1, 32, 32, None)
    x = seed_cases.random_x(100_000, 32)
    for name in ("gemv_single_row", "gemv_small_batch", "gemm_tiled"):
        seed_cases.check_accurate(forced(name, weight)(x), x, weight)


def test_no_rows() -> None:
    layer = forced("gemm_tiled", weight_of("w4"))
    assert layer(torch.empty(0, 96, dtype=torch.float16)).shape == (0, 37)
    assert seed.gemm_tiled(torch.empty(2, 0, 96, dtype=torch.float16), weight_of("w4")).shape == (2, 0, 37)
