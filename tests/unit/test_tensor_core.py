"""The tensor-core family without a compiler for the emulator: plans, references, refusals, counts."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import tensor_core_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_variants import GPUS, asked_constants, weights
from tensor_core_cases import CASES, F32, HALF, Case

from labkit.errors import InputError
from labkit.kernels import gpu, registry, tensor_core
from labkit.kernels.limits import MAX_GRID, MAX_THREADS
from labkit.kernels.registry import Request, Unavailable
from labkit.kernels.source import KernelSource
from labkit.kernels.tensor_core import counts, launch, register, rule
from labkit.kernels.tensor_core.reference import linear_reference, order_reference
from labkit.kernels.zsplit.rule import slice_of
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear
from labkit.nn.memory import MemoryBudget
from labkit.quant import QuantWeight, quantize, repack, unpack
from labkit.quant.tiles import record_bytes, tile_bytes

RECORDS = sorted(
    {
        record_bytes(format, group, offset)
        for format in ("w4", "w3")
        for group in (32, 64, 128)
        for offset in (None, HALF, F32)
    }
)
ROW_TILES = st.one_of(st.integers(1, 1300), st.integers(1, 100_000))
K_TILES = st.one_of(st.integers(1, 200), st.integers(1, 10_000))
DEVICE = st.builds(
    rule.Device,
    st.one_of(st.sampled_from([1, 16, 20, 108, 128, 132, 1000]), st.integers(1, 300)),
    st.sampled_from([64 << 10, 99 << 10, 163 << 10, 227 << 10]),
)


# --- plans ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=400)
@given(
    m=st.one_of(st.integers(1, 64), st.integers(1, rule.DENSE_FROM)),
    row_tiles=ROW_TILES,
    k_tiles=K_TILES,
    record=st.sampled_from(RECORDS),
    heavy=st.booleans(),
    device=DEVICE,
)
def test_every_plan_fits_its_gpu_and_covers_the_product(
    m: int, row_tiles: int, k_tiles: int, record: int, heavy: bool, device: rule.Device
) -> None:
    plan = rule.plan(m, row_tiles, k_tiles, record, heavy, device)
    parts = rule.slices(row_tiles, k_tiles)
    constants = plan.constants
    n_tiles, stages = constants["N_TILES"], constants["STAGES"]
    assert plan.threads <= MAX_THREADS and plan.threads % 32 == 0
    assert plan.shared_bytes <= device.shared_bytes
    assert all(1 <= size <= limit for size, limit in zip(plan.grid, MAX_GRID))
    assert plan.planes in (0, parts) and plan.planes != 1 and stages >= 2
    if plan.entry == "tensor_core_narrow":
        k_warps = constants["K_WARPS"]
        assert 8 * n_tiles >= m and plan.threads == 32 * k_warps and plan.round >= 1
        assert plan.grid == (row_tiles, max(1, plan.planes), 1)
        tiles = -(-k_tiles // plan.planes) if plan.planes else k_tiles
        rack = min(plan.round * k_warps, tiles) * n_tiles * 8 * 32 * 4
        assert plan.shared_bytes == k_warps * stages * record + rack
    else:
        block_tiles, columns = constants["BLOCK_TILES"], constants["COLUMN_WARPS"]
        band = 8 * n_tiles * columns
        assert plan.grid[0] * block_tiles >= row_tiles and plan.grid[1] * band >= m
        assert (plan.grid[0] - 1) * block_tiles < row_tiles and (plan.grid[1] - 1) * band < m
        assert plan.grid[2] == parts and plan.planes == (parts if parts > 1 else 0)
        assert plan.threads == 32 * block_tiles * columns
        stage = constants["TURN"] * (band * 256 + block_tiles * record)
        assert plan.shared_bytes == stages * stage


@given(row_tiles=ROW_TILES, k_tiles=K_TILES)
def test_slices_depend_on_the_weights_shape_and_none_is_empty(row_tiles: int, k_tiles: int) -> None:
    parts = rule.slices(row_tiles, k_tiles)
    assert 1 <= parts <= rule.MAX_SLICES and parts <= k_tiles
    assert parts == 1 or parts * row_tiles <= rule.SLICED_TILES
    dealt = [slice_of(part, k_tiles, parts) for part in range(parts)]
    assert [tile for part in dealt for tile in part] == list(range(k_tiles)) and all(map(len, dealt))


def test_the_test_plans_are_what_the_kernels_can_run() -> None:
    for case in CASES:
        weight = case.weight()
        for m in (1, 9, 17, 64):
            plans = list(cases.other_plans(m, weight, rule.SM86.shared_bytes))
            assert rule.plan.cache_info() and plans[0].entry == launch.plan_for(m, weight).entry


# --- references -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_references_are_the_dequantised_product(case: Case) -> None:
    weight, x = case.weight(), case.x(5)
    bias, residual = cases.x_of(1, case.n, case.dtype)[0], cases.x_of(5, weight.outputs, case.dtype)
    y = x.double() @ unpack(weight).dequantize(torch.float64).T + bias
    if case.paired:
        gate, up = y[:, : case.n // 2], y[:, case.n // 2 :]
        y = gate / (1 + torch.exp(-gate)) * up
    y = y + residual
    torch.testing.assert_close(linear_reference(x, weight, bias, residual), y)
    single = linear_reference(x, weight, bias, residual, torch.float32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, y.float(), rtol=1e-4, atol=1e-4)
    ordered = order_reference(x, weight, bias, residual)
    eps = torch.finfo(case.dtype).eps
    assert ordered.dtype == case.dtype
    torch.testing.assert_close(ordered.double(), y, rtol=eps, atol=eps)


def test_the_order_shows_in_the_bits() -> None:
    weight = Case("w4", 32, HALF, n=40, k=4400).weight()
    x = cases.lone_x(8, weight, HALF)
    residual = -order_reference(x, weight)  # takes the leading bits away
    results = {parts: order_reference(x, weight, residual=residual, parts=parts) for parts in (1, 2, 8)}
    assert torch.equal(order_reference(x, weight, residual=residual), results[8])
    assert not torch.equal(results[1], results[2]) and not torch.equal(results[2], results[8])


# --- refusals ---------------------------------------------------------------------------------------------

WEIGHT = CASES[0].weight()
X = CASES[0].x(4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": X.float()}, "x: got"),
        ({"x": X.double()}, "x: got"),
        ({"x": X[0]}, "x: got"),
        ({"x": X[:, :-1]}, "x: got"),
        ({"x": X.numpy()}, "x: got"),
        ({"x": X.to("meta")}, "x: got on meta"),
        ({"weight": unpack(WEIGHT)}, "labkit.quant.tiles.repack makes one"),
        ({"bias": torch.zeros(69).half()}, "bias: got"),
        ({"bias": torch.zeros(70)}, "bias: got"),
        ({"bias": torch.zeros(140).half()[::2]}, "bias: got"),
        ({"residual": torch.zeros(3, 70).half()}, "residual: got"),
        ({"residual": torch.zeros(4, 70).bfloat16()}, "residual: got"),
        ({"residual": torch.zeros(4, 140).half()[:, ::2]}, "residual: got"),
        ({"out": torch.zeros(4, 71).half()}, "out: got"),
        ({"out": torch.zeros(70, 4).half().T}, "out: got"),
        ({"out": torch.zeros(4, 70)}, "out: got"),
        ({"x": X.bfloat16(), "fp16_sums": True}, "fp16_sums"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    given = {"x": X, "weight": WEIGHT, **arguments}
    x, weight = given.pop("x"), given.pop("weight")
    with pytest.raises(InputError, match=words):
        tensor_core.linear(x, weight, **given)


def test_weights_without_tiles_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="group_size: got 16"):
        repack(quantize(torch.randn(8, 64), "w4", 16))
    with pytest.raises(InputError, match="paired: got N = 7"):
        repack(quantize(torch.randn(7, 64), "w4", 32), paired=True)


def request(
    weight: Any, device: str = "cuda", capability: Any = (8, 6), dtype: str = "float16", **more: Any
) -> Request:
    budget = more.get("budget") or MemoryBudget(1 << 30)
    return Request(device, capability, weight.format, dtype, 1, weight, 1 << 20, budget)


def stored(group: int = 32, format: str = "w4", n: int = 48, k: int = 128) -> QuantWeight:
    return quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(0)), format, group)


def test_why_it_cannot_serve_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "why_not", lambda: "")
    weight = stored()
    assert register.available(request(weight)) == "" == register.available(request(weight, capability=(9, 0)))
    assert register.available(request(weight, dtype="bfloat16")) == ""
    assert register.available(request(weight, "cpu", None)) == ""
    for old in ((7, 5), (7, 0), (6, 1), None):
        assert "8.0 or newer" in register.available(request(weight, capability=old))
    assert "float16 and bfloat16" in register.available(request(weight, dtype="float32"))
    assert "group_size: got 16" in register.available(request(stored(16)))
    assert "W4 and W3" in register.available(request(quantize(torch.randn(16, 64), "q8_0")))
    monkeypatch.setattr(gpu, "why_not", lambda: "CuPy is not installed")
    assert register.available(request(weight)) == "CuPy is not installed"
    assert registry.why_not(register.NAME, request(weight)) == "CuPy is not installed"
    assert register.available(request(weight, "cpu", None)) == ""


def test_registering_twice_changes_nothing() -> None:
    before, kernel = registry.generation(), registry.get(register.NAME)
    register.register_kernel()
    assert registry.generation() == before and registry.get(register.NAME) is kernel


def test_a_budget_without_room_is_not_used_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = stored()
    needed = tile_bytes(weight)
    budget = MemoryBudget(needed - 1)
    with pytest.raises(Unavailable, match="the budget has no room"):
        register.prepare(request(weight, "cpu", None, budget=budget))
    assert budget.used == 0
    budget = MemoryBudget(needed)

    def broken(*args: Any, **options: Any) -> None:
        raise InputError("C++ compiler", "none", "g++ or clang++")

    monkeypatch.setattr(register, "load", broken)
    with pytest.raises(Unavailable, match="C\\+\\+ compiler"):
        register.prepare(request(weight, "cpu", None, budget=budget))
    assert budget.used == 0
    monkeypatch.setattr(register, "load", lambda *args, **options: None)
    prepared = register.prepare(request(weight, "cpu", None, budget=budget))
    assert budget.used == needed == prepared.weight.nbytes
    del prepared
    assert budget.used == 0


@pytest.mark.parametrize(
    ("group", "dtype", "limit", "why"),
    [
        (16, HALF, 1 << 30, "group_size: got 16"),
        (32, HALF, 10, "the budget has no room"),
    ],
)
def test_the_layer_falls_back_by_name(group: int, dtype: torch.dtype, limit: int, why: str) -> None:
    weight = stored(group)
    rows = {
        row.kernel: row for row in DispatchTable.load().rows if row.device == "cpu" and row.format != "w3"
    }
    table = DispatchTable((rows["tensor_core"], rows["dequant_matmul"]))
    layer = QuantLinear(weight, table=table, budget=MemoryBudget(limit))
    x = cases.x_of(3, weight.k, dtype)
    y = layer(x)
    assert layer.last_choice is not None and layer.last_choice.kernel == "dequant_matmul"
    ((name, reason),) = layer.last_choice.skipped
    assert name == "tensor_core" and why in reason
    torch.testing.assert_close(
        y.double(), x.double() @ weight.dequantize(torch.float64).T, rtol=0.01, atol=0.01
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", ["w4", "w3"])
def test_newer_cards_take_it_for_every_m(format: str, dtype: str) -> None:
    table = DispatchTable.load()
    for capability in ((9, 0), (10, 0), (12, 0)):
        for m in (1, 64, 65, 512, 100_000):
            choice = table.select("cuda", capability, format, dtype, m, why_not=lambda name: "")
            assert choice.kernel == "tensor_core"


# --- launches ---------------------------------------------------------------------------------------------


def test_rows_are_copied_only_where_they_must_be() -> None:
    wide = torch.zeros(8, 1024).half()
    for kept in (wide[:, :576], wide[::2, 8:584], wide[:1, :576], torch.zeros(1, 2000).half()[:, :576]):
        assert launch.readable(kept, WEIGHT) is kept
    for copied in (wide[:, 1:577], wide[:1, :576].expand(4, 576), torch.zeros(576, 8).half().T):
        made = launch.readable(copied, WEIGHT)
        assert made.is_contiguous() and made.data_ptr() % 16 == 0 and torch.equal(made, copied)
    ragged = Case("w4", 32, n=8, k=100).weight()
    assert launch.readable(torch.ones(3, 100).half(), ragged).shape == (3, 104)


def test_rows_with_gaps_go_to_the_launch_as_the_memory_they_lie_in() -> None:
    x = torch.arange(8 * 1024).half().view(8, 1024)[2:6, 8:584]
    first = next(launch.launches(x, WEIGHT, torch.empty(4, 70).half()))
    rows = first.args[1]
    assert rows.data_ptr() == x.data_ptr() and rows.is_contiguous() and rows.numel() == 3 * 1024 + 576
    assert first.args[-1] == 1024 and first.overlap


def test_a_gpu_is_planned_for_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.device_facts(torch.device("cpu")) == rule.SM86
    launch.device_facts.cache_clear()
    facts = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert launch.device_facts(torch.device("cuda", 0)) == rule.Device(132, 232_448)
    launch.device_facts.cache_clear()


# --- counts -----------------------------------------------------------------------------------------------


def counted(entry: str, bits: int, **constants: int) -> counts.Count:
    try:
        return counts.count(KernelSource(f"{entry}.cu", entry, {"BITS": bits, **constants}))
    except InputError as error:
        pytest.skip(str(error))


@pytest.mark.xdist_group("nvrtc")
@pytest.mark.parametrize("bits", [4, 3])
def test_decode_keeps_to_its_budget_of_instructions(bits: int) -> None:
    for k_warps in (2, 4):  # what the laptop's layers get, from 1,088 output rows on
        found = counted("tensor_core_narrow", bits, N_TILES=1, K_WARPS=k_warps, STAGES=3)
        assert found.a_weight <= 0.6 * counts.BUDGET[bits], found.turn
        # Sixteen tensor-core instructions multiply 32 × 128 weights with eight rows.
        assert found.turn["tensor core"] == 16 and found.a_product == found.a_weight / 8
        assert found.fold > 0


@pytest.mark.xdist_group("nvrtc")
@pytest.mark.parametrize("bits", [4, 3])
def test_more_rows_cost_less_than_twice_as_much(bits: int) -> None:
    one = counted("tensor_core_narrow", bits, N_TILES=1, K_WARPS=4, STAGES=3)
    two = counted("tensor_core_narrow", bits, N_TILES=2, K_WARPS=4, STAGES=3)
    four, eight = (
        counted("tensor_core_wide", bits, N_TILES=n, COLUMN_WARPS=1, BLOCK_TILES=4, STAGES=3) for n in (4, 8)
    )
    assert [each.turn["tensor core"] for each in (one, two, four, eight)] == [16, 32, 64, 128]
    assert one.a_weight < two.a_weight < 1.6 * one.a_weight
    assert four.a_weight < eight.a_weight < 1.6 * four.a_weight
    assert eight.a_product < four.a_product < two.a_product < one.a_product
    twice = counted("tensor_core_wide", bits, N_TILES=4, COLUMN_WARPS=1, BLOCK_TILES=4, STAGES=3, TURN=2)
    assert (twice.records, twice.turn["tensor core"]) == (2, 128)
    assert 0.9 * four.a_weight < twice.a_weight < 1.1 * four.a_weight


@pytest.mark.xdist_group("nvrtc")
def test_counts_need_a_loop_of_tensor_core_instructions() -> None:
    with pytest.raises(InputError, match="tensor-core"):
        counts.count(KernelSource("tensor_core_reduce.cu", defines={"N_TILES": 1}))


@pytest.mark.xdist_group("nvrtc")
def test_every_plan_of_the_laptop_has_a_block_an_sm() -> None:
    for n, k in ((2560, 2048), (22016, 2048), (2048, 11008), (37888, 3584)):
        for m in (1, 16, 32, 64):
            found = counts.fill(4, m, n, k)
            assert found.held.blocks >= 1 and found.held.warps >= 4, (n, k, m)


def test_the_compiled_variants_are_what_a_launch_can_ask_for() -> None:
    asked = set(asked_constants())
    for case in CASES:
        weight = case.weight()
        heavy = weight.tile_group < 128 or weight.offset is not None
        for m, device in itertools.product((1, 8, 9, 17, 32, 33, 64, 65), GPUS):
            planned = cases.planned_on(device, m, weight)
            assert (planned.entry, planned.defines, heavy) in asked
    every = set(weights(full=True))
    assert {launch.weight_defines(case.weight(), case.dtype, False) for case in CASES} <= every
    assert set(weights()) <= every and len(weights()) == len(set(weights()))
