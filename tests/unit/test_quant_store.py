"""Files of quantised weights: round trip, memory mapping, damaged and lying files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import save_file

from labkit.errors import InputError, ModelFileError
from labkit.quant import QuantWeight, load_quantized, quantize, save_quantized


def sample(k: int = 70) -> dict:
    generator = torch.Generator().manual_seed(1)
    original = torch.randn(20, k, generator=generator)
    order = torch.randperm(k, generator=generator)
    plain = quantize(original, "w4", 32, offset=True)
    return {
        "model.q_proj.weight": quantize(original, "w3", 64),
        "model.k_proj.weight": plain,
        "model.v_proj.weight": QuantWeight(
            "w4", plain.packed, plain.scales, plain.offset.float(), 20, k, 32, order
        ),
        "model.embed.weight": quantize(original, "q8_0"),
        "model.embed4.weight": quantize(original, "q4_0"),
        "model.norm.weight": torch.randn(70).bfloat16(),
        "model.k_proj.bias": torch.randn(3, 5),
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    mine, theirs = left.tensors(), right.tensors()
    return (
        type(left) is type(right)
        and left.metadata() == right.metadata()
        and mine.keys() == theirs.keys()
        and all(same(mine[name], theirs[name]) for name in mine)
    )


@settings(max_examples=20, deadline=None)
@given(k=st.integers(1, 300))
def test_round_trip(tmp_path_factory, k):
    path = tmp_path_factory.mktemp("store") / "weights.safetensors"
    saved = sample(k)
    size = save_quantized(path, saved, {"name": "测试", "bits": 4})
    assert path.stat().st_size == size
    weights, metadata = load_quantized(path)
    assert metadata == {"name": "测试", "bits": 4}
    assert weights.keys() == saved.keys()
    for name, weight in saved.items():
        assert same(weight, weights[name]), name


def test_other_readers_can_open_it(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_quantized(path, sample())
    with safe_open(path, framework="pt") as file:
        assert "model.k_proj.weight.packed" in file.keys()  # noqa: SIM118
        assert json.loads(file.metadata()["labkit.weights"])["model.k_proj.weight"]["group_size"] == 32
    header = int.from_bytes(path.read_bytes()[:8], "little")
    fields = json.loads(path.read_bytes()[8 : 8 + header])
    widths = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "I32": 4}
    assert (8 + header) % 8 == 0
    for name, field in fields.items():
        if name != "__metadata__":  # every tensor lies on a multiple of its width
            assert field["data_offsets"][0] % widths[field["dtype"]] == 0


def test_some_names_only(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_quantized(path, sample())
    assert set(load_quantized(path, names=["odd", "model.q_proj.weight"]).weights) == {
        "odd",
        "model.q_proj.weight",
    }
    with pytest.raises(InputError, match="names: got 'nothing'"):
        load_quantized(path, names=["nothing"])


def test_a_name_that_begins_like_another(tmp_path):
    path = tmp_path / "weights.safetensors"
    weight = quantize(torch.randn(4, 32), "w4")
    saved = {"a": weight, "a.bias": torch.ones(4), "a.b": weight, "ab": torch.ones(2)}
    save_quantized(path, saved)
    loaded = load_quantized(path).weights
    assert loaded.keys() == saved.keys() and all(same(saved[name], loaded[name]) for name in saved)


def test_loading_maps_the_file_and_does_not_copy_it(tmp_path):
    path = tmp_path / "big.safetensors"
    rows, k = 8000, 16000  # 64 MB of codes
    packed = torch.zeros(rows, k // 2, dtype=torch.uint8)
    packed += 17
    save_quantized(path, {"w": QuantWeight("w4", packed, torch.ones(rows, 1).half(), None, rows, k, k)})
    code = """
import sys, psutil
from labkit.quant import load_quantized
process = psutil.Process()
before = process.memory_info().rss
weight = load_quantized(sys.argv[1]).weights["w"]
assert weight.dequantize(rows=slice(0, 2)).eq(1).all()
maps = process.memory_maps() if hasattr(process, "memory_maps") else None
mapped = maps is None or any(entry.path == sys.argv[1] for entry in maps)
print(process.memory_info().rss - before, mapped)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, encoding="utf-8", check=True
    )
    grown, mapped = done.stdout.split()
    assert mapped == "True"
    assert int(grown) < 32 << 20, f"resident memory grew by {int(grown)} bytes for a 64 MB file"


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_quantized(path, {"a": torch.ones(3)})
    before = path.read_bytes()
    for weights, metadata, argument in (
        ({"a": [1.0]}, None, "weights['a']"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, None, "weights['a']"),
        ({"a": quantize(torch.ones(1, 32), "w4"), "a.packed": torch.ones(1)}, None, "weights['a.packed']"),
        ({"a": torch.ones(1)}, {"x": object()}, "metadata"),
        ({"a": torch.ones(1)}, {"x": float("nan")}, "metadata"),
    ):
        with pytest.raises(InputError) as caught:
            save_quantized(path, weights, metadata)
        assert caught.value.argument == argument
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# --- damaged files ------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_quantized(path, {"w": quantize(torch.randn(20, 70), "w4", offset=True), "t": torch.ones(5)})
    return path


