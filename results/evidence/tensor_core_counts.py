"""Instructions, loads and occupancy of the tensor-core family on SM86, without a GPU.

python results/evidence/tensor_core_counts.py            # tables into tensor_core_counts.md
python results/evidence/tensor_core_counts.py --spills   # and every set of constants compiled for sm_86
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from labkit import atomic
from labkit.kernels import nvrtc, resources
from labkit.kernels.source import KernelSource
from labkit.kernels.tensor_core import counts
from labkit.kernels.tensor_core.launch import launches
from labkit.quant import QuantWeight, quantize, repack

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))
from kernel_variants import tensor_core_variants, weights  # noqa: E402


def narrow(n_tiles: int, k_warps: int) -> dict[str, int]:
    return {"N_TILES": n_tiles, "K_WARPS": k_warps, "STAGES": 3}


def wide(n_tiles: int, column_warps: int, block_tiles: int, stages: int, turn: int) -> dict[str, int]:
    names = ("N_TILES", "COLUMN_WARPS", "BLOCK_TILES", "STAGES", "TURN")
    return dict(zip(names, (n_tiles, column_warps, block_tiles, stages, turn)))


KERNELS = (
    *(
        (f"M ≤ {8 * n_tiles}, {k_warps} warps", "tensor_core_narrow", narrow(n_tiles, k_warps))
        for n_tiles, k_warps in ((1, 2), (1, 4), (1, 8), (1, 16), (2, 2), (2, 4), (2, 8))
    ),
    ("M ≤ 32", "tensor_core_wide", wide(4, 1, 4, 3, 1)),
    ("M ≤ 32, few rows", "tensor_core_wide", wide(4, 1, 4, 3, 2)),
    ("M ≤ 64", "tensor_core_wide", wide(4, 2, 3, 3, 1)),
    ("M ≤ 64, few rows", "tensor_core_wide", wide(4, 2, 2, 2, 2)),
    ("M ≤ 64, some N", "tensor_core_wide", wide(8, 1, 4, 3, 1)),
)
SHAPES = (
    (2560, 2048),
    (2048, 2048),
    (22016, 2048),
    (2048, 11008),
    (4608, 3584),
    (37888, 3584),
    (3584, 18944),
)
"""N, K of the fused projections of Qwen2.5-3B and 7B."""


def table(headers: str, rows: list[list[object]]) -> list[str]:
    names = headers.split(" | ")
    return [
        f"| {headers} |",
        "|" + "---|" * len(names),
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]


def instructions() -> list[str]:
    rows: list[list[object]] = []
    kinds = ("address and integer", "half", "float", "tensor core", "memory")
    for (name, entry, constants), bits in itertools.product(KERNELS, (4, 3)):
        found = counts.count(KernelSource(f"{entry}.cu", entry, {"BITS": bits, **constants}))
        times = constants.get("COLUMN_WARPS", 1)  # so often a record is decoded
        weight = times * found.a_weight
        row = [
            name,
            bits,
            f"{times * found.instructions:.0f}",
            *(times * found.turn[kind] // found.records for kind in kinds),
        ]
        rows.append([*row, f"{weight:.2f}", f"{weight / counts.BUDGET[bits]:.0%} of {counts.BUDGET[bits]}"])
    headers = "kernel | bits | warp instructions a record | integer | half | float | tensor core | memory"
    return table(headers + " | lane-instructions a weight | of the budget", rows)


def traffic() -> list[str]:
    rows: list[list[object]] = []
    k, n = 1024, 128
    for bits, m in itertools.product((4, 3), (1, 8, 16, 32, 64)):
        stored = quantize(torch.randn(n, k) * 0.02, f"w{bits}", 128)
        assert isinstance(stored, QuantWeight)
        weight = repack(stored)
        x = torch.randn(m, k).half()
        launch = next(launches(x, weight, torch.empty(m, n, dtype=x.dtype)))
        trace = launch.trace()
        assert trace.ok, trace.report()
        tiles = trace.total("bytes", buffer="tiles", kind="cp.async read") / (n * k)
        of_x = trace.total("bytes", buffer="x", space="global") / (n * k)
        read = trace.total("bytes", space="shared", kind="read") / (n * k)
        waves = trace.total("wavefronts", space="shared") / trace.total("ideal_wavefronts", space="shared")
        loads = (trace.requests(space="global") + trace.requests(space="shared", kind="read")) * 32 / (n * k)
        products = 16 * (-(-m // 8)) * 32 / counts.RECORD_WEIGHTS
        numbers = [f"{value:.3f}" for value in (tiles, of_x, read, loads, products)]
        rows.append([launch.source.name, bits, m, *numbers, f"{waves:.2f}"])
    headers = "kernel | bits | M | tile bytes by cp.async | x bytes from global | shared bytes read"
    return table(headers + " | lane-loads | lane-mma | shared wavefronts over ideal", rows)


def occupancy() -> list[str]:
    rows: list[list[object]] = []
    for (n, k), bits, m in itertools.product(SHAPES, (4, 3), (1, 16, 32, 64)):
        found = counts.fill(bits, m, n, k)
        planned, held = found.planned, found.held
        kernel = planned.entry.removeprefix("tensor_core_")
        constants = ", ".join(f"{name} {value}" for name, value in planned.defines)
        row = [f"{n}×{k}", bits, m, kernel, constants, planned.threads, found.registers, planned.shared_bytes]
        rows.append([*row, held.blocks, f"{held.warps}/48", " and ".join(held.limited_by)])
    headers = "N × K | bits | M | kernel | constants | threads | registers | shared bytes | blocks an SM"
    return table(headers + " | warps | limited by", rows)


def spills() -> list[str]:
    most: Counter[str] = Counter()
    wrong = []
    sources = tensor_core_variants(weights(full=True), full=True)
    with ProcessPoolExecutor() as pool:
        for source, used in zip(sources, pool.map(usage, sources, chunksize=8)):
            most[source.name] = max(most[source.name], used.registers)
            if used.spills or used.stack:
                wrong.append(f"- {source}: {used.spills} bytes spilled, {used.stack} of stack")
    registers = ", ".join(f"{name} {count}" for name, count in sorted(most.items()))
    head = f"{len(sources)} sets of constants, {len(wrong)} with spills or a stack."
    return [f"{head} Most registers: {registers}.", "", *wrong]


def usage(source: KernelSource) -> resources.Usage:
    return resources.usage(source, "sm_86")


INTRODUCTION = """# The tensor-core family on SM86, counted without a GPU

Machine code of NVRTC {compiler} for sm_86; made by `python results/evidence/tensor_core_counts.py --spills`.
Group 128, symmetric, half activations.

## Instructions of the main loop

Every branch inside the loop counts as entered, also those that run once a slice; not what is loaded once a
block. The loop that adds up the rack counts by its share of a record, in all warps of the block. Budget: what
the RTX 3050 Laptop can start while DRAM delivers a weight; the aim is at most 60 %.
"""
TRAFFIC = """
## Traffic a weight, in the emulator

N = 128, K = 1024; sums over the grid, divided by N·K. A W4 weight has 0.516 bytes of tiles, a W3
weight 0.391.
"""


def main() -> None:
    target = Path(__file__).with_suffix(".md")
    compiler = nvrtc.compile_cubin(tensor_core_variants(weights()[:1])[0], "sm_86").nvrtc
    text = [INTRODUCTION.format(compiler=compiler), *instructions(), TRAFFIC, *traffic()]
    text += ["", "## Occupancy", "", *occupancy()]
    if "--spills" in sys.argv:
        text += ["", "## Every set of constants", "", *spills()]
    atomic.write_text(target, "\n".join([*text, ""]))
    print(f"written: {target.name}")


if __name__ == "__main__":
    main()
