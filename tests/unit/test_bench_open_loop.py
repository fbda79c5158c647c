"""``labkit bench serving``: open loop on the simulated clock and on a tiny torch model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import decode_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from labkit.bench import open_loop, report, stages
from labkit.bench.cli import bench_app
from labkit.bench.open_loop import Options, open_run, preset
from labkit.bench.policy_specs import PolicySpec, parse_policies
from labkit.bench.record import Record, read
from labkit.errors import InputError

SMALL = replace(
    preset("rtx3050"),
    policies=parse_policies("serial:32,overlap:32,mixed:32,sliced:64@50%"),
    baseline=PolicySpec("serial", 32),
    loads=(0.3, 3.0),
    requests=12,
    lengths=(20, 80),
    answer=6,
)


def quiet(line: str) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def record() -> Record:
    return open_loop.run(SMALL, "labkit bench serving --simulate rtx3050", quiet)


def test_every_cell_with_the_same_tokens(record: Record) -> None:
    names = ["serial:32", "overlap:32 no overlap", "overlap:32", "mixed:32", "sliced:64@50%"]
    tables = ["serving load 0.3", "serving load 3"]
    assert [(one.table, one.contender) for one in record.entries] == [(t, n) for t in tables for n in names]
    assert {one.status for one in record.entries} == {"timed"} and record.complete
    later = record.entries[1:]
    assert all(one.figures["exact"] == {"compared": 12, "different": 0} for one in later)
    assert all(one.figures["counters"]["finished"] == {"length": 12} for one in record.entries)
    assert all(one.figures["counters"]["prefill_decode_stream_overlap_steps"] == 0 for one in record.entries)


def test_figures_by_the_definitions(record: Record) -> None:
    asked = record.parameters
    assert asked["ttft"] == pytest.approx(4 * asked["alone_ttft_s"])
    assert asked["tpot"] == pytest.approx(3 * asked["alone_tpot_s"])
    for one in record.entries:
        figures = one.figures
        assert figures["rate"] == pytest.approx(figures["load"] * asked["capacity"])
        assert (one.m, one.n, one.k) == (12, 6, 80) and len(one.samples_us) == figures["ttft"]["count"] == 12
        assert max(one.samples_us) == pytest.approx(1e6 * figures["ttft"]["max"])
        seconds = 12 / figures["answered"]
        assert figures["tok_s"] == pytest.approx(12 * 6 / seconds)
        assert figures["goodput"] == pytest.approx(figures["met"] / seconds)
        assert figures["met"] <= figures["requests"] == 12


def test_too_many_requests_make_a_queue(record: Record) -> None:
    """Far above the capacity answers come no faster than that, and waits grow; far below all are in time."""
    for low, high in zip(record.of_table("serving load 0.3"), record.of_table("serving load 3"), strict=True):
        assert low.figures["met"] == 12
        assert high.figures["ttft"]["p95"] > 2 * low.figures["ttft"]["p95"]
        assert high.figures["answered"] < 0.5 * high.figures["rate"]


@settings(max_examples=20, deadline=None)
@given(
    st.floats(0.05, 50),
    st.integers(0, 9),
    st.integers(0, 3),
    st.sampled_from(["serial:32", "mixed:16", "ticks:32"]),
)
def test_requests_arrive_when_the_trace_says(rate: float, seed: int, number: int, policy: str) -> None:
    """Whatever the engine does meanwhile, and on a clock that does not stand at 0."""
    options = replace(SMALL, seed=seed, requests=5)
    stage = stages.simulated("rtx3050", options.need)
    stage.executor.idle(17.5)
    found = open_run(options, stage, PolicySpec.parse(policy), False, None, rate, number).requests
    wanted = [17.5 + time for time in open_loop.traces.poisson(5, rate, seed + number)]
    assert [one.arrival for one in found] == pytest.approx(wanted)
    assert all(one.token_times[0] > one.arrival and len(one.token_times) == 6 for one in found)


def test_all_at_once_is_the_capacity() -> None:
    stage = stages.simulated("rtx3050", SMALL.need)
    found = open_run(SMALL, stage, SMALL.baseline, False, None, None).requests
    assert len({one.arrival for one in found}) == 1 and len(found) == 12


def test_rates_instead_of_loads_and_repeats() -> None:
    policies = parse_policies("mixed:32")
    options = replace(SMALL, rates=(0.5, 2.0, 0.5), policies=policies, repeats=2, ttft=100.0, gap=9.0)
    record = open_loop.run(options, "", quiet)
    assert [one.table for one in record.entries] == ["serving 0.5 a second", "serving 2 a second"]
    for one in record.entries:
        assert one.figures["runs"] == 2 and one.figures["requests"] == len(one.samples_us) == 24
    assert (record.parameters["ttft"], record.parameters["gap"]) == (100.0, 9.0)


def test_kind_file_and_table(record: Record, tmp_path: Path) -> None:
    assert record.kind == "simulated" and record.parameters["origin"] == "simulated from quoted"
    assert record.name == "serving-qwen2.5-3b" and "simulated-rtx3050" in record.file_name
    text = report.text(read(record.write(tmp_path / "a.json")))
    assert text.count("Requests arrive at") == 2 and "300 % of what serial:32 gets through" in text
    assert "12 of 12" in text and "Other measurements" not in text and "bounds: TTFT" in text


def test_a_cell_that_raises_is_one_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = open_loop.open_run

    def broken(options: Any, stage: Any, spec: PolicySpec, *rest: Any) -> Any:
        if spec.name == "mixed":
            raise RuntimeError("no such kernel\nmore")
        return real(options, stage, spec, *rest)

    monkeypatch.setattr(open_loop, "open_run", broken)
    lines: list[str] = []
    record = open_loop.run(replace(SMALL, loads=(0.5,)), "", lines.append)
    states = {one.contender: one.status for one in record.entries}
    assert states["mixed:32"] == "failed" and states["serial:32"] == states["sliced:64@50%"] == "timed"
    assert any("failed RuntimeError: no such kernel" in line for line in lines)


def test_an_interrupt_keeps_what_was_done() -> None:
    def stop(line: str) -> None:
        if line.startswith("load 3"):
            raise KeyboardInterrupt

    record = open_loop.run(SMALL, "", stop)
    assert not record.complete and {one.table for one in record.entries} >= {"serving load 0.3"}
    assert "interrupted" in report.text(record)


def test_on_torch_s_cpu_executor() -> None:
    of = cases.config()
    options = Options(
        "cpu", parse_policies("serial:8,overlap:8"), PolicySpec("serial", 8), loads=(2.0,), requests=3,
        lengths=(4, 9), answer=3,
    )  # fmt: skip
    stage = stages.on_cpu(options.need, model=cases.decoder(of, torch.float32))
    record = open_loop.run(options, "", quiet, stage)
    assert record.kind == "measured" and record.name == "serving-smollm2"
    assert [one.contender for one in record.entries] == ["serial:8", "overlap:8"]  # one lane: each once
    assert all(one.status == "timed" and not one.figures["two_lanes"] for one in record.entries)
    assert any("one lane" in note for note in record.notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"loads": ()}, {"loads": (0.0,)}, {"rates": (float("nan"),)}, {"rates": (float("inf"),)},
        {"requests": 0}, {"answer": 0}, {"repeats": 0}, {"lengths": (9, 8)}, {"lengths": (0, 8)},
        {"ttft": 0.0}, {"tpot": -1.0}, {"gap": 0.0}, {"baseline": PolicySpec("dynamic", 8, 0.5, True)},
    ],
)  # fmt: skip
def test_options_that_are_none(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        replace(SMALL, **changes)


def test_the_command(tmp_path: Path) -> None:
    line = "serving --simulate rtx3050 --policies serial:32,mixed:32 --loads 0.5 --requests 4 --lengths 8-20"
    out = tmp_path / "r.json"
    done = CliRunner().invoke(bench_app, [*line.split(), "--tokens", "3", "--out", str(out)])
    assert done.exit_code == 0, done.output
    record = read(out)
    assert record.command == "labkit bench " + line + " --tokens 3" and len(record.entries) == 2
    for bad in ("--loads x", "--lengths 9", "--lengths ²-³", "--rates 0", "--policies fast"):
        refused = CliRunner().invoke(bench_app, ["serving", "--simulate", "h200", *bad.split()])
        assert isinstance(refused.exception, InputError) and refused.exception.argument in bad + "policy"
