"""Launch arguments to C values and buffers, each error naming the kernel's parameter."""

from __future__ import annotations

import math
import numbers
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.emulator.source import Parameter
from labkit.errors import refuse, require
from labkit.kernels.limits import MAX_BLOCK, MAX_GRID, MAX_THREADS

_KINDS = {"f": "floating point", "h": "float16", "b": "bfloat16", "i": "signed", "u": "unsigned"}
_FLOAT_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Buffer:
    """Memory that a pointer argument names.

    Args:
        name: the parameter it was passed for.
        address: where it lies in this process.
        size: bytes.
        itemsize: bytes an element.
        writable: whether the kernel may write it.
        phase: address modulo 256 that it would have on a GPU, whose allocations are aligned.
        owner: keeps the memory alive.
    """

    name: str
    address: int
    size: int
    itemsize: int
    writable: bool
    phase: int
    owner: Any


@dataclass(frozen=True)
class Bound:
    """Arguments ready for a launch: ``values`` as :func:`labkit.emulator.library.pack` takes them."""

    values: list[tuple[Any, ...]]
    buffers: list[Buffer]


def shape(argument: str, value: Any, limits: Sequence[int]) -> tuple[int, int, int]:
    """A grid or block as three positive integers, checked against CUDA's limits."""
    if isinstance(value, numbers.Integral):
        value = (value,)
    ok = isinstance(value, list | tuple) and 1 <= len(value) <= 3
    ok = ok and all(isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in value)
    require(ok, argument, repr(value), "a tuple of one to three integers")
    sizes = tuple(int(n) for n in value) + (1,) * (3 - len(value))
    for axis, size, limit in zip("xyz", sizes, limits, strict=True):
        require(1 <= size <= limit, f"{argument}.{axis}", size, f"1 to {limit}")
    return sizes[0], sizes[1], sizes[2]


