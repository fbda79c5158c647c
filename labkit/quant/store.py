"""Files of quantised weights: safetensors with metadata, written in one pass, read memory-mapped.

A weight named ``a`` becomes the tensors ``a.packed``, ``a.scales``, ... The header's metadata says
what they are: ``labkit.version`` (1), ``labkit.weights`` (JSON: name to format, n, k, group_size, parts) and
``labkit.metadata`` (JSON of the caller's own). Any safetensors reader can open the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from labkit import atomic
from labkit.errors import InputError, ModelFileError, require
from labkit.quant.formats import QuantWeight
from labkit.quant.grouped import GroupedWeight
from labkit.quant.packing import describe
from labkit.quant.sizes import GROUPED_FORMATS, PACKED_FORMATS

VERSION = "1"

Weight = Tensor | QuantWeight | GroupedWeight

_DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_FIELDS = ("packed", "scales", "offset", "k_order", "codes_t", "scales_t")
_WRITE_BYTES = 64 << 20


class Stored(NamedTuple):
    """What a file held: weights by name, and the metadata it was saved with."""

    weights: dict[str, Weight]
    metadata: dict[str, Any]


def save_quantized(
    path: Path | str, weights: Mapping[str, Weight], metadata: Mapping[str, Any] | None = None
) -> int:
    """Write weights to a safetensors file, atomically and without a second copy in memory.

    Args:
        path: the file to write.
        weights: plain tensors, :class:`QuantWeight` and :class:`GroupedWeight` by name.
        metadata: JSON values of the caller's own.

    Returns:
        Bytes written.

    Raises:
        InputError: a value of another type, two tensors of one name, or metadata JSON cannot hold.
    """
    flat: dict[str, Tensor] = {}
    described: dict[str, dict[str, Any]] = {}
    for name, weight in weights.items():
        parts: dict[str, Tensor]
        if isinstance(weight, Tensor):
            parts = {name: weight}
        elif isinstance(weight, QuantWeight | GroupedWeight):
            parts = {f"{name}.{field}": tensor for field, tensor in weight.tensors().items()}
            described[name] = {**weight.metadata(), "parts": sorted(weight.tensors())}
        else:
            raise InputError(
                f"weights[{name!r}]", type(weight).__name__, "a Tensor, QuantWeight or GroupedWeight"
            )
        for key, tensor in parts.items():
            require(
                key != "__metadata__", f"weights[{name!r}]", "a name safetensors reserves", "another name"
            )
            require(key not in flat, f"weights[{name!r}]", f"a second tensor {key!r}", "distinct names")
            require(tensor.dtype in _DTYPE_NAMES, f"weights[{name!r}]", describe(tensor), "a storable dtype")
            flat[key] = tensor
    try:
        text = {
            "labkit.version": VERSION,
            "labkit.weights": json.dumps(described, sort_keys=True),
            "labkit.metadata": json.dumps(dict(metadata or {}), sort_keys=True, allow_nan=False),
        }
    except (TypeError, ValueError) as error:
        raise InputError("metadata", str(error), "values that JSON can hold") from error
    with atomic.replacing(Path(path), binary=True) as file:
        return _write(file, flat, text)


def load_quantized(
    path: Path | str, *, device: torch.device | str = "cpu", names: Collection[str] | None = None
) -> Stored:
    """Read a file of :func:`save_quantized`.

    On the CPU the tensors are views of the memory-mapped file: opening costs no copy, and pages
    come in as they are touched (scales are touched at once, to check that they are finite).

    Args:
        path: the file.
        device: where the weights go.
        names: only these weights; None for all.

    Returns:
        ``Stored(weights, metadata)``.

    Raises:
        ModelFileError: no such file; truncated or corrupt; not written by labkit, or by a newer
            version; tensors that do not match what the header says about them.
        InputError: a name in ``names`` that the file does not hold.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelFileError(str(path), "no such file", "a safetensors file written by labkit")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            described, metadata = _header(path, file.metadata())
            keys = set(file.keys())
            weights: dict[str, Weight] = {}
            for name, fields in described.items():
                own = keys & {f"{name}.{field}" for field in fields["parts"]}
                keys -= own
                if names is None or name in names:
                    tensors = {key.rpartition(".")[2]: file.get_tensor(key) for key in sorted(own)}
                    weights[name] = _rebuild(path, name, tensors, fields)
            for key in sorted(keys):
                if names is None or key in names:
                    weights[key] = file.get_tensor(key)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelFileError(
            str(path), f"unreadable: {error}", "a complete safetensors file", "write or copy the file again"
        ) from error
    for name in sorted(set(names or ()) - set(weights)):
        raise InputError("names", repr(name), f"a weight that {path.name} holds")
    if torch.device(device).type != "cpu":
        weights = {name: weight.to(device) for name, weight in weights.items()}
    return Stored(weights, metadata)


def _header(
    path: Path, text: Mapping[str, str] | None
) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
    """The JSON parts of the header, checked for shape."""
    version = (text or {}).get("labkit.version")
    if text is None or version != VERSION:
        raise ModelFileError(
            str(path),
            "no labkit metadata" if version is None else f"labkit format version {version}",
            f"labkit format version {VERSION}",
            "labkit quantize SRC OUT makes one" if version is None else "update labkit",
        )
    objects = []
    for field in ("labkit.weights", "labkit.metadata"):
        try:
            value = json.loads(text[field])
        except (KeyError, ValueError) as error:
            raise ModelFileError(str(path), f"{field}: {error}", "a JSON object in the header") from error
        if not isinstance(value, dict):
            raise ModelFileError(str(path), f"{field}: {type(value).__name__}", "a JSON object in the header")
        objects.append(value)
    described, metadata = objects
    for name, fields in described.items():
        if not isinstance(fields, dict):
            raise ModelFileError(str(path), f"{name}: {fields!r}", "format, n, k and group_size by weight")
        parts = fields.get("parts")
        if not isinstance(parts, list) or not all(part in _FIELDS for part in parts):
            raise ModelFileError(str(path), f"{name}: parts {parts!r}", "names of " + ", ".join(_FIELDS))
    return described, metadata


def _rebuild(
    path: Path, name: str, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]
) -> QuantWeight | GroupedWeight:
    format = fields.get("format")
    try:
        if format in PACKED_FORMATS:
            return QuantWeight.from_tensors(tensors, fields)
        if format in GROUPED_FORMATS:
            return GroupedWeight.from_tensors(tensors, fields)
    except InputError as error:
        raise ModelFileError(
            f"{path}: {name}.{error.argument}", error.received, error.expected, error.fix
        ) from error
    raise ModelFileError(
        f"{path}: {name}", f"format {format!r}", "one of " + ", ".join(PACKED_FORMATS + GROUPED_FORMATS)
    )


def _write(file: IO[bytes], tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> int:
    """Write the safetensors layout: header length, JSON header, data; widest dtypes first, so all align."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(text)}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
    for name in order:
        flat = tensors[name].detach().reshape(-1)
        step = max(1, _WRITE_BYTES // flat.element_size())
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step].cpu().contiguous()
            file.write(piece.view(torch.uint8).numpy().data)
    return 8 + len(encoded) + end
