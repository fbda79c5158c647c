"""Exercises of chapter 01: bytes, ceilings, reuse, the ridge, what the article achieved."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from labkit import device, quoted
from labkit.check import Verdict, exercise, forbid_calls, not_yet, passed
from labkit.check.normalise import array
from labkit.errors import require

GIVEN = ("CountedWeights",)
"""What the notebook imports from here: an answer may use it."""

LIBRARY = ("bytes_per_weight", "decode_ceiling_tok_s", "achieved_gb_s", "ridge_m", "Roofline", "step_seconds")


class CountedWeights:
    """A weight matrix that counts how often its rows are read.

    Args:
        values: float32 [N, K].

    Attributes:
        shape: (N, K).
        row_reads: rows handed out so far.
    """

    def __init__(self, values: np.ndarray) -> None:
        require(values.ndim == 2, "values", f"{values.ndim} dimensions", "a matrix [N, K]")
        self._values = values.astype(np.float32)
        self._values.setflags(write=False)
        self.shape = values.shape
        self.row_reads = 0

    def row(self, n: int) -> np.ndarray:
        """Row ``n``, float32 [K]; counted as one read of all its bytes."""
        require(0 <= n < self.shape[0], "n", n, f"0 to {self.shape[0] - 1}")
        self.row_reads += 1
        return self._values[n]

    @property
    def reads_per_weight(self) -> float:
        """How many times each weight was read, on average."""
        return self.row_reads / self.shape[0]


def _close(got: Any, wanted: float) -> bool:
    # any real number counts, NumPy's and torch's scalars included
    return hasattr(got, "__float__") and math.isclose(float(got), wanted, rel_tol=1e-3)


@exercise("01.1", title="Bytes of one weight")
def weight_bytes(answer: Callable[[int, int | None, bool], float]) -> Verdict:
    """Bytes a weight from bits, group size and whether there is an offset."""
    forbid_calls(answer, LIBRARY)
    cases: list[tuple[int, int | None, bool]] = [(4, 128, False), (3, 128, False), (4, 32, True)]
    cases += [(16, None, False), (8, 32, False), (3, 64, True)]
    for bits, group, offset in cases:
        wanted, got = device.bytes_per_weight(bits, group, offset), answer(bits, group, offset)
        if not _close(got, wanted):
            hint = "bits / 8 for the code; the group shares a 2-byte scale (and a 2-byte offset)"
            return not_yet(f"{wanted:g} for bits {bits}, group {group}, offset {offset}", repr(got), hint)
    return passed("right for six formats")


@exercise("01.2", title="The ceiling in tokens per second")
def ceiling(answer: Callable[[float, float, float], float]) -> Verdict:
    """Tokens a second from weights, bytes a weight and GB/s."""
    forbid_calls(answer, LIBRARY)
    for shape, bits in itertools.product(quoted.models().values(), (3, 4)):
        size = device.bytes_per_weight(bits, 128)
        for card in ("rtx3050-laptop", "h200"):
            bandwidth = device.get_device(card).bandwidth_gb_s
            wanted = device.decode_ceiling_tok_s(shape.decode_weights * size, bandwidth)
            if not _close(got := answer(shape.decode_weights, size, bandwidth), wanted):
                hint = "bytes moved for one token first; GB/s are 1e9 bytes a second"
                where = f"{shape.name} in W{bits} at {bandwidth:g} GB/s"
                return not_yet(f"{wanted:.4g} tokens/s for {where}", repr(got), hint)
    return passed("right for five models, two formats, two cards")


@exercise("01.3", title="Read each weight once", par=1, limit=2, unit="reads of each weight")
def batched_rows(answer: Callable[[CountedWeights, np.ndarray], np.ndarray]) -> Verdict:
    """Y [M, N] from X [M, K] and rows that are counted; the score is how often a weight is read."""
    forbid_calls(answer, "_values")
    scores = []
    for m, n, k in ((8, 24, 32), (1, 5, 7), (13, 6, 9)):
        rng = np.random.default_rng(m)
        x = rng.standard_normal((m, k)).astype(np.float32)
        values = rng.standard_normal((n, k)).astype(np.float32)
        weights = CountedWeights(values)
        came = answer(weights, x)
        y = array(came)
        if y is None or y.shape != (m, n):
            got = f"shape {y.shape}" if y is not None and y.ndim else type(came).__name__
            return not_yet(
                f"an array of shape ({m}, {n})", got, "one row of Y a token, one column a weight row"
            )
        if not np.allclose(y, x @ values.T, atol=1e-4):
            return not_yet("Y = X times the transposed weights", "other values", "Y[m, n] = X[m] · W[n]")
        if weights.row_reads < n:
            return not_yet(
                f"{n} row reads or more", weights.row_reads, "take the rows through weights.row(n)"
            )
        scores.append(weights.reads_per_weight)
    hint = "swap the two loops: keep one row, use it for every token"
    worst = max(scores)
    if worst > 2:
        return not_yet("at most 2 reads of each weight", f"{worst:g}", hint, score=worst)
    return passed("the same result from fewer bytes", score=worst)


@exercise("01.4", title="The ridge")
def ridge(answer: Callable[[float, float, float], float]) -> Verdict:
    """The M at which reading and computing take the same time."""
    forbid_calls(answer, LIBRARY)
    for card, (bits, group) in itertools.product(device.devices().values(), ((4, 128), (3, 128), (16, None))):
        size = device.bytes_per_weight(bits, group)
        wanted = device.ridge_m(card.tensor_tflops, card.bandwidth_gb_s, size)
        if not _close(got := answer(card.tensor_tflops, card.bandwidth_gb_s, size), wanted):
            hint = "set bytes / bandwidth equal to 2 · M FLOP / peak, for one weight; solve for M"
            return not_yet(f"{wanted:.2f} for {card.name}, {size:g} bytes a weight", repr(got), hint)
    return passed("right for every card of the table, in three formats")


@exercise("01.5", title="What the article achieved")
def tiled_gb_s(answer: Callable[[Mapping[str, float], int], float]) -> Verdict:
    """GB/s of weights from a quoted row (n, k, tiled_ms) and the bits; groups of 128."""
    forbid_calls(answer, LIBRARY)
    for name, bits in (("tiled_w4", 4), ("tiled_w3", 3)):
        for row in quoted.table(quoted.DEEPINFER, name).rows:
            nbytes = row["n"] * row["k"] * device.bytes_per_weight(bits, 128)
            wanted = device.achieved_gb_s(nbytes, row["tiled_ms"] / 1e3)
            if not _close(got := answer(row, bits), wanted):
                where = f"{row['n']}×{row['k']} in W{bits}"
                hint = "weight bytes = n · k · (bits / 8 + 2 / 128); milliseconds are 1e-3 s"
                return not_yet(f"{wanted:.2f} GB/s for {where}", repr(got), hint)
    return passed("all five rows: between 7 and 9 GB/s of a nominal 192")
