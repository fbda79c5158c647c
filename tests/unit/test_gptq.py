"""GPTQ checkpoints become W4 with an offset exactly, in every variant that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    act_order,
    codes_and_scales,
    dequantised,
    gptq_tensors,
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
from labkit.models.gptq import GptqScheme
from labkit.models.hf import load_hf
from labkit.models.model import Model
from labkit.quant.formats import QuantWeight


def settings_of(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True} | changes


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 4).map(lambda x: 8 * x),
    k=st.integers(2, 24).map(lambda x: 8 * x),
    group=st.sampled_from([16, 32, 64, 128, 256, -1]),
    symmetric=st.booleans(),
    ordered=st.booleans(),
    v2=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_value_is_q_minus_z_times_s_exactly(
    n: int, k: int, group: int, symmetric: bool, ordered: bool, v2: bool, seed: int
) -> None:
    size = k if group == -1 else group
    weight = np.random.default_rng(seed).normal(size=(n, k)) * 0.1
    g_idx = act_order(k, size, seed) if ordered else plain_order(k, size)
    q, z, s = codes_and_scales(weight, size, symmetric=symmetric, g_idx=g_idx)
    record = settings_of(group_size=group, checkpoint_format="gptq_v2" if v2 else "gptq")
    got = GptqScheme.from_config("here", record).weight(
        "m", gptq_tensors(q, z, s, g_idx, minus_one=not v2), n, k
    )
    expected = torch.from_numpy(dequantised(q, z, s, g_idx))
    assert torch.equal(got.dequantize(torch.float64), expected)
    assert torch.equal(got.dequantize(torch.float32).double(), expected)  # FP32 holds every value
    assert (got.offset is None) == bool((z == 8).all())


@pytest.mark.parametrize("minus_one", [True, False])
def test_every_zero_point_of_the_format_survives(minus_one: bool) -> None:
    # All of 0..15 side by side; for v1 the writer subtracts one from the whole word, with borrow.
    n, k, rng = 16, 32, np.random.default_rng(1)
    q = rng.integers(0, 16, (n, k))
    z = np.arange(16, dtype=np.int64).reshape(1, n)
    s = rng.uniform(1e-3, 1, (1, n)).astype(np.float16)
    g_idx = plain_order(k, 32)
    parts = gptq_tensors(q, z, s, g_idx, minus_one=False)
    if minus_one:
        parts["qzeros"] = parts["qzeros"] - 0x11111111
    scheme = GptqScheme(32, zero_bias=int(minus_one))
    got = scheme.weight("m", parts, n, k).dequantize(torch.float64)
    assert torch.equal(got, torch.from_numpy(dequantised(q, z, s, g_idx)))


def test_the_offset_needs_fp32() -> None:
    # s has 11 bits, (8 - z) * s up to 14: rounding it to FP16 would change weights.
    n, k = 8, 32
    q, z = np.full((n, k), 3), np.full((1, n), 1)
    s = np.full((1, n), 1 + 1 / 1024, dtype=np.float16)
    got = GptqScheme(32, 1).weight("m", gptq_tensors(q, z, s, plain_order(k, 32)), n, k)
    assert got.offset is not None and got.offset.dtype == torch.float32
    assert not torch.equal(got.offset, got.offset.half().float())


def test_all_zero_g_idx_means_no_act_order() -> None:
    n, k = 8, 64
    q, z, s = codes_and_scales(
        np.random.default_rng(0).normal(size=(n, k)), 32, symmetric=True, g_idx=plain_order(k, 32)
    )
    parts = gptq_tensors(q, z, s, plain_order(k, 32))
    parts["g_idx"] = torch.zeros_like(parts["g_idx"])
    got = GptqScheme(32, 1).weight("m", parts, n, k)
    assert got.k_order is None
    assert torch.equal(
        got.dequantize(torch.float64), torch.from_numpy(dequantised(q, z, s, plain_order(k, 32)))
    )


@pytest.mark.parametrize(
    ("g_idx", "words"),
    [
        ([0] * 40 + [1] * 24, "40 inputs in group 0"),
        ([0] * 32 + [2] * 32, "groups 0..2"),
        ([-1] * 64, "groups -1..-1"),
    ],
)
def test_odd_g_idx_is_refused(g_idx: list[int], words: str) -> None:
    n, k = 8, 64
    q, z, s = codes_and_scales(np.zeros((n, k)), 32, symmetric=True, g_idx=plain_order(k, 32))
    parts = gptq_tensors(q, z, s, plain_order(k, 32)) | {"g_idx": torch.tensor(g_idx, dtype=torch.int32)}
    with pytest.raises(ModelFileError, match="g_idx") as caught:
        GptqScheme(32, 1).weight("layer", parts, n, k)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 3}, "bits = 3"),
        ({"bits": 8}, "bits = 8"),
        ({"checkpoint_format": "marlin"}, "'marlin'"),
        ({"format": "bitblas"}, "'bitblas'"),
        ({"is_marlin_format": True}, "'marlin'"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({"dynamic": {"model.layers.0.*": {"bits": 8}}}, "dynamic"),
        ({"group_size": 0}, "group_size 0"),
        ({"group_size": "32"}, "group_size '32'"),
    ],
)
def test_other_variants_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        GptqScheme.from_config("config.json", settings_of(**change))
    assert words in str(caught.value)


def test_wrong_parts_are_refused_by_name() -> None:
    n, k = 16, 64
    g_idx = plain_order(k, 32)
    q, z, s = codes_and_scales(np.zeros((n, k)), 32, symmetric=True, g_idx=g_idx)
    good = gptq_tensors(q, z, s, g_idx)
    scheme = GptqScheme(32, 1)
    for part, value in (
        ("qweight", good["qweight"].t().contiguous()),
        ("qzeros", good["qzeros"].long()),
        ("scales", good["scales"][:1]),
        ("g_idx", good["g_idx"][:8]),
    ):
        with pytest.raises(ModelFileError, match=f"layer.{part}"):
            scheme.weight("layer", good | {part: value}, n, k)
    with pytest.raises(ModelFileError, match="NaN"):
        scheme.weight("layer", good | {"scales": good["scales"] * float("nan")}, n, k)
    with pytest.raises(ModelFileError, match="FP16 cannot hold"):
        scheme.weight("layer", good | {"scales": good["scales"].float() + 1e-7}, n, k)
    exact = scheme.weight("layer", good | {"scales": good["scales"].float()}, n, k)  # F32 that FP16 holds
    assert torch.equal(exact.scales, good["scales"].t())


CASES = [
    ("llama", {"group": 32, "symmetric": True}, {}),
    ("qwen2", {"group": 16, "symmetric": False, "desc_act": True}, {"desc_act": True, "sym": False}),
    ("qwen3", {"group": 32, "symmetric": False, "v2": True}, {"checkpoint_format": "gptq_v2", "sym": False}),
    ("llama", {"group": -1, "symmetric": False}, {"sym": False}),
]


@pytest.mark.parametrize(("arch", "how", "says"), CASES)
def test_a_gptq_model_gives_the_logits_of_its_dequantised_weights(
    tmp_path: Path, arch: str, how: dict[str, Any], says: dict[str, Any]
) -> None:
    config = tiny_config(arch)
    packed, plain = packed_state(random_state(config), "gptq", **how)
    config["quantization_config"] = settings_of(group_size=how["group"], **says)
    file = load_hf(write_hf(tmp_path / "m", config, packed, shards=2))
    q_proj = file.weights["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(q_proj, QuantWeight) and (q_proj.k_order is not None) == bool(how.get("desc_act"))
    weights: dict[str, Any] = dict(file.weights)
    for name, weight in weights.items():
        value = weight.dequantize(torch.float64) if isinstance(weight, QuantWeight) else weight.double()
        assert torch.equal(value, plain[name].double()), name
    ids = torch.randint(0, config["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = Model.build(file).decoder(ids)
    assert (logits - reference_logits(config, plain, ids)).abs().max() < 1e-3


def test_a_bias_of_zeros_is_harmless_and_another_is_refused(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    packed, _ = packed_state(random_state(config), "gptq", group=32, symmetric=True)
    config["quantization_config"] = settings_of()
    name = "model.layers.0.mlp.up_proj.bias"
    load_hf(write_hf(tmp_path / "a", config, packed | {name: torch.zeros(96)}))
    with pytest.raises(ModelFileError, match=r"up_proj\.bias"):
        load_hf(write_hf(tmp_path / "b", config, packed | {name: torch.ones(96)}))


def test_parts_that_are_missing_and_the_older_settings_file(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    packed, plain = packed_state(random_state(config), "gptq", group=32, symmetric=True)
    folder = write_hf(tmp_path / "old", config, packed)
    with pytest.raises(ModelFileError, match="no tensor"):
        load_hf(folder)  # nothing says that this is GPTQ
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}', encoding="utf-8")
    name = "model.layers.0.mlp.up_proj.weight"
    up = load_hf(folder).weights[name]
    assert isinstance(up, QuantWeight) and torch.equal(up.dequantize(torch.float64), plain[name])
    del packed["model.layers.0.mlp.up_proj.scales"]
    config["quantization_config"] = settings_of()
    with pytest.raises(ModelFileError, match=r"up_proj\.scales"):
        load_hf(write_hf(tmp_path / "cut", config, packed))


def test_requantising_a_gptq_model_is_asked_for_by_format_or_group(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    packed, plain = packed_state(random_state(config), "gptq", group=32, symmetric=False)
    config["quantization_config"] = settings_of(sym=False)
    folder = write_hf(tmp_path / "m", config, packed)
    name = "model.layers.0.mlp.up_proj.weight"
    for options in ({"bits": "w4"}, {"bits": "w4", "group_size": 32}, {}):
        kept = load_hf(folder, **options).weights[name]  # type: ignore[arg-type]
        assert isinstance(kept, QuantWeight) and torch.equal(kept.dequantize(torch.float64), plain[name])
    other = load_hf(folder, bits="w3", group_size=16).weights[name]
    assert isinstance(other, QuantWeight) and (other.format, other.group_size) == ("w3", 16)
    floats = load_hf(folder, bits="none").weights[name]
    assert isinstance(floats, torch.Tensor) and torch.equal(floats.double(), plain[name])
