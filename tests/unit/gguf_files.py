"""Small GGUF files of random models, written with the ``gguf`` package, for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from labkit.models.tokenizer import byte_characters

TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
    "Q4_1": gguf.GGMLQuantizationType.Q4_1,
    "Q5_0": gguf.GGMLQuantizationType.Q5_0,
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ġwo r", "l d", "i n", "Ġ t", "Ġt he"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> list[str]:
    """Control tokens, all bytes, then what the merges make."""
    made = []
    for merge in MERGES:
        token = merge.replace(" ", "")
        if token not in made:
            made.append(token)
    return SPECIAL + sorted(byte_characters()) + made


VOCAB = len(vocabulary())
SHAPE = {"layers": 2, "hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order of Llama GGUF files: each pair of a rotation side by side."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def random_weights(architecture: str = "llama", *, tied: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights under GGUF names, rows of q and k still in half-split order."""
    rng = np.random.default_rng(seed)
    hidden, inner, head_dim = SHAPE["hidden"], SHAPE["inner"], SHAPE["head_dim"]
    q, kv = SHAPE["heads"] * head_dim, SHAPE["kv_heads"] * head_dim

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.15).astype(np.float32)

    weights = {"token_embd.weight": normal(VOCAB, hidden)}
    for i in range(SHAPE["layers"]):
        p = f"blk.{i}."
        weights[p + "attn_norm.weight"] = 1 + normal(hidden)
        weights[p + "ffn_norm.weight"] = 1 + normal(hidden)
        for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            weights[f"{p}{name}.weight"] = normal(rows, hidden)
            if architecture == "qwen2":
                weights[f"{p}{name}.bias"] = normal(rows)
        weights[p + "attn_output.weight"] = normal(hidden, q)
        weights[p + "ffn_gate.weight"] = normal(inner, hidden)
        weights[p + "ffn_up.weight"] = normal(inner, hidden)
        weights[p + "ffn_down.weight"] = normal(hidden, inner)
        if architecture == "qwen3":
            weights[p + "attn_q_norm.weight"] = 1 + normal(head_dim)
            weights[p + "attn_k_norm.weight"] = 1 + normal(head_dim)
    weights["output_norm.weight"] = 1 + normal(hidden)
    if not tied:
        weights["output.weight"] = normal(VOCAB, hidden)
    return weights


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    matrix: str = "Q4_1",
    embedding: str = "Q8_0",
    weights: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    tokenizer: bool = True,
    tied: bool = True,
) -> dict[str, np.ndarray]:
    """Write a tiny model; return its quantised tensors as stored (bytes or floats), by GGUF name.

    Args:
        matrix, embedding: storage types of the matrices and of the embedding and head.
        drop: names of tensors to leave out; extra: float32 tensors to add.
        metadata: keys that replace or add; None as a value leaves the key out.
    """
    weights = dict(random_weights(architecture, tied=tied) if weights is None else weights)
    weights.update(extra or {})
    writer = gguf.GGUFWriter(str(path), architecture)
    keys: dict[str, Any] = {
        "block_count": SHAPE["layers"],
        "context_length": 128,
        "embedding_length": SHAPE["hidden"],
        "feed_forward_length": SHAPE["inner"],
        "attention.head_count": SHAPE["heads"],
        "attention.head_count_kv": SHAPE["kv_heads"],
        "attention.key_length": SHAPE["head_dim"],
        "rope.freq_base": 5_000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    record: dict[str, Any] = {f"{architecture}.{key}": value for key, value in keys.items()}
    record["general.name"] = "tiny"
    if tokenizer:
        tokens = vocabulary()
        record |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": CHAT_TEMPLATE,
        }
    for key, value in (record | (metadata or {})).items():
        if value is None or key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    stored = {}
    for name, value in weights.items():
        if name in drop:
            continue
        if architecture == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            value = interleaved(value, SHAPE["heads"] if "attn_q" in name else SHAPE["kv_heads"])
        kind = (
            "F32"
            if value.ndim == 1
            else embedding
            if name in ("token_embd.weight", "output.weight")
            else matrix
        )
        data = value if kind == "F32" else gguf.quants.quantize(value, TYPES[kind])
        stored[name] = data
        writer.add_tensor(name, data, raw_dtype=TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
