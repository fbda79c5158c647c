"""Generation: streaming, stopping, seeds, limits; on a tiny random model and on the default one."""

from __future__ import annotations

import pytest
import torch
from gguf_files import SPECIAL, VOCAB, write_gguf

from labkit.errors import InputError
from labkit.models.generate import generate, prompt_ids
from labkit.models.model import Model
from labkit.models.zoo import load_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Model:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    return load_model(path)


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Model:
    return load_model(smollm2_path)


def greedy(model: Model, ids: list[int], count: int) -> list[int]:
    """Without a cache: the whole text again for every token."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model.decoder(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-count:]


def test_greedy_with_a_cache_is_greedy_without(tiny):
    for prompt in ([5], [9, 8, 7, 6, 5], list(range(3, 60))):
        run = generate(tiny, prompt, max_tokens=12, stop_at_eos=False)
        text = run.text()
        assert run.stats.tokens == greedy(tiny, prompt, 12)
        assert text == tiny.tokenizer.decode(run.stats.tokens)


def test_a_long_prompt_in_chunks_gives_the_same(tiny, monkeypatch):
    prompt = [3 + i % 200 for i in range(57)]
    whole = generate(tiny, prompt, max_tokens=6, stop_at_eos=False)
    whole.text()
    monkeypatch.setattr("labkit.models.generate._PREFILL_CHUNK", 7)
    chunked = generate(tiny, prompt, max_tokens=6, stop_at_eos=False)
    chunked.text()
    assert chunked.stats.tokens == whole.stats.tokens


def test_default_model_answers(smollm2):
    run = generate(smollm2, "What is the capital of France?", max_tokens=40)
    pieces = list(run)
    assert "".join(pieces) == "The capital of France is Paris."
    assert len(pieces) >= 5 and all(pieces)
    stats = run.stats
    assert stats.stop_reason == "eos" and stats.tokens[-1] == 2
    assert stats.new_tokens == len(stats.tokens) and stats.prompt_tokens == 37
    assert stats.prefill_s > 0 and stats.decode_s > 0 and stats.decode_tokens_per_s > 0


def test_seed_decides_and_greedy_needs_none(tiny):
    def run(**options) -> list[int]:
        generation = generate(tiny, [5, 6], max_tokens=20, stop_at_eos=False, **options)
        generation.text()
        return generation.stats.tokens

    assert run(temperature=1.0, seed=7) == run(temperature=1.0, seed=7)
    assert run(temperature=1.0, seed=7) != run(temperature=1.0, seed=8)
    assert run(seed=1) == run(seed=2) == run(temperature=1e-6, seed=3)


def with_logits(model: Model, tokens: list[int]) -> Model:
    """The same model, but it always says ``tokens`` one after the other."""

    class Script(torch.nn.Module):
        config, device, dtype = model.config, model.decoder.device, model.decoder.dtype

        def __init__(self) -> None:
            super().__init__()
            self.left = list(tokens)

        def new_cache(self, capacity: int):
            return model.decoder.new_cache(capacity)

        def hidden(self, ids, cache):
            return torch.zeros(1, ids.shape[1], 1)

        def head(self, hidden):
            logits = torch.zeros(1, VOCAB)
            logits[0, self.left.pop(0)] = 1.0
            return logits

        def forward(self, ids, cache):
            return self.head(None)[:, None]

    return Model(Script(), model.tokenizer, model.config, "script")


def test_stops_at_the_end_token_and_does_not_show_it(tiny):
    hello = tiny.tokenizer.encode("hello")
    run = generate(with_logits(tiny, [*hello, 2, *hello]), "hi", max_tokens=20)
    assert run.text() == "hello"
    assert run.stats.stop_reason == "eos" and run.stats.new_tokens == len(hello) + 1


def test_incomplete_characters_wait_for_their_bytes(tiny):
    smile = tiny.tokenizer.encode("👍é")
    assert len(smile) == 6  # the tiny vocabulary has bytes only
    pieces = list(generate(with_logits(tiny, [*smile, 2]), "hi", max_tokens=20))
    assert pieces == ["👍", "é"]
    cut = generate(with_logits(tiny, smile), "hi", max_tokens=3)
    assert list(cut) == ["\ufffd"] and cut.stats.stop_reason == "max_tokens"


def test_limits(tiny):
    run = generate(tiny, [5] * 120, max_tokens=50, stop_at_eos=False)
    run.text()
    assert run.stats.new_tokens == 8 and run.stats.stop_reason == "context"
    with pytest.raises(InputError, match="prompt: got 128 tokens; expected fewer than the context of 128"):
        generate(tiny, [5] * 128)
    one = generate(tiny, [5], max_tokens=1, stop_at_eos=False)
    one.text()
    assert one.stats.new_tokens == 1 and one.stats.decode_tokens_per_s == 0.0


def test_prompts_without_tokens_are_refused_at_once(tiny, smollm2):
    silent = "\x04\x06\x13"
    assert smollm2.tokenizer.encode(silent) == []
    for model, prompt in ((smollm2, silent), (smollm2, ""), (tiny, "")):
        for chat in (True, False):
            with pytest.raises(InputError, match=r"prompt: got (empty text|text without any token).*Fix"):
                generate(model, prompt, chat=chat)
    with pytest.raises(InputError, match="messages"):
        generate(tiny, [])
    with pytest.raises(InputError, match="tokens"):
        generate(tiny, [VOCAB + 5]).text()


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"seed": 1.5},
        {"seed": 1 << 70},
    ],
)
def test_bad_options_are_refused_before_anything_runs(tiny, options):
    with pytest.raises(InputError, match=next(iter(options))):
        generate(tiny, "hello", **options)


def test_prompt_forms(tiny):
    tokenizer = tiny.tokenizer
    chat = prompt_ids(tiny, "hello")
    assert chat == tokenizer.apply_chat([{"role": "user", "content": "hello"}])
    assert chat == prompt_ids(tiny, [{"role": "user", "content": "hello"}])
    assert prompt_ids(tiny, "hello", chat=False) == tokenizer.encode("hello")
    assert prompt_ids(tiny, [4, 5]) == [4, 5]
    bare = Model(tiny.decoder, None, tiny.config, "bare")
    with pytest.raises(InputError, match="without a tokenizer"):
        generate(bare, "hello")
    run = generate(bare, [4, 5], max_tokens=3, stop_at_eos=False)
    assert list(run) == [] and run.stats.new_tokens == 3
    assert SPECIAL[1] in tokenizer.render_chat([{"role": "user", "content": "x"}])
