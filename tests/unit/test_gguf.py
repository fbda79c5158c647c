"""The GGUF loader: exact weights from good files, one clear error from bad ones."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import SHAPE, TYPES, VOCAB, random_weights, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.errors import MissingModelError, ModelFileError
from labkit.models.gguf import load_gguf
from labkit.models.gguf_header import read_header
from labkit.models.model import Model
from labkit.quant.formats import GroupedWeight, QuantWeight

Q = "model.layers.0.self_attn.q_proj.weight"
V0 = "blk.0.attn_v.weight"


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the interleaving, written the other way round than the loader does it."""
    per = rows.shape[0] // heads
    order = [h * per + 2 * i + half for h in range(heads) for half in (0, 1) for i in range(per // 2)]
    return rows[order]


def values(weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_weights_are_those_of_the_gguf_package(tmp_path, kind):
    stored = write_gguf(tmp_path / "m.gguf", matrix=kind, embedding=kind)
    file = load_gguf(tmp_path / "m.gguf")
    assert file.config.tie_word_embeddings and file.config.head_dim == 16
    assert file.info["types"][kind] >= 15 and file.info["name"] == "tiny"
    pairs = {
        "model.embed_tokens.weight": ("token_embd.weight", 0),
        Q: ("blk.0.attn_q.weight", 4),
        "model.layers.1.self_attn.k_proj.weight": ("blk.1.attn_k.weight", 2),
        "model.layers.1.self_attn.v_proj.weight": ("blk.1.attn_v.weight", 0),
        "model.layers.1.mlp.down_proj.weight": ("blk.1.ffn_down.weight", 0),
    }
    for name, (theirs, heads) in pairs.items():
        expected = gguf.quants.dequantize(stored[theirs], TYPES[kind])
        if heads:
            expected = half_split(expected, heads)
        got = values(file.weights[name])
        np.testing.assert_allclose(got.float().numpy(), expected, rtol=0, atol=1.2e-7)
    norm = file.weights["model.layers.1.post_attention_layernorm.weight"]
    assert np.array_equal(norm.numpy(), stored["blk.1.ffn_norm.weight"])


def blocks(stored: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(stored).view(np.uint8).reshape(stored.shape[0], -1, size)


def f16(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float64)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_codes_scales_and_offsets_are_exact_in_float64(tmp_path, kind):
    stored = write_gguf(tmp_path / "m.gguf", matrix=kind)["blk.0.attn_v.weight"]
    weight = load_gguf(tmp_path / "m.gguf").weights["model.layers.0.self_attn.v_proj.weight"]
    size, start = {"Q8_0": (34, 2), "Q4_0": (18, 2), "Q4_1": (20, 4)}[kind]
    raw = blocks(stored, size)
    d = f16(raw[..., :2])[..., None]
    if kind == "Q8_0":
        exact = d * raw[..., start:].view(np.int8)
        assert isinstance(weight, GroupedWeight) and weight.format == "q8_0"
    else:
        q = np.concatenate((raw[..., start:] % 16, raw[..., start:] // 16), -1).astype(np.float64)
        exact = d * (q - 8) if kind == "Q4_0" else d * q + f16(raw[..., 2:4])[..., None]
        assert isinstance(weight, QuantWeight) and weight.format == "w4" and weight.group_size == 32
        assert (weight.offset is None) == (kind == "Q4_0")
    got = weight.dequantize(torch.float64).numpy()
    assert np.array_equal(got, exact.reshape(got.shape))


def test_every_q4_1_value_of_the_default_model_is_exact(smollm2_path):
    file = load_gguf(smollm2_path)
    reader = gguf.GGUFReader(smollm2_path)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    for name, source, heads in (
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", 9),
        ("model.layers.17.self_attn.k_proj.weight", "blk.17.attn_k.weight", 3),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", 0),
    ):
        raw = blocks(np.array(theirs[source].data), 20)
        q = np.concatenate((raw[..., 4:] % 16, raw[..., 4:] // 16), -1).astype(np.float64)
        exact = f16(raw[..., :2])[..., None] * q + f16(raw[..., 2:4])[..., None]
        exact = exact.reshape(raw.shape[0], -1)
        if heads:
            exact = half_split(exact, heads)
        assert np.array_equal(file.weights[name].dequantize(torch.float64).numpy(), exact)
    assert file.info["types"] == {"Q8_0": 1, "F32": 61, "Q4_1": 210}
    assert file.config.num_layers == 30 and file.config.rope_theta == 100_000.0
    assert (file.config.num_heads, file.config.num_kv_heads, file.config.head_dim) == (9, 3, 64)
    assert file.config.eos_token_ids == (2,) and file.config.tie_word_embeddings


def test_offset_that_float32_cannot_hold_is_rounded_once(tmp_path):
    weights = random_weights()
    write_gguf(tmp_path / "m.gguf", weights=weights)
    info = read_header(tmp_path / "m.gguf").tensors["blk.0.attn_v.weight"]
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    d, m = np.float16(6e-8), np.float16(60000.0)
    data[info.offset : info.offset + 4] = d.tobytes() + m.tobytes()
    (tmp_path / "m.gguf").write_bytes(data)
    weight = load_gguf(tmp_path / "m.gguf").weights["model.layers.0.self_attn.v_proj.weight"]
    assert weight.offset[0, 0].item() == float(np.float32(float(m) + 8 * float(d)))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_weights_before_interleaving(tmp_path, architecture, tied):
    """Written as F32, a file must compute what the half-split weights compute directly."""
    weights = random_weights(architecture, tied=tied)
    write_gguf(tmp_path / "m.gguf", architecture=architecture, matrix="F32", embedding="F32", weights=weights)
    file = load_gguf(tmp_path / "m.gguf")
    q = torch.from_numpy(weights["blk.0.attn_q.weight"])
    assert torch.equal(file.weights[Q], q)
    if architecture == "qwen2":
        bias = torch.from_numpy(weights["blk.1.attn_k.bias"])
        assert torch.equal(file.weights["model.layers.1.self_attn.k_proj.bias"], bias)
    logits = Model.build(file).decoder(torch.arange(9).view(1, -1))
    assert logits.shape == (1, 9, VOCAB) and torch.isfinite(logits).all()


def test_float_weights_stay_mapped_from_the_file(tmp_path):
    write_gguf(tmp_path / "m.gguf", matrix="F32", embedding="F32")
    weight = load_gguf(tmp_path / "m.gguf").weights["model.layers.0.self_attn.v_proj.weight"]
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("needs /proc to see mappings")
    spans = [line.split()[0].split("-") for line in maps.read_text("utf-8").splitlines() if "m.gguf" in line]
    assert any(int(start, 16) <= weight.data_ptr() < int(stop, 16) for start, stop in spans)


def test_llama3_frequencies_and_yarn_and_linear_scaling(tmp_path):
    factors = np.linspace(1, 8, SHAPE["head_dim"] // 2, dtype=np.float32)
    write_gguf(tmp_path / "a.gguf", extra={"rope_freqs.weight": factors})
    assert load_gguf(tmp_path / "a.gguf").config.rope_scaling == {
        "rope_type": "factors",
        "factors": [float(f) for f in factors],
    }
    write_gguf(
        tmp_path / "b.gguf",
        metadata={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
        },
    )
    assert load_gguf(tmp_path / "b.gguf").config.rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    write_gguf(tmp_path / "c.gguf", metadata={"llama.rope.scaling.type": "longrope"})
    with pytest.raises(ModelFileError, match="longrope"):
        load_gguf(tmp_path / "c.gguf")


def test_header_agrees_with_the_gguf_package(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    header, reader = read_header(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.type == tensor.tensor_type.name and info.offset == tensor.data_offset
        assert info.nbytes == tensor.n_bytes and info.shape == tuple(reversed(tensor.shape.tolist()))
    for key, value in header.metadata.items():
        theirs = reader.fields[key].contents()
        assert theirs == (value.tolist() if isinstance(value, np.ndarray) else value), key
    assert len(header.metadata) == len(reader.fields) - 3  # the reader adds three counts of its own


REFUSED = {
    "quant type": ({"matrix": "Q5_0"}, "stored as Q5_0; expected one of F32, F16"),
    "architecture": ({"architecture": "gemma"}, "'gemma'; expected one of llama"),
    "missing tensor": ({"drop": ("blk.1.ffn_up.weight",)}, r"layers\.1\.mlp\.up_proj.*1 missing"),
    "missing embedding": ({"drop": ("token_embd.weight",)}, "token_embd"),
    "missing norm": ({"drop": ("output_norm.weight",)}, r"model\.norm"),
    "unknown tensor": ({"extra": {"blk.0.odd.weight": np.ones(4, np.float32)}}, "blk.0.odd"),
    "layer too many": ({"extra": {"blk.2.attn_norm.weight": np.ones(64, np.float32)}}, "blk.2.attn_norm"),
    "wrong shape": (
        {"extra": {"blk.0.attn_v.weight": np.ones((33, 64), np.float32)}},
        r"\[33, 64\].*\[32, 64\]",
    ),
    "vector shape": ({"extra": {"output_norm.weight": np.ones(63, np.float32)}}, r"\[63\].*\[64\]"),
    "not finite": (
        {"matrix": "F32", "extra": {"blk.0.attn_v.weight": np.full((32, 64), np.nan, np.float32)}},
        "finite",
    ),
    "layers": ({"metadata": {"llama.block_count": 3}}, r"layers\.2.*missing"),
    "many layers": ({"metadata": {"llama.block_count": 4_000_000_000}}, "num_layers"),
    "no heads": ({"metadata": {"llama.attention.head_count": 0}}, "head_count"),
    "heads": ({"metadata": {"llama.attention.head_count": 5}}, "num_kv_heads"),
    "no epsilon": ({"metadata": {"llama.attention.layer_norm_rms_epsilon": None}}, "epsilon.*nothing"),
    "text for a number": ({"metadata": {"llama.embedding_length": "many"}}, "embedding_length.*'many'"),
    "experts": ({"metadata": {"llama.expert_count": 8}}, "expert_count"),
    "alignment": ({"metadata": {"general.alignment": 7}}, "alignment"),
    "tokenizer kind": ({"metadata": {"tokenizer.ggml.model": "llama"}}, "tokenizer.ggml.model.*'llama'"),
    "pre-tokeniser": ({"metadata": {"tokenizer.ggml.pre": "mystery"}}, "mystery"),
    "merges": ({"metadata": {"tokenizer.ggml.merges": ["h zz"]}}, "merges.*'h zz'"),
    "no merges": ({"metadata": {"tokenizer.ggml.merges": None}}, "merges.*nothing"),
    "token types": ({"metadata": {"tokenizer.ggml.token_type": [1, 1]}}, "token_type"),
    "tokens twice": ({"metadata": {"tokenizer.ggml.tokens": ["a", "a"]}}, "twice"),
    "eos": ({"metadata": {"tokenizer.ggml.eos_token_id": 5_000}}, "eos_token_id"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_unsupported_and_inconsistent_files_are_refused(tmp_path, name):
    options, message = REFUSED[name]
    write_gguf(tmp_path / "bad.gguf", **options)
    with pytest.raises(
        ModelFileError, match=r"bad\.gguf.*" + message if "alignment" not in name else message
    ):
        load_gguf(tmp_path / "bad.gguf")


def test_absent_and_other_files_are_refused(tmp_path):
    with pytest.raises(MissingModelError, match="no such file"):
        load_gguf(tmp_path / "none.gguf")
    for content, message in ((b"", "0 bytes"), (b"GGUF", "4 bytes"), (b"PK\x03\x04" + bytes(60), "magic")):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ModelFileError, match=message):
            load_gguf(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(40))
    with pytest.raises(ModelFileError, match="big-endian"):
        load_gguf(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ModelFileError, match="version 1"):
        load_gguf(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(ModelFileError, match="without tensors"):
        load_gguf(tmp_path / "x.gguf")


def test_no_tokenizer_is_not_an_error(tmp_path):
    write_gguf(tmp_path / "m.gguf", tokenizer=False)
    assert load_gguf(tmp_path / "m.gguf").tokenizer is None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    return path.read_bytes()


def loads_or_refuses(folder: Path, content: bytes) -> bool:
    path = folder / "fuzz.gguf"
    path.write_bytes(content)
    try:
        file = load_gguf(path)
    except ModelFileError as error:
        assert str(error).startswith(str(path))
        return False
    assert set(file.weights) and file.config.hidden_size == SHAPE["hidden"]
    return True


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_flipped_bytes_load_or_are_refused(tiny, tmp_path, data):
    content = bytearray(tiny)
    # Most flips in the header, where they lie about sizes; some in the data.
    places = st.one_of(st.integers(0, 600), st.integers(0, len(content) - 1))
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    loads_or_refuses(tmp_path, bytes(content))


@FUZZ
@given(length=st.integers(0, 40_000), data=st.data())
def test_truncated_files_are_refused(tiny, tmp_path, length, data):
    length = data.draw(st.sampled_from([length % len(tiny), len(tiny) - 1 - length % 64]))
    assert not loads_or_refuses(tmp_path, tiny[:length])


def lies(tiny: bytes) -> dict[str, bytes]:
    """Files whose header claims far more than there is."""
    huge = 1 << 40
    first_key = 24
    return {
        "tensors": tiny[:8] + struct.pack("<Q", huge) + tiny[16:],
        "all tensors": tiny[:8] + struct.pack("<Q", (1 << 64) - 1) + tiny[16:],
        "keys": tiny[:16] + struct.pack("<Q", huge) + tiny[24:],
        "key length": tiny[:first_key] + struct.pack("<Q", huge) + tiny[first_key + 8 :],
        "string length": tiny.replace(b"gpt2", b"\xff" * 4, 1).replace(
            struct.pack("<Q", 4) + b"\xff" * 4, struct.pack("<Q", huge) + b"gpt2", 1
        ),
        "array length": _after(tiny, b"tokenizer.ggml.tokens", 8, struct.pack("<Q", huge)),
        "array of zeros": _zero_array(),
        "rank": _after(tiny, b"blk.0.attn_v.weight", 0, struct.pack("<I", 1 << 31)),
        "dims": _after(tiny, b"blk.0.attn_v.weight", 4, struct.pack("<Q", huge)),
        "data offset": _after(tiny, b"blk.0.attn_v.weight", 24, struct.pack("<Q", huge)),
        "overlap": _after(tiny, b"blk.0.attn_v.weight", 24, struct.pack("<Q", 0)),
    }


def _after(content: bytes, marker: bytes, skip: int, new: bytes) -> bytes:
    place = content.index(marker) + len(marker) + skip
    return content[:place] + new + content[place + len(new) :]


def _zero_array() -> bytes:
    """4 million bytes of zeros, claimed as an array of half a million strings of no length."""
    key = b"k"
    header = b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, len(key)) + key + struct.pack("<IIQ", 9, 8, 500_000)
    return header + bytes(4_000_000)


def test_lying_headers_allocate_nothing(tiny, tmp_path):
    """Each in one child process that may not grow by more than 300 MB."""
    paths = []
    for name, content in lies(tiny).items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        paths.append(str(path))
    program = textwrap.dedent(
        """
        import resource, sys
        from labkit.errors import ModelFileError
        from labkit.models.gguf import load_gguf
        load_gguf(sys.argv[1])  # everything that a load imports is in memory now
        held = int(open("/proc/self/statm", encoding="ascii").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 300_000_000,) * 2)
        for path in sys.argv[2:]:
            try:
                load_gguf(path)
            except ModelFileError as error:
                print("refused", error)
            else:
                print("LOADED", path)
        """
    )
    if not Path("/proc/self/statm").is_file():
        pytest.skip("needs /proc to know the address space in use")
    good = tmp_path / "good.gguf"
    good.write_bytes(tiny)
    done = subprocess.run(
        [sys.executable, "-c", program, str(good), *paths],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths) and all(line.startswith("refused") for line in lines), done.stdout


def test_two_tensors_on_the_same_bytes_are_refused(tiny, tmp_path):
    (tmp_path / "m.gguf").write_bytes(lies(tiny)["overlap"])
    with pytest.raises(ModelFileError, match="overlapping"):
        load_gguf(tmp_path / "m.gguf")


def test_logits_of_the_default_model_agree_with_transformers(smollm2_path):
    """transformers' Llama, fed with weights that gguf.quants dequantised, never with ours."""
    import transformers

    reader = gguf.GGUFReader(smollm2_path)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                data = half_split(data, 9 if parts[2] == "attn_q" else 3)
            name = f"model.layers.{parts[1]}.{names[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        state[name] = torch.from_numpy(np.ascontiguousarray(data))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True, strict=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # was made without memory
    ours = Model.build(load_gguf(smollm2_path))
    assert ours.tokenizer is not None
    ids = torch.tensor([ours.tokenizer.encode("The capital of France is Paris, and 1234 + 5 = 1239. 你好!")])
    with torch.no_grad():
        expected = model.eval()(ids).logits
    assert (ours.decoder(ids) - expected).abs().max() < 1e-3
    cache = ours.decoder.new_cache(ids.shape[1])
    steps = [ours.decoder(part, cache) for part in (ids[:, :5], *ids[:, 5:12].split(1, 1))]
    assert (torch.cat(steps, 1) - expected[:, :12]).abs().max() < 1e-3
    assert math.isfinite(float(expected.abs().max()))
