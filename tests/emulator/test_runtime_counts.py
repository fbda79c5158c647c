"""Counts equal those worked out by hand: sectors of 32 bytes, lines of 128, shared-memory wavefronts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from runtime_cases import Cases

from labkit import emulator

Traced = Callable[..., emulator.Trace]


@pytest.fixture(scope="module")
def patterns() -> Cases:
    return Cases("patterns.cu", "patterns", isolate=False)


@pytest.fixture(scope="module")
def traced(patterns: Cases) -> Traced:
    done: dict[tuple[str, int, int], emulator.Trace] = {}

    def trace(case: str, *, block: int = 32, grid: int = 1) -> emulator.Trace:
        key = (case, block, grid)
        if key not in done:
            given = (np.arange(2048) % 64).astype(np.float32)
            arguments = [patterns.number[case], np.zeros(1024, np.float32), given, np.zeros(64, np.int32)]
            done[key] = patterns.kernel.trace((grid,), (block,), arguments)
        return done[key]

    return trace


def only(trace: emulator.Trace, line: int, kind: str = "") -> emulator.Access:
    rows = [row for row in trace.rows if row.line == line and (not kind or row.kind == kind)]
    assert len(rows) == 1, trace.table()
    return rows[0]


GLOBAL = [
    # line, bytes a lane, sectors, 128-byte lines, useful bytes
    ("stride_1", 4, 4, 1, 128),
    ("stride_2", 4, 8, 2, 128),
    ("stride_32", 4, 32, 32, 128),
    ("broadcast", 4, 1, 1, 4),
    ("unaligned", 4, 5, 2, 128),
    ("backwards", 4, 4, 1, 128),
    ("bytes_1", 1, 1, 1, 32),
    ("bytes_2", 2, 2, 1, 64),
    ("member_of_8", 4, 8, 2, 128),
    ("bytes_8", 8, 8, 2, 256),
    ("bytes_16", 16, 16, 4, 512),
    ("bytes_16_stride_2", 16, 32, 8, 512),
    ("ldg_16", 16, 16, 4, 512),
    ("store_1", 4, 4, 1, 128),
    ("store_8", 4, 32, 8, 128),
    ("store_16", 16, 16, 4, 512),
]


@pytest.mark.parametrize(("mark", "size", "sectors", "lines", "useful"), GLOBAL)
def test_global(
    patterns: Cases, traced: Traced, mark: str, size: int, sectors: int, lines: int, useful: int
) -> None:
    row = only(traced("global_loads"), patterns.line(mark))
    assert row.space == "global"
    assert row.kind == ("write" if mark.startswith("store") else "read")
    assert (row.size, row.requests, row.lanes) == (size, 1, 32)
    assert (row.sectors, row.cache_lines, row.useful_bytes) == (sectors, lines, useful)
    assert row.bytes == 32 * size
    assert row.sectors_per_request == sectors
    assert row.efficiency == pytest.approx(useful / (32 * sectors))


def test_compulsory_traffic_counts_every_sector_once(traced: Traced) -> None:
    trace = traced("global_loads")
    everything_else = set(range(32))  # bytes 0 … 1023 of `in`: 16-byte loads with stride 2
    stride_32 = {128 * lane // 32 for lane in range(32)}
    assert trace.compulsory_sectors("in") == len(everything_else | stride_32)
    assert trace.compulsory_sectors("out") == 32  # store_8 touches 32, the others are among them
    assert trace.sectors(buffer="in") > trace.compulsory_sectors("in")


def test_totals_are_sums_of_rows(traced: Traced) -> None:
    trace = traced("global_loads")
    assert trace.sectors(buffer="in", kind="read") == sum(
        s for name, _, s, _, _ in GLOBAL if "store" not in name
    )
    assert trace.requests(buffer="out", kind="write") == 3
    assert trace.total("sectors", space="global") == trace.sectors()


SHARED = [
    # line, bytes a lane, wavefronts, the fewest possible, worst degree
    ("shared_stride_1", 4, 1, 1, 1),
    ("shared_stride_2", 4, 2, 1, 2),
    ("shared_stride_32", 4, 32, 1, 32),
    ("shared_stride_33", 4, 1, 1, 1),
    ("shared_padded", 4, 1, 1, 1),
    ("shared_broadcast", 4, 1, 1, 1),
    ("shared_pairs", 4, 1, 1, 1),
    ("shared_four_words", 4, 4, 1, 4),
    ("shared_bytes", 1, 1, 1, 1),
    ("shared_halves", 2, 1, 1, 1),
    ("shared_8", 8, 2, 2, 1),
    ("shared_8_stride_2", 8, 4, 2, 2),
    ("shared_16", 16, 4, 4, 1),
    ("shared_16_stride_8", 16, 32, 4, 8),
    ("shared_store_32", 4, 32, 1, 32),
]


@pytest.mark.parametrize(("mark", "size", "wavefronts", "ideal", "degree"), SHARED)
def test_shared(
    patterns: Cases, traced: Traced, mark: str, size: int, wavefronts: int, ideal: int, degree: int
) -> None:
    row = only(traced("shared_accesses"), patterns.line(mark))
    assert row.space == "shared"
    assert (row.size, row.requests, row.lanes) == (size, 1, 32)
    assert (row.wavefronts, row.ideal_wavefronts, row.degree) == (wavefronts, ideal, degree)


def test_two_lanes_on_two_banks(patterns: Cases, traced: Traced) -> None:
    row = only(traced("shared_accesses"), patterns.line("shared_two_lanes"))
    assert (row.requests, row.lanes, row.wavefronts) == (1, 2, 1)


DIVERGENT = [
    # line, requests, lanes
    ("odd_lanes", 1, 16),
    ("even_lanes", 1, 16),
    ("loop_by_lane", 3, 24 + 16 + 8),
    ("five_lanes", 1, 5),
    ("together_again", 1, 32),
]


@pytest.mark.parametrize(("mark", "requests", "lanes"), DIVERGENT)
def test_divergent_lanes_are_requests_of_their_own(
    patterns: Cases, traced: Traced, mark: str, requests: int, lanes: int
) -> None:
    row = only(traced("divergence"), patterns.line(mark))
    assert (row.requests, row.lanes) == (requests, lanes)
    assert row.lanes_per_request == pytest.approx(lanes / requests)


ATOMICS = [
    # line, sectors, wavefronts
    ("atomic_one_cell", 1, 0),
    ("atomic_each_its_own", 4, 0),
    ("shared_atomic_one_cell", 0, 32),
    ("shared_atomic_each_its_own", 0, 1),
    ("shared_atomic_one_bank", 0, 32),
]


@pytest.mark.parametrize(("mark", "sectors", "wavefronts"), ATOMICS)
def test_atomics(patterns: Cases, traced: Traced, mark: str, sectors: int, wavefronts: int) -> None:
    row = only(traced("atomics"), patterns.line(mark))
    assert (row.kind, row.requests, row.lanes) == ("atomic", 1, 32)
    assert (row.sectors, row.wavefronts) == (sectors, wavefronts)


def test_a_block_of_40_threads_has_a_warp_of_8_lanes(patterns: Cases, traced: Traced) -> None:
    row = only(traced("partial_warp", block=40), patterns.line("partial_warp"), "read")
    assert (row.requests, row.lanes, row.sectors) == (2, 40, 5)


def test_lists_longer_than_the_buffer_stay_in_step(patterns: Cases, traced: Traced) -> None:
    trace = traced("long_lists", block=64)
    row = only(trace, patterns.line("long_loop"))
    assert (row.requests, row.lanes) == (2 * 5100, 64 * 5000 + 32 * 100)
    assert trace.ok


def test_one_instruction_that_meets_two_buffers_has_a_row_for_each(patterns: Cases, traced: Traced) -> None:
    rows = [row for row in traced("two_buffers").rows if row.line == patterns.line("one_line_two_buffers")]
    assert sorted((row.buffer, row.requests, row.lanes) for row in rows) == [("in", 1, 32), ("s", 1, 32)]


def test_blocks_add_up(patterns: Cases, traced: Traced) -> None:
    line = patterns.line("partial_warp")
    assert only(traced("partial_warp", grid=3), line, "read").requests == 3
    assert traced("partial_warp", grid=3).compulsory_sectors("in") == 4


def test_chosen_blocks_only(patterns: Cases) -> None:
    arguments = [patterns.number["partial_warp"], np.zeros(1024, np.float32), np.ones(2048, np.float32)]
    trace = patterns.kernel.trace((4, 2), (32,), [*arguments, np.zeros(64, np.int32)], blocks=[(3, 1), 0])
    assert (trace.blocks_traced, trace.blocks_total) == (2, 8)
    assert only(trace, patterns.line("partial_warp"), "read").requests == 2
    blocks = [trace.lanes(patterns.line("partial_warp"), "read", request=i).block for i in (0, 1)]
    assert sorted(blocks) == [(0, 0, 0), (3, 1, 0)]


def test_lanes_of_a_request(patterns: Cases, traced: Traced) -> None:
    map_ = traced("global_loads").lanes(patterns.line("unaligned"))
    assert (map_.buffer, map_.size) == ("in", 4)
    assert map_.offsets == [4 * (lane + 1) for lane in range(32)]
    assert map_.sectors == [0, 1, 2, 3, 4]
    odd = traced("divergence").lanes(patterns.line("odd_lanes"))
    assert odd.offsets == [4 * lane if lane % 2 else None for lane in range(32)]
    banks = traced("shared_accesses").lanes(patterns.line("shared_stride_32"))
    assert set(banks.banks) == {0}
    assert banks.wavefronts == 32


def test_the_clean_patterns_have_no_fault(traced: Traced) -> None:
    for case in ("global_loads", "shared_accesses", "divergence", "atomics"):
        faults = [fault for fault in traced(case).faults if fault.kind != "race"]  # stores overlap on purpose
        assert not faults, traced(case).report()
