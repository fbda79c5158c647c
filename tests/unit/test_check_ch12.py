"""Checks of chapter 12: own answers pass, usual mistakes get their hint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from check_answers import refused
from hypothesis import given
from hypothesis import strategies as st

from labkit import check
from labkit.check import ch12
from labkit.check.ch12 import Gpu, Task, plan
from labkit.engine.cost_model import CostModel
from labkit.engine.executor import Row
from labkit.engine.request import Request
from labkit.engine.runner import Runner
from labkit.engine.sampling import SamplingParams
from labkit.engine.sim import SimulatedExecutor
from labkit.engine.work import DecodeWork, PrefillWork
from labkit.errors import InputError
from labkit.solutions import ch12 as reference
from labkit.widgets import overlap_run

# --- the model of a GPU


def test_a_wait_holds_a_lane_until_the_event_and_not_the_other() -> None:
    gpu = Gpu()
    gpu.launch(Task("a", "prefill", 9.0, (), (1,)))
    event = gpu.record("prefill")
    gpu.launch(Task("b", "prefill", 9.0))
    gpu.wait("decode", event)
    gpu.launch(Task("c", "decode", 2.0, (1,)))
    assert [(task.name, start, end) for task, start, end in gpu.log] == [
        ("a", 0.0, 9.0), ("b", 9.0, 18.0), ("c", 9.0, 11.0),
    ]  # fmt: skip
    assert not gpu.stale and gpu.end == 18.0


def test_an_event_recorded_too_early_is_reached_at_once() -> None:
    gpu = Gpu()
    event = gpu.record("prefill")
    gpu.launch(Task("a", "prefill", 9.0, (), (1,)))
    gpu.wait("decode", event)
    gpu.launch(Task("c", "decode", 2.0, (1, -1)))
    assert gpu.stale == {"c": (1,)}


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda gpu: gpu.wait("decode", None), "event"),
        (lambda gpu: gpu.record("main"), "lane"),
        (lambda gpu: gpu.launch("A1"), "task"),
    ],
)
def test_what_the_model_does_not_know_is_refused(call: Any, word: str) -> None:
    with pytest.raises(InputError, match=word):
        call(Gpu())


def test_the_plan_goes_wrong_by_its_speed_and_one_speed_hides_it() -> None:
    wrong = []
    for timing in ch12.TIMINGS:
        gpu = Gpu()
        for task in plan(*timing):
            gpu.launch(task)
        wrong.append(set(gpu.stale))
    slow = {f"step {number}" for number in (3, 4, 5, 6)}
    assert wrong == [slow, {"C1"}, set(), slow]


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_the_reference_is_right_at_any_speed_and_never_slower_than_the_host(a: float, b: float) -> None:
    tasks, gpu, right = plan(a, b), Gpu(), Gpu()
    reference.launch_all(gpu, tasks)
    for task in tasks:
        right.launch(task)
        right.synchronize()
    assert not gpu.stale and gpu.tokens == right.tokens and gpu.end <= right.end * (1 + 1e-9)


# --- 12.1


def launching(*, wait: Any = None, before: bool = False, own: bool = False) -> Any:
    """Launch with a rule for the waits."""

    def answer(gpu: Any, tasks: Any) -> None:
        last: dict[str, Any] = {}
        for task in tasks:
            for lane, event in last.items():
                if (lane == task.lane) == own and wait(task):
                    gpu.wait(task.lane, event)
            if before:
                last[task.lane] = gpu.record(task.lane)
            gpu.launch(task)
            if not before:
                last[task.lane] = gpu.record(task.lane)

    return answer


def everything(gpu: Any, tasks: Any) -> None:
    for task in tasks:
        gpu.launch(task)
        gpu.synchronize()


@pytest.mark.parametrize(
    "answer",
    [everything, launching(wait=lambda task: True), launching(wait=lambda task: task.reads)],
)
def test_too_many_waits_are_right_and_too_slow(answer: Any) -> None:
    verdict = check.find("launch_all")(answer)
    assert verdict.state == "not yet" and verdict.score is not None and verdict.score > 48
    assert "only where another lane" in verdict.hint


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (launching(wait=lambda task: False), "A1 has written slot 0, at 9 ms"),
        (launching(wait=lambda task: True, own=True), "wait on the lane of step 3"),
        (launching(wait=lambda task: True, before=True), "record behind"),
        (launching(wait=lambda task: task.lane == "decode"), "C1"),
        (lambda gpu, tasks: gpu.record("decode"), "nothing"),
        (lambda gpu, tasks: [gpu.launch(task) for task in reversed(tasks)], "in the order"),
        (
            lambda gpu, tasks: [gpu.launch(Task(task.name, task.lane, task.ms)) for task in tasks],
            "as they were given",
        ),
        (lambda gpu, tasks: [gpu.wait("decode", 9.0)], "gpu.record"),
    ],
)
def test_launch_all_near_misses(answer: Any, words: str) -> None:
    refused("launch_all", answer, words)


# --- 12.2


def engine_counters(events: Any) -> tuple[int, int]:
    """What labkit's runner counts."""
    in_flight: dict[str, Any] = {}
    streams = [stream for what, _, _, stream in events if what == "launch"]
    executor: Any = SimpleNamespace(concurrent=None not in streams)
    scheduler: Any = SimpleNamespace(in_flight=())
    runner = Runner(executor, scheduler, lambda request: None)
    for what, work, kind, stream in events:
        if what == "launch":
            decode, prefill = kind in ("decode", "mixed"), kind in ("prefill", "mixed")
            in_flight[work] = SimpleNamespace(lane=stream, has_decode=decode, has_prefill=prefill)
        elif what == "join":
            del in_flight[work]
        else:
            scheduler.in_flight = list(in_flight.values())
            runner._count_cycle()
    found = runner.counters
    return found.prefill_decode_overlap_steps, found.prefill_decode_stream_overlap_steps


