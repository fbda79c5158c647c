"""The torch executor on a GPU: every policy and schedule gives the bits of a plain loop, token by token."""

from __future__ import annotations

import functools
import random
from typing import Any

import decode_cases as cases
import pytest
import torch
from executor_cases import POLICIES, Checked, Reference, check_drawn_tokens, pool, prompts_of, run, step_model

from labkit.bench.random_model import RandomModel, config_of
from labkit.engine.chunk_graphs import ChunkGraphs
from labkit.engine.engine import Engine
from labkit.engine.executor import Row
from labkit.engine.executor_for import executor_for
from labkit.engine.executor_graphs import DecodeGraphs
from labkit.engine.executor_torch import TorchExecutor
from labkit.engine.policy import Serial
from labkit.engine.request import Request, Status
from labkit.engine.sampling import SamplingParams
from labkit.models.step_model import StepModel
from labkit.models.step_weights import Products

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_heads": 8,
    "num_kv_heads": 2,
    "max_position_embeddings": 2048,
}
CONTEXT = 1536  # two sets of graphs: capacities 1,024 and 1,536


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    # A test run with `-m gpu` on a machine without one must say so, not pass.
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"


@functools.cache
def reference(head: str | None = None, kv_dtype: torch.dtype | None = None) -> Reference:
    """The kernels, one launch after the other, one token at a time."""
    decoder = cases.decoder(cases.config(**SHAPE), torch.float16, "cuda", group=128, head=head)
    model = step_model(decoder, Products.tensor_core(dense_from=None), max_context=CONTEXT)
    model.load()
    return Reference(model, kv_dtype=kv_dtype)


@functools.cache
def three_billion(kv_dtype: torch.dtype | None = None) -> Reference:
    """The same of random weights of Qwen2.5-3B's shapes."""
    if kv_dtype is not None:
        return Reference(three_billion().layers, kv_dtype=kv_dtype)
    random_model = RandomModel(config_of("qwen2.5-3b"), device="cuda")
    products = Products.tensor_core(dense_from=None)
    weights = random_model.step_weights(products)
    model = StepModel(random_model.config, weights, max_context=CONTEXT, products=products)
    model.load()
    return Reference(model)


def executor(
    head: str | None = None, kv_dtype: torch.dtype | None = None, *, num_blocks: int = 60, **options: Any
) -> Checked:
    right = reference(head, kv_dtype)
    model = right.layers
    kv = pool(model, num_blocks=num_blocks, kv_dtype=kv_dtype)
    made = Checked(model, kv=kv, **({"chunk": 64, "max_batch": 8} | options))
    made.reference = right
    return made


def parts(of: TorchExecutor) -> tuple[DecodeGraphs, ChunkGraphs]:
    decode, chunks = of._graphs["decode"]
    assert isinstance(decode, DecodeGraphs) and isinstance(chunks, ChunkGraphs)
    return decode, chunks


