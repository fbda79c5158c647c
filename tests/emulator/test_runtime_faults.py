"""Planted faults of every kind are found at their line; their clean twins report none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from runtime_cases import Planted

from labkit import emulator

CLEAN = [
    # case, n, blocks
    ("clean_reverse", 0, 1),
    ("clean_refill", 0, 1),
    ("clean_early_exit", 0, 1),
    ("clean_own_cell", 0, 1),
    ("clean_syncwarp", 0, 1),
    ("clean_half_warps", 0, 1),
    ("clean_early_lane", 0, 1),
    ("clean_threadfence", 0, 5),
    ("clean_fence_after_barrier", 0, 3),
    ("clean_atomics", 0, 1),
    ("clean_flag_between_warps", 0, 1),
    ("clean_copy", 0, 1),
    ("clean_copy_zero_fill", 10, 1),
]

# case, n, blocks, kind; the mark is the case's name unless a fifth says otherwise.
FOUND = [
    ("no_barrier_before_refill", 0, 1, "race"),
    ("writer_among_readers", 0, 1, "race"),
    ("same_value_twice", 0, 1, "race"),
    ("half_warp_is_not_enough", 0, 1, "race"),
    ("blocks_write_one_cell", 0, 2, "race"),
    ("block_reads_another", 0, 2, "race"),
    ("no_threadfence", 0, 4, "race"),
    ("fence_without_barrier", 0, 3, "race"),
    ("plain_write_and_atomic", 0, 1, "race"),
    ("copy_no_barrier_after", 0, 1, "race", "copy"),
    ("copy_no_barrier_before", 0, 1, "race"),
    ("copy_source_changed", 0, 1, "race"),
    ("uninitialised", 0, 1, "uninitialised"),
    ("uninitialised_atomic", 0, 1, "uninitialised"),
    ("copy_no_wait", 0, 1, "cp.async", "copy"),
    ("copy_overwritten", 0, 1, "cp.async"),
    ("write_to_const", 0, 1, "write to a const buffer"),
    ("misaligned", 1, 1, "misaligned"),
]

# Which of a pair of lines a race is reported at depends on who ran first; that it is found does not.
EITHER_LINE = ("no_barrier_after_write", "no_syncwarp", "shuffle_is_no_fence")


def test_the_order_of_threads_is_really_reversed(either_order: Planted, request: Any) -> None:
    first = 63 if request.node.name.endswith("[reversed]") else 0
    assert either_order.trace("print_much", 1).output.startswith(f"thread {first} ")


@pytest.mark.parametrize(("case", "n", "blocks"), CLEAN)
def test_clean_kernels_report_nothing(either_order: Planted, case: str, n: int, blocks: int) -> None:
    trace = either_order.trace(case, n, grid=blocks)
    assert trace.ok, trace.report()


@pytest.mark.parametrize("planted_fault", FOUND, ids=lambda fault: fault[0])
def test_faults_are_found_in_either_order(either_order: Planted, planted_fault: tuple) -> None:
    case, n, blocks, kind, *mark = planted_fault
    trace = either_order.trace(case, n, grid=blocks)
    line = either_order.line(mark[0] if mark else case)
    found = [fault for fault in trace.faults if fault.kind == kind]
    assert any(line in (fault.line, fault.other_line) for fault in found), trace.report()


@pytest.mark.parametrize("case", EITHER_LINE)
def test_a_read_with_no_barrier_is_a_race(either_order: Planted, case: str) -> None:
    trace = either_order.trace(case)
    line = either_order.line(case)
    assert any(f.kind == "race" and line in (f.line, f.other_line) for f in trace.faults), trace.report()


@pytest.mark.parametrize("warp", range(4))
def test_a_writer_races_with_readers_of_any_number_of_warps(either_order: Planted, warp: int) -> None:
    trace = either_order.trace("writer_among_readers", warp, block=128)
    races = [fault for fault in trace.faults if fault.kind == "race"]
    assert races, trace.report()
    assert {line for race in races for line in (race.line, race.other_line)} >= {
        either_order.line("writer_among_readers")
    }


def test_a_race_names_both_threads_and_blocks(either_order: Planted) -> None:
    (fault,) = either_order.trace("blocks_write_one_cell", grid=2).faults
    assert (fault.block, fault.other_block) == ((1, 0, 0), (0, 0, 0))
    assert (fault.thread, fault.other_thread) == ((0, 0, 0), (0, 0, 0))
    assert fault.buffer == "out"
    assert fault.offset == 0
    assert not fault.fatal


def test_uninitialised_shared_memory_is_named(planted: Planted) -> None:
    (fault,) = planted.trace("uninitialised").faults
    assert (fault.kind, fault.line) == ("uninitialised", planted.line("uninitialised"))
    assert (fault.buffer, fault.offset, fault.count) == ("s", 128, 32)
    assert np.isnan(planted.run("uninitialised")[32:64]).all()  # and in the fast build it is NaN


OUT_OF_BOUNDS = [
    # case, n, thread, buffer, offset
    ("read_past_the_end", 1, 63, "in", 256),
    ("read_past_the_end", -1, 0, "in", -4),
    ("write_past_the_end", 193, 63, "out", 1024),
    ("write_past_the_end", -1, 0, "out", -4),
    ("write_past_shared", 1, 63, "s", 256),
    ("write_past_shared", -1, 0, "s", -4),
    ("read_past_shared", 1, 63, "s", 256),
    ("atomic_past_the_end", 1, 63, "flags", 256),
]


@pytest.mark.parametrize(("case", "n", "thread", "buffer", "offset"), OUT_OF_BOUNDS)
@pytest.mark.parametrize("keep_going", [True, False])
def test_out_of_bounds(
    planted: Planted, case: str, n: int, thread: int, buffer: str, offset: int, keep_going: bool
) -> None:
    trace = planted.trace(case, n, keep_going=keep_going)
    fault = next(fault for fault in trace.faults if fault.kind == "out-of-bounds")
    assert fault.line == planted.line(case)
    assert fault.block == (0, 0, 0)
    assert fault.thread == (thread, 0, 0)
    assert (fault.buffer, fault.offset) == (buffer, offset)
    with pytest.raises(emulator.KernelFault, match=f"line {fault.line}"):
        trace.raise_on_fault()


def test_dynamic_shared_memory_has_the_size_of_the_launch(planted: Planted) -> None:
    assert planted.trace("past_dynamic", shared=256).ok
    trace = planted.trace("past_dynamic", shared=252)
    fault = trace.faults[0]
    assert (fault.kind, fault.line, fault.offset) == ("out-of-bounds", planted.line("past_dynamic"), 252)
    assert fault.thread == (63, 0, 0)


FATAL = [
    # case, n, kind
    ("divergent_barrier", 0, "divergent barrier"),
    ("deadlock", 0, "deadlock"),
    ("warp_mismatch", 0, "warp mismatch"),
    ("shuffle_from_absent_lane", 0, "warp mismatch"),
    ("null_write", 0, "illegal memory access"),
    ("copy_misaligned", 1, "misaligned"),
    ("failed_assert", 40, "assert"),
    ("trap", 40, "trap"),
    ("stack_overflow", 1 << 20, "stack overflow"),
    ("divide_by_zero", 0, "integer division by zero"),
]


@pytest.mark.parametrize(("case", "n", "kind"), FATAL)
def test_fatal_faults_raise_in_the_fast_build(planted: Planted, case: str, n: int, kind: str) -> None:
    with pytest.raises(emulator.KernelFault) as caught:
        planted.run(case, n)
    assert caught.value.kind == kind
    assert caught.value.block == (0, 0, 0)
    assert near(caught.value.line, case, planted)


@pytest.mark.parametrize(("case", "n", "kind"), FATAL)
def test_fatal_faults_end_a_trace_with_one_report(planted: Planted, case: str, n: int, kind: str) -> None:
    trace = planted.trace(case, n)
    fault = next(fault for fault in trace.faults if fault.kind == kind)
    assert near(fault.line, case, planted), trace.report()


def near(line: int | None, case: str, planted: Planted) -> bool:
    """At the marked line; a stack may end anywhere in the function that calls itself."""
    lines_before = 4 if case == "stack_overflow" else 0
    return line is not None and 0 <= planted.line(case) - line <= lines_before


def test_the_thread_of_a_fatal_fault(planted: Planted) -> None:
    with pytest.raises(emulator.KernelFault) as caught:
        planted.run("failed_assert", 40)
    assert caught.value.thread == (40, 0, 0)
    assert "T < n" in str(caught.value)
    with pytest.raises(emulator.KernelFault) as caught:
        planted.run("divergent_barrier")
    assert caught.value.thread == (0, 0, 0)
    assert caught.value.fault.other_thread == (16, 0, 0)


def test_a_deadlock_says_who_waits_where(planted: Planted) -> None:
    with pytest.raises(emulator.KernelFault) as caught:
        planted.run("deadlock")
    message = str(caught.value)
    assert "32 wait in __shfl_xor_sync" in message
    assert "32 wait in __syncthreads" in message
    assert "which lanes ffff0000 do not reach" in message


@pytest.mark.parametrize("case", ["endless_loop", "endless_loop_with_reads"])
def test_endless_loops_meet_the_time_limit(planted: Planted, case: str) -> None:
    with pytest.raises(emulator.KernelFault) as caught:
        planted.run(case)
    assert (caught.value.kind, caught.value.line) == ("time limit", planted.line(case))


def test_an_endless_loop_ends_in_a_trace_too(planted: Planted) -> None:
    trace = planted.trace("endless_loop_with_reads")
    assert trace.faults[-1].kind == "time limit"
    assert planted.trace("clean_reverse").ok  # and the next launch is as if nothing had been


def test_a_wild_pointer_is_caught_in_both_builds(planted: Planted) -> None:
    with pytest.raises(emulator.KernelFault) as caught:
        planted.run("wild_read", 1)
    assert caught.value.kind == "illegal memory access"
    fault = planted.trace("wild_read", 1).faults[0]
    assert fault.kind in ("out-of-bounds", "illegal memory access")
    assert fault.line == planted.line("wild_read")


def test_copies_that_read_nothing_fill_with_zeros(planted: Planted) -> None:
    out = planted.run("clean_copy_zero_fill", 10)
    np.testing.assert_array_equal(out[:64], np.where(np.arange(64) < 40, np.arange(64), 0))


def test_results_of_the_clean_cases(planted: Planted) -> None:
    np.testing.assert_array_equal(planted.run("clean_reverse")[:64], np.arange(64)[::-1])
    np.testing.assert_array_equal(planted.run("clean_copy")[:64], 4.0 * np.arange(64)[::-1])
    assert planted.run("clean_threadfence", grid=5)[0] == 5
    assert planted.run("clean_flag_between_warps")[0] == 1


def test_printed_text_is_bounded(planted: Planted) -> None:
    _, arguments = planted.arguments("print_much", 1000)
    run = planted.kernel((1,), (64,), arguments)
    assert run.output.startswith("thread 0 line 0 of many")
    assert run.output.rstrip().endswith("[the rest of the output was cut]")
    assert len(run.output) < 1_100_000
