"""The tensor-core family: W4 and W3 products for any M, whose rows do not depend on the batch.

:func:`linear` is the call; the arithmetic is described in ``tensor_core.cuh`` and, in torch, in
:mod:`labkit.kernels.tensor_core.reference`.
"""

from labkit.kernels.tensor_core.launch import linear
from labkit.kernels.tensor_core.rule import slices

__all__ = ["linear", "slices"]
