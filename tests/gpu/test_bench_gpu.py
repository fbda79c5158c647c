"""``labkit bench`` on a GPU: graphs, cold copies, records. Nothing here asserts a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from labkit.bench import contenders, gemm, machine, offload, timing
from labkit.bench.cases import Case
from labkit.bench.record import read

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    assert torch.cuda.is_available(), "pytest -m gpu needs an NVIDIA GPU and torch's CUDA build"


def small(table: str = "sweep", **changes: object) -> gemm.Options:
    values: dict = {"table": table, "shapes": ((2000, 4096),), "m": (1, 9), "device": "cuda"}
    return gemm.Options(**(values | changes))


def test_a_run_is_right_timed_from_graphs_and_written(tmp_path: Path) -> None:
    lines: list[str] = []
    record = gemm.run(small(), "test", lines.append)
    assert record.kind == "measured" and record.complete
    assert {entry.status for entry in record.entries} == {"timed"}, [e.note for e in record.entries]
    for entry in record.entries:
        assert len(entry.samples_us) == 20 and min(entry.samples_us) > 0
        assert entry.method["how"] == "CUDA graph", (entry.contender, entry.method)
        assert entry.method["copies"] * entry.weight_bytes >= timing.COLD_BYTES
        assert entry.error["max_abs"] <= entry.error["bound"]
    assert record.ceilings["copy_gb_s"] > 0 and len(lines) == 4
    assert read(record.write(tmp_path / record.file_name)) == record


def test_device_and_clocks_are_recorded() -> None:
    facts = machine.device_facts("cuda")
    assert facts["name"] == torch.cuda.get_device_name() and facts["sms"] > 0 and facts["driver"]
    assert facts["l2_bytes"] is None or facts["l2_bytes"] > 1 << 20
    snapshot = machine.clocks("now", machine.gpu_index())
    assert "unread" in snapshot or snapshot["sm_mhz"] > 0


def test_a_wrong_kernel_is_not_timed() -> None:
    class Off(contenders.DenseFp16):
        name = "off_by_a_little"

        def calls(self, case, weights, copies):  # type: ignore[no-untyped-def]
            return [lambda x, call=call: call(x) * 1.01 for call in super().calls(case, weights, copies)]

    contenders.add(Off())
    bench = gemm._Bench(small(), 64 << 20, lambda line: None)
    case = Case("sweep", "w4", 4, 4096, 4096, 128, ("off_by_a_little", contenders.DENSE))
    wrong, right = bench.case(case)
    assert wrong.status == "wrong" and not wrong.samples_us
    assert right.status == "timed" and right.samples_us


def test_a_replayed_graph_computes_what_the_calls_compute() -> None:
    case = Case("sweep", "w4", 3, 512, 1024, 128, ())
    weights = [contenders.random_weight(case, "cuda", seed) for seed in range(3)]
    x = contenders.random_input(case, "cuda")
    calls = contenders.get("gemm_tiled").calls(case, weights, 3)
    results = [torch.empty(3, 512, dtype=torch.float16, device="cuda") for _ in calls]

    def into(i: int) -> None:
        results[i].copy_(calls[i](x))

    with timing.side_stream():
        timed = timing.prepare([lambda i=i: into(i) for i in range(3)])  # type: ignore[misc]
        assert timed.how == "CUDA graph" and timed.calls == 9
        x.copy_(contenders.random_input(case, "cuda", seed=99))
        timed.replay()
    torch.cuda.synchronize()
    for call, result in zip(calls, results, strict=True):
        assert torch.equal(call(x), result)


def test_without_graphs_a_loop_is_timed() -> None:
    record = gemm.run(small(m=(1,), formats=("w4",), graph=False), "test", lambda line: None)
    assert {entry.method["how"] for entry in record.entries} == {"plain loop"}
    assert all(len(entry.samples_us) == 20 for entry in record.entries)


def test_offload_measures_a_row() -> None:
    record = offload.run("cuda", 20, "test")
    (trip,) = record.entries
    assert trip.contender == "round trip" and len(trip.samples_us) == 20 and min(trip.samples_us) > 0
    assert set(record.parameters["row"]) >= {"round_trip_us", "cpu_gflops", "threshold_flop", "provenance"}


def test_time_of_one_call_leaves_out_the_hosts_launches() -> None:
    """A call that launches a hundred tiny kernels: the host takes longer than the device."""
    x = torch.zeros(32, device="cuda")

    def call() -> None:
        for _ in range(100):
            x.add_(1)

    call()
    torch.cuda.synchronize()
    before = x[0].item()
    us = timing.median_us(call, samples=3)
    torch.cuda.synchronize()
    assert us > 0
    # Warm-up, capture's own warm-up, and every replay: all really ran.
    assert (x[0].item() - before) % 100 == 0 and x[0].item() > before
