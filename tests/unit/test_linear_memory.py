"""Temporaries of QuantLinear's fallback: summed operation by operation, and as resident memory."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.kernels import cpu
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear
from labkit.nn.memory import MemoryBudget
from labkit.quant import quantize

FALLBACK = DispatchTable.from_params({"force": "dequant_matmul"})


class LiveBytes(TorchDispatchMode):
    """Sums the storages that operations inside made and that are still alive; remembers the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.owners: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not torch.is_tensor(tensor):
                continue
            storage = tensor.untyped_storage()
            pointer, size = storage.data_ptr(), storage.nbytes()
            if pointer in known and pointer not in self.owners:
                continue  # a view of something that was there before
            if pointer not in self.owners:
                self.owners[pointer] = 0
                self.live += size
                self.peak = max(self.peak, self.live)
            self.owners[pointer] += 1
            weakref.finalize(tensor, self.release, pointer, size)
        return result

    def release(self, pointer: int, size: int) -> None:
        self.owners[pointer] -= 1
        if not self.owners[pointer]:
            del self.owners[pointer]
            self.live -= size


@pytest.mark.parametrize("format", ["w4", "w3", "q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 700])
def test_temporaries_of_the_fallback_stay_under_the_bound(format, dtype, m):
    original = torch.randn(2000, 1000, generator=torch.Generator().manual_seed(0))
    weight = quantize(original, format, 32, offset=format != "q8_0")
    layer = QuantLinear(weight, table=FALLBACK, temp_bytes=1 << 20)
    x = torch.randn(m, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    with LiveBytes() as calls:
        y = layer(x)
    temporary = calls.peak - y.nbytes
    assert 100_000 < temporary <= 1 << 20
    with LiveBytes() as whole:
        weight.dequantize(torch.float32)
    assert whole.peak >= 8 * (1 << 20) - 400_000  # 2000 * 1000 * 4 bytes at the least


@pytest.mark.skipif(bool(cpu.int4pack_missing()), reason="this torch has no int4 CPU kernel")
@pytest.mark.parametrize("format", ["w4", "w3"])
def test_temporaries_of_the_first_int4_call_stay_near_the_bound(format):
    """The default for bfloat16: packing into torch's layout goes by rows, and the layout is counted."""
    weight = quantize(torch.randn(2064, 1024, generator=torch.Generator().manual_seed(0)), format, 32)
    budget = MemoryBudget(8 << 20)
    layer = QuantLinear(weight, budget=budget, temp_bytes=1 << 20)
    x = torch.randn(1, 1024).bfloat16()
    with LiveBytes() as calls:
        layer(x)
    assert layer.last_choice.kernel == "int4pack"
    # The whole as int32 would be 8 MiB. The check against float64 looks at a few rows and adds its own.
    assert calls.peak - budget.used <= 3 << 20


@pytest.mark.skipif(bool(cpu.int4pack_missing()), reason="this torch has no int4 CPU kernel")
@pytest.mark.parametrize("n", [16, 48, 64, 80, 208, 1040])
def test_int4_layout_packed_by_rows_is_the_layout_packed_whole(n):
    weight = quantize(torch.randn(n, 96, generator=torch.Generator().manual_seed(n)), "w4", 32)
    whole = cpu._int4_packed(weight, n)
    for rows in (64, 128, 256):
        assert torch.equal(cpu._int4_packed(weight, rows), whole)


def test_peak_resident_memory_with_cupy_blocked():
    """A 16384 x 16384 layer (1 GiB dense in float32) in a process of its own, in which CuPy cannot load."""
    code = """
import resource, sys
sys.modules["cupy"] = None
import torch
from labkit.kernels import cpu
from labkit.nn.dispatch import DispatchTable
from labkit.nn.linear import QuantLinear
from labkit.nn.memory import MemoryBudget
from labkit.quant import QuantWeight
torch.set_num_threads(1)
n = k = 16384
packed = torch.full((n, k // 2), 0x21, dtype=torch.uint8)
weight = QuantWeight("w4", packed, torch.ones(n, k // 128).half(), None, n, k, 128)
layer = QuantLinear(weight, table=DispatchTable.from_params({"force": "dequant_matmul"}))
unit = 1 if sys.platform == "darwin" else 1024
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
small = QuantLinear(weight.select_rows(torch.arange(512)), table=layer.table)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    small(torch.ones(2, k).to(dtype))  # libraries load and warm up before the measurement
before = peak()
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    y = layer((torch.ones(2, k) / 1024).to(dtype))
    assert (y.float() == 24.0).all(), y
print(peak() - before)
assert "cupy" not in sys.modules or sys.modules["cupy"] is None
"""
    if sys.platform == "win32":
        pytest.skip("no resource module")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48 << 20, f"peak grew by {int(done.stdout)} bytes"
