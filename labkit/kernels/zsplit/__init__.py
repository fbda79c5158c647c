"""z-split grouped GEMM of the second seed: Q8_0 and Q4_0, float or int8 activations.

Importing this package registers the kernels ``zsplit`` and ``zsplit_int8`` for the dispatch table.
"""

from labkit.kernels.zsplit.launch import quantize_activations, zsplit_gemm, zsplit_gemm_int8
from labkit.kernels.zsplit.register import register_kernels
from labkit.kernels.zsplit.rule import (
    Plan,
    invariant_nsplit,
    invariant_runs,
    plan,
    run_of,
    seed_nsplit,
    slice_of,
)

register_kernels()

__all__ = [
    "Plan",
    "invariant_nsplit",
    "invariant_runs",
    "plan",
    "quantize_activations",
    "run_of",
    "seed_nsplit",
    "slice_of",
    "zsplit_gemm",
    "zsplit_gemm_int8",
]
