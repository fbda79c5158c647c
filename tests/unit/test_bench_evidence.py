"""The scripts in results/evidence that run on a GPU machine: their parsers, on recorded text."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
)
HEAD += '"Device","CC",'
RAW_ROW = '"{}","4321","python3.12","127.0.0.1","{}","1","7","(256, 1, 1)","{}","0","9.0",'
DETAIL_ROW = RAW_ROW.format(0, "gemm_tiled_w4(const __half *, int)", "(3, 2, 1)")
DETAIL_ROW += '"Command line profiler metrics",'
NCU_RAW = f"""==PROF== Connected to process 4321 (/usr/bin/python3.12)
==PROF== Profiling "gemm_tiled_w4" - 0: 0%....50%....100% - 7 passes
launched gemm_tiled w4 37×130×256 g128
==PROF== Disconnected from process 4321
{HEAD}"l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","smsp__inst_executed.sum"
"","","","","","","","","","","","request","inst"
{RAW_ROW.format(0, "gemm_tiled_w4", "(3, 2, 1)")}"2,968","110,520"
{RAW_ROW.format(1, "zsplit_reduce", "(2, 1, 1)")}"64","n/a"
"""
NCU_DETAILS = f"""{HEAD}"Section Name","Metric Name","Metric Unit","Metric Value"
{DETAIL_ROW}"smsp__inst_executed.sum","inst","1,024"
{DETAIL_ROW}"l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum","sector","7"
"""
MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at gemm_tiled_w4+0x1a90 in gemm_tiled_w4.cu:77
=========     by thread (32,0,0) in block (0,1,0)
=========     Access at 0x7f3d4a000400 is out of bounds
=========
========= Invalid __global__ write of size 4 bytes
=========     at zsplit_gemm_int8+0x90 in zsplit.cu:210
=========     by thread (1,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at gemm_tiled_w3+0x1d0 in gemm_tiled_w3.cu:60
=========     and Read access at gemm_tiled_w3+0x2f0 in gemm_tiled_w3.cu:80 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.fixture
def scripts(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.syspath_prepend(str(checkout / "results" / "evidence"))
    names = ("seed_launches", "ncu_counts", "sanitizer")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def test_both_forms_of_ncus_csv_are_read(scripts: dict[str, Any]) -> None:
    ncu = scripts["ncu_counts"]
    first, second = ncu.parse_csv(NCU_RAW)
    assert first["kernel"] == "gemm_tiled_w4" and first["grid"] == [3, 2, 1]
    requests = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
    assert first["metrics"] == {requests: 2968, "smsp__inst_executed.sum": 110520}
    assert second["kernel"] == "zsplit_reduce" and second["metrics"]["smsp__inst_executed.sum"] is None
    (only,) = ncu.parse_csv(NCU_DETAILS)
    assert only["kernel"] == "gemm_tiled_w4"
    assert only["metrics"] == {
        "smsp__inst_executed.sum": 1024,
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": 7,
    }
    assert ncu.parse_csv("==ERROR== The user does not have permission") == []


def test_metrics_are_chosen_from_those_the_gpu_has(scripts: dict[str, Any]) -> None:
    ncu = scripts["ncu_counts"]
    base = {name.partition(".")[0] for name in ncu.METRICS.values()}
    more = {"l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts", "lts__t_sectors_op_ldgsts", "sm__ldgsts_other"}
    chosen = ncu.choose_metrics(base | more)
    assert set(ncu.METRICS.items()) <= set(chosen.items())
    assert chosen["cp.async sectors"] == "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts.sum"
    assert "lts__t_sectors_op_ldgsts.sum" in chosen.values() and "sm__ldgsts_other.sum" not in chosen.values()
    assert len(set(chosen.values())) == len(chosen)
    assert ncu.choose_metrics(set()) == ncu.METRICS  # ncu did not say: the fixed ones are tried


def test_launches_are_paired_and_differences_shown(scripts: dict[str, Any]) -> None:
    ncu = scripts["ncu_counts"]
    emulated = [
        {"case": "a", "kernel": "k", "grid": [3, 2], "counts": {"load requests": 10, "load sectors": 40}},
        {"case": "b", "kernel": "k", "grid": [1], "counts": {"load requests": 5, "load sectors": 5}},
        {"case": "c", "kernel": "other", "grid": [1], "counts": {"load requests": 1, "load sectors": 1}},
    ]
    counted = [
        {"kernel": "k", "grid": [3, 2, 1], "counts": {"load requests": 10, "load sectors": 44}},
        {"kernel": "k", "grid": [9, 1, 1], "counts": {"load requests": 5, "load sectors": 5}},
    ]
    rows = ncu.pair(emulated, counted)
    assert ncu.differences(rows[0]) == ["load sectors 40/44"]
    assert rows[1]["counted"] is None and "grid [9, 1, 1]" in rows[1]["note"]
    assert rows[2]["counted"] is None and rows[2]["note"] == ""
    text = ncu.markdown(rows)
    assert "| a | k | = 10 | **40 / 44** |" in text and "| c | other | 1 / ? | 1 / ? |" in text


def test_findings_are_counted_by_kernel(scripts: dict[str, Any]) -> None:
    by_kernel, entries = scripts["sanitizer"].by_kernel, scripts["seed_launches"].ENTRIES
    assert by_kernel(MEMCHECK, entries) == {"gemm_tiled_w4": 1, "zsplit_gemm_int8": 1}
    assert by_kernel(RACECHECK, entries) == {"gemm_tiled_w3": 1}
    assert by_kernel("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", entries) == {}
    elsewhere = MEMCHECK.replace("gemm_tiled_w4", "at::native::fill")
    assert by_kernel(elsewhere, entries) == {"other": 1, "zsplit_gemm_int8": 1}


def test_a_tool_that_is_missing_is_said_and_is_no_pass(
    scripts: dict[str, Any], monkeypatch, tmp_path
) -> None:  # type: ignore[no-untyped-def]
    sanitizer = scripts["sanitizer"]
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    result = sanitizer.check("memcheck", tmp_path)
    assert not result["ran"]
    assert sanitizer.lines(result, ("a",)) == ["memcheck   DID NOT RUN: compute-sanitizer was not found"]


def test_every_seed_kernel_is_looked_at(scripts: dict[str, Any]) -> None:
    from labkit.kernels.seed.launch import KERNELS
    from labkit.kernels.source import packaged_entries

    launches = scripts["seed_launches"]
    files = {kernel.file for kernel in KERNELS.values()} | {"zsplit.cu"}
    seed = {entry for entry, file in packaged_entries().items() if file in files}
    assert seed and seed <= set(launches.ENTRIES)
    dispatch = {case.kernel for case in launches.checked()}
    assert dispatch == {case.kernel for case in launches.counted()}
    assert {"mma_w4", "zsplit", "zsplit_int8", "gemm_tiled", "gemv_batch_w3"} <= dispatch


@pytest.mark.parametrize("name", ["gemm_tiled", "zsplit_int8", "mma_w4"])
def test_a_case_is_right_in_the_emulator_and_its_counts_have_the_counters_names(
    scripts: dict[str, Any], name: str
) -> None:
    from labkit.bench import counts

    ncu = scripts["ncu_counts"]
    case = next(case for case in scripts["seed_launches"].counted() if case.kernel == name)
    call, exact = case.ready("cpu")
    with counts.recorded() as launches:
        y = call()
    assert (y.double() - exact).abs().max() < 0.03 * exact.abs().max()
    totals = [ncu.from_trace(launch.trace(None)) for launch in launches]
    assert all(total["load requests"] > 0 and total["store sectors"] > 0 for total in totals)
    if name == "gemm_tiled":  # the figures that were compared with Nsight Compute on an H200
        first = totals[0]
        assert (first["load requests"], first["load sectors"]) == (2968, 4896)
        assert (first["store requests"], first["store sectors"]) == (190, 1478)
        assert first["shared store wavefronts"] == 6144
    if name == "mma_w4":
        assert totals[0]["cp.async requests"] == 64 and totals[0]["cp.async sectors"] == 1024
