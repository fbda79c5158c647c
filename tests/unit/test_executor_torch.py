"""The torch executor under the real engine, on a CPU; the kernels' path in the emulator."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import decode_cases as cases
import pytest
import torch
from executor_cases import POLICIES, Checked, Reference, check_drawn_tokens, pool, prompts_of, run, step_model
from step_cases import MODELS

from labkit.engine.engine import Engine
from labkit.engine.executor_for import executor_for
from labkit.engine.executor_torch import TorchExecutor
from labkit.engine.lanes import LaunchedWork, StreamLane
from labkit.engine.request import Status
from labkit.engine.sampling import SamplingParams
from labkit.errors import InputError
from labkit.kernels import paged_prefill
from labkit.models.decoder import Decoder
from labkit.models.step_model import DecoderLayers
from labkit.models.step_weights import dense_table, step_weights
from labkit.nn.invariant import InvariantLayers

COUNT = 8


@functools.cache
def kernel_reference(kv_dtype: torch.dtype | None) -> Reference:
    """What the kernels give token by token; computed once."""
    of = cases.config()
    model = step_model(cases.decoder(of, torch.float16), cases.plain_products())
    return Reference(model, kv_dtype=kv_dtype)


def on_kernels(kv_dtype: torch.dtype | None = None, **options: Any) -> Checked:
    """Everything that a GPU would do but streams and graphs, with torch's product."""
    reference = kernel_reference(kv_dtype)
    model = reference.layers
    executor = Checked(model, kv=pool(model, kv_dtype=kv_dtype), **({"chunk": 32, "max_batch": 8} | options))
    executor.reference = reference
    return executor


# --- plain ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_decoder(name: str) -> None:
    of = cases.config(**MODELS[name])
    decoder = cases.decoder(of, torch.float32)
    executor = executor_for(decoder, num_blocks=40, max_batch=8, chunk=24)
    assert executor.kv.head_major and not executor.concurrent and not executor.lanes and not executor.feeds
    longest = min(40, of.max_position_embeddings - COUNT)
    prompts = prompts_of(1, of.vocab_size, longest=longest)
    engine = Engine(executor)
    requests = engine.generate(prompts, SamplingParams(max_tokens=COUNT))
    for prompt, request in zip(prompts, requests, strict=True):
        ids = list(prompt)
        for _ in range(COUNT):
            ids.append(int(decoder(torch.tensor([ids]))[0, -1].argmax()))
        assert request.output_ids == ids[len(prompt) :] and request.finish_reason == "length"
    counters = engine.counters
    assert counters.prefill_decode_stream_overlap_steps == 0


def test_a_slice_is_a_part_of_the_whole() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float32)
    for layers in (DecoderLayers(decoder), InvariantLayers(decoder)):
        reference = Reference(layers)
        kv, table_view = pool(layers), None
        from labkit.cache.blocks import BlockAllocator

        table = BlockAllocator(40, 16).allocate(9)
        table_view = reference.builder.build([table], [9])
        tokens = torch.arange(9)
        whole = layers.forward(tokens, kv, table_view)
        half = layers.forward(tokens, pool(layers), table_view, layers=(0, 1))
        assert not torch.equal(half, whole)
        other = pool(layers)
        half = layers.forward(tokens, other, table_view, layers=(0, 1))
        assert torch.equal(layers.forward(tokens, other, table_view, layers=(1, 2), hidden=half), whole)


def test_sampled_rows_and_greedy_ones_in_one_batch() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float32)
    prompts = prompts_of(2, of.vocab_size)
    draws = [SamplingParams(max_tokens=6, temperature=t, seed=5, logprobs=3 if t else None) for t in (0, 1.0)]
    params = [draws[i % 2] for i in range(len(prompts))]
    alone = [Engine(executor_for(decoder, num_blocks=40, invariant=True)).generate([p], [q])[0]
             for p, q in zip(prompts, params, strict=True)]  # fmt: skip
    together = Engine(executor_for(decoder, num_blocks=40, invariant=True)).generate(prompts, params)
    for one, other in zip(alone, together, strict=True):
        assert one.output_ids == other.output_ids and one.logprobs == other.logprobs
        assert len(one.logprobs) == (0 if one.params.temperature == 0 else 6)


