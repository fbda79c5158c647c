"""One kernel, two runners: on a GPU through CuPy, on any CPU through the emulator.

``load(source, device)`` gives a kernel to call as ``kernel(grid, block, args, shared_bytes)``; the
text that runs is the same.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from labkit.errors import refuse
from labkit.kernels.signature import Parameter
from labkit.kernels.source import KernelSource


class Kernel(Protocol):
    """What both runners give.

    Calling it launches ``grid`` blocks of ``block`` threads (tuples of 1 to 3 ints). ``args`` are in
    the kernel's parameter order: contiguous torch tensors on the kernel's device, int, float, bool,
    or None for a null pointer. ``shared_bytes`` is dynamic shared memory.
    """

    name: str
    parameters: Sequence[Parameter]
    source: Any

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_bytes: int = 0
    ) -> Any: ...


_loaded: dict[tuple[KernelSource, str], Any] = {}
_lock = threading.Lock()
_loading: dict[tuple[KernelSource, str], threading.Lock] = {}


def load(source: KernelSource, device: Any = "cpu") -> Any:
    """The kernel ready to be launched on ``device``; compiled once a process, and cached on disk.

    Args:
        source: which kernel, with its compile-time constants.
        device: "cpu" (emulator), "cuda", "cuda:1" or a torch.device.

    Returns:
        A :class:`Kernel`; on the CPU also with ``.trace`` (see ``labkit.emulator``), on a GPU also
        with ``.prepare`` and the launch facts (see ``labkit.kernels.gpu``).

    Raises:
        InputError: unknown device, a kernel that does not compile, CuPy or a compiler missing.
    """
    place = device_name(device)
    key = (source, place)
    kernel = _loaded.get(key)
    if kernel is not None:
        return kernel
    # One lock a kernel: two threads compile different kernels side by side, the same one once.
    with _lock:
        own = _loading.setdefault(key, threading.Lock())
    with own:
        if key not in _loaded:
            _loaded[key] = _load(source, place)
        return _loaded[key]


def _load(source: KernelSource, place: str) -> Any:
    if place == "cpu":
        from labkit import emulator

        return emulator.compile(
            source.text,
            source.entry,
            filename=source.filename,
            defines=source.define_map,
            include_dirs=source.include_dirs,
            isolate=False,
            time_limit=None,
        )
    from labkit.kernels.gpu import GpuKernel

    return GpuKernel(source, int(place.partition(":")[2]))


def device_name(device: Any) -> str:
    """``"cpu"`` or ``"cuda:N"``; without a number the current CUDA device.

    Raises:
        InputError: any other device.
    """
    text = str(device).strip().lower()
    if text == "cpu":
        return "cpu"
    found = re.fullmatch(r"cuda(?::(\d+))?", text)
    if found is None:
        refuse("device", repr(device), "cpu, cuda or cuda:N")
    import torch

    if not torch.cuda.is_available():
        given = f"{text!r}, and torch finds no GPU"
        refuse("device", given, "'cpu' (emulator), or a machine with an NVIDIA GPU")
    if found[1] is not None:
        return f"cuda:{int(found[1])}"
    return f"cuda:{torch.cuda.current_device()}"


def forget() -> None:
    """Drop every loaded kernel, so that edited files are compiled again."""
    with _lock:
        _loaded.clear()
        _loading.clear()