@pytest.mark.parametrize("concurrent", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_changes_a_bit(policy: str, concurrent: bool) -> None:
    ours = executor(concurrent=concurrent)
    assert ours.concurrent == ours.lanes == concurrent and ours.feeds
    prompts = prompts_of(5, 300, count=8, longest=100)
    engine = Engine(ours, policy=policy)
    requests = []
    for prompt in prompts:
        requests.append(engine.add_request(prompt, SamplingParams(max_tokens=12)))
        engine.step()
        engine.step()
    engine.run()
    assert ours.differences == [] and ours.compared > 50
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == ours.reference.tokens(prompt, 12)
    assert len(parts(ours)[0].captured) > 0
    streams = engine.counters.prefill_decode_stream_overlap_steps
    assert (streams > 0) == (concurrent and policy in ("overlap", "ticks", "dynamic")) or policy == "adaptive"


@pytest.mark.parametrize(("policy", "kv_dtype"), [*((one, None) for one in POLICIES), ("mixed", torch.int8)])
def test_no_policy_changes_a_bit_of_three_billion(policy: str, kv_dtype: torch.dtype | None) -> None:
    right = three_billion(kv_dtype)
    kv = pool(right.layers, num_blocks=100, kv_dtype=kv_dtype)
    ours = Checked(right.layers, kv=kv, chunk=64, max_batch=8)
    ours.reference = right
    prompts = prompts_of(7, right.layers.config.vocab_size, count=4, longest=110)
    engine = Engine(ours, policy=policy)
    requests = []
    for prompt in prompts:
        requests.append(engine.add_request(prompt, SamplingParams(max_tokens=10, ignore_eos=True)))
        engine.step()
        engine.step()
    engine.run()
    assert ours.differences == [] and ours.compared >= 40
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == right.tokens(prompt, 10)


@pytest.mark.parametrize("seed", range(10))
def test_no_schedule_changes_a_bit(seed: int) -> None:
    draw = random.Random(seed)
    ours = executor(
        draw.choice([None, "w4"]),
        draw.choice([None, torch.int8]),
        num_blocks=draw.choice([12, 60]),
        chunk=draw.choice([3, 16, 70, 300]),
        max_batch=draw.choice([2, 5, 8]),
        graphs=draw.random() < 0.8,
        concurrent=draw.random() < 0.7,
    )
    engine = Engine(
        ours,
        policy=draw.choice(POLICIES),
        admission=draw.choice(["peak", "now"]),
        prefix_cache=draw.random() < 0.7,
    )
    prompts = prompts_of(seed, 300, count=8, longest=150)
    counts = [draw.randrange(1, 20) for _ in prompts]
    requests = run(engine, prompts, counts, seed)
    assert ours.differences == []
    for prompt, count, request in zip(prompts, counts, requests, strict=True):
        assert request.output_ids == ours.reference.tokens(prompt, count)


@pytest.mark.parametrize("head", [None, "w4"])
def test_a_chunk_of_any_length_has_the_bits_of_its_tokens_alone(head: str | None) -> None:
    """Beyond the graphs, beyond the rows of one launch, and beyond the first capacity."""
    model = reference(head).layers
    ours = TorchExecutor(model, kv=pool(model, num_blocks=200), chunk=1200, max_batch=8)
    prompt = (prompts_of(7, 300, count=1, longest=90)[0] * 400)[:1100]
    seen: list[torch.Tensor] = []
    real = ours.join

    def kept(handle: Any) -> Any:
        outputs = real(handle)
        seen.extend(output.logits.clone() for output in outputs)
        return outputs

    ours.join = kept  # type: ignore[method-assign]
    found = []
    for chunk in (1200, 600, 300, 256, 33, 7):
        engine = Engine(ours, policy=Serial(chunk), prefix_cache=False)
        (request,) = engine.generate([prompt], SamplingParams(max_tokens=2))
        found.append((request.output_ids, seen[0]))
        seen.clear()
    for ids, logits in found[1:]:
        assert ids == found[0][0] and torch.equal(logits, found[0][1])


@pytest.mark.parametrize("policy", ["serial", "ticks", "mixed"])
def test_logits_that_the_host_wants_are_not_overwritten(policy: str) -> None:
    check_drawn_tokens(executor(), policy, [[5], [6, 7, 8], [9], [10], [11] * 30], 6)


def decode_rows(ours: TorchExecutor, lengths: list[int], fed: bool = False) -> list[Row]:
    """Rows of requests that decode, each in blocks of its own."""
    from labkit.cache.blocks import BlockAllocator

    blocks = BlockAllocator(ours.num_blocks, ours.block_size)
    rows = []
    for number, length in enumerate(lengths):
        request = Request(f"{number}", tuple(range(1, length + 1)), SamplingParams(max_tokens=50))
        request.status = Status.DECODE
        request.table = blocks.allocate(length + 8)
        rows.append(Row(request, length - 1, length, samples=True, fed=fed))
    return rows


def test_prepare_and_launch_wait_for_nothing() -> None:
    """Both lanes are kept busy; ten works are queued behind, each with staging of its own."""
    ours = executor(max_batch=4)
    for layer in ours.kv.layers:  # what no prompt has written here
        layer.keys.zero_()
        layer.values.zero_()
    rows = decode_rows(ours, [5, 9, 17, 40])
    for lane in ("decode", "prefill"):  # captures and loads
        ours.join(ours.launch(ours.prepare(rows, lane)))  # type: ignore[arg-type]
    wanted = [output.token for output in ours.join(ours.launch(ours.prepare(rows, "decode")))]
    torch.cuda.synchronize()
    ours.launch(ours.prepare(rows, "decode"))
    for lane in ours._lanes.values():
        with lane.current():
            torch.cuda._sleep(800_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        handles = [ours.launch(ours.prepare(rows, lane)) for lane in ("decode", "prefill") * 5]  # type: ignore[arg-type]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any(ours.done(handle) for handle in handles)
    for handle in handles:
        assert [output.token for output in ours.join(handle)] == wanted
        assert ours.done(handle)
        seconds = ours.seconds(handle)
        assert seconds is not None and 0 < seconds < 10


def test_a_row_is_fed_with_a_token_that_the_host_has_not_seen() -> None:
    ours = executor(max_batch=4)
    engine = Engine(ours, policy="serial")
    prompts = prompts_of(8, 300, count=3)
    requests = engine.generate(prompts, SamplingParams(max_tokens=30))
    fed = 0
    real = ours.prepare

    def counted(rows: Any, lane: Any) -> Any:
        nonlocal fed
        fed += sum(row.fed for row in rows)
        return real(rows, lane)

    ours.prepare = counted  # type: ignore[method-assign]
    again = engine.generate(prompts, SamplingParams(max_tokens=30))
    assert fed > 50
    for prompt, one, other in zip(prompts, requests, again, strict=True):
        assert one.output_ids == other.output_ids == ours.reference.tokens(prompt, 30)


def test_the_decode_lane_has_the_higher_priority() -> None:
    lanes = executor()._lanes
    decode, prefill = lanes["decode"].stream, lanes["prefill"].stream  # type: ignore[union-attr]
    assert decode.priority < prefill.priority and decode != prefill


def test_a_pool_that_grows_is_captured_anew() -> None:
    right = reference()
    ours = Checked(right.layers, kv=pool(right.layers, num_blocks=3), most_blocks=60, chunk=64, max_batch=8)
    ours.reference = right
    prompts = prompts_of(6, 300, count=6, longest=90)
    requests = Engine(ours).generate(prompts, SamplingParams(max_tokens=8))
    assert ours.kv.generation > 0 and ours.differences == []
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == right.tokens(prompt, 8)


def test_all_decode_graphs_can_be_made_at_the_start() -> None:
    ours = executor(max_batch=5)
    ours.warm()
    decode, _ = parts(ours)
    assert decode.sizes == [1, 2, 4, 8] and decode.capacities == [1024, CONTEXT]
    assert len(decode.captured) == 8
    prompts = prompts_of(9, 300, count=5)
    requests = Engine(ours).generate(prompts, SamplingParams(max_tokens=5))
    assert len(decode.captured) == 8 and ours.differences == []
    assert all(request.finish_reason == "length" for request in requests)


def test_packed_weights_can_be_dropped() -> None:
    of = cases.config(**SHAPE, vocab_size=4096)
    found = []
    for release in (False, True):
        decoder = cases.decoder(of, torch.float16, "cuda", group=128)
        ours = executor_for(
            decoder, num_blocks=30, max_batch=4, max_context=256, chunk=64, release=release, graphs=False
        )
        assert isinstance(ours.layers, StepModel)
        engine = Engine(ours)
        found.append([one.output_ids for one in engine.generate(prompts_of(2, 4096), None)])
        if release:
            with pytest.raises(ValueError, match="released"):
                decoder(torch.tensor([[1]], device="cuda"))
    assert found[0] == found[1]


def test_a_decoder_without_tiles_runs_all_the_same() -> None:
    """Float weights: torch's decoder on one stream, no graphs, equal tokens up to ties."""
    of = cases.config(**SHAPE)
    weights = {
        name: weight.dequantize() if hasattr(weight, "dequantize") else weight
        for name, weight in cases.model_weights(of, group=128).items()
    }
    from labkit.models.decoder import Decoder

    decoder = Decoder.from_weights(of, weights, device="cuda", dtype=torch.float32)
    ours = executor_for(decoder, num_blocks=60, max_batch=4, chunk=64)
    assert not ours.feeds and not ours.concurrent and "decoder" in ours.name
    prompts = prompts_of(3, 300, count=4)
    requests = Engine(ours, policy="ticks").generate(prompts, SamplingParams(max_tokens=6))
    for prompt, request in zip(prompts, requests, strict=True):
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(decoder(torch.tensor([ids], device="cuda"))[0, -1].argmax()))
        assert request.output_ids == ids[len(prompt) :]
