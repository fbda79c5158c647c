"""CUDA as it is commonly written: right results, no false alarm; what only looks right is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from runtime_cases import KERNELS

from labkit import emulator

TEXT = (KERNELS / "idioms.cu").read_text(encoding="utf-8")
X = np.arange(128, dtype=np.float32) % 37


def zeros(count: int, kind: type = np.float32) -> np.ndarray:
    return np.zeros(count, kind)


LANES = np.arange(32)
# kernel, grid, block, its arguments, and for each argument that it writes the expected values
CASES: list[tuple[str, int, int, Callable[[], list[Any]], dict[int, Any]]] = [
    ("compare_and_swap", 2, 64, lambda: [X, zeros(1) - 9, zeros(1, np.float64)], {1: [36], 2: [X.sum()]}),
    ("chain", 4, 32, lambda: [zeros(4, np.int32), zeros(4)], {0: [1] * 4, 1: [5, 6, 7, 8]}),
    ("last_block", 40, 64, lambda: [zeros(40), zeros(1)], {1: [820]}),
    ("padded_structs", 1, 32, lambda: [zeros(32, np.int32)], {0: 4 + 3 * (31 - LANES)}),
    ("early_return", 1, 32, lambda: [zeros(20, np.int32), 20], {0: [10] * 20}),
    ("vectors", 1, 32, lambda: [zeros(32), 1, zeros(1, np.uint8)], {0: [2 * 28] * 32}),
    ("asks", 1, 1, lambda: [zeros(1, np.int32)], {0: [860]}),
]


@pytest.mark.parametrize(
    ("entry", "grid", "block", "arguments", "expected"), CASES, ids=[c[0] for c in CASES]
)
def test_idioms(
    entry: str, grid: int, block: int, arguments: Callable[[], list[Any]], expected: dict[int, Any]
) -> None:
    kernel = emulator.compile(TEXT, entry, filename="idioms.cu", isolate=False)
    fast, traced = arguments(), arguments()
    kernel((grid,), (block,), fast)
    trace = kernel.trace((grid,), (block,), traced)
    assert trace.ok, trace.report()
    for position, values in expected.items():
        np.testing.assert_array_equal(fast[position], values)
        np.testing.assert_array_equal(traced[position], values)


def test_atomics_of_pairs() -> None:
    kernel = emulator.compile(TEXT, "narrow_atomics", filename="idioms.cu", isolate=False)
    for launch in (kernel, kernel.trace):
        half, bfloat = torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)
        counts = zeros(2, np.int32)
        launch((1,), (64,), [half, bfloat, counts])
        assert (half.tolist(), bfloat.tolist(), counts.tolist()) == ([64, 128], [32, 64], [-64, 64])


def test_volatile_is_no_barrier() -> None:
    kernel = emulator.compile(TEXT, "old_reduction", filename="idioms.cu", isolate=False)
    trace = kernel.trace((1,), (64,), [X[:64].copy(), zeros(1)])
    line = next(i for i, text in enumerate(TEXT.splitlines(), 1) if "// @race" in text)
    race = next(fault for fault in trace.races if fault.line == fault.other_line == line)
    assert "__syncwarp()" in race.message


@pytest.mark.parametrize("reverse", [False, True])
def test_an_exited_lane_holds_nobody_up_but_cannot_be_read(reverse: bool) -> None:
    """Whichever runs first: the lanes that wait, or those that return."""
    leaves = "t < 16" if reverse else "t >= 16"
    text = (
        f"__global__ void k(int* o, int from) {{ int t = threadIdx.x; if ({leaves}) return; "
        "o[t] = __shfl_sync(0xffffffffu, t, from); }"
    )
    kernel = emulator.compile(text, isolate=False)
    out = zeros(32, np.int32)
    there, gone = (20, 3) if reverse else (3, 20)
    kernel((1,), (32,), [out, there])
    assert sorted(out.tolist()) == [0] * 16 + [there] * 16
    with pytest.raises(emulator.KernelFault, match=f"warp mismatch: .*lane {gone}, .*has exited"):
        kernel((1,), (32,), [out, gone])


PLAIN_READ = """
__global__ void k(const int* x, int* out) {
    __shared__ int bins[16];
    if (threadIdx.x < 16) bins[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&bins[x[threadIdx.x]], 1);
    if (threadIdx.x < 16) out[threadIdx.x] = bins[threadIdx.x];
}
"""


def test_a_plain_read_beside_atomics_is_still_a_race() -> None:
    kernel = emulator.compile(PLAIN_READ, isolate=False)
    x = (np.arange(64) % 16).astype(np.int32)
    races = kernel.trace((1,), (64,), [x, zeros(16, np.int32)]).races
    assert {(fault.line, fault.other_line) for fault in races} <= {(6, 7), (7, 6)} and races
    assert all("between line 6 and line 7" in fault.message for fault in races)


def test_a_suspected_read_is_reported_when_no_compare_and_swap_follows() -> None:
    """The reader comes after the atomics here, so that its report waits for the block's end."""
    text = """
    __global__ void k(int* o) {
        __shared__ int count;
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        if (threadIdx.x < 32) atomicAdd(&count, 1);
        else o[threadIdx.x] = count;
    }
    """
    trace = emulator.compile(text, isolate=False).trace((1,), (64,), [zeros(64, np.int32)])
    assert [(fault.kind, fault.line, fault.other_line) for fault in trace.faults] == [("race", 7, 6)]


