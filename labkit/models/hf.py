"""Hugging Face folders: config.json + safetensors (one file or shards) for Llama, Qwen2/2.5, Qwen3.

:class:`HfFolder` checks the whole checkpoint from its headers (a few kilobytes a shard), before any
weight is read: which tensors there are, in which file, of which dtype and shape. Weights are then
read one at a time, so quantising while loading needs memory for one source tensor and the result.
GPTQ and AWQ checkpoints come in through the same door (:mod:`labkit.models.gptq`, ``awq``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import InputError, MissingModelError, ModelFileError
from labkit.models.awq import AwqScheme
from labkit.models.config import ModelConfig
from labkit.models.gptq import GptqScheme
from labkit.models.hf_files import find_tensors, read_json
from labkit.models.model import EMBEDDING, HEAD, ModelFile, Weight, check_weights, expected_shapes, role
from labkit.models.recipe import Recipe
from labkit.models.safetensors_index import TensorEntry, TensorFile

if TYPE_CHECKING:
    from labkit.models.tokenizer import Tokenizer

_FLOATS = ("F32", "F16", "BF16")
_COMPARE_BYTES = 8 << 20
# Buffers that old checkpoints saved by mistake; they are computed from the configuration.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"

# What else of a model folder belongs into its quantised copy.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)

Progress = Callable[[int, int, int, int], None]
"""Called after every weight with (weights done, weights in all, bytes done, bytes in all)."""


@dataclass
class HfFolder:
    """A checked Hugging Face checkpoint whose weights are read on demand.

    Attributes:
        path: the folder.
        config: the architecture (end-of-text ids of generation_config.json included).
        record: config.json as it is.
        scheme: None for float checkpoints, or how the quantised ones are stored.
        names: canonical names in order; a tied model has no ``lm_head.weight``.
    """

    path: Path
    config: ModelConfig
    record: dict[str, Any]
    scheme: GptqScheme | AwqScheme | None
    files: dict[str, TensorFile]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> HfFolder:
        """Check ``path`` from its headers alone.

        Raises:
            MissingModelError: no folder, no config.json, or no weights in it.
            ModelFileError: anything that is damaged, missing, superfluous, of a wrong shape or dtype,
                or not supported; the message names the file and the tensor.
        """
        path = Path(path)
        if not (path / "config.json").is_file():
            raise MissingModelError(
                str(path), "no config.json", "a Hugging Face model folder (config.json and *.safetensors)"
            )
        record = read_json(path / "config.json")
        config = _config(path, record)
        scheme = _scheme(path, record)
        files = find_tensors(path)
        folder = cls(path, config, record, scheme, files, expected_shapes(config))
        folder._check()
        return folder

    @property
    def names(self) -> list[str]:
        """Canonical names, in the order of the model."""
        return list(self.shapes)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.resolve().name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of weight ``name``."""
        return self.shapes[name]

    def entry(self, tensor: str) -> TensorEntry:
        """Header entry of a stored tensor."""
        return self.files[tensor].entry(tensor)

    def nbytes(self, name: str) -> int:
        """Bytes that weight ``name`` takes in the source."""
        return sum(self.entry(tensor).nbytes for tensor in self._stored(name))

    def read(self, name: str, *, mapped: bool = False) -> Weight:
        """One weight: a float tensor as stored, or W4 for a GPTQ or AWQ matrix.

        Args:
            name: canonical name.
            mapped: float tensors backed by the file instead of copied.
        """
        if not self._is_packed(name):
            file = self.files[name]
            return file.view(name) if mapped else file.read(name)
        assert self.scheme is not None
        stem = name.removesuffix("weight")
        parts = {
            part: self.files[stem + part].read(stem + part)
            for part in self.scheme.parts
            if stem + part in self.files
        }
        n, k = self.shapes[name]
        return self.scheme.weight(f"{self.where(name)}: {stem.removesuffix('.')}", parts, n, k)

    def where(self, name: str) -> str:
        """Path of the file that holds ``name``."""
        return str(self.files[self._stored(name)[0]].header.path)

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the source: size, time and header hash of every file it is made of."""
        paths = {file.header.path for file in self.files.values()} | {self.path / "config.json"}
        return {"kind": "hf", "files": [file_fingerprint(path) for path in sorted(paths)]}

    def is_quantised(self, name: str) -> bool:
        """Whether weight ``name`` is packed (GPTQ, AWQ) and not a float tensor."""
        return self._is_packed(name)

    def companions(self) -> dict[str, str]:
        """Text by file name of the tokenizer and its settings, and of config.json without quantisation.

        Raises:
            ModelFileError: one of them is damaged; the tokenizer has been loaded once to know.
        """
        texts = {name: _companion(self.path / name) for name in COMPANIONS if (self.path / name).is_file()}
        try:
            load_tokenizer(self.path, self.config)
        except ModelFileError:
            raise
        except InputError as error:
            raise ModelFileError(
                f"{self.path}: {error.argument}", error.received, error.expected, error.fix
            ) from error
        record = {key: value for key, value in self.record.items() if key != "quantization_config"}
        return {**texts, "config.json": json.dumps(record, indent=2) + "\n"}

    def check_tied_head(self) -> None:
        """Refuse a tied checkpoint whose ``lm_head.weight`` is there but differs from the embedding."""
        if not (self.config.tie_word_embeddings and HEAD in self.files):
            return
        one, two = self.entry(EMBEDDING), self.entry(HEAD)
        same = (one.dtype, one.shape) == (two.dtype, two.shape)
        if same:
            pairs = zip(_chunks(self.files[EMBEDDING], one), _chunks(self.files[HEAD], two), strict=True)
            same = all(a == b for a, b in pairs)
        if not same:
            raise ModelFileError(
                str(self.files[HEAD].header.path),
                "lm_head.weight that differs from the embedding",
                "the same values, since config.json says tie_word_embeddings = true",
                "set tie_word_embeddings to false in config.json when the head is its own",
            )

    def close(self) -> None:
        """Close the plain file handles."""
        for file in {id(file): file for file in self.files.values()}.values():
            file.close()

    def _is_packed(self, name: str) -> bool:
        return self.scheme is not None and name.removesuffix("weight") + "qweight" in self.files

    def _stored(self, name: str) -> list[str]:
        """Names of the tensors that weight ``name`` is made of."""
        if not self._is_packed(name):
            return [name]
        assert self.scheme is not None
        stem = name.removesuffix("weight")
        return [stem + part for part in self.scheme.parts if stem + part in self.files]

    def _check(self) -> None:
        used: set[str] = set()
        for name, shape in self.shapes.items():
            if self._is_packed(name):
                self._check_packed(name, used)
                continue
            if name not in self.files:
                raise ModelFileError(
                    str(self.path),
                    f"no tensor {name!r}",
                    f"all weights of a {self.config.architecture} model",
                )
            entry = self.entry(name)
            where = f"{self.where(name)}: tensor {name!r}"
            if entry.shape != shape:
                raise ModelFileError(where, f"shape {list(entry.shape)}", f"{list(shape)} (from config.json)")
            if entry.dtype not in _FLOATS:
                raise ModelFileError(where, f"dtype {entry.dtype}", "one of " + ", ".join(_FLOATS))
            used.add(name)
        for name in self.files:
            if name not in used and not self._may_ignore(name):
                raise ModelFileError(
                    f"{self.files[name].header.path}: tensor {name!r}",
                    "a tensor that this architecture does not have",
                    f"only weights of a {self.config.architecture} model of {self.config.num_layers} layers",
                    "config.json and the weights may not belong together",
                )

    def _check_packed(self, name: str, used: set[str]) -> None:
        assert self.scheme is not None
        stem = name.removesuffix("weight")
        if role(name) not in ("attn", "mlp", "head"):
            raise ModelFileError(f"{self.path}: {stem}qweight", "a quantised embedding", "a float embedding")
        for part in self.scheme.parts:
            if stem + part in self.files:
                used.add(stem + part)
            elif part not in self.scheme.optional:
                raise ModelFileError(
                    str(self.path), f"no tensor {stem + part!r}", f"it, beside {stem}qweight"
                )

    def _may_ignore(self, name: str) -> bool:
        if name.endswith(_IGNORED_SUFFIX) or (name == HEAD and self.config.tie_word_embeddings):
            return True
        if self.scheme is not None and name.endswith("_proj.bias"):
            # Some quantisers write a bias of zeros for every layer; adding nothing changes nothing.
            entry = self.entry(name)
            return entry.dtype in _FLOATS and not bool(self.files[name].read(name).any())
        return False


def load_hf(
    path: str | os.PathLike[str],
    *,
    bits: str | None = None,
    group_size: int | str | None = None,
    offset: bool = False,
    per_layer: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> ModelFile:
    """Load a Hugging Face folder, quantising weight by weight when asked to.

    Args:
        path: folder with config.json, safetensors and, usually, tokenizer.json.
        bits: "w4", "w3", "mixed", "q8", "none" (float), or None or "keep": as stored, apart from what
            per_layer names. Float weights that stay float are backed by the file; GPTQ and AWQ weights
            come in as W4 exactly.
        group_size: 16, 32, 64, 128 or "row" for W4 and W3; None is 32, or the source's own when it is
            already W4.
        offset: quantise asymmetrically.
        per_layer: pattern -> format, over the preset (:mod:`labkit.models.layer_bits`).
        progress: see :data:`Progress`.

    Raises:
        InputError: a bad option. ModelFileError, MissingModelError: see :meth:`HfFolder.open`.
    """
    recipe = Recipe.of(bits, group_size=group_size, offset=offset, per_layer=per_layer)
    folder = HfFolder.open(path)
    plan = recipe.plan(folder.names)
    folder.check_tied_head()
    total = sum(folder.nbytes(name) for name in plan)
    weights: dict[str, Weight] = {}
    done = 0
    try:
        for index, (name, form) in enumerate(plan.items(), 1):
            weight = folder.read(name, mapped=form in ("none", "keep"))
            weights[name] = recipe.apply(name, weight, form, where=folder.where(name))
            done += folder.nbytes(name)
            if progress is not None:
                progress(index, len(plan), done, total)
    finally:
        folder.close()
    check_weights(folder.config, weights, str(path))
    method = folder.scheme.method if folder.scheme else None
    info = {
        "source": str(path),
        "format": "hf",
        "name": folder.name,
        "quantised_by": method,
        "recipe": recipe.to_json(),
    }
    return ModelFile(folder.config, weights, load_tokenizer(folder.path, folder.config), info)


def load_tokenizer(path: Path, config: ModelConfig) -> Tokenizer | None:
    """The folder's tokenizer, or None when it has no tokenizer.json."""
    if not (path / "tokenizer.json").is_file():
        return None
    from labkit.models.tokenizer import Tokenizer

    return Tokenizer.from_file(path / "tokenizer.json", eos_ids=config.eos_token_ids)


