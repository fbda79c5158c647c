"""The host-resident path without a GPU: the choice, the counts, the staging, the table.

Where a GPU is needed the tests let the CPU stand for it: every step is then made, with plain memory.
"""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from labkit import quoted
from labkit.errors import InputError, ModelFileError
from labkit.nn import offload, offload_table, staging
from labkit.nn.linear import QuantLinear
from labkit.nn.offload import OffloadLinear
from labkit.nn.offload_table import OffloadRow, flop_threshold, row_for
from labkit.quant import quantize


def weight_of(n: int = 48, k: int = 70, form: str = "q8_0"):
    return quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * 0.05, form, 32)


def input_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> staging.Staging:
    """The CPU as a GPU; the staging that its calls use."""
    monkeypatch.setattr(offload, "gpu_missing", lambda device: "")
    monkeypatch.setattr(staging, "_local", threading.local())
    return staging.staging_for(torch.device("cpu"))


# --- the layer --------------------------------------------------------------------------------------------


def test_without_a_gpu_it_computes_here_and_says_why() -> None:
    weight = weight_of()
    layer = OffloadLinear(weight, device="cpu", threshold_flop=0)
    x = input_of(3, 70)
    assert torch.equal(layer(x), QuantLinear(weight)(x))
    assert layer.last_choice.place == "cpu" and "no GPU" in layer.last_choice.reason
    assert layer.stats == {"cpu": 1} and "no GPU" in layer.explain()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_a_gpu_that_torch_does_not_find_is_named_as_the_reason() -> None:
    layer = OffloadLinear(weight_of())
    layer(input_of(1, 70))
    assert "torch finds no GPU" in layer.last_choice.reason


