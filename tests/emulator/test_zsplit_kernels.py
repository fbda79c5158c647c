"""The z-split kernels in the emulator: bits, integers, launches, and no race and no access out of bounds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import zsplit_cases as cases
from seed_cases import untouched
from zsplit_cases import gemm, weight_of, x_of

from labkit.kernels import runner, zsplit
from labkit.kernels.source import KernelSource
from labkit.kernels.zsplit import launch as zlaunch
from labkit.kernels.zsplit import reference
from labkit.kernels.zsplit.launch import Launch, gemm_launches, int8_launches, quantize_launch
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear

BYTES = (("CODES_A_LOAD", 1),)


# --- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("k", cases.DEPTHS)
def test_float_activations_have_the_bits_of_the_reference(dtype: torch.dtype, k: int) -> None:
    cases.check_float_bits(dtype, k)


@pytest.mark.parametrize(("dtype", "k"), [(torch.float16, 224), (torch.float32, 200), (torch.bfloat16, 31)])
def test_int8_activations_have_the_bits_of_the_reference(dtype: torch.dtype, k: int) -> None:
    cases.check_int8_bits(dtype, k)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_bits_do_not_change_where_the_grid_does(dtype: torch.dtype) -> None:
    cases.check_plan_switches(dtype)


def test_the_reduce_with_many_threads_an_output_and_with_one() -> None:
    cases.check_many_outputs()


@pytest.mark.parametrize("defines", [(), (("DOT_BY_DP4A", 0), *BYTES)])
def test_integer_path_is_exact_whatever_the_slices(defines: tuple[tuple[str, int], ...]) -> None:
    cases.check_integers(defines=defines)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_error_is_at_most_twice_that_of_plain_torch(dtype: torch.dtype) -> None:
    cases.check_accurate(dtype)


def test_extreme_activations() -> None:
    cases.check_extremes()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_identity_gives_the_weight_back(dtype: torch.dtype) -> None:
    cases.check_identity(dtype)


def test_bits_of_a_row_depend_on_the_batch_under_the_seeds_rule_only() -> None:
    weight, x = weight_of(600, 1024), x_of(64, 1024, torch.float32)
    alone = {rule: zsplit.zsplit_gemm(x[:1], weight, rule=rule) for rule in ("seed", "invariant")}
    assert zsplit.seed_nsplit(1, 600, 1024) != zsplit.seed_nsplit(64, 600, 1024)
    assert not torch.equal(zsplit.zsplit_gemm(x, weight, rule="seed")[:1], alone["seed"])
    seen = set()
    for m in (2, 9, 64):
        seen.add(zsplit.plan(m, 600, 1024).planes)
        assert torch.equal(zsplit.zsplit_gemm(x[:m], weight)[:1], alone["invariant"])
    assert seen == {32, 16}, "the rule's plans should differ here"


def test_strided_empty_and_banded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of(17, 200), x_of(9, 200, torch.float16)
    expected = zsplit.zsplit_gemm(x, weight)
    wide = torch.zeros(200, 18, dtype=torch.float16)
    wide[:, ::2] = x.t()
    assert torch.equal(zsplit.zsplit_gemm(wide[:, ::2].t(), weight), expected)
    assert zsplit.zsplit_gemm(x[:0], weight).shape == (0, 17)
    assert zsplit.zsplit_gemm_int8(x[:0], weight).shape == (0, 17)
    expected_int8 = zsplit.zsplit_gemm_int8(x, weight)
    monkeypatch.setattr(zlaunch, "MAX_BAND_ROWS", 4)  # bands of 4, 4 and 1 rows
    assert torch.equal(zsplit.zsplit_gemm(x, weight), expected)
    assert torch.equal(zsplit.zsplit_gemm_int8(x, weight), expected_int8)


def test_a_hundred_thousand_rows() -> None:
    weight, x = weight_of(3, 32), x_of(100_000, 32, torch.float32)
    y = gemm(x, weight)
    picked = torch.tensor([0, 1, 65_535, 65_536, 99_998, 99_999])
    assert torch.equal(y[picked], reference.float_reference(x[picked], weight, 1))
    exact = x.double() @ weight.dequantize(torch.float64).t()
    assert (y.double() - exact).abs().max() < 1e-4


@pytest.mark.skipif(sys.platform == "win32", reason="needs memory that is reserved and never touched")
@pytest.mark.parametrize("entry", ["zsplit_gemm", "zsplit_gemm_int8"])
def test_offsets_beyond_2_to_the_31(entry: str) -> None:
    padded, k = 1 << 26, 64  # 4 GiB of codes, of which a page a row is touched
    codes, scales = untouched(k * padded).view(np.int8), untouched(2 * padded * 4).view(np.float32)
    small = np.random.default_rng(0).integers(-127, 128, (k, 16)).astype(np.int8)
    for row in range(k):
        codes[row * padded : row * padded + 16] = small[row]
    scales[:16] = scales[padded : padded + 16] = 0.5
    x = np.random.default_rng(1).integers(-8, 8, (2, k)).astype(np.int8)
    if entry == "zsplit_gemm":
        activations = [x.astype(np.float32)]
    else:
        activations = [x, np.ones((2, 2), np.float32)]
    out = np.full((2, 16), np.nan, np.float32)
    kernel = runner.load(zlaunch.source(entry, torch.float32), "cpu")
    kernel((1, 1, 1), (64, 4), [codes, scales, *activations, out, None, 2, 16, padded, k, 1, 1, 2, 1])
    assert np.array_equal(out, 0.5 * (x.astype(np.float32) @ small.astype(np.float32)))


# --- through the layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
def test_forced_through_the_linear_layer(form: str) -> None:
    weight, x = weight_of(33, 96, form), x_of(5, 96, torch.float16)
    dense = x.double() @ weight.dequantize(torch.float64).t()
    for name, slack in (("zsplit", 2e-3), ("zsplit_int8", 2e-2)):
        layer = QuantLinear(weight, table=DispatchTable.from_params({"force": name}))
        y = layer(x)
        assert layer.last_choice is not None and layer.last_choice.kernel == name
        assert (y.double() - dense).abs().max() <= slack * dense.abs().max()
        for m in (1, 40):
            layer(x_of(m, 96, torch.float16))
        assert layer.stats == {name: 3}
    unforced = QuantLinear(weight)
    unforced(x)
    assert unforced.last_choice is not None and "zsplit" not in unforced.last_choice.kernel


# --- traced -----------------------------------------------------------------------------------------------


def traced(launches: Iterator[Launch]) -> list:
    """Trace launches in order; each must be free of faults."""
    traces = []
    for launch in launches:
        trace = launch.trace()
        assert trace.ok, trace.report()
        assert trace.blocks_traced == trace.blocks_total
        traces.append(trace)
    return traces


@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("level", cases.LEVELS)
def test_no_race_and_nothing_out_of_bounds(m: int, level: str) -> None:
    dtype, (n, k) = torch.float16, (130, 200)
    weight, x = weight_of(n, k), x_of(m, k, torch.float16)
    codes, scales = torch.empty(m, 224, dtype=torch.int8), torch.empty(m, 7)
    traced(iter([quantize_launch(x, codes, scales)]))
    assert torch.equal(codes, reference.quantize_reference(x)[0])
    out, out_int8 = torch.empty(m, n, dtype=dtype), torch.empty(m, n, dtype=dtype)
    with cases.forced_grid(level, runs=2):
        float_traces = traced(gemm_launches(x, weight, out, nsplit=5))
        int8_traces = traced(int8_launches(codes, scales, weight, out_int8, nsplit=5))
    launches = 1 if level == "whole" else 2
    assert [trace.kernel for trace in float_traces] == ["zsplit_gemm", "zsplit_reduce"][:launches]
    assert len(int8_traces) == launches
    assert torch.equal(out, reference.float_reference(x, weight, 5, 2))
    assert torch.equal(out_int8, reference.int8_reference(codes, scales, weight, 5, dtype, 2))


def test_the_reduce_reads_every_plane_once_whoever_adds_it() -> None:
    planes, m, n = 37, 3, 96
    part, out = torch.randn(planes, m, n, generator=torch.Generator().manual_seed(6)), torch.empty(m, n)
    for runs in (5, 16, 37):
        (trace,) = traced(iter([zlaunch.reduce_launch(part, out, runs)]))
        assert trace.sectors(buffer="part") == planes * m * n // 8
        sums = [
            functools.reduce(torch.add, part[list(zsplit.run_of(run, planes, runs))]) for run in range(runs)
        ]
        result = functools.reduce(torch.add, sums)
        assert torch.equal(out, result), f"{runs} runs"


@pytest.mark.parametrize(
    ("entry", "right", "wrong"),
    [
        ("zsplit_reduce", "of_run[j * blockDim.x", "of_run[(count - 1 - j) * blockDim.x"),
        ("zsplit_reduce", "cell[plane * total]", "cell[(first + end - plane) * total]"),
        ("zsplit_gemm", "fold(of_run, of_slice, slice == begin_slice)", "fold(sum, of_slice, false)"),
    ],
)
def test_another_order_has_other_bits(entry: str, right: str, wrong: str) -> None:
    weight, x = weight_of(64, 992), x_of(5, 992, torch.float32)
    results = []
    for text in (right, wrong):
        out = torch.empty(5, 64)
        with cases.forced_grid("whole" if entry == "zsplit_gemm" else "slice", runs=9):
            for launch in gemm_launches(x, weight, out, nsplit=31):
                if launch.source.name == entry:
                    changed = launch.source.text.replace(right, text)
                    assert (changed == launch.source.text) == (text == right)
                    source = KernelSource.from_text(changed, entry, launch.source.defines)
                    launch = replace(launch, source=source)
                launch.run()
        results.append(out)
    assert torch.equal(results[0], reference.float_reference(x, weight, 31, 9))
    assert not torch.equal(results[1], results[0])


def test_every_slice_in_one_place_is_reported_as_a_race() -> None:
    weight, x = weight_of(17, 96), x_of(2, 96, torch.float16)
    out = torch.empty(2, 17, dtype=torch.float16)
    launch = next(gemm_launches(x, weight, out, nsplit=3))
    right = "static_cast<size_t>(whole ? 0 : blockIdx.z) * M + m"
    assert launch.source.text.count(right) == 1
    wrong = launch.source.text.replace(right, "static_cast<size_t>(m)")
    source = KernelSource.from_text(wrong, "zsplit_gemm", launch.source.defines, filename="one_slice.cu")
    trace = replace(launch, source=source).trace()
    assert not trace.ok and trace.races, trace.report()
    assert "part[at + j]" in wrong.splitlines()[trace.races[0].line - 1]


def test_columns_beyond_n_are_caught_when_their_guard_is_wrong() -> None:
    weight, x = weight_of(17, 96), x_of(2, 96, torch.float16)
    launch = next(gemm_launches(x, weight, torch.empty(2, 17, dtype=torch.float16), nsplit=1))
    assert launch.source.text.count("n0 + j < N") == 1
    text = launch.source.text.replace("n0 + j < N", "n0 + j <= N")
    trace = replace(launch, source=KernelSource.from_text(text, "zsplit_gemm", launch.source.defines)).trace()
    assert {"out-of-bounds", "race"} >= {fault.kind for fault in trace.faults} and not trace.ok


def test_one_char4_load_asks_once_for_sectors_that_byte_loads_ask_for_four_times() -> None:
    n, k = 256, 64
    weight, x = weight_of(n, k), x_of(1, k, torch.float16)
    out = torch.empty(1, n, dtype=torch.float16)
    wide = traced(gemm_launches(x, weight, out, nsplit=1))[0]
    narrow = traced(gemm_launches(x, weight, out, nsplit=1, defines=BYTES))[0]
    codes = {"buffer": "codes_t", "kind": "read"}
    # 64 threads have columns: two warps, each 128 neighbouring bytes a step of k.
    assert wide.requests(**codes) == 2 * k and narrow.requests(**codes) == 4 * 2 * k
    assert wide.sectors(**codes) == wide.compulsory_sectors("codes_t") == n * k // 32
    assert narrow.sectors(**codes) == 4 * wide.sectors(**codes)
    assert narrow.compulsory_sectors("codes_t") == wide.compulsory_sectors("codes_t")
    # The activation is one address for a warp: a sector a request.
    assert wide.sectors(buffer="x") == wide.requests(buffer="x")


# --- the lesson -------------------------------------------------------------------------------------------


def test_atomics_give_the_bits_of_the_order_they_happen_in() -> None:
    nsplit, m, n, k = 8, 3, 130, 256
    weight, x = weight_of(n, k), x_of(m, k, torch.float32)
    kernel = runner.load(KernelSource("lesson/zsplit_atomic.cu"), "cpu")

    def in_order(order: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(m, n)
        for i in range(nsplit):  # a launch a slice: the blocks of one launch run on several cores
            args = [
                weight.codes_t,
                weight.scales_t,
                x,
                out,
                order[i:],
                m,
                n,
                weight.codes_t.shape[1],
                k,
                nsplit,
            ]
            kernel((1, 1, 1), (64, 4), args)
        return out

    orders = [torch.randperm(nsplit, generator=torch.Generator().manual_seed(i)).int() for i in range(6)]
    fixed = zsplit.zsplit_gemm(x, weight, nsplit=nsplit)
    assert torch.equal(in_order(torch.arange(nsplit, dtype=torch.int32)), fixed)
    results = [in_order(order) for order in orders]
    assert len({result.numpy().tobytes() for result in results}) > 1
    for result in results:
        torch.testing.assert_close(result, fixed, rtol=1e-5, atol=1e-5)