def test_overflow_ends_the_request() -> None:
    of = cases.config()
    weights = cases.model_weights(of)
    weights["model.embed_tokens.weight"][7] = float("inf")
    decoder = Decoder.from_weights(of, weights, dtype=torch.float32)
    engine = Engine(executor_for(decoder, num_blocks=40))
    bad, good = engine.generate([[1, 7, 2], [1, 2, 3]], SamplingParams(max_tokens=3))
    assert bad.status is Status.FAILED and "NaN or infinite" in bad.error and bad.output_ids == []
    assert good.finish_reason == "length"


# --- invariant --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_changes_a_bit(seed: int) -> None:
    draw = random.Random(seed)
    of = cases.config(**MODELS[draw.choice([name for name in MODELS if name != "dynamic"])])
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
    layers = InvariantLayers(cases.decoder(of, dtype), rows=draw.choice([1, 2, 4, 16]))
    options: dict[str, Any] = {
        "block_size": draw.choice([8, 16]),
        "kv_dtype": draw.choice([None, torch.int8]),
    }
    reference = Reference(layers, head_major=draw.random() < 0.5, **options)
    blocks = 15 * 8 // options["block_size"]
    executor = Checked(
        layers,
        kv=pool(layers, num_blocks=blocks, head_major=draw.random() < 0.5, **options),
        chunk=draw.choice([1, 5, 16, 64]),
        max_batch=draw.choice([1, 3, 8]),
    )
    executor.reference = reference
    engine = Engine(
        executor,
        policy=draw.choice(POLICIES),
        admission=draw.choice(["peak", "now"]),
        prefix_cache=draw.random() < 0.7,
    )
    prompts = prompts_of(seed, of.vocab_size)
    counts = [draw.randrange(1, 14) for _ in prompts]
    requests = run(engine, prompts, counts, seed)
    assert executor.differences == [] and executor.compared >= sum(counts)
    for prompt, count, request in zip(prompts, counts, requests, strict=True):
        assert request.output_ids == reference.tokens(prompt, count)


def test_a_preemption_changes_no_bit() -> None:
    of = cases.config()
    layers = InvariantLayers(cases.decoder(of, torch.float32))
    executor = Checked(layers, kv=pool(layers, num_blocks=8, block_size=8), chunk=16, max_batch=8)
    executor.reference = Reference(layers)
    engine = Engine(executor, admission="now", prefix_cache=False)
    prompts = [[i, i + 1, i + 2] for i in range(6)]
    requests = engine.generate(prompts, SamplingParams(max_tokens=24))
    assert sum(request.preemptions for request in requests) > 0
    assert executor.differences == []
    assert all(request.finish_reason == "length" for request in requests)


def test_the_check_has_teeth() -> None:
    """Last bits that depend on how many rows there are, as those of torch's products may, are found out."""

    class Careless(InvariantLayers):
        def _blocks(self, work: Any, *inputs: torch.Tensor) -> torch.Tensor:
            return work(*inputs) * (1 + 2.0**-20 * (len(inputs[0]) % 7))

    layers = Careless(cases.decoder(cases.config(), torch.float32))
    executor = Checked(layers, kv=pool(layers), chunk=64, max_batch=8)
    executor.reference = Reference(layers)
    Engine(executor).generate(prompts_of(3, 300), SamplingParams(max_tokens=6))
    assert executor.differences


def test_invariant_is_a_mode_of_the_cpu() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float32)
    for rows in (0, 2.0, True):
        with pytest.raises(InputError, match=r"^rows: "):
            InvariantLayers(decoder, rows=rows)  # type: ignore[arg-type]
    decoder.device = torch.device("cuda")
    with pytest.raises(InputError, match=r"^device: "):
        InvariantLayers(decoder)


# --- the pool ---------------------------------------------------------------------------------------------


def test_the_pool_grows_under_the_engine() -> None:
    of = cases.config()
    layers = InvariantLayers(cases.decoder(of, torch.float32))
    executor = Checked(layers, kv=pool(layers, num_blocks=2), most_blocks=40, chunk=16, max_batch=8)
    executor.reference = Reference(layers)
    prompts = prompts_of(4, of.vocab_size)
    requests = Engine(executor).generate(prompts, SamplingParams(max_tokens=6))
    assert all(request.finish_reason == "length" for request in requests)
    assert 2 < executor.num_blocks == executor.kv.num_blocks <= 40
    assert executor.differences == []


