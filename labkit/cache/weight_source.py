"""The weights of a model as headers describe them: GGUF, Hugging Face or labkit folder, or a shape."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit import quoted
from labkit.cache.weights import StoredWeight
from labkit.errors import MissingModelError, ModelFileError, refuse, require
from labkit.models.config import ModelConfig
from labkit.models.model import expected_shapes
from labkit.quant.sizes import GROUP_SIZES, PACK_MULTIPLE, PACKED_FORMATS, round_up

# Bytes of 32 elements of a row say the type: GGUF has one block size for all the types that labkit reads.
_GGUF = {34: ("q8_0", None), 18: ("w4", None), 20: ("w4", torch.float32)}
_OFFSETS = {"F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class ModelHeader:
    """A model without its weights.

    Attributes:
        name: of the model.
        config: the architecture.
        weights: what loading it unchanged would hold.
        kind: "gguf", "hf", "labkit" or "shape": of a published shape, whose weights are then floats.
    """

    name: str
    config: ModelConfig
    weights: tuple[StoredWeight, ...]
    kind: str


def read_model(model: str | os.PathLike[str] | None = None) -> ModelHeader:
    """Describe a model from headers alone.

    Args:
        model: a GGUF file, a Hugging Face folder, a labkit folder, a shape of
            :func:`labkit.quoted.models` by its key, or None: the default model.

    Raises:
        MissingModelError: nothing there; names the shapes as well.
        ModelFileError: damaged or unsupported.
    """
    from labkit.models.checkpoint import is_checkpoint
    from labkit.models.zoo import default_model_path

    if model is None:
        path = default_model_path()
    else:
        path = Path(model)
        key = str(model).strip().lower()
        if not path.exists() and key in quoted.models():
            return _shape(key)
    if is_checkpoint(path):
        return _checkpoint(path)
    if not path.exists():
        shapes = ", ".join(quoted.models())
        raise MissingModelError("model", str(path), f"a .gguf file, a model folder, or a shape: {shapes}")
    if path.is_dir():
        return _folder(path)
    return _gguf(path)


def _shape(key: str) -> ModelHeader:
    from labkit.bench.random_model import config_of

    config = config_of(key)
    weights = tuple(StoredWeight(name, shape) for name, shape in expected_shapes(config).items())
    return ModelHeader(quoted.model(key).name, config, weights, "shape")


def _gguf(path: Path) -> ModelHeader:
    from labkit.models.sources import open_source

    source = open_source(path)
    weights = []
    for name in source.names:
        shape = source.shape(name)
        if not source.is_quantised(name):
            weights.append(StoredWeight(name, shape))
            continue
        format, offset = _GGUF[source.nbytes(name) * 32 // math.prod(shape)]
        weights.append(StoredWeight(name, shape, format, 32, offset))
    return ModelHeader(source.name, source.config, tuple(weights), "gguf")


def _folder(path: Path) -> ModelHeader:
    from labkit.models.hf import HfFolder

    require(
        (path / "config.json").is_file(),
        "model",
        str(path),
        "a folder of `labkit quantize`, or one with config.json",
    )
    folder = HfFolder.open(path)
    try:
        scheme: Any = folder.scheme
        weights = []
        for name in folder.names:
            shape = folder.shape(name)
            if not folder.is_quantised(name):
                weights.append(StoredWeight(name, shape))
                continue
            ordered = name.removesuffix("weight") + "g_idx" in folder.files
            group = _import_group(scheme.group_size, shape[1])
            # The zero points may all be 8, which needs no offset; the codes would have to be read to know.
            weights.append(StoredWeight(name, shape, "w4", group, torch.float32, ordered))
        return ModelHeader(folder.name, folder.config, tuple(weights), "hf")
    finally:
        folder.close()


def _import_group(group: int, k: int) -> int:
    """The group that a GPTQ or AWQ matrix is imported with: see labkit.models.zero_points.exact_w4."""
    if group == -1 or group >= k:
        return round_up(k, PACK_MULTIPLE["w4"])
    if group in GROUP_SIZES:
        return group
    return max(size for size in GROUP_SIZES if group % size == 0)


def _checkpoint(path: Path) -> ModelHeader:
    from labkit.models import checkpoint

    checkpoint._refuse_half_done(path)
    manifest = checkpoint._manifest(path)
    files = checkpoint._files(path, manifest["files"])
    config = ModelConfig.from_dict(manifest["config"])
    weights = []
    for name, shape in expected_shapes(config).items():
        record = manifest["weights"].get(name)
        where = f"{path / checkpoint.MANIFEST}: {name}"
        if not isinstance(record, dict) or record.get("file") not in files:
            raise ModelFileError(where, repr(record)[:80], "a record that names one of the files")
        format = record.get("format")
        if format == "tensor":
            weights.append(StoredWeight(name, shape))
            continue
        entries = files[record["file"]].header.entries
        if format in PACKED_FORMATS:
            offset = entries.get(f"{name}.offset")
            weights.append(
                StoredWeight(
                    name,
                    shape,
                    format,
                    record["group_size"],
                    None if offset is None else _OFFSETS[offset.dtype],
                    f"{name}.k_order" in entries,
                )
            )
        elif format in ("q8_0", "q4_0"):
            weights.append(StoredWeight(name, shape, format, 32))
        else:
            refuse(where, f"format {format!r}", "w4, w3, q8_0, q4_0 or tensor")
    return ModelHeader(str(manifest.get("name") or path.resolve().name), config, tuple(weights), "labkit")
