"""Architecture records: read from Hugging Face and GGUF, validated once."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from labkit.errors import ModelFileError
from labkit.models.config import ModelConfig
from labkit.models.model import expected_shapes, layer_of, matrix_names, role, shape_of
from labkit.nn.rope import inverse_frequencies

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
}


def hf(**changes) -> ModelConfig:
    return ModelConfig.from_hf_dict(LLAMA | changes)


def test_llama_config():
    config = hf()
    assert (config.head_dim, config.group, config.num_layers) == (8, 3, 2)
    assert config.eos_token_ids == (2, 7) and config.rope_scaling is None
    assert not (config.attention_bias or config.qk_norm or config.tie_word_embeddings)
    assert hf(num_key_value_heads=None).num_kv_heads == 6
    assert hf(eos_token_id=5).eos_token_ids == (5,) and hf(eos_token_id=None).eos_token_ids == ()


def test_family_differences():
    qwen2 = hf(model_type="qwen2")
    assert qwen2.attention_bias and not qwen2.output_bias and not qwen2.qk_norm
    qwen3 = hf(model_type="qwen3")
    assert qwen3.qk_norm and qwen3.head_dim == 128 and not qwen3.attention_bias
    assert hf(model_type="qwen3", head_dim=16).head_dim == 16
    biased = hf(attention_bias=True, mlp_bias=True)
    assert biased.attention_bias and biased.output_bias and biased.mlp_bias


def test_old_and_new_spelling_of_rope_scaling():
    new = hf(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    assert new.rope_theta == 5e5 and new.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    old = hf(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5e5)
    assert old == new
    assert hf(rope_scaling={"rope_type": "default"}).rope_scaling is None
    yarn = hf(rope_scaling={"type": "yarn", "original_max_position_embeddings": 128})
    assert yarn.rope_scaling is not None and yarn.rope_scaling["factor"] == 4.0
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert (hf(rope_scaling=llama3).rope_scaling or {})["original_max_position_embeddings"] == 512


def test_record_round_trips_through_json_and_pickle():
    config = hf(rope_scaling={"type": "linear", "factor": 2.0})
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ModelFileError, match="unknown fields"):
        ModelConfig.from_dict(config.to_dict() | {"odd": 1})
    with pytest.raises(ModelFileError, match="complete"):
        ModelConfig.from_dict({"architecture": "llama"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "'mamba'; expected one of llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": None}, "hidden_size: got nothing"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 48.0}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 4}, "num_kv_heads: got 4; expected a divisor of num_heads = 6"),
        ({"num_key_value_heads": 0}, "num_kv_heads"),
        ({"head_dim": 7}, "head_dim: got 7; expected an even"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_layers"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor: got nothing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"eos_token_id": "two"}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_this_decoder_cannot_compute_is_refused(changes, message):
    with pytest.raises(ModelFileError, match=message):
        hf(**changes)


def test_sliding_window_that_no_layer_uses_is_accepted():
    assert hf(use_sliding_window=True, max_window_layers=2).num_layers == 2
    assert hf(layer_types=["full_attention"] * 2).num_layers == 2


def test_expected_shapes_and_roles():
    shapes = expected_shapes(hf(attention_bias=True))
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (16, 48)
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (16,)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (48, 90)
    assert shapes["lm_head.weight"] == (100, 48)
    assert "lm_head.weight" not in expected_shapes(hf(tie_word_embeddings=True))
    assert len(list(matrix_names(hf()))) == 14
    roles = {name: role(name) for name in shapes}
    assert roles["model.layers.0.self_attn.o_proj.weight"] == "attn"
    assert roles["model.layers.0.mlp.gate_proj.weight"] == "mlp"
    assert roles["model.layers.0.self_attn.q_proj.bias"] == "bias"
    assert roles["model.layers.0.input_layernorm.weight"] == roles["model.norm.weight"] == "norm"
    assert roles["lm_head.weight"] == "head" and roles["model.embed_tokens.weight"] == "embed"
    assert role("model.layers.0.self_attn.q_norm.weight") == "norm"
    assert layer_of("model.layers.12.mlp.up_proj.weight") == 12 and layer_of("lm_head.weight") is None
    assert shape_of(torch.zeros(3, 4)) == (3, 4)


def test_gguf_metadata():
    metadata = {
        "general.architecture": "qwen3",
        "qwen3.block_count": 2,
        "qwen3.context_length": 256,
        "qwen3.embedding_length": 48,
        "qwen3.feed_forward_length": 96,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 16,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 6,
    }
    config = ModelConfig.from_gguf(metadata, vocab_size=77, tied=True)
    assert config.qk_norm and config.head_dim == 16 and config.vocab_size == 77
    assert config.eos_token_ids == (5, 6) and config.rope_theta == 10_000.0
    for change, message in (
        ({"qwen3.rope.dimension_count": 8}, "dimension_count"),
        ({"qwen3.attention.value_length": 8}, "value_length"),
        ({"qwen3.rope.scaling.type": "yarn"}, "factor"),
        ({"general.architecture": None}, "architecture"),
        ({"qwen3.attention.key_length": "16"}, "key_length: got '16'"),
    ):
        with pytest.raises(ModelFileError, match=message):
            ModelConfig.from_gguf(metadata | change, vocab_size=77, tied=True)


GGUF_LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
}
YARN = {"type": "yarn", "factor": 4.0}


def gguf_rope(scaling: dict | None = None, **rope):
    keys = {f"llama.rope.{key}": value for key, value in rope.items()}
    keys |= {f"llama.rope.scaling.{key}": value for key, value in (scaling or {}).items()}
    return ModelConfig.from_gguf(GGUF_LLAMA | keys, vocab_size=77, tied=True).rope_scaling


def test_gguf_rope_scaling_means_what_llama_cpp_makes_of_it():
    linear = {"rope_type": "linear", "factor": 4.0}
    assert gguf_rope({"factor": 4.0}) == linear  # no type is linear
    assert gguf_rope({"type": "linear", "factor": 4.0}) == gguf_rope(scale_linear=4.0) == linear
    assert gguf_rope({"factor": 4.0}, scale_linear=2.0) == linear  # the new name wins
    for nothing in (
        {},
        {"factor": 0.0},
        {"factor": 1.0},
        {"type": "none", "factor": 4.0},
        {"finetuned": True},
    ):
        assert gguf_rope(nothing) is None
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    neutral = {
        "yarn_ext_factor": -1.0,
        "yarn_log_multiplier": 0.0,
        "attn_factor": 1.0,
        "yarn_attn_factor": 1.0,
    }
    assert gguf_rope(YARN) == gguf_rope(YARN | neutral) == yarn
    assert gguf_rope({"type": "yarn"}, scale_linear=4.0) == yarn
    betas = gguf_rope(YARN | {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "original_context_length": 64})
    assert betas == yarn | {"beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 64}
    # Both factors multiply YaRN's own temperature, 1 + 0.1 ln 4.
    factor = gguf_rope(YARN | {"attn_factor": 0.5, "yarn_attn_factor": 3.0})["attention_factor"]
    assert factor == pytest.approx(1.5 * 1.1386294361)


def test_gguf_betas_and_attention_factor_reach_the_tables():
    plain, one = inverse_frequencies(16, 1e4, gguf_rope(YARN))
    fast, other = inverse_frequencies(16, 1e4, gguf_rope(YARN | {"yarn_beta_fast": 2.0, "attn_factor": 2.0}))
    assert not torch.equal(plain, fast) and other == pytest.approx(2 * one)


@pytest.mark.parametrize(
    ("scaling", "rope", "message"),
    [
        ({"type": "yarn"}, {}, "factor"),
        (YARN | {"yarn_ext_factor": 0.5}, {}, "yarn_ext_factor: got 0.5"),
        (YARN | {"yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier: got 0.1"),
        (YARN | {"yarn_beta_fast": -1.0}, {}, "beta_fast"),
        (YARN | {"yarn_beta_fast": "x"}, {}, "yarn_beta_fast"),
        (YARN | {"attn_factor": -1.0}, {}, "attention_factor"),
        ({"factor": 2.0, "attn_factor": 2.0}, {}, "attn_factor"),
        ({"factor": -2.0}, {}, "factor"),
        ({"alpha": 1000.0}, {}, "alpha"),
        ({"surprise": 1.0}, {}, "rope.scaling.surprise"),
        ({}, {"dimension_sections": [1, 2]}, "rope.dimension_sections"),
        ({}, {"freq_base_swa": 1e4}, "rope.freq_base_swa"),
    ],
)
def test_gguf_rope_keys_are_refused_by_name(scaling, rope, message):
    with pytest.raises(ModelFileError, match=message):
        gguf_rope(scaling, **rope)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": "x"},
        {"rope_scaling": -1},
        {"rope_scaling": []},
        {"rope_scaling": {"factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        {"layer_types": -1},
        {"rms_norm_eps": 10**400},
        {"rope_theta": 10**30},
        {"rope_theta": 1.0},
        {"attention_bias": "no"},
        {"eos_token_id": 2**31},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": "x"}},
        {"rope_scaling": {"type": "linear", "factor": 10**30}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_damaged_fields_are_refused_at_load(changes):
    with pytest.raises(ModelFileError):
        hf(**changes)
