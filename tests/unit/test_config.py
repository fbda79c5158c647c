"""Architecture records: read from Hugging Face and GGUF, validated once."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from labkit.errors import ModelFileError
from labkit.models.config import ModelConfig
from labkit.models.model import expected_shapes, layer_of, matrix_names, role, shape_of

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
    assert yarn.rope_scaling["factor"] == 4.0
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert hf(rope_scaling=llama3).rope_scaling["original_max_position_embeddings"] == 512


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
        ({"rope_scaling": {"type": "linear"}}, "factor: got None"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"eos_token_id": "two"}, "token id"),
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
        ({"qwen3.attention.key_length": "16"}, "head_dim"),
    ):
        with pytest.raises(ModelFileError, match=message):
            ModelConfig.from_gguf(metadata | change, vocab_size=77, tied=True)
