"""Machine code by source line, and the lines whose widths the emulator counts otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from labkit.errors import InputError
from labkit.kernels import nvrtc, sass
from labkit.kernels.source import KernelSource, find_source
from labkit.probes import cuda

LINES = """\
#include <cuda_fp16.h>
__device__ __forceinline__ float twice(const float* p) {
    return *p * 2;
}
extern "C" __global__ void __launch_bounds__(64) widths(
    const uint4* a, const unsigned char* b, const float* c, float* out, unsigned short* small, int* counter) {
    __shared__ float cells[64];
    uint4 wide = a[threadIdx.x];
    int narrow = b[threadIdx.x];
    cells[threadIdx.x] = twice(c + threadIdx.x);
    __syncthreads();
    float2 pair = *reinterpret_cast<float2*>(&cells[(threadIdx.x * 2) & 62]);
    out[threadIdx.x] = pair.x * pair.y + wide.x + wide.y + wide.z + wide.w + narrow;
    small[threadIdx.x] = narrow;
    atomicAdd(counter, 1);
}
"""
SOURCE = KernelSource.from_text(LINES, filename="widths.cu")


@pytest.fixture(autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path_factory.getbasetemp() / "kernel-cache"))


@pytest.mark.parametrize("arch", nvrtc.ARCHS)
def test_accesses_are_found_on_their_lines_with_their_widths(arch: str) -> None:
    code = sass.disassemble(SOURCE, arch)
    widths = {
        (each.line, space, kind): each.width
        for each in code.instructions
        for space, kind in sass.MEMORY.get(each.base, ())
    }
    assert widths[8, "global", "read"] == 16
    assert widths[9, "global", "read"] == 1
    assert widths[3, "global", "read"] == 4  # the inlined function's own line: it is in the same file
    assert widths[10, "shared", "write"] == 4
    assert widths[12, "shared", "read"] == 8
    assert widths[13, "global", "write"] == 4 and widths[14, "global", "write"] == 2
    assert widths[15, "global", "atomic"] == 4
    assert [each.base for each in code.at(11)] == ["BAR"]
    assert [each.opcode for each in code.instructions if each.kind == "other"] == []
    assert sum(code.by_class().values()) == code.count
    assert all(each.base != "NOP" for each in code.instructions)


def test_a_header_s_function_counts_for_the_line_that_calls_it() -> None:
    text = (
        '#include "ptx.cuh"\n'
        "__global__ void copy(const float4* x, float4* y) {\n"
        "    __shared__ float4 cells[32];\n"
        "    cp_async_16(&cells[threadIdx.x], x + threadIdx.x);\n"
        "    cp_async_commit();\n"
        "    cp_async_wait<0>();\n"
        "    y[threadIdx.x] = cells[threadIdx.x];\n"
        "}\n"
    )
    lines = sass.disassemble(KernelSource.from_text(text)).lines()
    assert lines[4] == {"LDGSTS.128": 1}
    assert lines[7] == {"LDS.128": 1, "STG.128": 1}


def test_only_the_kernel_asked_for_is_read() -> None:
    text = (
        'extern "C" __global__ void one(int* x) { *x = 1; }\n__global__ void two(int* x) { x[0] = x[1]; }\n'
    )
    one = sass.disassemble(KernelSource.from_text(text, "one"))
    two = sass.disassemble(KernelSource.from_text(text, "two"))
    assert {each.line for each in one.instructions} == {1} and {each.line for each in two.instructions} == {2}
    assert one.lines() == {1: {"STG": 1}} and two.lines() == {2: {"LDG": 1, "STG": 1}}


def test_tables() -> None:
    code = sass.disassemble(find_source("gemm_tiled_w4")[0])
    shown = repr(code.table())
    assert "gemm_tiled_w4: machine code for sm_86" in shown and "BAR" in shown and "STG.U16" in shown
    assert "__syncthreads()" in shown
    with pytest.raises(InputError, match="tensor core"):
        code.table(["tensor core"])


@dataclass(frozen=True)
class Access:
    """The fields of an emulator's row that are compared."""

    line: int
    kind: str
    size: int
    space: str
    file: str = "widths.cu"


def test_lines_of_other_widths_are_flagged() -> None:
    rows = [
        Access(8, "read", 16, "global"),
        Access(9, "read", 1, "global"),
        Access(12, "read", 4, "shared"),  # two reads in the source, one LDS.64 in the machine code
        Access(13, "write", 4, "global"),
        Access(14, "read", 2, "global"),  # a read that the compiler left out
        Access(3, "read", 4, "global"),
        Access(40, "read", 4, "global", file="other.cuh"),
        Access(13, "read", 4, "local"),
    ]
    found = sass.compare_widths(SimpleNamespace(rows=rows), SOURCE)
    assert [(each.line, each.kind, each.differs) for each in found] == [
        (3, "read", False),
        (8, "read", False),
        (9, "read", False),
        (12, "read", True),
        (13, "write", False),
        (14, "read", True),
    ]
    assert (found[3].source, found[3].sass, found[5].sass) == ((4,), (8,), ())
    shown = repr(sass.widths_table(found))
    assert shown.count("differs") == 2 and "none on this line" in shown and "float2 pair" in shown


def test_missing_disassembler_names_the_line_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_nvdisasm", list)
    sass._nvdisasm.cache_clear()
    with pytest.raises(InputError, match=r"pip install.*nvidia-cuda-nvdisasm"):
        sass.disassemble(SOURCE)


def test_doctor_sees_the_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cuda.nvdisasm()
    assert found.state == "ok" and found.facts["version"][0].isdigit()
    monkeypatch.setattr(cuda, "find_nvdisasm", list)
    assert cuda.nvdisasm().state == "note" and "nvidia-cuda-nvdisasm" in cuda.nvdisasm().fix
