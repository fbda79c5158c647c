"""``labkit bench concurrency``: simulated, on a tiny torch model, and the peer's part without its project."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import decode_cases as cases
import pytest
import torch
from typer.testing import CliRunner

from labkit.bench import concurrency, report, serving_peer, stages
from labkit.bench.cli import bench_app
from labkit.bench.concurrency import PEER, TABLE, Options, preset
from labkit.bench.policy_specs import PolicySpec, parse_policies
from labkit.bench.record import Record, read
from labkit.bench.serving import Answers
from labkit.engine.metrics import span
from labkit.engine.request import Request
from labkit.engine.sampling import SamplingParams
from labkit.errors import InputError

SMALL = replace(
    preset("h200"),
    policies=parse_policies("serial:32,overlap:32,mixed:32,sliced:64@50%"),
    baseline=PolicySpec("serial", 32),
    clients=(1, 4),
    prompt=40,
    answer=6,
)


def quiet(line: str) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def record() -> Record:
    return concurrency.run(SMALL, "labkit bench concurrency --simulate h200", quiet)


def test_every_cell_with_the_same_tokens(record: Record) -> None:
    names = ["serial:32", "overlap:32 no overlap", "overlap:32", "mixed:32", "sliced:64@50%"]
    assert [(entry.m, entry.contender) for entry in record.entries] == [(m, n) for m in (1, 4) for n in names]
    assert all(entry.status == "timed" for entry in record.entries)
    later = record.entries[1:]
    assert all(e.figures["exact"]["compared"] and not e.figures["exact"]["different"] for e in later)


def test_figures_by_the_definitions(record: Record) -> None:
    for entry in record.entries:
        figures, tokens = entry.figures, entry.m * SMALL.answer
        assert figures["ttft"]["count"] == entry.m and figures["itl"]["count"] == tokens - entry.m
        assert figures["counters"]["output_tokens"] == tokens
        assert figures["counters"]["finished"] == {"length": entry.m}
        assert figures["counters"]["prefill_decode_stream_overlap_steps"] == 0
        assert 1e6 / entry.median_us == pytest.approx(figures["tok_s"])  # type: ignore[operator]
    alone = record.entries[0].figures
    seconds = alone["ttft"]["mean"] + (SMALL.answer - 1) * alone["tpot"]["mean"]
    assert alone["tok_s"] == pytest.approx(SMALL.answer / seconds)
    assert alone["counters"]["prefill_decode_overlap_steps"] == 0
    busy = {entry.contender: entry.figures for entry in record.entries if entry.m == 4}
    assert busy["overlap:32"]["counters"]["prefill_decode_overlap_steps"] > 0
    assert busy["overlap:32"]["two_lanes"] and not busy["overlap:32 no overlap"]["two_lanes"]


def test_kind_file_and_table(record: Record, tmp_path: Path) -> None:
    assert record.kind == "simulated" and record.parameters["origin"] == "simulated from measured"
    assert record.name == "concurrency-qwen2.5-3b" and "simulated-h200" in record.file_name
    again = read(record.write(tmp_path / "a.json"))
    text = report.text(again)
    assert "simulated from measured" in text and "overlap:32 no overlap" in text
    assert PEER not in text and "Other measurements" not in text


def test_rounds_are_a_closed_loop() -> None:
    options = replace(SMALL, clients=(2,), rounds=3, policies=parse_policies("mixed:32"), repeats=2)
    (entry,) = concurrency.run(options, "", quiet).entries
    assert entry.figures["ttft"]["count"] == 2 * 2 * 3 and len(entry.samples_us) == 2
    stage = stages.simulated("h200", options.need)
    found = concurrency.client_run(options, stage, PolicySpec("mixed", 32), True, 2, None)
    # Nobody sends before the last answer has ended.
    ends = sorted(one.token_times[-1] for one in found.requests)
    starts = sorted(one.arrival for one in found.requests)
    assert starts[:2] == [0.0, 0.0] and all(start >= end for start, end in zip(starts[2:], ends))
    assert span(found.requests) == ends[-1]


def test_goodput_counts_those_within_the_bounds() -> None:
    one = replace(SMALL, clients=(4,), policies=parse_policies("serial:32"))
    for ttft, some in ((None, True), (1e-6, False)):
        (entry,) = concurrency.run(replace(one, ttft=ttft), "", quiet).entries
        assert (entry.figures["goodput"] > 0) == some


def test_answers_are_compared_where_both_have_them() -> None:
    def request(ids: Sequence[int], out: Sequence[int]) -> Request:
        return Request("a", tuple(ids), SamplingParams(), output_ids=list(out))

    answers = Answers()
    assert answers.compare([request([1], [5, 6])]) == (0, 0)
    assert answers.compare([request([1], [5, 6, 7]), request([2], [1])]) == (1, 0)
    assert answers.compare([request([1], [5, 6, 8]), request([1], [5])]) == (2, 1)


def test_on_torch_s_cpu_executor() -> None:
    of = cases.config()
    options = replace(
        SMALL, where="cpu", clients=(1, 3), prompt=12, answer=4, baseline=PolicySpec("serial", 8),
        policies=parse_policies("serial:8,overlap:8,mixed:8,sliced:8@1ms"),
    )  # fmt: skip
    stage = stages.on_cpu(options.need, model=cases.decoder(of, torch.float32))
    record = concurrency.run(options, "", quiet, stage)
    assert (
        record.kind == "measured" and not record.clocks and any("one lane" in note for note in record.notes)
    )
    # One lane: there is no overlap to turn on, so no cell is run twice.
    assert [entry.contender for entry in record.entries if entry.m == 3] == [
        "serial:8", "overlap:8", "mixed:8", "sliced:8@1ms",
    ]  # fmt: skip
    for entry in record.entries:
        assert entry.status == "timed" and not entry.figures["two_lanes"]
        assert entry.figures["counters"]["prefill_decode_stream_overlap_steps"] == 0
    assert "tokens are equal up to ties" in report.text(record)


@pytest.mark.parametrize(
    "changes",
    [
        {"clients": ()}, {"clients": (0,)}, {"answer": 0}, {"ttft": 0.0},
        {"baseline": PolicySpec("dynamic", 8, 0.5, True)},
    ],
)  # fmt: skip
def test_options_that_are_none(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        replace(Options(), **changes)


# --- the peer ----------------------------------------------------------------------------------------------


def test_the_peer_says_why_not(record: Record) -> None:
    found = concurrency.run(replace(SMALL, peers=True), "", quiet)
    peers = [entry for entry in found.entries if entry.contender == PEER]
    assert [entry.status for entry in peers] == ["unavailable"] * 2
    assert peers[0].note == "on a GPU only" and "on a GPU only" in report.text(found)


class FakePeer:
    """Answers of a given pace."""

    vocab_size = 100
    how = "a fake"

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> FakePeer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[serving_peer.PeerRequest]:
        times = tuple(10.0 + i for i in range(1, tokens + 1))
        return [serving_peer.PeerRequest(10.0, times, "length") for _ in prompts]


class ShortPeer(FakePeer):
    """Stops too early."""

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[serving_peer.PeerRequest]:
        return super().answer(prompts, tokens - 1)


class BrokenPeer(FakePeer):
    """Raises."""

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[serving_peer.PeerRequest]:
        raise RuntimeError("no kernel")


@pytest.mark.parametrize(
    ("peer", "status", "note"),
    [(FakePeer, "timed", ""), (ShortPeer, "failed", "too short"), (BrokenPeer, "unavailable", "no kernel")],
)
def test_the_peer_is_one_more_row(
    monkeypatch: pytest.MonkeyPatch, peer: type[FakePeer], status: str, note: str
) -> None:
    monkeypatch.setattr(serving_peer, "why_not", lambda stage: "")
    monkeypatch.setattr(serving_peer, "Peer", peer)
    found = concurrency.run(replace(SMALL, peers=True), "", quiet)
    rows = [entry for entry in found.of_table(TABLE) if entry.contender == PEER]
    assert [entry.m for entry in rows] == [1, 4]
    assert all(entry.status == status and note in entry.note for entry in rows)
    if status == "timed":
        assert [entry.figures["tok_s"] for entry in rows] == [1.0, 4.0]
        assert f"× {PEER}" in report.text(found)


# --- the command -------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    asked = ["concurrency", "--simulate", "rtx3050", "--clients", "1,2", "--policies", "overlap:32,mixed:32"]
    asked += ["--tokens", "4", "--prompt", "40", "--prefill-decode-overlap", "--out", str(out)]
    done = CliRunner().invoke(bench_app, asked)
    assert done.exit_code == 0, done.output
    record = read(out)
    assert [entry.contender for entry in record.entries] == ["overlap:32", "mixed:32"] * 2
    assert record.parameters["overlap"] is True and "--clients 1,2" in record.command
    assert all(entry.n == 4 and entry.k == 40 for entry in record.entries)
    off = CliRunner().invoke(bench_app, [*asked, "--no-prefill-decode-overlap"])
    assert off.exit_code == 0 and "overlap:32 no overlap" in off.output
