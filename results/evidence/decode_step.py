"""Time of one decode step of SmolLM2's shape with random W4 weights, by dtype and attention kernel.

    python results/evidence/decode_step.py [--device cuda]

Prints the median of 30 steps behind 35 cached positions, measured with the decoder as it is and, on a
GPU, with torch left free to choose cuDNN's attention. Needs no model file. Results: house.md beside it.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext

import torch

from labkit.models import decoder as module
from labkit.models.config import ModelConfig
from labkit.models.model import Weight, expected_shapes
from labkit.quant import quantize

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rope_theta": 1e5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
STEPS, CACHED = 30, 35


def random_weights(config: ModelConfig) -> dict[str, Weight]:
    """W4 group 32 with offset for the layers, Q8_0 for the embedding, as SmolLM2's file holds them."""
    source = torch.Generator().manual_seed(0)
    weights: dict[str, Weight] = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=source) * 0.05
        if name.endswith("_proj.weight"):
            weights[name] = quantize(values, "w4", 32, offset=True)
        else:
            weights[name] = quantize(values, "q8_0") if "embed" in name else values + 1
    return weights


def step_ms(
    config: ModelConfig, weights: dict[str, Weight], device: str, dtype: torch.dtype, wait: bool
) -> float:
    """Median milliseconds of a step; ``wait`` for the GPU around each."""
    decoder = module.Decoder.from_weights(config, weights, device=device, dtype=dtype)
    cache = decoder.new_cache(CACHED + STEPS)
    decoder(torch.zeros(1, CACHED, dtype=torch.int64), cache)
    token = torch.zeros(1, 1, dtype=torch.int64)
    seconds = []
    for _ in range(STEPS):
        if wait:
            torch.cuda.synchronize()
        began = time.perf_counter()
        decoder(token, cache)
        if wait:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 1e3 * sorted(seconds)[STEPS // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    config = ModelConfig.from_hf_dict(SMOLLM2)
    weights = random_weights(config)
    on_gpu = device == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where} (measured)")
    kept = module.attention_kernels
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        line = f"{name:<9} {step_ms(config, weights, device, dtype, on_gpu):6.1f} ms"
        if on_gpu:
            module.attention_kernels = lambda device: nullcontext()
            free = step_ms(config, weights, device, dtype, on_gpu)
            module.attention_kernels = kept
            line += f", {free:6.1f} ms with cuDNN's attention allowed"
        print(line, flush=True)


if __name__ == "__main__":
    main()
