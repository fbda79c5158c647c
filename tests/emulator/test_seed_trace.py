"""The W4/W3 seed kernels traced: no race, nothing out of bounds, and counts that arithmetic gives."""

from __future__ import annotations

from typing import Any

import pytest
import seed_cases
import torch

from labkit.emulator import KernelFault
from labkit.kernels import runner
from labkit.kernels.seed.launch import GEMM_TILED, GEMV_BATCH, GEMV_ROW, KERNELS, SeedKernel, plan
from labkit.kernels.source import KernelSource

SHARED = "shared"


def traced(kernel: SeedKernel, m: int, n: int, k: int, group: int | str = 32, **defines: int) -> Any:
    """The whole launch traced, its result checked."""
    offset = torch.float32 if k % 8 else None
    weight = seed_cases.random_weight(kernel.format, n, k, group, offset)
    x = seed_cases.random_x(m, k)
    launched = plan(kernel, x, weight, seed_cases.poisoned(m, n), **defines)
    trace = launched.trace()
    seed_cases.check_written(launched)
    seed_cases.check_accurate(launched.out, x, weight)
    return trace


@pytest.mark.parametrize("entry", KERNELS)
@pytest.mark.parametrize(
    ("m", "n", "k", "group"),
    [(1, 5, 96, 32), (9, 63, 160, 32), (37, 65, 96, 32), (3, 1, 75, 32), (33, 9, 201, 64)],
)
def test_no_race_and_nothing_out_of_bounds(entry: str, m: int, n: int, k: int, group: int) -> None:
    trace = traced(KERNELS[entry], m, n, k, group)
    trace.raise_on_fault()
    assert trace.ok and not trace.faults
    assert trace.blocks_traced == trace.blocks_total


def broken(kernel: SeedKernel, old: str, new: str) -> Any:
    """Trace of the kernel with one piece of its text exchanged, M 33, N 9, K 96."""
    weight = seed_cases.random_weight(kernel.format, 9, 96, 32, None)
    launched = plan(kernel, seed_cases.random_x(33, 96), weight)
    text = launched.source.text
    assert text.count(old) >= 1
    source = KernelSource.from_text(
        text.replace(old, new), kernel.entry, launched.source.define_map, filename="broken.cu"
    )
    return runner.load(source, "cpu").trace(launched.grid, launched.block, launched.args)


def test_a_missing_barrier_is_found() -> None:
    trace = broken(GEMM_TILED["w4"], "__syncthreads();  // nobody reads the tiles any more", "")
    assert "race" in {fault.kind for fault in trace.faults}


def test_a_missing_tail_guard_is_found() -> None:
    trace = broken(GEMV_ROW["w3"], "if (n >= N) {", "if (n > N) {")
    faults = [fault for fault in trace.faults if fault.kind == "out-of-bounds"]
    assert {fault.buffer for fault in faults} >= {"packed", "scales", "out"}


@pytest.mark.parametrize("entry", KERNELS)
def test_a_launch_that_is_not_the_kernels_own_fails_its_checks(entry: str) -> None:
    kernel = KERNELS[entry]
    weight = seed_cases.random_weight(kernel.format, 9, 96, 32, None)
    launched = plan(kernel, seed_cases.random_x(1, 96), weight, LABKIT_CHECKS=1)
    launched.run()
    with pytest.raises(KernelFault, match="assert"):
        runner.load(launched.source, "cpu")(launched.grid, (32,), launched.args)


# --- counts: 37 x 130 x 256, group 128, as in the comparison with Nsight Compute ---------------------


def test_counts_of_the_w4_tile() -> None:
    trace = traced(GEMM_TILED["w4"], 37, 130, 256, 128)
    loads = [row for row in trace.rows if row.space == "global" and row.kind == "read"]
    assert (sum(row.requests for row in loads), sum(row.sectors for row in loads)) == (2968, 4896)
    assert (trace.requests(buffer="out"), trace.sectors(buffer="out")) == (190, 1478)
    assert trace.total("wavefronts", space=SHARED, kind="write") == 6144
    # 32 columns of a row are 16 bytes of codes: half of the sector that brings them.
    packed = [row for row in trace.rows if row.buffer == "packed"]
    assert [row.efficiency for row in packed] == [0.5]


@pytest.mark.parametrize(("format", "padded", "bare"), [("w4", 1.5, 16.0), ("w3", 1.5, 4.0)])
def test_padding_is_for_the_stores_not_for_the_reads(format: str, padded: float, bare: float) -> None:
    per_request = {}
    for pad in (1, 0):
        trace = traced(GEMM_TILED[format], 37, 130, 256, 128, PAD=pad)
        for kind in ("read", "write"):
            wavefronts = trace.total("wavefronts", buffer="shared_b", kind=kind)
            per_request[pad, kind] = wavefronts / trace.requests(buffer="shared_b", kind=kind)
    assert (per_request[1, "write"], per_request[0, "write"]) == (padded, bare)
    assert per_request[1, "read"] == per_request[0, "read"] == 1.0


@pytest.mark.parametrize("format", ["w4", "w3"])
def test_codes_are_read_once_a_row_or_once_a_batch(format: str) -> None:
    m, n, k = 5, 130, 256
    alone = traced(GEMV_ROW[format], m, n, k, 128)
    batch = traced(GEMV_BATCH[format], m, n, k, 128)
    distinct = alone.compulsory_sectors("packed")
    assert distinct == n * k * (4 if format == "w4" else 3) // 8 // 32
    loads = 1 if format == "w4" else 3  # three byte loads find the same three sectors
    assert alone.sectors(buffer="packed") == m * loads * distinct
    assert batch.sectors(buffer="packed") == loads * distinct
    assert alone.sectors(buffer="x") == batch.sectors(buffer="x") == m * n * k * 2 // 32
