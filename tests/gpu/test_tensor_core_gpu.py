"""The tensor-core family on a GPU: accuracy, bits, streams, graphs, large sizes, the layer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import tensor_core_cases as cases
import torch
from tensor_core_cases import BFLOAT, CASES, F32, HALF, Case, checked, run

from labkit.emulator import toolchain
from labkit.kernels import runner
from labkit.kernels.capture import capturing
from labkit.kernels.launch import Launch
from labkit.kernels.resources import stated_registers
from labkit.kernels.tensor_core import launch as tlaunch
from labkit.kernels.tensor_core import rule
from labkit.kernels.tensor_core.reference import linear_reference
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear
from labkit.quant import QuantWeight, quantize, repack
from labkit.quant.tiles import TileWeight

pytestmark = pytest.mark.gpu

# Few kinds of weight: most of the time goes into compiling.
PLAIN = Case("w4", 128, n=3584, k=3584)
THREE = Case("w3", 128, n=2048, k=5632)  # few row tiles and a long K: split over blocks at M <= 16
HEAVY = Case("w4", 32, F32, BFLOAT, paired=True, n=1402, k=1000)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    # A test run with `-m gpu` on a machine without one must say so, not pass.
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"


def needs(gib: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free:.1f} are free")


# --- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        PLAIN,
        THREE,
        HEAVY,
        replace(PLAIN, n=601, k=576),
        replace(PLAIN, n=1, k=1),
        replace(THREE, n=31, k=1536),
    ],
    ids=str,
)
def test_error_is_at_most_twice_that_of_plain_torch(case: Case) -> None:
    cases.check_accurate(case, cases.ROWS, "cuda")


@pytest.mark.parametrize("case", [PLAIN, THREE, HEAVY], ids=str)
def test_bits_of_a_row_are_those_it_has_alone(case: Case) -> None:
    cases.check_rows_alone(case, [*range(1, 65), 65, 100, rule.DENSE_FROM - 1], "cuda")


@pytest.mark.parametrize("m", [1, 16, 64])
def test_bits_do_not_depend_on_the_gpu(m: int) -> None:
    weight = replace(PLAIN, n=200, k=4400).weight("cuda")
    x = cases.x_of(m, 4400, HALF, "cuda")
    expected = run(x, weight)
    most = tlaunch.device_facts(weight.device).shared_bytes
    for planned in cases.other_plans(m, weight, most):
        assert torch.equal(run(x, weight, planned=planned), expected), planned


@pytest.mark.parametrize("case", [replace(PLAIN, n=70, k=4400), replace(HEAVY, paired=False, n=70)], ids=str)
def test_sums_are_made_in_the_documented_order(case: Case) -> None:
    cases.check_order(case, (1, 9, 33), "cuda")


def test_views_of_x() -> None:
    cases.check_views("cuda")


def test_extreme_activations() -> None:
    cases.check_extremes("cuda")


@pytest.mark.parametrize("case", [CASES[0], HEAVY, replace(PLAIN, n=40, k=4400)], ids=str)
def test_bits_beside_those_of_the_emulator(case: Case, record_property: Any) -> None:
    """A tensor core adds up its 16 products in its own way: close, and how often equal is recorded."""
    found, _, fix = toolchain.describe()
    if not found:
        pytest.skip(f"no compiler for the emulator: {fix}")
    case = replace(case, n=min(case.n, 70))
    shares = {}
    for m in (1, 9, 17, 33):
        weight, x = case.weight(), case.x(m)
        here, there = run(x, weight), run(x.cuda(), case.weight("cuda")).cpu()
        eps = torch.finfo(case.dtype).eps
        torch.testing.assert_close(there, here, rtol=2 * eps, atol=2 * eps * here.abs().max().item())
        shares[m] = round((there == here).double().mean().item(), 4)
    record_property(f"equal to the emulator, {case}", json.dumps(shares))
    print(f"equal to the emulator, {case}: {shares}")
    assert min(shares.values()) > 0.9


def test_every_code_and_scale_arrives() -> None:
    """A product with the identity is the weight, on every path."""
    case = replace(HEAVY, paired=False, dtype=HALF, n=70, k=200)
    weight = case.weight("cuda")
    meant = weight.dequantize(torch.float64).half()
    eye = torch.eye(200, device="cuda").half()
    assert torch.equal(tlaunch.linear(eye, weight).T, meant)
    for band in (8, 16, 32, 64):
        y = torch.cat([run(eye[i : i + band], weight) for i in range(0, 200, band)])
        assert torch.equal(y.T, meant)


def test_assertions_hold_in_a_checked_build() -> None:
    weight = PLAIN.weight("cuda")
    for m in (1, 33):
        x = PLAIN.x(m, "cuda")
        y = run(x, weight, through=lambda launch: checked(launch).run())
        assert torch.equal(y, run(x, weight))
    torch.cuda.synchronize()


# --- launches ---------------------------------------------------------------------------------------------


def test_two_streams_a_thousand_times_give_what_each_gives_alone() -> None:
    weight = THREE.weight("cuda")
    inputs = [THREE.x(m, "cuda") for m in (1, 20)]
    alone = [tlaunch.linear(x, weight) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    differ = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(1000):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                y = tlaunch.linear(inputs[i], weight)
                differ[i] += (y.view(torch.int16) != alone[i].view(torch.int16)).sum()
    torch.cuda.synchronize()
    assert [int(count) for count in differ] == [0, 0]


def test_work_goes_to_the_current_stream() -> None:
    weight = PLAIN.weight("cuda")
    expected = tlaunch.linear(PLAIN.x(1, "cuda"), weight)
    x = torch.zeros_like(PLAIN.x(1, "cuda"))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(PLAIN.x(1), non_blocking=True)
        y = tlaunch.linear(x, weight)  # on another stream it would read the zeros
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("case", [PLAIN, THREE], ids=str)
@pytest.mark.parametrize("m", [1, 33, rule.DENSE_FROM])
def test_a_graph_replays_with_changed_inputs(case: Case, m: int) -> None:
    weight = case.weight("cuda")
    tlaunch.load(weight, HALF)
    x, residual = case.x(m, "cuda"), cases.x_of(m, case.n, HALF, "cuda")
    if m == rule.DENSE_FROM:
        tlaunch.linear(x, weight)  # cuBLAS makes its workspace at the first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        y = tlaunch.linear(x, weight, residual=residual)
        z = tlaunch.linear(x * 2, weight, residual=y)  # reads what the launch ahead of it writes
    for seed in range(3):
        x.copy_(torch.randn(m, case.k, generator=torch.Generator().manual_seed(seed)))
        residual.fill_(seed)
        graph.replay()
        torch.cuda.synchronize()
        meant = tlaunch.linear(x, weight, residual=residual)
        again = tlaunch.linear(x * 2, weight, residual=meant)
        if m == rule.DENSE_FROM:  # cuBLAS may choose another kernel in a capture
            torch.testing.assert_close((y, z), (meant, again), rtol=0.01, atol=0.1)
        else:
            assert torch.equal(y, meant) and torch.equal(z, again)


@pytest.mark.parametrize("m", [1, 16, 33])
def test_launches_that_overlap_have_the_same_bits(m: int) -> None:
    """A chain in which every product reads the one before it, and adds to it in place."""
    square = replace(PLAIN, n=1024, k=1024)
    weights = [square.weight("cuda"), replace(square, format="w3").weight("cuda")]

    def chain(overlap: bool) -> list[torch.Tensor]:
        made = []
        x = cases.x_of(m, 1024, HALF, "cuda")
        for i in range(40):
            out = torch.empty_like(x)
            for launch in tlaunch.launches(x, weights[i % 2], out, residual=x):
                replace(launch, overlap=overlap).run()
            x = out / out.abs().max() if i % 3 == 0 else out * 0.5
            made.append(x.clone())
        return made

    apart = chain(False)
    for _ in range(5):
        for one, other in zip(chain(True), apart):
            assert torch.equal(one, other)


def test_a_split_product_may_follow_itself_at_once() -> None:
    """Partial sums come from the allocator's pool: the next call's are where this one's were."""
    weight = THREE.weight("cuda")
    inputs = [THREE.x(1, "cuda") * scale for scale in (1, 2, 3)]
    meant = []
    for x in inputs:
        meant.append(tlaunch.linear(x, weight))
        torch.cuda.synchronize()
    assert tlaunch.plan_for(1, weight).planes > 1
    for _ in range(200):
        results = [tlaunch.linear(x, weight) for x in inputs]
        assert all(torch.equal(y, other) for y, other in zip(results, meant))


