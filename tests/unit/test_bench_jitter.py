"""``labkit bench jitter`` on the simulated clock: traces, policies by name, gate, stalls, record, front."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from labkit.bench import jitter, pareto, report, stages, timeline, traces
from labkit.bench.cli import bench_app
from labkit.bench.jitter_cases import Options, preset
from labkit.bench.policy_specs import PolicySpec, Scale, parse_policies, with_overlap
from labkit.bench.record import Record, read
from labkit.bench.timeline import Gap, Gate, stalls
from labkit.engine.adaptive import Adaptive
from labkit.engine.policy import Dynamic, Mixed, Sliced
from labkit.errors import InputError

SMALL = replace(
    preset("rtx3050"),
    policies=parse_policies("serial:32,overlap:32,ticks:32,mixed:16,sliced:64@25%,dynamic:64@50%"),
    baseline=PolicySpec("serial", 32),
    streams=3,
    most=200,
    warm=3,
    rest=3,
    document=100,
    cold=4,
    cold_lengths=(20, 60),
    cold_answer=2,
)


def quiet(line: str) -> None:
    """No progress."""


# --- traces ------------------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.floats(0.01, 100), st.integers(0, 5))
def test_arrivals_ascend_and_come_from_the_seed(count: int, rate: float, seed: int) -> None:
    times = traces.poisson(count, rate, seed)
    assert len(times) == count and times == sorted(times) and times[0] > 0
    assert times == traces.poisson(count, rate, seed) != traces.poisson(count, rate, seed + 1)
    # The rate is a scale: the same trace, slower or faster.
    assert traces.poisson(count, 2 * rate, seed) == pytest.approx([time / 2 for time in times])


def test_the_rate_is_the_mean_rate() -> None:
    times = traces.poisson(4000, 5.0, 1)
    assert times[-1] == pytest.approx(800, rel=0.05)


def test_lengths_lie_between_and_prompts_differ() -> None:
    found = traces.lengths(500, 64, 2048, 0)
    assert min(found) >= 64 and max(found) <= 2048 and len(set(found)) > 100
    assert sum(length < 362 for length in found) == pytest.approx(250, abs=50)  # the middle of the logarithms
    one, other = traces.prompt(0, 1, 20, 32_000), traces.prompt(0, 2, 20, 32_000)
    assert one[:8] != other[:8] and one == traces.prompt(0, 1, 20, 32_000)
    for bad in (lambda: traces.poisson(1, 0.0, 0), lambda: traces.lengths(1, 9, 8, 0)):
        with pytest.raises(InputError):
            bad()


# --- policies by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "serial:128",
        "mixed:64",
        "sliced:512@5ms",
        "sliced-beside:64@25%",
        "mixed-whole:64",
        "adaptive@50%",
        "ticks",
    ],
)
def test_a_policy_is_named_as_it_was_written(text: str) -> None:
    assert PolicySpec.parse(text).label == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fifo",
        "mixed:0",
        "mixed@5ms",
        "serial-beside:3",
        "mixed-beside:3",
        "sliced-whole:3",
        "mixed-half:3",
        "adaptive:64@5ms",
        "sliced@0ms",
        "ticks:x",
    ],
)
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="policy"):
        parse_policies(text)


def test_targets() -> None:
    scale = Scale(step=0.1, gap=0.5)
    dynamic = PolicySpec.parse("dynamic:64@25%").make(scale)
    assert isinstance(dynamic, Dynamic) and dynamic.target_gap == pytest.approx(0.2) and dynamic.chunk == 64
    sliced = PolicySpec.parse("sliced-beside:64@25%").make(scale)
    assert isinstance(sliced, Sliced) and sliced.budget == pytest.approx(0.1) and sliced.overlaps
    whole = PolicySpec.parse("mixed-whole:64").make()
    assert isinstance(whole, Mixed) and whole.whole and whole.chunk == 64
    adaptive = PolicySpec.parse("adaptive@20ms").make()
    assert isinstance(adaptive, Adaptive) and adaptive.slo.max_gap == pytest.approx(0.02)
    mixed = PolicySpec.parse("mixed:64").make()
    assert isinstance(mixed, Mixed) and mixed.chunk == 64
    for nothing in (None, Scale(0.1, 0.1)):
        with pytest.raises(InputError, match="in ms"):
            PolicySpec.parse("dynamic@25%").make(nothing)


def test_overlap_on_and_off_where_they_differ() -> None:
    specs = parse_policies("serial:8,overlap:8,sliced:8,sliced-beside:8")
    cells = [(spec.label, on) for spec, on in with_overlap(specs, None, lanes=True)]
    assert cells == [
        ("serial:8", False), ("overlap:8", False), ("overlap:8", True), ("sliced:8", False),
        ("sliced-beside:8", False), ("sliced-beside:8", True),
    ]  # fmt: skip
    assert not any(on for _, on in with_overlap(specs, False, lanes=True))
    assert len(with_overlap(specs, True, lanes=True)) == 4
    assert not any(on for _, on in with_overlap(specs, True, lanes=False))


# --- stalls and the gate -----------------------------------------------------------------------------------


def test_stalls_are_counted_by_what_ran() -> None:
    gaps = [Gap(0.0, 1.0, "none")] * 5 + [
        Gap(0.0, 2.5, "none"),
        Gap(0.0, 4.0, "chunk"),
        Gap(0.0, 1.5, "mixed"),
    ]
    found = stalls(gaps)
    assert (found["threshold_s"], found["of"], found["count"], found["seconds"]) == (2.0, 8, 2, 6.5)
    assert set(found["by_tag"]) == {"none", "chunk"} and found["longest_s"] == 4.0
    assert found["by_tag"]["chunk"] == {"count": 1, "seconds": 4.0, "longest_s": 4.0}
    assert stalls([])["of"] == 0
    with pytest.raises(InputError, match="factor"):
        stalls(gaps, factor=1.0)


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        (Gate(4, 100, 100, 100, 3), ""),
        (Gate(4, 90, 90, 100, 3), "90 of 100"),
        (Gate(4, 100, 100, 100, 0), "no decode step"),
        (Gate(4, 100, 50, 100, 3), "50 %"),
    ],
)
def test_the_gate_says_why(gate: Gate, words: str) -> None:
    assert (gate.reason == "") == (words == "") == gate.passed and words in gate.reason


def test_a_run_whose_streams_end_early_does_not_count() -> None:
    # Streams of 12 tokens end while the document is computed; what is measured then is no jitter.
    short = replace(
        SMALL, document=300, most=12, parts=("document",), documents=1, policies=parse_policies("ticks:8")
    )
    stage = stages.simulated("rtx3050", short.need)
    record = jitter.run(short, "", quiet, stage)
    entry = record.entries[-1]
    assert entry.contender == "ticks:8" and entry.status == "unavailable"
    assert "does not count" in entry.note and not entry.figures["gate"][0]["passed"]
    assert all(point.policy != "ticks" or not point.overlap for point in pareto.points(record))
    assert "does not count" in report.text(record)


def test_a_document_from_the_prefix_cache_does_not_count() -> None:
    assert not Gate(3, 0, 0, 100, 5).passed


# --- a run -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record() -> Record:
    return jitter.run(SMALL, "labkit bench jitter --simulate rtx3050", quiet)


def by_name(record: Record, table: str) -> dict[str, Any]:
    return {entry.contender: entry.figures for entry in record.of_table(table)}


def test_every_cell_is_there_right_and_counts(record: Record) -> None:
    names = ["serial:32", "overlap:32 no overlap", "overlap:32", "ticks:32 no overlap", "ticks:32"]
    names += ["mixed:16", "sliced:64@25%", "dynamic:64@50% no overlap", "dynamic:64@50%"]
    for table in (jitter.DOCUMENT, jitter.COLD):
        assert [entry.contender for entry in record.of_table(table)] == names
    for entry in record.entries:
        assert entry.status == "timed" and entry.note == ""
        assert all(gate["passed"] for gate in entry.figures["gate"])
        assert entry.figures["exact"]["different"] == 0
    later = record.of_table(jitter.DOCUMENT)[1:]
    assert all(entry.figures["exact"]["compared"] for entry in later)


def test_a_simulation_says_so_and_counts_no_streams(record: Record) -> None:
    assert record.kind == "simulated" and record.parameters["origin"] == "simulated from quoted"
    assert "simulated from quoted" in record.device["name"] and "simulated from quoted" in record.notes[0]
    for entry in record.entries:
        counters = entry.figures["counters"]
        assert counters["prefill_decode_overlap_steps"] > 0
        assert counters["prefill_decode_stream_overlap_steps"] == 0 and not entry.figures["concurrent"]


def test_the_record_says_policy_and_overlap(record: Record) -> None:
    found = by_name(record, jitter.DOCUMENT)
    assert (found["overlap:32"]["overlap"], found["overlap:32"]["two_lanes"]) == (True, True)
    off = found["overlap:32 no overlap"]
    assert (off["policy"], off["overlap"], off["two_lanes"]) == ("overlap", False, False)
    assert not found["serial:32"]["two_lanes"]
    # Without its own lane the seed's policy is the serial one.
    assert off["itl_beside"] == pytest.approx(found["serial:32"]["itl_beside"])


def test_gaps_are_what_the_arithmetic_says(record: Record) -> None:
    # One chunk of 32 beside three streams, by the cost model: serial adds, mixed shares the weights.
    cost = stages.SIMULATED["rtx3050"]()
    found = by_name(record, jitter.DOCUMENT)
    step = cost.products(3)
    assert found["serial:32"]["itl_beside"]["max"] == pytest.approx(step + cost.products(32))
    assert found["mixed:16"]["itl_beside"]["max"] == pytest.approx(cost.products(3 + 16))
    assert found["serial:32"]["itl_steady"]["p50"] == pytest.approx(step)
    # A joined overlap cannot go below its chunk; ticks can.
    assert (
        found["overlap:32"]["itl_beside"]["max"] > cost.products(32) > found["ticks:32"]["itl_beside"]["max"]
    )
    budget = 0.25 * cost.products(32)
    assert found["sliced:64@25%"]["target_s"] == pytest.approx(budget)
    assert found["sliced:64@25%"]["itl_beside"]["p50"] <= step + budget + 1e-9
    # Two documents of 100 tokens: four chunks of at most 32 and four decode steps each.
    tokens = found["serial:32"]["prompt_tok_s"] * found["serial:32"]["ttft"]["mean"]
    assert tokens == pytest.approx(SMALL.document)


def test_cold_prompts_keep_their_times(record: Record) -> None:
    assert record.parameters["rate"] > 0 and record.parameters["ttft"] > 0
    for figures in by_name(record, jitter.COLD).values():
        assert (
            figures["ttft"]["count"] == SMALL.cold == figures["cold_itl"]["count"] // (SMALL.cold_answer - 1)
        )
        within = figures["itl"]["p50"] <= record.parameters["gap"]
        assert figures["gaps_met"] == pytest.approx(1.0) or (figures["gaps_met"] >= 0.5) == within
        assert 0 <= figures["met"] <= SMALL.cold and figures["goodput"] <= figures["offered"]


def test_the_front(record: Record) -> None:
    points = pareto.points(record)
    assert len(points) == 9 and {point.origin for point in points} == {"simulated from quoted"}
    for gap in ("max_gap", "p99_gap"):
        kept = pareto.front(points, gap)
        assert kept
        rates = [point.prompt_rate for point in kept]
        assert rates == sorted(rates)
        for point in points:  # everything is on it, or beaten by something on it
            assert any(
                getattr(one, gap) <= getattr(point, gap) and one.prompt_rate >= point.prompt_rate
                for one in kept
            )
    with pytest.raises(InputError, match="gap"):
        pareto.front(points, "mean")


def test_the_file_and_the_tables(record: Record, tmp_path: Path) -> None:
    again = read(record.write(tmp_path / "a.json"))
    assert [entry.figures for entry in again.entries] == json.loads(
        json.dumps([entry.figures for entry in record.entries])
    )
    text, markdown = report.text(again), report.markdown(again)
    for words in ("Pareto front", "Stalls", "Cold prompts", "simulated from quoted", "on two streams"):
        assert words in text and words in markdown
    assert "Other measurements" not in text
    assert text == report.text(record)


def test_the_same_seed_is_the_same_run(record: Record) -> None:
    again = jitter.run(SMALL, "", quiet)
    assert [entry.figures for entry in again.entries] == [entry.figures for entry in record.entries]


def test_wrong_tokens_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.engine import sim

    right, calls = sim.token_after, iter(range(10**9))

    def broken(state: int, vocab: int) -> int:
        return right(state, vocab) if next(calls) < 150 else 3

    monkeypatch.setattr(sim, "token_after", broken)
    record = jitter.run(replace(SMALL, parts=("document",)), "", quiet)
    assert {"wrong"} <= {entry.status for entry in record.entries}


def test_a_cell_that_fails_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PolicySpec.make

    def broken(self: PolicySpec, scale: Scale | None = None) -> Any:
        if self.name == "mixed":
            raise RuntimeError("no such kernel")
        return right(self, scale)

    monkeypatch.setattr(PolicySpec, "make", broken)
    record = jitter.run(SMALL, "", quiet)
    assert {entry.contender for entry in record.entries if entry.status != "timed"} == {"mixed:16"}
    assert "RuntimeError: no such kernel" in report.text(record)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["serial:16", "ticks:40", "mixed:8", "sliced:64@10ms", "overlap:7", "adaptive@50%"]),
    st.integers(1, 6),
    st.integers(1, 120),
    st.booleans(),
)
def test_gate_and_gaps_of_any_size(policy: str, streams: int, document: int, overlap: bool) -> None:
    options = replace(
        SMALL, policies=parse_policies(policy), streams=streams, document=document, parts=("document",),
        overlap=overlap, most=400, documents=1,
    )  # fmt: skip
    for entry in jitter.run(options, "", quiet).entries:
        assert entry.status == "timed", entry.note
        figures = entry.figures
        assert figures["gate"][0]["prompt_tokens"] == document
        assert figures["itl"]["count"] == figures["itl_beside"]["count"] + figures["itl_steady"]["count"]
        assert figures["itl_beside"]["max"] <= figures["max_gap_each_s"][0] + 1e-12


# --- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": ()}, {"parts": ("all",)}, {"streams": 0}, {"load": 0.0}, {"rate": -1.0}, {"most": 20},
        {"cold_lengths": (5, 4)}, {"baseline": PolicySpec("dynamic", 8, 0.5, True)},
    ],
)  # fmt: skip
def test_options_that_are_none(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        replace(Options(), **changes)


def test_the_pool_holds_all() -> None:
    for where in ("cpu", "h200", "rtx3050", "cuda"):
        options = preset(where)
        need = options.need
        assert need.rows >= options.streams + options.cold
        assert need.blocks * 16 >= options.streams * (options.stream_prompt + options.most) + options.document
        assert need.context >= options.document and need.chunk >= 32


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "j.json"
    asked = ["jitter", "--simulate", "rtx3050", "--policies", "overlap:64,mixed:28", "--document", "189"]
    asked += ["--parts", "document", "--no-prefill-decode-overlap", "--out", str(out)]
    done = CliRunner().invoke(bench_app, asked)
    assert done.exit_code == 0, done.output
    record = read(out)
    assert [entry.contender for entry in record.entries] == [
        "serial:128",
        "overlap:64 no overlap",
        "mixed:28",
    ]
    assert "--no-prefill-decode-overlap" in record.command and record.parameters["overlap"] is False
    assert not any(entry.figures["two_lanes"] for entry in record.entries)
    shown = CliRunner().invoke(bench_app, ["show", "--markdown", str(out)])
    assert shown.exit_code == 0 and "| overlap:64 no overlap |" in shown.output


@pytest.mark.parametrize("asked", [["--simulate", "a100"], ["--simulate", "h200", "--device", "cpu"]])
def test_a_stage_that_is_none(asked: list[str]) -> None:
    done = CliRunner().invoke(bench_app, ["jitter", *asked])
    assert done.exit_code != 0


def test_the_article_s_own_trace() -> None:
    # 189 tokens, chunk 128, among 4 rows: the gaps of the article's table, from the model fitted to it.
    options = replace(
        preset("rtx3050"),
        document=189,
        documents=1,
        parts=("document",),
        policies=parse_policies("overlap:128"),
    )
    found = by_name(jitter.run(options, "", quiet), jitter.DOCUMENT)
    assert found["serial:128"]["itl_beside"]["max"] == pytest.approx(0.6605, abs=1e-4)
    assert found["overlap:128"]["itl_beside"]["max"] == pytest.approx(0.6489, abs=1e-4)


def test_tags_of_a_gap() -> None:
    watched = object.__new__(timeline.Timeline)
    watched.pieces = [timeline.Piece(1.0, 2.0, "chunk"), timeline.Piece(3.0, 4.0, "mixed")]
    assert watched.tag_of(0.0, 1.0) == "none" == watched.tag_of(2.0, 3.0)
    assert watched.tag_of(0.5, 1.5) == "chunk" and watched.tag_of(1.5, 3.5) == "mixed"