def _companion(path: Path) -> str:
    """Text of a file that goes with the weights; ModelFileError when it is not UTF-8 or not JSON."""
    if path.suffix == ".json":
        read_json(path)
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(str(path), f"text that is not UTF-8 ({error})", "UTF-8") from error


def file_fingerprint(path: Path) -> dict[str, Any]:
    """Name, size, modification time and a hash of the first megabyte of a file."""
    stat = path.stat()
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 20)).hexdigest()
    return {"name": path.name, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256_1mb": digest}


def _config(path: Path, record: dict[str, Any]) -> ModelConfig:
    try:
        config = ModelConfig.from_hf_dict(record)
    except ModelFileError as error:
        raise ModelFileError(
            f"{path / 'config.json'}: {error.argument}", error.received, error.expected, error.fix
        ) from error
    generation = path / "generation_config.json"
    if generation.is_file():
        # Chat models stop at more tokens than config.json names.
        extra = read_json(generation).get("eos_token_id")
        more = extra if isinstance(extra, list) else [extra]
        ids = [
            token for token in more if isinstance(token, int) and not isinstance(token, bool) and token >= 0
        ]
        config = replace(config, eos_token_ids=tuple(dict.fromkeys([*ids, *config.eos_token_ids])))
    return config


def _scheme(path: Path, record: dict[str, Any]) -> GptqScheme | AwqScheme | None:
    where = f"{path / 'config.json'}: quantization_config"
    settings = record.get("quantization_config")
    if settings is None and (path / "quantize_config.json").is_file():
        where = str(path / "quantize_config.json")  # AutoGPTQ before it wrote into config.json
        settings = {"quant_method": "gptq", **read_json(path / "quantize_config.json")}
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ModelFileError(where, type(settings).__name__, "an object")
    method = str(settings.get("quant_method", settings.get("method"))).lower()
    if method == "gptq":
        return GptqScheme.from_config(where, settings)
    if method == "awq":
        return AwqScheme.from_config(where, settings)
    raise ModelFileError(where, f"quant_method {method!r}", "'gptq' or 'awq', or a float checkpoint")


def _chunks(file: TensorFile, entry: TensorEntry) -> Iterator[bytes]:
    with file.header.path.open("rb") as handle:
        handle.seek(file.header.data_start + entry.begin)
        left = entry.nbytes
        while left > 0:
            part = handle.read(min(left, _COMPARE_BYTES))
            if not part:
                raise ModelFileError(str(file.header.path), "a file that ends early", "the whole tensor")
            left -= len(part)
            yield part
