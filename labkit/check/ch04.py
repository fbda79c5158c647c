"""Exercises of chapter 04: slices with a remainder, the ordered reduce, orders of a sum, cap, the rule."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.check import Verdict, cuda, cuda_text, exercise, forbid_calls, not_yet, passed
from labkit.check.normalise import pair, plain_int
from labkit.check.verdict import NotYet
from labkit.errors import require
from labkit.kernels.zsplit import rule
from labkit.quant.grouped import GroupedWeight

GIVEN = ("example_product",)
"""What the notebook imports from here: an answer may use it."""

LIBRARY = (
    "slice_of",
    "run_of",
    "seed_nsplit",
    "invariant_nsplit",
    "invariant_runs",
    "plan",
    "SplitWaves",
    "zsplit_plan",
)

_REDUCE_TOTAL, _REDUCE_SLICES = 296, 6  # 37 whole sectors a plane; the second block of 256 is ragged


def example_product(m: int, n: int, k: int) -> tuple[Tensor, GroupedWeight]:
    """Activations and a Q8_0 weight, the same bits on every machine.

    Args:
        m, n, k: sizes, each >= 1; k a multiple of 32.

    Returns:
        x float32 [m, k] in [-1, 1), and a weight [n, k] with codes of the whole range.
    """
    require(k % rule.GROUP == 0, "k", k, f"a multiple of {rule.GROUP}")
    # Integers and uniform numbers only: a normal deviate goes through the machine's own log and exp.
    rng = np.random.default_rng(n + k)
    codes = rng.integers(-127, 128, (n, k), dtype=np.int8)
    scales = 1e-3 + 1e-2 * rng.random((n, k // rule.GROUP), dtype=np.float32)
    x = 2 * rng.random((m, k), dtype=np.float32) - 1
    weight = GroupedWeight.from_rows("q8_0", torch.from_numpy(codes), torch.from_numpy(scales))
    return torch.from_numpy(x), weight


@exercise("04.1", title="Slices with a remainder")
def slice_bounds(answer: Callable[[int, int, int], Any]) -> Verdict:
    """``slice_bounds(z, ngroups, nsplit)`` gives (first, end) of slice z, end not included."""
    forbid_calls(answer, LIBRARY)
    for ngroups, nsplit in ((64, 16), (7, 3), (64, 6), (7, 7), (5, 1), (344, 86), (67, 16)):
        for z in range(nsplit):
            wanted = rule.slice_of(z, ngroups, nsplit)
            came = answer(z, ngroups, nsplit)
            two = pair(came)
            got = None if two is None else (plain_int(two[0]), plain_int(two[1]))
            if got != (wanted.start, wanted.stop):
                where = f"slice {z} of {nsplit}, {ngroups} groups"
                hint = f"{ngroups} = {nsplit} · {ngroups // nsplit} + {ngroups % nsplit}: "
                hint += "who gets one more, and how far does that shift the slices behind?"
                if got is None:
                    hint = "return two numbers: the first group of the slice, and the first one behind it"
                elif not ngroups % nsplit and got == (wanted.start, wanted.stop - 1):
                    hint = "end is not included: it is the first group behind the slice"
                return not_yet(f"({wanted.start}, {wanted.stop}) for {where}", repr(came), hint)
    return passed("every group is in one slice, for seven splits")


@exercise(
    "04.2", title="Add the slices in order", par=222, limit=260, unit="sectors of part", text_stub="ed66e1b8"
)
def ordered_reduce(answer: str) -> Verdict:
    """``reduce_parts`` adds the planes of ``part`` in ascending order, bit for bit; scored by sectors."""
    if isinstance(answer, str) and "atomicAdd" in cuda_text.code_of(answer):
        hint = "a thread that owns its output needs none: it adds the slices itself, in a loop"
        return not_yet("a sum in a fixed order, without atomics", "atomicAdd", hint)
    first = _reduce(answer, _REDUCE_TOTAL, _REDUCE_SLICES)
    _reduce(answer, 5, 1)
    return cuda.score_sectors(first, "part", "the bits of the fixed order", kind="read")


def _reduce(answer: str, total: int, nsplit: int) -> cuda.Outcome:
    """Launch ``reduce_parts`` on planes whose sum depends on its order, and judge the bits."""
    rng = np.random.default_rng(total)
    part = torch.from_numpy(2 * rng.random((nsplit, total), dtype=np.float32) - 1)
    wanted = part[0].clone()
    for plane in part[1:]:
        wanted += plane
    out = cuda.poisoned((total,), torch.float32)
    args = {"part": part, "out": out, "total": total, "nsplit": nsplit}
    outcome = cuda.run(answer, "reduce_parts", (-(-total // 256),), (256,), args)
    if len(cuda.unwritten(out)) and outcome.trace.requests(buffer="out", kind="read"):
        # the mark of an unwritten cell is a NaN, and a sum keeps it
        hint = "out is not zero before the launch: add in a variable of your own, and store it once"
        raise NotYet(not_yet("out[i] = the sum", "a sum that begins with what out held before", hint))
    close = bool(((out - wanted).abs() < 1e-5).all())
    order = "right within rounding, but other bits: float32, slice 0 first, then 1, 2, …, one after another"
    hint = order if close else "out[i] = part[0][i] + part[1][i] + …; plane z begins at z · total"
    cuda.expect(out, wanted, name="out", hint=hint)
    return outcome


def _distinct(parts: np.ndarray) -> int:
    """Different float32 results of adding ``parts`` in every order."""
    found = set()
    for order in itertools.permutations(parts.astype(np.float32)):
        total = np.float32(0)
        for value in order:
            total = np.float32(total + value)
        found.add(total.tobytes())
    return len(found)


_SUMS: tuple[tuple[float, ...], ...] = (
    (1.0, 2.0, 3.0, 4.0),
    (0.1, 0.2),
    (0.1, 0.2, 0.3),  # two results in float64
    (2.0**24, 1.0, 1.0, -(2.0**24)),
    (0.3, -1.7, 0.05, 12.25, 7.7),
)


@exercise("04.3", title="How many results has one sum?")
def distinct_sums(answer: Callable[[np.ndarray], int]) -> Verdict:
    """``distinct_sums(parts)`` counts the different bit patterns over all orders of float32 addition."""
    for numbers in _SUMS:
        parts = np.array(numbers, dtype=np.float32)
        wanted, came = _distinct(parts), answer(parts.copy())
        if plain_int(came) != wanted:
            hint = "itertools.permutations; keep the running sum a np.float32; collect the results in a set"
            if wanted == 1:
                hint = (
                    "these numbers give one result in every order: is your sum rounded to float32 each time?"
                )
            text = ", ".join(f"{value:g}" for value in numbers)
            return not_yet(f"{wanted} for the parts {text}", repr(came), hint)
    return passed("five sums: three of them have one result, whatever the order")


@exercise("04.4", title="Cap the buffer")
def seed_slices(answer: Callable[[int, int, int], int]) -> Verdict:
    """``seed_slices(blocks, ngroups, plane_bytes)``: 512 blocks, at most the groups, at most 64 MiB."""
    forbid_calls(answer, LIBRARY)
    shapes = [(1, 5632, 2048), (1, 2048, 11008), (8, 2048, 2048), (64, 2048, 2048), (300, 5632, 2048)]
    shapes += [(2000, 256, 2048), (1, 5632, 32), (1, 151936, 2048)]
    cases = []
    for m, n, k in shapes:
        x, y = rule.blocks_xy(m, n)
        cases.append((x * y, rule.groups_of(k), m * n * 4, rule.seed_nsplit(m, n, k)))
    # No shape of this kernel reaches the cap with 512 blocks; another thread mapping would.
    mib = 1 << 20
    cases += [(8, 256, 3 * mib, 21), (4, 512, mib // 2, 128), (100, 64, 65 * mib, 1), (2, 512, mib, 64)]
    for blocks, ngroups, plane, wanted in cases:
        came = answer(blocks, ngroups, plane)
        if plain_int(came) != wanted:
            hint = "512 / blocks rounded up; then the least of that, the groups, and the planes in 64 MiB"
            if wanted == 1:
                hint = "one slice is always allowed, and enough when there are 512 blocks without a split"
            where = f"{blocks} blocks, {ngroups} groups, planes of {plane:,} bytes"
            return not_yet(f"{wanted} for {where}", repr(came), hint)
    return passed(f"right for {len(cases)} launches; in three of them the cap decides")


@exercise("04.5", title="A rule that does not see the batch")
def slices_for(answer: Callable[[int, int], int]) -> Verdict:
    """``slices_for(n, k)``: 512 blocks at M = 1, at most a slice for each group."""
    forbid_calls(answer, LIBRARY)
    shapes = [(5632, 2048), (2048, 2048), (256, 2048), (11008, 2048), (2048, 11008), (151936, 2048)]
    shapes += [(600, 1024), (1025, 65536), (5632, 64), (17, 200), (600_000, 2048)]
    for n, k in shapes:
        wanted, came = rule.invariant_nsplit(n, k), answer(n, k)
        if plain_int(came) != wanted:
            blocks, groups = rule.blocks_xy(1, n)[0], rule.groups_of(k)
            hint = f"at M = 1 the grid without a split has {blocks} of 512 blocks: how often does that fit, "
            hint += f"rounded up? K has {groups} groups of 32, and a slice holds at least one"
            return not_yet(f"{wanted} slices for {n}×{k}", repr(came), hint)
    return passed(f"right for {len(shapes)} shapes: the bits of a row belong to the weight, not to the batch")
