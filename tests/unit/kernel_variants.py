"""Every kernel of the package with every set of constants that a launch may ask for."""

from __future__ import annotations

import functools
import itertools

import torch

from labkit.kernels import greedy, paged_attention, paged_prefill, rmsnorm
from labkit.kernels.seed import launch as seed
from labkit.kernels.source import KernelSource, find_source, kernel_files
from labkit.kernels.tensor_core import rule
from labkit.kernels.tensor_core.launch import source as tensor_core_source
from labkit.kernels.zsplit import launch as zsplit

OFFSETS = (None, torch.float16, torch.float32)


GPUS = (rule.SM86, rule.Device(132, 227 << 10), rule.Device(128, 99 << 10))
"""What the plans of the tensor-core family are asked for: an RTX 3050 Laptop, an H200, an RTX 4090."""

Constants = tuple[tuple[str, int], ...]


def kernel_variants(arch: str = "") -> list[KernelSource]:
    """Default constants of every file, and those of the launch specs; no source twice.

    Of the tensor-core family, which has thousands, the lightest and the heaviest weight; with "sm_86" more of
    them. All are compiled by ``results/evidence/tensor_core_counts.py --spills``.
    """
    found = [source for file in kernel_files() for source in find_source(file)]
    for kernel in seed.KERNELS.values():
        for vector_x in (False, True) if kernel.vector_x else (False,):
            found += [kernel.source(offset, vector_x) for offset in OFFSETS]
    for source in find_source(zsplit.FILE):
        found += [zsplit.source(source.name, dtype) for dtype in zsplit.ACTIVATIONS]
    for dtype in rmsnorm.ACTIVATIONS:
        found += [rmsnorm.source(dtype, vector) for vector in (True, False)] + [greedy.source(dtype)]
    found += paged_variants(arch == "sm_86")
    found += tensor_core_variants(weights() if arch == "sm_86" else weights()[:2])
    return list(dict.fromkeys(found))


def paged_variants(full: bool = False) -> list[KernelSource]:
    """Attention over paged keys and values: the heaviest constants, with ``full`` more; rope and append.

    A compilation takes seconds, so widths, groups and block sizes take turns.
    """
    half, bfloat = torch.float16, torch.bfloat16
    found = []
    for int8 in (False, True):
        found.append(paged_attention.source(half, 128, 16, 16, int8=int8, fused=True, qk_norm=True))
        found.append(paged_attention.source(bfloat, 128, 8, 16, int8=int8, fused=True, qk_norm=True))
        found.append(paged_attention.source(half, 128, 8, 16, int8=int8, queries=2))
        found.append(paged_attention.rope_source(bfloat, 128, 16, int8=int8, qk_norm=True))
        found.append(paged_prefill.source(half, 128, 7, 16, int8=int8))
        if full:
            for head_dim, group, block_size in ((64, 7, 8), (80, 16, 64), (96, 16, 8), (128, 7, 64)):
                options = {"int8": int8, "fused": group == 7}
                found.append(paged_attention.source(half, head_dim, group, block_size, **options))
            found.append(paged_attention.source(half, 64, 3, 16, int8=int8, queries=5))
            found.append(paged_prefill.source(bfloat, 80, 16, 8, int8=int8))
            found.append(paged_prefill.source(half, 64, 3, 64, int8=int8))
    return found


def weights(full: bool = False) -> list[Constants]:
    """Constants of a weight and its activations: the lightest, the heaviest, others; or all there are."""
    names = ("BITS", "GROUP", "OFFSET", "BF16", "PAIRED", "FP16_SUMS")
    if full:
        every = itertools.product((4, 3), (128, 64, 32), (0, 1, 2), (0, 1), (0, 1), (0, 1))
        return [tuple(zip(names, one)) for one in every if not (one[3] and one[5])]
    chosen = [(4, 128, 0, 0, 0, 0), (3, 32, 2, 1, 1, 0)]
    chosen += [(4, 32, 2, 0, 0, 0), (3, 128, 0, 0, 0, 0), (4, 64, 1, 1, 1, 0), (4, 32, 0, 0, 0, 1)]
    return [tuple(zip(names, one)) for one in chosen]


@functools.cache
def asked_constants() -> list[tuple[str, Constants, bool]]:
    """(entry, constants of a plan, whether heavy weights have it) over shapes and GPUs."""
    row_tiles = (1, 2, 3, 4, 8, 16, 20, 32, 48, 64, 80, 96, 100, 112, 128, 144, 176, 200, 300, 400, 700, 1184)
    k_tiles = (1, 2, 3, 4, 5, 8, 12, 14, 16, 20, 28, 32, 33, 44, 86, 148)
    found: dict[tuple[str, Constants, bool], None] = {}
    for gpu, m, rows, tiles in itertools.product(GPUS, (1, 9, 17, 33, 65), row_tiles, k_tiles):
        for record, heavy in ((1600, False), (2112, False), (1792, True), (2816, True)):
            plan = rule.plan(m, rows, tiles, record, heavy, gpu)
            found[plan.entry, plan.defines, heavy] = None
    return sorted(found)


def tensor_core_variants(chosen: list[Constants], full: bool = False) -> list[KernelSource]:
    """The family's kernels for these weights, with all constants that the rule asks for.

    Without ``full`` those whose code differs: stages and the size of a block hardly change it.
    """
    found = []
    for weight in chosen:
        named = dict(weight)
        heavy = named["GROUP"] < 128 or named["OFFSET"] > 0
        for entry, constants, of_heavy in asked_constants():
            sizes = dict(constants)
            some = sizes["STAGES"] == 3 and sizes.get("BLOCK_TILES", 4) in (3, 4, 8)
            some = some or (sizes["STAGES"], sizes.get("BLOCK_TILES")) == (2, 2)
            if heavy == of_heavy and (full or some):
                found.append(tensor_core_source(entry, weight + constants))
        found.append(tensor_core_source("tensor_core_reduce", weight))
        if not named["FP16_SUMS"]:
            found.append(tensor_core_source("tensor_core_dense", weight))
    return found
