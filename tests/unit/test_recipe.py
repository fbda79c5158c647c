"""What a recipe does to a weight: "keep" leaves it alone, whatever the source and whoever asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import packed_state, random_state, tiny_config, write_gguf, write_hf

from labkit.errors import InputError
from labkit.models.checkpoint import load_checkpoint
from labkit.models.hf import load_hf
from labkit.models.quantize_checkpoint import quantize_checkpoint
from labkit.models.recipe import Recipe
from labkit.models.sources import open_source
from labkit.models.zoo import load_file
from labkit.quant.quantize import quantize

SOURCES = ("Q4_0", "Q4_1", "Q8_0", "gptq", "awq", "bf16")
DOWN = "model.layers.0.mlp.down_proj.weight"


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return type(one) is type(two) and one.dtype == two.dtype and torch.equal(one, two)
    parts, others = one.tensors(), two.tensors()
    return parts.keys() == others.keys() and all(torch.equal(parts[part], others[part]) for part in parts)


def make(folder: Path, kind: str) -> Path:
    """A model whose matrices are stored as ``kind``."""
    config = tiny_config("llama")
    state = random_state(config)
    if kind.startswith("Q"):
        return write_gguf(folder / "m.gguf", config, state, kind=kind)
    if kind in ("gptq", "awq"):
        state, _ = packed_state(state, kind, group=16, symmetric=False)
        config["quantization_config"] = {"quant_method": kind, "bits": 4, "group_size": 16, "version": "gemm"}
    if kind == "bf16":
        state = {name: tensor.bfloat16() for name, tensor in state.items()}
    source = write_hf(folder / "src", config, state)
    if kind == "labkit":
        return quantize_checkpoint(source, folder / "made", bits="mixed").out
    return source


def by_command(source: Path, **options: Any) -> Any:
    return load_checkpoint(quantize_checkpoint(source, source.parent / "out", **options).out)


@pytest.mark.parametrize(
    ("kind", "door"),
    [(kind, door) for kind in SOURCES for door in (load_file, by_command)] + [("labkit", load_file)],
)
@pytest.mark.parametrize("bits", [None, "keep"])
def test_without_a_preset_only_what_a_rule_names_changes(
    tmp_path: Path, kind: str, door: Callable[..., Any], bits: str | None
) -> None:
    source = make(tmp_path, kind)
    stored = load_file(source).weights
    rules = {"*.down_proj": "w3", "model.layers.1.self_attn.q_proj": "none"}
    got = door(source, bits=bits, per_layer=rules, group_size=32).weights
    assert set(got) == set(stored)
    for name, weight in stored.items():
        dense = weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
        if name.endswith("down_proj.weight"):
            assert same(got[name], quantize(dense, "w3", 32)), name
        elif name == "model.layers.1.self_attn.q_proj.weight":
            assert torch.equal(got[name].float(), dense), name
        else:
            assert same(got[name], weight), name


def test_load_hf_keeps_packed_matrices_beside_a_rule(tmp_path: Path) -> None:
    source = make(tmp_path, "gptq")
    stored: Any = load_hf(source).weights
    got: Any = load_hf(source, per_layer={"head": "q8"}).weights
    assert getattr(got["lm_head.weight"], "format", None) == "q8_0"
    assert all(same(got[name], weight) for name, weight in stored.items() if name != "lm_head.weight")
    floats: Any = load_hf(source, bits="none", per_layer={"head": "q8"}).weights
    assert floats[DOWN].dtype == torch.float32


def test_keep_and_none_are_different_recipes(tmp_path: Path) -> None:
    rules = {"mlp": "w3"}
    keep, floats = Recipe.of(None, per_layer=rules), Recipe.of("none", per_layer=rules)
    assert keep == Recipe.of("keep", per_layer=rules) and keep.to_json() != floats.to_json()
    q_proj, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    assert keep.plan([q_proj, DOWN, norm]) == {q_proj: "keep", DOWN: "w3", norm: "none"}
    assert floats.plan([q_proj, DOWN, norm]) == {q_proj: "none", DOWN: "w3", norm: "none"}
    source = make(tmp_path, "gptq")
    quantize_checkpoint(source, tmp_path / "out", bits="keep", per_layer=rules)
    with pytest.raises(InputError, match="other options"):
        quantize_checkpoint(source, tmp_path / "out", bits="none", per_layer=rules)


def test_bad_options_are_refused_with_nothing_to_convert(tmp_path: Path) -> None:
    source = make(tmp_path, "Q4_0")
    with pytest.raises(InputError, match="group_size"):
        load_file(source, group_size=48)


@pytest.mark.parametrize(
    ("form", "quantised", "size"),
    [("none", True, 64 * 96 * 4), ("none", False, 777), ("keep", True, 777), ("keep", False, 777)],
)
def test_estimates(form: str, quantised: bool, size: int) -> None:
    assert Recipe.of("w4").estimate(form, (64, 96), 777, quantised=quantised) == size


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "gptq"])
def test_what_is_made_float_is_estimated_exactly(tmp_path: Path, kind: str) -> None:
    source = make(tmp_path, kind)
    result = quantize_checkpoint(source, tmp_path / "out", bits="none", shard_bytes=1)
    floats = sum(tensor.nbytes for tensor in load_checkpoint(result.out).weights.values())
    opened = open_source(source)
    recipe = Recipe.of("none")
    estimated = sum(
        recipe.estimate(form, opened.shape(name), opened.nbytes(name), quantised=opened.is_quantised(name))
        for name, form in recipe.plan(opened.names).items()
    )
    opened.close()
    assert estimated == floats
