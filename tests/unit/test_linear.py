"""QuantLinear: results against float64, kernel choices, refusals."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

from labkit.errors import InputError
from labkit.kernels import cpu, gpu, registry, runner
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear, choice_counts, explain
from labkit.nn.memory import MemoryBudget, default_budget, free_memory, set_default_budget
from labkit.quant import QuantWeight, quantize

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FALLBACK = DispatchTable.from_params({"force": "dequant_matmul"})


def weight_of(format="w4", n=48, k=128, group=32, offset=False):
    original = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 1000 + k)) * 0.05
    if format in ("q8_0", "q4_0"):
        return quantize(original, format)
    return quantize(original, format, group, offset=offset)


def input_of(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms(value: torch.Tensor) -> float:
    return value.square().mean().sqrt().item()


def assert_accurate(layer: QuantLinear, x: torch.Tensor) -> None:
    """Error against float64 of the same weight at most twice that of plain torch in x's dtype.

    Where plain torch is nearly exact by luck (a few short sums), two roundings are allowed: one of
    the result to its dtype, and one in float32 of the sum of magnitudes.
    """
    y = layer(x)
    weight = layer.weight.dequantize(torch.float64)
    exact = linear(x.double(), weight)
    plain = linear(x, layer.weight.dequantize(x.dtype))
    assert y.dtype == x.dtype and y.shape == exact.shape
    ulp = torch.finfo(x.dtype).eps / 2 * exact.abs()
    rounding = 2.0**-24 * linear(x.double().abs(), weight.abs())
    error, allowed = y.double() - exact, plain.double() - exact
    assert rms(error) <= 2 * max(rms(allowed), rms(rounding), rms(ulp) / 2)
    assert error.abs().max() <= 2 * max(allowed.abs().max(), rounding.max(), ulp.max())


# --- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*((kernel, dtype) for kernel in ("dequant_matmul", "dense") for dtype in DTYPES)]
    + [("int4pack", torch.bfloat16)],
)
@pytest.mark.parametrize(("format", "offset"), [("w4", False), ("w4", True), ("w3", False), ("w3", True)])
@pytest.mark.parametrize("m", [1, 3, 8, 33])
def test_error_is_at_most_twice_that_of_plain_torch(dtype, kernel, format, offset, m):
    if kernel == "int4pack" and cpu.int4pack_missing():
        pytest.skip(cpu.int4pack_missing())
    layer = QuantLinear(
        weight_of(format, 80, 576, 64, offset), table=DispatchTable.from_params({"force": kernel})
    )
    assert_accurate(layer, input_of(m, 576, dtype=dtype))
    assert layer.last_choice.kernel == kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
@pytest.mark.parametrize("kernel", ["dequant_matmul", "dense"])
def test_grouped_formats(dtype, format, kernel):
    layer = QuantLinear(weight_of(format, 37, 70), table=DispatchTable.from_params({"force": kernel}))
    assert_accurate(layer, input_of(5, 70, dtype=dtype))


@pytest.mark.parametrize("format", ["w4", "w3", "q8_0"])
@pytest.mark.parametrize("n", [1, 7, 33])
@pytest.mark.parametrize("k", [1, 13, 129])
@pytest.mark.parametrize("m", [1, 2, 9])
def test_odd_shapes(format, n, k, m):
    for dtype in DTYPES:
        for table in (None, FALLBACK):
            layer = QuantLinear(weight_of(format, n, k, 16, format != "q8_0"), table=table, temp_bytes=4096)
            assert_accurate(layer, input_of(m, k, dtype=dtype))


@pytest.mark.parametrize("group", [16, 32, 64, 128, "row"])
def test_group_sizes(group):
    for format in ("w4", "w3"):
        assert_accurate(QuantLinear(weight_of(format, 33, 200, group), table=FALLBACK), input_of(3, 200))


@pytest.mark.parametrize("temp_bytes", [1, 5_000, 100_000, 1 << 24])
def test_chunks_of_any_size_agree(temp_bytes):
    weight = weight_of("w3", 65, 100, offset=True)
    x = input_of(50, 100)
    layer = QuantLinear(weight, table=FALLBACK, temp_bytes=temp_bytes)
    torch.testing.assert_close(layer(x), linear(x, weight.dequantize()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_activations(dtype):
    weight = weight_of(k=64)
    x = torch.full((2, 64), 6e4).to(dtype)
    x[:, 1::2] *= -1
    assert torch.isfinite(QuantLinear(weight)(x)).all()
    assert_accurate(QuantLinear(weight, table=FALLBACK), x)


def test_leading_dimensions_and_strides():
    weight = weight_of()
    layer = QuantLinear(weight, table=FALLBACK)
    x = input_of(2, 3, 128)
    expected = layer(x)
    assert expected.shape == (2, 3, 48)
    assert torch.equal(layer(x[0, 0]), layer(x[0, :1])[0])
    wide = torch.zeros(2, 3, 256)
    wide[..., ::2] = x
    torch.testing.assert_close(layer(wide[..., ::2]), expected)
    torch.testing.assert_close(layer(x.transpose(0, 1)), expected.transpose(0, 1))
    torch.testing.assert_close(layer(x[:, :1].expand(2, 4, 128))[:, 3], expected[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype):
    layer = QuantLinear(weight_of(), torch.ones(48))
    for shape in ((0, 128), (2, 0, 128)):
        y = layer(torch.empty(*shape, dtype=dtype))
        assert y.shape == (*shape[:-1], 48) and y.dtype == dtype
    assert layer.last_choice is None and not layer.stats


def test_bias():
    weight = weight_of()
    bias = input_of(48)
    for dtype in DTYPES:
        x = input_of(3, 128, dtype=dtype)
        plain, shifted = QuantLinear(weight)(x), QuantLinear(weight, bias)(x)
        assert shifted.dtype == dtype
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(shifted.float(), plain.float() + bias, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", ["dequant_matmul", "dense", "int4pack"])
def test_column_order_is_applied(kernel):
    if kernel == "int4pack" and cpu.int4pack_missing():
        pytest.skip(cpu.int4pack_missing())
    plain = weight_of(offset=True)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    weight = QuantWeight("w4", plain.packed, plain.scales, plain.offset, 48, 128, 32, order)
    layer = QuantLinear(weight, table=DispatchTable.from_params({"force": kernel}))
    assert_accurate(layer, input_of(4, 128, dtype=torch.bfloat16))


def test_nan_in_one_row_stays_in_that_row():
    x = input_of(3, 128)
    x[1] = float("nan")
    for table in (None, FALLBACK):
        y = QuantLinear(weight_of(), table=table)(x)
        assert y[1].isnan().all() and torch.isfinite(y[[0, 2]]).all()


def test_the_same_input_gives_the_same_bits():
    x = input_of(5, 128, dtype=torch.bfloat16)
    for table in (None, FALLBACK):
        layer = QuantLinear(weight_of(), table=table)
        assert torch.equal(layer(x), layer(x))


# --- choices ------------------------------------------------------------------------------------


def test_choices_are_recorded():
    layer = QuantLinear(weight_of())
    assert layer.explain().endswith("not called yet")
    for m in (1, 1, 4):
        layer(input_of(m, 128))
    assert layer.last_choice.m == 4
    assert layer.stats == {"dense": 3}
    text = layer.explain()
    assert "w4 [48, 128] group 32" in text and "dense 3" in text and layer.last_choice.reason in text
    model = torch.nn.Sequential(layer, QuantLinear(weight_of(n=16, k=48), table=FALLBACK))
    model(input_of(2, 128))
    assert choice_counts(model) == {"dense": 4, "dequant_matmul": 1}
    lines = explain(model).splitlines()
    assert len(lines) == 2 and any("the override forces dequant_matmul" in line for line in lines)
    assert "128 -> 48, w4, group 32" in repr(layer)


def test_a_table_can_be_exchanged():
    layer = QuantLinear(weight_of())
    layer(input_of(1, 128))
    layer.set_table(DispatchTable.from_params({"dense.m_max": 2}))
    kernels = []
    for m in (1, 2, 3):
        layer(input_of(m, 128))
        kernels.append(layer.last_choice.kernel)
    assert kernels == ["dense", "dense", "dequant_matmul"]
    layer.set_table(DispatchTable.from_params({"force": "int4pack"}))
    with pytest.raises(InputError, match="no kernel for cpu, w4, float32"):
        layer(input_of(1, 128))


def test_a_kernel_registered_later_is_taken_up(tmp_path):
    layer = QuantLinear(weight_of(), table=DispatchTable.from_params({}))
    rows = [r for r in layer.table.rows if r.device == "cpu"]
    mine = rows[0].__class__("cpu", "0.0", "w4", ("float32",), 1, 1, "unit_test", "assumed")
    layer.set_table(DispatchTable((mine, *rows)))
    layer(input_of(1, 128))
    assert layer.last_choice.skipped[0][0] == "unit_test" and "not registered" in layer.last_choice.reason
    registry.register(
        "unit_test",
        lambda x, prepared: x.new_zeros(x.shape[0], prepared.n),
        available=lambda request: "" if request.weight.n == 48 else "N = 48 only",
    )
    try:
        assert not layer(input_of(1, 128)).any() and layer.last_choice.kernel == "unit_test"
        other = QuantLinear(weight_of(n=32), table=layer.table)
        other(input_of(1, 128))
        assert other.last_choice.skipped == (("unit_test", "N = 48 only"),)
    finally:
        registry.unregister("unit_test")
    layer(input_of(1, 128))
    assert layer.last_choice.kernel == "dense"


def test_dense_keeps_to_its_budget_and_gives_it_back():
    size = 48 * 128 * 4
    budget = MemoryBudget(size + 10)
    first, second = (QuantLinear(weight_of(), budget=budget) for _ in range(2))
    x = input_of(1, 128)
    a, b = first(x), second(x)
    assert (first.last_choice.kernel, second.last_choice.kernel) == ("dense", "dequant_matmul")
    assert "a dense copy needs" in second.last_choice.reason and budget.used == size
    torch.testing.assert_close(a, b)
    del first
    gc.collect()
    assert budget.used == 0 and budget.left == size + 10
    second.set_table(second.table)  # forgets the refusal
    second(x)
    assert second.last_choice.kernel == "dense" and budget.used == size


def test_dtype_and_device_changes_drop_the_dense_copy():
    budget = MemoryBudget(1 << 30)
    layer = QuantLinear(weight_of(), torch.zeros(48), budget=budget)
    scales = layer.weight.scales
    layer(input_of(1, 128))
    assert budget.used == 48 * 128 * 4
    layer.to(torch.float16)
    assert budget.used == 0 and layer.bias.dtype == torch.float16
    assert layer.weight.scales is scales and scales.dtype == torch.float16  # storage is not converted
    layer.to(torch.float64)
    assert layer.weight.scales.dtype == torch.float16
    layer.to(torch.float32)
    layer(input_of(1, 128, dtype=torch.float16))
    assert budget.used == 48 * 128 * 2
    layer(input_of(1, 128))  # another activation dtype replaces the copy
    assert budget.used == 48 * 128 * 4
    layer.to("meta")
    assert budget.used == 0 and layer.weight.device.type == "meta" and layer.bias.device.type == "meta"


def test_copies_share_the_budget_and_prepare_for_themselves():
    budget = MemoryBudget(1 << 30)
    layer = QuantLinear(weight_of(), budget=budget)
    x = input_of(2, 128)
    expected = layer(x)
    twin = copy.deepcopy(layer)
    assert twin.budget is budget and budget.used == 48 * 128 * 4
    assert torch.equal(twin(x), expected) and budget.used == 2 * 48 * 128 * 4


def test_pickles_choose_for_themselves_and_take_no_memory_along():
    x = input_of(2, 128)
    for budget in (MemoryBudget(1 << 30), None):
        layer = QuantLinear(weight_of(), budget=budget)
        expected = layer(x)
        twin = pickle.loads(pickle.dumps(layer))
        assert torch.equal(twin(x), expected) and twin.stats == {layer.last_choice.kernel: 2}
        if budget is None:
            assert twin.budget is default_budget()
        else:
            assert twin.budget is not budget and twin.budget.limit == 1 << 30
            assert budget.used == twin.budget.used == 48 * 128 * 4


def test_threads_share_a_layer_whatever_their_dtypes():
    inputs = [input_of(3, 128, dtype=dtype) for dtype in DTYPES]
    expected = [QuantLinear(weight_of())(x) for x in inputs]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(40):
            layer = QuantLinear(weight_of())
            together = threading.Barrier(6)

            def work(i, layer=layer, together=together):
                together.wait()
                return [layer(inputs[i % 3]) for _ in range(4)]

            with ThreadPoolExecutor(6) as pool:
                for i, results in enumerate(pool.map(work, range(6))):
                    assert all(torch.equal(y, expected[i % 3]) for y in results)
            assert sum(layer.stats.values()) == 24
    finally:
        sys.setswitchinterval(interval)


def test_the_default_budget():
    old = default_budget()
    try:
        budget = set_default_budget(5)
        assert QuantLinear(weight_of()).budget is budget
        half = set_default_budget(None)
        assert 0 < half.limit <= free_memory()
    finally:
        set_default_budget(None)
    assert default_budget() is not old
    with pytest.raises(InputError, match="limit: got -1"):
        MemoryBudget(-1)


# --- CUDA kernels -------------------------------------------------------------------------------


def seed_table(kernel: str) -> DispatchTable:
    """``kernel`` first, then the fallback, for float16 on the CPU."""
    rows = {row.kernel: row for row in DispatchTable.load().rows if row.device == "cpu"}
    return DispatchTable((replace(rows[kernel], format="*", m_min=1, m_max=None), rows["dequant_matmul"]))


def test_a_machine_that_cannot_run_them_falls_back_and_says_why(monkeypatch):
    def no_compiler(source, device):
        raise InputError("C++ compiler", "none", "g++ or clang++", "pip install ziglang")

    monkeypatch.setattr(runner, "load", no_compiler)
    layer = QuantLinear(weight_of(), table=seed_table("gemm_tiled"))
    assert_accurate(layer, input_of(9, 128, dtype=torch.float16))
    assert layer.stats == {"dequant_matmul": 1}
    assert "passed over gemm_tiled: C++ compiler: got none" in layer.explain()
    assert "pip install ziglang" in layer.explain()


@pytest.mark.parametrize(
    ("weight", "kernel", "why"),
    [
        (weight_of("q8_0"), "gemm_tiled", "w4 and w3 weights only"),
        (weight_of("w4"), "gemv_batch_w3", "w3 weights only"),
        (weight_of("w4", k=30, group="row"), "gemv_single_row", "group size 30: it takes multiples of 8"),
    ],
)
def test_a_seed_kernel_passes_on_what_it_cannot_read(weight, kernel, why):
    layer = QuantLinear(weight, table=seed_table(kernel))
    layer(input_of(2, weight.k, dtype=torch.float16))
    assert layer.last_choice.skipped == ((kernel, why),)


def test_nothing_is_passed_over_while_a_graph_is_captured(monkeypatch):
    def load():
        with registry.loading(torch.device("cuda")):
            raise InputError("kernel", "first use while a CUDA graph is captured", "one that was loaded")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(registry.Unavailable, match="first use"):
        load()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match="first use"):
        load()


def test_a_gpu_without_cupy_or_too_old_says_so(monkeypatch):
    def ask(capability, dtype="float16"):
        request = registry.Request("cuda", capability, "w4", dtype, 1, weight_of(), 1 << 20, None)
        return registry.why_not("gemv_single_row", request)

    monkeypatch.setattr(gpu, "why_not", lambda: "")
    assert ask((8, 0)) == ask((12, 0)) == ""
    assert "8.0 or newer" in ask((7, 5)) and "float16 activations only" in ask((8, 6), "bfloat16")
    monkeypatch.setattr(gpu, "why_not", lambda: "CuPy is not installed")
    assert ask((8, 6)) == "CuPy is not installed"


def test_importing_the_layer_loads_no_runner():
    code = (
        "import sys, labkit.nn.linear; "
        "print([name for name in sys.modules if name.partition('.')[0] == 'cupy' or 'emulator' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "[]"


# --- int4pack -----------------------------------------------------------------------------------


@pytest.mark.skipif(bool(cpu.int4pack_missing()), reason="this torch has no int4 CPU kernel")
@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (weight_of(n=40), "N % 16 == 0"),
        (weight_of(k=100), "not whole"),
        (weight_of(group=16), "group size 16"),
        (weight_of("q8_0"), None),
    ],
)
def test_int4pack_passes_on_what_it_cannot_do(weight, why):
    layer = QuantLinear(weight)
    assert_accurate(layer, input_of(2, weight.k, dtype=torch.bfloat16))
    assert layer.last_choice.kernel == "dense"
    skipped = dict(layer.last_choice.skipped)
    assert why in skipped["int4pack"] if why else "int4pack" not in skipped


@pytest.mark.skipif(bool(cpu.int4pack_missing()), reason="this torch has no int4 CPU kernel")
def test_int4pack_is_the_choice_for_bfloat16_and_covers_every_code():
    for format, low, high in (("w4", -8, 7), ("w3", -4, 3)):
        codes = torch.arange(low, high + 1).to(torch.int8).repeat(16, 16)[:, :128]
        scales = torch.full((16, codes.shape[1] // 32), 0.5).half()
        layer = QuantLinear(QuantWeight.from_codes(format, codes, scales, scales * 3, group_size=32))
        x = torch.eye(codes.shape[1]).bfloat16()
        assert torch.equal(layer(x).float().t(), codes * 0.5 + 1.5)
        assert layer.last_choice.kernel == "int4pack"


def test_a_torch_without_int4pack_falls_back(monkeypatch):
    cpu.int4pack_missing.cache_clear()
    monkeypatch.setattr(cpu, "_int4_layout", lambda weight, temp: torch.ops.aten.no_such_operator(weight))
    try:
        layer = QuantLinear(weight_of())
        layer(input_of(1, 128, dtype=torch.bfloat16))
        assert layer.last_choice.kernel == "dense"
        assert "does not run it here" in dict(layer.last_choice.skipped)["int4pack"]
    finally:
        cpu.int4pack_missing.cache_clear()


def test_an_int4pack_that_computes_something_else_is_not_used(monkeypatch):
    real = cpu._int4_layout
    cpu.int4pack_missing.cache_clear()

    def shifted(weight, temp):
        layout = real(weight, temp)
        return layout._replace(scales_and_zeros=layout.scales_and_zeros + 0.25)

    if why := cpu.int4pack_missing():
        pytest.skip(why)
    monkeypatch.setattr(cpu, "_int4_layout", shifted)
    budget = MemoryBudget(1 << 30)
    layer = QuantLinear(weight_of(), budget=budget)  # refused for this weight, at first use
    layer(input_of(1, 128, dtype=torch.bfloat16))
    assert layer.last_choice.kernel == "dense" and "on this weight" in layer.last_choice.reason
    gc.collect()
    assert budget.used == 48 * 128 * 2
    cpu.int4pack_missing.cache_clear()
    try:
        assert "in its probe" in cpu.int4pack_missing()
    finally:
        cpu.int4pack_missing.cache_clear()


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(2, 127), "float32 [2, 127]; expected [..., 128]"),
        (torch.zeros(128, 48), "this looks transposed: the weight is [N = 48, K = 128]"),
        (torch.tensor(1.0), "[..., 128]"),
        (torch.zeros(2, 128, dtype=torch.int64), "int64 [2, 128]"),
        (torch.zeros(2, 128, dtype=torch.float64), "expected float16, bfloat16 or float32"),
        ([[0.0] * 128], "list"),
        (torch.zeros(2, 128, device="meta"), "on meta; expected on cpu"),
    ],
)
def test_inputs_are_refused_by_name(x, words):
    layer = QuantLinear(weight_of())
    with pytest.raises(ValueError) as caught:
        layer(x)
    assert caught.value.argument == "x" and words in str(caught.value)
    assert layer.last_choice is None and not layer.stats


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"weight": torch.zeros(4, 4)}, "weight"),
        ({"bias": torch.zeros(47)}, "bias"),
        ({"bias": torch.zeros(48, 1)}, "bias"),
        ({"bias": torch.zeros(48, dtype=torch.int32)}, "bias"),
        ({"bias": torch.full((48,), float("nan"))}, "bias"),
        ({"bias": torch.zeros(48, device="meta")}, "bias"),
        ({"temp_bytes": 0}, "temp_bytes"),
        ({"temp_bytes": 1.5}, "temp_bytes"),
    ],
)
def test_construction_is_refused_by_name(arguments, argument):
    with pytest.raises(ValueError) as caught:
        QuantLinear(**{"weight": weight_of(), **arguments})
    assert caught.value.argument == argument
