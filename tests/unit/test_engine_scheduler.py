"""Scheduler rules on the simulated clock: who starts when, how chunks are shared, that nobody starves."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from engine_oracle import COST
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine import scheduler as scheduler_module
from labkit.engine.adaptive import POLICIES, make_policy
from labkit.engine.admission import Claim, future_peak
from labkit.engine.engine import Engine
from labkit.engine.policy import Mixed, Serial, share
from labkit.engine.request import QueueFullError, Status
from labkit.engine.sampling import SamplingParams
from labkit.engine.sim import Arrival, SimulatedExecutor, replay
from labkit.engine.work import Work
from labkit.errors import InputError


def engine(policy="serial", *, num_blocks=512, block_size=4, executor=None, **options) -> Engine:
    names = ("max_rows", "max_tokens", "max_context", "lanes", "feeds", "eos_ids")
    sizes = {name: options.pop(name) for name in names if name in options}
    executor = executor or SimulatedExecutor(COST, num_blocks=num_blocks, block_size=block_size, **sizes)
    return Engine(executor, policy=policy, **options)


def params(most: int) -> SamplingParams:
    return SamplingParams(max_tokens=most)


# --- chunks --------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_a_chunk_is_shared_between_the_oldest_and_the_shortest(budget: int, wanted: list[int]) -> None:
    given_ = share(budget, wanted)
    assert all(0 <= got <= want for got, want in zip(given_, wanted))
    assert sum(given_) == min(budget, sum(wanted))
    assert given_[0] >= min(wanted[0], -(-budget // 2))
    if len(wanted) > 1:
        shortest = min(wanted[1:])
        assert max(given_[1:]) >= min(shortest, budget // 2)


def test_a_long_prompt_leaves_room_for_short_ones() -> None:
    run = engine(Serial(16))
    long = run.add_request(range(400), params(2))
    run.step()
    short = run.add_request(range(6), params(2))
    while not short.output_ids:
        run.step()
    assert not long.output_ids and long.computed_len < 64


def test_short_prompts_do_not_hold_up_a_long_one() -> None:
    """⌈2n / chunk⌉ chunks once it is the oldest, whatever else arrives."""
    run, chunk, length = engine(Serial(16), prefix_cache=False), 16, 320
    chunks = []
    run.runner.watch = lambda work, now: chunks.append(work) if work.has_prefill else None
    long = run.add_request(range(length), params(1))
    number = 0
    while not long.output_ids:
        number += 1
        run.add_request([number, 1, 2, 3, 4, 5, 6, 7], params(1))
        run.step()
    assert len(chunks) <= -(-2 * length // chunk)


# --- starvation ----------------------------------------------------------------------------------------


class Watch:
    """Counts how long either kind of work was kept waiting, in works of the other kind."""

    def __init__(self, run: Engine) -> None:
        self.run = run
        self.steps = self.chunks = 0  # since the last piece of the other kind
        self.most_steps = self.most_chunks = 0
        run.runner.watch = self.joined

    def joined(self, work: Work, now: float) -> None:
        scheduler = self.run.scheduler
        runs = any(one.has_prefill for one in scheduler.in_flight)  # on a lane of its own
        waits = not runs and any(one.status is Status.PREFILL for one in scheduler.running)
        decodes = any(one.status is Status.DECODE for one in scheduler.running)
        self.steps = self.steps + 1 if work.has_decode and not work.has_prefill and waits else 0
        self.chunks = self.chunks + 1 if work.has_prefill and not work.has_decode and decodes else 0
        self.most_steps = max(self.most_steps, self.steps)
        self.most_chunks = max(self.most_chunks, self.chunks)


def busy_trace() -> list[Arrival]:
    steady = [Arrival(0.0, [i, 1, 2], params(150)) for i in range(3)]
    long = [Arrival(0.1 + 0.2 * i, [i] + [7] * 150, params(3)) for i in range(6)]
    return steady + long


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("lanes", [True, False])
def test_neither_prefill_nor_decode_starves(name: str, lanes: bool) -> None:
    run = engine(name, lanes=lanes)
    watch = Watch(run)
    requests = replay(run, busy_trace())
    assert all(request.finish_reason == "length" for request in requests)
    # One piece at most: the piece that was under way when the other kind became ready adds one.
    assert watch.most_steps <= 2 and watch.most_chunks <= 2


def test_ticks_never_leave_a_lane_idle_while_work_waits() -> None:
    run = engine(make_policy("ticks", chunk=64))
    idle = []
    launch = run.runner._count_cycle

    def counted() -> None:
        scheduler = run.scheduler
        view = scheduler.view()
        idle.append(
            (view.prompt_tokens > 0 and not view.prefill_runs, view.ready > 0 and not view.decode_runs)
        )
        launch()

    run.runner._count_cycle = counted  # type: ignore[method-assign]
    requests = replay(run, busy_trace())
    assert not any(prefill or decode for prefill, decode in idle)
    gaps = [b - a for request in requests[:3] for a, b in itertools.pairwise(request.token_times)]
    assert max(gaps) <= 2 * COST.share * COST.products(8) + 1e-9  # a decode step, slowed by its neighbour


def test_requests_start_in_order_of_priority_and_arrival() -> None:
    run = engine(Mixed(64), max_rows=1)
    started = []
    for prompt, priority in (([1], 1), ([2], 0), ([3], 1), ([4], 0)):
        started.append(run.add_request(prompt, params(2), priority=priority))
    run.run()
    first = sorted(started, key=lambda request: request.token_times[0])
    assert [request.prompt_ids[0] for request in first] == [2, 4, 1, 3]


def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    run = engine(Serial(64), num_blocks=12)
    run.add_request([1] * 8, params(24))
    large = run.add_request([2] * 36, params(5))
    small = [run.add_request([3, i], params(2)) for i in range(4)]
    run.run()
    assert all(large.token_times[0] <= one.token_times[0] for one in small)


# --- admission -----------------------------------------------------------------------------------------


def played(claims: list[Claim], delays: list[int], size: int) -> int:
    """The most blocks of a run in which claim i begins to grow ``delays[i]`` steps late."""
    peak, steps = 0, 1 + max(claim.growth + delay for claim, delay in zip(claims, delays))
    for step in range(steps):
        shared, own = set(), 0
        for claim, delay in zip(claims, delays):
            grown = max(0, step - delay)
            if grown <= claim.growth:
                shared.update(claim.blocks)
                own += -(-(claim.length + grown) // size) - len(claim.blocks)
        peak = max(peak, len(shared) + own)
    return peak


@st.composite
def some_claims(draw) -> tuple[list[Claim], int]:
    size = draw(st.integers(1, 4))
    claims = []
    for number in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 10))
        blocks = -(-length // size)
        shared = draw(st.integers(0, length // size))
        own = range(100 * number + 100, 100 * number + 100 + blocks - shared)
        growth, settled = draw(st.integers(0, 6)), draw(st.booleans())
        claims.append(Claim([*range(shared), *own], length, growth, settled))
    return claims, size


@settings(max_examples=300, deadline=None)
@given(some_claims())
def test_the_future_peak_is_the_worst_over_all_delays(drawn) -> None:
    claims, size = drawn
    most = max(claim.growth for claim in claims)
    ranges = [range(1) if claim.settled else range(most + 1) for claim in claims]
    worst = max(played(claims, list(delays), size) for delays in itertools.product(*ranges))
    assert future_peak(claims, size) == worst


def test_the_peak_without_prompts_or_sharing_is_the_textbooks() -> None:
    """remaining_i · i + Σ current_j, over requests sorted by what remains; blocks of one token."""
    pairs = [(10, 7), (3, 20), (6, 1), (8, 12)]
    claims, base = [], 0
    for current, remaining in pairs:
        claims.append(Claim(range(base, base + current), current, remaining, settled=True))
        base += current
    ordered = sorted(pairs, key=lambda pair: -pair[1])
    formula = max(
        remaining * i + sum(current for current, _ in ordered[:i])
        for i, (_, remaining) in enumerate(ordered, 1)
    )
    assert future_peak(claims, 1) == formula


@pytest.mark.parametrize("feeds", [False, True])
@pytest.mark.parametrize("name", list(POLICIES))
def test_exact_admission_never_takes_a_request_back(name: str, feeds: bool) -> None:
    run = engine(name, num_blocks=24, feeds=feeds)
    requests = [run.add_request([i] * (1 + 5 * i % 17), params(3 + 7 * i % 31)) for i in range(30)]
    run.run()
    assert run.counters.preemptions == 0
    assert all(len(one.output_ids) == one.params.max_tokens for one in requests)


def test_preemption_recomputes_the_same_tokens() -> None:
    prompts = [[i] * 6 for i in range(8)]
    calm = engine(Mixed(16)).generate(prompts, params(30))
    run = engine(Mixed(16), num_blocks=20, admission="now")
    tight = run.generate(prompts, params(30))
    assert run.counters.preemptions > 0
    assert [one.output_ids for one in tight] == [one.output_ids for one in calm]


# --- limits --------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_generate_waits_for_it() -> None:
    run = engine(queue_limit=2, max_rows=1)
    for i in range(2):
        run.add_request([i], params(2))
    with pytest.raises(QueueFullError, match="holds 2"):
        run.add_request([9], params(2))
    assert [one.finish_reason for one in run.generate([[i] for i in range(7)], params(2))] == ["length"] * 7


def test_a_prompt_that_can_never_fit_is_refused_with_both_lengths() -> None:
    run = engine(num_blocks=8)
    with pytest.raises(InputError, match="33 tokens; expected at most 32"):
        run.add_request([1] * 33)
    with pytest.raises(InputError, match="at most 16"):
        engine(num_blocks=8, max_context=16).add_request([1] * 17)


def test_an_answer_ends_where_the_pool_does() -> None:
    run = engine(num_blocks=2)
    (request,) = run.generate([[1, 2, 3, 4, 5]], params(100))
    assert request.finish_reason == "length" and len(request.output_ids) == 8 - 5 + 1


def test_a_prompt_that_fills_the_pool_gets_one_token() -> None:
    run = engine(num_blocks=2, policy=Mixed(3))
    ok, filled = run.generate([[1, 2], [1] * 8], params(3))
    assert (len(ok.output_ids), len(filled.output_ids)) == (3, 1)


def test_only_executors_and_works_know_of_cuda() -> None:
    folder = Path(scheduler_module.__file__).parent
    known = {path.name for path in folder.glob("*.py") if "torch.cuda" in path.read_text(encoding="utf-8")}
    assert {name for name in known if not name.startswith("executor")} <= {"lanes.py", "work.py"}


# --- a pool that grows ---------------------------------------------------------------------------------


class ShortOfMemory(SimulatedExecutor):
    """Cannot grow."""

    def grow(self, num_blocks: int) -> None:
        raise MemoryError("no room for a larger pool")


@pytest.mark.parametrize("policy", ["mixed", "ticks", "sliced"])
def test_the_pool_grows_when_it_is_needed(policy: str) -> None:
    prompts = [[i] * 12 for i in range(8)] + [[9] * 100]
    fixed = engine(policy, num_blocks=256).generate(prompts, params(20))
    executor = SimulatedExecutor(COST, num_blocks=4, most_blocks=256, block_size=4)
    run = engine(policy, executor=executor)
    grown = run.generate(prompts, params(20))
    assert [one.output_ids for one in grown] == [one.output_ids for one in fixed]
    assert 4 < executor.num_blocks == run.scheduler.pool.blocks.num_blocks <= 256
    assert run.counters.preemptions == 0


@pytest.mark.parametrize("admission", ["peak", "now"])
def test_without_memory_to_grow_only_those_that_need_it_end(admission: str) -> None:
    executor = ShortOfMemory(COST, num_blocks=8, most_blocks=256, block_size=4)
    run = engine("mixed", executor=executor, admission=admission)
    requests = run.generate([[1] * 8, [2] * 60, [3] * 8, [4] * 8], [params(n) for n in (8, 8, 50, 8)])
    plain = engine("mixed").generate([[1] * 8, [3] * 8, [4] * 8], params(50))
    assert [one.finish_reason for one in requests] == ["length", "error", "length", "length"]
    assert requests[1].error == "MemoryError: no room for a larger pool"
    assert len(requests[2].output_ids) == 32 - 8 + 1  # all that the pool holds
    kept = [requests[i] for i in (0, 2, 3)]
    assert all(a.output_ids == b.output_ids[: len(a.output_ids)] for a, b in zip(kept, plain))
    assert run.scheduler.pool.blocks.num_used == 0
