"""The run: nothing wrong is timed, contenders are the registry's, and an interrupt keeps what was done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from labkit.bench import cases, contenders, counts, gemm, timing
from labkit.bench.cases import Case
from labkit.bench.record import Entry
from labkit.errors import InputError
from labkit.kernels import registry
from labkit.nn.linear import QuantLinear

NAMES = ("wrong_kernel", "crashing_kernel", "right_kernel")


@pytest.fixture
def kernels() -> Iterator[None]:
    """Three kernels of a test: one that computes, one that does not, one that cannot."""

    def right(x: torch.Tensor, weight: Any) -> torch.Tensor:
        return x @ weight.dequantize(torch.float16).t()

    def crashing(x: torch.Tensor, weight: Any) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered\nsecond line")

    registry.register("right_kernel", right)
    registry.register("wrong_kernel", lambda x, weight: right(x, weight) * 1.01)
    registry.register("crashing_kernel", crashing)
    yield
    for name in NAMES:
        registry.unregister(name)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> gemm._Bench:
    """The GPU's path on the CPU: one made-up microsecond for every contender that is timed."""
    monkeypatch.setattr(timing, "COLD_BYTES", 40_000)
    monkeypatch.setattr(gemm, "_free_bytes", lambda: 1 << 20)

    def interleave(ready: Mapping[str, timing.Timed], samples: int) -> dict[str, list[float]]:
        for timed in ready.values():
            timed.replay()
        return {name: [1.0] * samples for name in ready}

    monkeypatch.setattr(timing, "interleave", interleave)
    options = gemm.Options(device="cpu", graph=False)
    return gemm._Bench(options, l2_bytes=0, report=lambda line: None, device="cpu")


def by_name(entries: list[Entry]) -> dict[str, Entry]:
    return {entry.contender: entry for entry in entries}


def test_only_what_is_right_is_timed(bench: gemm._Bench, kernels: None) -> None:
    names = ("wrong_kernel", "crashing_kernel", "right_kernel", "no_kernel", contenders.DENSE)
    found = by_name(bench.case(Case("sweep", "w4", 3, 72, 256, 128, names)))
    assert found["right_kernel"].status == found[contenders.DENSE].status == "timed"
    assert len(found["right_kernel"].samples_us) == 20
    wrong = found["wrong_kernel"]
    assert wrong.status == "wrong" and not wrong.samples_us and "allowed" in wrong.note
    assert wrong.error["max_abs"] > wrong.error["bound"]
    assert found["crashing_kernel"].status == "failed"
    assert found["crashing_kernel"].note == "RuntimeError: an illegal memory access was encountered"
    assert found["no_kernel"].status == "unavailable" and "not registered" in found["no_kernel"].note


def test_every_copy_of_the_weight_is_used_and_checked(bench: gemm._Bench, kernels: None) -> None:
    seen: set[int] = set()

    def watched(x: torch.Tensor, weight: Any) -> torch.Tensor:
        seen.add(weight.packed.data_ptr())
        return x @ weight.dequantize(torch.float16).t()

    registry.register("right_kernel", watched, replace=True)
    case = Case("sweep", "w4", 1, 64, 256, 128, ("right_kernel", contenders.DENSE))
    found = by_name(bench.case(case))
    assert case.weight_bytes == 64 * (128 + 4)
    own, dense = found["right_kernel"].method, found[contenders.DENSE].method
    assert own == {"how": "plain loop", "calls": 10, "copies": 5} and len(seen) == 5
    assert dense["copies"] == 2  # 32 KiB each


def test_a_copy_that_is_wrong_is_found(bench: gemm._Bench, kernels: None) -> None:
    first: list[int] = []

    def odd(x: torch.Tensor, weight: Any) -> torch.Tensor:
        first.append(weight.packed.data_ptr())
        y = x @ weight.dequantize(torch.float16).t()
        return y if first[-1] == first[0] else y + 1

    registry.register("right_kernel", odd, replace=True)
    entry = bench.case(Case("sweep", "w4", 1, 64, 256, 128, ("right_kernel",)))[0]
    assert entry.status == "wrong" and entry.note.startswith("copy 1: ")