def grid_and_block(grid: Any, block: Any) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Launch shape, checked.

    Raises:
        InputError: not one to three positive integers, or beyond what CUDA allows.
    """
    grid, block = shape("grid", grid, MAX_GRID), shape("block", block, MAX_BLOCK)
    threads = block[0] * block[1] * block[2]
    require(threads <= MAX_THREADS, "block", f"{block}, {threads} threads", f"at most {MAX_THREADS} threads")
    return grid, block


def bind(
    kernel: str, parameters: Sequence[Parameter], signature: Sequence[dict[str, Any]], args: Sequence[Any]
) -> Bound:
    """Arguments for a kernel.

    Args:
        kernel: its name.
        parameters: names and types as written.
        signature: what the compiler made of them (``kind``, ``size``, ``pointee``, ``of``).
        args: torch tensors, numpy arrays, numbers or None, in the kernel's order.

    Raises:
        InputError: names the parameter, what came, what is expected.
    """
    require(isinstance(args, list | tuple), "args", type(args).__name__, "a list in the parameters' order")
    names = ", ".join(p.name for p in parameters)
    expected = f"{len(signature)} ({names})"
    require(len(args) == len(signature), f"arguments of {kernel}", len(args), expected)
    bound = Bound([], [])
    for parameter, facts, value in zip(parameters, signature, args, strict=True):
        if facts["kind"] in "pc":
            _bind_pointer(bound, parameter, facts, value)
        else:
            bound.values.append(("value", _scalar(parameter, facts, value).hex()))
    return bound


# ------------------------------------------------------------------------------------------- pointers


def _bind_pointer(bound: Bound, parameter: Parameter, facts: dict[str, Any], value: Any) -> None:
    if value is None:
        bound.values.append(("null",))
        return
    buffer, kind = _memory(parameter, value, writable=facts["kind"] == "p")
    _check_element(parameter, facts, buffer, kind)
    bound.values.append(("pointer", len(bound.buffers), 0))
    bound.buffers.append(buffer)


def _memory(parameter: Parameter, value: Any, *, writable: bool) -> tuple[Buffer, str]:
    """The memory of a tensor or array and the kind of its elements (f h b i u, or ? for others)."""
    if isinstance(value, np.ndarray):
        return _array(parameter, value, writable)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor(parameter, value, writable, torch)
    received = type(value).__name__
    if hasattr(value, "__cuda_array_interface__"):
        refuse(parameter.name, f"{received} on a GPU", "a tensor in main memory", "call .cpu()")
    if isinstance(value, list | tuple):
        refuse(parameter.name, f"a {received}", f"a tensor for {parameter.type}", "make it a torch.tensor")
    if isinstance(value, np.generic):
        received = f"one number ({received})"
    refuse(parameter.name, received, f"a tensor, a numpy array or None for {parameter.type}")


def _tensor(parameter: Parameter, value: Any, writable: bool, torch: Any) -> tuple[Buffer, str]:
    name = parameter.name
    require(value.device.type == "cpu", name, f"a tensor on {value.device}", "a CPU tensor", "call .cpu()")
    require(value.layout is torch.strided, name, f"a {value.layout} tensor", "a dense tensor")
    contiguous = f"a tensor with strides {tuple(value.stride())} for shape {tuple(value.shape)}"
    require(value.is_contiguous(), name, contiguous, "a contiguous tensor", "call .contiguous()")
    value = value.detach()
    size = value.numel() * value.element_size()
    phase = value.storage_offset() * value.element_size() % 256
    if value.dtype == torch.bfloat16:
        kind = "b"
    elif value.dtype == torch.float16:
        kind = "h"
    elif value.dtype.is_floating_point:
        kind = "f"
    elif value.dtype.is_complex:
        kind = "?"
    else:
        kind = "i" if value.dtype.is_signed and value.dtype != torch.bool else "u"
    return Buffer(name, value.data_ptr(), size, value.element_size(), writable, phase, value), kind


def _array(parameter: Parameter, value: np.ndarray, writable: bool) -> tuple[Buffer, str]:
    name = parameter.name
    require(not value.dtype.hasobject, name, "an array of Python objects", "an array of numbers")
    contiguous = f"an array with strides {value.strides} for shape {value.shape}"
    require(value.flags.c_contiguous, name, contiguous, "a contiguous array", "use numpy.ascontiguousarray")
    if writable and not value.flags.writeable:
        refuse(name, "a read-only array", f"one that {parameter.type} may write", "pass a copy")
    address = value.ctypes.data
    root = value
    while isinstance(root.base, np.ndarray):
        root = root.base
    kind = {"f": "f", "i": "i", "u": "u", "b": "u"}.get(value.dtype.kind, "?")
    if value.dtype == np.float16:
        kind = "h"
    elif value.dtype.name == "bfloat16":
        kind = "b"
    phase = (address - root.ctypes.data) % 256 if value.size else 0
    return Buffer(name, address, value.nbytes, value.dtype.itemsize, writable, phase, value), kind


def _check_element(parameter: Parameter, facts: dict[str, Any], buffer: Buffer, kind: str) -> None:
    """The elements must be what the pointer points to; a vector type takes any element it is made of."""
    size, of = facts["pointee"], facts["of"]
    if not size or of in "-v":
        return
    received = f"elements of {buffer.itemsize} bytes" + (f" ({_KINDS[kind]})" if kind in _KINDS else "")
    if of == "s":
        whole = size % buffer.itemsize == 0 and buffer.size % size == 0
        expected = f"elements that fill whole {parameter.type.rstrip('*').strip()} of {size} bytes"
        require(whole, parameter.name, f"{buffer.size} bytes in {received}", expected)
        return
    expected = f"elements of {size} bytes for {parameter.type}"
    require(buffer.itemsize == size, parameter.name, received, expected, "convert the tensor")
    # numpy has no bfloat16, so its bits come as 16-bit integers.
    bits = of == "b" and kind in "iu" and isinstance(buffer.owner, np.ndarray)
    integers = of in "iu" and kind in "iu"
    expected = f"{_KINDS.get(of, 'the same kind of')} elements for {parameter.type}"
    require(kind == of or bits or integers or kind == "?", parameter.name, received, expected, "convert it")


# -------------------------------------------------------------------------------------------- scalars


def _scalar(parameter: Parameter, facts: dict[str, Any], value: Any) -> bytes:
    kind, size, name = facts["kind"], facts["size"], parameter.name
    if kind == "s":
        return _struct(parameter, size, value)
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, bool | int | float):
        received = "None" if value is None else type(value).__name__
        advice = "call .item()" if hasattr(value, "item") else ""
        refuse(name, received, f"a number for {parameter.type}", advice)
    if kind in "fd":
        number = float(value)
        finite = math.isfinite(number) and size == 4
        require(not finite or abs(number) <= _FLOAT_MAX, name, value, f"a number within {parameter.type}")
        return struct.pack("<f" if size == 4 else "<d", number)
    require(not isinstance(value, float), name, value, f"an integer for {parameter.type}", "use int(…)")
    if _is_bool(parameter.type):
        require(value in (0, 1), name, value, "True or False")
    signed = kind == "i"
    low, high = (-(1 << (8 * size - 1)), (1 << (8 * size - 1)) - 1) if signed else (0, (1 << (8 * size)) - 1)
    require(low <= value <= high, name, value, f"{low} to {high} for {parameter.type}")
    return int(value).to_bytes(size, "little", signed=signed)


def _is_bool(type_text: str) -> bool:
    """Whether a type as written is ``bool``."""
    return type_text.replace("const", "").strip() == "bool"


def _struct(parameter: Parameter, size: int, value: Any) -> bytes:
    """half, bfloat16 and plain structures by value."""
    if isinstance(value, bytes | bytearray):
        expected = f"{size} bytes for {parameter.type}"
        require(len(value) == size, parameter.name, f"{len(value)} bytes", expected)
        return bytes(value)
    if isinstance(value, np.generic) and value.dtype.itemsize == size and size != 2:
        return value.tobytes()
    if size == 2 and isinstance(value, bool | int | float | np.generic):
        number = float(value)
        if "bfloat" in parameter.type:
            return _bfloat16(number)
        fits = not math.isfinite(number) or abs(number) < 65520
        require(fits, parameter.name, number, "a number within ±65504 for half")
        return np.float16(number).tobytes()
    refuse(parameter.name, type(value).__name__, f"{size} bytes for {parameter.type}", "pass bytes")


def _bfloat16(number: float) -> bytes:
    """The nearest bfloat16, ties to even, as two bytes."""
    bits = struct.unpack("<I", np.float32(number).tobytes())[0]
    if math.isnan(number):
        return struct.pack("<H", 0x7FFF)
    return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
