"""Q8_0 and Q4_0 in the K-major layout of the z-split kernel: one int8 code a byte, FP32 scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.errors import require
from labkit.quant.checks import check_float_dtype, check_rows, check_scales, check_tensor, metadata_int
from labkit.quant.packing import CODE_RANGE
from labkit.quant.sizes import GROUPED_FORMATS, GROUPED_GROUP_SIZE, N_ALIGN, round_up


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight of N output rows and K input columns: ``w[n, k] = codes_t[k, n] * scales_t[k // G, n]``.

    Attributes:
        format: "q8_0" (codes -128..127) or "q4_0" (codes -8..7, unpacked to a byte each).
        codes_t: int8 [Kp, Npad]; Kp = K padded to 32, Npad = N padded to 16; padding is zero.
        scales_t: float32 [Kp/G, Npad], finite.
        n: output rows.
        k: input columns.
        group_size: 32.

    Raises:
        InputError: a wrong shape, dtype, code, scale or group size, by name.
    """

    format: str
    codes_t: Tensor
    scales_t: Tensor
    n: int
    k: int
    group_size: int = GROUPED_GROUP_SIZE

    def __post_init__(self) -> None:
        require(self.format in GROUPED_FORMATS, "format", repr(self.format), "q8_0 or q4_0")
        for name in ("n", "k"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, "a whole number >= 1")
        require(self.group_size == GROUPED_GROUP_SIZE, "group_size", self.group_size, f"{GROUPED_GROUP_SIZE}")
        kp, npad = self.k_padded, round_up(self.n, N_ALIGN)
        check_tensor("codes_t", self.codes_t, (torch.int8,), (kp, npad))
        check_tensor("scales_t", self.scales_t, (torch.float32,), (kp // self.group_size, npad))
        check_scales("scales_t", self.scales_t, device=self.codes_t.device)
        if self.format == "q4_0":
            low, high = CODE_RANGE["q4_0"]
            smallest, largest = (int(value) for value in self.codes_t.aminmax())
            require(
                low <= smallest and largest <= high,
                "codes_t",
                f"values {smallest}..{largest}",
                f"{low}..{high} (q4_0)",
            )
        object.__setattr__(self, "codes_t", self.codes_t.detach().contiguous())
        object.__setattr__(self, "scales_t", self.scales_t.detach().contiguous())

    @classmethod
    def from_rows(cls, format: str, codes: Tensor, scales: Tensor) -> GroupedWeight:
        """Transpose and pad row-major codes.

        Args:
            format: "q8_0" or "q4_0".
            codes: int8 [N, K].
            scales: float [N, ceil(K/32)]; kept as float32 (a float16 scale is exact in it).
        """
        require(isinstance(codes, Tensor) and codes.ndim == 2, "codes", type(codes).__name__, "int8 [N, K]")
        n, k = codes.shape
        kp, npad = round_up(k, GROUPED_GROUP_SIZE), round_up(n, N_ALIGN)
        check_tensor("codes", codes, (torch.int8,), (n, k))
        check_tensor(
            "scales",
            scales,
            (torch.float16, torch.bfloat16, torch.float32),
            (n, kp // GROUPED_GROUP_SIZE),
        )
        codes_t = torch.zeros(kp, npad, dtype=torch.int8, device=codes.device)
        codes_t[:k, :n] = codes.t()
        scales_t = torch.zeros(kp // GROUPED_GROUP_SIZE, npad, dtype=torch.float32, device=codes.device)
        scales_t[:, :n] = scales.t()
        return cls(format, codes_t, scales_t, n, k)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), without padding."""
        return self.n, self.k

    @property
    def offset(self) -> None:
        """None: these formats have none. Here so that both kinds of weight answer."""
        return None

    @property
    def k_order(self) -> None:
        """None: these formats keep their columns in order."""
        return None

    @property
    def k_padded(self) -> int:
        """K rounded up to whole groups."""
        return round_up(self.k, self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.codes_t.nbytes + self.scales_t.nbytes

    @property
    def bits_per_weight(self) -> float:
        """Bits held for each of the N*K weights."""
        return 8 * self.nbytes / (self.n * self.k)

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes_t.device

    def codes(self) -> Tensor:
        """Codes row by row: int8 [N, K]."""
        return self.codes_t[: self.k, : self.n].t().contiguous()

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> Tensor:
        """Weights as floats, computed in float32 and rounded once: [rows, K] of ``dtype``."""
        return self.dequantize_t(dtype, rows).t().contiguous()

    def dequantize_t(self, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> Tensor:
        """As :meth:`dequantize`, but as it is stored, K-major: [K, rows] of ``dtype``; nothing is turned."""
        check_float_dtype(dtype)
        picked = check_rows(rows, self.n)
        return self._columns(self.codes_t[:, picked], self.scales_t[:, picked], dtype)

    def gather_rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows of an embedding table.

        Args:
            ids: integer tensor of any shape, values 0..N-1.

        Returns:
            [*ids.shape, K] of ``dtype``.
        """
        flat = checked_ids(ids, self.n).to(self.device)
        return self.gather_unchecked(flat, dtype).reshape(*ids.shape, self.k)

    def gather_unchecked(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [R, K] for int64 ids [R] that are known to be good; a CUDA graph can hold it."""
        codes, scales = self.codes_t.index_select(1, ids), self.scales_t.index_select(1, ids)
        return self._columns(codes, scales, dtype).t()

    def select_rows(self, index: Tensor) -> GroupedWeight:
        """The weight made of the rows ``index`` (int64 [R]), in that order; codes move unchanged."""
        flat = checked_ids(index, self.n).to(self.device)
        rows = flat.numel()
        require(rows >= 1, "index", "no rows", "at least one row")
        npad = round_up(rows, N_ALIGN)
        codes_t = torch.zeros(self.k_padded, npad, dtype=torch.int8, device=self.device)
        scales_t = torch.zeros(self.scales_t.shape[0], npad, dtype=torch.float32, device=self.device)
        codes_t[:, :rows] = self.codes_t[:, flat]
        scales_t[:, :rows] = self.scales_t[:, flat]
        return GroupedWeight(self.format, codes_t, scales_t, rows, self.k, self.group_size)

    def to(self, device: torch.device | str) -> GroupedWeight:
        """The same weight on ``device``; itself when it is there already."""
        if torch.device(device) == self.device:
            return self
        return GroupedWeight(
            self.format,
            self.codes_t.to(device),
            self.scales_t.to(device),
            self.n,
            self.k,
            self.group_size,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Tensors to store, by field name."""
        return {"codes_t": self.codes_t, "scales_t": self.scales_t}

    def metadata(self) -> dict[str, Any]:
        """Everything but the tensors; JSON values."""
        return {"format": self.format, "n": self.n, "k": self.k, "group_size": self.group_size}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> GroupedWeight:
        """Undo :meth:`tensors` and :meth:`metadata`."""
        for name in ("codes_t", "scales_t"):
            require(name in tensors, name, "no such tensor", "tensors codes_t and scales_t")
        n, k, group = (metadata_int(metadata, field) for field in ("n", "k", "group_size"))
        return cls(str(metadata.get("format")), tensors["codes_t"], tensors["scales_t"], n, k, group)

    def _columns(self, codes_t: Tensor, scales_t: Tensor, dtype: torch.dtype) -> Tensor:
        groups, columns = scales_t.shape
        work = torch.float64 if dtype == torch.float64 else torch.float32
        values = codes_t.reshape(groups, self.group_size, columns).to(work)
        values *= scales_t[:, None, :]
        return values.view(self.k_padded, columns)[: self.k].to(dtype)


def checked_ids(ids: Tensor, n: int) -> Tensor:
    """Flat int64 row numbers, each in 0..n-1, or :class:`InputError`."""
    ok = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dtype != torch.bool
    require(ok, "ids", getattr(ids, "dtype", type(ids).__name__), "an integer tensor of row numbers")
    flat = ids.reshape(-1).to(torch.int64)
    if flat.numel():
        smallest, largest = (int(value) for value in flat.aminmax())
        require(smallest >= 0 and largest < n, "ids", f"{smallest}..{largest}", f"0..{n - 1}")
    return flat
