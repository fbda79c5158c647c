"""Small weights and activations for exercises in CUDA C++, with the exact result and the error rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.bench.check import reference
from labkit.check.cuda import Outcome, expect, poisoned
from labkit.errors import refuse, require
from labkit.quant.formats import QuantWeight

_CODES = {"w4": (-8, 7), "w3": (-4, 3)}


@dataclass(frozen=True, eq=False)
class ProductCase:
    """out = x · Wᵀ for one weight.

    Attributes:
        weight: random, [N, K].
        x: float16 [M, K].
        exact: float64 [M, N], from the dequantised weights.
        bound: largest absolute error that is right: twice that of the plain FP16 product.
        out_dtype: float16 or float32.
    """

    weight: QuantWeight
    x: Tensor
    exact: Tensor
    bound: float
    out_dtype: torch.dtype = torch.float16

    def args(self, *names: str, **more: Any) -> dict[str, Any]:
        """Parameters for :func:`labkit.check.cuda.run`, by name in this order, fresh on every call.

        Args:
            names: of ``x`` half [M, K], ``packed`` uint8 [N, Kp/2] or [N, 3·Kp/8], ``scales`` half [N, Kp/G],
                ``offset`` (None without one), ``out`` [M, N] (poisoned), ``M``, ``N``, ``K``, ``Kp``, ``G``,
                ``groups`` (Kp/G), ``group_shift`` (log2 G).
            more: parameters of the exercise's own, after these.
        """
        weight = self.weight
        known = {
            "x": self.x,
            "packed": weight.packed,
            "scales": weight.scales,
            "offset": weight.offset,
            "out": poisoned(self.exact.shape, self.out_dtype),
            "M": self.x.shape[0],
            "N": weight.n,
            "K": weight.k,
            "Kp": weight.k_padded,
            "G": weight.group_size,
            "groups": weight.scales.shape[1],
            "group_shift": weight.group_size.bit_length() - 1,
        }
        for name in names:
            if name not in known:
                refuse("names", repr(name), "of " + ", ".join(known))
        # a launch may write where it should not: the case itself stays as it is
        chosen = {name: known[name] for name in names} | more
        return {name: _fresh(value) for name, value in chosen.items()}

    def judge(self, outcome: Outcome, name: str = "out", hint: str = "") -> None:
        """End the check unless the output ``name`` is written everywhere and within the bound."""
        expect(outcome.args[name], self.exact, self.bound, name=name, hint=hint)


def _fresh(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def product_case(
    format: str = "w4",
    n: int = 16,
    k: int = 256,
    m: int = 1,
    *,
    group_size: int = 64,
    offset: bool = False,
    out_dtype: torch.dtype = torch.float16,
    seed: int = 3,
) -> ProductCase:
    """A random weight [n, k] and activations [m, k], the same on every machine and run.

    Args:
        format: "w4" or "w3"; every code of the format occurs.
        group_size: 16, 32, 64 or 128; k may be any number, and is padded to whole groups.
        offset: the weight has a float16 offset a group.
        out_dtype: float16 or float32, of the output.
    """
    require(format in _CODES, "format", repr(format), "w4 or w3")
    require(out_dtype in (torch.float16, torch.float32), "out_dtype", out_dtype, "float16 or float32")
    random = torch.Generator().manual_seed(seed)
    low, high = _CODES[format]
    groups = -(-k // group_size)
    codes = torch.randint(low, high + 1, (n, k), generator=random, dtype=torch.int8)
    scales = (0.02 + 0.03 * torch.rand(n, groups, generator=random)).half()
    shift = (0.1 * torch.randn(n, groups, generator=random)).half() if offset else None
    weight = QuantWeight.from_codes(format, codes, scales, shift, group_size=group_size)
    x = torch.randn(m, k, generator=random).half()
    wanted = reference(x, weight)
    return ProductCase(weight, x, wanted.exact, wanted.bound, out_dtype)
