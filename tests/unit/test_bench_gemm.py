"""The run: nothing wrong is timed, contenders are the registry's, and an interrupt keeps what was done."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from labkit.bench import cases, contenders, counts, gemm, gemm_gpu, timing
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


class FakeClock:
    """A clock of calls: every mark is ten microseconds after the last one."""

    now = 0.0

    def mark(self) -> float:
        self.now += 10.0
        return self.now

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def begin_round(self) -> None: ...

    def wait(self) -> None: ...


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> gemm_gpu.Bench:
    """The GPU's path on the CPU, timed by a clock that is made up."""
    monkeypatch.setattr(timing, "COLD_BYTES", 40_000)
    monkeypatch.setattr(gemm_gpu, "free_bytes", lambda: 1 << 20)
    options = gemm.Options(device="cpu", graph=False)
    return gemm_gpu.Bench(options, l2_bytes=0, report=lambda line: None, device="cpu", clock=FakeClock())


def by_name(entries: list[Entry]) -> dict[str, Entry]:
    return {entry.contender: entry for entry in entries}


def test_only_what_is_right_is_timed(bench: gemm_gpu.Bench, kernels: None) -> None:
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


def test_every_copy_of_the_weight_is_used_and_checked(bench: gemm_gpu.Bench, kernels: None) -> None:
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


def test_a_copy_that_is_wrong_is_found(bench: gemm_gpu.Bench, kernels: None) -> None:
    first: list[int] = []

    def odd(x: torch.Tensor, weight: Any) -> torch.Tensor:
        first.append(weight.packed.data_ptr())
        y = x @ weight.dequantize(torch.float16).t()
        return y if first[-1] == first[0] else y + 1

    registry.register("right_kernel", odd, replace=True)
    entry = bench.case(Case("sweep", "w4", 1, 64, 256, 128, ("right_kernel",)))[0]
    assert entry.status == "wrong" and entry.note.startswith("copy 1: ")


def group(bench: gemm_gpu.Bench, name: str, rows: tuple[int, ...], dtype: str = "float16") -> list[Entry]:
    entries: list[Entry] = []
    bench.group([Case("sweep", "w4", m, 64, 256, 128, (name,), dtype) for m in rows], entries)
    return entries


