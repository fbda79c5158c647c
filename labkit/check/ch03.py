"""Exercises of chapter 03: sectors by formula, neighbouring words, a race, a ragged edge, wide loads."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from labkit.bench import timing
from labkit.check import Verdict, cuda, exercise, forbid_calls, not_yet, passed
from labkit.check.cuda_case import ProductCase, product_case
from labkit.check.verdict import NotYet
from labkit.kernels import runner
from labkit.kernels.source import KernelSource
from labkit.widgets.warp_access import LANES, SIZES, WarpAccess

NAMES = ("packed", "scales", "x", "out", "N", "K", "group_shift")
"""Parameters of every GEMV that a student writes here, in order."""

ROWS = 8
"""Rows of the weight that a block of 256 threads takes, a warp for each."""


def gpu_rows(naive: str, improved: KernelSource, n: int = 37888, k: int = 3584) -> list[dict[str, Any]]:
    """Time the chapter's two kernels on the GPU, on random weights, after their results agree.

    Args:
        naive: text of a kernel with a thread for each row, parameters :data:`NAMES`.
        improved: labkit's ``gemv_row_w4``.
        n, k: shape of the weight, groups of 128; 68 MB by default, more than most L2 caches hold.

    Returns:
        Rows for :func:`labkit.tables.table`: kernel, what, us, gb_s (weights), origin "measured".
    """
    shift = 7
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.rand(n, k >> shift, device="cuda").half() / 64
    x = torch.randn(1, k, device="cuda").half()
    first, second = (torch.empty(1, n, dtype=torch.float16, device="cuda") for _ in range(2))
    kernels = [runner.load(source, "cuda") for source in (KernelSource.from_text(naive), improved)]
    launches = [((-(-n // 32),), (32,), [packed, scales, x, first, n, k, shift])]
    launches += [((-(-n // ROWS),), (32 * ROWS,), [x, packed, scales, None, second, 1, n, k, k, shift])]
    for kernel, launch in zip(kernels, launches, strict=True):
        kernel(*launch)
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-2)
    rows = []
    for name, kernel, launch in zip(("naive", "labkit"), kernels, launches, strict=True):
        us = timing.median_us(functools.partial(kernel, *launch))
        row = {"kernel": name, "what": f"{n} × {k}", "us": us, "origin": "measured"}
        rows.append(row | {"gb_s": packed.nbytes / us / 1e3})
    return rows


@exercise("03.1", title="Sectors of one request")
def request_sectors(answer: Callable[[int, int], int]) -> Verdict:
    """32-byte sectors of 32 lanes that read ``size`` bytes each, ``stride`` bytes apart, from byte 0."""
    forbid_calls(answer, ("WarpAccess", "strided", "SectorMap", "from_offsets"))
    for size in SIZES:
        for step in (0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 128):
            stride = step * size
            wanted = len(WarpAccess.strided(size, step).sectors)
            got = answer(size, stride)
            if not (hasattr(got, "__float__") and float(got) == wanted):
                expected = f"{wanted} for {LANES} lanes of {size} bytes, {stride} bytes apart"
                return not_yet(expected, repr(got), _stride_hint(size, stride))
    return passed("right for 60 pairs of size and stride: a stride of s bytes costs s sectors, 1 to 32")


def _stride_hint(size: int, stride: int) -> str:
    if stride > 32:
        return "more than 32 bytes apart, no two lanes can share a sector"
    if (31 * stride + size) % 32:
        return "a sector is moved whole, even when one byte of it is wanted: round up"
    return "where does the last lane's piece end? Up to there every sector is touched"


@exercise(
    "03.2", title="Neighbouring words", par=256, limit=320, unit="sectors of packed", text_stub="cb53ba40"
)
def neighbours(answer: str) -> Verdict:
    """W4 GEMV, a warp for each row; the score is the sectors read from the weights."""
    case = product_case("w4", n=16, k=1024)  # long enough for a piece a lane to show
    outcome = _gemv(answer, case)
    return cuda.score_sectors(outcome, "packed", "the same weights, each sector moved once")


@exercise("03.3", title="Guard the tail", text_stub="26dc754c")
def ragged(answer: str) -> Verdict:
    """W4 GEMV for any N, and for a K that is no multiple of 8."""
    for n, k in ((13, 250), (3, 41), (16, 256)):
        case = product_case("w4", n=n, k=k)
        names = (*NAMES[:6], "Kp", "group_shift")
        outcome = _run(answer, (-(-n // ROWS),), case.args(*names))
        case.judge(outcome)
    return passed("right and inside its buffers for three shapes")


@exercise("03.4", title="The missing barrier", text_stub="8e19ba2e")
def shares(answer: str) -> Verdict:
    """Each of 128 numbers divided by their sum, a block for each 128, with no race."""
    rows, count = 3, 128
    values = torch.arange(rows * count).reshape(rows, count).remainder(29).float()
    args = {"values": values, "out": cuda.poisoned((rows, count), torch.float32)}
    try:
        outcome = cuda.run(answer, "shares", (rows,), (count,), args)
    except NotYet as stopped:
        raise _round_hint(stopped) from None
    # the sums of these whole numbers are exact in any order; only the division rounds
    exact = values.double() / values.double().sum(1, keepdim=True)
    cuda.expect(outcome.args["out"], exact, bound=1e-7, name="out")
    if not outcome.trace.requests(space="shared"):
        hint = "keep the loop over part[], and add the line that is missing"
        return not_yet("a sum through shared memory", "no access to shared memory", hint)
    return passed("no race, and the shares are right")


def _round_hint(stopped: NotYet) -> NotYet:
    """A race of a line with itself: the general hint would put a barrier between the line and itself."""
    lines = set(re.findall(r"\bline (\d+)", stopped.verdict.got.split("\n")[0]))
    if not stopped.verdict.got.startswith("race") or len(lines) != 1:
        return stopped
    hint = "one round meets the next on this line: every round needs a barrier that all 128 threads reach"
    return NotYet(stopped.verdict.with_frame(hint=hint))


@exercise("03.5", title="Wide loads", par=16, limit=20, unit="requests for packed", text_stub="12b64ba4")
def wide_loads(answer: str) -> Verdict:
    """W4 GEMV with K a multiple of 1024; the score is the warp instructions that read the weights."""
    case = product_case("w4", n=8, k=2048)
    outcome = _gemv(answer, case)
    wanted = outcome.trace.compulsory_sectors("packed")
    if (moved := outcome.trace.sectors(buffer="packed", kind="read")) > 1.5 * wanted:
        hint = "neighbouring lanes must still read neighbouring pieces, now of 16 bytes"
        if max(row.size for row in outcome.trace.select(buffer="packed", kind="read")) < 16:
            hint = "first copy a whole piece, const uint4 piece = pieces[p]; then use the words of the copy"
        return not_yet(f"about {wanted} sectors of packed", f"{moved} sectors", hint)
    return cuda.score_requests(outcome, "packed", "a quarter of the instructions, the same sectors")


def _gemv(answer: str, case: ProductCase) -> cuda.Outcome:
    grid = (case.weight.n // ROWS,)
    outcome = _run(answer, grid, case.args(*NAMES))
    case.judge(outcome)
    return outcome


def _run(answer: str, grid: tuple[int, ...], args: dict[str, Any]) -> cuda.Outcome:
    """Launch a GEMV with a warp for each row; 32 lanes that store one output are told so."""
    try:
        return cuda.run(answer, "gemv", grid, (32 * ROWS,), args)
    except NotYet as stopped:
        if not re.match(r"race: two writes.* writes out\[", stopped.verdict.got):
            raise
        # a barrier, which the general hint proposes, would keep 32 stores
        hint = "32 lanes have the same n: each takes a part of the row, warp_sum adds them, one lane stores"
        raise NotYet(stopped.verdict.with_frame(hint=hint)) from None
