"""The engine within 4 GiB: torch's allocator is held to what a 4 GB card leaves after its CUDA context."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from labkit.bench.random_model import RandomModel, config_of
from labkit.cache.bill import GPU_RUNTIME_BYTES
from labkit.cache.plan import plan
from labkit.cache.weights import StoredWeight, weight_bytes
from labkit.engine.engine import Engine
from labkit.engine.executor_for import executor_for
from labkit.engine.executor_torch import TorchExecutor
from labkit.engine.sampling import SamplingParams
from labkit.errors import InputError
from labkit.models.decoder import Decoder
from labkit.models.model import EMBEDDING, FINAL_NORM, HEAD, expected_shapes
from labkit.models.step_model import StepModel
from labkit.quant.formats import QuantWeight

pytestmark = pytest.mark.gpu

CARD = 4 << 30
ALLOWED = CARD - GPU_RUNTIME_BYTES
NEW = 32


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def held_back() -> tuple[int, int]:
    """From here on torch has what a 4 GB card has for it. Bytes that others hold: allocated, reserved."""
    gc.collect()  # engines of other tests
    torch.cuda.empty_cache()
    others, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((reserved + ALLOWED) / total)
    torch.cuda.reset_peak_memory_stats()
    return others, reserved


def on_the_host(key: str, mlp: str) -> tuple[Any, dict[str, Any]]:
    """Config and weights in host memory: W4 but for the MLP, in groups of 128."""
    config = config_of(key)
    w4, w3 = (RandomModel(config, form, device="cuda") for form in ("w4", mlp))
    found: dict[str, Any] = {}
    for index in range(config.num_layers):
        other = w3.layer(index)
        for name, weight in w4.layer(index).items():
            found[name] = (other[name] if ".mlp." in name else weight).to("cpu")
    head = RandomModel(config, head="w4", device="cuda")
    table = torch.empty(0, device="cuda")
    found[EMBEDDING] = head.head_weight(table).to("cpu")  # type: ignore[union-attr]
    if not config.tie_word_embeddings:
        found[HEAD] = found[EMBEDDING]
    found[FINAL_NORM] = w4.norm().to("cpu")
    return config, found


def needed(config: Any, weights: dict[str, Any], rows: int, context: int) -> int:
    """Bytes that ``labkit plan`` says are needed, without the context of CUDA."""
    stored = [StoredWeight.of(name, weights[name]) for name in expected_shapes(config)]
    size = weight_bytes(config, stored, device="cuda", dtype=torch.float16, capability=(8, 6))
    found = plan(config, size, CARD, context=context, batch=rows, capability=(8, 6))
    assert found.fits and found.case.graphs and found.case.release
    return found.needed - GPU_RUNTIME_BYTES


def answered(executor: TorchExecutor, rows: int, context: int) -> list[list[int]]:
    source = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, executor.vocab_size, (rows, context - NEW), generator=source).tolist()
    engine = Engine(executor)
    done = engine.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
    ends = [(request.finish_reason, request.error) for request in done]
    assert all(reason == "length" for reason, _ in ends), ends
    return [list(request.output_ids) for request in done]


@pytest.mark.parametrize(
    ("key", "mlp", "rows", "context"), [("qwen2.5-3b", "w4", 4, 2048), ("qwen2.5-7b", "w3", 1, 2048)]
)
def test_a_model_loads_and_answers_within_four_gigabytes(
    key: str, mlp: str, rows: int, context: int, record_property: Any
) -> None:
    config, weights = on_the_host(key, mlp)
    planned = needed(config, weights, rows, context)
    others, reserved_by_others = held_back()
    decoder = Decoder.from_weights(config, weights, device="cuda", dtype=torch.float16)
    stored = torch.cuda.memory_allocated() - others
    blocks = rows * context // 16
    executor = executor_for(decoder, num_blocks=blocks, max_batch=rows, max_context=context)
    assert isinstance(executor.layers, StepModel)
    assert isinstance(executor.layers.weights.embedding, QuantWeight)
    tokens = answered(executor, rows, context)
    assert all(len(one) == NEW for one in tokens)
    peak = torch.cuda.max_memory_allocated() - others
    reserved = torch.cuda.max_memory_reserved() - reserved_by_others
    free, total = torch.cuda.mem_get_info()
    print(
        f"\n{key}, MLP {mlp}, {rows} x {context} tokens: weights {stored / 2**30:.2f} GiB, peak allocated "
        f"{peak / 2**30:.2f}, reserved {reserved / 2**30:.2f}, planned {planned / 2**30:.2f}, allowed "
        f"{ALLOWED / 2**30:.2f}; of the whole card {(total - free) / 2**30:.2f} GiB in use"
    )
    assert peak <= planned and reserved <= ALLOWED


def test_a_pool_that_does_not_fit_is_refused_by_name() -> None:
    config = config_of("smollm2-135m")
    random = RandomModel(config, head="w4", device="cuda", group=64)
    weights = {name: weight for i in range(config.num_layers) for name, weight in random.layer(i).items()}
    weights |= {EMBEDDING: random.embedding(), FINAL_NORM: random.norm()}
    weights = {name: weight.to("cpu") for name, weight in weights.items()}
    held_back()
    decoder = Decoder.from_weights(config, weights, device="cuda", dtype=torch.float16)
    with pytest.raises(InputError, match=r"^num_blocks: got 500000 .*labkit plan"):
        executor_for(decoder, num_blocks=500_000, max_context=2048)
    executor = executor_for(decoder, max_context=2048, max_batch=2)
    assert len(answered(executor, 2, 256)) == 2
