"""Perplexity: the definition in words, written again the slow way; and its order on the corpus."""

from __future__ import annotations

import math

import pytest
import torch
from gguf_files import VOCAB, write_gguf
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import InputError
from labkit.models.model import Model
from labkit.models.perplexity import corpus_text, perplexity, scored_windows
from labkit.models.requant import requantise
from labkit.models.zoo import load_file, load_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Model:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    return load_model(path)


def slow(model: Model, ids: list[int], window: int, stride: int) -> tuple[float, int]:
    """Token by token: the first window that holds it behind another token scores it."""
    total, count = 0.0, 0
    for token in range(len(ids)):
        for start in range(0, len(ids), stride):
            if start < token < start + window:
                logits = model.decoder(torch.tensor([ids[start:token]]))[0, -1].double()
                total -= float(logits.log_softmax(-1)[ids[token]])
                count += 1
                break
    return total, count


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (8, 1), (50, 50), (2, 2), (8, 7)])
def test_against_the_definition(tiny, window, stride):
    ids = [(7 * i * i + 3) % VOCAB for i in range(21)]
    total, count = slow(tiny, ids, window, stride)
    result = perplexity(tiny, ids, window=window, stride=stride)
    assert result.tokens == count
    assert result.nll == pytest.approx(total / count, abs=1e-5)
    assert result.ppl == pytest.approx(math.exp(result.nll))


@given(st.integers(2, 60), st.integers(2, 20), st.integers(1, 20))
def test_every_token_is_scored_once(length, window, stride):
    stride = min(stride, window)
    windows = scored_windows(length, window, stride)
    scored = [token for _, stop, first in windows for token in range(first, stop)]
    skipped = {0} | (set(range(0, length, window)) if stride == window else set())
    assert scored == [token for token in range(length) if token not in skipped]
    assert all(stop - start <= window for start, stop, _ in windows)


def test_more_rows_than_are_held_at_once_change_nothing(tiny, monkeypatch):
    ids = [(5 * i + 1) % VOCAB for i in range(100)]
    whole = perplexity(tiny, ids, window=100)
    monkeypatch.setattr("labkit.models.perplexity._LOGIT_ROWS", 7)
    assert perplexity(tiny, ids, window=100).nll == pytest.approx(whole.nll, abs=1e-6)


def test_text_and_limits(tiny):
    assert perplexity(tiny, "hello the world", window=8).tokens == 3  # "hello", " the", " wor", "ld"
    assert perplexity(tiny, [1, 2, 3, 4, 5], window=8, max_tokens=3).tokens == 2
    for options, message in (
        ({"text": "h", "window": 8}, "1 tokens; expected at least 2"),
        ({"text": [4, 5], "window": 1}, "window"),
        ({"text": [4, 5], "window": 129}, "window: got 129; expected a whole number from 2 to 128"),
        ({"text": [4, 5], "window": 8, "stride": 9}, "stride"),
        ({"text": [4, 5], "window": 8, "stride": 0}, "stride"),
        ({"text": [4, 5], "window": 8, "max_tokens": 1}, "max_tokens"),
        ({"text": [4, VOCAB + 9], "window": 8}, "tokens"),
    ):
        with pytest.raises(InputError, match=message):
            perplexity(tiny, **options)
    with pytest.raises(InputError, match="corpus"):
        corpus_text("none.txt")


def test_corpus_is_long_and_plain(smollm2_path):
    text = corpus_text()
    assert len(load_file(smollm2_path).tokenizer.encode(text)) >= 2_500
    assert text.startswith("CHAPTER I\n\nDown the Rabbit-Hole\n\nAlice was beginning")
    assert text.isascii() and "  " not in text and "\r" not in text


def test_fewer_bits_and_a_missing_offset_cost_perplexity(smollm2_path):
    """The order, on a short piece; the figures of the whole corpus belong to chapter 09."""
    file = load_file(smollm2_path)
    figures = {"original": perplexity(Model.build(file), max_tokens=384).ppl}
    for bits, offset in (("w4", True), ("w4", False), ("w3", False)):
        model = requantise(file, bits=bits, group_size=32, offset=offset)
        figures[f"{bits} {offset}"] = perplexity(model, max_tokens=384).ppl
    assert 10 < figures["original"] < 60
    assert figures["w4 True"] == pytest.approx(figures["original"], rel=0.02)
    assert figures["w4 True"] * 1.05 < figures["w4 False"] < figures["w3 False"]
