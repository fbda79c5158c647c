"""Quantising a loaded model again: which weight gets what, and what stays."""

from __future__ import annotations

import pytest
import torch
from gguf_files import write_gguf

from labkit.errors import InputError
from labkit.models.model import ModelFile, matrix_names
from labkit.models.requant import requantise, requantise_weights
from labkit.models.zoo import load_file, load_model
from labkit.quant.formats import GroupedWeight, QuantWeight
from labkit.quant.quantize import quantize

DOWN = "model.layers.1.mlp.down_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> ModelFile:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    return load_file(path)


def form(weight) -> str:
    return "none" if isinstance(weight, torch.Tensor) else weight.format


@pytest.mark.parametrize("bits", ["w4", "w3"])
@pytest.mark.parametrize("group", [32, 64, "row"])
@pytest.mark.parametrize("offset", [True, False])
def test_every_matrix_is_rounded_from_its_dequantised_values(file, bits, group, offset):
    weights = requantise_weights(file.weights, bits=bits, group_size=group, offset=offset)
    assert list(weights) == list(file.weights)
    for name in matrix_names(file.config):
        expected = quantize(file.weights[name].dequantize(), bits, group, offset=offset)
        assert isinstance(weights[name], QuantWeight) and weights[name].format == bits
        assert torch.equal(weights[name].packed, expected.packed)
        assert torch.equal(weights[name].scales, expected.scales)
        assert (weights[name].offset is not None) == offset
    assert weights[EMBED] is file.weights[EMBED]  # already Q8_0
    assert weights["model.norm.weight"] is file.weights["model.norm.weight"]


def test_mixed_map_by_role_name_and_pattern(file):
    weights = requantise_weights(
        file.weights, bits="w4", per_layer={"mlp": "w3", "*.layers.1.mlp.down_proj": "q8"}
    )
    assert form(weights[Q]) == "w4" and form(weights[DOWN]) == "q8_0"
    assert form(weights["model.layers.0.mlp.down_proj.weight"]) == "w3"
    mixed = requantise_weights(file.weights, bits="mixed")
    assert {form(mixed[name]) for name in matrix_names(file.config)} == {"w3", "w4"}
    both = requantise_weights(file.weights, bits="mixed", per_layer={"mlp": "w3", "attn": "w4"})
    assert form(both[DOWN]) == "w3" and form(both[Q]) == "w4"


def test_none_is_float_and_no_preset_leaves_the_rest(file):
    floats = requantise_weights(file.weights, bits="none")
    assert all(isinstance(weight, torch.Tensor) for weight in floats.values())
    assert torch.equal(floats[Q], file.weights[Q].dequantize())
    some = requantise_weights(file.weights, bits=None, per_layer={"mlp": "w3"})
    assert some[Q] is file.weights[Q] and form(some[DOWN]) == "w3"
    embedding = requantise_weights(file.weights, bits=None, per_layer={"embed": "w4"})
    assert form(embedding[EMBED]) == "w4"


def test_a_decoder_is_requantised_like_its_file(file, tmp_path):
    model = requantise(file, bits="w3", group_size=32, offset=True)
    again = requantise(requantise(file, bits=None), bits="w3", group_size=32, offset=True)
    tokens = torch.arange(12).view(1, -1)
    assert torch.equal(model.decoder(tokens), again.decoder(tokens))
    assert model.info["requantised"] == {"bits": "w3", "group_size": 32, "offset": True, "per_layer": {}}
    assert model.tokenizer is file.tokenizer


def test_quantised_embedding_of_four_bits_is_head_and_table(file):
    model = requantise(file, bits="none", per_layer={"embed": "w4"})
    dense = requantise(requantise(file, bits="none", per_layer={"embed": "w4"}), bits="none")
    tokens = torch.arange(12).view(1, -1)
    assert (model.decoder(tokens) - dense.decoder(tokens)).abs().max() < 1e-4
    assert isinstance(model.decoder.embedding, QuantWeight)


def test_half_precision_models_stay_half(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    model = load_model(tmp_path / "m.gguf", dtype=torch.bfloat16)
    assert requantise(model, bits="w3").decoder(torch.tensor([[3]])).dtype == torch.bfloat16


def test_progress_names_every_matrix(file):
    seen: list[str] = []
    requantise_weights(file.weights, bits="w4", progress=seen.append)
    assert set(seen) == {EMBED, *matrix_names(file.config)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": "w5"}, "bits: got 'w5'"),
        ({"per_layer": {"mpl": "w3"}}, "'mpl', which matches no weight"),
        ({"per_layer": {"mlp": "w5"}}, "w5"),
        ({"group_size": 48}, "group_size"),
        ({"offset": 1}, "offset"),
    ],
)
def test_bad_options_are_refused(file, options, message):
    with pytest.raises(InputError, match=message):
        requantise_weights(file.weights, **options)


def test_q8_of_the_rest(file):
    weights = requantise_weights(file.weights, bits="q8")
    assert all(isinstance(weights[name], GroupedWeight) for name in matrix_names(file.config))
