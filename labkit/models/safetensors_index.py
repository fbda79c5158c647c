"""Read a safetensors file without trusting it: header checked against the file size first.

Layout (public description, https://github.com/huggingface/safetensors): 8 bytes little-endian
header length ``n``; ``n`` bytes of JSON ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``
with an optional ``"__metadata__"`` of strings, padded with spaces; then the data section that the
offsets count from. Offsets must cover the data section exactly: no hole, no overlap.

Nothing is allocated from a number in the header before that number has been compared with the
size of the file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from labkit.errors import MissingModelError, ModelFileError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000  # the limit of the public format

# dtype name -> (bytes, torch attribute); only what a model of this family can hold.
DTYPES: dict[str, tuple[int, str]] = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: dtype name, shape, and its byte range in the data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.end - self.begin


@dataclass(frozen=True)
class SafetensorsHeader:
    """A validated header: entries by name, metadata, and where the data section begins."""

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    file_size: int


def read_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and validate the header of a safetensors file; its tensors are not touched.

    Raises:
        MissingModelError: there is no such file.
        ModelFileError: truncated or empty file, header longer than the file, not JSON, duplicate
            names, unknown dtype, bad shape, offsets outside the file, overlapping or leaving holes,
            or a byte count that does not equal shape x dtype size.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingModelError(str(path), "no such file", "a .safetensors file")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ModelFileError(str(path), f"{size} bytes", "at least 8 bytes (the header length)", _AGAIN)
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES or length > size - 8:
            raise ModelFileError(
                str(path),
                f"a header length of {length} bytes in a file of {size} bytes",
                f"at most {min(MAX_HEADER_BYTES, size - 8)} bytes",
                _AGAIN,
            )
        raw = file.read(length)
    table = _parse_json(path, raw)
    metadata = _metadata(path, table.pop("__metadata__", None))
    entries = {name: _entry(path, name, value) for name, value in table.items()}
    _check_layout(path, entries, size - 8 - length)
    return SafetensorsHeader(path, entries, metadata, 8 + length, size)


_AGAIN = "the file is truncated or not a safetensors file: copy or download it again"


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(items)
        if len(table) != len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise ModelFileError(str(path), f"{twice!r} twice in the header", "every name once")
        return table

    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except ModelFileError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of 5000 digits
        raise ModelFileError(
            str(path), f"a header that is not JSON ({error})", "a JSON object", _AGAIN
        ) from error
    if not isinstance(table, dict):
        raise ModelFileError(str(path), f"a header of type {type(table).__name__}", "a JSON object")
    return table


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise ModelFileError(str(path), "__metadata__ with values that are not text", "text for every key")
    return value


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    def bad(received: object, expected: str) -> ModelFileError:
        return ModelFileError(f"{path}: tensor {name!r}", received, expected)

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise bad(repr(value)[:80], "an object with dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in DTYPES:
        raise bad(f"dtype {dtype!r}", "one of " + ", ".join(DTYPES))
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape) or len(shape) > 8:
        raise bad(f"shape {repr(shape)[:80]}", "a list of at most 8 whole numbers >= 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise bad(f"data_offsets {repr(offsets)[:80]}", "two whole numbers >= 0")
    begin, end = offsets
    if end < begin:
        raise bad(f"data_offsets {offsets}", "begin <= end")
    needed = math.prod(shape) * DTYPES[dtype][0]
    if end - begin != needed:
        raise bad(f"{end - begin} bytes", f"{needed} bytes for shape {shape} of {dtype}")
    return TensorEntry(dtype, tuple(shape), begin, end)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_layout(path: Path, entries: dict[str, TensorEntry], available: int) -> None:
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > available:
            raise ModelFileError(
                f"{path}: tensor {name!r}",
                f"data up to byte {entry.end} of a data section of {available} bytes",
                "offsets inside the file",
                _AGAIN,
            )
        if entry.begin != at:
            what = (
                "overlapping its neighbour"
                if entry.begin < at
                else f"after a hole of {entry.begin - at} bytes"
            )
            raise ModelFileError(f"{path}: tensor {name!r}", f"data {what}", f"data that begins at byte {at}")
        at = entry.end
    if at != available:
        raise ModelFileError(
            str(path), f"{available - at} bytes that belong to no tensor", f"a data section of {at} bytes"
        )


@dataclass
class TensorFile:
    """Tensors of one validated safetensors file, by copy or memory-mapped.

    ``read`` copies one tensor into memory of its own (peak memory: that tensor). ``view`` gives a
    tensor that is backed by the file: pages come in when they are used, and writes stay private.
    """

    header: SafetensorsHeader
    _map: mmap.mmap | None = field(default=None, repr=False)
    _file: IO[bytes] | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TensorFile:
        """Validate the header of ``path`` (see :func:`read_header`) and return its reader."""
        return cls(read_header(path))

    def entry(self, name: str) -> TensorEntry:
        """Entry of ``name``; ModelFileError when the file has no such tensor."""
        try:
            return self.header.entries[name]
        except KeyError:
            raise ModelFileError(
                str(self.header.path), f"no tensor {name!r}", "the tensors that its index lists"
            ) from None

    def read(self, name: str) -> torch.Tensor:
        """Copy of one tensor in ordinary memory."""
        import torch

        entry = self.entry(name)
        dtype = getattr(torch, DTYPES[entry.dtype][1])
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        if self._file is None:
            self._file = self.header.path.open("rb")
        self._file.seek(self.header.data_start + entry.begin)
        buffer = bytearray(entry.nbytes)
        got = self._file.readinto(buffer)  # type: ignore[attr-defined]
        if got != entry.nbytes:
            raise ModelFileError(
                f"{self.header.path}: tensor {name!r}", f"{got} bytes", f"{entry.nbytes} bytes", _AGAIN
            )
        return torch.frombuffer(buffer, dtype=dtype).view(entry.shape)

    def view(self, name: str) -> torch.Tensor:
        """Tensor backed by the file (a copy only where the file does not align it)."""
        import torch

        entry = self.entry(name)
        width, attribute = DTYPES[entry.dtype]
        dtype = getattr(torch, attribute)
        start = self.header.data_start + entry.begin
        if not entry.nbytes or start % width:
            return self.read(name)
        if self._map is None:
            with self.header.path.open("rb") as file:
                # Private pages: torch wants writable memory, the file must stay as it is.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            if len(self._map) != self.header.file_size:
                raise ModelFileError(
                    str(self.header.path), "a file that changed while it was read", "the same file", _AGAIN
                )
        count = entry.nbytes // width
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(entry.shape)

    def close(self) -> None:
        """Close the plain file handle; views stay valid (they hold the mapping)."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._map = None
