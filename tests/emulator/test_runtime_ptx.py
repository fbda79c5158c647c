"""ptx.cuh: NVRTC takes every wrapper for every generation and makes the instruction that is meant."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from runtime_cases import KERNELS

from labkit import emulator
from labkit.kernels import sass
from labkit.kernels.source import KernelSource

FILE = KERNELS / "ptx_all.cu"
# SASS instruction → how many of it the kernel has. A wait for all is one more group and wait.
EXPECTED = {
    "LDGSTS.E.BYPASS.128": 1, "LDGSTS.E.BYPASS.128.ZFILL": 1, "LDGSTS.E.64": 1, "LDGSTS.E": 1,
    "LDGDEPBAR": 2, "DEPBAR.LE": 2,
    "LDSM.16.M88.4": 1, "LDSM.16.M88.2": 1, "LDSM.16.M88": 1,
    "LDSM.16.MT88.4": 1, "LDSM.16.MT88.2": 1, "LDSM.16.MT88": 1,
    "HMMA.16816.F32": 1, "HMMA.16816.F32.BF16": 1, "HMMA.16816.F16": 1, "IMMA.16832.S8.S8": 1,
    "LDG.E.NA.128.CONSTANT": 1, "LDG.E.NA.64.CONSTANT": 1, "PRMT": 1,
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_every_wrapper_is_its_instruction(arch: str) -> None:
    listing = sass.disassemble(KernelSource(str(FILE), "every_wrapper"), arch)
    found = Counter(instruction.text.split()[0] for instruction in listing.instructions)
    assert {name: found[name] for name in EXPECTED} == EXPECTED


def test_the_emulator_takes_every_wrapper() -> None:
    kernel = emulator.compile(FILE.read_text(encoding="utf-8"), filename="ptx_all.cu", isolate=False)
    out = np.full(32, np.nan, np.float32)
    trace = kernel.trace((1,), (32,), [np.zeros(512, np.int8), out, 16])
    assert trace.ok, trace.report()
    assert np.isfinite(out).all()
