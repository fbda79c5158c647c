"""The z-split kernels on a GPU: bits of the reference and of the emulator, streams, graphs, large sizes."""

from __future__ import annotations

import pytest
import torch
import zsplit_cases as cases
from torch.nn.functional import linear
from zsplit_cases import weight_of, x_of

from labkit.emulator import toolchain
from labkit.kernels import runner, zsplit
from labkit.kernels.capture import capturing
from labkit.kernels.resources import stated_registers
from labkit.kernels.zsplit import launch as zlaunch
from labkit.kernels.zsplit import reference, rule
from labkit.kernels.zsplit.register import ENTRIES
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear
from labkit.quant.grouped import GroupedWeight

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    # A test run with `-m gpu` on a machine without one must say so, not pass.
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"


# --- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("k", cases.DEPTHS)
def test_float_activations_have_the_bits_of_the_reference(dtype: torch.dtype, k: int) -> None:
    cases.check_float_bits(dtype, k, "cuda")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("k", cases.DEPTHS)
def test_int8_activations_have_the_bits_of_the_reference(dtype: torch.dtype, k: int) -> None:
    cases.check_int8_bits(dtype, k, "cuda")


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_bits_do_not_change_where_the_grid_does(dtype: torch.dtype) -> None:
    cases.check_plan_switches(dtype, "cuda")


def test_the_reduce_with_many_threads_an_output_and_with_one() -> None:
    cases.check_many_outputs("cuda")


@pytest.mark.parametrize("function", [zsplit.zsplit_gemm, zsplit.zsplit_gemm_int8])
@pytest.mark.parametrize(("n", "k", "switches"), [(5632, 2048, 3), (2048, 5632, 2), (151_936, 256, 2)])
def test_bits_of_a_row_are_those_it_has_alone(function, n: int, k: int, switches: int) -> None:
    weight = weight_of(n, k, device="cuda")
    rows = (1, 2, 4, 5, 8, 33, 64, 93, 97, 128)
    x = x_of(rows[-1], k, torch.float16, "cuda")
    alone = function(x[:1], weight)
    for m in rows:
        y = function(x[:m], weight)
        assert torch.equal(y[:1], alone), f"M = {m}"
        assert torch.equal(y[-1:], function(x[m - 1 : m], weight)), f"the last row, M = {m}"
        for level in cases.LEVELS:
            if n <= 5632:
                with cases.forced_grid(level):
                    assert torch.equal(function(x[:m], weight), y), f"M = {m}, a block takes: {level}"
    assert len({zsplit.plan(m, n, k).planes for m in rows}) == switches


@pytest.mark.parametrize("defines", [(), (("DOT_BY_DP4A", 0), ("CODES_A_LOAD", 1))])
def test_integer_path_is_exact_whatever_the_slices(defines: tuple[tuple[str, int], ...]) -> None:
    cases.check_integers("cuda", defines)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_error_is_at_most_twice_that_of_plain_torch(dtype: torch.dtype) -> None:
    cases.check_accurate(dtype, "cuda")


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_identity_gives_the_weight_back(dtype: torch.dtype) -> None:
    cases.check_identity(dtype, "cuda")


def test_extreme_activations() -> None:
    cases.check_extremes("cuda")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1100, 352), (6, 130, 224), (33, 17, 200)])
def test_bits_are_those_of_the_emulator(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    found, _, fix = toolchain.describe()
    if not found:
        pytest.skip(f"no compiler for the emulator: {fix}")
    weight, x = weight_of(n, k), x_of(m, k, dtype)
    there, sent = weight.to("cuda"), x.to("cuda")
    for function in (zsplit.zsplit_gemm, zsplit.zsplit_gemm_int8):
        for which in rule.RULES:
            here = function(x, weight, rule=which)
            assert torch.equal(function(sent, there, rule=which).cpu(), here), f"{function.__name__}, {which}"
    for mine, other in zip(zsplit.quantize_activations(sent), zsplit.quantize_activations(x)):
        assert torch.equal(mine.cpu(), other)


# --- launches ---------------------------------------------------------------------------------------------


def test_two_streams_at_once_give_what_each_gives_alone() -> None:
    weight = weight_of(1000, 3584, device="cuda")
    inputs = [x_of(m, 3584, torch.float16, "cuda") for m in (1, 8)]
    alone = [zsplit.zsplit_gemm(x, weight) for x in inputs]
    alone_int8 = [zsplit.zsplit_gemm_int8(x, weight) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i] += [
                    zsplit.zsplit_gemm(inputs[i], weight),
                    zsplit.zsplit_gemm_int8(inputs[i], weight),
                ]
    torch.cuda.synchronize()
    for i, found in enumerate(results):
        assert all(torch.equal(y, alone[i]) for y in found[0::2])
        assert all(torch.equal(y, alone_int8[i]) for y in found[1::2])


def test_work_goes_to_the_current_stream_and_not_to_the_legacy_one() -> None:
    weight = weight_of(256, 512, device="cuda")
    x = torch.zeros(1, 512, dtype=torch.float16, device="cuda")
    expected = zsplit.zsplit_gemm(x_of(1, 512, torch.float16, "cuda"), weight)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(x_of(1, 512, torch.float16), non_blocking=True)
        y = zsplit.zsplit_gemm(x, weight)  # on another stream it would read the zeros
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("function", [zsplit.zsplit_gemm, zsplit.zsplit_gemm_int8])
@pytest.mark.parametrize("m", [1, 8, 33])
def test_a_graph_can_capture_it(function, m: int) -> None:
    weight = weight_of(1000, 1024, device="cuda")
    x = x_of(m, 1024, torch.float16, "cuda")
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        function(x, weight)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        y = function(x, weight)
    for seed in (1, 2, 3):
        x.copy_(x_of(m + seed, 1024, torch.float16)[:m])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, function(x, weight))


