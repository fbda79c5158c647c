"""Write a safetensors file tensor by tensor, without holding the file in memory.

The header comes first in the format but is known last. Room for it is reserved from the names alone,
and what it does not need is filled with spaces, which the format allows. The same weights give the
same bytes, however often the work was interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch

from labkit.errors import InputError
from labkit.models.model import Weight
from labkit.models.safetensors_index import DTYPES

_NAME_OF = {getattr(torch, attribute): name for name, (_, attribute) in DTYPES.items()}
_PARTS = 4  # packed, scales, offset, k_order: the most tensors that one weight is stored as
_ENTRY_BYTES = 160  # dtype, shape, two offsets of 20 digits, punctuation, the part's name
_WRITE_BYTES = 16 << 20


class ShardWriter:
    """One shard being written to ``path`` + ".part"; :meth:`finish` gives it its name.

    Args:
        path: where the finished file will be.
        names: canonical names of all weights that will be added (they size the header).
    """

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self.path = path
        self._room = 64 + sum(_PARTS * (len(name.encode("utf-8")) + _ENTRY_BYTES) for name in names)
        self._room += -self._room % 64
        self._header: dict[str, Any] = {"__metadata__": {"format": "labkit"}}
        self._at = 0
        self._file: IO[bytes] = self._part.open("wb")
        self._file.write(self._room.to_bytes(8, "little") + b" " * self._room)

    @property
    def _part(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    def add(self, name: str, weight: Weight) -> dict[str, Any]:
        """Append one weight; returns its manifest record (file, format, shape, parts)."""
        if isinstance(weight, torch.Tensor):
            self._write(name, weight)
            return {"file": self.path.name, "format": "tensor", "shape": list(weight.shape)}
        tensors = weight.tensors()
        # Widest first: what follows the bytes of one weight is then nearly always aligned.
        for part in sorted(tensors, key=lambda part: (-tensors[part].element_size(), part)):
            self._write(f"{name}.{part}", tensors[part])
        return {"file": self.path.name, **weight.metadata(), "parts": sorted(tensors)}

    def finish(self) -> int:
        """Write the header, put the bytes on the disk, give the file its name; returns its size."""
        raw = json.dumps(self._header, separators=(",", ":")).encode("utf-8")
        if len(raw) > self._room:
            raise InputError("shard header", f"{len(raw)} bytes", f"at most {self._room} bytes")
        self._file.seek(8)
        self._file.write(raw)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self.path)
        return 8 + self._room + self._at

    def discard(self) -> None:
        """Close and remove the unfinished file."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._header[name] = {
            "dtype": _NAME_OF[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._at, self._at + flat.numel()],
        }
        for piece in flat.split(_WRITE_BYTES):
            self._file.write(piece.numpy().data)
        self._at += flat.numel()
