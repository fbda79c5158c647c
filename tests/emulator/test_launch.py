"""Launches: right results in every mode, arguments of every type, errors that name the parameter."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from labkit import emulator
from labkit.errors import InputError

SCALE = """
__global__ void scale(const float* x, float* y, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = factor * x[i];
}
"""
TYPES = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
struct Pair { int a; float b; };
__global__ void types(half* h, __nv_bfloat16* b, signed char* c, unsigned char* u, long long* l, double* d,
                      void* any, const uint4* quads, bool flag, unsigned short s, unsigned long long big,
                      half one, Pair pair, float* missing) {
    if (threadIdx.x) return;
    h[0] = one;
    b[0] = __float2bfloat16(2.f);
    c[0] = -3;
    u[0] = 250;
    l[0] = (long long)big;
    d[0] = flag ? 0.5 : 0.0;
    ((int*)any)[0] = pair.a + s;
    u[1] = (unsigned char)(quads[0].w >> 24);
    u[2] = missing == nullptr;
}
"""


@pytest.fixture(params=[False, True], ids=["in process", "isolated"])
def isolate(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_fast_and_traced_results(isolate: bool) -> None:
    kernel = emulator.compile(SCALE, isolate=isolate)
    assert kernel.name == "scale" and [p.name for p in kernel.parameters] == ["x", "y", "factor", "n"]
    x = torch.arange(1000, dtype=torch.float32)
    for launch in (kernel, kernel.trace):
        y = torch.full((1000,), -1.0)
        result = launch((8,), (128,), [x, y, 2.0, 1000])
        assert torch.equal(y, 2 * x)
        assert result.seconds > 0
    run = kernel(8, 128, [x, y, 3, 1000])
    assert (run.blocks, run.threads, run.output) == (8, 128, "")
    assert torch.equal(y, 3 * x)


def test_every_argument_type(isolate: bool) -> None:
    kernel = emulator.compile(TYPES, isolate=isolate)
    h, b = torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.bfloat16)
    c, u = torch.zeros(1, dtype=torch.int8), torch.zeros(4, dtype=torch.uint8)
    long, d, anything = np.zeros(1, np.int64), np.zeros(1), np.zeros(3, np.int32)
    quads = torch.arange(32, dtype=torch.uint8)
    pair = np.array([(40, 1.5)], dtype=[("a", "i4"), ("b", "f4")]).tobytes()
    args = [h, b, c, u, long, d, anything, quads, True, 2, 2**63, np.float16(1.5), pair, None]
    kernel((1,), (32,), args)
    assert (h.item(), b.item(), c.item(), d[0], long[0]) == (1.5, 2.0, -3, 0.5, -(2**63))
    assert u.tolist() == [250, 15, 1, 0]
    assert anything[0] == 42


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, torch.zeros(4, dtype=torch.float64), "x: .*8 bytes.*4 bytes for const float"),
        (0, torch.zeros(4, dtype=torch.int32), "x: .*floating point"),
        (0, torch.zeros(4, 4).T, "x: .*strides.*contiguous"),
        (1, np.zeros((4, 4), np.float32)[:, 1], "y: .*strides.*contiguous"),
        (0, [1.0, 2.0], "x: .*list.*torch.tensor"),
        (0, 3.0, "x: .*float.*tensor"),
        (0, np.array([None]), "x: .*Python objects"),
        (0, torch.zeros(4, device="meta"), "x: .*meta.*CPU"),
        (0, torch.zeros(4).to_sparse(), "x: .*dense"),
        (2, torch.zeros(1), "factor: .*Tensor.*number.*item"),
        (2, None, "factor: .*None.*number"),
        (2, 1e300, "factor: .*within float"),
        (2, "2", "factor: .*str"),
        (3, 2**31, "n: .*2147483648.*-2147483648 to 2147483647"),
        (3, 1.0, "n: .*integer"),
    ],
)
def test_bad_arguments_name_the_parameter(position: int, value: object, words: str) -> None:
    kernel = emulator.compile(SCALE, isolate=False)
    args: list[object] = [torch.zeros(4), torch.zeros(4), 1.0, 4]
    args[position] = value
    with pytest.raises(InputError, match=words):
        kernel((1,), (32,), args)


def test_read_only_array_for_a_written_parameter() -> None:
    kernel = emulator.compile(SCALE, isolate=False)
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    kernel((1,), (32,), [frozen, np.zeros(4, np.float32), 1.0, 4])
    with pytest.raises(InputError, match=r"y: .*read-only"):
        kernel((1,), (32,), [np.zeros(4, np.float32), frozen, 1.0, 4])


@pytest.mark.parametrize(
    ("grid", "block", "shared", "words"),
    [
        ((0,), (32,), 0, "grid.x"),
        ((1, 70000), (32,), 0, "grid.y"),
        ((1,), (2048,), 0, "block.x"),
        ((1,), (64, 32), 0, "block: .*2048 threads"),
        ((1,), (1, 1, 65), 0, "block.z"),
        ("1", (32,), 0, "grid"),
        ((1, 1, 1, 1), (32,), 0, "grid"),
        ((1.0,), (32,), 0, "grid"),
        ((1,), (32,), -1, "shared_bytes"),
        ((1,), (32,), 2**20, "shared_bytes"),
    ],
)
def test_bad_launch_shapes(grid: object, block: object, shared: int, words: str) -> None:
    kernel = emulator.compile(SCALE, isolate=False)
    with pytest.raises(InputError, match=words):
        kernel(grid, block, [torch.zeros(4), torch.zeros(4), 1.0, 4], shared)


