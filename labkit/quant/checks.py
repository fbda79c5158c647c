"""Checks shared by the storage formats: each error names the field, what came, what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.errors import refuse, require
from labkit.quant.packing import describe

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_float_dtype(dtype: torch.dtype, argument: str = "dtype") -> torch.dtype:
    """Return ``dtype``, or raise :class:`InputError` when it is not a float type labkit computes in."""
    require(dtype in FLOAT_DTYPES, argument, dtype, "float16, bfloat16, float32 or float64")
    return dtype


def check_tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> Tensor:
    """Return ``value`` when it is a tensor of one of ``dtypes`` and of exactly ``shape``."""
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    expected = f"{names} {list(shape)}"
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        refuse(name, describe(value), expected)
    if tuple(value.shape) != shape:
        turned = value.ndim == 2 and tuple(value.shape) == shape[::-1]
        refuse(name, describe(value), expected, "this looks transposed: pass .t()" if turned else "")
    return value


def check_scales(name: str, value: Tensor, *, device: torch.device) -> None:
    """Refuse scales or offsets on another device than the codes, or with NaN or Inf in them."""
    require(value.device == device, name, f"on {value.device}", f"on {device}, where the codes are")
    if value.device.type == "meta":
        return
    finite = torch.isfinite(value)
    if not bool(finite.all()):
        row, group = (int(i) for i in (~finite).nonzero()[0])
        refuse(name, f"{value[row, group].item()} at [{row}, {group}]", "finite values")


def check_shape(weight: Any, n: int, k: int, argument: str = "weight") -> None:
    """Refuse a weight (tensor, QuantWeight or GroupedWeight) that is not [n, k], naming a transposed one."""
    shape = tuple(weight.shape)
    if shape == (n, k):
        return
    turned = shape == (k, n)
    refuse(argument, list(shape), f"[{n}, {k}]", "this looks transposed: pass .t()" if turned else "")


def check_rows(rows: slice | None, n: int) -> slice:
    """A slice of 0..n-1 with a positive step; ``None`` means every row."""
    if rows is None:
        return slice(0, n)
    require(isinstance(rows, slice), "rows", type(rows).__name__, "a slice, or None for every row")
    start, stop, step = rows.indices(n)
    require(step >= 1, "rows", rows, "a slice with a positive step")
    return slice(start, max(start, stop), step)


def metadata_int(metadata: Mapping[str, Any], field: str) -> int:
    """A whole number out of stored metadata, which may hold it as text."""
    value = metadata.get(field)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        refuse(f"metadata {field}", repr(value), "a whole number")
    return value