def test_a_gpu_that_is_not_there_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert offload.gpu_missing(torch.device("cuda:1")) == ""
    layer = OffloadLinear(weight_of(), device="cuda:2")
    layer(input_of(1, 70))
    assert "there is no cuda:2: torch finds 2 GPUs" in layer.last_choice.reason
    with pytest.raises(InputError, match="device: got 'gpu'"):
        OffloadLinear(weight_of(), device="gpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["q8_0", "w4"])
def test_both_sides_give_what_the_linear_layer_gives(
    stand_in: staging.Staging, form: str, dtype: torch.dtype
) -> None:
    weight, bias = weight_of(form=form), torch.linspace(-1, 1, 48)
    plain = QuantLinear(weight, bias.to(dtype))
    layer = OffloadLinear(weight, bias.to(dtype), device="cpu", threshold_flop=2 * 4 * 48 * 70)
    for shape, place in (((3, 70), "cpu"), ((4, 70), "gpu"), ((2, 3, 70), "gpu"), ((70,), "cpu")):
        x = input_of(*shape, dtype=dtype)
        y = layer(x)
        assert torch.equal(y, plain(x)) and y.dtype == dtype and y.shape == (*shape[:-1], 48)
        assert layer.last_choice.place == place and layer.last_choice.flop == 2 * 48 * x.numel()
    assert layer.stats == {"cpu": 2, "gpu": 2} and stand_in.calls == 2


def test_threshold_is_the_first_size_that_is_sent(stand_in: staging.Staging) -> None:
    layer = OffloadLinear(weight_of(), device="cpu", threshold_flop=2 * 5 * 48 * 70)
    assert [layer.choose(m).place for m in (1, 4, 5, 6)] == ["cpu", "cpu", "gpu", "gpu"]
    layer.set_threshold(math.inf)
    assert layer.choose(10**6).place == "cpu"
    layer.set_threshold(0)
    assert layer.choose(1).place == "gpu" and "given by the caller" in layer.choose(1).reason


def test_one_synchronise_a_call(stand_in: staging.Staging) -> None:
    layer = OffloadLinear(weight_of(), device="cpu", threshold_flop=0)
    for calls, m in enumerate((1, 3, 2, 33), start=1):
        layer(input_of(m, 70))
        assert stand_in.calls == stand_in.synchronises == calls
    layer(input_of(0, 70))
    assert stand_in.calls == 4


def test_buffers_grow_and_are_used_again_and_results_are_their_own(stand_in: staging.Staging) -> None:
    layer = OffloadLinear(weight_of(), device="cpu", threshold_flop=0)
    first = layer(input_of(8, 70))
    kept, grown, held = first.clone(), stand_in.grown, stand_in.nbytes
    assert grown == 2
    for m in (1, 8, 5):
        layer(input_of(m, 70) * 3)
    assert stand_in.grown == grown and stand_in.nbytes == held and torch.equal(first, kept)
    layer(input_of(100, 70))
    assert stand_in.grown == grown + 2 and stand_in.nbytes >= 100 * (70 + 48) * 4
    assert torch.equal(layer(input_of(8, 70)), kept)


def test_a_call_that_fails_leaves_the_next_one_right(stand_in: staging.Staging) -> None:
    def broken(there: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        stand_in.round_trip(input_of(2, 3), broken)
    assert torch.equal(stand_in.round_trip(input_of(2, 3), lambda there: there + 1), input_of(2, 3) + 1)


def test_strided_input(stand_in: staging.Staging) -> None:
    layer = OffloadLinear(weight_of(), device="cpu", threshold_flop=0)
    wide = input_of(70, 6)
    assert torch.equal(layer(wide.t()), layer(wide.t().contiguous()))


def test_cpu_copy_goes_only_when_no_call_can_need_it(stand_in: staging.Staging) -> None:
    always = OffloadLinear(weight_of(), device="cpu", threshold_flop=2 * 48 * 70)
    sometimes = OffloadLinear(weight_of(), device="cpu", threshold_flop=2 * 48 * 70 + 1)
    for layer in (always, sometimes):
        assert set(layer._sides) == {"cpu"}  # the GPU's memory is taken at the first call that is sent
        layer(input_of(2, 70))
    assert set(always._sides) == {"gpu"} and set(sometimes._sides) == {"cpu", "gpu"}
    always.set_threshold(math.inf)
    assert torch.equal(always(input_of(2, 70)), sometimes(input_of(2, 70)))


def test_two_threads_never_share_buffers(stand_in: staging.Staging) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(staging.staging_for(torch.device("cpu"))))
    thread.start()
    thread.join()
    assert found[0] is not stand_in and staging.staging_for(torch.device("cpu")) is stand_in


def test_moving_a_model_leaves_the_layer_where_it_is() -> None:
    layer = OffloadLinear(weight_of(), device="cpu")
    model = torch.nn.Sequential(layer).to(torch.float16)
    assert model(input_of(1, 70)).dtype == torch.float32
    assert not list(model.parameters()) and "70 -> 48" in repr(model)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 71), torch.zeros(2, 70, dtype=torch.int32), torch.zeros(2, 70, device="meta")],
)
def test_bad_input_is_refused_before_anything_is_sent(stand_in: staging.Staging, x: Tensor) -> None:
    layer = OffloadLinear(weight_of(), device="cpu", threshold_flop=0)
    with pytest.raises(InputError) as error:
        layer(x)
    assert error.value.argument == "x" and stand_in.calls == 0 and layer.stats == {}


@pytest.mark.parametrize("value", [-1, float("nan"), "1e7", True, None])
def test_bad_threshold_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="threshold_flop"):
        OffloadLinear(weight_of(), device="cpu").set_threshold(value)  # type: ignore[arg-type]


def test_bad_weight_is_refused() -> None:
    with pytest.raises(InputError, match="weight"):
        OffloadLinear(torch.zeros(2, 2))  # type: ignore[arg-type]


# --- threshold and table ------------------------------------------------------------------------------------


def row(**changes: object) -> OffloadRow:
    made_up = OffloadRow("a", "b", 100.0, 50.0, None, 0.0, "made up")
    return replace(made_up, **changes)  # type: ignore[arg-type]


def test_threshold_is_where_both_ways_take_as_long() -> None:
    assert flop_threshold(row()) == pytest.approx(5e6)
    flop = flop_threshold(row(gpu_gflops=200.0))
    assert flop / 50e9 == pytest.approx(100e-6 + flop / 200e9)
    assert flop_threshold(row(gpu_gflops=50.0)) == math.inf
    for missing in ("round_trip_us", "cpu_gflops"):
        for value in (None, 0):
            with pytest.raises(InputError, match=missing):
                flop_threshold(row(**{missing: value}))


