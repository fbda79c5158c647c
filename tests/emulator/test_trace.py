"""What a traced launch says: rows, totals, the table, lane maps, and faults in words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from labkit import emulator
from labkit.emulator.lanes import Sample, lane_map
from labkit.emulator.trace import spread
from labkit.errors import InputError

COPY = """
__global__ void copy(const float* x, float* y, int n, int stride) {
    __shared__ float tile[33][32];
    int t = threadIdx.x;
    int i = blockIdx.x * blockDim.x + t;
    if (i >= n) return;
    tile[0][t] = x[i * stride];
    tile[t + 1][1] = 0.f;
    y[i] = tile[0][t];
}
"""
EXCHANGE = """
__global__ void exchange(const float* a, float* b) {
    __shared__ float shared_a[64];
    int t = threadIdx.x;
    shared_a[t] = a[t];
    BARRIER;
    b[t] = shared_a[63 - t];
}
"""


def copy_trace(blocks: int = 4, stride: int = 1, **options: object) -> emulator.Trace:
    n = 32 * blocks
    x, y = torch.zeros(n * stride), torch.zeros(n)
    kernel = emulator.compile(COPY, isolate=False)
    return kernel.trace((blocks,), (32,), [x, y, n, stride], **options)  # type: ignore[arg-type]


def test_rows_and_totals() -> None:
    trace = copy_trace(stride=8)
    seen = [(row.line, row.kind, row.buffer, row.space, row.requests, row.size) for row in trace.rows]
    assert seen == [
        (7, "read", "x", "global", 4, 4),
        (7, "write", "tile", "shared", 4, 4),
        (8, "write", "tile", "shared", 4, 4),
        (9, "read", "tile", "shared", 4, 4),
        (9, "write", "y", "global", 4, 4),
    ]
    read, _, column, _, write = trace.rows
    assert (read.sectors_per_request, read.efficiency, read.lanes_per_request) == (32.0, 0.125, 32.0)
    assert (write.sectors_per_request, write.efficiency) == (4.0, 1.0)
    assert (column.degree, column.wavefronts, column.ideal_wavefronts) == (32, 128, 4)
    assert read.source == "    tile[0][t] = x[i * stride];"
    assert trace.sectors() == 4 * 32 + 4 * 4 == trace.total("sectors", space="global")
    assert trace.sectors(buffer="y") == 16 and trace.requests(line=7) == 8
    assert trace.wavefronts(kind="write") == 128 + 4
    assert trace.total("bytes", buffer="x") == 4 * 128
    assert trace.compulsory_sectors("x") == 128 and trace.compulsory_sectors("y") == 16
    assert trace.ok and not trace.races and trace.raise_on_fault() is trace


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: t.total("seconds"), "metric"),
        (lambda t: t.sectors(space="local"), "space"),
        (lambda t: t.sectors(kind="load"), "kind"),
        (lambda t: t.compulsory_sectors("z"), "buffer: got 'z'"),
        (lambda t: t.lanes(1), "line: got 1.*7, 8, 9"),
        (lambda t: t.lanes(7, "read", request=99), "request: got 99"),
    ],
)
def test_bad_questions(call: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(copy_trace())  # type: ignore[operator]


def test_table() -> None:
    lines = repr(copy_trace(stride=8, blocks=4).table()).splitlines()
    assert lines[0] == (
        "copy: source-level accesses after -O1; the GPU's compiler may merge some. All 4 blocks traced."
    )
    head = "line access bytes/lane buffer requests lanes/request sectors/request bytes used"
    assert " ".join(lines[1].split()) == f"{head} wavefronts/request conflict origin"
    assert " ".join(lines[3].split()) == "7 read 4 x 4 32.0 32.00 12% – – emulated"
    assert " ".join(lines[5].split()) == "8 write 4 tile 4 32.0 – – 32.00 32-way emulated"
    assert max(len(line) for line in lines) <= 130
    html = copy_trace().table()._repr_html_()
    assert "source-level" in html and "<td" in html


def test_table_of_a_kernel_without_shared_memory() -> None:
    kernel = emulator.compile("__global__ void fill(int* o) { o[threadIdx.x] = 1; }", isolate=False)
    head = repr(kernel.trace((1,), (32,), [torch.zeros(32, dtype=torch.int32)]).table()).splitlines()[1]
    assert "sectors/request" in head and "wavefronts" not in head and "conflict" not in head


def test_table_of_a_kernel_without_accesses() -> None:
    kernel = emulator.compile("__global__ void nothing() { }", isolate=False)
    assert "no memory access" in repr(kernel.trace((1,), (32,), []).table())


def test_sampled_blocks() -> None:
    trace = copy_trace(blocks=16)
    some = emulator.compile(COPY, isolate=False).trace(
        (16,), (32,), [torch.zeros(512), torch.zeros(512), 512, 1], blocks=3
    )
    assert (some.blocks_traced, some.blocks_total) == (3, 16)
    assert some.requests(line=7, kind="read") == 3 and trace.requests(line=7, kind="read") == 16
    assert "3 of 16 blocks traced" in repr(some.table()).splitlines()[0].replace("3 Of", "3 of")
    assert "3 of 16 blocks traced" in some.report()


def test_only_the_named_blocks_run() -> None:
    kernel = emulator.compile(
        "__global__ void mark(int* o) { o[blockIdx.x + 4 * blockIdx.y] = 1; }", isolate=False
    )
    out = np.zeros(12, np.int32)
    trace = kernel.trace((4, 3), (1,), [out], blocks=[(1, 2), (0, 0, 0), 6])
    assert np.flatnonzero(out).tolist() == [0, 6, 9] and trace.blocks_traced == 3


def test_spread() -> None:
    assert spread(None, (4, 4, 1)) is None and spread(16, (4, 4, 1)) is None
    assert spread(1, (4, 4, 1)) == [0]
    assert spread(2, (4, 4, 1)) == [0, 15]
    assert spread(4, (4, 4, 1)) == [0, 5, 10, 15]
    assert len(spread(7, (100, 1, 1)) or []) == 7
    for bad in (0, [], [(4, 0)], [16], "ab", [(0, 0, 0, 0)], [1.5]):
        with pytest.raises(InputError, match="blocks"):
            spread(bad, (4, 4, 1))


def test_lanes_of_a_global_read() -> None:
    found = copy_trace(stride=8).lanes(7, "read")
    assert (found.buffer, found.kind, found.size, found.space) == ("x", "read", 4, "global")
    assert found.offsets == [32 * lane for lane in range(32)]
    assert found.sectors == list(range(32))
    assert copy_trace().lanes(7, "read").sectors == [0, 1, 2, 3]


def test_lanes_of_a_shared_write() -> None:
    found = copy_trace().lanes(8)
    assert found.offsets == [128 * lane + 132 for lane in range(32)]
    assert set(found.banks) == {1} and found.wavefronts == 32
    assert copy_trace().lanes(9, buffer="tile").wavefronts == 1


def test_lanes_that_did_not_take_part() -> None:
    kernel = emulator.compile(COPY, isolate=False)
    trace = kernel.trace((1,), (32,), [torch.zeros(20), torch.zeros(20), 20, 1])
    offsets = trace.lanes(7, "read").offsets
    assert offsets[:20] == [4 * lane for lane in range(20)] and offsets[20:] == [None] * 12


@pytest.mark.parametrize(
    ("size", "step", "wavefronts"),
    [(4, 4, 1), (4, 8, 2), (4, 132, 1), (4, 0, 1), (8, 8, 2), (16, 16, 4), (2, 2, 1)],
)
def test_wavefronts_by_the_hardwares_rules(size: int, step: int, wavefronts: int) -> None:
    offsets = tuple(step * lane for lane in range(32))
    sample = Sample("k.cu", 1, "read", "s", "shared", size, (0, 0, 0), 0, offsets)
    assert lane_map(sample).wavefronts == wavefronts


def test_race_in_words() -> None:
    kernel = emulator.compile(EXCHANGE, defines={"BARRIER": ""})
    trace = kernel.trace((1,), (64,), [torch.zeros(64), torch.zeros(64)])
    assert not trace.ok and [fault.kind for fault in trace.races] == ["race"] * len(trace.races)
    race = next(fault for fault in trace.races if fault.line == 7)
    assert (race.other_line, race.buffer, race.block, race.size) == (5, "shared_a", (0, 0, 0), 4)
    assert race.thread is not None and race.other_thread is not None and race.thread != race.other_thread
    first, *source = race.message.splitlines()
    assert first.startswith("race: read after write without a barrier: line 7 reads shared_a[+")
    assert f"(4 bytes) in block (0,0,0) thread {race.thread[0]}; line 5 wrote it in thread" in first
    assert first.endswith(
        "Both touch it between the same two barriers: put __syncthreads() between line 5 and line 7."
    )
    assert source == ["    5 |     shared_a[t] = a[t];", "    7 |     b[t] = shared_a[63 - t];"]
    with pytest.raises(emulator.KernelFault, match=r"race|uninitialised"):
        trace.raise_on_fault()


def test_the_repaired_kernel_is_clean() -> None:
    kernel = emulator.compile(EXCHANGE, defines={"BARRIER": "__syncthreads()"})
    a, b = torch.arange(64.0), torch.zeros(64)
    trace = kernel.trace((1,), (64,), [a, b])
    assert trace.ok, trace.report()
    assert torch.equal(b, a.flip(0)) and trace.report() == "exchange: no fault (1 block traced)"


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("o[n + threadIdx.x] = 1;", "out-of-bounds", "line 3 writes o[64] (4 bytes) in block (0,0,0) thread 0"
         ", but o has 64 elements; seen 32 times"),
        ("o[0] = i[-1];", "out-of-bounds", "line 3 reads i[-1] (4 bytes)"),
        ("((int*)i)[threadIdx.x] = 1;", "write to a const buffer", "line 3 writes i[0]"),
        ("__shared__ int s[8]; s[threadIdx.x] = 1;", "out-of-bounds", "line 3 writes s[+32] (4 bytes) in "
         "block (0,0,0) thread 8, but s has 32 bytes"),
        ("__shared__ int s[32]; o[threadIdx.x] = s[threadIdx.x];", "uninitialised", "line 3 reads s[+0]"),
        ("if (threadIdx.x < 16) __syncthreads(); else __syncthreads();", "divergent barrier", "line 3"),
        ("o[0] = 1;", "race", "two writes without a barrier: line 3 writes o[0]"),
        ("*(uint4*)(o + 1) = make_uint4(1, 2, 3, 4);", "misaligned", "line 3 writes o[1] (16 bytes)"),
        ("while (*(volatile int*)o == 0) ;", "time limit", "line 3"),
        ("assert(n < 3);", "assert", "n < 3"),
        ("abort();", "crash", "abort()"),
    ],
)  # fmt: skip
def test_faults_of_a_traced_launch(body: str, kind: str, words: str) -> None:
    text = f"\n__global__ void bad(const int* i, int* o, int n) {{\n{body}\n}}\n"
    kernel = emulator.compile(text, time_limit=1.0)
    trace = kernel.trace((1,), (32,), [np.zeros(64, np.int32), np.zeros(64, np.int32), 64])
    found = {fault.kind: fault for fault in trace.faults}
    assert kind in found, trace.report()
    assert words in found[kind].message
    assert "\x01" not in trace.report()
    if kind != "crash":
        assert found[kind].line == 3 and f"    3 | {body}" in found[kind].message


def test_race_between_blocks() -> None:
    kernel = emulator.compile("__global__ void all(int* o) { o[threadIdx.x] = blockIdx.x; }", isolate=False)
    (race,) = kernel.trace((2,), (32,), [np.zeros(32, np.int32)]).faults
    assert race.kind == "race" and race.block != race.other_block
    assert "in block (0,0,0) thread" in race.message and "give each block its own memory" in race.message


def test_threads_of_a_two_dimensional_block() -> None:
    text = "__global__ void k(int* o) { o[64 + threadIdx.x + 8 * threadIdx.y] = 1; }"
    (fault,) = emulator.compile(text, isolate=False).trace((1,), (8, 4), [np.zeros(72, np.int32)]).faults
    assert fault.thread == (0, 1, 0) and "thread (0,1,0)" in fault.message


def test_stop_at_the_first_access_out_of_bounds() -> None:
    text = "__global__ void k(int* o) { o[threadIdx.x] = 1; o[threadIdx.x + 64] = 2; }"
    kernel = emulator.compile(text, isolate=False)
    out = np.zeros(64, np.int32)
    (fault,) = kernel.trace((1,), (32,), [out], keep_going=False).faults
    assert fault.fatal and fault.count == 1 and fault.kind == "out-of-bounds"
    (fault,) = kernel.trace((1,), (32,), [out]).faults
    assert not fault.fatal and fault.count == 32 and out[:32].tolist() == [1] * 32


def test_code_of_headers_counts_for_the_line_that_calls_it() -> None:
    text = """#include <cuda_fp16.h>
    __device__ __forceinline__ float twice(const half* p) { return 2 * __half2float(__ldg(p)); }
    __global__ void k(const half* x, float* y, unsigned* sum) {
        y[threadIdx.x] = twice(x + threadIdx.x);
        atomicAdd(sum, 1u);
        *(float4*)(y + 32 + 4 * threadIdx.x) = make_float4(1, 2, 3, 4);
    }
    """
    kernel = emulator.compile(text, isolate=False)
    args = [torch.zeros(32, dtype=torch.float16), torch.zeros(160), torch.zeros(1, dtype=torch.int32)]
    trace = kernel.trace((1,), (32,), args)
    assert {row.file for row in trace.rows} == {"kernel.cu"}
    seen = [(row.line, row.kind, row.buffer, row.size) for row in trace.rows]
    assert (5, "atomic", "sum", 4) in seen and (6, "write", "y", 16) in seen and (4, "write", "y", 4) in seen
    assert trace.select(buffer="x")[0].line in (2, 4)


def test_constants_and_device_variables_are_no_fault() -> None:
    text = """
    __constant__ float lut[4] = {1.f, 2.f, 3.f, 4.f};
    __device__ int hits;
    __device__ float table[2] = {5.f, 6.f};
    __global__ void k(float* o, int n) {
        const float local[3] = {7.f, 8.f, 9.f};
        atomicAdd(&hits, 1);
        o[threadIdx.x] = lut[(threadIdx.x + n) % 4] + table[threadIdx.x % 2] + local[(threadIdx.x + n) % 3];
    }
    """
    trace = emulator.compile(text).trace((1,), (32,), [torch.zeros(32), 0])
    assert trace.ok, trace.report()


def test_lines_by_executed_blocks() -> None:
    text = """
    __global__ void k(int* o, int n) {
        int sum = 0;
        for (int i = 0; i < n; i++) {
            if (threadIdx.x & 1)
                sum += o[i];
        }
        o[threadIdx.x + 32] = sum;
    }
    """
    kernel = emulator.compile(text, isolate=False)
    trace = kernel.trace((1,), (32,), [np.zeros(64, np.int32), 5], blocks_executed=True)
    assert trace.requests(line=6, kind="read") == 5
    assert sum(trace.warp_instructions.values()) >= 10
    assert kernel.trace((1,), (32,), [np.zeros(64, np.int32), 5]).warp_instructions == {}
