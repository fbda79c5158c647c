"""Which file of a Hugging Face folder holds which tensor; every name is checked before it is opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.errors import MissingModelError, ModelFileError
from labkit.models.safetensors_index import TensorFile

_MAX_JSON_BYTES = 64 << 20
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``; ModelFileError when it is not one (or absurdly large)."""
    size = path.stat().st_size
    if size > _MAX_JSON_BYTES:
        raise ModelFileError(str(path), f"{size} bytes", f"JSON of at most {_MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            str(path), f"text that is not JSON ({error})", "a JSON object", "copy or download the file again"
        ) from error
    if not isinstance(value, dict):
        raise ModelFileError(str(path), type(value).__name__, "a JSON object")
    return value


def find_tensors(folder: Path) -> dict[str, TensorFile]:
    """Map every tensor name of the checkpoint to the (validated) file that holds it.

    One ``model.safetensors`` wins over an index, as in transformers; a folder with exactly one
    safetensors file of any name, or one ``*.safetensors.index.json``, is taken too.

    Raises:
        MissingModelError: no safetensors at all, or a shard that the index names is not there.
        ModelFileError: a damaged header or index, a shard name that leaves the folder, an index and
            shards that disagree.
    """
    single = folder / "model.safetensors"
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if not single.is_file() and not indexes:
        found = sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            _refuse_weights(folder, found)
        single = found[0]
    if single.is_file():
        file = TensorFile.open(single)
        return dict.fromkeys(file.header.entries, file)
    preferred = folder / "model.safetensors.index.json"
    if len(indexes) > 1 and preferred not in indexes:
        raise ModelFileError(str(folder), f"{len(indexes)} index files", "one model.safetensors.index.json")
    return _sharded(folder, preferred if preferred in indexes else indexes[0])


def _refuse_weights(folder: Path, found: list[Path]) -> None:
    if found:
        raise ModelFileError(
            str(folder),
            f"{len(found)} safetensors files and no index",
            "model.safetensors.index.json beside them",
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise ModelFileError(
            str(folder), "PyTorch pickle weights", "safetensors", "convert the checkpoint to safetensors"
        )
    raise MissingModelError(str(folder), "no *.safetensors file", "the model's weights beside config.json")


def _sharded(folder: Path, index_path: Path) -> dict[str, TensorFile]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(str(index_path), "no weight_map", "a 'weight_map' of tensor names to file names")
    shards: dict[str, TensorFile] = {}
    for tensor, name in weight_map.items():
        if name in shards:
            continue
        _check_shard_name(index_path, tensor, name)
        if not (folder / name).is_file():
            raise MissingModelError(
                str(folder / name), "no such shard", f"the file that {index_path.name} names for {tensor!r}"
            )
        shards[name] = TensorFile.open(folder / name)
    for tensor, name in weight_map.items():
        if tensor not in shards[name].header.entries:
            raise ModelFileError(
                str(folder / name), f"no tensor {tensor!r}", f"it, because {index_path.name} says so"
            )
    for name, file in shards.items():
        for tensor in file.header.entries:
            if weight_map.get(tensor) != name and not tensor.endswith(_IGNORED_SUFFIX):
                raise ModelFileError(
                    f"{folder / name}: tensor {tensor!r}",
                    "a tensor that the index does not list for this file",
                    f"the tensors that {index_path.name} lists",
                )
    return {tensor: shards[name] for tensor, name in weight_map.items()}


def _check_shard_name(index_path: Path, tensor: str, name: Any) -> None:
    plain = isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\:\0")
    if not plain or name.startswith("."):
        raise ModelFileError(
            f"{index_path}: weight_map[{tensor!r}]",
            repr(name)[:120],
            "the name of a .safetensors file in the same folder",
        )
