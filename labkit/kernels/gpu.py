"""A kernel on an NVIDIA GPU: our cubin, loaded and launched through CuPy, on torch's current stream.

CuPy's own compile call is not used: the machine code is the same that ``labkit resources`` counts.

Rules of a launch:

- It is asynchronous, on the stream that torch has as current on the kernel's device at the call.
  A tensor that is freed after the call is safe as long as it was allocated on that stream, since
  torch hands its memory on in stream order; one of another stream needs ``record_stream``.
- Temporaries of a wrapper come from ``torch.empty`` on the current stream. torch's allocator keeps
  a pool a stream, so two streams never share one, and takes them from the graph's pool in a capture.
- CUDA graphs: load the kernel (``labkit.kernels.runner.load``) before the capture; a launch that
  asks for more than 48 KiB of shared memory is announced with :meth:`GpuKernel.prepare`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from importlib import util
from typing import Any

import torch

from labkit.errors import refuse, require
from labkit.kernels import nvrtc, overlapped
from labkit.kernels.arguments import convert, launch_shape
from labkit.kernels.signature import Parameter
from labkit.kernels.source import KernelSource
from labkit.probes.fixes import pip_install

_FREE_SHARED = 48 * 1024  # a block may have this much shared memory without asking


def cupy_fix() -> str:
    """The line that installs the CuPy that belongs to torch's CUDA."""
    cuda = torch.version.cuda or "12"
    return pip_install(f"cupy-cuda{cuda.split('.')[0]}x")


def why_not() -> str:
    """Why kernels cannot run on a GPU here; an empty string when they can. Loads nothing."""
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    if util.find_spec("cupy") is None:
        return "CuPy is not installed: " + cupy_fix()
    if not nvrtc.libraries():
        return "libnvrtc was not found; labkit doctor says how to install it"
    return ""


@functools.cache
def _cupy() -> Any:
    try:
        import cupy
        from cupy.cuda.function import Module
        from cupy_backends.cuda.api import driver
    except ImportError as error:
        refuse("cupy", f"{type(error).__name__}: {error}", "CuPy", cupy_fix())
    return cupy, Module, driver


