"""Launch shapes and arguments of a kernel, checked against its declaration before anything runs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from labkit.errors import InputError, refuse, require
from labkit.kernels.limits import MAX_BLOCK, MAX_GRID, MAX_THREADS
from labkit.kernels.signature import Parameter, convert_scalar

_FLOATS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
_SCALARS = {
    ("b", 1): np.bool_,
    ("i", 1): np.int8,
    ("i", 2): np.int16,
    ("i", 4): np.int32,
    ("i", 8): np.int64,
    ("u", 1): np.uint8,
    ("u", 2): np.uint16,
    ("u", 4): np.uint32,
    ("u", 8): np.uint64,
    ("f", 4): np.float32,
    ("f", 8): np.float64,
    ("h", 2): np.float16,
}

Shape = tuple[int, int, int]


def launch_shape(
    grid: Sequence[int], block: Sequence[int], *, max_threads: int = MAX_THREADS
) -> tuple[Shape, Shape]:
    """Grid and block as three numbers each.

    Args:
        grid: blocks along x, y, z; one to three numbers.
        block: threads along x, y, z.
        max_threads: most threads of a block of this kernel (``__launch_bounds__``, registers).

    Raises:
        InputError: not one to three whole numbers, less than 1, or above a limit of CUDA.
    """
    blocks, threads = _three("grid", grid, MAX_GRID), _three("block", block, MAX_BLOCK)
    count = threads[0] * threads[1] * threads[2]
    require(count <= max_threads, "block", f"{block} = {count} threads", f"at most {max_threads} threads")
    return blocks, threads


def _three(name: str, given: Sequence[int], limits: Shape) -> Shape:
    if type(given) is tuple and len(given) <= 3:  # a launch waits for this: messages only where one is due
        x, y, z = (*given, 1, 1)[:3] if given else (0, 0, 0)
        whole = type(x) is type(y) is type(z) is int
        if whole and 0 < x <= limits[0] and 0 < y <= limits[1] and 0 < z <= limits[2]:
            return x, y, z
    ok = isinstance(given, tuple | list | torch.Size) and 1 <= len(given) <= 3
    require(ok, name, repr(given), "a tuple of one to three whole numbers")
    values = [1, 1, 1]
    for axis, (value, limit) in enumerate(zip(given, limits, strict=False)):
        try:
            values[axis] = operator.index(value)
        except TypeError:
            refuse(f"{name}.{'xyz'[axis]}", repr(value), "a whole number")
        require(1 <= values[axis] <= limit, f"{name}.{'xyz'[axis]}", values[axis], f"1 to {limit}")
    return values[0], values[1], values[2]


def convert(
    parameters: Sequence[Parameter], args: Sequence[Any], device: torch.device, *, entry: str = "kernel"
) -> list[np.generic]:
    """Arguments as the launch takes them: addresses as uint64, scalars in their declared C type.

    Args:
        parameters: of the kernel.
        args: torch tensors, numbers, None for a null pointer.
        device: where every tensor must be.

    Raises:
        InputError: wrong count, a tensor elsewhere, strided, or of another element type, a number
            that does not fit; names the parameter.
    """
    if len(args) != len(parameters):
        listed = ", ".join(str(parameter) for parameter in parameters)
        refuse("args", f"{len(args)} arguments", f"{len(parameters)} for {entry}({listed})")
    return [
        _quickly(parameter, value, device)
        or (_pointer(parameter, value, device) if parameter.pointer else _scalar(parameter, value))
        for parameter, value in zip(parameters, args, strict=True)
    ]


@functools.lru_cache(maxsize=4096)
def _plain(parameter: Parameter) -> tuple[frozenset[torch.dtype], int, Any, int, int]:
    """What most arguments of a parameter are: dtypes and alignment of its tensors, or type and range."""
    if not parameter.pointer:
        bits = 8 * (parameter.size or 0)
        if parameter.kind == "i":
            return frozenset(), 1, _SCALARS["i", bits // 8], -(1 << bits - 1), (1 << bits - 1) - 1
        if parameter.kind == "u":
            return frozenset(), 1, _SCALARS["u", bits // 8], 0, (1 << bits) - 1
        return frozenset(), 1, None, 0, -1
    fitting = set()
    for dtype in {one for one in vars(torch).values() if isinstance(one, torch.dtype)}:
        try:
            check_elements(parameter, dtype, 0)
        except InputError:
            continue
        fitting.add(dtype)
    vector = parameter.pointee not in _FLOATS and parameter.kind is None
    return frozenset(fitting), (parameter.size or 1) if vector else 1, None, 0, -1


def _quickly(parameter: Parameter, value: Any, device: torch.device) -> np.generic | None:
    """The argument if it is a usual one; None leaves it, and what is wrong with it, to the functions below.

    An eager launch waits for this once an argument. (A zero is falsy, and takes the long way.)
    """
    dtypes, alignment, scalar, least, most = _plain(parameter)
    if scalar is not None:
        return scalar(value) if type(value) is int and least <= value <= most else None
    if isinstance(value, torch.Tensor) and value.dtype in dtypes:
        address = value.data_ptr()
        if value.device == device and value.is_contiguous() and address % alignment == 0:
            return np.uint64(address)
    return None


def _pointer(parameter: Parameter, value: Any, device: torch.device) -> np.generic:
    if value is None:
        return np.uint64(0)
    where = f"argument {parameter.name}"
    if not isinstance(value, torch.Tensor):
        refuse(where, type(value).__name__, f"a torch tensor on {device}, or None ({parameter})")
    require(value.device == device, where, f"a tensor on {value.device}", f"one on {device}")
    require(
        value.is_contiguous(),
        where,
        f"strides {value.stride()} of shape {list(value.shape)}",
        "a contiguous tensor",
        "pass x.contiguous()",
    )
    check_elements(parameter, value.dtype, value.data_ptr())
    return np.uint64(value.data_ptr())


def check_elements(parameter: Parameter, dtype: torch.dtype, address: int) -> None:
    """Refuse a tensor whose elements are not what the pointer reads.

    A float pointer takes its own dtype only; an integer pointer any integer dtype of its width; a
    vector pointer (``uint4*``, ``half2*``) whole elements, at an address it can be read from.

    Raises:
        InputError: names the parameter, the dtype and what fits.
    """
    where, size = f"argument {parameter.name}", parameter.size
    received = str(dtype).removeprefix("torch.")
    if parameter.pointee in _FLOATS:
        expected = _FLOATS[parameter.pointee]
        name = str(expected).removeprefix("torch.")
        require(dtype == expected, where, received, f"{name} ({parameter.type})")
    elif parameter.kind is not None:
        ok = dtype.itemsize == size and not dtype.is_floating_point and not dtype.is_complex
        require(ok, where, received, f"a {size}-byte integer dtype ({parameter.type})")
    elif size is not None:
        require(size % dtype.itemsize == 0, where, received, f"a dtype that divides {parameter.pointee}")
        require(
            address % size == 0,
            where,
            f"an address that is {address % size} bytes past a multiple of {size}",
            f"alignment to {size} bytes ({parameter.type})",
        )


def _scalar(parameter: Parameter, value: Any) -> np.generic:
    converted = convert_scalar(parameter, value)
    if parameter.kind == "g":
        # No NumPy scalar has this type; its two bytes travel as an integer.
        bits = torch.tensor(converted, dtype=torch.bfloat16).view(torch.int16)
        return np.int16(bits.item())
    assert parameter.kind is not None and parameter.size is not None  # convert_scalar refused the rest
    return _SCALARS[parameter.kind, parameter.size](converted)
