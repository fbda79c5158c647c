"""The decode step against the torch decoder, with torch's product in the place of the tensor-core family."""

from __future__ import annotations

from typing import Any

import decode_cases as cases
import pytest
import torch

from labkit.bench.decode_check import Errors
from labkit.errors import InputError
from labkit.models.decode_step import DecodeStep, step_weights
from labkit.models.decoder import Decoder
from labkit.models.graph_decoder import GraphDecoder

MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "tied": {"tie_word_embeddings": True},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "attention_bias": False, "head_dim": 80},
    "llama": {
        "architecture": "llama",
        "num_heads": 3,
        "num_kv_heads": 3,
        "output_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.5},
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}


def graph_decoder(decoder: Decoder, **options: Any) -> GraphDecoder:
    return GraphDecoder.from_decoder(decoder, products=cases.plain_products(), **options)


def prompt(of: Any, batch: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, of.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_logits_are_those_of_the_decoder(name: str, dtype: torch.dtype) -> None:
    of = cases.config(**MODELS[name])
    exact = cases.decoder(of, torch.float32)
    plain = cases.decoder(of, dtype)
    ours = graph_decoder(plain, capacity=24, batch=2)
    assert not ours.captured
    tokens = prompt(of, 2, 10)
    caches = exact.new_cache(24, 2), plain.new_cache(24, 2)
    for cache, decoder in zip(caches, (exact, plain), strict=True):
        decoder.hidden(tokens[:, :4], cache)
    ours.prefill(tokens[:, :4])
    found: list[list[torch.Tensor]] = [[], [], []]
    for position in range(4, 10):
        column = tokens[:, position]
        found[0].append(exact(column[:, None], caches[0])[:, -1])
        found[1].append(plain(column[:, None], caches[1])[:, -1])
        found[2].append(ours.forward(column).clone())
        assert ours.tokens.tolist() == ours.logits.argmax(-1).tolist()
    assert ours.lengths == [10, 10] == ours.step.state.lengths.tolist()
    right, theirs, mine = (torch.stack(one, 1).float() for one in found)
    assert Errors.of(mine, right).within(Errors.of(theirs, right))
    assert not torch.equal(mine, right)


def test_generated_tokens_are_those_of_a_loop() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float16)
    ours = graph_decoder(decoder, capacity=20, batch=2)
    tokens = prompt(of, 2, 5)
    logits = ours.prefill(tokens)
    expected = [logits.argmax(-1)]
    for _ in range(6):
        expected.append(ours.forward(expected[-1]).float().argmax(-1))
    ours.prefill(tokens)
    found = ours.generate(6)
    assert found.dtype == torch.int64 and torch.equal(found, torch.stack(expected[1:], 1))
    assert ours.lengths == [11, 11]
    assert torch.equal(ours.tokens, found[:, -1])


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.bfloat16)
    together = graph_decoder(decoder, capacity=40, batch=3)
    alone = graph_decoder(decoder, capacity=140, batch=1)
    tokens = prompt(of, 3, 9)
    for row in range(3):
        alone.reset()
        for position in range(9):
            if position == 0:
                together.reset()
                together.place([0, 0, 0])
            logits = together.forward(tokens[:, position])
            assert torch.equal(alone.forward(tokens[row : row + 1, position])[0], logits[row])
            assert torch.equal(alone.step.hidden[0], together.step.hidden[row])


def test_the_size_of_a_block_changes_no_bit() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float16)
    tokens = prompt(of, 2, 1)
    made = [graph_decoder(decoder, capacity=24, batch=2, block_size=size) for size in (8, 16, 64)]
    for ours in made:
        ours.feed(tokens[:, 0])
    generated = [ours.generate(20) for ours in made]
    for ours, found in zip(made[1:], generated[1:], strict=True):
        assert torch.equal(found, generated[0]) and torch.equal(ours.logits, made[0].logits)
    assert [ours.step.cache.kv.num_blocks for ours in made] == [6, 4, 2]