def test_wrong_number_of_arguments() -> None:
    kernel = emulator.compile(SCALE, isolate=False)
    with pytest.raises(InputError, match=r"arguments of scale: got 2; expected 4 \(x, y, factor, n\)"):
        kernel((1,), (32,), [torch.zeros(4), torch.zeros(4)])


def test_printf_is_in_block_order(isolate: bool) -> None:
    text = '__global__ void p() { if (threadIdx.x == 0) printf("block %d\\n", blockIdx.x); }'
    run = emulator.compile(text, isolate=isolate)((4,), (32,), [])
    assert run.output == "block 0\nblock 1\nblock 2\nblock 3\n"


def test_dynamic_and_static_shared_memory(isolate: bool) -> None:
    text = """
    __shared__ int at_file_scope[64];
    __global__ void r(int* o) {
        extern __shared__ int dynamic[];
        __shared__ int fixed[64];
        int t = threadIdx.x;
        dynamic[t] = t; fixed[t] = 2 * t; at_file_scope[t] = 3 * t;
        __syncthreads();
        o[t] = dynamic[63 - t] + fixed[63 - t] + at_file_scope[63 - t];
    }
    """
    kernel = emulator.compile(text, isolate=isolate)
    out = np.zeros(64, np.int32)
    trace = kernel.trace((1,), (64,), [out], 256)
    assert trace.ok, trace.report()
    np.testing.assert_array_equal(out, 6 * np.arange(63, -1, -1))
    kernel((1,), (64,), [out], 256)


def test_templates_namespaces_and_defines(isolate: bool) -> None:
    text = """
    namespace lab { template <typename T, int N> __global__ void fill(T* o) { o[threadIdx.x] = N + PLUS; } }
    """
    kernel = emulator.compile(text, "lab::fill<float, 4>", defines={"PLUS": 1}, isolate=isolate)
    out = torch.zeros(32)
    kernel((1,), (32,), [out])
    assert out.unique().tolist() == [5.0]


def test_zero_size_and_null_buffers(isolate: bool) -> None:
    kernel = emulator.compile(SCALE, isolate=isolate)
    kernel((1,), (32,), [torch.zeros(0), torch.zeros(0), 1.0, 0])
    kernel((1,), (32,), [None, None, 1.0, 0])
    assert kernel.trace((1,), (32,), [torch.zeros(0), None, 1.0, 0]).ok
    trace = kernel.trace((1,), (32,), [torch.zeros(0), torch.zeros(1), 1.0, 1])
    assert [fault.kind for fault in trace.faults] == ["out-of-bounds"]
    trace = kernel.trace((1,), (32,), [torch.zeros(1), None, 1.0, 1])
    assert [(fault.kind, fault.fatal) for fault in trace.faults] == [("illegal memory access", True)]


def test_views_that_share_memory(isolate: bool) -> None:
    """y = 2 * x in place, and shifted by one inside the same storage."""
    kernel = emulator.compile(SCALE, isolate=isolate)
    for launch in (kernel, kernel.trace):
        x = torch.arange(64, dtype=torch.float32)
        launch((2,), (32,), [x, x, 2.0, 64])
        assert torch.equal(x, 2.0 * torch.arange(64))
        x = torch.arange(65, dtype=torch.float32)
        launch((1,), (32,), [x[1:33], x[:32], 1.0, 32])
        assert x[:32].tolist() == list(range(1, 33))
    trace = kernel.trace((2,), (32,), [x[:64], x[:64], 2.0, 64])
    assert {row.buffer for row in trace.rows} == {"x/y"}
    assert trace.sectors(buffer="x") == trace.sectors(buffer="y") == 16


def test_traced_alignment_is_that_of_a_gpu() -> None:
    """A view that starts 4 bytes into an allocation touches one sector more, wherever the host put it."""
    kernel = emulator.compile(SCALE, isolate=False)
    base = torch.zeros(4096)
    for offset, sectors in ((0, 4), (8, 4), (1, 5), (31, 5)):
        trace = kernel.trace((1,), (32,), [base[offset : offset + 32], torch.zeros(32), 1.0, 32])
        assert trace.sectors(buffer="x") == sectors, offset


def test_threads_may_launch_at_once(isolate: bool) -> None:
    kernel = emulator.compile(SCALE, isolate=isolate)
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        for _ in range(5):
            y = torch.zeros(500)
            kernel((4,), (128,), [torch.ones(500), y, float(number), 500])
            results[number] = y

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(y, torch.full((500,), float(number))) for number, y in results.items())
    assert len(results) == 4


def test_import_is_light() -> None:
    code = (
        "import sys; from labkit import emulator; "
        "print([m for m in ('torch', 'cupy', 'elftools') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "[]"
