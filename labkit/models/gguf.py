"""Read a GGUF model: every quantised weight keeps its codes, scales and offsets; nothing is rounded.

=====  =================================================================================
type   becomes
=====  =================================================================================
F32    float32 tensor, mapped from the file
F16    float16 tensor, mapped (BF16 alike)
Q8_0   :class:`GroupedWeight` "q8_0": int8 codes, FP16 scales held as float32
Q4_0   :class:`QuantWeight` "w4", group 32: w = d (q - 8), so codes q - 8, scale d, no offset
Q4_1   :class:`QuantWeight` "w4", group 32: w = d q + m, so codes q - 8, scale d, offset m + 8 d
=====  =================================================================================

``m + 8 d`` is kept as float32. It is exact unless m is more than about 8,000 times d or the
reverse; then it is rounded once, as computing ``d q + m`` in float32 would be.
Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.errors import InputError, ModelFileError
from labkit.models.config import ModelConfig
from labkit.models.gguf_header import Header, TensorInfo, read_header
from labkit.models.model import EMBEDDING, FINAL_NORM, HEAD, ModelFile, Weight, check_weights, expected_shapes
from labkit.models.tokenizer import Tokenizer
from labkit.quant.formats import GroupedWeight, QuantWeight

_GROUP = 32
_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"^blk\.(0|[1-9]\d{0,3})\.([a-z_]+)\.(weight|bias)$")
_FREQUENCIES = "rope_freqs.weight"


class GgufFile:
    """An open GGUF model: its header is checked, its weights are read one at a time.

    Attributes:
        path: the file.
        config: the architecture.
        info: what :class:`ModelFile` says of its source.

    Raises:
        MissingModelError: no such file.
        ModelFileError: one clear sentence on what is damaged or unsupported.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        header = read_header(self.path)
        self._metadata = header.metadata
        self._data = np.memmap(self.path, np.uint8, "c")
        with self._naming_the_file():
            self._tensors = _named(header, str(self.path))
            frequencies = self._tensors.pop(_FREQUENCIES, None)
            self.config = _config(header, self._tensors, str(self.path))
            if frequencies is not None:
                self.config = _with_frequencies(self.config, frequencies, self._data)
            _check_shapes(self.config, self._tensors, str(self.path))
        self.info: dict[str, Any] = {
            "source": str(self.path),
            "format": "gguf",
            "name": _text(header.metadata, "general.name") or self.path.stem,
            "bytes": self.path.stat().st_size,
            "types": dict(Counter(info.type for info in header.tensors.values())),
            "license": _text(header.metadata, "general.license"),
        }

    @property
    def names(self) -> list[str]:
        """Canonical names in the order of the file."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of weight ``name``."""
        return self._tensors[name].shape

    def nbytes(self, name: str) -> int:
        """Bytes of weight ``name`` in the file."""
        return self._tensors[name].nbytes

    def read(self, name: str) -> Weight:
        """One weight; a float one is mapped from the file, a quantised one is its exact repacked copy.

        q and k rows of Llama files come in half-split RoPE order (GGUF interleaves them; rows are
        moved while still packed).

        Raises:
            ModelFileError: NaN or infinity in it.
        """
        with self._naming_the_file():
            return _weight(name, self._tensors[name], self._data, self.config)

    def tokenizer(self) -> Tokenizer | None:
        """The file's tokenizer; without one, that of a ``tokenizer.json`` beside it, or None."""
        with self._naming_the_file():
            return _tokenizer(self._metadata, self.path, self.config)

    @contextlib.contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Errors from inside name the file, once."""
        try:
            yield
        except ModelFileError as error:
            if error.argument == str(self.path):
                raise
            where = f"{self.path}: {error.argument}"
            raise ModelFileError(where, error.received, error.expected, error.fix) from error
        except InputError as error:
            where = f"{self.path}: {error.argument}"
            raise ModelFileError(where, error.received, error.expected) from error


def load_gguf(path: str | Path) -> ModelFile:
    """Load a Llama, Qwen2 or Qwen3 model from a GGUF file, whole; see :class:`GgufFile`.

    ``info`` adds "bytes", "types" and "license". Nothing is returned when anything is wrong.
    """
    file = GgufFile(path)
    weights = {name: file.read(name) for name in file.names}
    check_weights(file.config, weights, str(file.path))
    return ModelFile(file.config, weights, file.tokenizer(), file.info)


def _named(header: Header, path: str) -> dict[str, TensorInfo]:
    """Tensors by canonical name; the RoPE divisors keep their own."""
    if not header.tensors:
        raise ModelFileError(path, "a file without tensors", "a model")
    named = {}
    for name, info in header.tensors.items():
        match = _LAYER_TENSOR.match(name)
        if name in _TOP:
            named[_TOP[name]] = info
        elif name == _FREQUENCIES:
            named[name] = info
        elif match and match.group(2) in _IN_LAYER:
            named[f"model.layers.{match.group(1)}.{_IN_LAYER[match.group(2)]}.{match.group(3)}"] = info
        else:
            architecture = header.metadata.get("general.architecture")
            raise ModelFileError(
                path,
                f"a tensor {name!r} (architecture {architecture!r})",
                "tensors of a Llama, Qwen2 or Qwen3",
            )
    return named


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    """A key that only describes the model: a value of another kind is as good as none."""
    value = metadata.get(key)
    return value if isinstance(value, str) else None


def _config(header: Header, tensors: Mapping[str, TensorInfo], path: str) -> ModelConfig:
    if EMBEDDING not in tensors:
        raise ModelFileError(path, "no tensor 'token_embd.weight'", "an embedding")
    biases = {
        kind
        for kind, part in (
            ("qkv", "self_attn.q_proj"),
            ("output", "self_attn.o_proj"),
            ("mlp", "mlp.up_proj"),
        )
        if f"model.layers.0.{part}.bias" in tensors
    }
    return ModelConfig.from_gguf(
        header.metadata,
        vocab_size=tensors[EMBEDDING].shape[0],
        tied=HEAD not in tensors,
        biases=biases,
    )


def _with_frequencies(config: ModelConfig, info: TensorInfo, data: np.ndarray) -> ModelConfig:
    """The file's own RoPE divisors (Llama 3) as a scaling of type "factors"."""
    if info.type != "F32" or info.shape != (config.head_dim // 2,) or config.rope_scaling is not None:
        raise ModelFileError(
            info.name,
            f"{info.type} {list(info.shape)}",
            f"F32 [{config.head_dim // 2}] and no other RoPE scaling",
        )
    factors = [float(value) for value in _raw(info, data).view("<f4").reshape(-1)]
    return replace(config, rope_scaling={"rope_type": "factors", "factors": factors})


def _check_shapes(config: ModelConfig, tensors: Mapping[str, TensorInfo], path: str) -> None:
    """Before any data is read: the header alone says whether the tensors are those of ``config``."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ModelFileError(
            path, f"no tensor for {missing[0]!r} ({len(missing)} missing)", f"all {len(expected)} tensors"
        )
    for name, info in tensors.items():
        if name not in expected:
            raise ModelFileError(
                path, f"a tensor {info.name!r}", f"tensors of {config.num_layers} layers only"
            )
        if info.shape != expected[name]:
            raise ModelFileError(
                path, f"{info.name!r} of shape {list(info.shape)}", f"shape {list(expected[name])}"
            )
        if len(info.shape) == 1 and info.type not in ("F32", "F16", "BF16"):
            raise ModelFileError(path, f"{info.name!r} stored as {info.type}", "a float vector")


def _raw(info: TensorInfo, data: np.ndarray) -> np.ndarray:
    """Bytes of a tensor, one row of the last axis a row: uint8 [rows, row_bytes]."""
    return data[info.offset : info.offset + info.nbytes].reshape(-1, info.row_bytes)


def _half_split(rows: int, heads: int) -> np.ndarray:
    """Row order that undoes the interleaved RoPE layout: [.., pair, half] becomes [.., half, pair]."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _weight(name: str, info: TensorInfo, data: np.ndarray, config: ModelConfig) -> Weight:
    raw = _raw(info, data)
    if config.architecture == "llama" and ".self_attn." in name:
        for part, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            if part in name:
                if len(info.shape) == 1:
                    raw = raw.reshape(info.shape[0], -1)  # a bias: one element a row
                raw = raw[_half_split(info.shape[0], heads)]
    try:
        return _decode(info, raw)
    except InputError as error:
        raise ModelFileError(
            f"tensor {info.name!r} {error.argument}", error.received, error.expected
        ) from error


def _decode(info: TensorInfo, raw: np.ndarray) -> Weight:
    if info.type in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.type]
        values = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1)).view(dtype).view(info.shape)
        low, high = values.aminmax()
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise InputError("values", "infinite or not a number", "finite weights")
        return values
    blocks = raw.reshape(info.shape[0], info.shape[1] // _GROUP, -1)  # [N, K/32, block bytes]
    scales = _half(blocks[..., 0:2])
    if info.type == "Q8_0":
        codes = torch.from_numpy(np.ascontiguousarray(blocks[..., 2:]).view(np.int8)).view(info.shape)
        return GroupedWeight.from_rows("q8_0", codes, torch.from_numpy(scales.astype(np.float32)))
    start = 2 if info.type == "Q4_0" else 4
    pairs = blocks[..., start:]  # [N, K/32, 16]: elements 0..15 are low nibbles, 16..31 high ones
    nibbles = np.concatenate((pairs & 15, pairs >> 4), -1).view(np.int8)
    nibbles -= 8
    offset = None
    if info.type == "Q4_1":
        # Two FP16 numbers add exactly in float64; the float32 is the one rounding, almost always none.
        total = _half(blocks[..., 2:4]).astype(np.float64) + 8.0 * scales.astype(np.float64)
        offset = torch.from_numpy(total.astype(np.float32))
    return QuantWeight.from_codes(
        "w4",
        torch.from_numpy(nibbles.reshape(info.shape)),
        torch.from_numpy(scales),
        offset,
        group_size=_GROUP,
    )


def _half(pairs: np.ndarray) -> np.ndarray:
    """FP16 numbers from byte pairs: uint8 [..., 2] -> float16 [...]."""
    return np.ascontiguousarray(pairs).view("<f2")[..., 0]


def _tokenizer(metadata: Mapping[str, Any], path: Path, config: ModelConfig) -> Tokenizer | None:
    beside = path.with_name("tokenizer.json")
    if "tokenizer.ggml.tokens" not in metadata:
        return Tokenizer.from_file(beside) if beside.is_file() else None
    tokenizer = Tokenizer.from_gguf(metadata)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelFileError(
            "tokenizer.ggml.tokens",
            f"{tokenizer.vocab_size} tokens",
            f"at most {config.vocab_size} (embedding rows)",
        )
    return tokenizer
