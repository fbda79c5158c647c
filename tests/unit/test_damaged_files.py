"""Every field of a tiny model replaced by what does not belong there: one clear error at load, or a
model whose first forward works. Never another exception, and never one that waits for the forward."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import random_state, tiny_config, write_hf
from gguf_files import write_gguf

from labkit.errors import InputError, ModelFileError
from labkit.models import gguf as gguf_module
from labkit.models.config import ModelConfig
from labkit.models.gguf_header import Header, read_header
from labkit.models.model import Model
from labkit.models.zoo import load_model
from labkit.nn.rope import inverse_frequencies

HUGE = 10**400  # JSON can write it, no float can hold it
BAD: list[Any] = [
    None,
    True,
    "x",
    "",
    "NaN",
    "1e5",
    0,
    1,
    -1,
    1.5,
    -0.5,
    1e-320,
    1e300,
    10**30,
    HUGE,
    -HUGE,
    math.nan,
    math.inf,
    -math.inf,
    [],
    [[1]],
    [1, "x"],
    {},
    {"a": {"b": [HUGE]}},
    "\ud800",
]
GGUF_BAD: list[Any] = [
    None,  # the key is absent
    True,
    "x",
    "",
    "NaN",
    0,
    1,
    -1,
    2**63,
    2**64 - 1,
    1.5,
    -0.5,
    1e-320,
    1e300,
    math.nan,
    math.inf,
    [],
    ["x", ""],
    np.array([], np.int32),
    np.array([1, 2], np.int32),
    np.array([math.nan, 1e30], np.float32),
]
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": True,
    },
}
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def outcome(load: Callable[[], Model]) -> bool:
    """Load and run; True when it computes, False when the load was refused. All else is raised."""
    try:
        model = load()
    except InputError as error:
        assert error.argument and error.expected and len(str(error)) < 700
        return False
    tokenizer = model.tokenizer
    if tokenizer is not None:
        assert tokenizer.decode(tokenizer.encode("hi", special=False)) is not None
    logits = model.decoder(PROMPT, model.decoder.new_cache(8))
    assert logits.shape == (1, 5, model.config.vocab_size) and bool(torch.isfinite(logits).all())
    json.dumps(model.info)
    return True


def replaced(good: dict[str, Any], values: list[Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    return [(key, value, good | {key: value}) for key in good for value in values]


def sweep(cases: list[tuple[str, Any, dict[str, Any]]], load: Callable[[dict[str, Any]], Model]) -> set[str]:
    """Run every case; names of the fields of which at least one value was refused."""
    refused, failures = set(), []
    for key, value, record in cases:
        try:
            if not outcome(lambda record=record: load(record)):  # type: ignore[misc]
                refused.add(key)
        except BaseException as error:  # a panic of a Rust library is no Exception
            failures.append(f"{key} = {value!r:.60}: {type(error).__name__}: {error!s:.100}")
    assert not failures, f"{len(failures)} of {len(cases)}:\n" + "\n".join(failures)
    return refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("llama")
    return write_hf(tmp_path_factory.mktemp("damaged") / "m", config, random_state(config))


def loader(folder: Path, name: str) -> Callable[[dict[str, Any]], Model]:
    def load(record: dict[str, Any]) -> Model:
        (folder / name).write_text(json.dumps(record), encoding="utf-8")
        return load_model(folder)

    return load


@pytest.fixture
def restored(folder: Path):
    """The folder as it was, whatever the test wrote into it."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    yield folder
    for path in folder.iterdir():
        if path.name not in before:
            path.unlink()
        elif path.read_bytes() != before[path.name]:
            path.write_bytes(before[path.name])


def test_every_field_of_config_json(restored):
    good = tiny_config("llama") | {
        "head_dim": 16,
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "layer_types": ["full_attention"] * 2,
        "rope_scaling": None,
        "rope_parameters": None,
        "quantization_config": None,
    }
    load = loader(restored, "config.json")
    assert outcome(lambda: load(good))
    # Two fields are not read.
    assert sweep(replaced(good, BAD), load) >= set(good) - {
        "architectures",
        "torch_dtype",
        "max_window_layers",
    }
    sliding = good | {"use_sliding_window": True, "layer_types": None}
    assert "max_window_layers" in sweep(
        [(k, v, sliding | {k: v}) for k in ["max_window_layers"] for v in BAD], load
    )


@pytest.mark.parametrize("kind", list(ROPES))
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_every_field_of_rope_scaling(restored, kind, spelling):
    load = loader(restored, "config.json")
    good = {"rope_type": kind, "rope_theta": 5e4} | ROPES[kind]
    assert outcome(lambda: load(tiny_config("llama") | {spelling: good}))
    cases = [(k, v, tiny_config("llama") | {spelling: r}) for k, v, r in replaced(good, BAD)]
    assert sweep(cases, load) == set(good)