@pytest.mark.parametrize(("text", "wanted"), [(text, wanted) for _, text, wanted, _ in ch12.LOGS])
def test_the_logs_say_what_the_engine_counts(text: str, wanted: tuple[int, int]) -> None:
    assert engine_counters(ch12.log(text)) == wanted


@given(st.lists(st.tuples(st.sampled_from("dpm="), st.sampled_from([7, 8]), st.booleans()), max_size=30))
def test_the_reference_counts_as_the_engine_does(draws: list[tuple[str, int, bool]]) -> None:
    words, flying = [], []
    for number, (kind, stream, join) in enumerate(draws):
        if kind == "=":
            words.append("=")
            continue
        words.append(f"+{kind}{number}@{stream}")
        flying.append(f"-{kind}{number}")
        if join:
            words.append(flying.pop(0))
    events = ch12.log(" ".join(words))
    assert reference.overlap_counters(events) == engine_counters(events)


def by_cycle(*, streams: bool = True, forget: bool = False, none: bool = False) -> Any:
    """The reference with a mistake."""

    def answer(events: Any) -> Any:
        flying: dict[str, Any] = {}
        both = two = 0
        for what, work, kind, stream in events:
            if what == "launch":
                flying[work] = kind, stream
            elif what == "join":
                flying.pop(work, None)
            else:
                kinds = {kind for kind, _ in flying.values()}
                found = "mixed" in kinds or {"decode", "prefill"} <= kinds
                used = {stream for _, stream in flying.values()}
                both += found
                real = (len(used) > 1 if streams else len(flying) > 1) or (none and None in used)
                two += found and real
                if forget:
                    flying = {}
        return both, two

    return answer


def test_an_own_count_passes() -> None:
    assert check.find("overlap_counters")(by_cycle()).state == "passed"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_cycle(streams=False), "one after the other"),
        (by_cycle(forget=True), "has not joined"),
        (by_cycle(none=True), "no stream"),
        (lambda events: 3, "two whole numbers"),
        (lambda events: (1.5, 0), "two whole numbers"),
        (lambda events: (2, 2), "overlap off"),
    ],
)
def test_overlap_counters_near_misses(answer: Any, words: str) -> None:
    refused("overlap_counters", answer, words)


