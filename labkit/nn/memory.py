"""A budget for memory that kernels keep beside the packed weights."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import psutil

from labkit.errors import require

_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: Any = "cpu") -> int:
    """Bytes this process may still take.

    Args:
        device: "cpu": what the system has, or what its container leaves if less. A GPU: what the driver has
            and torch's allocator keeps unused, within ``torch.cuda.set_per_process_memory_fraction``.
    """
    if str(device).startswith("cuda"):
        return _free_on_gpu(device)
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="utf-8").strip()
        used = (_CGROUP / "memory.current").read_text(encoding="utf-8").strip()
        if limit != "max":
            free = min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        pass  # no cgroup v2: the system's figure stands
    return free


def _free_on_gpu(device: Any) -> int:
    import torch

    index = torch.device(device).index
    device = torch.cuda.current_device() if index is None else index
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free + held, allowed) - used) if allowed < total else free + held - used


class MemoryBudget:
    """Counts bytes lent; refuses when the limit would be passed.

    Args:
        limit: bytes; None means half of the memory that is free at the first request.

    The lock guards two integers and is never held while anything is computed.
    """

    def __init__(self, limit: int | None = None) -> None:
        require(
            limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0),
            "limit",
            repr(limit),
            "bytes >= 0, or None",
        )
        self._limit = limit
        self._used = 0
        self._lock = threading.Lock()

    @property
    def limit(self) -> int:
        """Bytes that may be lent in all."""
        if self._limit is None:
            self._limit = free_memory() // 2
        return self._limit

    @property
    def used(self) -> int:
        """Bytes lent now."""
        return self._used

    @property
    def left(self) -> int:
        """Bytes still to lend."""
        return max(0, self.limit - self._used)

    def take(self, count: int) -> bool:
        """Lend ``count`` bytes, or return False and lend nothing."""
        limit = self.limit
        with self._lock:
            if self._used + count > limit:
                return False
            self._used += count
            return True

    def give(self, count: int) -> None:
        """Take ``count`` lent bytes back."""
        with self._lock:
            self._used -= count

    def give_when_gone(self, owner: Any, count: int) -> None:
        """Take ``count`` bytes back when ``owner`` is freed."""
        weakref.finalize(owner, self.give, count).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryBudget:
        return self  # copies of a layer draw on the same memory

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # Nothing that was lent goes with a pickle; the shared budget stays the one of the process.
        return (default_budget, ()) if self is _default else (MemoryBudget, (self._limit,))


_default = MemoryBudget()


def default_budget() -> MemoryBudget:
    """The budget of layers that were given none: half of the free memory, shared by all of them."""
    return _default


def set_default_budget(limit: int | None) -> MemoryBudget:
    """Replace the shared budget, for layers made from now on; bytes, or None for half of what is free."""
    global _default
    _default = MemoryBudget(limit)
    return _default