def test_sizes_of_an_executor_for_a_model() -> None:
    of = cases.config(eos_token_ids=(3, 4))
    decoder = cases.decoder(of, torch.float32)
    executor = executor_for(decoder, max_batch=4)
    assert executor.max_context == 512 and executor.eos_ids == {3, 4}
    assert executor.num_blocks == executor.most_blocks == 4 * 512 // 16
    small = executor_for(decoder, max_batch=64, max_context=500)
    assert small.num_blocks == 1024 and small.most_blocks == 64 * 500 // 16 == 2000
    with pytest.raises(InputError, match=r"^max_context: "):
        executor_for(decoder, max_context=513)
    for blocks in (10**10, 10**17):  # more than the system would promise, and more than it could address
        with pytest.raises(InputError, match=rf"^num_blocks: got {blocks} .* bytes free"):
            executor_for(decoder, num_blocks=blocks)


def test_parts_that_do_not_belong_together_are_refused_by_name() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float32)
    kv = pool(DecoderLayers(decoder))
    half = pool(DecoderLayers(cases.decoder(of, torch.float16)))
    bad: list[tuple[str, dict[str, Any]]] = [
        ("kv", {"kv": half}),
        ("chunk", {"chunk": 0}),
        ("max_batch", {"max_batch": True}),
        ("max_context", {"max_context": 513}),
        ("most_blocks", {"most_blocks": 3}),
        ("concurrent", {"concurrent": True}),
        ("graphs", {"graphs": True}),
    ]
    for name, options in bad:
        with pytest.raises(InputError, match=f"^{name}: "):
            TorchExecutor(decoder, **({"kv": kv} | options))
    with pytest.raises(InputError, match=r"^invariant: "):
        TorchExecutor(DecoderLayers(decoder), kv=kv, invariant=True)


# --- kernels, in the emulator -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "tall_from"), [*((one, 0) for one in POLICIES), ("mixed", 3), ("ticks", 1)]
)
def test_no_policy_changes_a_bit_on_the_kernels(
    policy: str, tall_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_prefill, "tall_from", lambda *_, **__: tall_from)
    executor = on_kernels()
    assert executor.feeds and not executor.concurrent
    prompts = prompts_of(5, 300, count=5)
    requests = Engine(executor, policy=policy).generate(prompts, SamplingParams(max_tokens=COUNT))
    assert executor.differences == [] and executor.compared > 0
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == executor.reference.tokens(prompt, COUNT)


def test_tall_tiles_are_taken_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.kernels.launch import Launch

    ran: list[str] = []
    run_one = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (ran.append(self.source.name), run_one(self))[1])
    for tall_from in (0, 4):
        ran.clear()
        monkeypatch.setattr(paged_prefill, "tall_from", lambda *_, at=tall_from, **__: at)
        prompts = prompts_of(5, 300, count=2)
        Engine(on_kernels(), policy="mixed").generate(prompts, SamplingParams(max_tokens=2))
        assert ("paged_prefill" in ran) == (tall_from > 0)


def test_a_row_is_fed_with_a_token_that_the_host_has_not_seen() -> None:
    executor = on_kernels(max_batch=4)
    fed = 0
    real = executor.prepare

    def counted(rows: Any, lane: Any) -> Any:
        nonlocal fed
        fed += sum(row.fed for row in rows)
        return real(rows, lane)

    executor.prepare = counted  # type: ignore[method-assign]
    prompts = prompts_of(8, 300, count=3)
    requests = Engine(executor, policy="serial").generate(prompts, SamplingParams(max_tokens=12))
    assert fed > 15 and executor.differences == []
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == executor.reference.tokens(prompt, 12)


def test_a_context_that_is_no_whole_number_of_blocks() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float16)
    model = step_model(decoder, cases.plain_products(), max_context=37)
    executor = Checked(model, kv=pool(model), max_batch=3, chunk=16)
    executor.reference = kernel_reference(None)
    engine = Engine(executor)
    full, short = engine.generate([list(range(30)), [4, 5]], SamplingParams(max_tokens=20))
    assert executor.max_context == 37 and executor.differences == []
    # The last token needs no slot: nothing attends to it.
    assert len(full.output_ids) == 8 and full.finish_reason == "length" and len(short.output_ids) == 20