def test_yarn_without_factor_needs_two_numbers(restored):
    load = loader(restored, "config.json")
    for value in BAD:
        scaling = {"type": "yarn", "original_max_position_embeddings": value}
        sweep([("original", value, tiny_config() | {"rope_scaling": scaling})], load)
        scaling = {"type": "yarn", "original_max_position_embeddings": 64}
        record = tiny_config() | {"rope_scaling": scaling, "max_position_embeddings": value}
        sweep([("max_position_embeddings", value, record)], load)


def test_every_field_of_a_labkit_record():
    for kind, numbers in ROPES.items():
        config = ModelConfig.from_hf_dict(tiny_config() | {"rope_scaling": {"rope_type": kind} | numbers})
        good = config.to_dict()
        for _, _, record in replaced(good, BAD):
            try:
                kept = ModelConfig.from_dict(record)
            except ModelFileError:
                continue
            inverse_frequencies(kept.head_dim, kept.rope_theta, kept.rope_scaling, length=4096)
    for factors in (*BAD, [HUGE] * 8, [math.nan] * 8, [1e-40] * 8, [0] * 8):
        with pytest.raises(ModelFileError, match="factors"):
            ModelConfig.from_dict(good | {"rope_scaling": {"rope_type": "factors", "factors": factors}})
    with pytest.raises(ModelFileError, match="rope_scaling"):
        ModelConfig.from_dict(good | {"rope_scaling": "linear"})


def test_a_number_too_large_to_print_is_refused():
    with pytest.raises(ModelFileError, match="too large to print"):
        ModelConfig.from_hf_dict(tiny_config() | {"rms_norm_eps": 10**5000})


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("generation_config.json", {"eos_token_id": [2], "bos_token_id": 1, "temperature": 0.7}),
        (
            "tokenizer_config.json",
            {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "chat_template": "{{ messages }}"},
        ),
    ],
)
def test_every_field_of_the_files_beside_the_tokenizer(restored, name, good):
    cases = replaced(good, [*BAD, [2, 1.5], [2, -1], [2**31], [{"name": []}], {"content": 1}])
    refused = sweep(cases, loader(restored, name))
    assert refused == set(good) - {"bos_token_id", "temperature"}  # those two are not read


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json", "config.json"]
)
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1]", b"[" * 100_000, b"9" * 10_000, b'{"a": '])
def test_files_that_are_no_json_object(restored, name, content):
    (restored / name).write_bytes(content)
    with pytest.raises(InputError):
        load_model(restored)


def test_a_chat_template_that_is_not_text(restored):
    (restored / "chat_template.jinja").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja.*UTF-8"):
        load_model(restored)


def test_every_section_of_tokenizer_json(restored):
    good = json.loads((restored / "tokenizer.json").read_text(encoding="utf-8"))
    sweep(replaced(good, BAD), loader(restored, "tokenizer.json"))
    nested = [(k, v, good | {"model": r}) for k, v, r in replaced(good["model"], BAD)]
    assert "vocab" in sweep(nested, loader(restored, "tokenizer.json"))


GGUF_EXTRA = {
    "llama.vocab_size": None,
    "llama.attention.value_length": 16,
    "llama.rope.dimension_count": 16,
    "llama.expert_count": 0,
    "general.license": "x",
    "tokenizer.ggml.eot_token_id": 2,
}
GGUF_ROPE = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 32,
    "llama.rope.scaling.finetuned": True,
    "llama.rope.scaling.attn_factor": 1.0,
    "llama.rope.scaling.yarn_attn_factor": 1.0,
    "llama.rope.scaling.yarn_ext_factor": 1.0,
    "llama.rope.scaling.yarn_log_multiplier": 0.0,
    "llama.rope.scaling.yarn_beta_fast": 32.0,
    "llama.rope.scaling.yarn_beta_slow": 1.0,
    "llama.rope.scaling.alpha": 0.0,
    "llama.rope.scale_linear": 1.0,
    "llama.rope.dimension_sections": None,
}


def test_every_key_of_gguf_metadata(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    write_gguf(path, matrix="F32", embedding="F32")
    header = read_header(path)
    good = dict(header.metadata) | GGUF_EXTRA | GGUF_ROPE

    def load(record: dict[str, Any]) -> Model:
        # Only what a reader of the file can bring; the file itself stays, so that the sweep is quick.
        present = {key: value for key, value in record.items() if value is not None}
        monkeypatch.setattr(gguf_module, "read_header", lambda _: Header(3, present, header.tensors))
        return load_model(path)

    assert outcome(lambda: load(good))
    assert sweep(replaced(good, GGUF_BAD), load) >= {
        key for key in good if not key.startswith("general.") and key != "llama.rope.scaling.finetuned"
    } | {"general.architecture"}
    linear = {key: value for key, value in good.items() if key not in GGUF_ROPE}
    for key in ("rope.scale_linear", "rope.scaling.factor"):
        sweep([(key, value, linear | {f"llama.{key}": value}) for value in GGUF_BAD], load)