def test_int8_keys_and_values() -> None:
    """As near to float32 on the same INT8 cache as plain torch is, times two; and INT8 it is."""
    of = cases.config()
    exact, plain = cases.decoder(of, torch.float32), cases.decoder(of, torch.bfloat16)
    ours = graph_decoder(plain, capacity=24, batch=2, kv_dtype=torch.int8)
    tokens = prompt(of, 2, 12)
    caches = [one.new_cache(24, 2, kv_dtype=torch.int8) for one in (exact, plain)]
    for cache, decoder in zip(caches, (exact, plain), strict=True):
        decoder.hidden(tokens[:, :5], cache)
    ours.prefill(tokens[:, :5])
    found: list[list[torch.Tensor]] = [[], [], []]
    for column in tokens[:, 5:].unbind(1):
        for part, decoder, cache in zip(found, (exact, plain), caches, strict=False):
            part.append(decoder(column[:, None], cache)[:, -1])
        found[2].append(ours.forward(column).clone())
    right, theirs, mine = (torch.stack(one, 1).float() for one in found)
    assert Errors.of(mine, right).within(Errors.of(theirs, right))
    half = graph_decoder(plain, capacity=24, batch=2)
    assert ours.step.cache.nbytes < 0.54 * half.step.cache.nbytes
    assert ours.step.read_bytes(20) < half.step.read_bytes(20)


def test_rows_of_different_lengths_and_going_back() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float16)
    ours = graph_decoder(decoder, capacity=12, batch=2)
    tokens = prompt(of, 2, 6)
    first = [ours.forward(tokens[:, i]).clone() for i in range(6)]
    ours.place([2, 4])
    mixed = ours.forward(torch.stack((tokens[0, 2], tokens[1, 4])))
    assert torch.equal(mixed[0], first[2][0]) and torch.equal(mixed[1], first[4][1])
    assert ours.lengths == [3, 5]


@pytest.mark.parametrize("head", ["w4", None])
def test_the_head_dense_or_quantised(head: str | None) -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float16, head=head)
    ours = graph_decoder(decoder, capacity=8, batch=1)
    assert isinstance(ours.step.weights.head, torch.Tensor) == (head is None)
    logits = ours.forward([5])
    plain = decoder(torch.tensor([[5]]), decoder.new_cache(8))[:, -1]
    assert logits.shape == (1, of.vocab_size)
    assert (logits - plain).abs().max() <= 0.02 * plain.abs().max()


def test_a_quantised_embedding_becomes_a_table() -> None:
    of = cases.config(tie_word_embeddings=True)
    weights = cases.model_weights(of)
    from labkit.models.model import EMBEDDING
    from labkit.quant.quantize import quantize

    for form in ("w4", "q8_0"):
        weights[EMBEDDING] = quantize(cases.model_weights(of)[EMBEDDING], form, 32)
        decoder = Decoder.from_weights(of, weights, dtype=torch.float16)
        ours = graph_decoder(decoder, capacity=4)
        plain = decoder(torch.tensor([[7]]))[:, -1]
        assert (ours.forward([7]) - plain).abs().max() <= 0.02 * plain.abs().max()
        assert isinstance(ours.step.weights.head, torch.Tensor) == (form == "q8_0")


def test_a_full_cache_is_refused_before_anything_is_written() -> None:
    of = cases.config()
    ours = graph_decoder(cases.decoder(of, torch.float16), capacity=6, batch=2)
    ours.prefill(prompt(of, 2, 5))
    ours.advance()
    layers = ours.step.cache.kv.layers
    held = (*(layer.keys for layer in layers), ours.step.logits, ours.tokens)
    state = [tensor.clone() for tensor in held]
    for call in (ours.advance, lambda: ours.forward([1, 2]), lambda: ours.generate(1)):
        with pytest.raises(InputError, match=r"1 more after 6 positions.*capacity 6"):
            call()
    ours.place([3, 4])
    with pytest.raises(InputError, match="3 more after 4 positions"):
        ours.generate(3)
    with pytest.raises(InputError, match="7 more after 0 positions"):
        ours.prefill(prompt(of, 2, 7))
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(held, state, strict=True))
    assert ours.lengths == [3, 4]
    assert ours.generate(2).shape == (2, 2)