@pytest.mark.parametrize("keep", [0, 4, 8, 60, 0.5, -1])
def test_truncated(good, keep):
    whole = good.read_bytes()
    good.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ModelFileError, match="complete safetensors file"):
        load_quantized(good)


def test_missing_and_foreign(tmp_path):
    with pytest.raises(ModelFileError, match="no such file"):
        load_quantized(tmp_path / "nothing.safetensors")
    with pytest.raises(ModelFileError, match="no such file"):
        load_quantized(tmp_path)
    (tmp_path / "text.safetensors").write_text("hello, this is no model at all", encoding="utf-8")
    with pytest.raises(ModelFileError, match="complete safetensors file"):
        load_quantized(tmp_path / "text.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "plain.safetensors")
    with pytest.raises(ModelFileError, match=r"no labkit metadata.*labkit quantize SRC OUT"):
        load_quantized(tmp_path / "plain.safetensors")


def rewrite(path: Path, **changed) -> None:
    """The same file with other metadata, and with the tensors of ``tensors`` replaced."""
    with safe_open(path, framework="pt") as file:
        text = dict(file.metadata())
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    tensors.update(changed.pop("tensors", {}))
    text.update({f"labkit.{name}": value for name, value in changed.items()})
    save_file({name: value for name, value in tensors.items() if value is not None}, path, text)


W = {"format": "w4", "n": 20, "k": 70, "group_size": 32, "parts": ["packed", "scales", "offset"]}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"version": "2"}, "labkit format version 2"),
        ({"weights": "{"}, "labkit.weights"),
        ({"weights": "[]"}, "labkit.weights: list"),
        ({"metadata": "3"}, "labkit.metadata: int"),
        ({"weights": '{"w": 3}'}, "format, n, k and group_size"),
        ({"weights": json.dumps({"w": {**W, "format": "w5"}})}, "format 'w5'"),
        ({"weights": json.dumps({"w": {**W, "k": 700_000_000}})}, "w.packed: got uint8 [20, 48]"),
        ({"weights": json.dumps({"w": {**W, "n": "many"}})}, "metadata n: got 'many'"),
        ({"weights": json.dumps({"w": {**W, "n": -1}})}, "w.n: got -1"),
        ({"weights": json.dumps({"w": {**W, "group_size": 0}})}, "w.group_size: got 0"),
        ({"weights": json.dumps({"w": {**W, "format": "w3"}})}, "w.packed"),
        ({"weights": json.dumps({"w": {**W, "format": "q8_0"}})}, "w.codes_t: got no such tensor"),
        ({"weights": json.dumps({"v": W})}, "v.packed: got no such tensor"),
        ({"weights": json.dumps({"w": {**W, "parts": 3}})}, "w: parts 3"),
        ({"weights": json.dumps({"w": {**W, "parts": ["bits"]}})}, "w: parts ['bits']"),
        ({"tensors": {"w.scales": None}}, "w.scales: got no such tensor"),
        ({"tensors": {"w.scales": torch.full((20, 3), float("nan")).half()}}, "w.scales: got nan at [0, 0]"),
        ({"tensors": {"w.packed": torch.zeros(48, 20, dtype=torch.uint8)}}, "looks transposed"),
        ({"tensors": {"w.offset": torch.zeros(20, 4)}}, "w.offset: got float32 [20, 4]"),
    ],
)
def test_metadata_and_tensors_that_disagree(good, changed, words):
    rewrite(good, **changed)
    with pytest.raises(ModelFileError) as caught:
        load_quantized(good)
    assert words in str(caught.value) and good.name in str(caught.value)


def test_a_tensor_named_like_a_part_stays_itself(tmp_path):
    weights = sample()
    weight = weights["model.q_proj.weight"]  # has no offset
    named = {"a": weight, "a.offset": torch.full((20, 2), 5.0).half(), "a.codes_t": torch.ones(3)}
    save_quantized(tmp_path / "x", named)
    loaded = load_quantized(tmp_path / "x").weights
    assert set(loaded) == set(named)
    assert all(same(loaded[name], named[name]) for name in named)


@pytest.mark.parametrize("name", ["a.packed", "__metadata__"])
def test_names_that_cannot_be_stored_are_refused(tmp_path, name):
    with pytest.raises(InputError):
        save_quantized(tmp_path / "x", {"a": sample()["model.q_proj.weight"], name: torch.ones(3)})
    assert not (tmp_path / "x").exists()
