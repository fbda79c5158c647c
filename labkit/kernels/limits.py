"""Limits that CUDA sets to a launch on every GPU from compute capability 8.0 on.

Source: CUDA C++ Programming Guide 12.9, Technical Specifications per Compute Capability.
"""

MAX_GRID = (2**31 - 1, 65_535, 65_535)
"""Blocks of a grid along x, y, z."""

MAX_BLOCK = (1024, 1024, 64)
"""Threads of a block along x, y, z."""

MAX_THREADS = 1024
"""Threads of a block in all."""
