"""The dispatch table: what is chosen and why, overrides, refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from labkit.errors import InputError, ModelFileError
from labkit.kernels import registry
from labkit.nn.dispatch import DTYPES, FORMATS, DispatchTable, Row

LADA = (8, 9)


def everything(name: str) -> str:
    """A ``why_not`` under which every kernel can run."""
    return ""


def chosen(
    table: DispatchTable, m: int, format: str = "w4", dtype: str = "float16", capability=(8, 6)
) -> str:
    return table.select("cuda", capability, format, dtype, m, why_not=everything).kernel


@pytest.mark.parametrize("format", ["w4", "w3"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), LADA])
def test_thresholds_of_the_cuda_kernels(format, capability):
    table = DispatchTable.load()
    names = [chosen(table, m, format, capability=capability) for m in (1, 2, 8, 9, 100_000)]
    assert names == ["gemv_single_row", "gemv_small_batch", "gemv_small_batch", "gemm_tiled", "gemm_tiled"]


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
@pytest.mark.parametrize(("format", "single", "small"), [("w4", 16, 64), ("w3", 1, 48)])
def test_measured_thresholds_of_newer_cards(format, single, small, capability):
    """Of the seed kernels, which stay selectable under the tensor-core family."""
    edges = (1, single, single + 1, small, small + 1, 100_000)
    table = DispatchTable.load()
    assert {chosen(table, m, format, capability=capability) for m in edges} == {"tensor_core"}
    table = table.with_override(disable=["tensor_core"])
    names = [chosen(table, m, format, capability=capability) for m in edges]
    assert names == ["gemv_single_row"] * 2 + ["gemv_small_batch"] * 2 + ["gemm_tiled"] * 2


@pytest.mark.parametrize("format", ["w4", "w3"])
def test_tensor_cores_take_bfloat16_from_8_0_and_float16_where_they_were_timed(format):
    table = DispatchTable.load()
    for capability in ((8, 0), (8, 6), LADA, (9, 0), (12, 0)):
        for m in (1, 64, 65, 100_000):
            assert chosen(table, m, format, "bfloat16", capability) == "tensor_core"
            newer = chosen(table, m, format, capability=capability) == "tensor_core"
            assert newer == (capability >= (9, 0))
            forced = table.with_override(force="tensor_core")
            assert chosen(forced, m, format, capability=capability) == "tensor_core"
    for capability, dtype in (((7, 5), "bfloat16"), ((9, 0), "float32"), ((7, 5), "float16")):
        assert chosen(table, 1, format, dtype, capability) == "dequant_matmul"
    assert chosen(table, 1, "q8_0", "bfloat16", (9, 0)) == "zsplit"


def test_a_weight_that_tensor_cores_cannot_take_goes_on_to_the_next_row():
    def refuse(name):
        return "its group has no tiles" if name == "tensor_core" else ""

    table = DispatchTable.load()
    choice = table.select("cuda", (9, 0), "w4", "float16", 1, why_not=refuse)
    assert choice.kernel == "gemv_single_row"
    assert choice.skipped == (("tensor_core", "its group has no tiles"),)
    choice = table.select("cuda", (8, 6), "w3", "bfloat16", 1, why_not=refuse)
    assert choice.kernel == "dequant_matmul" and choice.skipped[0][0] == "tensor_core"


@pytest.mark.parametrize(
    ("dtype", "capability"), [("float16", (7, 5)), ("float32", (8, 6)), ("bfloat16", (7, 5))]
)
def test_other_dtypes_and_older_cards_take_the_fallback(dtype, capability):
    assert chosen(DispatchTable.load(), 1, dtype=dtype, capability=capability) == "dequant_matmul"


def test_a_kernel_that_is_not_registered_is_passed_over_and_the_choice_says_why():
    table = DispatchTable.load()
    missing = {"gemv_single_row", "gemv_small_batch", "gemm_tiled", "tensor_core"}
    choice = table.select(
        "cuda",
        (8, 6),
        "w4",
        torch.float16,
        4,
        why_not=lambda name: "not registered" if name in missing else "",
    )
    assert choice.kernel == "dequant_matmul"
    assert choice.skipped == (("gemv_small_batch", "not registered"), ("tensor_core", "not registered"))
    assert "passed over gemv_small_batch: not registered" in choice.reason
    assert "M = 4" in choice.reason and choice.row.provenance in choice.reason
    assert "not registered" in registry.why_not("no_such_kernel")


def test_thresholds_assumed_for_8_0_say_so():
    choice = DispatchTable.load().select("cuda", (8, 0), "w4", "float16", 1, why_not=everything)
    assert choice.row.provenance.startswith("assumed") and "from compute capability 8.0" in choice.reason
    choice = DispatchTable.load().select("cuda", (8, 6), "w4", "float16", 1, why_not=everything)
    assert choice.row.provenance.startswith("quoted") and "from compute capability 8.6" in choice.reason


def test_every_device_format_and_dtype_has_a_row_for_every_m():
    table = DispatchTable.load()
    for format in FORMATS:
        for dtype in DTYPES:
            for m in (1, 2, 8, 9, 64, 100_000):
                for device, capability in (
                    ("cpu", None),
                    ("cuda", (5, 0)),
                    ("cuda", (8, 6)),
                    ("cuda", (12, 0)),
                ):
                    rows = table.candidates(device, capability, format, dtype, m)
                    assert "dequant_matmul" in [row.kernel for row in rows]
                    assert all(row.provenance for row in rows)
                    after = rows[[row.kernel for row in rows].index("dequant_matmul") + 1 :]
                    assert all("force" in row.provenance for row in after)


def test_higher_capability_wins_over_file_order(tmp_path):
    path = tmp_path / "table.json"
    base = {
        "device": "cuda",
        "format": "*",
        "dtypes": ["float16"],
        "m_min": 1,
        "m_max": None,
        "provenance": "assumed",
    }
    rows = [{**base, "capability": text, "kernel": f"k{text}"} for text in ("8.6", "12.0", "9.0", "0.0")]
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    table = DispatchTable.load(path)
    assert [chosen(table, 1, capability=c) for c in ((8, 0), (8, 6), LADA, (9, 0), (12, 0))] == [
        "k0.0",
        "k8.6",
        "k8.6",
        "k9.0",
        "k12.0",
    ]


# --- overrides ----------------------------------------------------------------------------------


def test_moving_a_threshold_moves_both_sides():
    table = DispatchTable.from_params({"single_row_up_to": 2, "small_batch_up_to": 16})
    assert [chosen(table, m) for m in (2, 3, 16, 17)] == [
        "gemv_single_row",
        "gemv_small_batch",
        "gemv_small_batch",
        "gemm_tiled",
    ]
    choice = table.select("cuda", (8, 6), "w4", "float16", 12, why_not=everything)
    assert "override single_row_up_to, small_batch_up_to; was: quoted" in choice.reason


def test_one_format_alone():
    table = DispatchTable.from_params({"w3.small_batch_up_to": 1})
    assert chosen(table, 2, "w3") == "gemm_tiled"
    assert chosen(table, 2, "w4") == "gemv_small_batch"
    table = DispatchTable.from_params({"w3.dense.m_min": 9})
    kernel = {
        (format, m): table.select("cpu", None, format, "float32", m, why_not=everything).kernel
        for format in FORMATS
        for m in (8, 9)
    }
    assert [key for key, name in kernel.items() if name == "dequant_matmul"] == [("w3", 8)]


def test_bounds_disable_and_force():
    table = DispatchTable.from_params({"gemm_tiled.m_min": 20, "gemv_small_batch.m_max": None})
    assert chosen(table, 1000) == "gemv_small_batch"
    table = DispatchTable.from_params({"disable": "gemv_small_batch, gemm_tiled"})
    assert [chosen(table, m) for m in (1, 2, 9)] == ["gemv_single_row", "tensor_core", "tensor_core"]
    table = table.with_override(disable=["tensor_core"])
    assert [chosen(table, m) for m in (1, 2, 9)] == ["gemv_single_row", "dequant_matmul", "dequant_matmul"]
    choice = table.select("cuda", (8, 6), "w4", "float16", 2, why_not=everything)
    assert choice.skipped == tuple(
        (name, "disabled by an override") for name in ("gemv_small_batch", "tensor_core")
    )
    table = table.with_override(force="dequant_matmul", disable=["dense"])
    assert chosen(table, 1) == "dequant_matmul"
    assert table.disabled == {"gemv_small_batch", "gemm_tiled", "tensor_core", "dense"}
    assert DispatchTable.from_params({"force": ""}).forced is None
    assert DispatchTable.from_params(None) == DispatchTable.load() == DispatchTable.from_params({})


def test_a_forced_kernel_takes_every_m_and_leaves_the_others_their_bounds():
    table = DispatchTable.from_params({"force": "gemm_tiled"})
    for device, capability in (("cuda", (8, 6)), ("cpu", None)):
        for format in ("w4", "w3"):
            for m in (1, 8, 9, 1000):
                choice = table.select(device, capability, format, "float16", m, why_not=everything)
                assert choice.kernel == "gemm_tiled" and "M >= 9, forced by an override" in choice.reason
    choice = table.with_override(force=None).select("cpu", None, "w4", "float16", 1, why_not=everything)
    assert choice.kernel == "gemm_tiled"  # None and "" change nothing
    experiment = DispatchTable.from_params({"force": "gemv_batch_w3"})
    assert chosen(experiment, 4, "w3") == "gemv_batch_w3"
    with pytest.raises(InputError, match="the override forces gemv_batch_w3"):
        chosen(experiment, 4, "w4")


def test_on_the_cpu_the_cuda_kernels_come_after_the_fallback_with_the_same_thresholds():
    table = DispatchTable.from_params({"disable": "int4pack, dense"})
    for m in (1, 2, 9):
        choice = table.select("cpu", None, "w3", "float16", m, why_not=everything)
        assert choice.kernel == "dequant_matmul"
    table = table.with_override(disable=["dequant_matmul"])
    names = [table.select("cpu", None, "w3", "float16", m, why_not=everything).kernel for m in (1, 2, 8, 9)]
    assert names == ["gemv_single_row", "gemv_small_batch", "gemv_small_batch", "gemm_tiled"]


def test_the_loaded_table_is_never_changed():
    before = DispatchTable.load().rows
    DispatchTable.from_params({"small_batch_up_to": 30, "force": "dense"})
    assert DispatchTable.load().rows == before and DispatchTable.load().forced is None


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"small_batch": 3}, "override 'small_batch'"),
        ({"w5.small_batch_up_to": 3}, "override 'w5.small_batch_up_to'"),
        ({"gemm_fast.m_min": 3}, "override 'gemm_fast.m_min'"),
        ({"gemm_tiled.m_mid": 3}, "override 'gemm_tiled.m_mid'"),
        ({"small_batch_up_to": "8"}, "got '8'; expected a whole number"),
        ({"small_batch_up_to": 8.0}, "got 8.0"),
        ({"small_batch_up_to": True}, "got True"),
        ({"small_batch_up_to": -1}, "got -1"),
        ({"gemm_tiled.m_min": None}, "got None"),
        ({"disable": "fast"}, "'fast'; expected one of"),
        ({"disable": 3}, "override 'disable'"),
        ({"disable": [3]}, "override 'disable'"),
        ({"force": "fast"}, "'fast'"),
        ({"force": ["dense", "int4pack"]}, "one kernel name"),
        ({3: 4}, "text keys"),
        ([1], "a dict of parameters"),
        ({"q8_0.gemm_tiled.m_min": 3}, "a kernel the table has"),
    ],
)
def test_bad_overrides_are_refused_by_name(params, words):
    with pytest.raises(ValueError) as caught:
        DispatchTable.from_params(params)
    assert words in str(caught.value)


def test_no_kernel_left_is_an_error_that_says_why():
    table = DispatchTable.from_params({"disable": "dense, dequant_matmul, int4pack, gemv_small_batch"})
    with pytest.raises(InputError, match=r"no kernel for cpu, w4, float32, M = 3 \(dense: disabled by an"):
        table.select("cpu", None, "w4", torch.float32, 3)
    empty = DispatchTable(())
    with pytest.raises(InputError, match="no row covers it"):
        empty.select("cpu", None, "w4", "float32", 1)


def test_a_forced_kernel_that_cannot_serve_a_call_says_why():
    table = DispatchTable.from_params({"force": "int4pack"})
    what = "no kernel for cpu, w4, float32, M = 3, since the override forces int4pack"
    with pytest.raises(
        InputError, match=rf"{what} \(its cpu rows are for w4 with bfloat16; w3 with bfloat16\)"
    ):
        table.select("cpu", None, "w4", torch.float32, 3)
    with pytest.raises(InputError, match=r"forces int4pack \(its cuda rows are for nothing\)"):
        table.select("cuda", (8, 6), "w4", "bfloat16", 3)
    with pytest.raises(InputError, match=r"forces int4pack \(no such operator\)"):
        table.select("cpu", None, "w4", "bfloat16", 3, why_not=lambda name: "no such operator")
    old = DispatchTable.from_params({"force": "gemm_tiled"})
    with pytest.raises(InputError, match=r"w4 with float16 from 8\.6; w3 with float16 from 8\.6"):
        old.select("cuda", (7, 5), "w4", "float16", 3)
    both = DispatchTable.from_params({"force": "dense", "disable": "dense"})
    with pytest.raises(InputError, match=r"forces dense \(disabled by an override\)"):
        both.select("cpu", None, "w4", "float16", 3)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        (("tpu", None, "w4", "float16", 1), "device"),
        (("cpu", None, "w5", "float16", 1), "format"),
        (("cpu", None, "w4", torch.int8, 1), "dtype"),
        (("cpu", None, "w4", torch.float64, 1), "dtype"),
        (("cpu", None, "w4", "float16", 0), "m"),
    ],
)
def test_bad_questions_are_refused_by_name(arguments, argument):
    with pytest.raises(ValueError) as caught:
        DispatchTable.load().select(*arguments)
    assert caught.value.argument == argument


# --- the file -----------------------------------------------------------------------------------

ROW = {
    "device": "cpu",
    "capability": "0.0",
    "format": "*",
    "dtypes": ["float32"],
    "m_min": 1,
    "m_max": 4,
    "kernel": "dense",
    "provenance": "assumed",
}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**ROW, "device": "tpu"}, "row 0: device: got tpu"),
        ({**ROW, "capability": "eight"}, "row 0: capability"),
        ({**ROW, "format": "w5"}, "row 0: format"),
        ({**ROW, "dtypes": []}, "row 0: dtypes"),
        ({**ROW, "dtypes": ["int8"]}, "row 0: dtypes"),
        ({**ROW, "m_min": 0}, "row 0: m_min"),
        ({**ROW, "m_max": 0}, "row 0: m_max"),
        ({**ROW, "m_max": "4"}, "row 0: m_max"),
        ({**ROW, "kernel": ""}, "row 0: kernel"),
        ({**ROW, "provenance": ""}, "row 0: provenance"),
        ({**ROW, "extra": 1}, "row 0"),
        ({key: ROW[key] for key in ROW if key != "kernel"}, "row 0"),
        ("dense", "row 0"),
    ],
)
def test_bad_files_are_refused_by_row_and_field(tmp_path, row, words):
    path = tmp_path / "dispatch.json"
    path.write_text(json.dumps({"rows": [row]}), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        DispatchTable.load(path)
    assert words in str(caught.value) and "dispatch.json" in str(caught.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(ModelFileError, match=r"none\.json"):
        DispatchTable.load(tmp_path / "none.json")
    path = tmp_path / "dispatch.json"
    for text in ("{", "[]", "{}"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ModelFileError, match='JSON with "rows"'):
            DispatchTable.load(path)
    path.write_text(json.dumps({"rows": [ROW]}), encoding="utf-8")
    assert DispatchTable.load(path).rows == (Row(**{**ROW, "dtypes": ("float32",)}),)


def test_the_table_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from labkit.nn.dispatch import DispatchTable as D; "
        "print(D.load().select('cuda', (8, 6), 'w4', 'float16', 1, why_not=lambda name: '').kernel)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "gemv_single_row"


# --- the registry -------------------------------------------------------------------------------


def test_registering_a_kernel():
    before = registry.generation()
    registry.register("unit_test", lambda x, prepared: x)
    try:
        assert registry.get("unit_test").run(3, None) == 3 and registry.why_not("unit_test") == ""
        assert "unit_test" in registry.names() and registry.generation() > before
        with pytest.raises(InputError, match="not in use"):
            registry.register("unit_test", lambda x, prepared: x)
        registry.register("unit_test", lambda x, prepared: 4, replace=True)
        assert registry.get("unit_test").run(3, None) == 4
    finally:
        registry.unregister("unit_test")
    assert registry.find("unit_test") is None
    with pytest.raises(InputError, match="kernel: got 'unit_test'"):
        registry.get("unit_test")
