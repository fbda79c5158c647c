"""The torch path on a GPU: bounded dequantise + matmul, the decoder, generation, the doctor."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from labkit.errors import InputError
from labkit.models.config import ModelConfig
from labkit.models.decoder import Decoder
from labkit.models.generate import generate
from labkit.models.model import Model, expected_shapes
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear
from labkit.quant import quantize

pytestmark = pytest.mark.gpu

FORMATS = [("w4", 32, False), ("w4", 128, True), ("w3", 64, False), ("w3", "row", True), ("q8_0", 32, False)]
FALLBACK = DispatchTable.from_params({"force": "dequant_matmul"})


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    # A test run with `-m gpu` on a machine without one must say so, not pass.
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"


def random_weight(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("form", "group", "offset"), FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (7, 33, 200), (37, 576, 1536), (300, 129, 577)])
def test_linear_error_is_at_most_twice_plain_torch(
    form: str, group: int | str, offset: bool, m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    weight = quantize(random_weight(n, k), form, group, offset=offset).to("cuda")
    layer = QuantLinear(weight, table=FALLBACK)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to("cuda", dtype)
    y = layer(x)
    exact = linear(x.double(), weight.dequantize(torch.float64))
    plain = linear(x, weight.dequantize(dtype)).double()
    ulp = torch.finfo(dtype).eps / 2 * exact.abs().max()
    assert y.dtype == dtype and layer.last_choice is not None and layer.last_choice.kernel == "dequant_matmul"
    assert (y.double() - exact).abs().max() <= 2 * max((plain - exact).abs().max(), ulp)
    assert torch.equal(layer(x), y)


def test_temporary_memory_on_the_gpu_is_bounded() -> None:
    weight = quantize(random_weight(8192, 4096), "w4", 128).to("cuda")
    layer = QuantLinear(weight, table=FALLBACK, temp_bytes=16 << 20)
    x = torch.randn(16, 4096, device="cuda", dtype=torch.float16)
    layer(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = layer(x)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - y.numel() * y.element_size()
    assert 0 < peak <= 24 << 20  # a whole FP16 copy would be 64 MiB


def test_weight_on_the_gpu_and_input_on_the_cpu_is_refused_by_name() -> None:
    layer = QuantLinear(quantize(random_weight(64, 128), "w4", 32)).to("cuda")
    with pytest.raises(InputError, match="on cpu"):
        layer(torch.randn(1, 128))


def tiny(architecture: str) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = ModelConfig.from_hf_dict(
        {
            "model_type": architecture,
            "vocab_size": 320,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        }
    )
    source = torch.Generator().manual_seed(3)
    weights = {}
    for name, shape in expected_shapes(config).items():
        spread = torch.randn(shape, generator=source) * 0.08
        weights[name] = spread + 1 if "norm" in name else spread
    return config, weights


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("bits", ["none", "w4", "w3"])
def test_decoder_agrees_with_itself_on_the_cpu(architecture: str, bits: str) -> None:
    config, weights = tiny(architecture)
    if bits != "none":
        weights = {
            name: quantize(value, bits, 32, offset=True) if name.endswith("_proj.weight") else value
            for name, value in weights.items()
        }
    tokens = torch.randint(0, 320, (2, 19), generator=torch.Generator().manual_seed(0))
    there = Decoder.from_weights(config, weights, device="cuda")
    here = Decoder.from_weights(config, weights)
    expected = here(tokens)
    assert (there(tokens.to("cuda")).cpu() - expected).abs().max() < 1e-3
    cache = there.new_cache(19, batch=2)
    steps = [there(tokens[:, i : i + 1].to("cuda"), cache) for i in range(19)]
    assert (torch.cat(steps, 1).cpu() - expected).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_generation_runs_on_the_gpu_and_repeats_itself(dtype: torch.dtype) -> None:
    config, weights = tiny("llama")
    decoder = Decoder.from_weights(config, weights, device="cuda", dtype=dtype)
    model = Model(decoder, None, config, "random")
    runs = []
    for _ in range(2):
        generation = generate(model, [5, 6, 7, 8], max_tokens=24, stop_at_eos=False)
        generation.text()
        runs.append(generation.stats.tokens)
    assert runs[0] == runs[1] and len(runs[0]) == 24


def test_attention_leaves_out_the_kernel_that_plans_for_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's SDPA made a decode step two to three times as slow; torch prefers it on this card."""
    config, weights = tiny("llama")
    decoder = Decoder.from_weights(config, weights, device="cuda", dtype=torch.bfloat16)
    allowed = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: object, **options: object) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **options)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    decoder(torch.tensor([[1, 2, 3]]))
    assert allowed == [False] * config.num_layers
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_doctor_sees_the_gpu_as_torch_does() -> None:
    from labkit.probes import gpus

    driver = gpus.installed_driver()
    assert len(driver.gpus) == torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    gpu = driver.gpus[0]
    assert gpu.name == properties.name and gpu.sms == properties.multi_processor_count
    assert gpu.capability == f"{properties.major}.{properties.minor}"
    assert gpu.free_bytes is not None and 0 < gpu.free_bytes <= gpu.memory_bytes
    assert gpu.bandwidth_gb_s is not None and gpu.bandwidth_gb_s > 50
    assert gpus.driver().state == "ok" and gpus.gpus()[0].state == "ok"