def test_what_serves_every_m_is_made_once(
    bench: gemm_gpu.Bench, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, int] = {"weights": 0, "prepared": 0, "references": 0}

    def counting(name: str, call: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            made[name] += 1
            return call(*arguments, **options)

        return counted

    monkeypatch.setattr(contenders, "random_weight", counting("weights", contenders.random_weight))
    monkeypatch.setattr(gemm_gpu, "references", counting("references", gemm_gpu.references))
    run = registry.get("right_kernel").run
    prepare = counting("prepared", lambda request: request.weight)
    registry.register("right_kernel", run, prepare=prepare, replace=True)
    entries = group(bench, "right_kernel", (1, 2, 9))
    assert {entry.status for entry in entries} == {"timed"} and [entry.m for entry in entries] == [1, 2, 9]
    assert made == {"weights": 1, "prepared": 5, "references": 1}  # five copies of the weight


def test_a_kernel_that_is_wrong_at_one_m_only_is_found(bench: gemm_gpu.Bench, kernels: None) -> None:
    run = registry.get("right_kernel").run
    registry.register("right_kernel", lambda x, w: run(x, w) + (x.shape[0] == 2), replace=True)
    entries = group(bench, "right_kernel", (1, 2, 3))
    assert [entry.status for entry in entries] == ["timed", "wrong", "timed"]


def test_a_kernel_that_fails_at_one_m_is_timed_at_the_others(bench: gemm_gpu.Bench, kernels: None) -> None:
    run = registry.get("right_kernel").run

    def moody(x: torch.Tensor, weight: Any) -> torch.Tensor:
        if x.shape[0] == 2:
            raise RuntimeError("not two")
        return run(x, weight)

    registry.register("right_kernel", moody, replace=True)
    entries = group(bench, "right_kernel", (1, 2, 3))
    assert [entry.status for entry in entries] == ["timed", "failed", "timed"]


def test_no_memory_left_is_said_and_is_no_failure(bench: gemm_gpu.Bench, kernels: None) -> None:
    def huge(request: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 90 GiB")

    registry.register("right_kernel", lambda x, w: x, prepare=huge, replace=True)
    entries = group(bench, "right_kernel", (1, 2))
    assert [entry.status for entry in entries] == ["unavailable"] * 2
    assert "not enough GPU memory" in entries[1].note and "90 GiB" in entries[1].note


def test_activations_of_the_case_reach_kernel_and_reference(bench: gemm_gpu.Bench, kernels: None) -> None:
    seen = set()

    def watched(x: torch.Tensor, weight: Any) -> torch.Tensor:
        seen.add(x.dtype)
        return x @ weight.dequantize(x.dtype).t()

    registry.register("right_kernel", watched, replace=True)
    (entry,) = group(bench, "right_kernel", (3,), "bfloat16")
    assert entry.status == "timed" and seen == {torch.bfloat16}
    assert entry.error["plain"] > 1e-3  # eight bits of a mantissa


def test_a_contender_with_activations_of_its_own_is_compared_with_what_it_holds(
    bench: gemm_gpu.Bench,
) -> None:
    class Coarse(contenders.DenseBf16):
        """Halves the scales: right for the weight that it says it holds, wrong for the case's."""

        name = "coarse"
        activations = "bfloat16"

        def held(self, case: Any, weight: Any) -> Any:
            return dataclasses.replace(weight, scales=weight.scales / 2)

        def calls(self, case: Any, weights: Any, copies: int) -> Any:
            return super().calls(case, [self.held(case, weights[0])], copies)

    contenders.add(Coarse())
    both = Case("sweep", "w4", 3, 64, 256, 128, ("coarse", contenders.DENSE))
    coarse, dense = bench.case(both)
    assert coarse.status == dense.status == "timed"
    assert coarse.method["activations"] == "bfloat16" and "activations" not in dense.method


def test_the_seed_kernel_is_the_dispatch_tables(bench: gemm_gpu.Bench) -> None:
    entries = group(bench, cases.SEED_DISPATCH, (1, 3, 9))
    assert [entry.method["kernel"] for entry in entries] == [
        "gemv_single_row",
        "gemv_small_batch",
        "gemm_tiled",
    ]
    assert {entry.status for entry in entries} == {"timed"}
    (entry,) = group(bench, cases.SEED_DISPATCH, (1,), "bfloat16")
    assert entry.status == "unavailable" and "no seed kernel" in entry.note


def test_little_memory_is_said(bench: gemm_gpu.Bench, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_gpu, "free_bytes", lambda: 3 * 9000)
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


def test_the_fast_table_runs_without_a_gpu_and_says_who_is_missing() -> None:
    options = gemm.Options("fast", m=(1, 9), formats=("w4",), device="cpu", peers=True, shapes=((512, 2048),))
    record = gemm.run(options, "labkit bench gemm --table fast --peers", report=lambda line: None)
    here = by_name([entry for entry in record.entries if entry.m == 9])
    assert list(here) == [
        "tensor_core",
        "seed_dispatch",
        "dequant_matmul",
        "dense_fp16",
        "tinygemm_w4",
        "humming_w4",
    ]
    assert here["seed_dispatch"].status == "emulated" and here["seed_dispatch"].counts["faults"] == 0
    assert here["tinygemm_w4"].status == "unavailable" and here["tinygemm_w4"].note == "CUDA only"
    assert record.parameters["peers"] and record.parameters["activations"] == "float16"
    if registry.find("tensor_core") is None:
        assert "not registered" in here["tensor_core"].note


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
    [
        ({"samples": 19}, "samples"),
        ({"device": "tpu"}, "device"),
        ({"table": "x"}, "table"),
        ({"table": "fast", "group": 48}, "group"),
        ({"table": "fast", "dtype": "float32"}, "dtype"),
        ({"table": "sweep", "dtype": "bfloat16"}, "--table fast"),
    ],
)
def test_bad_options_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        gemm.Options(**changes).cases()
