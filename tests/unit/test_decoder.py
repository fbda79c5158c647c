"""The decoder against transformers: an independent implementation of the same family."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from labkit.cache.static import StaticCache
from labkit.errors import InputError, ModelFileError
from labkit.models.config import ModelConfig
from labkit.models.decoder import Decoder, DenseLinear
from labkit.nn.linear import QuantLinear
from labkit.nn.rope import Rotary, inverse_frequencies
from labkit.quant.quantize import quantize

KINDS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

CASES = [
    # kind, heads, kv heads, head_dim, inner, tied, RoPE scaling, more
    ("llama", 9, 3, 8, 41, True, None, {}),
    ("llama", 4, 4, 6, 33, False, {"rope_type": "linear", "factor": 2.5}, {}),
    ("llama", 4, 1, 16, 50, False, LLAMA3, {"attention_bias": True, "mlp_bias": True}),
    ("llama", 6, 2, 10, 37, True, {"rope_type": "dynamic", "factor": 3.0}, {"max_position_embeddings": 12}),
    ("llama", 2, 2, 32, 40, True, YARN | {"beta_fast": 4, "beta_slow": 2}, {"max_position_embeddings": 64}),
    ("llama", 2, 1, 32, 40, True, YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}, {}),
    ("qwen2", 7, 1, 8, 45, True, None, {}),
    ("qwen2", 4, 2, 16, 39, False, YARN, {"max_position_embeddings": 64}),
    ("qwen3", 5, 5, 14, 51, True, None, {}),
    ("qwen3", 8, 2, 12, 35, False, YARN | {"attention_factor": 1.1}, {"attention_bias": True}),
]


def pair(kind, heads, kv_heads, head_dim, inner, tied, scaling, more, *, layers=2, vocab=97, seed=0):
    """A random transformers model in float32, and our decoder with the same weights."""
    make_config, make_model = KINDS[kind]
    rope = {"rope_theta": 5_000.0, "rope_type": "default"} | (scaling or {})
    # A hidden size that is not heads x head_dim, where the configuration allows it.
    hidden = heads * (head_dim if kind == "qwen2" else 11)
    settings = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind != "qwen2":
        settings["head_dim"] = head_dim
    config = make_config(**(settings | more))
    torch.manual_seed(seed)
    model = make_model(config).eval().float()
    for name, parameter in model.named_parameters():
        # Norms and biases start at one and zero, where a mistake would not show.
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    weights = {name: value for name, value in model.state_dict().items() if "rotary" not in name}
    ours = Decoder.from_weights(ModelConfig.from_hf_dict(config.to_dict()), weights)
    return model, ours


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[6] and case[6]['rope_type']}")
def test_logits_agree_with_transformers_whole_and_step_by_step(case):
    model, ours = pair(*case)
    tokens = torch.randint(0, 97, (2, 29), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
    assert expected.abs().max() > 0.5  # a difference would show
    assert (ours(tokens) - expected).abs().max() < 1e-3

    # Prefill, a second chunk behind it, then one by one; transformers with its own cache beside it.
    cache = ours.new_cache(40, batch=2)
    steps = [tokens[:, :7], tokens[:, 7:12], *tokens[:, 12:].split(1, dim=1)]
    theirs = transformers.DynamicCache()
    for step in steps:
        with torch.no_grad():
            wanted = model(step, cache=theirs, use_cache=True).logits
        assert (ours(step, cache) - wanted).abs().max() < 1e-3
    assert cache.length == 29


def test_dynamic_scaling_matters_in_the_case_above():
    plain, _ = inverse_frequencies(10, 5000.0, {"rope_type": "dynamic", "factor": 3.0}, context=12, length=12)
    longer, _ = inverse_frequencies(
        10, 5000.0, {"rope_type": "dynamic", "factor": 3.0}, context=12, length=29
    )
    assert (plain - longer).abs().max() > 1e-3


def test_factors_of_gguf_are_the_llama3_scaling():
    plain, _ = inverse_frequencies(16, 500_000.0)
    scaled, _ = inverse_frequencies(16, 500_000.0, LLAMA3 | {"original_max_position_embeddings": 8192})
    factors = (plain / scaled).tolist()
    again, _ = inverse_frequencies(16, 500_000.0, {"rope_type": "factors", "factors": factors})
    torch.testing.assert_close(again, scaled)
    assert max(factors) == pytest.approx(8.0) and min(factors) == pytest.approx(1.0)


def test_rotary_tables_grow_and_start_anywhere():
    rotary = Rotary(8, 10_000.0)
    cos, sin = rotary.tables(600, 603)
    assert cos.shape == sin.shape == (3, 1, 8)
    cos, sin = cos[:, 0], sin[:, 0]
    angle = 601 * 10_000.0 ** (-2 / 8)
    assert cos[1, 1].item() == pytest.approx(math.cos(angle), abs=1e-4)
    assert sin[1, 1].item() == pytest.approx(-math.sin(angle), abs=1e-4)
    assert sin[1, 5].item() == pytest.approx(math.sin(angle), abs=1e-4)
    assert rotary.tables(0, 1)[0].tolist() == [[[1.0] * 8]]


def quantised(decoder: Decoder, formats: dict[str, str]) -> dict:
    weights = {}
    for name, weight in decoder.named_weights():
        form = next((form for part, form in formats.items() if part in name), None)
        weights[name] = quantize(weight, form, 32) if form and weight.ndim == 2 else weight
    return weights


@pytest.mark.parametrize(
    "formats",
    [
        {"proj": "w4", "embed": "q8_0"},
        {"q_proj": "w3", "k_proj": "w4", "gate": "q8_0"},
        {"v_proj": "w4", "embed": "w4"},
    ],
    ids=["fused", "mixed", "half"],
)
def test_quantised_logits_are_those_of_the_dequantised_weights(formats):
    _, ours = pair("qwen2", 4, 2, 16, 96, True, None, {})
    weights = quantised(ours, formats)
    dense = {n: w if isinstance(w, torch.Tensor) else w.dequantize(torch.float32) for n, w in weights.items()}
    tokens = torch.arange(20).view(1, -1)
    expected = Decoder.from_weights(ours.config, dense)(tokens)
    for fuse in (True, False):
        got = Decoder.from_weights(ours.config, weights, fuse=fuse)(tokens)
        assert (got - expected).abs().max() < 1e-3


def test_equal_formats_are_fused_and_others_are_not():
    _, ours = pair("qwen2", 4, 2, 16, 96, True, None, {})
    assert len(ours.layers[0].qkv.parts) == 1 and isinstance(ours.layers[0].qkv.parts[0], DenseLinear)
    fused = Decoder.from_weights(ours.config, quantised(ours, {"proj": "w4"}))
    assert len(fused.layers[0].qkv.parts) == len(fused.layers[0].gate_up.parts) == 1
    assert isinstance(fused.layers[0].qkv.parts[0], QuantLinear)
    mixed = Decoder.from_weights(ours.config, quantised(ours, {"q_proj": "w4"}))
    assert len(mixed.layers[0].qkv.parts) == 3


@pytest.mark.parametrize("fuse", [True, False])
def test_named_weights_give_back_what_went_in(fuse):
    _, ours = pair("llama", 4, 2, 16, 96, False, None, {"attention_bias": True, "mlp_bias": True})
    weights = quantised(ours, {"proj": "w4", "embed": "q8_0"})
    back = dict(Decoder.from_weights(ours.config, weights, fuse=fuse).named_weights())
    assert set(back) == set(weights)
    assert Decoder.from_weights(ours.config, weights, fuse=fuse).weight_bytes() == sum(
        weight.nbytes for weight in weights.values()
    )
    for name, weight in weights.items():
        if isinstance(weight, torch.Tensor):
            assert torch.equal(back[name], weight), name
        else:
            assert torch.equal(back[name].codes(), weight.codes()), name
            assert torch.equal(back[name].dequantize(), weight.dequantize()), name


def test_tied_head_shares_one_weight():
    _, ours = pair("llama", 4, 2, 16, 96, True, None, {})
    decoder = Decoder.from_weights(ours.config, quantised(ours, {"embed": "q8_0"}))
    assert decoder.head_linear.weight is decoder.embedding
    assert sum(name == "lm_head.weight" for name, _ in decoder.named_weights()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype):
    _, ours = pair("qwen3", 4, 2, 16, 96, True, None, {})
    weights = quantised(ours, {"proj": "w4", "embed": "q8_0"})
    tokens = torch.arange(12).view(1, -1)
    full = Decoder.from_weights(ours.config, weights)(tokens)
    half = Decoder.from_weights(ours.config, weights, dtype=dtype)(tokens)
    assert half.dtype == dtype
    assert (half.float() - full).abs().max() < 0.06 * full.abs().max()


def test_last_only_is_the_last_row():
    _, ours = pair("llama", 4, 2, 16, 33, True, None, {})
    tokens = torch.arange(10).view(1, -1)
    assert torch.equal(ours(tokens, last_only=True), ours.head(ours.hidden(tokens)[:, -1:]))
    assert ours(tokens, last_only=True).shape == (1, 1, 97)


def test_full_cache_is_refused_and_nothing_moves():
    _, ours = pair("llama", 4, 2, 16, 33, True, None, {})
    cache = ours.new_cache(5)
    ours(torch.arange(4).view(1, -1), cache)
    with pytest.raises(InputError, match=r"2 more after 4 positions; expected at most 1 .*capacity 5"):
        ours(torch.arange(2).view(1, -1), cache)
    assert cache.length == 4 and cache.can_append(1) and not cache.can_append(2)
    with pytest.raises(InputError, match="batch of 2"):
        ours(torch.zeros(2, 1, dtype=torch.int64), cache)
    with pytest.raises(InputError, match="capacity"):
        StaticCache(ours.config, 0)


def test_truncated_cache_continues_as_if_the_rest_had_never_been():
    _, ours = pair("llama", 4, 2, 16, 33, True, None, {})
    cache = ours.new_cache(8)
    ours(torch.tensor([[5, 6, 7, 8]]), cache)
    cache.truncate(2)
    again = ours(torch.tensor([[9]]), cache)
    assert (again[:, 0] - ours(torch.tensor([[5, 6, 9]]))[:, 2]).abs().max() < 1e-5
    with pytest.raises(InputError, match="length"):
        cache.truncate(4)


@pytest.mark.parametrize(
    "tokens",
    [
        torch.tensor([1, 2]),
        torch.tensor([[1.0]]),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.tensor([[97]]),
        torch.tensor([[-1]]),
        [[1]],
    ],
    ids=["rank", "dtype", "empty", "high", "negative", "list"],
)
def test_bad_tokens_are_refused(tokens):
    _, ours = pair("llama", 4, 2, 16, 33, True, None, {})
    with pytest.raises(InputError, match="tokens"):
        ours(tokens)


def test_missing_unknown_and_misshapen_weights_are_refused():
    _, ours = pair("llama", 4, 2, 16, 33, True, None, {})
    weights = dict(ours.named_weights())
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelFileError, match=r"1 weights missing.*layers\.1\.mlp\.up_proj"):
        Decoder.from_weights(ours.config, {k: v for k, v in weights.items() if k != name})
    with pytest.raises(ModelFileError, match="rotary"):
        Decoder.from_weights(ours.config, weights | {"model.rotary.weight": torch.zeros(1)})
    with pytest.raises(ModelFileError, match=r"shape \[44, 33\].*shape \[33, 44\]"):
        Decoder.from_weights(ours.config, weights | {name: weights[name].t()})


def test_head_norms_see_each_head_alone():
    """A Qwen3 block with a scaled query weight gives the same logits: the norm takes the scale out."""
    _, ours = pair("qwen3", 4, 2, 16, 33, True, None, {}, layers=1)
    weights = dict(ours.named_weights())
    name = "model.layers.0.self_attn.q_proj.weight"
    scaled = Decoder.from_weights(ours.config, weights | {name: weights[name] * 64.0})
    tokens = torch.arange(9).view(1, -1)
    assert (scaled(tokens) - ours(tokens)).abs().max() < 1e-2
