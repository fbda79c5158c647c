"""Registers, occupancy and key/value sectors of the prefill attention, with tall tiles and without.

python results/evidence/paged_prefill_counts.py    # a table in Markdown, without a GPU
"""

from __future__ import annotations

import torch

from labkit.bench.attention_cases import Case, Pool, Step
from labkit.kernels import paged_attention, paged_prefill, resources
from labkit.kernels.paged_plan import WARPS

MODELS = ("qwen2.5-3b", "qwen2.5-7b", "smollm2-135m")
CHUNK = 64
CARDS = ("rtx3050-laptop", "h200")


def sectors(case: Case, kind: str, tall: bool) -> int:
    """32-byte sectors of keys and values that one launch reads, by the emulator's trace."""
    pool, step = Pool.new(case, kind, "cpu", 0), Step.new(case, kind, "cpu")
    chunks = paged_attention.Chunks(
        pool.q, pool.layer, pool.tables, step.lengths, step.starts, step.tiles, case.context,
        torch.empty_like(pool.q),
    )  # fmt: skip
    launch = chunks.tall_launch() if tall else chunks.launch()
    trace = launch.trace()
    assert trace.ok, trace.faults
    return sum(int(trace.sectors(buffer=name)) for name in ("keys", "values"))


def main() -> None:
    """Print it."""
    print("| heads | cache | tile | queries | registers | spills | shared KiB | blocks an SM | sectors |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    for model in MODELS:
        case = Case(model, 1, 4 * CHUNK, CHUNK)
        _, kv_heads, head_dim = case.shape
        for kind in ("fp16", "int8"):
            int8, half = kind == "int8", torch.float16
            short, queries = paged_attention.query_tile(case.group), paged_prefill.queries(case.group)
            kernels = (
                (
                    "short",
                    short,
                    paged_attention.source(half, head_dim, case.group, 16, int8=int8, queries=short),
                ),
                ("tall", queries, paged_prefill.source(half, head_dim, case.group, 16, int8=int8)),
            )
            for name, served, source in kernels:
                tall = name == "tall"
                dynamic = paged_prefill.shared_bytes(head_dim, int8=int8) if tall else 0
                threads = 32 * (paged_prefill.WARPS if tall else WARPS)
                used = {arch: resources.usage(source, arch) for arch in ("sm_86", "sm_90")}
                blocks = [
                    used[arch].occupancy(card, threads, dynamic).blocks for arch, card in zip(used, CARDS)
                ]
                row = [f"{model} ({kv_heads} of {case.group})", kind, name, served]
                row += [" / ".join(str(one.registers) for one in used.values())]
                row += [sum(one.spills for one in used.values())]
                row += [f"{(used['sm_86'].static_shared + dynamic) / 1024:.1f}", f"{blocks[0]}, {blocks[1]}"]
                print("| " + " | ".join(map(str, [*row, f"{sectors(case, kind, tall):,}"])) + " |")


if __name__ == "__main__":
    main()
