"""The map from layers to formats: presets, own rules, the last one wins, typos are refused."""

from __future__ import annotations

import pytest
from checkpoints import tiny_config

from labkit.errors import InputError
from labkit.models.config import ModelConfig
from labkit.models.layer_bits import PRESETS, layer_bits
from labkit.models.model import expected_shapes
from labkit.models.recipe import Recipe, is_matrix

NAMES = list(expected_shapes(ModelConfig.from_hf_dict(tiny_config("qwen2"))))
MATRICES = [name for name in NAMES if is_matrix(name)]


@pytest.mark.parametrize("bits", PRESETS)
def test_every_matrix_of_a_preset_has_a_format_and_vectors_have_none(bits: str) -> None:
    plan = Recipe.of(bits).plan(NAMES)
    assert list(plan) == NAMES
    for name, form in plan.items():
        if name not in MATRICES:
            assert form == "none"
        elif bits in ("w4", "w3", "q8"):
            assert form == ("q8" if "proj" not in name else bits)


def test_mixed_gives_attention_and_down_proj_the_fourth_bit() -> None:
    plan = layer_bits("mixed").plan(MATRICES)
    assert plan["model.layers.0.self_attn.q_proj.weight"] == "w4"
    assert plan["model.layers.1.mlp.gate_proj.weight"] == "w3"
    assert plan["model.layers.1.mlp.down_proj.weight"] == "w4"
    assert plan["lm_head.weight"] == plan["model.embed_tokens.weight"] == "q8"


def test_own_rules_win_in_their_order() -> None:
    plan = layer_bits("w4", {"mlp": "w3", "model.layers.0.*": "q8", "*.o_proj": "none"}).plan(MATRICES)
    assert plan["model.layers.0.mlp.up_proj.weight"] == "q8"
    assert plan["model.layers.1.mlp.up_proj.weight"] == "w3"
    assert plan["model.layers.0.self_attn.o_proj.weight"] == "none"
    assert plan["model.layers.1.self_attn.q_proj.weight"] == "w4"


def test_mistakes_are_named() -> None:
    with pytest.raises(InputError, match="'w5'"):
        layer_bits("w5")
    with pytest.raises(InputError, match="'w8'"):
        layer_bits("w4", {"mlp": "w8"})
    with pytest.raises(InputError, match="matches no weight"):
        layer_bits("w4", {"model.layers.7.*": "w3"}).plan(MATRICES)
    with pytest.raises(InputError, match="weight name pattern"):
        layer_bits("w4", {"": "w3"})
    layer_bits("w4", {"head": "w4"}).plan(["model.embed_tokens.weight"])  # tied: nothing to match


def test_a_recipe_refuses_bad_options() -> None:
    for group in (48, 0, True, "rows"):
        with pytest.raises(InputError, match="group_size"):
            Recipe.of("w4", group_size=group)
    with pytest.raises(InputError, match="offset"):
        Recipe.of("w4", offset=1)  # type: ignore[arg-type]
