"""The error rule: nothing is timed that was not first found right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit.quant.formats import QuantWeight

_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True)
class Reference:
    """What a product should be.

    Attributes:
        exact: float64 [M, N], from the same dequantised weights.
        plain_error: largest absolute error of torch in the activations' dtype on them.
        bound: :data:`TOLERANCE` times that, or as many roundings of the largest result where that is more.
    """

    exact: Tensor
    plain_error: float
    bound: float

    def allowing(self, tolerance: float) -> Reference:
        """The same with another factor than :data:`TOLERANCE` in the bound."""
        return replace(self, bound=self.bound * tolerance / TOLERANCE)


TOLERANCE = 2.0
"""How many times the error of plain torch labkit's own kernels may have."""


def reference(x: Tensor, weight: QuantWeight) -> Reference:
    """Exact and plain products; the exact one in chunks of rows, so that a large weight fits.

    Args:
        x: float16 or bfloat16 [M, K].
        weight: [N, K] on x's device.
    """
    return references(x, weight, [x.shape[0]])[x.shape[0]]


def references(x: Tensor, weight: QuantWeight, rows: Iterable[int]) -> dict[int, Reference]:
    """A reference for each of several M: row i of every batch is row i of x, so one exact product serves all.

    Args:
        x: float16 or bfloat16 [largest M, K].
        weight: [N, K] on x's device.
        rows: the M's.
    """
    wide = x.double()
    whole = torch.cat([wide @ weight.dequantize(torch.float64, part).t() for part in _row_chunks(weight)], 1)
    dense = dense_copy(weight, x.dtype)
    found = {}
    for m in rows:
        exact = whole[:m]
        # One product: in chunks, the library might choose another algorithm than it does for the whole.
        plain_error = (linear(x[:m], dense).double() - exact).abs().max().item()
        rounding = torch.finfo(x.dtype).eps / 2 * exact.abs().max().item()
        found[m] = Reference(exact, plain_error, TOLERANCE * max(plain_error, rounding))
    return found


def dense_copy(weight: QuantWeight, dtype: torch.dtype = torch.float16) -> Tensor:
    """The dequantised weight [N, K], filled a block of rows at a time: float32 temporaries stay small."""
    values = torch.empty(weight.n, weight.k, dtype=dtype, device=weight.device)
    for rows in _row_chunks(weight):
        values[rows] = weight.dequantize(dtype, rows)
    return values


def _row_chunks(weight: QuantWeight) -> list[slice]:
    rows = max(1, _CHUNK_BYTES // (8 * weight.k_padded))
    return [slice(start, min(start + rows, weight.n)) for start in range(0, weight.n, rows)]


@dataclass(frozen=True)
class Verdict:
    """Outcome of one check: ``problem`` is empty when the result is right."""

    max_abs: float
    plain: float
    bound: float
    problem: str = ""

    def to_json(self) -> dict[str, float]:
        """The figures, for a record; an infinite error is left out, JSON has none."""
        found = {"max_abs": self.max_abs, "plain": self.plain, "bound": self.bound}
        return {name: value for name, value in found.items() if math.isfinite(value)}


def judge(y: object, wanted: Reference, dtype: torch.dtype) -> Verdict:
    """Compare one result with the reference.

    A shape, dtype or NaN that is wrong is a problem of its own, with an infinite error.
    """

    def wrong(problem: str) -> Verdict:
        return Verdict(float("inf"), wanted.plain_error, wanted.bound, problem)

    if not isinstance(y, Tensor):
        return wrong(f"returned {type(y).__name__}")
    if tuple(y.shape) != tuple(wanted.exact.shape) or y.dtype != dtype:
        return wrong(f"returned {y.dtype} {list(y.shape)}, not {dtype} {list(wanted.exact.shape)}")
    missing = int((~torch.isfinite(y)).sum())
    if missing:
        return wrong(f"{missing} of {y.numel()} results are NaN or Inf")
    error = (y.double() - wanted.exact).abs().max().item()
    bad = "" if error <= wanted.bound else f"error {error:.3g}, allowed {wanted.bound:.3g}"
    return Verdict(error, wanted.plain_error, wanted.bound, bad)


def check(
    call: Callable[[Tensor], Tensor], x: Tensor, wanted: Reference, *, repeatable: bool = True
) -> Verdict:
    """Run ``call`` into memory that held NaN; with ``repeatable``, twice, and the same bits again."""
    first = _poisoned(call, x, wanted)
    verdict = judge(first, wanted, x.dtype)
    if repeatable and not verdict.problem and not torch.equal(first, _poisoned(call, x, wanted)):
        return Verdict(verdict.max_abs, verdict.plain, verdict.bound, "a repeat gave other bits")
    return verdict


def _poisoned(call: Callable[[Tensor], Tensor], x: Tensor, wanted: Reference) -> Tensor:
    # torch hands the freed block to the next request of its size: an element left unwritten shows as NaN.
    poison = torch.full(wanted.exact.shape, float("nan"), dtype=x.dtype, device=x.device)
    del poison
    return call(x)
