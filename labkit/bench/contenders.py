"""Who competes: labkit's kernels by their dispatch names, dense cuBLAS, and any peer that is added.

A contender turns copies of one weight into calls. labkit's own go through
:mod:`labkit.kernels.registry`, as QuantLinear does, so what is timed is what a layer would run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit.bench import cases
from labkit.bench.cases import Case
from labkit.bench.check import TOLERANCE, dense_copy
from labkit.errors import InputError
from labkit.kernels import registry
from labkit.kernels.registry import Request, Unavailable
from labkit.kernels.seed.linear import NAMES as SEED_NAMES
from labkit.nn import linear as _layers
from labkit.nn.dispatch import DispatchTable
from labkit.nn.memory import MemoryBudget
from labkit.quant.formats import QuantWeight

Call = Callable[[Tensor], Tensor]

DENSE = cases.DENSE["float16"]


class Contender:
    """One column of a table.

    Attributes:
        name: as the record has it.
        repeatable: it promises the same bits for the same input.
        activations: name of the only dtype that it takes; empty for that of the case.
        tolerance: how many times the error of plain torch it may have, or its figures are not taken.
    """

    name = ""
    repeatable = True
    activations = ""
    tolerance = TOLERANCE

    def why_not(self, case: Case, weight: QuantWeight) -> str:
        """Why it cannot run this case, or an empty string."""
        return ""

    def nbytes(self, case: Case) -> int:
        """Bytes of weights that one call reads, for GB/s and for the number of copies."""
        return case.weight_bytes

    def held(self, case: Case, weight: QuantWeight) -> QuantWeight:
        """The weight that it really multiplies by: its result is compared with the product of that."""
        return weight

    def method(self, case: Case, weight: QuantWeight) -> dict[str, Any]:
        """What a record should say of how it computes this case."""
        return {"activations": self.activations} if self.activations not in ("", case.dtype) else {}

    def compile(self, found: Sequence[Case]) -> None:
        """Make ready, once for a whole run, what takes long and needs no weight."""

    def calls(self, case: Case, weights: Sequence[QuantWeight], copies: int) -> list[Call]:
        """One call for each of ``copies`` copies, ``x [M, K]`` to ``y [M, N]``, for any M.

        Args:
            case: one of those that the calls will serve; they differ in M.
            weights: at least one copy of the packed weight; at least ``copies`` when it is read as it is.
        """
        raise NotImplementedError


class OwnKernel(Contender):
    """A kernel of the registry."""

    def __init__(self, name: str) -> None:
        self.name = name

    def why_not(self, case: Case, weight: QuantWeight) -> str:
        return registry.why_not(self.name, request(case, weight))

    def calls(self, case: Case, weights: Sequence[QuantWeight], copies: int) -> list[Call]:
        kernel = registry.get(self.name)
        made: list[Call] = []
        for weight in weights[:copies]:
            prepared = kernel.prepare(request(case, weight))
            made.append(lambda x, prepared=prepared: kernel.run(x, prepared))  # type: ignore[misc]
        return made


class SeedDispatch(OwnKernel):
    """The seed kernel that the dispatch table would take, were there no other."""

    def __init__(self) -> None:
        super().__init__(cases.SEED_DISPATCH)

    def why_not(self, case: Case, weight: QuantWeight) -> str:
        try:
            self._choose(case, weight)
        except InputError as error:
            return f"no seed kernel: {error.received}"
        return ""

    def method(self, case: Case, weight: QuantWeight) -> dict[str, Any]:
        return {"kernel": self._choose(case, weight)}

    def calls(self, case: Case, weights: Sequence[QuantWeight], copies: int) -> list[Call]:
        return [self._call(case, weight) for weight in weights[:copies]]

    def _call(self, case: Case, weight: QuantWeight) -> Call:
        found: dict[int, tuple[registry.Kernel, Any]] = {}

        def call(x: Tensor) -> Tensor:
            m = x.shape[0]
            if m not in found:
                here = replace(case, m=m)
                kernel = registry.get(self._choose(here, weight))
                found[m] = kernel, kernel.prepare(request(here, weight))
            kernel, prepared = found[m]
            return kernel.run(x, prepared)

        return call

    def _choose(self, case: Case, weight: QuantWeight) -> str:
        asked = request(case, weight)

        def why_not(name: str) -> str:
            return registry.why_not(name, asked) if name in SEED_NAMES else "no seed kernel"

        table = DispatchTable.load()
        chosen = table.select(
            asked.device, asked.capability, case.format, asked.dtype, case.m, why_not=why_not
        )
        return chosen.kernel


class DenseFp16(Contender):
    """cuBLAS on the dequantised weight, kept dense: what four or three bits have to be compared with."""

    name = DENSE
    repeatable = False
    dtype = torch.float16

    def nbytes(self, case: Case) -> int:
        return 2 * case.n * case.k

    def calls(self, case: Case, weights: Sequence[QuantWeight], copies: int) -> list[Call]:
        first = dense_copy(weights[0], self.dtype)
        values = [first, *(first.clone() for _ in range(copies - 1))]
        return [lambda x, w=w: linear(x, w) for w in values]  # type: ignore[misc]


class DenseBf16(DenseFp16):
    """The same in bfloat16."""

    name = cases.DENSE["bfloat16"]
    dtype = torch.bfloat16


_added: dict[str, Contender] = {one.name: one for one in (DenseFp16(), DenseBf16(), SeedDispatch())}


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
    """[M, K] of unit variance, in the dtype of the case."""
    source = torch.Generator(device).manual_seed(seed + case.m)
    x = torch.randn(case.m, case.k, generator=source, device=device)
    return x.to(getattr(torch, case.dtype))


def clone(weight: QuantWeight) -> QuantWeight:
    """A copy with memory of its own."""
    copied: dict[str, Any] = {name: tensor.clone() for name, tensor in weight.tensors().items()}
    return replace(weight, **copied)


def request(case: Case, weight: QuantWeight) -> Request:
    """What a layer with this weight would ask the registry for."""
    device = weight.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    budget = MemoryBudget(1 << 40)  # how much is kept is the benchmark's own business
    temp_bytes = _layers.default_temp_bytes(device.type)
    return Request(device.type, capability, case.format, case.dtype, case.m, weight, temp_bytes, budget)


__all__ = [
    "DENSE",
    "Call",
    "Contender",
    "DenseBf16",
    "DenseFp16",
    "OwnKernel",
    "SeedDispatch",
    "Unavailable",
    "add",
    "clone",
    "get",
    "random_input",
    "random_weight",
    "request",
]