def test_padded_sizes() -> None:
    from labkit.engine import chunk_graphs, executor_graphs

    assert chunk_graphs._sizes(7) == [7]
    assert chunk_graphs._sizes(40) == [16, 24, 32, 40]
    assert chunk_graphs._sizes(320) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 320]
    assert executor_graphs._sizes(4) == [1, 2, 4] and executor_graphs._sizes(12) == [1, 2, 4, 8, 12]
    assert executor_graphs.capacities_for(1000, 16) == [1008]
    assert executor_graphs.capacities_for(9000, 64) == [1024, 4096, 9024]


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_changes_a_bit_on_the_kernels(seed: int) -> None:
    draw = random.Random(seed)
    kv_dtype = draw.choice([None, torch.int8])
    executor = on_kernels(
        kv_dtype=kv_dtype,
        chunk=draw.choice([3, 16, 40]),
        max_batch=draw.choice([2, 5]),
        graphs=draw.random() < 0.7,
    )
    engine = Engine(executor, policy=draw.choice(POLICIES), admission=draw.choice(["peak", "now"]))
    prompts = prompts_of(seed, 300, count=5)
    counts = [draw.randrange(1, 9) for _ in prompts]
    requests = run(engine, prompts, counts, seed)
    assert executor.differences == []
    for prompt, count, request in zip(prompts, counts, requests, strict=True):
        assert request.output_ids == executor.reference.tokens(prompt, count)


@pytest.mark.parametrize("policy", ["serial", "ticks", "mixed"])
def test_logits_that_the_host_wants_are_not_overwritten(policy: str) -> None:
    """Prompts of one token, computed beside decode steps whose tokens are drawn."""
    check_drawn_tokens(on_kernels(), policy, [[5], [6, 7, 8], [9], [10]], 5)


def test_a_pool_that_grows_takes_the_steps_along() -> None:
    executor = on_kernels()
    model = executor.layers
    small = Checked(model, kv=pool(model, num_blocks=2), most_blocks=40, chunk=32, max_batch=4)
    small.reference = executor.reference
    prompts = prompts_of(6, 300, count=4)
    requests = Engine(small).generate(prompts, SamplingParams(max_tokens=4))
    assert small.kv.generation > 0 and small.differences == []
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == executor.reference.tokens(prompt, 4)


def test_overflow_on_the_kernels_ends_that_request_alone() -> None:
    of = cases.config()
    weights = cases.model_weights(of)
    weights["model.embed_tokens.weight"][7] = float("inf")
    model = step_model(Decoder.from_weights(of, weights, dtype=torch.float16), cases.plain_products())
    engine = Engine(TorchExecutor(model, kv=pool(model), max_batch=4))
    found = Reference(model).tokens([9, 8], 5)
    prompt = [9, 8]
    good, bad = engine.add_request(prompt, SamplingParams(max_tokens=5)), engine.add_request([4, 7])
    engine.run()
    assert good.output_ids == found
    assert bad.status is Status.FAILED and "NaN or infinite" in bad.error


# --- weights that are held once ---------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_are_dropped_once_they_are_repacked(tied: bool) -> None:
    of = cases.config(tie_word_embeddings=tied)
    right = step_weights(cases.decoder(of, torch.float16), products=cases.plain_products())
    decoder = cases.decoder(of, torch.float16)
    import weakref

    packed = [weakref.ref(layer.down.parts[0].weight) for layer in decoder.layers]
    weights = step_weights(decoder, products=cases.plain_products(), release=True)
    assert all(one() is None for one in packed)
    assert torch.equal(weights.embedding, right.embedding) and torch.equal(weights.head, right.head)
    assert (weights.head is weights.embedding) == (right.head is right.embedding)
    for one, other in zip(weights.layers, right.layers, strict=True):
        assert torch.equal(one.down.values, other.down.values) and torch.equal(one.mlp_norm, other.mlp_norm)
    with pytest.raises(InputError, match="released"):
        decoder(torch.tensor([[1]]))


