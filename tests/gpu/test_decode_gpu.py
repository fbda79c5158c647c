"""The decode step on a GPU: kernels against float64, graph against eager, a batch against its rows alone."""

from __future__ import annotations

import decode_cases as cases
import pytest
import torch

from labkit.bench import decode as bench
from labkit.bench.decode_check import Errors, Wanted
from labkit.bench.random_model import RandomModel, config_of
from labkit.errors import InputError
from labkit.kernels import greedy as greedy_module
from labkit.kernels import paged_attention as attention
from labkit.kernels import rmsnorm as rmsnorm_module
from labkit.kernels.greedy import GreedyState, greedy
from labkit.kernels.rmsnorm import rmsnorm
from labkit.models.decode_step import DecodeStep, Products
from labkit.models.graph_decoder import GraphDecoder
from labkit.models.model import HEAD

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    # A test run with `-m gpu` on a machine without one must say so, not pass.
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"


# --- kernels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [7, 576, 2048, 4104, 11008])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rmsnorm(d: int, dtype: torch.dtype) -> None:
    source = torch.Generator("cuda").manual_seed(d)
    x = (torch.randn(70, d, generator=source, device="cuda") * 3).to(dtype)
    weight = torch.randn(d, generator=source, device="cuda").to(dtype)
    exact = torch.nn.functional.rms_norm(x.double(), (d,), weight.double(), 1e-6)
    plain = torch.nn.functional.rms_norm(x, (d,), weight, 1e-6).double()
    y = rmsnorm(x, weight, 1e-6)
    bound = 2 * (plain - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max() / 4
    assert (y.double() - exact).abs().max() <= bound
    for m in (1, 2, 33):
        assert torch.equal(rmsnorm(x[:m].contiguous(), weight, 1e-6), y[:m])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_greedy(dtype: torch.dtype) -> None:
    logits = torch.randn(64, 151_936, device="cuda").to(dtype)
    state = GreedyState.new(64, 8, "cuda")
    greedy(logits, state)
    at = (logits == logits.amax(1, keepdim=True)).int().argmax(1)  # the first of the largest
    assert torch.equal(state.tokens, at) and torch.equal(state.history[:, 0].long(), at)
    assert state.lengths.tolist() == [1] * 64 and not state.status.any() and not state.tickets.any()


def test_registers_are_those_of_the_compiled_code_and_nothing_spills() -> None:
    from labkit.kernels import runner
    from labkit.kernels.resources import stated_registers

    sources = [rmsnorm_module.source(torch.float16, True), greedy_module.source(torch.float16)]
    sources += [attention.source(torch.float16, 128, group, 16, fused=True) for group in (7, 8, 16)]
    for source in sources:
        kernel = runner.load(source, "cuda")
        assert kernel.local_bytes == 0 and kernel.registers <= stated_registers(source)


# --- whole steps ------------------------------------------------------------------------------------------


def three_layers(head: str = "w4", dtype: torch.dtype = torch.float16, form: str = "w4") -> RandomModel:
    """Layers of Qwen2.5-3B, three of them."""
    config = config_of("qwen2.5-3b")
    small = type(config).from_dict(config.to_dict() | {"num_layers": 3, "vocab_size": 20_000})
    return RandomModel(small, form, 128, head, "cuda", dtype)


@pytest.mark.parametrize("form", ["w4", "w3"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("head", ["dense", "w4"])
def test_logits_of_real_widths_against_float32(form: str, dtype: torch.dtype, head: str) -> None:
    model = three_layers(head, dtype, form)
    products = Products.tensor_core()
    wanted = Wanted.of(model, 5)
    step = DecodeStep(model.config, model.step_weights(products), batch=5, capacity=8, products=products)
    decoder = GraphDecoder(step)
    assert decoder.captured
    found = wanted.errors(decoder.forward)
    assert found.within(wanted.plain), (found, wanted.plain)


def test_replay_is_eager_bit_for_bit_with_changed_inputs() -> None:
    model = three_layers("dense")
    products = Products.tensor_core()
    weights = model.step_weights(products)
    graph, eager = (
        GraphDecoder(
            DecodeStep(model.config, weights, batch=3, capacity=300, products=products), graph=captured
        )
        for captured in (True, False)
    )
    assert graph.captured and not eager.captured
    source = torch.Generator().manual_seed(1)
    for lengths in ([0, 0, 0], [5, 130, 0], [127, 128, 255]):
        for decoder in (graph, eager):
            for i, layer in enumerate(decoder.step.cache.kv.layers):
                for j, cache in enumerate((layer.keys, layer.values)):
                    cache.normal_(generator=torch.Generator("cuda").manual_seed(2 * i + j))
            decoder.place(lengths)
        for _ in range(4):
            tokens = torch.randint(0, 20_000, (3,), generator=source)
            first, second = graph.forward(tokens), eager.forward(tokens)
            assert torch.equal(first, second) and torch.equal(graph.step.hidden, eager.step.hidden)
            assert torch.equal(graph.tokens, eager.tokens)
        for one, other in zip(graph.step.cache.kv.layers, eager.step.cache.kv.layers, strict=True):
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
        for decoder in (graph, eager):
            decoder.check()
    graph.place(40)
    eager.place(40)
    assert torch.equal(graph.generate(30), eager.generate(30))
    assert graph.lengths == graph.step.state.lengths.tolist() == [70, 70, 70]


@pytest.mark.parametrize("head", ["w4", "dense"])
def test_a_row_of_a_batch_has_the_bits_that_it_has_alone(head: str) -> None:
    model = three_layers(head)
    products = Products.tensor_core()
    weights = model.step_weights(products)
    made = {
        batch: GraphDecoder(
            DecodeStep(model.config, weights, batch=batch, capacity=capacity, products=products)
        )
        for batch, capacity in ((1, 260), (8, 140), (33, 40))
    }
    tokens = torch.randint(0, 20_000, (33,), generator=torch.Generator().manual_seed(2))
    found = {}
    for batch in (8, 33):
        made[batch].feed(tokens[:batch])
        found[batch] = made[batch].generate(30)
    # With a dense head a batch above eight is another cuBLAS product: the tokens are fed, not found.
    exact = (8, 33) if head == "w4" else (8,)
    for batch in exact:
        for row in (0, batch - 1):
            made[1].reset()
            made[1].feed(tokens[row : row + 1])
            assert torch.equal(made[1].generate(30)[0], found[batch][row]), f"row {row} of {batch}"
            assert torch.equal(made[1].logits[0], made[batch].logits[row])
            assert torch.equal(made[1].step.hidden[0], made[batch].step.hidden[row])
    made[33].reset()
    made[1].reset()
    for t in range(4):
        column = (tokens + t) % 20_000
        made[33].forward(column)
        made[1].forward(column[32:])
        assert torch.equal(made[1].step.hidden[0], made[33].step.hidden[32])


def test_against_the_decoder_with_its_prefill() -> None:
    of = cases.config(hidden_size=256, intermediate_size=384, num_heads=8, num_kv_heads=2)
    decoder = cases.decoder(of, torch.float16, "cuda", group=128)
    exact = cases.decoder(of, torch.float32, "cuda", group=128)
    ours = GraphDecoder.from_decoder(decoder, capacity=64, batch=2)
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(3))
    caches = decoder.new_cache(64, 2), exact.new_cache(64, 2)
    ours.prefill(tokens[:, :33])
    decoder.hidden(tokens[:, :33], caches[0])
    exact.hidden(tokens[:, :33], caches[1])
    found: list[list[torch.Tensor]] = [[], [], []]
    for t in range(33, 40):
        column = tokens[:, t]
        found[0].append(exact(column[:, None], caches[1])[:, -1])
        found[1].append(decoder(column[:, None], caches[0])[:, -1])
        found[2].append(ours.forward(column).clone())
    right, plain, mine = (torch.stack(one, 1).float() for one in found)
    assert Errors.of(mine, right).within(Errors.of(plain, right))
    ours.place(64)
    with pytest.raises(InputError, match="capacity 64"):
        ours.advance()


def test_the_head_of_the_default_model_is_found() -> None:
    from labkit.errors import MissingModelError
    from labkit.models.zoo import load_model

    try:
        model = load_model(bits="w4", group_size=32, device="cuda", dtype=torch.float16)
    except MissingModelError as error:
        pytest.skip(str(error))
    assert model.config.tie_word_embeddings and HEAD not in dict(model.decoder.named_weights())
    ours = GraphDecoder.from_decoder(model.decoder, capacity=64)
    tokens = torch.tensor([[1, 504, 3575, 282]])
    ours.prefill(tokens)
    cache = model.decoder.new_cache(64)
    logits = model.decoder(tokens, cache)[:, -1]
    for _ in range(8):
        token = logits.argmax(-1)
        mine = ours.forward(token).float()
        logits = model.decoder(token[:, None], cache)[:, -1]
        assert (mine - logits.float()).abs().max() <= 0.05 * logits.float().abs().max()


def test_the_benchmark_runs() -> None:
    options = bench.Options(
        model="qwen2.5-0.5b", batch=(1,), context=(16,), tokens=4, device="cuda", group=32
    )
    record = bench.run(options, "labkit bench decode", lambda line: None)
    assert [entry.status for entry in record.entries] == ["timed"], record.entries
    assert len(record.entries[0].samples_us) == options.samples and "tokens/s" in record.entries[0].note
