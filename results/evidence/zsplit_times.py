"""z-split on a GPU: the rule of (N, K) against the article's rule, and against dequantise + cuBLAS, by M.

    python results/evidence/zsplit_times.py [--shapes 5632x2048,2048x5632,3584x18944] [--m 1,8,16,32,64]

Run from the root of the checkout with PYTHONPATH=. Every contender is checked against float64 before it is
timed; weights rotate through more than the L2 cache; contenders take turns (labkit.bench.timing). Prints a
Markdown table of median µs a call, with the slices and the planes (z of the grid; a reduce follows where it
is above 1) of both rules; results: kernels.md beside this file.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch

from labkit.bench import timing
from labkit.kernels import registry
from labkit.kernels.registry import Request
from labkit.kernels.zsplit.launch import zsplit_gemm, zsplit_gemm_int8
from labkit.kernels.zsplit.rule import plan
from labkit.nn.linear import DEFAULT_TEMP_BYTES
from labkit.nn.memory import MemoryBudget
from labkit.quant.grouped import GroupedWeight

BOUND = {"int8": 0.03}
"""Largest error against the largest result; int8 activations are coarser."""


def random_weight(n: int, k: int) -> GroupedWeight:
    """Random Q8_0 codes and scales on the GPU."""
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
    scales = (torch.rand(n, k // 32, device="cuda") + 0.5) / 127 / k**0.5
    return GroupedWeight.from_rows("q8_0", codes, scales)


def contenders(x: torch.Tensor, weights: list[GroupedWeight]) -> dict[str, list]:
    """Name to one call a weight."""
    fallback = registry.get("dequant_matmul")
    request = Request(
        "cuda", (9, 0), "q8_0", "float16", len(x), weights[0], DEFAULT_TEMP_BYTES, MemoryBudget(1 << 40)
    )
    prepared = fallback.prepare(request)
    made = {
        "ours": [lambda w=w: zsplit_gemm(x, w) for w in weights],
        "article": [lambda w=w: zsplit_gemm(x, w, rule="seed") for w in weights],
        "int8": [lambda w=w: zsplit_gemm_int8(x, w) for w in weights],
        "dequantise": [lambda w=w: fallback.run(x, prepared._replace(weight=w)) for w in weights],
    }
    exact = x.double() @ weights[0].dequantize(torch.float64).t()
    for name, calls in made.items():
        error = ((calls[0]().double() - exact).abs().max() / exact.abs().max()).item()
        if not error < BOUND.get(name, 0.002):
            raise SystemExit(f"{name}: relative error {error:.3g}; nothing is timed")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="5632x2048,2048x5632,3584x18944")
    parser.add_argument("--m", default="1,2,4,8,16,32,64")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("Q8_0, float16; median µs a call of 20 samples\n")
    print("| N×K | M | slices → z, ours / article | blocks | ours | article | int8 | dequantise + cuBLAS |")
    print("|---|---|---|---|---|---|---|---|")
    for shape in options.shapes.split(","):
        n, k = (int(number) for number in shape.split("x"))
        copies = timing.copies_needed(n * k, torch.cuda.get_device_properties(0).L2_cache_size)
        weights = [random_weight(n, k) for _ in range(copies)]
        for m in (int(number) for number in options.m.split(",")):
            x = torch.randn(m, k, device="cuda").half()
            with timing.side_stream():
                ready = {name: timing.prepare(calls) for name, calls in contenders(x, weights).items()}
                taken = {name: median(samples) for name, samples in timing.interleave(ready).items()}
            plans = [plan(m, n, k, rule=rule) for rule in ("invariant", "seed")]
            splits = " / ".join(f"{planned.nsplit} → {planned.planes}" for planned in plans)
            blocks = " / ".join(str(planned.blocks) for planned in plans)
            times = " | ".join(f"{taken[name]:.1f}" for name in ("ours", "article", "int8", "dequantise"))
            print(f"| {n}×{k} | {m} | {splits} | {blocks} | {times} |", flush=True)
            ready.clear()


if __name__ == "__main__":
    main()
