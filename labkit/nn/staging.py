"""Pinned memory between the CPU and a GPU: activations there and results back, one synchronise a call."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor


class Staging:
    """Pinned buffers of one thread and one stream, grown when a call needs more and used again.

    Pageable memory would make each copy wait; pinned, all of a call is queued and one synchronise at
    its end waits for it. On a device that is no GPU the same steps run with plain memory.

    Attributes:
        calls: round trips made.
        synchronises: times the CPU waited; one a call.
        grown: times a buffer was enlarged.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls = self.synchronises = self.grown = 0
        self._pinned = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self._pinned else None
        self._buffers: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def round_trip(self, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """``run`` on a copy of x on the device, on this thread's current stream; its result here.

        Args:
            x: CPU tensor, any strides.
            run: queues work on the current stream and returns a tensor of the device.

        Returns:
            A new CPU tensor.
        """
        self.calls += 1
        # A call that failed half-way leaves nothing to wait for: later copies queue behind its own.
        sent = self._buffer("in", x.shape, x.dtype)
        sent.copy_(x)
        there = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        there.copy_(sent, non_blocking=True)
        y = run(there)
        received = self._buffer("out", y.shape, y.dtype)
        received.copy_(y, non_blocking=True)
        self._synchronise()
        return received.clone()

    def _synchronise(self) -> None:
        self.synchronises += 1
        if self._stream is not None:
            self._stream.synchronize()

    def _buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = max(1, math.prod(shape) * dtype.itemsize)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            self._buffers.pop(name, None)
            room = 1 << (size - 1).bit_length()
            buffer = self._buffers[name] = torch.empty(room, dtype=torch.uint8, pin_memory=self._pinned)
            self.grown += 1
        return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


_local = threading.local()


def staging_for(device: torch.device) -> Staging:
    """The buffers of this thread for the device's current stream. Two streams never share any."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    held: dict[tuple[str, int], Staging] = _local.__dict__.setdefault("staging", {})
    key = (str(device), stream)
    if key not in held:
        held[key] = Staging(device)
    return held[key]
