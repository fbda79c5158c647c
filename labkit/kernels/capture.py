"""CUDA graphs are captured while the garbage collector rests."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class _Rest:
    """The collector rests while anybody wants it to; whether it works otherwise is the program's choice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted, self._works = 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._wanted:
                self._works = gc.isenabled()
                gc.disable()
            self._wanted += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted and self._works:
                gc.enable()


collector_rests = _Rest()
"""``with collector_rests:`` only reference counts free objects; it may be nested, and shared by threads."""


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """``torch.cuda.graph``, and no collection of garbage meanwhile.

    The collector may come by at any new object, and find graphs that nobody holds any more, such as those of
    an engine that was let go. Destroying one on a thread that captures ends the capture: CUDA error 901.

    Args:
        graph: to capture into.
        options: of ``torch.cuda.graph``: pool, stream, capture_error_mode.
    """
    import torch

    with collector_rests, torch.cuda.graph(graph, **options):
        yield
