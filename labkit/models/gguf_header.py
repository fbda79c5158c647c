"""The header of a GGUF file, read without trusting one number in it.

``gguf.GGUFReader`` makes several Python objects for every array element that a header claims
(2 s and 190 MB for the default model, gigabytes for a lying one) before it looks at the size of
the file. Here every count and length is first compared with the bytes that are left; types and
block sizes come from the ``gguf`` package. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from labkit.errors import MissingModelError, ModelFileError

SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")

# Far above any real file, low enough that what Python makes of them stays in the hundreds of megabytes.
MAX_KEY = 65_535
MAX_STRING = 1 << 24
MAX_ELEMENTS = 1 << 22
MAX_NAME = 1_024
MAX_DIMS = 4

_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        name: as in the file ("blk.0.attn_q.weight").
        type: one of SUPPORTED.
        shape: slowest axis first, [out, in] for a matrix (the file lists the fastest first).
        offset: of its first byte, from the start of the file.
        nbytes: its size.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the last axis."""
        return self.nbytes // (math.prod(self.shape) // self.shape[-1])


@dataclass(frozen=True)
class Header:
    """Metadata (key -> bool, int, float, str, list of str, or numpy array) and tensors by name."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Read and check everything before the tensor data.

    Raises:
        MissingModelError: no such file.
        ModelFileError: not a GGUF file, or any count, length, type, shape or offset in it that the
            file's size does not bear out, or that labkit does not support.
    """
    if not path.is_file():
        raise MissingModelError(str(path), "no such file", "a GGUF file")
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise ModelFileError(
                    str(path), f"{path.stat().st_size} bytes", "a GGUF file (24 bytes or more)"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Scan(view, str(path)).header()
    except OSError as error:
        raise ModelFileError(str(path), f"unreadable ({error.strerror})", "a readable GGUF file") from error


class _Scan:
    def __init__(self, view: mmap.mmap, path: str) -> None:
        self.view, self.path, self.size, self.at = view, path, len(view), 0

    def header(self) -> Header:
        if self.view[:4] != b"GGUF":
            self.bad("the magic bytes " + repr(self.view[:4]), "b'GGUF'")
        self.at = 4
        version = self.number("<I", "version")
        if version & 0xFFFF == 0:
            self.bad("a big-endian GGUF file", "a little-endian one")
        if version not in (2, 3):
            self.bad(f"GGUF version {version}", "version 2 or 3")
        tensors, keys = self.number("<Q", "tensor count"), self.number("<Q", "metadata count")
        self.fits(keys, 13, "metadata entries")
        self.fits(tensors, 24, "tensors")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.string("a metadata key", MAX_KEY)
            if key in metadata:
                self.bad(f"the metadata key {key!r} twice", "each key once")
            metadata[key] = self.value(key, self.value_type(key))
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        good = type(alignment) is int and 8 <= alignment <= 1 << 20 and not alignment & (alignment - 1)
        if not good:
            self.bad(f"general.alignment {alignment!r}", "a power of two from 8 to 1048576")
        raw = [self.tensor() for _ in range(tensors)]
        data = -(-self.at // alignment) * alignment
        return Header(version, metadata, self.placed(raw, data, alignment))

    def bad(self, received: str, expected: str) -> NoReturn:
        raise ModelFileError(
            self.path, received, expected, "the file is damaged or unsupported: get it again"
        )

    def take(self, count: int, what: str) -> int:
        """Move past ``count`` bytes; return where they start."""
        start = self.at
        if count > self.size - start:
            self.bad(
                f"{what} of {count:,} bytes at {start:,}", f"at most the {self.size - start:,} bytes left"
            )
        self.at = start + count
        return start

    def fits(self, count: int, least: int, what: str) -> None:
        if count * least > self.size - self.at:
            self.bad(
                f"a header that claims {count:,} {what}", f"what fits into {self.size - self.at:,} bytes"
            )

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self.view, self.take(struct.calcsize(code), what))[0]

    def string(self, what: str, most: int = MAX_STRING) -> str:
        length = self.number("<Q", what)
        if length > most:
            self.bad(f"{what} of {length:,} bytes", f"at most {most:,}")
        start = self.take(length, what)
        try:
            return self.view[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            self.bad(f"{what} at {start:,} that is not UTF-8", "UTF-8 text")

    def value_type(self, key: str) -> GGUFValueType:
        raw = self.number("<I", f"the type of {key!r}")
        try:
            return GGUFValueType(raw)
        except ValueError:
            self.bad(f"value type {raw} for {key!r}", "a GGUF value type")

    def value(self, key: str, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string(repr(key))
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], repr(key))
        inner = self.value_type(key)
        count = self.number("<Q", f"the length of {key!r}")
        if count > MAX_ELEMENTS:
            self.bad(f"{key!r} with {count:,} elements", f"at most {MAX_ELEMENTS:,}")
        if inner == GGUFValueType.STRING:
            self.fits(count, 8, f"strings in {key!r}")
            return [self.string(f"a string of {key!r}") for _ in range(count)]
        if inner not in _SCALARS:
            self.bad(f"nested arrays in {key!r}", "an array of numbers or strings")
        dtype = np.dtype(_SCALARS[inner])
        self.fits(count, dtype.itemsize, f"numbers in {key!r}")
        start = self.take(count * dtype.itemsize, repr(key))
        # A copy: nothing may point into the mapping once it is closed.
        return np.frombuffer(self.view, dtype, count, start).copy()

    def tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self.string("a tensor name", MAX_NAME)
        dims = self.number("<I", f"the rank of {name!r}")
        if not 1 <= dims <= MAX_DIMS:
            self.bad(f"{name!r} with {dims} dimensions", f"1 to {MAX_DIMS}")
        fastest_first = [self.number("<Q", f"the shape of {name!r}") for _ in range(dims)]
        raw = self.number("<I", f"the type of {name!r}")
        offset = self.number("<Q", f"the offset of {name!r}")
        try:
            kind = GGMLQuantizationType(raw).name
        except ValueError:
            kind = f"unknown type {raw}"
        if kind not in SUPPORTED:
            self.bad(f"{name!r} stored as {kind}", "one of " + ", ".join(SUPPORTED))
        return name, kind, tuple(reversed(fastest_first)), offset

    def placed(
        self, raw: list[tuple[str, str, tuple[int, ...], int]], data: int, alignment: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, kind, shape, offset in raw:
            if name in tensors:
                self.bad(f"the tensor {name!r} twice", "each tensor once")
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            if min(shape) < 1 or shape[-1] % block:
                self.bad(
                    f"{name!r} of shape {list(shape)} as {kind}", f"rows of a multiple of {block} elements"
                )
            nbytes = math.prod(shape) // block * block_bytes
            if offset % alignment:
                self.bad(f"{name!r} at offset {offset:,}", f"a multiple of {alignment}")
            if data + offset + nbytes > self.size:
                self.bad(
                    f"{name!r}: {nbytes:,} bytes of data at {data + offset:,}",
                    f"data inside the file's {self.size:,} bytes",
                )
            tensors[name] = TensorInfo(name, kind, shape, data + offset, nbytes)
        # Two tensors on the same bytes would let a small file unfold into a huge model.
        end, before = data, "the header"
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                self.bad(f"{info.name!r} overlapping {before!r}", "tensors that share no bytes")
            end, before = info.offset + info.nbytes, info.name
        return tensors
