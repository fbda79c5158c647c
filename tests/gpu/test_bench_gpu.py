"""``labkit bench`` on a GPU: graphs, cold copies, records. Nothing here asserts a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from labkit.bench import ceilings, check, contenders, gemm, gemm_gpu, machine, offload, peers, timing
from labkit.bench.cases import PEERS, Case
from labkit.bench.record import read
from labkit.device import measure_copy

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
        assert entry.method["copies"] * entry.weight_bytes >= 2 * record.device["l2_bytes"]
        assert entry.error["max_abs"] <= entry.error["bound"]
    assert {"copy_gb_s", "read_gb_s", "matmul_tflops"} == set(record.ceilings) and len(lines) == 4
    assert record.clocks[0]["when"] == "before" and len(record.clocks) == 3
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
    bench = gemm_gpu.Bench(small(), 64 << 20, lambda line: None)
    case = Case("sweep", "w4", 4, 4096, 4096, 128, ("off_by_a_little", contenders.DENSE))
    wrong, right = bench.case(case)
    assert wrong.status == "wrong" and not wrong.samples_us
    assert right.status == "timed" and right.samples_us


def test_reading_is_measured_faster_than_half_a_copy() -> None:
    read = ceilings.measure_read(256)
    copy = measure_copy("cuda", 256)
    assert read.value > 0.5 * copy.value and read.unit == "GB/s" and "256 MiB" in read.what


def test_the_fast_table_with_peers_is_right_and_timed() -> None:
    record = gemm.run(
        small("fast", m=(1, 8, 64), peers=True, shapes=((2560, 2048),)), "test", lambda line: None
    )
    bad = [(e.contender, e.m, e.note) for e in record.entries if e.status in ("wrong", "failed")]
    assert not bad
    timed = {entry.contender for entry in record.entries if entry.status == "timed"}
    assert {"seed_dispatch", "dequant_matmul", "dense_fp16"} <= timed
    for entry in record.entries:
        if entry.status == "timed" and entry.contender == "seed_dispatch":
            assert entry.method["kernel"] in ("gemv_single_row", "gemv_small_batch", "gemm_tiled")


def test_bfloat16_activations_are_right() -> None:
    shapes = ((2560, 2048),)
    options = small("fast", shapes=shapes, m=(1, 8), dtype="bfloat16", peers=True, formats=("w4",), group=64)
    record = gemm.run(options, "test", lambda line: None)
    assert not [(e.contender, e.note) for e in record.entries if e.status in ("wrong", "failed")]
    dense = [entry for entry in record.entries if entry.contender == "dense_bf16"]
    assert dense and all(entry.status == "timed" for entry in dense)


@pytest.mark.parametrize("group", [128, 64, 32])
@pytest.mark.parametrize("name", [name for names in PEERS.values() for name in names])
def test_a_peer_multiplies_by_the_weight_that_it_was_given(name: str, group: int) -> None:
    case = Case("fast", "w3" if name.endswith("w3") else "w4", 8, 2560, 2048, group, (name,))
    peer, weight = contenders.get(name), contenders.random_weight(case, "cuda")
    reason = peer.why_not(case, weight)
    if reason:
        pytest.skip(reason)
    x = contenders.random_input(case, "cuda").to(getattr(torch, peer.activations or case.dtype))
    wanted = check.reference(x, peer.held(case, weight)).allowing(peers.TOLERANCE)
    for call in peer.calls(case, [weight], 2):
        verdict = check.check(call, x, wanted, repeatable=False)
        assert not verdict.problem, verdict
    swapped = contenders.random_weight(case, "cuda", seed=1)
    wrong = check.check(peer.calls(case, [swapped], 1)[0], x, wanted, repeatable=False)
    assert "allowed" in wrong.problem


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
