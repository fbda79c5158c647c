"""Exercises of chapter 06: two costs, read once, resident warps, loads together, the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from labkit.bench import batch_tile
from labkit.bench.batch_times import fixed_and_each, quoted_times
from labkit.check import Verdict, cuda, exercise, forbid_calls, not_yet, passed
from labkit.check.cuda_case import product_case
from labkit.check.verdict import NotYet
from labkit.errors import InputError
from labkit.kernels import loops
from labkit.kernels.occupancy import occupancy
from labkit.kernels.source import KernelSource

ARGS = ("x", "packed", "scales", "out", "M", "N", "K", "group_shift")
_ARCH = "sm_86"
_ONE_READ = 16 * 2 * 3  # 16 columns, two steps each, three byte loads


@exercise("06.1", title="Two costs")
def two_costs(answer: Callable[[int, float, int, float], tuple[float, float]]) -> Verdict:
    """(fixed, each) of a line through two times."""
    forbid_calls(answer, ("fixed_and_each", "polyfit", "linregress"))
    rows = quoted_times()
    cases = [(2, 10.0, 4, 16.0), (1, 5.0, 8, 5.0)]
    cases += [(rows[0].m, rows[0].us[name], rows[-1].m, rows[-1].us[name]) for name in ("grid.y", "tile")]
    for case in cases:
        wanted, got = fixed_and_each(*case), answer(*case)
        if not _close_pair(got, wanted):
            hint = "from m1 to m2 the time grows by m2 - m1 rows; what M = 0 would cost is the fixed part"
            say = "M = {:g}: {:g}, M = {:g}: {:g}".format(*case)
            return not_yet(f"({wanted[0]:.4g}, {wanted[1]:.4g}) for {say}", repr(got), hint)
    return passed("right for both kernels of the article")


def _close_pair(got: Any, wanted: tuple[float, float]) -> bool:
    try:
        fixed, each = (float(value) for value in got)
    except (TypeError, ValueError):
        return False
    scale = max(abs(value) for value in wanted)
    pairs = zip((fixed, each), wanted, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6 * scale) for a, b in pairs)


@exercise("06.2", title="Read the weight once", par=96, limit=120, unit="requests", text_stub="40a8fd78")
def read_once(answer: str) -> Verdict:
    """Five rows share one read of a W3 weight; the score is the warp instructions that read it."""
    for m in (8, 1, 5):
        case = product_case("w3", n=16, k=512, m=m, group_size=128)
        outcome = cuda.run(answer, "gemv_rows", (2,), (256,), case.args(*ARGS))
        case.judge(outcome)
    verdict = cuda.score_requests(outcome, "packed", "five rows from one read of the weight")
    hint = "does load_triple still stand inside the loop over the rows?"
    return replace(verdict, hint=hint) if (verdict.score or 0) > _ONE_READ else verdict


@exercise("06.3", title="Resident warps by hand")
def resident_warps(answer: Callable[[int, int], int]) -> Verdict:
    """Warps an SM of the RTX 3050 Laptop holds, from registers a thread and threads a block."""
    forbid_calls(answer, ("occupancy", "resident", "usage", "working_warps"))
    cases = [(32, 256), (40, 256), (41, 256), (64, 256), (65, 256), (37, 256), (255, 32), (16, 32)]
    cases += [(128, 128), (90, 224), (90, 384), (33, 1024), (72, 96), (80, 288)]
    for registers, threads in cases:
        wanted, got = occupancy(registers, 0, threads), answer(registers, threads)
        if got != wanted.warps:
            limits = ", ".join(f"{name} {blocks}" for name, blocks in wanted.limits.items())
            where = f"{registers} registers and {threads} threads"
            hint = f"blocks that each limit allows here: {limits}; the smallest counts, in whole blocks"
            return not_yet(f"{wanted.warps} warps for {where}", repr(got), hint)
    return passed(f"right for {len(cases)} kernels: 40 registers leave all 48 warps, 41 cost a block")


@exercise("06.4", title="Loads that go out together", par=1, limit=3, unit="waits", text_stub="87ba8655")
def rows_together(answer: str) -> Verdict:
    """The batch-tile without the guard; the score is how often a warp waits in a step (sm_86 code)."""
    for m in (8, 5, 1):
        case = product_case("w3", n=8, k=512, m=m, group_size=128)
        outcome = cuda.run(answer, "gemv_tile", (1,), (256,), case.args(*ARGS))
        case.judge(outcome)
        if (reads := outcome.trace.requests(buffer="packed")) > 48:
            hint = "keep what the tile is for: the weight is read once for all rows"
            return not_yet("at most 48 requests for the weight", f"{reads} with {m} rows", hint)
    score, hint = _waits(answer)
    return passed("right with 8, 5 and 1 rows", score=score, hint=hint)


def _waits(text: str) -> tuple[float, str]:
    """Waits of a step of 256 columns and 8 rows, and what the code looks like."""
    try:
        loop = loops.main_loop(KernelSource.from_text(text, "gemv_tile"), _ARCH)
    except InputError as error:
        hint = "the emulator took this text; does it use something that only a CPU compiler knows?"
        raise NotYet(not_yet(f"machine code for {_ARCH} with a loop that loads", str(error), hint)) from None
    loads = loop.loads(batch_tile.ROWS)
    steps = max(1.0, loads["LDG.U8"] / 3)
    hint = f"{loop.together} loads at most are on their way together: what keeps the next one back?"
    return loop.waits(batch_tile.ROWS) / steps, hint


@exercise("06.5", title="The verdict")
def tile_verdict(answer: Mapping[str, str]) -> Verdict:
    """Cause → judgement, for 8 rows on the article's card; compared with the counts."""
    slowdown = quoted_times()[-1].slowdown
    found = evidence()
    if not isinstance(answer, Mapping) or set(answer) != {one.cause for one in found}:
        causes = ", ".join(one.cause for one in found)
        return not_yet(f"a judgement for each of {causes}", repr(answer), "keep the keys of the stub")
    for one in found:
        said, right = answer[one.cause], batch_tile.judge(one.ratio, slowdown)
        if said not in batch_tile.JUDGEMENTS:
            choose = "one of " + ", ".join(repr(word) for word in batch_tile.JUDGEMENTS)
            return not_yet(f"{choose} for {one.cause!r}", repr(said), "the words are in the text above")
        if said != right:
            counts = f"{one.what}: grid.y {one.grid_y:.4g}, tile {one.tile:.4g}"
            hint = f"the tile has {one.ratio:.2f} times as much; to explain are {slowdown:.2f} times the time"
            return not_yet(f"a judgement of {one.cause!r} that follows from {counts}", repr(said), hint)
    return passed("every judgement follows from a count")


def evidence(m: int = batch_tile.ROWS) -> list[batch_tile.Evidence]:
    """Every candidate cause on the article's card, from a traced sample of one block of columns."""
    case = product_case("w3", n=8, k=2048, m=m, group_size=128)
    traces = {name: batch_tile.launch(name, case.x, case.weight).trace() for name in ("grid.y", "tile")}
    return batch_tile.evidence(traces, m)
