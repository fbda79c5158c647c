"""Kernels of other projects: their layouts by hand, and a stand-in for humming where there is no GPU."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from labkit.bench import check, contenders, peers
from labkit.bench.cases import PEERS, Case
from labkit.quant.formats import QuantWeight


def case(format: str = "w4", m: int = 3, n: int = 64, k: int = 256, group: int = 128) -> Case:
    return Case("fast", format, m, n, k, group, PEERS[format])


def on_cuda(weight: QuantWeight) -> Any:
    """A weight that says it lies on a GPU."""
    return SimpleNamespace(device=torch.device("cuda"), format=weight.format)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))


def test_every_peer_of_the_tables_is_known() -> None:
    for names in PEERS.values():
        for name in names:
            assert contenders.get(name).name == name
            assert not contenders.get(name).repeatable


def test_without_a_gpu_each_says_so() -> None:
    for format, names in PEERS.items():
        weight = contenders.random_weight(case(format), "cpu")
        for name in names:
            assert contenders.get(name).why_not(case(format), weight) == "CUDA only"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"n": 60}, "N % 8"), ({"k": 192, "group": 64}, "K % 128"), ({"group": 16}, "group"), ({"m": 65}, "64")],
)
def test_what_tinygemm_cannot_do_is_named(ampere: None, changes: dict[str, Any], words: str) -> None:
    here = case(**changes)
    reason = peers.Tinygemm().why_not(here, on_cuda(contenders.random_weight(here, "cpu")))
    assert words in reason, reason


def test_tinygemm_takes_the_shapes_of_models(ampere: None) -> None:
    for group in (128, 64, 32):
        here = case(n=2560, k=2048, group=group)
        weight: Any = SimpleNamespace(device=torch.device("cuda"))
        assert peers.Tinygemm().why_not(here, weight) == ""


def test_the_layout_for_tinygemm_holds_the_weight_that_is_compared() -> None:
    here = case(group=64)
    weight = contenders.random_weight(here, "cpu")
    pairs, both = peers.tinygemm_layout(weight)
    assert pairs.dtype == torch.uint8 and pairs.shape == (64, 128)
    assert both.dtype == torch.bfloat16 and both.shape == (4, 64, 2) and both.is_contiguous()
    codes = torch.stack([pairs >> 4, pairs & 15], dim=-1).view(64, 256).double() - 8
    scale, zero = (both[..., i].double().t().repeat_interleave(64, 1) for i in (0, 1))
    held = peers.Tinygemm().held(here, weight).dequantize(torch.float64)
    assert torch.equal(codes * scale + zero, held)
    assert pairs.nbytes + both.nbytes == peers.Tinygemm().nbytes(here)
    relative = (held - weight.dequantize(torch.float64)).norm() / held.norm()
    assert 0 < relative < 2**-8


def test_the_tolerance_still_finds_a_wrong_result() -> None:
    here = replace(case(), m=5)
    weight, x = contenders.random_weight(here, "cpu"), contenders.random_input(here, "cpu")
    wanted = check.reference(x, weight).allowing(peers.TOLERANCE)
    y = x @ weight.dequantize(torch.float16).t()
    assert check.judge(y, wanted, x.dtype).problem == ""
    turned = weight.codes().roll(1, 1)  # neighbours in each other's place
    wrong = QuantWeight.from_codes("w4", turned, weight.scales, group_size=128)
    assert "allowed" in check.judge(x @ wrong.dequantize(torch.float16).t(), wanted, x.dtype).problem


# --- humming ----------------------------------------------------------------------------------------


class FakeLayer:
    """What labkit uses of HummingLayer, in plain torch; the codes stay one a word, as they are."""

    made: ClassVar[list[FakeLayer]] = []

    def __init__(
        self, *, shape_n: int, shape_k: int, weight_config: dict[str, Any], torch_dtype: Any
    ) -> None:
        self.bits, self.group = int(weight_config["dtype"][3:]), weight_config["group_size"]
        self.weight = torch.zeros(shape_n, shape_k, dtype=torch.int32)
        self.weight_scale = torch.zeros(shape_n, shape_k // self.group, dtype=torch_dtype)
        self.humming_config: Any = None
        self.asked: list[Any] = []
        FakeLayer.made.append(self)

    def cuda(self) -> FakeLayer:
        return self

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        assert tensors["weight"].shape == self.weight.shape
        assert tensors["weight_scale"].dtype == self.weight_scale.dtype
        self.weight, self.weight_scale = tensors["weight"], tensors["weight_scale"]

    def transform(self) -> None:
        self.humming_config = "config"

    def __call__(self, x: torch.Tensor, tuning_config: Any = None) -> torch.Tensor:
        assert self.humming_config == "config"
        self.asked.append(tuning_config)
        values = (self.weight - (1 << (self.bits - 1))).float()
        values *= self.weight_scale.float().repeat_interleave(self.group, 1)
        return x @ values.to(x.dtype).t()


RANGES = [[0, 1, {"kernel": "a"}], [1, 8, {"kernel": "b"}], [8, 64, {"kernel": "c"}], [64, 1 << 30, {}]]


@pytest.fixture
def humming(monkeypatch: pytest.MonkeyPatch, ampere: None) -> None:
    modules = {name: ModuleType(name) for name in ("humming", "humming.layer", "humming.ops", "humming.tune")}
    found: dict[str, Any] = modules
    found["humming.layer"].HummingLayer = FakeLayer
    found["humming.ops"].pack_weight = lambda codes, bits: codes
    found["humming.tune"].get_heuristics_config = lambda config: RANGES
    modules["humming"].__spec__ = SimpleNamespace()  # type: ignore[assignment]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **more: zeros(*size, **more))
    monkeypatch.setattr(FakeLayer, "made", [])
    peers.humming_missing.cache_clear()
    yield
    peers.humming_missing.cache_clear()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", ["w4", "w3"])
def test_humming_gets_the_codes_and_scales_of_the_case(humming: None, format: str, dtype: str) -> None:
    here = replace(case(format), dtype=dtype)
    weight, x = contenders.random_weight(here, "cpu"), contenders.random_input(here, "cpu")
    peer = peers.Humming(format)
    assert peer.why_not(here, on_cuda(weight)) == ""
    calls = peer.calls(here, [weight], 3)
    assert len(calls) == len(FakeLayer.made) == 3
    wanted = check.reference(x, peer.held(here, weight))
    for call in calls:
        assert check.check(call, x, wanted).problem == ""


def test_humming_compiles_only_what_the_rows_of_the_run_need(humming: None) -> None:
    peer = peers.Humming("w4")
    found = [case(m=m) for m in (8, 30)]
    peer.compile(found)
    (layer,) = FakeLayer.made
    assert [json.loads(asked) for asked in layer.asked] == [RANGES[:3]] * 2  # that of one row is always there
    calls = peer.calls(found[0], [contenders.random_weight(found[0], "cpu")], 1)
    calls[0](contenders.random_input(found[0], "cpu"))
    assert json.loads(FakeLayer.made[-1].asked[-1]) == RANGES[:3]


def test_humming_that_does_not_compile_says_why(humming: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> None:
        raise AssertionError("unsupported\nmore")

    monkeypatch.setattr(FakeLayer, "transform", broken)
    peer, here = peers.Humming("w4"), case()
    weight = contenders.random_weight(here, "cpu")
    with pytest.raises(RuntimeError, match=r"humming: AssertionError: unsupported$"):
        peer.calls(here, [weight], 1)
    peer.compile([here])
    assert peer.why_not(here, on_cuda(weight)) == "it does not compile here: AssertionError: unsupported"
    other = case(n=128)
    assert peer.why_not(other, on_cuda(weight)) == ""


def test_humming_that_refuses_a_cut_down_choice_gets_its_own(
    humming: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeLayer.__call__

    def picky(self: Any, x: torch.Tensor, tuning_config: Any = None) -> torch.Tensor:
        if tuning_config is not None:
            raise TypeError("unhashable")
        return run(self, x, tuning_config)

    monkeypatch.setattr(FakeLayer, "__call__", picky)
    peer, here = peers.Humming("w4"), case()
    weight, x = contenders.random_weight(here, "cpu"), contenders.random_input(here, "cpu")
    peer.compile([here])
    assert peer.why_not(here, on_cuda(weight)) == ""
    (call,) = peer.calls(here, [weight], 1)
    assert check.check(call, x, check.reference(x, weight)).problem == ""


def test_another_version_of_humming_uses_all_of_its_kernels(
    humming: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["humming.tune"], "get_heuristics_config")
    peer, here = peers.Humming("w4"), case()
    peer.compile([here])
    assert FakeLayer.made[0].asked == [None]


def test_humming_says_when_it_is_not_there(monkeypatch: pytest.MonkeyPatch, ampere: None) -> None:
    here = case("w3")
    weight = on_cuda(contenders.random_weight(here, "cpu"))
    monkeypatch.setattr(peers.util, "find_spec", lambda name: None)
    peers.humming_missing.cache_clear()
    try:
        reason = peers.Humming("w3").why_not(here, weight)
    finally:
        peers.humming_missing.cache_clear()
    assert reason == "not installed: pip install humming-kernels"


def test_shapes_that_humming_does_not_have_are_named(humming: None) -> None:
    here = case(n=100)
    reason = peers.Humming("w4").why_not(here, on_cuda(contenders.random_weight(here, "cpu")))
    assert "N % 64" in reason
