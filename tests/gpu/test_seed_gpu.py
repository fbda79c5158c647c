"""The W4/W3 seed kernels on a GPU: the emulator's cases, and what only a GPU has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import seed_cases
import torch
from seed_cases import CASES, Case

from labkit.emulator import toolchain
from labkit.errors import InputError
from labkit.kernels.capture import capturing
from labkit.kernels.seed.launch import KERNELS, SeedKernel, plan
from labkit.kernels.seed.linear import NAMES, gemv_single_row
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear
from labkit.quant import QuantWeight

pytestmark = pytest.mark.gpu

PAIRS = [(name, format) for name, formats in NAMES.items() for format in formats]


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    # A test run with `-m gpu` on a machine without one must say so, not pass.
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"


def need_memory(size: float) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < size:
        pytest.skip(f"needs {size / 2**30:.1f} GiB of GPU memory, {free / 2**30:.1f} GiB are free")


# --- the emulator's cases ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_identity_poison_guards_and_repeats(case: Case) -> None:
    seed_cases.check_case(case, "cuda")


@pytest.mark.parametrize("entry", KERNELS)
def test_large_activations(entry: str) -> None:
    seed_cases.check_large_activations(entry, "cuda")


@pytest.mark.parametrize("format", ["w4", "w3"])
def test_a_row_does_not_know_its_batch(format: str) -> None:
    seed_cases.check_a_row_does_not_know_its_batch(format, "cuda")


@pytest.mark.parametrize("entry", KERNELS)
def test_padding_is_never_read(entry: str) -> None:
    seed_cases.check_padding_is_never_read(entry, "cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_emulator_gives_the_same_bits(case: Case) -> None:
    """One source, two runners: every multiply and add is spelled out, so nothing is left to a compiler."""
    try:
        toolchain.find()
    except InputError as error:
        pytest.skip(str(error))
    for weight in case.weights():
        x = seed_cases.random_x(37, weight.k)
        here = plan(case.kernel, x, weight).run()
        there = plan(case.kernel, x.cuda(), weight.to("cuda")).run()
        assert torch.equal(there.cpu(), here)


# --- realistic shapes -------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", KERNELS)
@pytest.mark.parametrize(("n", "k", "group"), [(5632, 2048, 128), (2049, 5632, 64)])
def test_realistic_shapes(entry: str, n: int, k: int, group: int) -> None:
    kernel = KERNELS[entry]
    weight = seed_cases.random_weight(kernel.format, n, k, group, torch.float16).to("cuda")
    for m in (1, 8, 30):
        x = seed_cases.random_x(m, k).cuda()
        seed_cases.check_accurate(plan(kernel, x, weight).run(), x, weight)


def test_a_hundred_thousand_rows() -> None:
    for entry in ("gemm_tiled_w4", "gemm_tiled_w3", "gemv_batch_w4"):
        kernel = KERNELS[entry]
        weight = seed_cases.random_weight(kernel.format, 65, 96, 32, None).to("cuda")
        x = torch.randn(100_000, 96, device="cuda", dtype=torch.float16)
        launched = seed_cases.launch(kernel, x, weight)
        seed_cases.check_accurate(launched.run(), x, weight)
        seed_cases.check_written(launched)
    for format in ("w4", "w3"):  # a row of blocks a row of x: two launches
        weight = seed_cases.random_weight(format, 65, 96, 32, None).to("cuda")
        seed_cases.check_accurate(gemv_single_row(x, weight), x, weight)


# --- more than 2^31 elements ------------------------------------------------------------------------


def check_some_rows(kernel: SeedKernel, x: torch.Tensor, weight: QuantWeight) -> None:
    """The whole product, compared in the first and last columns and rows."""
    y = plan(kernel, x, weight).run()
    m, n = y.shape
    columns = torch.tensor(sorted({*range(min(40, n)), *range(max(0, n - 40), n)}), device="cuda")
    rows = torch.tensor(sorted({*range(min(40, m)), *range(max(0, m - 40), m)}), device="cuda")
    part = weight.select_rows(columns)
    seed_cases.check_accurate(y[rows][:, columns], x[rows], part)


@pytest.mark.parametrize("entry", KERNELS)
def test_a_weight_of_more_than_2_31_bytes(entry: str) -> None:
    kernel = KERNELS[entry]
    k, bits = 32_768, 4 if kernel.format == "w4" else 3
    n = 2**31 * 8 // bits // k + 65
    need_memory(1.6 * n * k * bits / 8)
    packed = torch.empty(n, k * bits // 8, dtype=torch.uint8, device="cuda").random_(0, 256)
    assert packed.numel() > 2**31
    scales = torch.rand(n, k // 128, device="cuda").half() * 0.01
    weight = QuantWeight(kernel.format, packed, scales, None, n, k, 128)
    check_some_rows(kernel, torch.randn(3, k, device="cuda", dtype=torch.float16), weight)


@pytest.mark.parametrize("entry", ["gemm_tiled_w4", "gemm_tiled_w3", "gemv_batch_w4", "gemv_batch_w3"])
def test_an_output_of_more_than_2_31_elements(entry: str) -> None:
    kernel = KERNELS[entry]
    m, n, k = 100_000, 21_505, 32
    need_memory(2.2 * m * n)
    weight = seed_cases.random_weight(kernel.format, n, k, 32, None).to("cuda")
    check_some_rows(kernel, torch.randn(m, k, device="cuda", dtype=torch.float16), weight)


@pytest.mark.parametrize("entry", ["gemm_tiled_w4", "gemm_tiled_w3", "gemv_batch_w4", "gemv_batch_w3"])
def test_activations_of_more_than_2_31_elements(entry: str) -> None:
    kernel = KERNELS[entry]
    m, n, k = 100_000, 33, 22_016
    need_memory(2.2 * m * k)
    weight = seed_cases.random_weight(kernel.format, n, k, 128, None).to("cuda")
    check_some_rows(kernel, torch.randn(m, k, device="cuda", dtype=torch.float16), weight)


@pytest.mark.parametrize("format", ["w4", "w3"])
def test_as_many_rows_as_a_grid_takes(format: str) -> None:
    kernel = KERNELS[f"gemv_row_{format}"]
    weight = seed_cases.random_weight(format, 9, 32, 32, None).to("cuda")
    x = torch.randn(65_535, 32, device="cuda", dtype=torch.float16)
    seed_cases.check_accurate(plan(kernel, x, weight).run(), x, weight)
    with pytest.raises(InputError, match="at most 65535 rows"):
        plan(kernel, torch.cat([x, x[:1]]), weight)


# --- QuantLinear ------------------------------------------------------------------------------------


def layer_of(format: str, table: DispatchTable | None = None, offset: bool = True) -> QuantLinear:
    kind = torch.float16 if offset else None
    return QuantLinear(seed_cases.random_weight(format, 1000, 512, 128, kind), table=table).to("cuda")


@pytest.mark.parametrize("format", ["w4", "w3"])
def test_the_table_picks_by_rows(format: str) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the rows of the table begin at compute capability 8.0")
    layer = layer_of(format)
    capability = torch.cuda.get_device_capability()
    for m in (1, 2, 8, 9, 64):
        x = seed_cases.random_x(m, 512).cuda()
        seed_cases.check_accurate(layer(x), x, layer.weight)
        first = layer.table.candidates("cuda", capability, format, "float16", m)[0]
        assert layer.last_choice is not None and layer.last_choice.kernel == first.kernel
        assert layer.last_choice.skipped == ()
    seeds = DispatchTable.from_params({"single_row_up_to": 1, "small_batch_up_to": 8})
    layer = layer_of(format, DispatchTable(tuple(row for row in seeds.rows if row.capability != "9.0")))
    for m in (1, 2, 8, 9, 64):
        layer(seed_cases.random_x(m, 512).cuda())
    quoted = {"gemv_single_row": 1, "gemv_small_batch": 2, "gemm_tiled": 2}
    assert dict(layer.stats) == quoted, layer.explain()


@pytest.mark.parametrize(
    ("name", "format"), [(name, form) for name, forms in NAMES.items() for form in forms]
)
def test_forced_kernels_strides_column_order_and_bias(name: str, format: str) -> None:
    table = DispatchTable.from_params({"force": name})
    layer = layer_of(format, table)
    x = seed_cases.random_x(12, 512).cuda()
    y = layer(x)
    seed_cases.check_accurate(y, x, layer.weight)
    assert layer.stats == {name: 1}
    wide = torch.zeros(12, 1024, device="cuda", dtype=torch.float16)
    wide[:, ::2] = x
    assert torch.equal(layer(wide[:, ::2]), y)
    odd = torch.zeros(12 * 512 + 1, device="cuda", dtype=torch.float16)[1:].view(12, 512)
    odd.copy_(x)
    assert torch.equal(layer(odd), y)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0)).cuda()
    permuted = QuantLinear(replace(layer.weight, k_order=order), table=table, temp_bytes=1)
    assert torch.equal(permuted(x), layer(x[:, order]))
    bias = torch.randn(1000, device="cuda").half()
    assert torch.equal(QuantLinear(layer.weight, bias, table=table)(x), y + bias)


def test_other_dtypes_take_the_fallback() -> None:
    layer = layer_of("w4")
    for dtype in (torch.bfloat16, torch.float32):
        layer(torch.zeros(1, 512, device="cuda", dtype=dtype))
        assert layer.last_choice is not None and layer.last_choice.kernel == "dequant_matmul"


# --- streams and graphs -----------------------------------------------------------------------------


def each_name(test: Callable[[QuantLinear, int], None]) -> None:
    for name, format in PAIRS:
        layer = layer_of(format, DispatchTable.from_params({"force": name}))
        layer(torch.zeros(8, 512, device="cuda", dtype=torch.float16))  # compiled and loaded
        torch.cuda.synchronize()
        test(layer, 8)


def test_nothing_waits_for_the_gpu() -> None:
    def check(layer: QuantLinear, m: int) -> None:
        x = seed_cases.random_x(m, 512).cuda()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    each_name(check)


def test_work_is_queued_on_the_current_stream() -> None:
    """The input is written late on a side stream; a launch on any other stream would read zeros."""

    def check(layer: QuantLinear, m: int) -> None:
        value = seed_cases.random_x(m, 512).cuda()
        expected = layer(value)
        x = torch.zeros_like(value)
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.copy_(value)
            y = layer(x)
        side.synchronize()
        assert torch.equal(y, expected)

    each_name(check)


def test_two_streams_interleaved() -> None:
    def check(layer: QuantLinear, m: int) -> None:
        inputs = [seed_cases.random_x(m, 512, seed=100 * i).cuda() for i in range(2)]
        expected = [layer(x) for x in inputs]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        results: list[list[torch.Tensor]] = [[], []]
        for _ in range(100):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    results[i].append(layer(inputs[i]))
        torch.cuda.synchronize()
        for i in range(2):
            assert all(torch.equal(y, expected[i]) for y in results[i])

    each_name(check)


def test_a_captured_graph_replays_with_new_inputs() -> None:
    def check(layer: QuantLinear, m: int) -> None:
        x = seed_cases.random_x(m, 512).cuda()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(x)  # warm-up, as torch asks for
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            y = layer(x)
        for seed in (1, 2, 3):
            x.copy_(seed_cases.random_x(m, 512, seed=seed).cuda())
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, layer(x))

    each_name(check)
