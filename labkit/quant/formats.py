"""W4 and W3 storage: packed signed codes with a scale, and optionally an offset, for each group.

The bit layout is in :mod:`labkit.quant.packing`, sizes in :mod:`labkit.quant.sizes`, and the
K-major Q8_0/Q4_0 weight in :mod:`labkit.quant.grouped`; their names are also importable here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from labkit.errors import refuse, require
from labkit.quant.checks import check_float_dtype, check_rows, check_scales, check_tensor, metadata_int
from labkit.quant.grouped import GroupedWeight, checked_ids
from labkit.quant.packing import pack, pack_w3, pack_w4, unpack, unpack_w3, unpack_w4
from labkit.quant.sizes import PACKED_FORMATS, packed_bytes, padded_k, resolve_group, round_up

__all__ = [
    "GroupedWeight",
    "QuantWeight",
    "concat_rows",
    "pack_w3",
    "pack_w4",
    "packed_bytes",
    "padded_k",
    "unpack_w3",
    "unpack_w4",
]


@dataclass(frozen=True, eq=False)
class QuantWeight:
    """A weight of N output rows and K input columns: ``w = q * scale (+ offset)`` by group of columns.

    Attributes:
        format: "w4" (q in -8..7) or "w3" (q in -4..3).
        packed: uint8 [N, Kp/2] or [N, 3Kp/8]; see :mod:`labkit.quant.packing` for the bits.
        scales: float16 [N, Kp/G], finite; may be negative or zero.
        offset: None, or float16/float32 [N, Kp/G], finite.
        n: output rows.
        k: input columns, without padding.
        group_size: G: 16, 32, 64, 128, or Kp when one group is a whole row.
        k_order: None, or int32 [K]: stored column j holds input column ``k_order[j]``
            (act-order checkpoints group columns that are not neighbours).

    Kp is K rounded up to whole groups and whole bytes. Codes of the padding are zero by
    convention, and whatever they hold never reaches a result: dequantise stops at K.

    Raises:
        InputError: a wrong shape, dtype, group size or non-finite scale, by name.
    """

    format: str
    packed: Tensor
    scales: Tensor
    offset: Tensor | None
    n: int
    k: int
    group_size: int
    k_order: Tensor | None = None

    def __post_init__(self) -> None:
        require(self.format in PACKED_FORMATS, "format", repr(self.format), "w4 or w3")
        for name in ("n", "k"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, "a whole number >= 1")
        require(isinstance(self.group_size, int), "group_size", repr(self.group_size), "a whole number")
        resolve_group(self.format, self.k, self.group_size)
        kp = self.k_padded
        groups = (self.n, kp // self.group_size)
        width = kp // 2 if self.format == "w4" else kp // 8 * 3
        check_tensor("packed", self.packed, (torch.uint8,), (self.n, width))
        check_tensor("scales", self.scales, (torch.float16,), groups)
        check_scales("scales", self.scales, device=self.packed.device)
        if self.offset is not None:
            check_tensor("offset", self.offset, (torch.float16, torch.float32), groups)
            check_scales("offset", self.offset, device=self.packed.device)
        if self.k_order is not None:
            check_tensor("k_order", self.k_order, (torch.int32, torch.int64), (self.k,))
            order = self.k_order.to(self.packed.device, torch.int32)
            whole = torch.equal(
                order.sort().values, torch.arange(self.k, dtype=torch.int32, device=order.device)
            )
            require(whole, "k_order", "not a permutation", f"each of 0..{self.k - 1} once")
            object.__setattr__(self, "k_order", order.contiguous())
        for name, tensor in self.tensors().items():
            object.__setattr__(self, name, tensor.detach().contiguous())

    @classmethod
    def from_codes(
        cls,
        format: str,
        codes: Tensor,
        scales: Tensor,
        offset: Tensor | None = None,
        *,
        group_size: int | str,
        k_order: Tensor | None = None,
    ) -> QuantWeight:
        """Pad and pack ready-made codes.

        Args:
            format: "w4" or "w3".
            codes: int8 [N, K] in the range of the format; K may be any number >= 1.
            scales: float16 [N, Kp/G].
            offset: None or float16/float32 [N, Kp/G].
            group_size: G, or "row".
            k_order: see the class.
        """
        require(format in PACKED_FORMATS, "format", repr(format), "w4 or w3")
        require(isinstance(codes, Tensor) and codes.ndim == 2, "codes", type(codes).__name__, "int8 [N, K]")
        n, k = codes.shape
        group = resolve_group(format, k, group_size)
        if padding := round_up(k, group) - k:
            codes = torch.nn.functional.pad(codes, (0, padding))
        return cls(format, pack(codes, format), scales, offset, n, k, group, k_order)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), without padding."""
        return self.n, self.k

    @property
    def k_padded(self) -> int:
        """Kp: K rounded up to whole groups and whole bytes."""
        return round_up(self.k, self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes held by all tensors, padding included."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """Bits held for each of the N*K weights."""
        return 8 * self.nbytes / (self.n * self.k)

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.packed.device

    def codes(self) -> Tensor:
        """Signed codes in stored column order: int8 [N, K]."""
        return unpack(self.packed, self.k, self.format)

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> Tensor:
        """Weights as floats, computed in float32 (float64 when asked) and rounded once.

        Args:
            dtype: float16, bfloat16, float32 or float64.
            rows: a slice of the rows, or None for all.

        Returns:
            [rows, K] of ``dtype``, columns in input order.
        """
        values = self.dequantize_stored(dtype, rows)
        if self.k_order is None:
            return values
        return values[:, torch.argsort(self.k_order)]

    def dequantize_stored(self, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> Tensor:
        """As :meth:`dequantize`, but columns in stored order: column j is input ``k_order[j]``."""
        check_float_dtype(dtype)
        picked = check_rows(rows, self.n)
        offset = None if self.offset is None else self.offset[picked]
        return self._values(self.packed[picked], self.scales[picked], offset, dtype)

    def _values(self, packed: Tensor, scales: Tensor, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[rows, K] of ``dtype`` for some of the rows, columns in stored order."""
        codes = unpack(packed, self.k_padded, self.format)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        values = codes.view(*scales.shape, self.group_size).to(work)
        del codes  # a row chunk must fit its memory budget
        values *= scales[..., None]
        if offset is not None:
            values += offset[..., None]
        return values.view(-1, self.k_padded)[:, : self.k].to(dtype)

    def gather_rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows of an embedding table: integer ids of any shape to [*ids.shape, K] of ``dtype``."""
        if ids.numel() == 0:
            return torch.empty(*ids.shape, self.k, dtype=dtype, device=self.device)
        return self.gather_unchecked(checked_ids(ids, self.n).to(self.device), dtype).view(*ids.shape, self.k)

    def gather_unchecked(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [R, K] for int64 ids [R] that are known to be good; a CUDA graph can hold it."""
        offset = None if self.offset is None else self.offset.index_select(0, ids)
        packed, scales = self.packed.index_select(0, ids), self.scales.index_select(0, ids)
        values = self._values(packed, scales, offset, dtype)
        return values if self.k_order is None else values[:, torch.argsort(self.k_order)]

    def select_rows(self, index: Tensor) -> QuantWeight:
        """The weight made of the rows ``index`` (int64 [R]), in that order; nothing is dequantised."""
        flat = checked_ids(index, self.n).to(self.device)
        require(flat.numel() >= 1, "index", "no rows", "at least one row")
        return replace(
            self,
            packed=self.packed[flat],
            scales=self.scales[flat],
            offset=None if self.offset is None else self.offset[flat],
            n=flat.numel(),
        )

    def to(self, device: torch.device | str) -> QuantWeight:
        """The same weight on ``device``; itself when it is there already."""
        if torch.device(device) == self.device:
            return self
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors to store, by field name; optional ones only when present."""
        found = {"packed": self.packed, "scales": self.scales}
        if self.offset is not None:
            found["offset"] = self.offset
        if self.k_order is not None:
            found["k_order"] = self.k_order
        return found

    def metadata(self) -> dict[str, Any]:
        """Everything but the tensors; JSON values."""
        return {"format": self.format, "n": self.n, "k": self.k, "group_size": self.group_size}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> QuantWeight:
        """Undo :meth:`tensors` and :meth:`metadata`."""
        for name in ("packed", "scales"):
            require(name in tensors, name, "no such tensor", "tensors packed and scales")
        n, k, group = (metadata_int(metadata, field) for field in ("n", "k", "group_size"))
        return cls(
            str(metadata.get("format")),
            tensors["packed"],
            tensors["scales"],
            tensors.get("offset"),
            n,
            k,
            group,
            tensors.get("k_order"),
        )


def concat_rows(weights: Sequence[QuantWeight]) -> QuantWeight:
    """Stack weights that read the same input (Q, K and V; gate and up) into one.

    Args:
        weights: of one format, K, group size and column order. Offsets may differ in kind:
            a missing one becomes zeros, and float16 becomes float32 where another is; both exact.

    Returns:
        One weight of sum(N) rows.

    Raises:
        InputError: an empty list, or weights that cannot be stacked.
    """
    require(len(weights) >= 1, "weights", "an empty list", "at least one weight")
    first = weights[0]
    for i, other in enumerate(weights[1:], 1):
        for field in ("format", "k", "group_size", "device"):
            mine, theirs = getattr(first, field), getattr(other, field)
            require(mine == theirs, f"weights[{i}].{field}", theirs, f"{mine}, as in weights[0]")
        same = (first.k_order is None) == (other.k_order is None)
        if same and first.k_order is not None and other.k_order is not None:
            same = torch.equal(first.k_order, other.k_order)
        if not same:
            refuse(f"weights[{i}].k_order", "another column order", "that of weights[0]")
    offset = None
    dtypes = {weight.offset.dtype for weight in weights if weight.offset is not None}
    if dtypes:
        dtype = torch.float32 if torch.float32 in dtypes else torch.float16
        offset = torch.cat([_offset_or_zeros(weight, dtype) for weight in weights])
    return replace(
        first,
        packed=torch.cat([weight.packed for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        offset=offset,
        n=sum(weight.n for weight in weights),
    )


def _offset_or_zeros(weight: QuantWeight, dtype: torch.dtype) -> Tensor:
    if weight.offset is None:
        return torch.zeros_like(weight.scales, dtype=dtype)
    return weight.offset.to(dtype)