# --- 12.3

LANE = st.lists(st.integers(1, 40), max_size=8).map(
    lambda steps: [(sum(steps[: i + 1]), sum(steps[: i + 1]) + steps[i] / 2) for i in range(len(steps) - 1)]
)


@given(LANE, LANE)
def test_the_reference_measures_as_the_library_does(decode: Any, prefill: Any) -> None:
    halves = range(2 * 400)
    busy = [
        [any(a <= at / 2 < b for a, b in lane) for at in halves]
        for lane in (_doubled(decode), _doubled(prefill))
    ]
    wanted = sum(a and b for a, b in zip(*busy)) / 2
    found = reference.both_busy(_doubled(decode), _doubled(prefill))
    assert found == wanted == overlap_run.beside(_doubled(decode), _doubled(prefill))


def _doubled(lane: Any) -> Any:
    """Whole halves, and nothing of a lane on top of itself."""
    found: list[tuple[float, float]] = []
    for start, end in lane:
        begin = max(start, found[-1][1] if found else 0)
        if end > begin:
            found.append((begin, end))
    return found


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda decode, prefill: sum(min(b, d) - max(a, c) for a, b in decode for c, d in prefill),
            "any time",
        ),
        (
            lambda decode, prefill: sum(
                max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(decode, prefill)
            ),
            "each pair",
        ),
        (lambda decode, prefill: sum(b - a for a, b in decode), "side by side"),
        (lambda decode, prefill: "two", "no number"),
    ],
)
def test_both_busy_near_misses(answer: Any, words: str) -> None:
    refused("both_busy", answer, words)


def test_the_librarys_sum_is_refused() -> None:
    def borrowed(decode, prefill):
        return overlap_run.beside(decode, prefill)

    refused("both_busy", borrowed, "beside")


# --- 12.4


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(1, 2))
def test_the_reference_is_the_simulated_devices_cycle(step: float, chunk: float, slow: float) -> None:
    cost = CostModel(
        name="test", origin="simulated", source="", points=((1, step), (2, chunk)), share=slow / 2
    )  # fmt: skip
    times = []
    for lane in ("decode", "prefill"):
        executor = SimulatedExecutor(cost)

        def row(stop: int) -> Row:
            return Row(Request(f"{stop}", (1, 2), SamplingParams(), 0.0), 0, stop, samples=False)

        works = DecodeWork([row(1)], "decode"), PrefillWork([row(2)], lane)  # type: ignore[arg-type]
        for work in works:
            work.prepare(executor)
            work.launch(executor)
        for work in works:
            work.finish(executor)
        times.append(executor.now())
    serial, joined, floor = reference.joined_cycle(step, chunk, slow)
    assert times == pytest.approx([serial, joined]) and floor <= joined * (1 + 1e-9)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda step, chunk, slow: (step + chunk, max(step, chunk), max(step, chunk)), "at full speed"),
        (lambda step, chunk, slow: (step + chunk, slow * max(step, chunk), max(step, chunk)), "are left"),
        (
            lambda step, chunk, slow: (step + chunk, chunk + (slow - 1) * step, max(step, chunk)),
            "step 8, chunk 2",
        ),
        (
            lambda step, chunk, slow: (
                step + chunk,
                max(step, chunk) + (slow - 1) * min(step, chunk),
                chunk / 2,
            ),
            "the longer one",
        ),
        (lambda step, chunk, slow: (chunk, chunk, chunk), "one after the other"),
        (lambda step, chunk, slow: chunk, "(serial, joined, floor)"),
        (lambda step, chunk, slow: ("a", "b", "c"), "(serial, joined, floor)"),
    ],
)
def test_joined_cycle_near_misses(answer: Any, words: str) -> None:
    refused("joined_cycle", answer, words)
