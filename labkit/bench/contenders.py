"""Who competes: labkit's kernels by their dispatch names, dense cuBLAS, and any peer that is added.

A contender turns copies of one weight into calls. labkit's own go through
:mod:`labkit.kernels.registry`, as QuantLinear does, so what is timed is what a layer would run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit.bench.cases import Case
from labkit.bench.check import dense_copy
from labkit.kernels import registry
from labkit.kernels.registry import Request, Unavailable
from labkit.nn import linear as _layers
from labkit.nn.memory import MemoryBudget
from labkit.quant.formats import QuantWeight

Call = Callable[[Tensor], Tensor]

DENSE = "dense_fp16"


class Contender(Protocol):
    """One column of a table.

    Attributes:
        name: as the record has it.
        repeatable: it promises the same bits for the same input.
    """

    name: str
    repeatable: bool

    def why_not(self, case: Case, weight: QuantWeight) -> str:
        """Why it cannot run this case, or an empty string."""

    def nbytes(self, case: Case) -> int:
        """Bytes of weights that one call reads, for GB/s and for the number of copies."""

    def calls(self, case: Case, weights: Sequence[QuantWeight], copies: int) -> list[Call]:
        """One call for each of ``copies`` copies, ``x [M, K]`` to ``y [M, N]``.

        Args:
            weights: at least one copy of the packed weight; at least ``copies`` when it is read as it is.
        """


class OwnKernel:
    """A kernel of the registry."""

    repeatable = True

    def __init__(self, name: str) -> None:
        self.name = name

    def why_not(self, case: Case, weight: QuantWeight) -> str:
        return registry.why_not(self.name, _request(case, weight))

    def nbytes(self, case: Case) -> int:
        return case.weight_bytes

    def calls(self, case: Case, weights: Sequence[QuantWeight], copies: int) -> list[Call]:
        kernel = registry.get(self.name)
        made: list[Call] = []
        for weight in weights[:copies]:
            prepared = kernel.prepare(_request(case, weight))
            made.append(lambda x, prepared=prepared: kernel.run(x, prepared))  # type: ignore[misc]
        return made


class DenseFp16:
    """cuBLAS on the dequantised weight, kept dense: what four or three bits have to be compared with."""

    name = DENSE
    repeatable = False

    def why_not(self, case: Case, weight: QuantWeight) -> str:
        return ""

    def nbytes(self, case: Case) -> int:
        return 2 * case.n * case.k

    def calls(self, case: Case, weights: Sequence[QuantWeight], copies: int) -> list[Call]:
        first = dense_copy(weights[0])
        values = [first, *(first.clone() for _ in range(copies - 1))]
        return [lambda x, w=w: linear(x, w) for w in values]  # type: ignore[misc]


_added: dict[str, Contender] = {DENSE: DenseFp16()}


def add(contender: Contender) -> None:
    """Make a peer known by its name, for the cases that name it."""
    _added[contender.name] = contender


def get(name: str) -> Contender:
    """The contender of that name: an added one, else the kernel of the registry."""
    return _added.get(name) or OwnKernel(name)


def random_weight(case: Case, device: str, seed: int = 0) -> QuantWeight:
    """A weight of random codes and scales for one case, made on ``device``.

    Results stay within FP16 for inputs of unit variance: y has a variance of about one.
    """
    # A seed a shape: the same weight for every M, so that a sweep compares like with like.
    source = torch.Generator(device).manual_seed(seed + case.n * 1009 + case.k)
    low, high = (-8, 8) if case.format == "w4" else (-4, 4)
    codes = torch.randint(low, high, (case.n, case.k), generator=source, device=device, dtype=torch.int8)
    groups = -(-case.k // case.group)
    spread = torch.rand(case.n, groups, generator=source, device=device)
    # Codes are spread evenly, with a standard deviation of (high - low) / sqrt(12).
    scales = (0.5 + spread) * 12**0.5 / (high - low) / case.k**0.5
    return QuantWeight.from_codes(case.format, codes, scales.half(), group_size=case.group)


def random_input(case: Case, device: str, seed: int = 1) -> Tensor:
    """float16 [M, K] of unit variance."""
    source = torch.Generator(device).manual_seed(seed + case.m)
    return torch.randn(case.m, case.k, generator=source, device=device).half()


def clone(weight: QuantWeight) -> QuantWeight:
    """A copy with memory of its own."""
    copied: dict[str, Any] = {name: tensor.clone() for name, tensor in weight.tensors().items()}
    return replace(weight, **copied)


def _request(case: Case, weight: QuantWeight) -> Request:
    device = weight.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    budget = MemoryBudget(1 << 40)  # how much is kept is the benchmark's own business
    temp_bytes = _layers.DEFAULT_TEMP_BYTES
    return Request(device.type, capability, case.format, "float16", case.m, weight, temp_bytes, budget)


__all__ = [
    "DENSE",
    "Call",
    "Contender",
    "DenseFp16",
    "OwnKernel",
    "Unavailable",
    "add",
    "clone",
    "get",
    "random_input",
    "random_weight",
]