def test_a_graph_is_not_replayed_on_storage_that_has_moved() -> None:
    """Without a graph nothing is held: the step goes on where the storage is now."""

    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    of = cases.config()
    decoder = cases.decoder(of, torch.float16)
    moved, still, held = (graph_decoder(decoder, capacity=8) for _ in range(3))
    for ours in (moved, still, held):
        ours.prefill(prompt(of, 1, 5))
    moved.step.kv.grow(moved.step.kv.num_blocks + 1)
    assert torch.equal(moved.generate(3), still.generate(3))
    graph = Graph()
    held._graph = graph  # type: ignore[assignment]
    held.advance()
    held.step.kv.grow(held.step.kv.num_blocks + 1)
    with pytest.raises(InputError, match=r"^kv: got storage that has grown.*capture anew"):
        held.advance()
    assert graph.replays == 1 and held.lengths == [6]


def test_bad_input_is_refused_by_name() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float16)
    ours = graph_decoder(decoder, capacity=6, batch=2)
    for bad in ([1], [1, 300], [-1, 2], [0.5, 1.0], [[1, 2]], [True, False]):
        with pytest.raises(InputError, match=r"^tokens: "):
            ours.feed(bad)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"^tokens: "):
            ours.prefill(torch.tensor(bad))
    with pytest.raises(InputError, match=r"^lengths: "):
        ours.place([1])
    with pytest.raises(InputError, match=r"^lengths: "):
        ours.place(7)
    with pytest.raises(InputError, match=r"^count: "):
        ours.generate(0)
    bare = GraphDecoder(ours.step)
    with pytest.raises(InputError, match=r"^decoder: "):
        bare.prefill(prompt(of, 2, 3))
    for name in ("batch", "capacity"):
        with pytest.raises(InputError, match=f"^{name}: "):
            graph_decoder(decoder, **({"capacity": 4} | {name: 0}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 32}, "head_dim 32"),
        ({"num_heads": 17, "head_dim": 64}, "17 query heads"),
        ({"architecture": "llama", "mlp_bias": True}, "mlp_bias"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8},
            "dynamic rope_scaling",
        ),
    ],
)
def test_models_without_kernels_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        graph_decoder(cases.decoder(cases.config(**changes), torch.float16), capacity=16)


def test_weights_without_tiles_are_refused_by_name() -> None:
    of = cases.config()
    with pytest.raises(InputError, match="float32"):
        graph_decoder(cases.decoder(of, torch.float32), capacity=4)
    for form in ("q8_0", "none"):
        weights = cases.model_weights(of)
        name = "model.layers.1.self_attn.o_proj.weight"
        dense = weights[name].dequantize()
        from labkit.quant.quantize import quantize

        weights[name] = dense if form == "none" else quantize(dense, form)
        with pytest.raises(InputError, match="layer 1 out"):
            graph_decoder(Decoder.from_weights(of, weights, dtype=torch.float16), capacity=4)


def test_unfused_projections_are_joined_and_mixed_ones_refused() -> None:
    of = cases.config()
    weights = cases.model_weights(of)
    fused = Decoder.from_weights(of, weights, dtype=torch.float16)
    split = Decoder.from_weights(of, weights, dtype=torch.float16, fuse=False)
    a, b = (graph_decoder(one, capacity=4).forward([9]) for one in (fused, split))
    assert torch.equal(a, b)
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = cases.model_weights(of, form="w3")[name]
    mixed = Decoder.from_weights(of, weights, dtype=torch.float16)
    with pytest.raises(InputError, match="layer 0 qkv"):
        graph_decoder(mixed, capacity=4)


def test_overflow_is_told() -> None:
    of = cases.config()
    weights = cases.model_weights(of)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 1e5
    ours = graph_decoder(Decoder.from_weights(of, weights, dtype=torch.float16), capacity=4)
    with pytest.raises(InputError, match=r"^logits: "):
        ours.generate(2)


def test_bytes_of_a_step() -> None:
    of = cases.config()
    decoder = cases.decoder(of, torch.float16)
    products = cases.plain_products()
    weights = step_weights(decoder, products=products)
    step = DecodeStep(of, weights, batch=2, capacity=8, products=products)
    layers = decoder.weight_bytes() - 2 * 300 * 128 * 2  # without embedding and head
    a_position = 2 * of.num_layers * of.num_kv_heads * of.head_dim * 2
    rows = 2 * 128 * 2  # of the embedding
    assert step.read_bytes(5) == layers + 300 * 128 * 2 + rows + 2 * 5 * a_position