def test_table_holds_the_quoted_figures_with_their_source() -> None:
    figures = quoted.table(quoted.KESTREL, "offload")
    found = row_for("NVIDIA GeForce RTX 5090")
    assert found.threshold_flop == figures.value("flop_threshold")
    assert found.round_trip_us == figures.value("round_trip_us")
    assert found.provenance.startswith("quoted")
    other = row_for("a card that nobody has")
    assert other.device == "*" and other.provenance.startswith("assumed") and "--measure" in other.provenance


def test_quoted_threshold_keeps_the_projections_that_the_article_keeps(stand_in: staging.Staging) -> None:
    threshold = quoted.table(quoted.KESTREL, "offload").value("flop_threshold")
    layer = OffloadLinear(weight_of(2, 2), device="cpu", threshold_flop=threshold)
    rows = {"q, o": 2048, "k, v": 1024, "gate, up, down": 6144, "lm_head": 151936}
    for entry in quoted.table(quoted.KESTREL, "projection_mflop").rows:
        layer.n, layer.k = rows[entry["projection"]], 2048
        choice = layer.choose(1)
        assert choice.flop / 1e6 == pytest.approx(entry["mflop"], rel=0.01)
        assert (choice.place == "gpu") == entry["offloaded"]
    layer.n = 2048 + 2 * 1024  # query, key and value fused
    assert layer.choose(1).place == "gpu"


def damaged(**changes: object) -> str:
    return json.dumps({"rows": [{**offload_table.to_json(row()), **changes}]})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "offload.json"),
        ("{}", "offload.json"),
        ('{"rows": [{}]}', "row 0"),
        (damaged(device=""), "row 0: device"),
        (damaged(round_trip_us="100"), "row 0: round_trip_us"),
        (damaged(threshold_flop=-1), "row 0: threshold_flop"),
    ],
)
def test_a_damaged_table_is_refused_by_row_and_field(
    content: str, said: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "offload.json").write_text(content, encoding="utf-8")
    monkeypatch.setattr(offload_table.paths, "data_dir", lambda: tmp_path)
    offload_table.rows.cache_clear()
    try:
        with pytest.raises(ModelFileError, match=said):
            offload_table.rows()
    finally:
        offload_table.rows.cache_clear()


def test_rows_survive_the_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = [row(threshold_flop=math.inf), row(device="c", gpu_gflops=3.5)]
    text = json.dumps({"rows": [offload_table.to_json(entry) for entry in mine]}, allow_nan=False)
    (tmp_path / "offload.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(offload_table.paths, "data_dir", lambda: tmp_path)
    offload_table.rows.cache_clear()
    try:
        assert list(offload_table.rows()) == mine
        with pytest.raises(InputError, match="device_name"):
            row_for("unknown")
    finally:
        offload_table.rows.cache_clear()


def test_command_prints_rows_that_the_table_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert offload.main([]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [OffloadRow(**entry) for entry in printed] == list(offload_table.rows())
    assert offload.main(["--measure", "--device", "cpu"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_measured_row_is_whole(stand_in: staging.Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "RATE_SIZE", 64)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "stand-in")
    times = {32: 100.0, 64: 120.0}
    here = 400.0

    def microseconds(call, repeats):
        call()
        layer = call.__closure__[0].cell_contents
        assert isinstance(layer, OffloadLinear)
        return here if layer.threshold_flop else times[layer.n]

    monkeypatch.setattr(offload, "_microseconds", microseconds)
    measured = offload.measure("cpu", repeats=1)
    flop = 2 * 64 * 64
    assert measured.round_trip_us == 100 and measured.device == "stand-in"
    assert measured.cpu_gflops == round(flop / 400 / 1e3, 2)
    assert measured.gpu_gflops == round(flop / 20 / 1e3, 2)
    assert measured.threshold_flop == pytest.approx(flop_threshold(measured), rel=0.05)
    assert measured.provenance.startswith("measured")