def test_a_prepared_layer_can_be_captured_at_its_first_call_with_another_m() -> None:
    layer = QuantLinear(
        weight_of(300, 512, device="cuda"), table=DispatchTable.from_params({"force": "zsplit"})
    )
    layer(x_of(1, 512, torch.float16, "cuda"))
    x = x_of(16, 512, torch.float16, "cuda")
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        y = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, layer(x))


@pytest.mark.parametrize("which", rule.RULES)
def test_slice_sums_stay_under_their_cap(which: str) -> None:
    n, k = 4096, 8192
    codes = torch.ones(k, n, dtype=torch.int8, device="cuda")
    weight = GroupedWeight("q8_0", codes, torch.ones(k // 32, n, device="cuda"), n, k)
    for m in (1, 16, 64, 300):
        x = x_of(m, k, torch.float16, "cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = zsplit.zsplit_gemm(x, weight, rule=which)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before - y.nbytes <= rule.PART_CAP_BYTES + (1 << 20)


def test_registers_of_the_loaded_kernels() -> None:
    for entry in {entry for entries in ENTRIES.values() for entry in entries}:
        for dtype in cases.DTYPES:
            source = zlaunch.source(entry, dtype)
            kernel = runner.load(source, "cuda")
            stated = stated_registers(source)
            assert stated is not None and kernel.registers <= stated and kernel.local_bytes == 0


# --- large sizes ------------------------------------------------------------------------------------------


def needs(gib: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free:.1f} are free")


@pytest.mark.parametrize("m", [1, 5])
def test_codes_beyond_2_to_the_31(m: int) -> None:
    needs(8)
    n, k = 70_000, 32_000
    source = torch.Generator(device="cuda").manual_seed(0)
    codes = torch.randint(-1, 2, (k, n), generator=source, dtype=torch.int8, device="cuda")
    assert codes.numel() > 2**31
    weight = GroupedWeight("q8_0", codes, torch.ones(k // 32, n, device="cuda"), n, k)
    x = torch.randint(-2, 3, (m, k), generator=source, device="cuda").float()
    y = zsplit.zsplit_gemm(x, weight)
    # Small whole numbers: every sum is exact in float32, whatever its order.
    for first in range(0, n, 10_000):
        part = slice(first, first + 10_000)
        exact = x.double() @ codes[:, part].double()
        assert torch.equal(y[:, part].double(), exact)


def test_outputs_beyond_2_to_the_31() -> None:
    needs(24)
    m, n = 100_000, 22_016
    codes = torch.randint(-8, 8, (32, n), dtype=torch.int8, device="cuda")
    weight = GroupedWeight("q4_0", codes, torch.ones(1, n, device="cuda"), n, 32)
    x = torch.randint(-2, 3, (m, 32), device="cuda").half()
    y = zsplit.zsplit_gemm(x, weight)
    for first in (0, 50_000, 97_000, 99_999):
        rows = slice(first, first + 3000)
        assert torch.equal(y[rows].float(), x[rows].float() @ codes.float())


def test_more_rows_than_a_grid_has() -> None:
    m = rule.MAX_BAND_ROWS + 5
    weight = weight_of(3, 32, device="cuda")
    x = x_of(m, 32, torch.float32, "cuda")
    y = zsplit.zsplit_gemm(x, weight)
    picked = torch.tensor([0, 99_999, rule.MAX_BAND_ROWS - 1, rule.MAX_BAND_ROWS, m - 1], device="cuda")
    assert torch.equal(y[picked], reference.float_reference(x[picked], weight, 1))


# --- through the layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_dispatch_table_chooses_it_and_the_result_is_right(form: str, dtype: torch.dtype) -> None:
    weight = weight_of(130, 224, form, "cuda")
    layer = QuantLinear(weight)
    for m in (1, 2, 8, 31, 33, 64):
        x = x_of(m, 224, dtype, "cuda")
        y = layer(x)
        choice = layer.last_choice
        assert choice is not None and choice.kernel in ("zsplit", "dequant_matmul")
        exact = linear(x.double(), weight.dequantize(torch.float64))
        slack = 4 * torch.finfo(dtype).eps * exact.abs().max() + 1e-5
        assert (y.double() - exact).abs().max() <= slack
    assert layer.stats["zsplit"] >= 1
    forced = QuantLinear(weight, table=DispatchTable.from_params({"force": "zsplit_int8"}))
    x = x_of(5, 224, dtype, "cuda")
    exact = linear(x.double(), weight.dequantize(torch.float64))
    assert (forced(x).double() - exact).abs().max() <= 0.03 * exact.abs().max()
