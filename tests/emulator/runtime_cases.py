"""Kernels of the runtime's own tests: one compilation serves many cases, picked by number."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np

from labkit import emulator

KERNELS = Path(__file__).parent / "kernels"


class Cases:
    """A kernel whose first parameter picks the case: ``CASE(number, name)`` in its text."""

    def __init__(self, file: str, entry: str, **options: Any) -> None:
        self.text = (KERNELS / file).read_text(encoding="utf-8")
        self.number = {name: int(n) for n, name in re.findall(r"CASE\((\d+), (\w+)\)", self.text)}
        self.kernel = emulator.compile(self.text, entry, filename=file, **options)

    def line(self, mark: str) -> int:
        """The line that carries ``// @mark``."""
        lines = [i for i, line in enumerate(self.text.splitlines(), 1) if re.search(rf"// @{mark}\b", line)]
        assert len(lines) == 1, mark
        return lines[0]

    def reverse_threads(self, reverse: bool) -> None:
        """Let the traced build run a block's threads from the last to the first."""
        library = self.kernel._built(trace=True).library
        ctypes.CDLL(str(library)).cuemu_set_reversed(int(reverse))


class Planted(Cases):
    """``faults.cu``: out[256], in[64] = 0 … 63, flags[64] = 0."""

    def arguments(self, name: str, n: int) -> tuple[np.ndarray, list[Any]]:
        out = np.zeros(256, np.float32)
        given = np.arange(64, dtype=np.float32)
        return out, [self.number[name], out, given, np.zeros(64, np.int32), n]

    def trace(
        self, name: str, n: int = 0, *, grid: int = 1, block: int = 64, shared: int = 0, **options: Any
    ) -> emulator.Trace:
        return self.kernel.trace((grid,), (block,), self.arguments(name, n)[1], shared, **options)

    def run(self, name: str, n: int = 0, *, grid: int = 1, block: int = 64, shared: int = 0) -> np.ndarray:
        out, arguments = self.arguments(name, n)
        self.kernel((grid,), (block,), arguments, shared)
        return out
