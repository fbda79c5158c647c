"""What kernels take, from real machine code: every packaged kernel on every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_variants import kernel_variants

from labkit.device import devices
from labkit.errors import InputError
from labkit.kernels import nvrtc, resources
from labkit.kernels.source import KernelSource, find_source, kernel_files

pytestmark = pytest.mark.xdist_group("nvrtc")

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spilling(float* x, int n) {
    float v[96];
    for (int i = 0; i < 96; i++) v[i] = x[i * n + threadIdx.x];
    for (int j = 0; j < n; j++) {
#pragma unroll
        for (int i = 0; i < 96; i++) v[i] = v[i] * v[(i + 7) % 96] + v[(i + 31) % 96];
    }
    for (int i = 0; i < 96; i++) x[i * n] = v[i];
}
"""
TILE = """
__global__ void tile(float* x) {
    __shared__ float cells[300];
    extern __shared__ float more[];
    cells[threadIdx.x] = x[threadIdx.x];
    more[threadIdx.x] = x[threadIdx.x + 1];
    __syncthreads();
    x[threadIdx.x] = cells[threadIdx.x ^ 1] + more[threadIdx.x ^ 1];
}
"""


@pytest.fixture(autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path_factory.getbasetemp() / "kernel-cache"))


def test_architectures_are_those_of_the_device_table() -> None:
    assert set(nvrtc.ARCHS) == {nvrtc.arch_name(card.capability) for card in devices().values()}


@pytest.mark.parametrize("file", kernel_files())
def test_every_kernel_states_its_registers(file: str) -> None:
    for source in find_source(file):
        assert resources.stated_registers(source), f"{file} has no line '// registers: R'"


@pytest.mark.parametrize("arch", nvrtc.ARCHS)
def test_every_kernel_compiles_without_spills_within_its_registers(arch: str) -> None:
    wrong = []
    found = 0
    for source in kernel_variants(arch):
        used = resources.usage(source, arch)
        stated = resources.stated_registers(source)
        found += 1
        if used.spills or used.stack:
            wrong.append(f"{source}: {used.spills} bytes spilled, {used.stack} bytes of stack")
        if stated is not None and used.registers > stated:
            wrong.append(f"{source}: {used.registers} registers, its header says {stated}")
        if used.static_shared > 48 * 1024:
            wrong.append(f"{source}: {used.static_shared} bytes of static shared memory")
    assert not wrong, "\n".join(wrong)
    assert found >= len(kernel_files())


def test_stated_registers_are_tight() -> None:
    """The number of a file is what some kernel of it takes on some architecture, within 8."""
    for file in kernel_files():
        sources = [source for source in kernel_variants() if source.file == file]
        most = max(resources.usage(source, arch).registers for source in sources for arch in nvrtc.ARCHS)
        stated = resources.stated_registers(sources[0])
        assert stated is not None and stated - most <= 8, f"{file}: states {stated}, takes at most {most}"


def test_spills_and_stack_are_seen() -> None:
    used = resources.usage(KernelSource.from_text(SPILLING), "sm_86")
    assert used.spill_stores > 0 and used.spill_loads > 0 and used.stack >= 64
    assert used.spills == used.spill_stores + used.spill_loads
    assert used.registers == 64 and used.max_threads == 1024


@pytest.mark.parametrize("arch", nvrtc.ARCHS)
def test_static_shared_memory_is_the_declared_one_on_every_architecture(arch: str) -> None:
    used = resources.usage(KernelSource.from_text(TILE), arch)
    assert used.static_shared == 1200  # from 9.0 on the file also counts the reserved KiB
    assert used.name == "tile" and used.arch == arch and used.max_threads is None


def test_occupancy_of_the_seed_gemm() -> None:
    used = resources.usage(find_source("gemm_tiled_w4")[0])
    fits = used.occupancy()
    assert (used.static_shared, fits.blocks, fits.warps) == (6208, 6, 48)
    assert used.occupancy(dynamic_shared=40 << 10).blocks == 2
    assert used.occupancy(threads=128).blocks == 12
    with pytest.raises(InputError, match="sm_89"):
        used.occupancy("rtx4090")
    with pytest.raises(InputError, match="no __launch_bounds__"):
        resources.usage(KernelSource.from_text(TILE)).occupancy()


@pytest.mark.parametrize("threads", [0, -1, 257, 1024])
def test_a_block_that_cannot_be_launched_has_no_occupancy(threads: int) -> None:
    found = resources.usage(KernelSource("gemv_row.cu", "gemv_row_w4"))
    with pytest.raises(InputError, match=f"threads: got {threads}"):
        found.occupancy(threads=threads)
    assert found.occupancy(threads=256).threads == 256


def test_table_has_a_row_a_device() -> None:
    shown = repr(resources.table(find_source("gemm_tiled_w4"), ["rtx3050-laptop", "h200"]))
    lines = shown.splitlines()
    assert "NVRTC" in lines[0] and len(lines) == 5
    assert "RTX 3050 Laptop 4GB  sm_86" in lines[3] and "48/48" in lines[3]
    assert "H200 SXM" in lines[4] and "sm_90" in lines[4]
    everything = resources.table(KernelSource.from_text(TILE), threads=64, dynamic_shared=256)
    assert len(everything.cells) == len(devices())
    assert all(row[5] == "1456" for row in everything.cells)


def test_stated_registers_of_a_text() -> None:
    text = "// registers: 40\n// registers: many\n" + TILE
    assert resources.stated_registers(KernelSource.from_text(text)) == 40
    assert resources.stated_registers(KernelSource.from_text(TILE)) is None


def test_command_prints_tables(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from labkit.kernels import report

    report.resources("gemv_row_w4", ["86"], ["rtx3050-laptop"], ["OFFSET=1"], None, 0, False)
    out = capsys.readouterr().out
    assert "gemv_row_w4" in out and "sm_86" in out and "RTX 3050 Laptop" in out and "gemv_row_w3" not in out
    with pytest.raises(InputError, match="--shared"):
        report.resources("gemv_row_w4", [], [], [], None, -1, False)
    for threads, shared, option in ((128, 0, "--threads: got 128"), (None, 1024, "--shared: got 1024")):
        with pytest.raises(InputError, match=f"{option}; expected a device"):
            report.resources("gemv_row_w4", [], [], [], threads, shared, False)
    with pytest.raises(InputError, match="rtx9999"):
        report.resources("gemv_row_w4", ["86"], ["rtx9999"], [], None, 0, False)
    assert capsys.readouterr().out == "", "refused before anything is compiled and printed"
    with pytest.raises(InputError, match="gemv_row_w4"):
        report.resources("no_such_kernel", [], [], [], None, 0, False)
