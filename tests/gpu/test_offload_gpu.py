"""The host-resident path with a real GPU: one synchronise a call, pinned memory, streams, a measured row."""

from __future__ import annotations

import json
import threading
import warnings

import pytest
import torch

from labkit.nn import offload, staging
from labkit.nn.linear import QuantLinear
from labkit.nn.offload import OffloadLinear
from labkit.nn.offload_table import OffloadRow, flop_threshold, row_for
from labkit.quant import quantize

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"


def weight_of(n: int, k: int, form: str = "q8_0"):
    return quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * 0.05, form, 32)


def input_of(m: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "w4", "w3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_are_those_of_the_layer_on_the_gpu(form: str, dtype: torch.dtype) -> None:
    weight, bias = weight_of(130, 200, form), torch.linspace(-1, 1, 130).to(dtype)
    layer = OffloadLinear(weight, bias, threshold_flop=0)
    plain = QuantLinear(weight.to("cuda"), bias.to("cuda"))
    for m in (1, 7, 33):
        x = input_of(m, 200, dtype)
        y = layer(x)
        assert y.device.type == "cpu" and torch.equal(y, plain(x.to("cuda")).cpu())
    assert layer.stats == {"gpu": 3} and "on the gpu" in layer.explain()


def test_one_synchronise_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = OffloadLinear(weight_of(1024, 1024), threshold_flop=0)
    inputs = [input_of(m, 1024) for m in (8, 1, 3)]
    for x in inputs:
        layer(x)  # weights, kernels and buffers are there after this
    waits = []
    stream_wait, device_wait = torch.cuda.Stream.synchronize, torch.cuda.synchronize
    monkeypatch.setattr(
        torch.cuda.Stream, "synchronize", lambda self: (waits.append("stream"), stream_wait(self))
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: (waits.append("device"), device_wait(*a)))
    # torch itself says when an operation waits: an unpinned copy, an .item(), a nonzero.
    torch.cuda.set_sync_debug_mode("warn")
    try:
        for calls, x in enumerate(inputs, start=1):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                layer(x)
            assert waits == ["stream"] * calls
            assert sum("synchroniz" in str(warning.message) for warning in said) <= 1
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_buffers_are_pinned_and_belong_to_a_stream() -> None:
    layer = OffloadLinear(weight_of(256, 256), threshold_flop=0)
    x = input_of(4, 256)
    expected = layer(x)
    here = staging.staging_for(DEVICE)
    assert here._buffers and all(buffer.is_pinned() for buffer in here._buffers.values())
    grown = here.grown
    assert torch.equal(layer(x), expected) and here.grown == grown
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        assert staging.staging_for(DEVICE) is not here
        assert torch.equal(layer(x), expected)
        assert staging.staging_for(DEVICE)._stream == other


def test_threads_with_their_own_streams_do_not_meet() -> None:
    layer = OffloadLinear(weight_of(512, 512), threshold_flop=0)
    inputs = [input_of(m, 512) for m in (1, 5, 9, 30)]
    expected = [layer(x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                if not torch.equal(layer(inputs[i]), expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_default_threshold_is_the_devices_row() -> None:
    layer = OffloadLinear(weight_of(64, 64))
    row = row_for(torch.cuda.get_device_name(0))
    assert layer.threshold_flop == row.threshold_flop and layer.provenance == row.provenance
    layer(input_of(1, 64))
    assert layer.last_choice is not None and layer.last_choice.place == "cpu"


def test_weights_leave_the_cpu_when_every_call_is_sent() -> None:
    layer = OffloadLinear(weight_of(2048, 2048), threshold_flop=2 * 2048 * 2048)
    layer(input_of(1, 2048))
    assert set(layer._sides) == {"gpu"} and layer._sides["gpu"].weight.device == DEVICE


def test_measured_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert offload.measure_round_trip("cuda", repeats=20) > 0
    assert offload.main(["--measure"]) == 0
    row = OffloadRow(**json.loads(capsys.readouterr().out))
    assert row.device == torch.cuda.get_device_name(0) and row.provenance.startswith("measured")
    assert row.threshold_flop is None or row.threshold_flop == pytest.approx(flop_threshold(row), rel=0.1)
