"""The launches that ncu_counts.py and sanitizer.py look at: every seed kernel on small ragged shapes.

A case runs through labkit's dispatch names where the kernel has one, so what is looked at is what a
layer launches; the tensor-core prototype of the emulator's tests is launched directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.kernels import registry, runner
from labkit.kernels import zsplit as _zsplit  # noqa: F401  (registers)
from labkit.kernels.registry import Request
from labkit.kernels.seed import linear as _seed  # noqa: F401  (registers)
from labkit.kernels.source import KernelSource
from labkit.nn.memory import MemoryBudget
from labkit.quant import quantize

ENTRIES: tuple[str, ...] = (
    "gemm_tiled_w4",
    "gemm_tiled_w3",
    "gemv_row_w4",
    "gemv_row_w3",
    "gemv_batch_w4",
    "gemv_batch_w3",
)
ENTRIES += ("zsplit_gemm", "zsplit_gemm_int8", "zsplit_reduce", "zsplit_quantize", "mma_w4")
"""Every kernel that a case launches, by its name in the source."""

MMA_FILE = Path(__file__).resolve().parents[2] / "tests" / "emulator" / "kernels" / "mma_w4.cu"


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        kernel: dispatch name, or "mma_w4".
        format, m, n, k, group, offset: of the product; offset is asymmetric quantisation.
        defines: of mma_w4 only.
    """

    kernel: str
    format: str
    m: int
    n: int
    k: int
    group: int = 32
    offset: bool = False
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def label(self) -> str:
        """Such as "gemm_tiled w4 37×130×256 g128"."""
        more = " offset" if self.offset else ""
        more += "".join(f" {name}={value}" for name, value in self.defines)
        return f"{self.kernel} {self.format} {self.m}×{self.n}×{self.k} g{self.group}{more}"

    def ready(self, device: str) -> tuple[Callable[[], Any], torch.Tensor]:
        """The call, inputs on ``device``; and the exact result, float64 on the CPU.

        Inputs are made on the CPU, so that nothing but copies runs on a GPU before the call.
        """
        source = torch.Generator().manual_seed(self.m * 7919 + self.n)
        x = torch.randn(self.m, self.k, generator=source).half()
        if self.kernel == "mma_w4":
            return self._prototype(device, x, source)
        values = torch.randn(self.n, self.k, generator=source) * 0.05
        weight = quantize(values, self.format, self.group, offset=self.offset)
        exact = x.double() @ weight.dequantize(torch.float64).t()
        capability = torch.cuda.get_device_capability() if device == "cuda" else None
        there, budget = weight.to(device), MemoryBudget(1 << 30)
        request = Request(device, capability, self.format, "float16", self.m, there, 16 << 20, budget)
        reason = registry.why_not(self.kernel, request)
        if reason:
            raise RuntimeError(f"{self.label}: {reason}")
        kernel = registry.get(self.kernel)
        prepared = kernel.prepare(request)
        moved = x.to(device)
        return lambda: kernel.run(moved, prepared), exact

    def _prototype(
        self, device: str, x: torch.Tensor, source: torch.Generator
    ) -> tuple[Callable[[], Any], torch.Tensor]:
        kernel = runner.load(KernelSource(str(MMA_FILE), "mma_w4", dict(self.defines)), device)
        codes = torch.randint(0, 16, (self.n, self.k // 8, 8), generator=source)
        # Nibble j of a word is code + 8 of k = 2j for j < 4, and of k = 2(j - 4) + 1 above.
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        words = torch.zeros(self.n, self.k // 8, dtype=torch.int64)
        for nibble, k in enumerate(order):
            words |= codes[:, :, k] << (4 * nibble)
        packed = words.to(torch.uint32).view(torch.int32).to(device)
        scales = (torch.rand(self.n, self.k // self.group, generator=source) * 0.02 + 0.01).half()
        weight = (codes.view(self.n, self.k) - 8) * scales.double().repeat_interleave(self.group, 1)
        out = torch.empty(self.m, self.n, dtype=torch.float16, device=device)
        grid = (self.n // 64, -(-self.m // 16))
        args = [x.to(device), packed, scales.to(device), out, self.m, self.n, self.k, self.group]

        def call() -> Any:
            kernel(grid, (128,), args)
            return out

        return call, x.double() @ weight.t()


def counted() -> list[Case]:
    """Cases whose accesses are counted: two or three shapes a kernel."""
    cases = [
        Case("gemm_tiled", form, m, n, k, group, offset)
        for form in ("w4", "w3")
        for m, n, k, group, offset in ((37, 130, 256, 128, False), (9, 65, 416, 32, True))
    ]
    for name, forms in (("gemv_single_row", ("w4", "w3")), ("gemv_batch_w3", ("w3",))):
        rows = (1,) if name == "gemv_single_row" else (2, 7)
        cases += [
            Case(name, form, m, n, k, group)
            for form in forms
            for m in rows
            for n, k, group in ((101, 416, 32), (64, 2048, 128))
        ]
    cases += [Case("gemv_small_batch", form, 7, 101, 416) for form in ("w4", "w3")]
    cases += [Case("gemv_small_batch", "w4", 8, 64, 2048, 128)]
    cases += [Case("zsplit", form, m, 500, 544) for form in ("q8_0", "q4_0") for m in (1, 6)]
    cases += [Case("zsplit_int8", "q8_0", m, 500, 544) for m in (1, 6)]
    return cases + prototype()


def prototype() -> list[Case]:
    """The tensor-core prototype with cp.async, with paddings that tell two causes apart.

    Rows of x beyond M are copied with a source size of 0. A row of A lies 128 + 2 * APAD bytes from the next
    in shared memory, a row of B 32 + BPAD bytes: with the pads 8 and 16 every other row begins in the
    middle of 32 bytes, with 16, and 0 or 32, none does.
    """
    cases = []
    for m in (16, 21, 32):
        for a_pad, b_pad in ((8, 16), (8, 0), (16, 0), (16, 32)):
            defines = (("APAD", a_pad), ("BPAD", b_pad))
            cases.append(Case("mma_w4", "w4", m, 128, 256, 128, defines=defines))
    return cases if MMA_FILE.is_file() else []


def checked() -> list[Case]:
    """Cases for the sanitizer: edges of every tile, odd K, offsets, every group size."""
    cases = []
    shapes = ((1, 1, 32, 32), (33, 67, 160, 32), (9, 65, 448, 64), (8, 64, 384, 128), (17, 131, 100, 32))
    for form in ("w4", "w3"):
        for name in ("gemm_tiled", "gemv_single_row", "gemv_small_batch"):
            cases += [
                Case(name, form, m, n, k, group, offset=bool(i % 2))
                for i, (m, n, k, group) in enumerate(shapes)
            ]
    cases += [Case("gemv_batch_w3", "w3", m, n, k, group) for m, n, k, group in shapes]
    for form in ("q8_0", "q4_0"):
        for name in ("zsplit", "zsplit_int8"):
            cases += [
                Case(name, form, m, n, k)
                for m, n, k in ((1, 1, 32), (1, 500, 544), (5, 67, 161), (9, 300, 96))
            ]
    return cases + [case for case in prototype() if dict(case.defines) == {"APAD": 8, "BPAD": 16}]