class _Handle:
    """A stream as the CUDA stream protocol hands it from one library to another."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@functools.lru_cache(maxsize=256)
def _stream(pointer: int) -> Any:
    cupy = _cupy()[0]
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(pointer))
    return cupy.cuda.ExternalStream(pointer)  # CuPy 13


class GpuKernel:
    """One kernel, loaded on one GPU. Use :func:`labkit.kernels.runner.load`.

    Attributes:
        name: entry in the source.
        parameters: in order.
        source: what it was compiled from.
        device: the torch device it is on.
        registers, local_bytes, static_shared, max_threads: what the driver says of the loaded
            kernel (``cuFuncGetAttribute``): registers a thread, bytes of local memory a thread,
            bytes of static shared memory, threads of the largest block.
        compiled: the machine code.

    Raises:
        InputError: no GPU of that index, CuPy or NVRTC missing, text that does not compile, or a
            CUDA graph being captured (a module cannot be loaded then).
    """

    def __init__(self, source: KernelSource, index: int = 0) -> None:
        count = torch.cuda.device_count()
        require(index < count, "device", f"cuda:{index}", f"one of {count} GPUs")
        self.source = source
        self.name = source.name
        self.parameters: tuple[Parameter, ...] = source.parameters
        self.device = torch.device("cuda", index)
        self._cupy, module_type, self._driver = _cupy()
        self.compiled = nvrtc.compile_cubin(source, nvrtc.target_for(torch.cuda.get_device_capability(index)))
        with torch.cuda.device(index):
            torch.cuda.init()
            if torch.cuda.is_current_stream_capturing():
                refuse(
                    "kernel",
                    f"first use of {self.name} while a CUDA graph is captured",
                    "a kernel that was loaded before",
                    "run the call once before the capture",
                )
            with self._cupy.cuda.Device(index) as place:
                module = module_type()
                try:
                    module.load(self.compiled.cubin)
                except self._driver.CUDADriverError as error:
                    expected = "machine code that this driver loads, and memory for it"
                    refuse(
                        "kernel", f"{self.name} for {self.compiled.arch}: {error}", expected, "labkit doctor"
                    )
                self._function = module.get_function(self.compiled.symbol)
                # Asking also makes the driver load the code now, not at the first launch.
                self.registers = self._attribute("NUM_REGS")
                self.local_bytes = self._attribute("LOCAL_SIZE_BYTES")
                self.static_shared = self._attribute("SHARED_SIZE_BYTES")
                self.max_threads = self._attribute("MAX_THREADS_PER_BLOCK")
                most = place.attributes.get("MaxSharedMemoryPerBlockOptin", _FREE_SHARED)
        self._most_shared = int(most) - self.static_shared
        self._allowed_shared = max(0, _FREE_SHARED - self.static_shared)
        self._can_overlap = overlapped.supported(torch.cuda.get_device_capability(index))
        self._lock = threading.Lock()

    def prepare(self, shared_bytes: int = 0) -> GpuKernel:
        """Allow launches with this much dynamic shared memory; needed before a graph capture.

        Raises:
            InputError: more than a block of this GPU can have.
        """
        require(
            isinstance(shared_bytes, int) and 0 <= shared_bytes <= self._most_shared,
            "shared_bytes",
            shared_bytes,
            f"0 to {self._most_shared} (bytes of dynamic shared memory of a block, beside "
            f"{self.static_shared} static)",
        )
        if shared_bytes > self._allowed_shared:
            with self._lock, self._cupy.cuda.Device(self.device.index):
                if shared_bytes > self._allowed_shared:  # another thread may have allowed more
                    attribute = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    self._driver.funcSetAttribute(self._function.ptr, attribute, shared_bytes)
                    self._allowed_shared = shared_bytes
        return self

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        *,
        overlap: bool = False,
    ) -> None:
        """Launch on torch's current stream and return at once.

        Args:
            grid: blocks, one to three numbers; x to 2^31 - 1, y and z to 65,535.
            block: threads, one to three numbers.
            args: in the kernel's order: contiguous tensors on this device, numbers, None.
            shared_bytes: dynamic shared memory a block.
            overlap: the kernel may start before those ahead of it in the stream have finished, where the
                GPU can do that (see :mod:`labkit.kernels.overlapped`); it waits in the kernel.

        Raises:
            InputError: what does not fit, by name. Errors inside the kernel surface at a later
                synchronise, as CUDA reports them.
        """
        blocks, threads = launch_shape(grid, block, max_threads=self.max_threads)
        values = convert(self.parameters, args, self.device, entry=self.name)
        self.prepare(shared_bytes)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with torch.cuda.device(self.device), self._cupy.cuda.Device(self.device.index):
            if overlap and self._can_overlap:
                pointer = self._function.ptr
                overlapped.launch(pointer, blocks, threads, values, shared_bytes, stream, name=self.name)
                return
            self._function(blocks, threads, tuple(values), shared_mem=shared_bytes, stream=_stream(stream))

    def max_active_blocks(self, threads: int, shared_bytes: int = 0) -> int:
        """Blocks an SM can hold, as the driver counts (``cuOccupancyMaxActiveBlocksPerMultiprocessor``)."""
        self.prepare(shared_bytes)
        with self._cupy.cuda.Device(self.device.index):
            return int(
                self._driver.occupancyMaxActiveBlocksPerMultiprocessor(
                    self._function.ptr, threads, shared_bytes
                )
            )

    def _attribute(self, name: str) -> int:
        number = getattr(self._driver, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(self._driver.funcGetAttribute(number, self._function.ptr))

    def __repr__(self) -> str:
        return f"GpuKernel({self.name} on {self.device}, {self.compiled.arch}, {self.registers} registers)"