def test_registers_of_the_loaded_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    real = runner.load

    def spy(source: Any, device: Any = "cpu") -> Any:
        loaded.append(real(source, device))
        return loaded[-1]

    monkeypatch.setattr(runner, "load", spy)
    for case in (PLAIN, HEAVY):
        tlaunch.load(case.weight("cuda"), case.dtype)
    for kernel in loaded:
        stated = stated_registers(kernel.source)
        assert stated is not None and kernel.registers <= stated and kernel.local_bytes == 0, kernel


# --- large sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 9, 33])
def test_a_weight_of_more_than_2_to_the_31_elements(m: int) -> None:
    needs(20)
    n, k = 70_016, 32_768
    first = replace(PLAIN, n=32, k=k).weight("cuda")
    # The same record row for every row tile but the last, which lies beyond 2^31 elements and 2^30 bytes.
    tiles = first.tiles.expand(n // 32, -1, -1).clone()
    last = Case("w4", 128, n=64, k=k).weight("cuda").tiles[1:]
    tiles[-1:] = last
    weight = TileWeight("w4", tiles, n, k, 128, 128)
    assert n * k > 2**31
    x = cases.x_of(m, k, HALF, "cuda")
    y = tlaunch.linear(x, weight)
    assert torch.equal(y[:, :32].repeat(1, n // 32 - 1), y[:, :-32])
    small = TileWeight("w4", tiles[-2:].contiguous(), 64, k, 128, 128)
    cases.assert_accurate(y[:, -64:], x, small)


def test_a_hundred_thousand_rows() -> None:
    case = Case("w4", 128, n=33, k=200)
    weight, x = case.weight("cuda"), case.x(100_000, "cuda")
    y = tlaunch.linear(x, weight)
    cases.assert_accurate(y, x, weight)


def test_rows_of_x_beyond_2_to_the_31() -> None:
    needs(20)
    case = Case("w4", 128, n=3, k=128)
    weight, x = case.weight("cuda"), case.x(9, "cuda")
    memory = torch.empty(8 * (1 << 29) + 128, dtype=HALF, device="cuda")
    spread = memory.as_strided((9, 128), (1 << 29, 1))
    spread.copy_(x)
    assert torch.equal(tlaunch.linear(spread, weight), tlaunch.linear(x, weight))


# --- through the layer ------------------------------------------------------------------------------------


def stored(format: str, group: int, n: int = 256, k: int = 512) -> QuantWeight:
    original = torch.randn(n, k, generator=torch.Generator().manual_seed(1)) * 0.05
    weight = quantize(original, format, group)
    assert isinstance(weight, QuantWeight)
    return weight.to("cuda")


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("format", ["w4", "w3"])
def test_the_dispatch_table_chooses_it(format: str, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (9, 0) and dtype == HALF:
        pytest.skip("on 8.x half activations stay with the seed kernels")
    layer = QuantLinear(stored(format, 128))
    for m in (1, 33, 512):
        x = cases.x_of(m, 512, dtype, "cuda")
        y = layer(x)
        assert layer.last_choice is not None and layer.last_choice.kernel == "tensor_core", layer.explain()
        cases.assert_accurate(y, x, repack(stored(format, 128)))


def test_a_group_without_tiles_falls_back_by_name() -> None:
    layer = QuantLinear(stored("w4", 16))
    layer(cases.x_of(3, 512, HALF, "cuda"))
    choice = layer.last_choice
    assert choice is not None and choice.kernel != "tensor_core"
    if torch.cuda.get_device_capability() >= (9, 0):
        assert "group_size: got 16" in dict(choice.skipped)["tensor_core"]


def test_forced_on_any_card_that_has_it() -> None:
    layer = QuantLinear(stored("w4", 128), table=DispatchTable.from_params({"force": "tensor_core"}))
    x = cases.x_of(3, 512, HALF, "cuda")
    y = layer(x)
    exact = linear_reference(x, repack(stored("w4", 128)))
    assert (y.double() - exact).abs().max() <= 2 * torch.finfo(HALF).eps * exact.abs().max()


def test_launch_runs_what_it_says() -> None:
    """The launches of a call, by hand, give what the call gives."""
    weight, x = THREE.weight("cuda"), THREE.x(4, "cuda")
    out = torch.empty(4, THREE.n, dtype=HALF, device="cuda")
    found = list(tlaunch.launches(x, weight, out))
    assert [type(launch) for launch in found] == [Launch] * 2 and all(launch.overlap for launch in found)
    for launch in found:
        launch.run()
    assert torch.equal(out, tlaunch.linear(x, weight))
