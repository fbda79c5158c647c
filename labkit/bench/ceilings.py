"""What this GPU reaches at most, measured in the same run: copy, read, dense product.

A kernel that reads weights and writes next to nothing has the read rate above it, not the copy rate.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

from labkit.device import Measurement, measure_copy, measure_matmul, time_calls
from labkit.errors import InputError, require
from labkit.kernels.source import KernelSource

_READ = """
// Every thread reads 16 bytes at a time, warps side by side, and folds them; the store is never made,
// but the compiler cannot know.
extern "C" __global__ void read_all(const uint4* data, unsigned long long vectors, unsigned* out) {
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned fold = 0;
#pragma unroll 8
    for (unsigned long long i = first; i < vectors; i += step) {
        const uint4 v = data[i];
        fold |= v.x | v.y | v.z | v.w;
    }
    if (fold) *out = fold;
}
"""
_THREADS, _BLOCKS_PER_SM = 512, 4
_BUSY_SECONDS = 0.5


def read_source() -> KernelSource:
    """The kernel ``read_all(data, vectors, out)``: reads ``vectors`` times 16 bytes, all zero."""
    return KernelSource.from_text(_READ, "read_all", filename="read_all.cu")


def measure_read(mib: int = 256, repeats: int = 10) -> Measurement:
    """Bandwidth of reading ``mib`` MiB of GPU memory, GB/s: the faster of our kernel and ``torch.sum``.

    Args:
        mib: MiB to read; much more than the L2 cache.
        repeats: timed calls of each.

    Raises:
        InputError: ``mib`` below 1.
    """
    import torch

    require(mib >= 1, "mib", mib, "at least 1")
    data = torch.zeros(mib << 18, dtype=torch.float32, device="cuda")
    ways = {"torch.sum": lambda: torch.sum(data)}
    kernel = _own(data)
    if kernel is not None:
        ways["kernel"] = kernel
    found = []
    for name, call in ways.items():
        seconds = time_calls(call, "cuda", repeats)
        rate = data.nbytes / statistics.median(seconds) / 1e9
        found.append(Measurement(rate, "GB/s", seconds, f"read of {mib} MiB ({name})"))
    return max(found, key=lambda one: one.value)


def _own(data: Any) -> Any:
    """A call of the read kernel, or None where CuPy or a compiler is missing."""
    import torch

    from labkit.kernels import runner

    try:
        kernel = runner.load(read_source(), data.device)
    except InputError:
        return None
    out = torch.zeros(1, dtype=torch.int32, device=data.device)
    blocks = _BLOCKS_PER_SM * torch.cuda.get_device_properties(data.device).multi_processor_count
    words = data.view(torch.int32)
    return lambda: kernel((blocks,), (_THREADS,), [words, words.numel() // 4, out])


@contextlib.contextmanager
def busy(mib: int = 256, copies: int = 4000) -> Iterator[None]:
    """The GPU copies memory for about half a second meanwhile: for clocks under load, not idle ones."""
    import torch

    source = torch.ones(mib << 18, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    seconds = time_calls(lambda: target.copy_(source), "cuda", 3)
    for _ in range(min(copies, int(_BUSY_SECONDS / min(seconds)))):
        target.copy_(source)
    yield
    torch.cuda.synchronize()


def measure() -> tuple[dict[str, float], str]:
    """Ceilings of torch's current GPU for a record, and a sentence that says how they were measured."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    large = properties.total_memory > 12 << 30
    mib, side = (1024, 8192) if large else (256, 4096)
    read = measure_read(2 * mib)
    found = {
        "copy_gb_s": round(measure_copy("cuda", mib, repeats=10).value, 1),
        "read_gb_s": round(read.value, 1),
        "matmul_tflops": round(measure_matmul("cuda", side).value, 1),
    }
    torch.cuda.empty_cache()
    said = f"ceilings, same run: copy of {mib} MiB counting both ways, {read.what}, dense FP16 product"
    return found, said