@pytest.mark.parametrize("form", ["w4", "q8_0"])
def test_a_quantised_embedding_is_looked_up_where_it_is(form: str) -> None:
    from labkit.quant.quantize import quantize

    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    packed = quantize(values, form)
    of = cases.config()
    right = step_weights(cases.decoder(of, torch.float16), products=cases.plain_products())
    weights = replace(right, embedding=packed)
    ids = torch.tensor([49, 0, 7, 7])
    wanted = packed.dequantize(torch.float16)[ids]
    assert torch.equal(weights.embed(ids), wanted)
    out = torch.empty(4, 64, dtype=torch.float16)
    assert weights.embed(ids, out) is out and torch.equal(out, wanted)
    assert weights.row_bytes == packed.nbytes // 50


def test_a_model_that_cannot_be_repacked_stays_whole() -> None:
    of = cases.config()
    weights = cases.model_weights(of)
    name = "model.layers.1.self_attn.o_proj.weight"
    weights[name] = weights[name].dequantize()
    decoder = Decoder.from_weights(of, weights, dtype=torch.float16)
    before = decoder(torch.tensor([[1, 2]]))
    with pytest.raises(InputError, match="layer 1 out"):
        step_weights(decoder, products=cases.plain_products(), release=True)
    assert torch.equal(decoder(torch.tensor([[1, 2]])), before)


def test_a_quantised_table_is_made_band_by_band(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.models import step_weights as module
    from labkit.quant.quantize import quantize

    values = torch.randn(300, 64)
    for form in ("w4", "q8_0"):
        weight = quantize(values, form, 32)
        whole = weight.dequantize(torch.float16)
        for rows in (1, 7, 300):
            monkeypatch.setattr(module, "BAND_BYTES", 4 * 64 * rows)
            assert torch.equal(dense_table(weight, torch.float16), whole)


def test_many_rows_stay_on_the_family_where_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the rows of one launch too; without the keyword they go through a dense weight."""
    from labkit.kernels import tensor_core
    from labkit.kernels.tensor_core import launch
    from labkit.quant.quantize import quantize
    from labkit.quant.tiles import repack

    monkeypatch.setattr(launch, "_EXACT_ROWS", 272)
    weight = repack(quantize(torch.randn(32, 128) / 11, "w4", 128))
    x, residual, bias = torch.randn(280, 128).half(), torch.randn(280, 32).half(), torch.randn(32).half()
    y = tensor_core.linear(x, weight, bias=bias, residual=residual, dense_from=None)
    for row in (0, 9, 255, 271, 272, 279):
        here = slice(row, row + 1)
        alone = tensor_core.linear(x[here].contiguous(), weight, bias=bias, residual=residual[here])
        assert torch.equal(alone, y[here])
    calls = []
    monkeypatch.setattr(launch, "_through_dense", lambda *args: calls.append(len(args[0])))
    tensor_core.linear(x, weight)
    assert calls == [280]


def test_a_sequence_without_room_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from labkit.engine import executor_for as module

    decoder = cases.decoder(cases.config(), torch.float32)
    monkeypatch.setattr(module, "free_memory", lambda device: 2 << 20)
    monkeypatch.setattr(module, "PagedKV", None)
    with pytest.raises(
        InputError, match=r"^memory: got 2.0 MiB for 1 x 512 tokens; expected at least .* Fix: "
    ):
        module.executor_for(decoder)


def test_a_work_that_failed_on_the_device_is_done() -> None:
    """Its join raises, where the engine finds out who is to blame; asking must not."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    work = LaunchedWork()
    work.ended = Broken()
    assert StreamLane.done(StreamLane.__new__(StreamLane), work)


def test_waiting_ends_with_the_first_work_or_in_time() -> None:
    """On a GPU, with works that end after so many questions."""

    class Asked(TorchExecutor):
        def __init__(self) -> None:
            self.left = [5, 3]

        def done(self, handle: Any) -> bool:
            self.left[handle] -= 1
            return self.left[handle] <= 0

    executor = Asked()
    executor.wait([0, 1])
    assert executor.left == [2, 0]
    executor.left = [10**9]
    began = executor.now()
    executor.wait([0], began + 0.01)
    assert executor.now() >= began + 0.01 and executor.left[0] < 10**9 - 1
