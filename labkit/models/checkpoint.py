"""labkit's own model folder: quantised weights in shards, loaded memory-mapped.

::

    OUT/labkit.json                 manifest: configuration, recipe, source, where each weight is
    OUT/weights-00001.safetensors   tensors "<weight>.packed", ".scales", ".offset", ".k_order",
                                    ".codes_t", ".scales_t"; float weights under their own name
    OUT/tokenizer.json, config.json, ...   copied from the source when it has them

A folder is complete or absent: :func:`~labkit.models.quantize_checkpoint.quantize_checkpoint` works in
``OUT.partial`` and renames it at the end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from labkit.errors import InputError, MissingModelError, ModelFileError
from labkit.models.config import ModelConfig
from labkit.models.hf import load_tokenizer
from labkit.models.hf_files import read_json
from labkit.models.model import ModelFile, Weight, check_weights
from labkit.models.safetensors_index import TensorFile
from labkit.quant.formats import QuantWeight
from labkit.quant.grouped import GroupedWeight
from labkit.quant.sizes import GROUPED_FORMATS, PACKED_FORMATS

MANIFEST = "labkit.json"
PROGRESS = "progress.json"
VERSION = 1


def partial_path(out: Path) -> Path:
    """Folder in which the checkpoint ``out`` is made."""
    if out.name in ("", ".."):
        out = out.resolve()  # "." has no name to put ".partial" behind
    return out.parent / f"{out.name}.partial"


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a labkit checkpoint, complete or half done (loading says which)."""
    path = Path(path)
    return (
        (path / MANIFEST).is_file()
        or (path / PROGRESS).is_file()
        or (partial_path(path) / PROGRESS).is_file()
    )


def load_checkpoint(path: str | os.PathLike[str]) -> ModelFile:
    """Load a labkit checkpoint; weights stay backed by the files until they are used.

    Reading touches the headers and the scales (to refuse NaN), not the codes.

    Raises:
        MissingModelError: no such folder, or no checkpoint in it.
        ModelFileError: half done (the message has the line that resumes it), another version, or any
            file that is missing, damaged or does not agree with the manifest.
    """
    path = Path(path)
    _refuse_half_done(path)
    manifest = _manifest(path)
    files = _files(path, manifest["files"])
    try:
        config = ModelConfig.from_dict(manifest["config"])
    except InputError as error:
        raise ModelFileError(
            f"{path / MANIFEST}: config {error.argument}", error.received, error.expected
        ) from error
    weights = {name: _weight(path, name, record, files) for name, record in manifest["weights"].items()}
    check_weights(config, weights, str(path))
    info = {
        "source": str(path),
        "format": "labkit",
        "name": str(manifest.get("name") or path.resolve().name),
        "recipe": manifest.get("recipe"),
        "made_from": manifest.get("source"),
        "bytes": sum(manifest["files"].values()),
    }
    return ModelFile(config, weights, load_tokenizer(path, config), info)


def _refuse_half_done(path: Path) -> None:
    for folder in (path, partial_path(path)):
        if (path / MANIFEST).is_file() or not (folder / PROGRESS).is_file():
            continue
        state = read_json(folder / PROGRESS)
        done, shards = state.get("done"), state.get("shards")
        there = len(done) if isinstance(done, list) else 0
        raise ModelFileError(
            str(path),
            f"a checkpoint that is not finished ({there} of {shards} shards)",
            "a finished one",
            str(state.get("resume")),
        )


def _manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).is_file():
        raise MissingModelError(
            str(path), f"no {MANIFEST}", "a labkit checkpoint", f"labkit quantize SRC {path} --bits w4"
        )
    manifest = read_json(path / MANIFEST)
    where = str(path / MANIFEST)
    if manifest.get("format") != "labkit" or manifest.get("version") != VERSION:
        raise ModelFileError(
            where,
            f"format {manifest.get('format')!r} version {manifest.get('version')!r}",
            f"format 'labkit' version {VERSION}",
        )
    for key in ("config", "weights", "files"):
        if not isinstance(manifest.get(key), dict):
            raise ModelFileError(where, f"no {key!r}", "config, weights and files")
    return manifest


def _files(path: Path, sizes: dict[str, Any]) -> dict[str, TensorFile]:
    files = {}
    for name, size in sizes.items():
        if set(name) & set("/\\:\0") or not name.endswith(".safetensors"):
            raise ModelFileError(
                f"{path / MANIFEST}: files", repr(name)[:120], "names of files in this folder"
            )
        if not isinstance(size, int):
            raise ModelFileError(f"{path / MANIFEST}: files[{name!r}]", repr(size)[:80], "a number of bytes")
        if not (path / name).is_file():
            raise ModelFileError(str(path / name), "no such file", f"the shard that {MANIFEST} names")
        found = (path / name).stat().st_size
        if found != size:
            raise ModelFileError(
                str(path / name), f"{found} bytes", f"{size} bytes (from {MANIFEST})", "copy the folder again"
            )
        files[name] = TensorFile.open(path / name)
    return files


def _weight(path: Path, name: str, record: Any, files: dict[str, TensorFile]) -> Weight:
    where = f"{path / MANIFEST}: {name}"
    named = record.get("file") if isinstance(record, dict) else None
    if not isinstance(named, str) or named not in files:
        raise ModelFileError(where, repr(record)[:80], "a record that names one of the files")
    file = files[named]
    form = record.get("format")
    if form == "tensor":
        return file.view(name)
    parts = record.get("parts")
    known = form in PACKED_FORMATS or form in GROUPED_FORMATS
    if not known or not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ModelFileError(
            where, f"format {form!r}, parts {parts!r}"[:120], "w4, w3 or q8_0 and its tensors"
        )
    tensors = {part: file.view(f"{name}.{part}") for part in parts}
    try:
        if form in PACKED_FORMATS:
            return QuantWeight.from_tensors(tensors, record)
        return GroupedWeight.from_tensors(tensors, record)
    except ModelFileError:
        raise
    except InputError as error:
        raise ModelFileError(
            f"{file.header.path}: {name}.{error.argument}", error.received, error.expected
        ) from error