def test_half_of_a_pair_that_nobody_wrote_is_no_padding() -> None:
    text = """#include <cuda_fp16.h>
    __global__ void k(half2* o) {
        __shared__ half s[64];
        s[2 * threadIdx.x] = __float2half(1.f);
        __syncwarp();
        o[threadIdx.x] = *(half2*)&s[2 * threadIdx.x];
    }
    """
    trace = emulator.compile(text, isolate=False).trace((1,), (32,), [np.zeros((32, 2), np.float16)])
    assert [(fault.kind, fault.line) for fault in trace.faults] == [("uninitialised", 6)]


def test_too_much_static_shared_memory() -> None:
    text = "__global__ void k(int* o) {\n__shared__ int s[13000];\ns[0] = 1; o[0] = s[0]; }"
    with pytest.raises(emulator.KernelFault, match="52000 bytes, and a GPU has 49152") as caught:
        emulator.compile(text, isolate=False)((1,), (1,), [zeros(1, np.int32)])
    assert (caught.value.kind, caught.value.line) == ("too much shared memory", 2)


def test_dynamic_shared_memory_that_was_not_asked_for() -> None:
    text = "__global__ void k(int* o) {\nextern __shared__ int s[];\ns[threadIdx.x] = 1; o[0] = 1; }"
    trace = emulator.compile(text, isolate=False).trace((1,), (1,), [zeros(1, np.int32)])
    assert [(fault.kind, fault.line) for fault in trace.faults] == [("out-of-bounds", 3)]
    assert "dynamic shared memory has 0 bytes. Launch with more shared_bytes" in trace.faults[0].message


def test_a_local_array_bigger_than_any_gap() -> None:
    text = (
        "__global__ void k(int* o) {\nint big[300000];\nfor (int i = 0; i < 300000; i++) big[i] = o[i % 4];\n"
    )
    kernel = emulator.compile(text + "o[0] = big[o[1]]; }")
    for launch in (kernel, lambda *a: kernel.trace(*a).raise_on_fault()):
        with pytest.raises(emulator.KernelFault, match="stack overflow"):
            launch((1,), (32,), [zeros(4, np.int32)])


def test_kernels_made_by_a_macro() -> None:
    text = """#define MAKE(name, op) __global__ void name(int* o, int n) { o[0] = n op 2; }
    MAKE(plus, +)
    MAKE(times, *)
    """
    out = zeros(1, np.int32)
    emulator.compile(text, "times", isolate=False)((1,), (1,), [out, 5])
    assert out[0] == 10
    with pytest.raises(emulator.CompileError, match="made by a macro"):
        emulator.compile(text)
    with pytest.raises(emulator.CompileError):
        emulator.compile(text, "minus")
