"""Plans of the family's kernels beside the rule's own, on a GPU, through the calls that the benchmark makes.

python results/evidence/tensor_core_sweep.py                    # the shapes of Qwen2.5-3B and 7B
python results/evidence/tensor_core_sweep.py 22016x2048 --m 1,8 --bits 4
python results/evidence/tensor_core_sweep.py 3b --m 128,512     # more than 16 rows: tensor_core_wide

A line a shape: the rule's plan, then the fastest ones, as "warps a row tile . stages . turns a round" up to
16 rows, above as "n tiles a warp . column warps . row tiles a block . stages . turn". Every plan gives the
same bits, which is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from labkit.bench import cases, timing
from labkit.bench.contenders import clone, random_input, random_weight
from labkit.kernels import runner
from labkit.kernels.tensor_core import rule
from labkit.kernels.tensor_core.launch import device_facts, launches, plan_for, source, weight_defines
from labkit.quant.tiles import TileWeight, repack

RACK_BYTES = 1024  # of a k tile and an n tile
SHOWN = 6


def plans(base: rule.Plan, m: int, weight: TileWeight, shared_bytes: int) -> Iterator[rule.Plan]:
    """The rule's plan with other constants, as far as shared memory allows."""
    if base.entry == "tensor_core_wide":
        return wide_plans(base, m, weight, shared_bytes)
    return narrow_plans(base, weight, shared_bytes)


def wide_plans(base: rule.Plan, m: int, weight: TileWeight, shared_bytes: int) -> Iterator[rule.Plan]:
    """Bands of 32 to 256 rows of x, one to six row tiles a block."""
    choices = itertools.product((4, 8), (1, 2, 4), (1, 2, 3, 4, 6), (2, 3), (1, 2))
    for n_tiles, column_warps, block_tiles, stages, turn in choices:
        band, warps = 8 * n_tiles * column_warps, block_tiles * column_warps
        used = stages * turn * (2 * band * rule.TILE_COLUMNS + block_tiles * weight.record_bytes)
        registers = 2 if n_tiles == 4 else 3  # an eighth of the file a warp, about
        if used > shared_bytes or not 4 <= warps <= 16 or registers * warps > 40 or band >= 2 * m:
            continue
        names = ("N_TILES", "COLUMN_WARPS", "BLOCK_TILES", "STAGES", "TURN")
        defines = tuple(zip(names, (n_tiles, column_warps, block_tiles, stages, turn), strict=True))
        grid = (-(-weight.row_tiles // block_tiles), -(-m // band), base.grid[2])
        yield replace(base, defines=defines, threads=32 * warps, shared_bytes=used, grid=grid)


def narrow_plans(base: rule.Plan, weight: TileWeight, shared_bytes: int) -> Iterator[rule.Plan]:
    """The rule's plan with other warps, stages and turns a round, as far as shared memory allows."""
    n_tiles = base.constants["N_TILES"]
    tiles = -(-weight.k_tiles // base.grid[1])
    for warps in (2, 4, 8, 16):
        if warps > max(2, tiles) or (n_tiles == 2 and warps == 16):
            continue
        turns = -(-tiles // warps)
        for stages in (3, 4, 6):
            for round_turns in sorted({1, 2, 3, 4, 5, 7, 10, turns} & set(range(1, turns + 1))):
                rack = min(round_turns * warps, tiles) * n_tiles * RACK_BYTES
                used = warps * stages * weight.record_bytes + rack
                if used > shared_bytes or stages > turns + 1:
                    continue
                defines = (("N_TILES", n_tiles), ("K_WARPS", warps), ("STAGES", stages))
                yield replace(base, defines=defines, threads=32 * warps, shared_bytes=used, round=round_turns)


def name_of(plan: rule.Plan) -> str:
    constants = plan.constants
    if plan.entry == "tensor_core_wide":
        return ".".join(str(value) for value in constants.values())
    return f"{constants['K_WARPS']}.{constants['STAGES']}.{plan.round}"


def load_all(found: list[rule.Plan], weight: TileWeight, dtype: torch.dtype) -> None:
    """Compile side by side, load, and let every kernel have its shared memory."""
    defines = weight_defines(weight, dtype, False)
    with ThreadPoolExecutor() as threads:
        made = [source(plan.entry, (*defines, *plan.defines)) for plan in found]
        for plan, kernel in zip(found, threads.map(lambda one: runner.load(one, weight.device), made)):
            kernel.prepare(plan.shared_bytes)


def call(x: Tensor, weight: TileWeight, plan: rule.Plan) -> Callable[[], Tensor]:
    def run() -> Tensor:
        out = torch.empty(x.shape[0], weight.outputs, dtype=x.dtype, device=x.device)
        for launch in launches(x, weight, out, planned=plan):
            launch.run()
        return out

    return run


def sweep(case: cases.Case, samples: int) -> str:
    packed = random_weight(case, "cuda")
    x = random_input(case, "cuda")
    first = repack(packed)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    copies = timing.copies_needed(first.nbytes, l2)
    weights = [first, *(repack(clone(packed)) for _ in range(copies - 1))]
    own = plan_for(case.m, first)
    found = {"rule": own}
    found |= {name_of(plan): plan for plan in plans(own, case.m, first, device_facts(x.device).shared_bytes)}
    load_all(list(found.values()), first, x.dtype)
    expected = call(x, first, own)()
    ready = {}
    for name, plan in found.items():
        if not torch.equal(call(x, first, plan)(), expected):
            raise SystemExit(f"{case.label}: plan {name} gives other bits than the rule's")
        ready[name] = timing.prepare([call(x, weight, plan) for weight in weights])
    times = {name: median(values) for name, values in timing.interleave(ready, samples).items()}
    best = sorted(times, key=lambda name: times[name])[:SHOWN]
    line = " ".join(f"{name} {times[name]:.2f}" for name in best)
    return f"{case.label}: rule {name_of(own)} {times['rule']:.2f} µs; {line}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shapes", nargs="?", default="3b,7b", help="as for labkit bench gemm --shapes")
    parser.add_argument("--m", default="1,8,16")
    parser.add_argument("--bits", default="4,3")
    parser.add_argument("--samples", type=int, default=7)
    options = parser.parse_args()
    with timing.side_stream():
        for n, k in cases.parse_shapes(options.shapes):
            for bits in cases.parse_numbers(options.bits, "bits"):
                for m in cases.parse_numbers(options.m, "m"):
                    case = cases.Case("sweep", f"w{bits}", m, n, k, 128, ())
                    print(sweep(case, options.samples), flush=True)


if __name__ == "__main__":
    main()
