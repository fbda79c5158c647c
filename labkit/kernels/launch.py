"""One kernel with its grid and arguments, ready to run or to trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labkit.kernels import runner
from labkit.kernels.source import KernelSource


@dataclass(frozen=True)
class Launch:
    """A launch that has not happened yet.

    Attributes:
        source, grid, block, args: as the runner takes them.
        device: where it runs.
        shared_bytes: dynamic shared memory a block.
        overlap: it may start before the kernels ahead of it have finished, see labkit.kernels.overlapped.
    """

    source: KernelSource
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: Sequence[Any]
    device: torch.device
    overlap: bool = False
    shared_bytes: int = 0

    def run(self) -> Any:
        """Launch it on the current stream, or in the emulator."""
        kernel = runner.load(self.source, self.device)
        if self.overlap and self.device.type == "cuda":
            return kernel(self.grid, self.block, self.args, self.shared_bytes, overlap=True)
        return kernel(self.grid, self.block, self.args, self.shared_bytes)

    def trace(self, **options: Any) -> Any:
        """Run it in the emulator with counts and checks; see ``labkit.emulator``. CPU tensors only."""
        kernel = runner.load(self.source, self.device)
        return kernel.trace(self.grid, self.block, self.args, self.shared_bytes, **options)
