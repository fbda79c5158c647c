"""Programmatic dependent launch through the driver: a kernel may start while the one before it finishes.

CuPy's launch has no attributes, so this calls ``cuLaunchKernelEx`` itself. From compute capability 9.0 on,
and only for kernels that call ``grid_dependency_wait`` (ptx.cuh) before they read what others wrote.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

from labkit.errors import refuse

LEAST_CAPABILITY = (9, 0)

_PLACE = 8  # bytes of an argument in the buffer of all
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    # CUlaunchAttribute: an enum, padding to eight bytes, a union of 64 bytes.
    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class _Config(ctypes.Structure):
    # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@functools.cache
def _launch_function() -> Any:
    """``cuLaunchKernelEx``, or None with a driver before CUDA 11.8."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        function = driver.cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    function.argtypes = [
        ctypes.POINTER(_Config),
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_void_p),
    ]
    function.restype = ctypes.c_int
    return function


def supported(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability, with this driver, can launch so."""
    return tuple(capability) >= LEAST_CAPABILITY and _launch_function() is not None


def launch(
    function: int,
    grid: Sequence[int],
    block: Sequence[int],
    values: Sequence[Any],
    shared_bytes: int,
    stream: int,
    *,
    name: str,
) -> None:
    """Launch ``function`` (a CUfunction) on ``stream``; the context is the current one.

    Args:
        values: numpy scalars of at most eight bytes, in the kernel's order.

    Raises:
        InputError: the driver refused; its error number.
    """
    # The driver copies the values during the call, each from a place of its own.
    places = b"".join([value.tobytes().ljust(_PLACE, b"\0") for value in values])
    held = ctypes.create_string_buffer(places, max(1, len(places)))
    begin = ctypes.addressof(held)
    pointers = (ctypes.c_void_p * max(1, len(values)))(*range(begin, begin + len(places), _PLACE))
    attribute = _Attribute(id=_SERIALIZATION, value=1)
    config = _Config(
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*block),
        shared_bytes,
        stream,
        ctypes.pointer(attribute),
        1,
    )
    status = _launch_function()(ctypes.byref(config), function, pointers, None)
    if status != 0:
        refuse(
            "launch",
            f"{name} with grid {tuple(grid)}, block {tuple(block)}, {shared_bytes} bytes of shared memory: "
            f"CUDA error {status}",
            "a launch that the driver takes",
        )
