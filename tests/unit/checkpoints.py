"""Small checkpoints made in the test: Hugging Face directories, and GPTQ and AWQ ones.

The packers are numpy, written from the public format descriptions (AutoGPTQ, GPTQModel and
AutoAWQ: shapes and bit order), value by value, and share no code with the package under test.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def tiny_config(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """config.json of a two-layer model with GQA; Qwen3's head_dim differs from hidden / heads."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    if arch == "qwen3":
        config["head_dim"] = 32
    config.update(changes)
    return config


def random_state(
    config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random weights under the Hugging Face names, made without transformers."""
    make = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    arch = config["model_type"]

    def matrix(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, generator=make) * 0.08

    def gain(n: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(n, generator=make)

    state = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=make) * 0.3}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        state[at + "input_layernorm.weight"] = gain(hidden)
        state[at + "self_attn.q_proj.weight"] = matrix(heads * head_dim, hidden)
        state[at + "self_attn.k_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        state[at + "self_attn.v_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        if arch == "qwen2":
            state[at + "self_attn.q_proj.bias"] = 0.1 * torch.randn(heads * head_dim, generator=make)
            state[at + "self_attn.k_proj.bias"] = 0.1 * torch.randn(kv_heads * head_dim, generator=make)
            state[at + "self_attn.v_proj.bias"] = 0.1 * torch.randn(kv_heads * head_dim, generator=make)
        if arch == "qwen3":
            state[at + "self_attn.q_norm.weight"] = gain(head_dim)
            state[at + "self_attn.k_norm.weight"] = gain(head_dim)
        state[at + "self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        state[at + "post_attention_layernorm.weight"] = gain(hidden)
        state[at + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        state[at + "mlp.up_proj.weight"] = matrix(inner, hidden)
        state[at + "mlp.down_proj.weight"] = matrix(hidden, inner)
    state["model.norm.weight"] = gain(hidden)
    if not config["tie_word_embeddings"]:
        state["lm_head.weight"] = matrix(vocab, hidden)
    return {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}


def wide_model(
    layers: int, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A Llama of 11 M weights a layer for memory tests: its config, and the state of each layer.

    All layers share one layer's tensors, so making it costs one; the first dict also holds the rest.
    """
    config = tiny_config(
        "llama",
        hidden_size=1024,
        intermediate_size=2560,
        num_hidden_layers=1,
        vocab_size=512,
        num_key_value_heads=4,
    )
    state = random_state(config, dtype=dtype)
    config["num_hidden_layers"] = layers
    parts = [
        {n.replace(".0.", f".{layer}."): t for n, t in state.items() if ".0." in n or layer == 0}
        for layer in range(layers)
    ]
    return config, parts


def write_tokenizer(folder: Path, size: int = 259) -> None:
    """A byte-level tokenizer.json: three control tokens, every byte, and beyond those three letters each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    letters = itertools.product(string.ascii_letters + string.digits, repeat=3)
    for token in itertools.islice(letters, size - len(vocab)):
        vocab["".join(token)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_hf(
    folder: Path,
    config: dict[str, Any],
    state: dict[str, torch.Tensor],
    *,
    shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """Write config.json, tokenizer.json and the weights, in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tokenizer:
        write_tokenizer(folder)
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(state)
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index * len(names) // shards : (index + 1) * len(names) // shards]
        save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    """Write model.safetensors.index.json."""
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_raw_safetensors(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file with any header, or a lie about the header's ``length``."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8")
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, config: dict[str, Any], state: dict[str, torch.Tensor], *, kind: str = "F32"
) -> Path:
    """A GGUF file of a Llama model without tokenizer; q and k rows interleaved as the format has it.

    ``kind`` is the type of the seven matrices of a layer; the rest is F32.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(str(path), "llama")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in state.items():
        stem = name.removesuffix(".weight")
        array = tensor.float().numpy()
        if (part := stem.rpartition(".")[2]) in heads:
            array = array.reshape(heads[part], 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if stem.startswith("model.layers."):
            layer, rest = stem.split(".", 3)[2:]
            stem = f"blk.{layer}.{GGUF_NAMES[rest]}"
        array = np.ascontiguousarray(array)
        stored = GGMLQuantizationType[kind if is_linear(name) else "F32"]
        if stored != GGMLQuantizationType.F32:
            array = quants.quantize(array, stored)
        writer.add_tensor(f"{top.get(stem, stem)}.weight", array, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_logits(
    config: dict[str, Any], state: dict[str, torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    """Logits [B, T, V] in FP32 of transformers with these weights."""
    import transformers

    model_type = config["model_type"]
    cleaned = {
        k: v for k, v in config.items() if k not in ("quantization_config", "architectures", "torch_dtype")
    }
    hf_config = transformers.AutoConfig.for_model(**cleaned)
    with torch.no_grad():
        model = (
            transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
            .float()
            .eval()
        )
        missing, unexpected = model.load_state_dict({k: v.float() for k, v in state.items()}, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (model_type, missing, unexpected)
        return model(ids).logits


def is_linear(name: str) -> bool:
    """Whether ``name`` is one of the seven matrices of a layer."""
    return name.endswith("_proj.weight")


# ---- 4-bit packing, one value at a time ---------------------------------------------------------


def codes_and_scales(
    weight: np.ndarray, group: int, *, symmetric: bool, g_idx: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Round-to-nearest unsigned codes: q [N, K] 0..15, z [groups, N], s [groups, N] FP16."""
    n, k = weight.shape
    groups = -(-k // group)
    q = np.zeros((n, k), dtype=np.int64)
    z = np.zeros((groups, n), dtype=np.int64)
    s = np.zeros((groups, n), dtype=np.float16)
    for g in range(groups):
        part = weight[:, g_idx == g]
        if symmetric:
            s[g] = np.maximum(np.abs(part).max(axis=1) / 7.0, 1e-4).astype(np.float16)
            z[g] = 8
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            s[g] = np.maximum((high - low) / 15.0, 1e-4).astype(np.float16)
            z[g] = np.clip(np.round(-low / s[g].astype(np.float64)), 1, 15)
        scaled = np.round(part / s[g].astype(np.float64)[:, None]) + z[g][:, None]
        q[:, g_idx == g] = np.clip(scaled, 0, 15)
    return q, z, s


def dequantised(q: np.ndarray, z: np.ndarray, s: np.ndarray, g_idx: np.ndarray) -> np.ndarray:
    """(q - z) * s in FP64, shape [N, K]."""
    return (q - z[g_idx].T) * s.astype(np.float64)[g_idx].T


def words(rows: list[list[int]]) -> torch.Tensor:
    """Lists of unsigned 32-bit words as an int32 tensor with the same bits."""
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32).copy())


