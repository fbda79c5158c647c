"""The CuPy runner on a GPU: streams, graphs, refusals, and the driver's word on registers and occupancy."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from labkit.device import devices
from labkit.errors import InputError
from labkit.kernels import nvrtc, resources, runner
from labkit.kernels.capture import capturing
from labkit.kernels.gpu import GpuKernel, why_not
from labkit.kernels.occupancy import occupancy
from labkit.kernels.source import KernelSource

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))
from kernel_variants import kernel_variants

pytestmark = pytest.mark.gpu

TEXT = """
#include <cuda_fp16.h>
#include "types.cuh"
extern "C" __global__ void __launch_bounds__(256) axpy(
    const half* __restrict__ x, float* y, float a, long long n)
{
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * __half2float(x[i]);
}
extern "C" __global__ void reverse(int* x, int n)
{
    extern __shared__ int cells[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) cells[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = cells[n - 1 - i];
}
extern "C" __global__ void wait_then_write(int* x, long long cycles, int value)
{
    const long long start = clock64();
    while (clock64() - start < cycles) { }
    *x = value;
}
extern "C" __global__ void scalars(
    double* out, char a, unsigned char b, short c, unsigned short d, int e, unsigned f, long long g,
    unsigned long long h, float i, double j, half k, bool l, const int* null)
{
    out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = f; out[6] = (double)g;
    out[7] = (double)(h >> 1); out[8] = i; out[9] = j; out[10] = __half2float(k); out[11] = l;
    out[12] = null == nullptr;
}
extern "C" __global__ void where(unsigned* out)
{
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0)
        out[block] = blockDim.x * blockDim.y * blockDim.z;
}
template <typename T, int N> __global__ void fill(T* x) { x[threadIdx.x] = T(N); }
"""


def source(entry: str) -> KernelSource:
    return KernelSource.from_text(TEXT, entry, filename="runner.cu")


def load(entry: str) -> GpuKernel:
    kernel = runner.load(source(entry), "cuda")
    assert isinstance(kernel, GpuKernel)
    return kernel


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"
    assert why_not() == ""


def test_result_on_the_current_stream() -> None:
    n = 100_003
    x = torch.randn(n, device="cuda").half()
    y = torch.ones(n, device="cuda")
    load("axpy")((-(-n // 256),), (256,), [x, y, 0.5, n])
    assert torch.equal(y, 1 + 0.5 * x.float())


def test_cuda_without_a_number_is_the_current_device() -> None:
    assert runner.load(source("axpy"), torch.device("cuda")) is runner.load(source("axpy"), "cuda:0")


def test_every_scalar_type_arrives() -> None:
    out = torch.zeros(13, dtype=torch.float64, device="cuda")
    given = [-100, 200, -30000, 60000, -(2**31), 2**32 - 1, -(2**40), 2**64 - 2, 0.1, 0.1, 1.5, True]
    load("scalars")((1,), (1,), [out, *given, None])
    expected = [*given[:7], 2**63 - 1, float(torch.tensor(0.1)), 0.1, 1.5, 1.0, 1.0]
    assert out.tolist() == [float(value) for value in expected]


@pytest.mark.parametrize(("grid", "block"), [((7,), (32,)), ((3, 5), (8, 4)), ((2, 3, 4), (4, 2, 8))])
def test_grids_and_blocks_of_one_to_three_dimensions(grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    blocks = torch.Size(grid).numel()
    out = torch.zeros(blocks, dtype=torch.int32, device="cuda")
    load("where")(grid, block, [out])
    assert out.tolist() == [torch.Size(block).numel()] * blocks


def test_template_kernel_runs() -> None:
    kernel = runner.load(source("fill<float, 7>"), "cuda")
    x = torch.zeros(32, device="cuda")
    kernel((1,), (32,), [x])
    assert x.tolist() == [7.0] * 32


def test_launch_is_on_the_stream_that_torch_has_as_current() -> None:
    """A slow kernel holds one stream; the other stream's work is done while it still runs."""
    kernel = load("wait_then_write")
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.zeros(2, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    first, second = torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(slow):
        kernel((1,), (1,), [x[:1], 1_000_000_000, 1])
        first.record()
    with torch.cuda.stream(fast):
        kernel((1,), (1,), [x[1:], 0, 2])
        second.record()
    second.synchronize()
    assert not first.query(), "the second launch waited for the first one's stream"
    first.synchronize()
    assert x.tolist() == [1, 2]


def test_launches_of_one_stream_keep_their_order_with_torch_s() -> None:
    stream = torch.cuda.Stream()
    kernel = load("wait_then_write")
    with torch.cuda.stream(stream):
        x = torch.zeros(1, dtype=torch.int32, device="cuda")
        kernel((1,), (1,), [x, 50_000_000, 5])
        y = x * 3
    stream.synchronize()
    assert y.item() == 15


def test_dynamic_shared_memory_above_48_kib() -> None:
    kernel = load("reverse")
    n = 20_000
    x = torch.arange(n, dtype=torch.int32, device="cuda")
    kernel((1,), (256,), [x, n], shared_bytes=4 * n)
    assert torch.equal(x, torch.arange(n - 1, -1, -1, dtype=torch.int32, device="cuda"))
    with pytest.raises(InputError, match="shared_bytes"):
        kernel((1,), (256,), [x, n], shared_bytes=1 << 20)


def test_graph_capture_and_replay() -> None:
    axpy, reverse = load("axpy"), load("reverse").prepare(80_000)
    n = 20_000
    x, y = torch.ones(n, dtype=torch.float16, device="cuda"), torch.zeros(n, device="cuda")
    numbers = torch.arange(n, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with capturing(graph):
        temporary = torch.empty(n, device="cuda")
        temporary.zero_()
        axpy((-(-n // 256),), (256,), [x, temporary, 2.0, n])
        y += temporary
        reverse((1,), (256,), [numbers, n], shared_bytes=80_000)
    assert y.sum().item() == 0 and numbers[0].item() == 0, "a capture must not run anything"
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full((n,), 6.0, device="cuda"))
    assert numbers[0].item() == n - 1


def test_first_use_inside_a_capture_is_refused_in_words() -> None:
    text = TEXT.replace("a * __half2float", "3 * a * __half2float")
    fresh = KernelSource.from_text(text, "axpy", filename="fresh.cu")
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        with pytest.raises(InputError, match="before the capture"):
            runner.load(fresh, "cuda")
        torch.zeros(1, device="cuda")
    assert runner.load(fresh, "cuda").name == "axpy"


def test_threads_launch_on_their_own_streams() -> None:
    kernel = load("axpy")
    n, failed = 4096, []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.full((n,), float(number), device="cuda", dtype=torch.float16)
            y = torch.zeros(n, device="cuda")
            for _ in range(50):
                kernel((16,), (256,), [x, y, 1.0, n])
            if not torch.equal(y, torch.full((n,), 50.0 * number, device="cuda")):
                failed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize(
    ("index", "wrong", "words"),
    [
        (0, lambda: torch.zeros(8).half(), "argument x: got a tensor on cpu; expected one on cuda:0"),
        (0, lambda: torch.zeros(8, device="cuda"), "float32; expected float16"),
        (1, lambda: torch.zeros(16, device="cuda")[::2], "argument y.*contiguous"),
        (1, lambda: 5, "argument y"),
        (2, lambda: "1", "argument a"),
        (3, lambda: 2**63, "argument n"),
    ],
)
def test_arguments_that_do_not_fit_never_reach_the_gpu(
    index: int, wrong: Callable[[], object], words: str
) -> None:
    args: list = [torch.zeros(8, device="cuda").half(), torch.zeros(8, device="cuda"), 1.0, 8]
    args[index] = wrong()
    with pytest.raises(InputError, match=words):
        load("axpy")((1,), (32,), args)


def test_launches_that_cannot_be_never_reach_the_gpu() -> None:
    kernel = load("axpy")
    args = [None, None, 1.0, 0]
    for grid, block in (((0,), (32,)), ((1, 65536), (32,)), ((1,), (512,)), ((1,), (1025,))):
        with pytest.raises(InputError, match=r"grid|block"):
            kernel(grid, block, args)
    with pytest.raises(InputError, match="2 arguments"):
        kernel((1,), (32,), [None, None])
    with pytest.raises(InputError, match="one of"):
        runner.load(source("axpy"), f"cuda:{torch.cuda.device_count()}")
    torch.cuda.synchronize()


def test_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    kernel = runner.load(source("axpy"), "cuda:1")
    x, y = torch.ones(256, device="cuda:1").half(), torch.zeros(256, device="cuda:1")
    kernel((1,), (256,), [x, y, 2.0, 256])
    assert torch.cuda.current_device() == 0 and y.sum().item() == 512
    z = torch.zeros(256, device="cuda")
    load("axpy")((1,), (256,), [torch.ones(256, device="cuda").half(), z, 2.0, 256])
    assert z.device.index == 0 and z.sum().item() == 512


@pytest.mark.parametrize(
    "variant", kernel_variants(), ids=lambda s: f"{s.name}-{'-'.join(v for _, v in s.defines)}"
)
def test_the_driver_confirms_resources_and_occupancy(variant: KernelSource) -> None:
    """Registers, stack, static shared memory and blocks an SM: computed with no GPU, asked of the GPU."""
    capability = torch.cuda.get_device_capability()
    kernel = runner.load(variant, "cuda")
    used = resources.usage(variant, kernel.compiled.arch)
    assert kernel.registers == used.registers
    assert kernel.local_bytes == used.stack == 0
    assert kernel.static_shared == used.static_shared
    if used.max_threads is not None:
        assert kernel.max_threads == used.max_threads
    card = next((card for card in devices().values() if card.capability == capability), None)
    if card is None or nvrtc.arch_name(capability) != kernel.compiled.arch:
        pytest.skip(f"no device of {capability} in data/devices.json")
    for threads in (32, 64, 96, 128, 256, 512, 1024):
        if threads > kernel.max_threads:
            continue
        for dynamic in (0, 1, 1024, 10_000, 40_000, 90_000):
            ours = occupancy(used.registers, used.static_shared + dynamic, threads, card)
            assert kernel.max_active_blocks(threads, dynamic) == ours.blocks, (threads, dynamic, str(ours))
