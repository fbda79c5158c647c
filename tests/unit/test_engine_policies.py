"""What each policy does to gaps and prefill, on the simulated clock; and the clock and its costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit import quoted
from labkit.bench import jitter, jitter_cases
from labkit.bench.policy_specs import parse_policies
from labkit.bench.record import read
from labkit.engine.adaptive import POLICIES, Adaptive, make_policy
from labkit.engine.cost_model import CostModel, h200, rtx3050
from labkit.engine.engine import Engine
from labkit.engine.executor import Row
from labkit.engine.metrics import Latency, Slo
from labkit.engine.policy import Dynamic, Mixed, Overlap, Policy, Serial, Sliced, Ticks, View
from labkit.engine.request import Request
from labkit.engine.sampling import SamplingParams
from labkit.engine.sim import Arrival, SimulatedExecutor, document_trace, replay
from labkit.engine.work import SlicedPrefillWork
from labkit.errors import InputError
from labkit.paths import data_dir


def run(policy: Policy, cost: CostModel, trace: list[Arrival], **options):
    engine = Engine(SimulatedExecutor(cost, **options), policy=policy)
    requests = replay(engine, trace)
    steady = [request for request in requests if request.prompt_len == 8]
    documents = [request for request in requests if request.prompt_len > 8]
    return Latency.of(steady).itl, Latency.of(documents).ttft, engine


def quoted_trace() -> list[Arrival]:
    return document_trace(streams=4, answer=64, document=189, at=0.5)


def document(metric: str) -> dict:
    rows = quoted.tables(quoted.DEEPINFER)["long_document_itl"].rows
    return next(row for row in rows if row["metric"] == metric)


# --- the article's figures -----------------------------------------------------------------------------


def test_the_fitted_model_gives_the_articles_gaps_back() -> None:
    gap = document("max_itl_s")
    assert run(Serial(128), rtx3050(), quoted_trace())[0].max == pytest.approx(gap["off"], rel=1e-3)
    assert run(Overlap(128), rtx3050(), quoted_trace())[0].max == pytest.approx(gap["on"], rel=1e-3)


def test_a_joined_overlap_is_never_below_the_chunk() -> None:
    free = CostModel(name="two devices", origin="simulated", source="-", points=rtx3050().points, share=0.5)
    gap, _, _ = run(Overlap(128), free, quoted_trace())
    assert gap.max >= free.products(128)


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        (Mixed(32), 0.19),
        (Ticks(128), 0.15),
        (Sliced(128, budget=0.0728), 0.16),
        (Dynamic(128, least=8, target_gap=0.2), 0.25),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_gaps_below_the_chunk(policy: Policy, most: float) -> None:
    gap, ttft, _ = run(policy, rtx3050(), quoted_trace())
    assert gap.max <= most < rtx3050().products(128) / 2
    assert ttft.count == 1


def test_mixed_keeps_nearly_the_prefill_rate() -> None:
    _, serial, _ = run(Serial(128), rtx3050(), quoted_trace())
    _, mixed, _ = run(Mixed(32), rtx3050(), quoted_trace())
    assert mixed.max <= 1.1 * serial.max


# --- the policies' own promises ------------------------------------------------------------------------


def long_trace(cost: CostModel) -> list[Arrival]:
    step = cost.products(4) + cost.fixed
    return document_trace(streams=4, answer=400, document=3000, at=20 * step)


def test_sliced_holds_its_budget() -> None:
    cost = h200()
    budget = 1e-3
    gap, _, engine = run(Sliced(1024, budget=budget), cost, long_trace(cost))
    step = cost.products(4) + cost.fixed + 5000 * cost.context
    layer = cost.products(1024) / cost.num_layers
    assert gap.max <= step + max(budget, layer) + 4 * cost.host
    assert engine.counters.prefill_decode_overlap_steps > 20


def test_sliced_believes_in_no_cheap_rest() -> None:
    """On an H200 the last tokens of a document, thought to be as cheap as they are few, were one slice of all
    layers: a gap of 10 ms where the budget was 1.5."""

    def work(tokens: int, layers: int = 0, seconds: float = 0.0) -> SlicedPrefillWork:
        row = Row(Request("r", (1,) * tokens, SamplingParams(), 0.0), 0, tokens, samples=False)
        found = SlicedPrefillWork([row], "decode", 36)
        found.next_layers, found.slice_seconds = layers, seconds
        return found

    def layers(policy: Sliced, tokens: int, *, new: bool = False) -> int:
        partial = None if new else work(tokens)
        return policy.prefill(View(0.0, 4, 4, tokens, 0.0, (), partial, ahead=False, num_layers=36)).layers

    policy = Sliced(512, budget=1.6e-3)
    assert layers(policy, 512, new=True) == layers(policy, 512) == 1
    policy.observe(work(512, 1, 0.1e-3), 0.0)
    assert layers(policy, 512) == 2  # not 16: a short slice may hide what a long one costs
    policy.observe(work(512, 2, 0.8e-3), 0.0)
    assert layers(policy, 512) == layers(policy, 20) == layers(policy, 1) == 4
    policy.observe(work(20, 4, 0.2e-3), 0.0)
    assert layers(policy, 512) == 4  # the rest of a prompt taught nothing
    assert layers(policy, 512, new=True) == 1  # it is prepared in the same gap


def test_a_whole_mixed_step_counts_its_decode_rows() -> None:
    assert [Mixed(128).beside(rows) for rows in (1, 16, 200)] == [128] * 3
    assert [Mixed(128, whole=True).beside(rows) for rows in (1, 16, 120, 121, 200)] == [127, 112, 8, 8, 8]
    assert Mixed(4, whole=True).beside(3) == 4
    cost = h200()
    (plain, _, one), (whole, _, other) = (
        run(policy, cost, crowd(cost), num_blocks=10_000) for policy in (Mixed(112), Mixed(128, whole=True))
    )
    assert whole.max <= 1.02 * plain.max and prompt_rate(other) > 0.98 * prompt_rate(one)


def test_dynamic_holds_its_gap_after_a_few_steps() -> None:
    cost, target = h200(), 5e-3  # below it all sizes cost what 64 tokens do
    gap, _, _ = run(Dynamic(1024, target_gap=target), cost, long_trace(cost))
    assert gap.max <= 1.5 * target and gap.p95 <= 1.2 * target


def crowd(cost: CostModel) -> list[Arrival]:
    """Streams that outlive a queue of documents."""
    if cost is h200():
        return document_trace(streams=16, answer=1500, document=4096, at=0.05, documents=8, every=0.05)
    return document_trace(streams=4, answer=300, document=1500, at=0.5, documents=2, every=3.0)


def prompt_rate(engine: Engine) -> float:
    """Prompt tokens a second, from the first document's arrival to the last one's first token."""
    documents = [request for request in engine.remembered if request.prompt_len > 8]
    last = max(request.token_times[0] for request in documents)
    first = min(request.arrival for request in documents)
    return sum(request.prompt_len for request in documents) / (last - first)


@pytest.mark.parametrize("lanes", [True, False])
@pytest.mark.parametrize(
    ("card", "bound"),
    [
        *((h200, bound) for bound in (3.8e-3, 4.5e-3, 5.6e-3, 7.6e-3, 9.6e-3, 13.6e-3, 21.6e-3)),
        *((rtx3050, bound) for bound in (0.25, 0.37, 0.7)),
    ],
)
def test_adaptive_holds_its_bound_nearly_as_fast_as_the_best_that_does(card, bound, lanes) -> None:
    cost = card()
    trace, options = crowd(cost), {"lanes": lanes, "num_blocks": 10_000}
    policy = Adaptive(Slo(max_gap=bound))
    gap, _, engine = run(policy, cost, trace, **options)
    assert policy.looks > 5
    assert gap.max <= bound
    best = 0.0
    for rung in Adaptive(Slo(max_gap=bound)).ladder:
        of_rung, _, alone = run(rung, cost, trace, **options)
        if of_rung.max <= bound:
            best = max(best, prompt_rate(alone))
    assert prompt_rate(engine) > 0.8 * best


@pytest.mark.parametrize(
    ("card", "aim"), [(h200, 3.5e-3), (h200, 5e-3), (h200, 9e-3), (rtx3050, 0.2), (rtx3050, 0.4)]
)
def test_ticks_can_be_as_long_as_is_wanted(card, aim: float) -> None:
    """Pauses between decode steps are the gain of chunks: a longer gap, more prompt tokens."""
    cost = card()
    step = cost.seconds([Row(Request("r", (1,) * 9, SamplingParams(), 0.0), 8, 9, samples=True)])
    at_once, _, engine = run(Ticks(512), cost, crowd(cost), num_blocks=10_000)
    gap, _, paced = run(Ticks(512, gap=aim), cost, crowd(cost), num_blocks=10_000)
    assert at_once.max < aim
    assert aim - step <= gap.p99 <= 1.05 * aim and gap.max <= aim + 3 * cost.host + 0.1 * step
    longest, _, most = run(Ticks(512, gap=2 * aim), cost, crowd(cost), num_blocks=10_000)
    assert prompt_rate(engine) < prompt_rate(paced) < prompt_rate(most) and longest.max > gap.max


@pytest.mark.parametrize(
    "policy", [Ticks(512, gap=9e-3), Adaptive(Slo(max_gap=9e-3)), Adaptive(Slo(max_gap=20e-3))]
)
def test_a_pause_is_one_cycle(policy: Policy) -> None:
    """A time to wake at that has passed would make cycles that wait for nothing."""
    engine = Engine(SimulatedExecutor(h200(), num_blocks=10_000), policy=policy)
    joined = []
    engine.runner.watch = lambda work, now: joined.append(now)
    replay(engine, crowd(h200()))
    assert len(joined) / 2 < engine.counters.steps < 1.2 * len(joined)


def test_ticks_do_not_pause_on_one_lane() -> None:
    cost = h200()
    (plain, first, _), (paced, second, _) = (
        run(Ticks(128, gap=gap), cost, crowd(cost), lanes=False, num_blocks=10_000) for gap in (None, 9e-3)
    )
    assert (paced, second) == (plain, first)


def test_ticks_do_not_wait_where_no_prompt_does() -> None:
    cost = h200()
    trace = document_trace(streams=4, answer=50, document=10, at=1e9, documents=1)
    (plain, _, _), (paced, _, engine) = (run(Ticks(64, gap=g), cost, trace[:4]) for g in (None, 1.0))
    assert paced == plain and engine.scheduler.policy.wake is None


def test_adaptive_leaves_ticks_without_a_pause() -> None:
    """A chunk in flight runs to its end; decode steps go on meanwhile."""
    cost = rtx3050()
    ladder = (Ticks(512), Mixed(16), Mixed(64))
    gap, _, engine = run(Adaptive(Slo(max_gap=0.7), ladder), cost, crowd(cost), num_blocks=10_000)
    policy = engine.scheduler.policy
    assert isinstance(policy, Adaptive) and policy.rung > 0
    assert gap.max < cost.products(512) / 3


def test_adaptive_takes_the_gentlest_rung_where_nothing_holds() -> None:
    cost = rtx3050()
    gap, _, engine = run(Adaptive(Slo(max_gap=1e-3)), cost, crowd(cost), num_blocks=10_000)
    gentle, _, _ = run(Ticks(512), cost, crowd(cost), num_blocks=10_000)
    assert gap.max <= 1.05 * gentle.max
    assert all(request.finish_reason == "length" for request in engine.remembered)


def test_adaptive_with_prompts_in_good_time_stays_gentle() -> None:
    cost, bound = h200(), 10e-3
    usual, _, _ = run(Adaptive(Slo(max_gap=bound)), cost, crowd(cost), num_blocks=10_000)
    calm, _, engine = run(Adaptive(Slo(max_gap=bound, ttft=1e3)), cost, crowd(cost), num_blocks=10_000)
    assert calm.max < usual.max / 2 and usual.max <= bound
    assert engine.scheduler.policy.rung == 0  # type: ignore[attr-defined]


def test_adaptive_begins_anew_when_lanes_come_or_go() -> None:
    cost, policy = h200(), Adaptive(Slo(max_gap=10e-3))
    _, _, engine = run(policy, cost, crowd(cost), num_blocks=10_000)
    assert isinstance(policy.ladder[0], Ticks)
    engine.set_overlap(False)
    start = engine.executor.now()
    replay(engine, [replace(arrival, time=start + arrival.time) for arrival in quoted_trace()])
    assert isinstance(policy.ladder[0], Sliced) and isinstance(policy.ladder[1], Mixed)


def test_running_ahead_changes_no_token_and_hides_the_host() -> None:
    cost = h200()
    trace = document_trace(streams=4, answer=100, document=300, at=0.01)
    plain, ahead = (
        run(make_policy("mixed"), cost, trace, feeds=feeds)[2].remembered for feeds in (False, True)
    )
    assert {r.id: r.output_ids for r in plain} == {r.id: r.output_ids for r in ahead}
    assert max(r.token_times[-1] for r in ahead) < max(r.token_times[-1] for r in plain)


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("lanes", [True, False])
def test_every_policy_gives_the_same_tokens(name: str, lanes: bool) -> None:
    trace = document_trace(streams=3, answer=20, document=100, at=0.01, documents=3, every=0.01)
    _, _, plain = run(Serial(1), h200(), trace)
    _, _, engine = run(make_policy(name), h200(), trace, lanes=lanes)
    expected = {request.arrival: request.output_ids for request in plain.remembered}
    assert {request.arrival: request.output_ids for request in engine.remembered} == expected


# --- names and arguments -------------------------------------------------------------------------------


def test_policies_are_made_by_name() -> None:
    assert make_policy("serial", chunk=7).chunk == 7
    kept = Mixed()
    assert make_policy(kept) is kept
    with pytest.raises(InputError, match="one of serial, overlap, ticks, dynamic, mixed, sliced, adaptive"):
        make_policy("fastest")
    with pytest.raises(InputError, match="options"):
        make_policy(kept, chunk=3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Serial(0),
        lambda: Ticks(True),
        lambda: Sliced(8, budget=0),
        lambda: Dynamic(8, target_gap=-1),
        lambda: Adaptive(Slo(), ()),
        lambda: Mixed(8, alone=0),
    ],
)
def test_arguments_out_of_range_are_refused(make) -> None:
    with pytest.raises(InputError):
        make()


# --- the clock -----------------------------------------------------------------------------------------


def test_costs_say_where_they_are_from() -> None:
    for cost, origin in ((rtx3050(), "simulated from quoted"), (h200(), "simulated from measured")):
        assert cost.origin == origin and "ssumed" in cost.source
        name = SimulatedExecutor(cost).name
        assert name.startswith("simulated") and origin in name


def test_products_are_lines_through_the_points() -> None:
    cost = CostModel(name="-", origin="-", source="-", points=((1, 1.0), (5, 1.0), (9, 3.0)))
    assert [cost.products(n) for n in (1, 3, 5, 7, 9, 13)] == [1, 1, 1, 2, 3, 5]
    padded = replace(cost, sizes=(4, 7))
    assert [padded.products(n) for n in (1, 4, 5, 7, 9)] == [1, 1, 2, 2, 3]
    with pytest.raises(InputError, match="rising"):
        CostModel(name="-", origin="-", source="-", points=((5, 1.0), (5, 2.0)))
    with pytest.raises(InputError, match="rising"):
        replace(cost, sizes=(4, 4))


def test_two_lanes_share_the_device() -> None:
    """Alone a work takes 1 s; two whose shares add up to 1.6 are 1.6 times slower while both run."""
    cost = CostModel(name="-", origin="-", source="-", points=((1, 1.0), (2, 2.0)), share=0.8)
    executor = SimulatedExecutor(cost)
    engine = Engine(executor, policy="serial")
    for prompt in ([1], [2]):
        engine.add_request(prompt, SamplingParams(max_tokens=1))
    scheduler = engine.scheduler
    work = scheduler.next_work()
    assert work is not None and len(work.rows) == 2
    short = executor.launch(executor.prepare(work.rows[:1], "decode"))
    long = executor.launch(executor.prepare(work.rows, "prefill"))
    assert not executor.done(short)
    executor.join(short)
    assert executor.now() == pytest.approx(1.6) and not executor.done(long)
    executor.join(long)
    assert executor.now() == pytest.approx(1.6 + 1.0)
    assert executor.seconds(long) == pytest.approx(2.6)


def test_decode_steps_have_a_line_of_their_own_and_chunks_pay_for_their_context() -> None:
    cost = CostModel(
        name="-", origin="-", source="-", points=((1, 4.0), (9, 8.0)), decode=((1, 1.0), (9, 2.0)),
        context=0.5, chunk_context=((1, 0.25), (5, 1.25)),
    )  # fmt: skip

    def row(start: int, stop: int) -> Row:
        return Row(Request("r", tuple(range(stop)), SamplingParams(), 0.0), start, stop, samples=True)

    assert cost.seconds([row(1, 2), row(3, 4)]) == 1.125 + 0.5 * (2 + 4)
    assert cost.seconds([row(1, 2), row(0, 4)]) == 6.0 + 0.5 * 2 + 0.25 * 4 * 4
    alike = replace(cost, decode=(), chunk_context=())
    assert alike.seconds([row(0, 4)]) == 5.5 + 0.5 * 4
    with pytest.raises(InputError, match="decode"):
        replace(cost, decode=((9, 1.0), (1, 2.0)))
    with pytest.raises(InputError, match="seconds"):
        replace(cost, chunk_context=((1, -1.0), (2, 0.0)))


@pytest.mark.parametrize("name", ["serial:128", "serial:512", "overlap:128", "mixed:64", "mixed:256"])
def test_the_simulated_h200_is_near_the_record_it_was_fitted_to(name: str) -> None:
    """What the fit leaves out (launches, padding to the sizes of graphs) is a fifth of a gap at most."""
    record = read(sorted((data_dir() / "measured").glob("jitter-qwen2.5-3b-h200-*.json"))[-1])
    measured = {entry.contender: entry.figures for entry in record.of_table(jitter.DOCUMENT)}[name]
    policies = parse_policies("serial:128," + name)
    options = replace(jitter_cases.preset("h200"), policies=policies, parts=("document",))
    found = jitter.run(options, "test", lambda line: None)
    simulated = {entry.contender: entry.figures for entry in found.of_table(jitter.DOCUMENT)}[name]
    for figure in ("prompt_tok_s", "max"):
        ours, theirs = (
            cell[figure] if figure in cell else cell["itl_beside"][figure] for cell in (simulated, measured)
        )
        assert ours == pytest.approx(theirs, rel=0.2), figure
