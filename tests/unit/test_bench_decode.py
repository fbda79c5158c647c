"""``labkit bench decode`` without a GPU: the random model, the check, the record, the options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import decode_cases as cases
import pytest
import torch

from labkit.bench import decode, decode_peer, report
from labkit.bench.random_model import RandomModel, config_of
from labkit.bench.record import Entry, read
from labkit.errors import InputError
from labkit.models.decoder import Decoder
from labkit.models.model import EMBEDDING, FINAL_NORM, HEAD


def model(**changes: Any) -> RandomModel:
    return RandomModel(decode.tiny(config_of("qwen2.5-3b")), **changes)


def test_configs_of_the_quoted_shapes() -> None:
    config = config_of("qwen2.5-3b")
    assert (config.hidden_size, config.num_layers, config.group, config.head_dim) == (2048, 36, 8, 128)
    assert config.attention_bias and config.tie_word_embeddings and config.vocab_size == 151_936
    assert not config_of("smollm2-135m").attention_bias
    with pytest.raises(InputError, match="model"):
        config_of("no-such")


@pytest.mark.parametrize("head", ["dense", "w4"])
def test_the_same_weights_wherever_they_are_made(head: str) -> None:
    ours = model(head=head)
    tokens = torch.randint(0, 1000, (2, 5), generator=torch.Generator().manual_seed(0))
    weights: dict[str, Any] = {EMBEDDING: ours.embedding(), FINAL_NORM: ours.norm()}
    for i in range(2):
        weights |= ours.layer(i)
    weights[HEAD] = ours.head_weight(weights[EMBEDDING])
    config = ours.config if head == "dense" else replace(ours.config, tie_word_embeddings=False)
    decoder = Decoder.from_weights(config, weights, dtype=torch.float32)
    right = ours.logits(tokens, torch.float32)
    assert (decoder(tokens) - right).abs().max() <= 1e-4 * right.abs().max()
    assert 0.1 < float(right.std()) < 10
    other = replace(ours, seed=1).logits(tokens, torch.float32)
    assert not torch.allclose(other, right, atol=1e-2)


def test_a_run_on_the_cpu_is_emulated(tmp_path: Path) -> None:
    options = decode.Options(batch=(1, 2), context=(128, 9000), peers=True)
    lines: list[str] = []
    record = decode.run(options, "labkit bench decode", lines.append, cases.plain_products())
    assert record.kind == "emulated" and record.complete and record.parameters["shrunk"]
    assert [(entry.m, entry.k, entry.status) for entry in record.entries] == [
        (1, 128, "emulated"), (1, 150, "emulated"), (2, 128, "emulated"), (2, 150, "emulated"),
    ]  # fmt: skip
    for entry in record.entries:
        assert entry.counts["faults"] == 0 and entry.counts["launches"] == 2 * 3 + 2
        assert not entry.samples_us and 0 < entry.error["rms"] <= 2 * entry.error["plain_rms"]
    assert len(lines) == 4 and all("right" in line for line in lines)
    again = read(record.write(tmp_path / "r.json"))
    assert "no time is measured" in report.text(again)


def test_wrong_logits_are_seen() -> None:
    products = cases.plain_products()

    def linear(*args: Any, **options: Any) -> torch.Tensor:
        return products.linear(*args, **options).mul_(1.05)

    record = decode.run(decode.Options(), "command", lambda line: None, replace(products, linear=linear))
    assert [entry.status for entry in record.entries] == ["wrong"]
    assert "allowed" in record.entries[0].note and not record.entries[0].counts


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"model": "gpt-5"}, "model"),
        ({"bits": 5}, "bits"),
        ({"group": 16}, "group"),
        ({"head": "w2"}, "head"),
        ({"dtype": "float32"}, "dtype"),
        ({"samples": 3}, "samples"),
        ({"tokens": 0}, "tokens"),
        ({"batch": ()}, "batch"),
        ({"batch": (0,)}, "batch"),
        ({"context": (-1,)}, "context"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_bad_options_are_refused_by_name(changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(InputError, match=argument):
        decode.Options(**changes)


def test_the_sentence_of_an_entry() -> None:
    entry = Entry("decode", decode.OURS, "w4", 8, 0, 128, 128, "timed", weight_bytes=2_000_000_000)
    entry.samples_us = [1000.0, 900.0, 1100.0]
    assert decode.sentence(entry, 4000.0) == (
        "batch 8, context 128: 8,000 tokens/s, 1,000 µs a step, 50 % of the byte floor (500 µs)"
    )
    assert decode.sentence(entry, None).endswith("1,000 µs a step")


def test_where_the_peer_cannot_run_it_says_why() -> None:
    on_gpu = replace(model(), device="cuda")
    assert decode_peer.why_not(model()) == "CUDA only"
    assert decode_peer.why_not(on_gpu) == ""
    assert "W4 only" in decode_peer.why_not(replace(on_gpu, format="w3"))
    assert "biases" in decode_peer.why_not(
        replace(on_gpu, config=cases.config(architecture="qwen3", qk_norm=True))
    )
    assert "K % 128" in decode_peer.why_not(replace(on_gpu, config=cases.config(hidden_size=192)))


def test_the_peer_is_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(torch.nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.values = weight.dequantize(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.values)

    monkeypatch.setattr(decode_peer, "Int4Linear", Plain)
    ours = model()
    peer = decode_peer.PeerModel(ours, 2, 8)
    tokens = torch.randint(0, 1000, (2, 5), generator=torch.Generator().manual_seed(0))
    right = ours.logits(tokens, torch.float32)
    plain = ours.logits(tokens, torch.bfloat16).float()
    with torch.inference_mode():
        found = [peer.logits(tokens[:, t], torch.tensor([t])).float() for t in range(5)]
    error = (torch.stack(found, 1) - right).abs().max()
    assert error <= 3 * (plain - right).abs().max()


@pytest.mark.parametrize("form", ["w4", "w3"])
def test_random_weights_have_no_mean(form: str) -> None:
    """A mean adds up over a long K and over the layers: a 7B's activations passed 65,504."""
    for name, weight in model(format=form).layer(0).items():
        if "_proj.weight" in name:
            values = weight.dequantize()
            assert abs(values.mean()) < 5 * values.std() / values.numel() ** 0.5, name
