"""Exercises of chapter 05: loads for each multiply-add, a missing barrier, padding, the W3 lane map."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from labkit.check import Verdict, cuda, exercise, forbid_calls, not_yet, passed
from labkit.check.cuda_case import product_case
from labkit.check.verdict import NotYet
from labkit.widgets.warp_access import LANES, from_offsets

WARPS = 8
"""Warps of a block of the tiled kernels."""

TILE_ROWS, GROUPS = 64, 4
"""Rows of the weight in a tile, and groups of eight columns in each (W3, 32 columns at a time)."""

_GROUP_BYTES = 3  # eight W3 codes
_ROW_BYTES = 96  # 256 columns of W3


@exercise("05.1", title="Loads for each multiply-add")
def loads_per_fma(answer: Callable[[int, int], float]) -> Verdict:
    """Shared-memory loads for one multiply-add of a thread that makes rows × columns outputs."""
    forbid_calls(answer, ("TilePicker",))
    for rows, columns in ((1, 1), (2, 4), (4, 4), (1, 8), (8, 8), (3, 5)):
        wanted = (rows + columns) / (rows * columns)
        got = answer(rows, columns)
        if not (hasattr(got, "__float__") and math.isclose(float(got), wanted, rel_tol=1e-6)):
            hint = "at one k: how many values of A and of B does it read, how many products does it make?"
            return not_yet(f"{wanted:.4g} for {rows} × {columns} outputs", repr(got), hint)
    return passed("right for six shapes; the seed kernel's 2 × 4 needs 0.75")


@exercise("05.2", title="The missing barrier", text_stub="7d7a9d01")
def second_barrier(answer: str) -> Verdict:
    """The 16 × 16 tile without a race."""
    m, n, k = 16, 32, 64
    random = torch.Generator().manual_seed(5)
    x = torch.randn(m, k, generator=random).half()
    w = torch.randn(n, k, generator=random).half()
    out = cuda.poisoned((m, n))
    args = {"x": x, "w": w, "out": out, "M": m, "N": n, "K": k}
    try:
        outcome = cuda.run(answer, "gemm_16", (n // 16, m // 16), (16, 16), args)
    except NotYet as stopped:
        if not stopped.verdict.got.startswith("race"):
            raise
        # the general hint looks between the two lines; here the loop comes round from one to the other
        hint = "the loop comes round: a fast thread fills the next tile. Which barrier should it wait at?"
        raise NotYet(stopped.verdict.with_frame(hint=hint)) from None
    exact = x.double() @ w.double().t()
    # float sums of 64 products, then one rounding to half
    cuda.expect(outcome.args["out"], exact, bound=2.0**-10 * exact.abs().max().item(), name="out")
    if not outcome.trace.requests(space="shared"):
        return not_yet(
            "a product by tiles", "no access to shared memory", "keep both tiles, and add a barrier"
        )
    return passed("no race, and the product is right")


@exercise("05.3", title="Padding", par=128, limit=192, unit="store wavefronts", text_stub="1d44c53d")
def padded_tile(answer: str) -> Verdict:
    """The weights turned round through shared memory; the score is the wavefronts of the stores."""
    case = product_case("w4", n=64, k=64, group_size=32)
    weight = case.weight
    turned = weight.dequantize(torch.float16).t().contiguous()
    args = case.args("packed", "scales") | {"out": cuda.poisoned(turned.shape)}
    args |= {"N": weight.n, "K": weight.k, "group_shift": 5}
    outcome = cuda.run(answer, "turn_w4", (weight.n // 64, weight.k // 32), (256,), args)
    cuda.expect(outcome.args["out"], turned, name="out")
    reads = {"space": "shared", "kind": "read"}
    if (asked := outcome.trace.requests(**reads)) and outcome.trace.wavefronts(**reads) > 2 * asked:
        got = f"{outcome.trace.wavefronts(**reads)} wavefronts for {asked} reads"
        hint = "the conflict went from the stores to the reads: keep the tile as [k][n], and change PAD"
        return not_yet("reads of the tile without a conflict", got, hint)
    return cuda.score_wavefronts(outcome, kind="write", message="the same weights, and the stores spread out")


@exercise("05.4", title="The W3 lane map", par=10, limit=12, unit="sectors a request")
def w3_lane(answer: Callable[[int, int], tuple[int, int]]) -> Verdict:
    """(row, group) of a lane: every piece of the tile once, neighbours close in memory."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    tile: list[list[tuple[int, int]]] = []
    for warp in range(WARPS):
        tile.append([])
        for lane in range(LANES):
            place = _pair(came := answer(warp, lane))
            where = f"warp {warp}, lane {lane}"
            if place is None or not (0 <= place[0] < TILE_ROWS and 0 <= place[1] < GROUPS):
                hint = "return (row, group): row 0 … 63 of the tile, group 0 … 3 of the row"
                return not_yet(f"a row and a group for {where}", repr(came), hint)
            if place in places:
                first = "warp {}, lane {}".format(*places[place])
                hint = "256 lanes, 256 pieces: each lane its own"
                return not_yet("every piece once", f"{place} for {first} and for {where}", hint)
            places[place] = (warp, lane)
            tile[-1].append(place)
    score = _sectors_a_request(tile)
    message = "256 lanes share 256 pieces, and a warp reads few sectors"
    return passed(message, score=score, hint="let neighbouring lanes take the groups of one row first")


def _pair(value: Any) -> tuple[int, int] | None:
    """Two whole numbers, or None."""
    try:
        row, group = value
        pair = int(row), int(group)
    except (TypeError, ValueError):
        return None
    return pair if pair == (row, group) else None


def _sectors_a_request(tile: list[list[tuple[int, int]]]) -> float:
    """Sectors of one byte load of a warp, on average over the warps, 8 steps along K and the 3 bytes."""
    counts = []
    for step in range(_ROW_BYTES // (_GROUP_BYTES * GROUPS)):
        for byte in range(_GROUP_BYTES):
            start = _GROUP_BYTES * GROUPS * step + byte
            for lanes in tile:
                offsets = [row * _ROW_BYTES + group * _GROUP_BYTES + start for row, group in lanes]
                counts.append(len(from_offsets(offsets, 1).sectors))
    return sum(counts) / len(counts)
