"""Hugging Face folders: what loads, what is refused, and that nothing half loaded comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    is_linear,
    random_state,
    reference_logits,
    tiny_config,
    write_hf,
    write_index,
    write_raw_safetensors,
)
from safetensors.torch import load_file, save_file

from labkit.errors import InputError, MissingModelError, ModelFileError
from labkit.models.hf import HfFolder, load_hf
from labkit.models.model import Model
from labkit.quant.formats import QuantWeight
from labkit.quant.grouped import GroupedWeight
from labkit.quant.quantize import quantize

IDS = torch.randint(0, 320, (2, 11), generator=torch.Generator().manual_seed(3))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def logits(file: Any) -> torch.Tensor:
    with torch.no_grad():
        return Model.build(file).decoder(IDS)


@pytest.mark.parametrize(
    ("arch", "changes", "shards", "dtype"),
    [
        ("llama", {}, 1, torch.float32),
        ("llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3}, 3, torch.float16),
        ("qwen2", {"tie_word_embeddings": True}, 2, torch.bfloat16),
        ("qwen3", {}, 4, torch.bfloat16),
    ],
)
def test_logits_agree_with_transformers(
    tmp_path: Path, arch: str, changes: dict[str, Any], shards: int, dtype: torch.dtype
) -> None:
    config = tiny_config(arch, **changes)
    state = random_state(config, dtype=dtype)
    file = load_hf(write_hf(tmp_path / "m", config, state, shards=shards))
    assert file.info["format"] == "hf" and file.info["name"] == "m"
    weights: dict[str, Any] = dict(file.weights)
    assert all(torch.equal(weights[name], state[name]) for name in weights)
    assert (logits(file) - reference_logits(config, state, IDS)).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("bits", "group", "offset"), [("w4", 32, False), ("w3", 16, True), ("q8", None, False)]
)
def test_quantising_on_load_is_quantise_of_each_matrix(
    tmp_path: Path, bits: str, group: int | None, offset: bool
) -> None:
    config = tiny_config("qwen3")
    state = random_state(config, dtype=torch.bfloat16)
    seen: list[tuple[int, int, int, int]] = []
    file = load_hf(
        write_hf(tmp_path / "m", config, state, shards=2),
        bits=bits,
        group_size=group,
        offset=offset,
        progress=lambda *now: seen.append(now),
    )
    for name, weight in file.weights.items():
        if is_linear(name) and bits != "q8":
            assert isinstance(weight, QuantWeight)
            expected = quantize(state[name], bits, group or 32, offset=offset)
        elif weight.shape[0:1] and len(weight.shape) == 2:
            assert isinstance(weight, GroupedWeight), name
            expected = quantize(state[name], "q8_0", 32)
        else:
            assert isinstance(weight, torch.Tensor) and torch.equal(weight, state[name])
            continue
        assert weight.metadata() == expected.metadata()
        assert all(torch.equal(a, b) for a, b in zip(weight.tensors().values(), expected.tensors().values()))
    assert [now[0] for now in seen] == list(range(1, len(state) + 1))
    assert seen[-1][2] == seen[-1][3] == sum(tensor.nbytes for tensor in state.values())


def test_a_map_by_layer(tmp_path: Path) -> None:
    config = tiny_config("llama")
    folder = write_hf(tmp_path / "m", config, random_state(config))
    file = load_hf(folder, bits="mixed", per_layer={"model.layers.1.*": "none", "head": "w4"})
    weights: dict[str, Any] = dict(file.weights)
    assert weights["model.layers.0.self_attn.q_proj.weight"].format == "w4"
    assert weights["model.layers.0.mlp.up_proj.weight"].format == "w3"
    assert isinstance(weights["model.layers.1.mlp.up_proj.weight"], torch.Tensor)
    assert weights["lm_head.weight"].format == "w4"
    with pytest.raises(InputError, match="matches no weight"):
        load_hf(folder, per_layer={"model.layers.9.*": "w4"})


def test_a_tied_head_may_be_there_when_it_is_the_embedding(tmp_path: Path) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    state = random_state(config)
    same = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    file = load_hf(write_hf(tmp_path / "same", config, same, shards=2))
    assert "lm_head.weight" not in file.weights
    assert (logits(file) - reference_logits(config, state, IDS)).abs().max() < 1e-3
    other = state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1}
    with pytest.raises(ModelFileError, match="differs from the embedding"):
        load_hf(write_hf(tmp_path / "other", config, other))


def test_the_tokenizer_and_the_ends_come_along(tmp_path: Path) -> None:
    config = tiny_config("llama")
    folder = write_hf(tmp_path / "m", config, random_state(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}', encoding="utf-8")
    file = load_hf(folder)
    assert file.config.eos_token_ids == (7, 2)
    assert file.tokenizer is not None
    assert file.tokenizer.decode(file.tokenizer.encode("héllo 世界")) == "héllo 世界"
    (folder / "tokenizer.json").unlink()
    assert load_hf(folder).tokenizer is None


def test_one_file_of_another_name_and_buffers_of_old_checkpoints(tmp_path: Path) -> None:
    config = tiny_config("llama")
    state = random_state(config) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    folder = write_hf(tmp_path / "m", config, state)
    (folder / "model.safetensors").rename(folder / "other-name.safetensors")
    assert len(load_hf(folder).weights) == len(state) - 1


def test_float_weights_stay_on_disk_until_used(tmp_path: Path) -> None:
    config = tiny_config("llama")
    folder = HfFolder.open(write_hf(tmp_path / "m", config, random_state(config)))
    mapped: Any = folder.read("lm_head.weight", mapped=True)
    copied: Any = folder.read("lm_head.weight")
    assert torch.equal(mapped, copied)
    file = folder.files["lm_head.weight"]
    base = file.view("model.norm.weight").data_ptr()
    # Two views lie within one mapping of the file; a copy lies elsewhere.
    assert abs(mapped.data_ptr() - base) < file.header.file_size <= abs(copied.data_ptr() - base)


Damage = Callable[[Path, dict[str, Any], dict[str, torch.Tensor]], None]


def _edit_config(**changes: Any) -> Damage:
    def damage(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")

    return damage


def _edit_state(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        new = dict(state)
        change(new)
        save_file({name: tensor.contiguous() for name, tensor in new.items()}, folder / "model.safetensors")

    return damage


def _write(name: str, content: bytes) -> Damage:
    def damage(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        (folder / name).write_bytes(content)

    return damage


def _truncate(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _pickle_only(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _two_files(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGES: list[tuple[str, Damage, str]] = [
    ("no config", lambda f, c, s: (f / "config.json").unlink(), "no config.json"),
    ("config is not JSON", _write("config.json", b"{"), "not JSON"),
    ("config is a list", _write("config.json", b"[]"), "a JSON object"),
    ("architecture", _edit_config(model_type="gpt2"), "'gpt2'"),
    ("activation", _edit_config(hidden_act="gelu"), "gelu"),
    ("lying size", _edit_config(hidden_size=10**12), "hidden_size"),
    (
        "quantised by another",
        _edit_config(quantization_config={"quant_method": "bitsandbytes"}),
        "bitsandbytes",
    ),
    ("quantisation is text", _edit_config(quantization_config="gptq"), "quantization_config"),
    ("truncated", _truncate, "model.safetensors"),
    ("no weights", lambda f, c, s: (f / "model.safetensors").unlink(), "no *.safetensors file"),
    ("pickle", _pickle_only, "safetensors"),
    ("two files", _two_files, "no index"),
    ("missing tensor", _edit_state(lambda s: s.pop(UP)), UP),
    ("extra layer", _edit_config(num_hidden_layers=1), "a tensor that this architecture does not have"),
    ("extra tensor", _edit_state(lambda s: s.update({"model.extra": torch.ones(1)})), "'model.extra'"),
    ("wrong shape", _edit_state(lambda s: s.update({UP: s[UP].t()})), "[96, 64] (from config.json)"),
    ("wrong dtype", _edit_state(lambda s: s.update({UP: s[UP].to(torch.float64)})), "dtype F64"),
    ("not a number", _edit_state(lambda s: s.update({UP: s[UP] * float("nan")})), "nan"),
    (
        "infinite norm",
        _edit_state(lambda s: s.update({"model.norm.weight": s["model.norm.weight"] / 0})),
        "inf",
    ),
]


@pytest.mark.parametrize("bits", [None, "w4"])
@pytest.mark.parametrize(("damage", "words"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_damage_is_one_error_that_names_it(
    tmp_path: Path, damage: Damage, words: str, bits: str | None
) -> None:
    config = tiny_config("llama")
    state = random_state(config)
    folder = write_hf(tmp_path / "m", config, state)
    damage(folder, config, state)
    with pytest.raises((ModelFileError, MissingModelError)) as caught:
        load_hf(folder, bits=bits)
    assert words in str(caught.value) and str(folder) in str(caught.value)


def sharded(folder: Path) -> tuple[Path, dict[str, str]]:
    config = tiny_config("llama")
    write_hf(folder, config, random_state(config), shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return folder, index["weight_map"]


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "C:x.safetensors",
        "x.bin",
        ".safetensors",
        3,
        None,
    ],
)
def test_a_shard_name_cannot_leave_the_folder(tmp_path: Path, name: Any) -> None:
    folder, weight_map = sharded(tmp_path / "m")
    save_file({UP: torch.ones(96, 64)}, tmp_path / "x.safetensors")
    write_index(folder, weight_map | {UP: name})
    with pytest.raises(ModelFileError, match="same folder"):
        load_hf(folder)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    folder, weight_map = sharded(tmp_path / "m")
    last = sorted(set(weight_map.values()))[-1]
    first = sorted(set(weight_map.values()))[0]
    write_index(folder, weight_map | {UP: first})
    with pytest.raises(ModelFileError, match=f"no tensor '{UP}'"):
        load_hf(folder)
    write_index(folder, {name: file for name, file in weight_map.items() if name != UP})
    with pytest.raises(ModelFileError, match="does not list"):
        load_hf(folder)
    write_index(folder, {})
    with pytest.raises(ModelFileError, match="weight_map"):
        load_hf(folder)
    write_index(folder, weight_map)
    load_hf(folder)
    tensors = load_file(folder / last)
    (folder / last).unlink()
    with pytest.raises(MissingModelError, match="no such shard"):
        load_hf(folder)
    write_raw_safetensors(folder / last, b"{}", length=2**50)
    with pytest.raises(ModelFileError, match="header length"):
        load_hf(folder)
    save_file(tensors, folder / last)
    load_hf(folder)


def test_options_are_checked_before_the_folder_is_read(tmp_path: Path) -> None:
    for options in ({"bits": "w2"}, {"group_size": 48}, {"offset": "yes"}, {"per_layer": {"mlp": "w2"}}):
        with pytest.raises(InputError) as caught:
            load_hf(tmp_path / "not there", **options)  # type: ignore[arg-type]
        assert not isinstance(caught.value, MissingModelError)
    with pytest.raises(MissingModelError):
        load_hf(tmp_path / "not there")


def test_values_that_a_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    state = random_state(config)
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name] * 1e7
    folder = write_hf(tmp_path / "m", config, state)
    with pytest.raises(ModelFileError, match=r"up_proj\.weight"):
        load_hf(folder, bits="w4")
    load_hf(folder)
