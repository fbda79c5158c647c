"""The tensor-core family in the emulator: accuracy, bits, every access checked, and what is refused."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensor_core_cases as cases
import torch
from seed_cases import untouched
from tensor_core_cases import BFLOAT, CASES, HALF, Case, checked, run

from labkit.emulator.kernel import MAX_SHARED
from labkit.kernels import runner
from labkit.kernels.launch import Launch
from labkit.kernels.source import KernelSource
from labkit.kernels.tensor_core import launch as tlaunch
from labkit.kernels.tensor_core import register, rule
from labkit.kernels.tensor_core.reference import linear_reference, order_reference
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear
from labkit.nn.memory import MemoryBudget
from labkit.quant import quantize, repack, unpack

WIDE_K = Case("w4", 128, n=40, k=4400)  # 35 k tiles, and few row tiles: K is split over blocks at any M


# --- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_plain_torch(case: Case) -> None:
    cases.check_accurate(case, cases.ROWS)


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (CASES[0], (2, 7, 8, 9, 16, 17, 31, 32, 33, 48, 64, 65, rule.DENSE_FROM - 1)),
        (CASES[4], (3, 8, 13, 16, 20, 33, 64)),
        (CASES[5], (8, 9, 17, 64)),
        (CASES[1], (5, 16, 32, 64)),
        (WIDE_K, (8, 9, 17, 40)),
    ],
    ids=str,
)
def test_bits_of_a_row_are_those_it_has_alone(case: Case, rows: tuple[int, ...]) -> None:
    cases.check_rows_alone(case, rows)


def test_a_long_k_is_split_over_blocks_and_a_short_one_is_not() -> None:
    planes = {
        (str(case), m): tlaunch.plan_for(m, case.weight()).planes
        for case in (CASES[0], WIDE_K)
        for m in (1, 9, 17, 33)
    }
    assert [planes[str(CASES[0]), m] for m in (1, 9, 17, 33)] == [0, 0, 4, 4]
    assert [planes[str(WIDE_K), m] for m in (1, 9, 17, 33)] == [8, 8, 8, 8]


@pytest.mark.parametrize("case", [CASES[4], WIDE_K], ids=str)
@pytest.mark.parametrize("m", [1, 16, 17, 64])
def test_bits_do_not_depend_on_the_gpu(case: Case, m: int) -> None:
    weight, x = case.weight(), case.x(m)
    expected = run(x, weight)
    plans = list(cases.other_plans(m, weight, MAX_SHARED))
    assert len(plans) >= 4
    for planned in plans:
        assert torch.equal(run(x, weight, planned=planned), expected), planned


@pytest.mark.parametrize("case", [*CASES[:8], WIDE_K], ids=str)
def test_sums_are_made_in_the_documented_order(case: Case) -> None:
    cases.check_order(case, (1, 9, 20))


def test_another_order_has_other_bits() -> None:
    weight = WIDE_K.weight()
    x = cases.lone_x(16, weight, HALF)
    residual = -order_reference(x, weight)
    results = [order_reference(x, weight, residual=residual, parts=parts) for parts in (1, 2, 4, 8)]
    assert torch.equal(run(x, weight, residual=residual), results[-1])
    assert not any(torch.equal(results[-1], other) for other in results[:-1])


def test_the_order_reference_is_as_good_as_float32() -> None:
    for case in (CASES[0], CASES[3], CASES[5], WIDE_K):
        weight, x = case.weight(), case.x(5)
        cases.assert_accurate(order_reference(x, weight), x, weight)
        y = run(x, weight)
        eps = torch.finfo(case.dtype).eps
        torch.testing.assert_close(y, order_reference(x, weight), rtol=2 * eps, atol=2 * eps)


def test_identity_gives_the_weight_back() -> None:
    for case in (CASES[0], CASES[3], CASES[7], CASES[8]):
        case = replace(case, paired=False, dtype=HALF)
        weight = case.weight()
        y = tlaunch.linear(torch.eye(case.k).half(), weight)
        assert torch.equal(y.T, weight.dequantize(torch.float64).half())
        bands = [run(torch.eye(case.k)[i : i + 64].half(), weight) for i in range(0, case.k, 64)]
        assert torch.equal(torch.cat(bands), y)


def test_column_order_is_applied() -> None:
    case = CASES[8]
    weight = case.weight()
    assert weight.k_order is not None
    plain = replace(weight, k_order=None)
    for m in (1, 9, 33, rule.DENSE_FROM):
        x = case.x(m)
        y = tlaunch.linear(x, weight)
        assert torch.equal(y, tlaunch.linear(x[:, weight.k_order.long()], plain))


def test_views_of_x() -> None:
    cases.check_views()


def test_extreme_activations() -> None:
    cases.check_extremes()


@pytest.mark.parametrize("case", [CASES[0], replace(CASES[4], dtype=HALF), CASES[7]], ids=str)
def test_sums_in_half_are_an_option_and_less_exact(case: Case) -> None:
    weight = case.weight()
    errors = {}
    for m in (1, 16, 33):
        x = case.x(m)
        exact = linear_reference(x, weight)
        for fp16 in (False, True):
            y = run(x, weight, fp16_sums=fp16)
            errors[m, fp16] = cases.rms(y.double() - exact)
        assert torch.equal(run(x[:1], weight, fp16_sums=True), run(x, weight, fp16_sums=True)[:1])
        # A group's sum of up to 128 products, rounded to eleven bits at each of eight steps.
        assert errors[m, False] < errors[m, True] < 2.0**-8 * cases.rms(exact)


@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=str)
def test_dense_bands_are_bounded(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = case.weight(), case.x(rule.DENSE_FROM)
    whole = tlaunch.linear(x, weight)
    row_tile = weight.k_tiles * 128 * 32 * 2
    seen: list[int] = []
    real = torch.empty

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        made = real(*args, **options)
        seen.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", spy)
    for temp, tiles in ((1, 1), (row_tile, 1), (2 * row_tile + 1, 2)):
        seen.clear()
        y = tlaunch.linear(x, weight, temp_bytes=temp)
        torch.testing.assert_close(y, whole)
        assert seen == [y.nbytes, tiles * row_tile]


def test_a_hundred_thousand_rows() -> None:
    case = Case("w3", 64, n=3, k=70)
    weight, x = case.weight(), case.x(100_000)
    y = tlaunch.linear(x, weight)
    picked = torch.tensor([0, 1, 65_535, 65_536, 99_999])
    cases.assert_accurate(y[picked], x[picked], weight)


# --- traced -----------------------------------------------------------------------------------------------


class Traced:
    """Runs launches traced, with the kernels' assertions on, and holds every one to be free of faults."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def __call__(self, launch: Launch) -> None:
        trace = checked(launch).trace()
        assert trace.ok, trace.report()
        assert trace.blocks_traced == trace.blocks_total
        self.entries.append(launch.source.name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_race_and_nothing_out_of_bounds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, weight, bias = Traced(), case.weight(), x_bias(case)
    at = CASES.index(case)
    everything = at in (0, 4, 5)
    for m in (1, 9, 17, 65) if everything else ((1, 33), (9, 17))[at % 2]:
        x, residual = case.x(m), cases.x_of(m, weight.outputs, case.dtype)
        y = run(x, weight, bias=bias, residual=residual, through=traced)
        cases.assert_accurate(y, x, weight, bias, residual)
    split = rule.slices(weight.row_tiles, weight.k_tiles) > 1
    assert ("tensor_core_reduce" in traced.entries) == split
    if everything:
        monkeypatch.setattr(Launch, "run", lambda launch: traced(launch))
        tlaunch.linear(case.x(rule.DENSE_FROM), weight)
        assert traced.entries[-1] == "tensor_core_dense"


def x_bias(case: Case) -> torch.Tensor:
    return cases.x_of(1, case.n, case.dtype)[0]


@pytest.mark.parametrize("m", [1, 16, 17, 64])
def test_other_plans_are_free_of_faults_too(m: int) -> None:
    case = CASES[4] if m in (1, 17) else WIDE_K
    weight, x = case.weight(), case.x(m)
    for planned in list(cases.other_plans(m, weight, MAX_SHARED))[-3:]:
        run(x, weight, planned=planned, through=Traced())


@pytest.mark.parametrize("m", [1, 16, 17, 64])
def test_shared_memory_is_what_the_plan_says_and_no_more(m: int) -> None:
    case = replace(CASES[0], k=6400)  # enough k tiles a slice to fill every stage
    weight, x = case.weight(), case.x(m)
    out = torch.empty(m, case.n, dtype=HALF)
    launch = next(tlaunch.launches(x, weight, out))
    assert launch.trace().ok
    short = replace(launch, shared_bytes=launch.shared_bytes - 16).trace()
    assert "out-of-bounds" in {fault.kind for fault in short.faults}, short.report()


def test_a_wrong_launch_is_caught_by_the_assertions() -> None:
    case = CASES[0]
    for m in (1, 17):
        weight, x = case.weight(), case.x(m)
        launch = checked(next(tlaunch.launches(x, weight, torch.empty(m, case.n, dtype=HALF))))
        trace = replace(launch, block=(launch.block[0] + 16,)).trace()
        assert not trace.ok and "assert" in trace.report()


@pytest.mark.parametrize(
    ("m", "k", "right", "wrong", "kinds"),
    [
        # The rack is added up before every warp has filled it.
        (
            1,
            1536,
            "    __syncthreads();\n    if (threadIdx.x < FOLD_THREADS) {\n",
            "    if (threadIdx.x < FOLD_THREADS) {\n",
            "race",
        ),
        # A half's sums are read before the warp that made them has left them.
        (1, 512, "    __syncthreads();\n#endif\n", "#endif\n", "race"),
        # A stage is overwritten while another warp still reads it.
        (
            17,
            1536,
            "cp_async_wait<STAGES - 2>();\n        __syncthreads();",
            "cp_async_wait<STAGES - 2>();",
            "race",
        ),
        # A record is read before its copy has landed.
        (1, 1536, "cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();", "cp.async"),
    ],
)
def test_what_the_barriers_and_waits_are_for(m: int, k: int, right: str, wrong: str, kinds: str) -> None:
    case = replace(CASES[0], k=k)
    weight, x = case.weight(), case.x(m)
    launch = next(tlaunch.launches(x, weight, torch.empty(m, case.n, dtype=HALF)))
    text = launch.source.text
    assert text.count(right) == 1
    source = KernelSource.from_text(
        text.replace(right, wrong), launch.source.entry, launch.source.defines, filename="broken.cu"
    )
    trace = replace(launch, source=source).trace()
    assert not trace.ok and kinds in trace.report(), trace.report()


@pytest.mark.skipif(sys.platform == "win32", reason="needs memory that is reserved and never touched")
@pytest.mark.parametrize("m", [9, 18])
def test_rows_of_x_beyond_2_to_the_31(m: int) -> None:
    case = Case("w4", 128, n=3, k=128)
    weight, x = case.weight(), case.x(m)
    stride = 1 << 28  # of the last row the offset in elements passes 2^31
    memory = torch.from_numpy(untouched(2 * ((m - 1) * stride + case.k)).view(np.float16))
    spread = memory.as_strided((m, case.k), (stride, 1))
    spread.copy_(x)
    assert torch.equal(tlaunch.linear(spread, weight), tlaunch.linear(x, weight))


@pytest.mark.skipif(sys.platform == "win32", reason="needs memory that is reserved and never touched")
def test_tiles_beyond_2_to_the_31() -> None:
    weight = Case("w4", 128, n=32, k=128).weight()
    first = (1 << 32) // weight.record_bytes + 1
    tiles = untouched((first + 1) * weight.record_bytes).reshape(first + 1, 1, weight.record_bytes)
    tiles[first] = weight.tiles[0].numpy()
    dense = np.full((32, 128), np.nan, np.float16)
    source = tlaunch.source("tensor_core_dense", tlaunch.weight_defines(weight, HALF, False))
    runner.load(source, "cpu")((1, 1), (32 * rule.DENSE_WARPS,), [tiles, dense, first, 1])
    assert np.array_equal(dense, weight.dequantize(torch.float64).half().numpy())


# --- through the layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["w4", "w3"])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_forced_through_the_linear_layer(format: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = quantize(torch.randn(48, 200, generator=generator) * 0.05, format, 32, offset=True)
    budget = MemoryBudget(1 << 30)
    bias = torch.randn(48, generator=generator)
    layer = QuantLinear(
        weight, bias, table=DispatchTable.from_params({"force": "tensor_core"}), budget=budget
    )
    for m in (1, 20, rule.DENSE_FROM):
        x = cases.x_of(m, 200, dtype)
        y = layer(x)
        assert layer.last_choice is not None and layer.last_choice.kernel == "tensor_core"
        exact = x.double() @ weight.dequantize(torch.float64).T + bias
        slack = 4 * torch.finfo(dtype).eps * exact.abs().max()
        assert (y.double() - exact).abs().max() <= slack
    assert layer.stats == {"tensor_core": 3}
    assert budget.used == repack(weight).nbytes
    del layer
    gc.collect()
    assert budget.used == 0


def test_every_kernel_is_loaded_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    case = WIDE_K
    weight = case.weight()
    loaded: list[KernelSource] = []
    real = runner.load

    def spy(source: KernelSource, device: Any = "cpu") -> Any:
        loaded.append(source)
        return real(source, device)

    monkeypatch.setattr(runner, "load", spy)
    tlaunch.load(weight, HALF)
    before = set(loaded)
    loaded.clear()
    for m in (1, 8, 9, 16, 17, 32, 33, 64, 65, rule.DENSE_FROM):
        tlaunch.linear(case.x(m), weight)
    assert set(loaded) == before


def test_prepared_weights_are_the_layers() -> None:
    weight = unpack(CASES[5].weight())
    request = register.Request("cpu", None, "w3", "bfloat16", 1, weight, 1 << 20, MemoryBudget(1 << 30))
    prepared = register.prepare(request)
    assert prepared.temp_bytes == 1 << 20 and not prepared.weight.paired
    x = CASES[5].x(3)
    cases.assert_accurate(register.run(x, prepared), x, prepared.weight)
