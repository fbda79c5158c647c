"""How long the emulator takes here: compile and launch, launch again, trace. Needs no GPU.

    python results/evidence/emulator_times.py

Run from the root of the checkout with PYTHONPATH=. The runtime is compiled first, kernels then start from an
empty cache in a folder of its own. Prints a Markdown table, seconds; results: kernels.md beside this file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

SMALL = "__global__ void fill(int* out, int value) { out[threadIdx.x] = value; }\n"


def seconds(call: Callable[[], Any]) -> float:
    """Of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def best(call: Callable[[], Any]) -> float:
    """Least of five."""
    return min(seconds(call) for _ in range(5))


def main() -> None:
    from labkit import emulator
    from labkit.check.cuda_case import product_case
    from labkit.kernels.seed.launch import GEMM_TILED, plan

    out = torch.zeros(32, dtype=torch.int32)
    warm = emulator.compile(SMALL)  # compiles the runtime, fast and traced, and starts the worker
    warm((1,), (32,), [out, 1])
    warm.trace((1,), (32,), [out, 1])
    fresh = SMALL + "// another text, so that nothing of it is in the cache\n"
    rows = [("compile and launch, isolated", seconds(lambda: emulator.compile(fresh)((1,), (32,), [out, 1])))]
    rows.append(("launch again, isolated", best(lambda: warm((1,), (32,), [out, 1]))))
    inside = emulator.compile(SMALL, isolate=False)
    rows.append(("launch again, in this process", best(lambda: inside((1,), (32,), [out, 1]))))
    small = product_case("w4", 128, 256, 37, group_size=128)
    launch = plan(GEMM_TILED["w4"], small.x, small.weight)
    rows.append(("37×128×256 W4 tiled GEMM: both builds, and all blocks traced", seconds(launch.trace)))
    rows.append(("the same traced again", best(launch.trace)))
    large = product_case("w4", 5632, 2048, 30, group_size=128)
    rows.append(
        ("30×5632×2048 W4 tiled GEMM, fast build", best(plan(GEMM_TILED["w4"], large.x, large.weight).run))
    )
    print("| what | s |\n|---|---|")
    for what, took in rows:
        print(f"| {what} | {took:.4f} |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["LABKIT_CACHE"] = folder
        main()