def gptq_tensors(
    q: np.ndarray, z: np.ndarray, s: np.ndarray, g_idx: np.ndarray, *, minus_one: bool = True
) -> dict[str, torch.Tensor]:
    """qweight [K/8, N], qzeros [groups, N/8], scales [groups, N], g_idx [K], as GPTQ stores them."""
    n, k = q.shape
    stored = (z - 1) % 16 if minus_one else z
    qweight = [
        [sum(int(q[col, 8 * row + i]) << (4 * i) for i in range(8)) for col in range(n)]
        for row in range(k // 8)
    ]
    qzeros = [
        [sum(int(stored[row, 8 * col + i]) << (4 * i) for i in range(8)) for col in range(n // 8)]
        for row in range(z.shape[0])
    ]
    return {
        "qweight": words(qweight),
        "qzeros": words(qzeros),
        "scales": torch.from_numpy(s.copy()),
        "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
    }


def awq_tensors(q: np.ndarray, z: np.ndarray, s: np.ndarray) -> dict[str, torch.Tensor]:
    """qweight [K, N/8], qzeros [groups, N/8], scales [groups, N], as the AWQ "gemm" version stores them."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds output column 8*word + order[i]
    n, k = q.shape
    qweight = [
        [sum(int(q[8 * col + order[i], row]) << (4 * i) for i in range(8)) for col in range(n // 8)]
        for row in range(k)
    ]
    qzeros = [
        [sum(int(z[row, 8 * col + order[i]]) << (4 * i) for i in range(8)) for col in range(n // 8)]
        for row in range(z.shape[0])
    ]
    return {"qweight": words(qweight), "qzeros": words(qzeros), "scales": torch.from_numpy(s.copy())}


def plain_order(k: int, group: int) -> np.ndarray:
    """Group of each input column without act-order."""
    return np.arange(k) // group


def act_order(k: int, group: int, seed: int) -> np.ndarray:
    """Group of each input column after quantising them in a random order."""
    order = np.random.default_rng(seed).permutation(k)
    g_idx = np.empty(k, dtype=np.int64)
    g_idx[order] = np.arange(k) // group
    return g_idx


def packed_state(
    state: dict[str, torch.Tensor],
    method: str,
    *,
    group: int,
    symmetric: bool,
    desc_act: bool = False,
    v2: bool = False,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Quantise the layers' matrices of ``state``; returns (tensors of the checkpoint, dequantised state)."""
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for index, (name, tensor) in enumerate(state.items()):
        if not is_linear(name):
            packed[name] = tensor
            plain[name] = tensor
            continue
        k = tensor.shape[1]
        size = k if group == -1 else group
        # One order for everything that reads the same input, as a quantiser would produce it.
        seed = (
            index
            if "o_proj" in name or "down_proj" in name
            else int(name.split(".")[2]) + 100 * ("mlp" in name)
        )
        g_idx = act_order(k, size, seed) if desc_act else plain_order(k, size)
        q, z, s = codes_and_scales(tensor.double().numpy(), size, symmetric=symmetric, g_idx=g_idx)
        parts = gptq_tensors(q, z, s, g_idx, minus_one=not v2) if method == "gptq" else awq_tensors(q, z, s)
        stem = name.removesuffix(".weight")
        packed.update({f"{stem}.{part}": value for part, value in parts.items()})
        plain[name] = torch.from_numpy(dequantised(q, z, s, g_idx))
    return packed, plain
