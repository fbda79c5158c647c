"""The error rule: nothing is timed that was not first found right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
        plain_error: largest absolute error of FP16 torch on them.
        bound: twice that, or two roundings of the largest result where that is more.
    """

    exact: Tensor
    plain_error: float
    bound: float


def reference(x: Tensor, weight: QuantWeight) -> Reference:
    """Exact and plain products; the exact one in chunks of rows, so that a large weight fits.

    Args:
        x: float16 [M, K].
        weight: [N, K] on x's device.
    """
    wide = x.double()
    exact = [wide @ weight.dequantize(torch.float64, rows).t() for rows in _row_chunks(weight)]
    whole = torch.cat(exact, 1)
    # One product: in chunks, the library might choose another algorithm than it does for the whole.
    plain_error = (linear(x, dense_copy(weight, x.dtype)).double() - whole).abs().max().item()
    rounding = torch.finfo(x.dtype).eps / 2 * whole.abs().max().item()
    return Reference(whole, plain_error, 2 * max(plain_error, rounding))


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