def test_the_weight_is_the_same_for_every_m_and_is_kept(bench: gemm._Bench, kernels: None) -> None:
    bench.case(Case("sweep", "w4", 1, 64, 256, 128, ("right_kernel",)))
    kept = bench.weights[0]
    bench.case(Case("sweep", "w4", 2, 64, 256, 128, ("right_kernel",)))
    assert bench.weights[0] is kept
    bench.case(Case("sweep", "w3", 2, 64, 256, 128, ("right_kernel",)))
    assert bench.weights[0] is not kept


def test_little_memory_is_said(bench: gemm._Bench, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_free_bytes", lambda: 3 * 9000)
    entry = bench.case(Case("sweep", "w4", 1, 64, 256, 128, ("right_kernel",)))[0]
    assert entry.method["copies"] == 1 and "may have been warm" in entry.note


def test_a_contender_of_a_benchmark_is_what_a_layer_runs() -> None:
    case = Case("tiled_w4", "w4", 30, 37, 256, 128, ())
    weight = contenders.random_weight(case, "cpu")
    x = contenders.random_input(case, "cpu")
    layer = QuantLinear(weight)
    layer.set_table(layer.table.with_override(force="gemm_tiled"))
    call = contenders.get("gemm_tiled").calls(case, [weight], 1)[0]
    assert torch.equal(call(x), layer(x))


def test_the_emulated_run_is_right_and_counts() -> None:
    options = gemm.Options("w3_batch_tile", device="cpu")
    record = gemm.run(options, "labkit bench gemm", report=lambda line: None)
    assert record.kind == "emulated" and record.complete and record.parameters["shrunk"]
    assert {entry.status for entry in record.entries} == {"emulated"}
    assert not any(entry.samples_us for entry in record.entries)
    for m in (2, 4, 8):
        here = by_name([entry for entry in record.entries if entry.m == m])
        grid_y, tile = here["gemv_small_batch"].counts, here["gemv_batch_w3"].counts
        assert grid_y["faults"] == tile["faults"] == 0
        assert grid_y["blocks"] == grid_y["blocks_traced"] == m * tile["blocks"]
        assert grid_y["bytes"] == 32 * grid_y["sectors"] > tile["bytes"] > 0
        assert here["dense_fp16"].counts == {}


def test_counts_are_those_of_the_emulators_trace() -> None:
    case = Case("sweep", "w4", 2, 24, 256, 128, ("gemv_single_row",))
    weight, x = contenders.random_weight(case, "cpu"), contenders.random_input(case, "cpu")
    found = counts.of("gemv_single_row", case, x, weight)
    (launch,) = counts.launches_of("gemv_single_row", case, x, weight)
    trace = launch.trace(None)
    assert (
        found["sectors"] == trace.sectors(space="global") and found["launches"][0]["kernel"] == "gemv_row_w4"
    )
    # Each row's 8 warps of 3 blocks write one half each: a sector a store.
    assert trace.sectors(space="global", kind="write") == 2 * 24


def test_recording_leaves_the_emulator_as_it_was() -> None:
    from labkit.emulator import EmulatedKernel

    before = EmulatedKernel.__call__
    with pytest.raises(ZeroDivisionError), counts.recorded():
        raise ZeroDivisionError
    assert EmulatedKernel.__call__ is before


def test_an_interrupt_keeps_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            raise KeyboardInterrupt

    options = gemm.Options("sweep", shapes=((64, 256),), m=(1, 2, 3), formats=("w4",), device="cpu")
    record = gemm.run(options, "labkit bench gemm", report)
    assert not record.complete and {entry.m for entry in record.entries} == {1, 2}
    assert "interrupted" in record.notes[-1]


def test_the_cpu_runs_a_few_rows_and_one_shape_unless_told() -> None:
    swept = [case for case in gemm.Options("seed").cases() if case.table == "sweep"]
    assert {case.m for case in swept} == set(gemm.EMULATED_M)
    assert {(case.n, case.k) for case in swept} == {cases.default_shapes()[0]}
    told = gemm.Options("sweep", shapes=((8, 256),), m=(5,)).cases()
    assert {(case.m, case.n, case.k) for case in told} == {(5, 8, 256)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"samples": 19}, "samples"), ({"device": "tpu"}, "device"), ({"table": "x"}, "table")],
)
def test_bad_options_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        gemm.Options(**changes).cases()
