"""AWQ checkpoints of version "gemm" become W4 with an offset exactly; other versions are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    awq_tensors,
    codes_and_scales,
    dequantised,
    packed_state,
    plain_order,
    random_state,
    reference_logits,
    tiny_config,
    write_hf,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.errors import ModelFileError
from labkit.models.awq import AwqScheme
from labkit.models.hf import load_hf
from labkit.models.model import Model
from labkit.quant.formats import QuantWeight


def settings_of(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
    } | changes


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 5).map(lambda x: 8 * x),
    k=st.integers(1, 160),
    group=st.sampled_from([16, 32, 64, 128, -1]),
    seed=st.integers(0, 2**16),
)
def test_every_value_is_q_minus_z_times_s_exactly(n: int, k: int, group: int, seed: int) -> None:
    size = k if group == -1 else group
    weight = np.random.default_rng(seed).normal(size=(n, k)) * 0.1
    g_idx = plain_order(k, size)
    q, z, s = codes_and_scales(weight, size, symmetric=False, g_idx=g_idx)
    got = AwqScheme.from_config("here", settings_of(group_size=group)).weight("m", awq_tensors(q, z, s), n, k)
    expected = torch.from_numpy(dequantised(q, z, s, g_idx))
    assert torch.equal(got.dequantize(torch.float64), expected)
    assert torch.equal(got.dequantize(torch.float32).double(), expected)


def test_all_zero_points_and_both_nibble_ends() -> None:
    n, k, rng = 16, 32, np.random.default_rng(1)
    q, z = rng.integers(0, 16, (n, k)), np.arange(16, dtype=np.int64).reshape(1, n)
    s = rng.uniform(1e-3, 1, (1, n)).astype(np.float16)
    got = AwqScheme(32).weight("m", awq_tensors(q, z, s), n, k).dequantize(torch.float64)
    assert torch.equal(got, torch.from_numpy(dequantised(q, z, s, plain_order(k, 32))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 8}, "bits = 8"),
        ({"version": "gemv"}, "'gemv'"),
        ({"version": "GEMV_FAST"}, "'gemv_fast'"),
        ({"version": "marlin"}, "'marlin'"),
        ({"version": "exllama"}, "'exllama'"),
        ({"backend": "llm-awq"}, "'llm-awq'"),
        ({"zero_point": False}, "without zero points"),
        ({"group_size": 1.5}, "group_size 1.5"),
    ],
)
def test_other_variants_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        AwqScheme.from_config("config.json", settings_of(**change))
    assert words in str(caught.value)


def test_the_older_names_of_the_settings_are_read() -> None:
    assert (
        AwqScheme.from_config("x", {"quant_method": "awq", "w_bit": 4, "q_group_size": 64}).group_size == 64
    )


def test_a_gptq_shaped_layer_is_refused() -> None:
    q, z, s = codes_and_scales(np.zeros((16, 64)), 32, symmetric=False, g_idx=plain_order(64, 32))
    parts = awq_tensors(q, z, s)
    with pytest.raises(ModelFileError, match=r"layer.qweight: got int32 \[8, 16\]; expected int32 \[64, 2\]"):
        AwqScheme(32).weight("layer", parts | {"qweight": torch.zeros(8, 16, dtype=torch.int32)}, 16, 64)
    with pytest.raises(ModelFileError, match="12 outputs"):
        AwqScheme(32).weight("layer", parts, 12, 64)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_an_awq_model_gives_the_logits_of_its_dequantised_weights(tmp_path: Path, arch: str) -> None:
    config = tiny_config(arch, tie_word_embeddings=arch == "qwen2")
    packed, plain = packed_state(random_state(config), "awq", group=32, symmetric=False)
    config["quantization_config"] = settings_of()
    file = load_hf(write_hf(tmp_path / "m", config, packed, shards=2))
    weights: dict[str, Any] = dict(file.weights)
    for name, weight in weights.items():
        value = weight.dequantize(torch.float64) if isinstance(weight, QuantWeight) else weight.double()
        assert torch.equal(value, plain[name].double()), name
    ids = torch.randint(0, config["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = Model.build(file).decoder(ids)
    assert (logits - reference_logits(config, plain, ids)).abs().max() < 1e-3
