"""Every kernel of the package with every set of constants that a launch may ask for."""

from __future__ import annotations

import torch

from labkit.kernels.seed import launch as seed
from labkit.kernels.source import KernelSource, find_source, kernel_files
from labkit.kernels.zsplit import launch as zsplit

OFFSETS = (None, torch.float16, torch.float32)


def kernel_variants() -> list[KernelSource]:
    """Default constants of every file, and those of the launch specs; no source twice."""
    found = [source for file in kernel_files() for source in find_source(file)]
    for kernel in seed.KERNELS.values():
        for vector_x in (False, True) if kernel.vector_x else (False,):
            found += [kernel.source(offset, vector_x) for offset in OFFSETS]
    for source in find_source(zsplit.FILE):
        found += [zsplit.source(source.name, dtype) for dtype in zsplit.ACTIVATIONS]
    return list(dict.fromkeys(found))
