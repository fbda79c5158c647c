"""Checks of chapter 15: own answers pass, usual mistakes get their hint."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np
import pytest
from check_answers import refused
from hypothesis import given
from hypothesis import strategies as st

from labkit import check
from labkit.bench.record import Entry
from labkit.check import ch15_cases as cases
from labkit.check.ch15_cases import PLACE, REASONS, Problem, errors, lab_record, practice
from labkit.results import compare, schema
from labkit.results.change import changes
from labkit.solutions import ch15 as reference

# --- 15.1


def bench(
    *,
    checks: str = "before",
    warm: bool = True,
    unit: float = 1e6,
    within: Any = lambda error: error["max_abs"] <= error["bound"],
    catch: Any = Exception,
    note: bool = True,
    extra: int = 0,
    as_float: Any = float,
) -> Any:
    """A way to measure, with a mistake."""

    def answer(problem: Any, samples: int) -> Entry:
        taken: list[Any] = []
        error: dict[str, float] = {}

        def look() -> None:
            nonlocal error
            error = problem.error(problem.call())

        def clocked() -> None:
            for _ in range(samples + extra):
                began = problem.clock()
                result = problem.call()
                if checks == "inside":
                    nonlocal error
                    error = problem.error(result)
                taken.append(as_float(unit * (problem.clock() - began)))

        try:
            if checks == "before":
                look()
                if not within(error):
                    return Entry(**problem.place, status="wrong", error=error)
            elif warm:
                problem.call()
            clocked()
            if checks == "after":
                look()
        except catch as trouble:
            return Entry(**problem.place, status="failed", note=str(trouble) if note else "")
        if error and not within(error):
            return Entry(**problem.place, status="wrong", error=error)
        return Entry(**problem.place, status="timed", error=error, samples_us=taken)

    return answer


def test_an_answer_of_ones_own_passes() -> None:
    assert check.find("measure")(bench()).state == "passed"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (bench(checks="never"), "error"),
        (bench(checks="after"), "before the clock"),
        (bench(checks="after", warm=False), "the first call loads"),
        (bench(checks="inside", warm=True), "between the two looks"),
        (bench(unit=1.0), "microseconds"),
        (bench(unit=1e3), "one sample a call"),
        (bench(extra=1), "samples were asked for"),
        (bench(within=lambda error: True), "wrong"),
        (bench(within=lambda error: not error["max_abs"] > error["bound"]), "NaN"),
        (bench(catch=RuntimeError), "ValueError"),
        (bench(note=False), "say why"),
        (bench(as_float=str), ""),
        (lambda problem, samples: {"status": "timed"}, "an Entry"),
        (lambda problem, samples: Entry("x", "y", "z", 1, 1, 1, 0, "timed"), "place"),
    ],
)
def test_measure_near_misses(answer: Any, words: str) -> None:
    refused("measure", answer, words)


def test_the_library_s_own_timing_is_refused() -> None:
    from labkit.bench.timing import interleave

    def answer(problem: Any, samples: int) -> Any:
        return interleave({}, samples)

    refused("measure", answer, "interleave")


def test_what_the_notebook_hands_out_may_be_used() -> None:
    def measured(problem: Any, samples: int) -> Any:
        assert isinstance(problem, Problem) and problem.place == PLACE and lab_record().entries
        return good(problem, samples)

    def found(runs: Any) -> list[int]:
        return [] if errors([], practice(1)[0])[0] else runs and []

    good = bench()
    assert check.find("measure")(measured).state == "passed"
    refused("find_changes", found, "too cautious")


def test_the_problem_counts_what_is_done_to_it() -> None:
    problem = cases.Problem((0.5, 0.25))
    assert problem.clock() == 1000.0
    assert problem.error(problem.call()) == {"max_abs": 1e-4, "bound": 1e-3}
    problem.call()
    assert (problem.clock(), problem.calls, problem.readings, problem.looks) == (1001.75, 2, 2, 1)
    with pytest.raises(TypeError, match="what call"):
        problem.error(None)  # type: ignore[arg-type]


# --- 15.2


def rule(**changes: Any) -> Any:
    """The reference, with some reasons decided in another way."""

    def answer(a: Any, b: Any) -> set[str]:
        reasons = set(reference_reasons(a, b))
        for name, decide in changes.items():
            word = name.replace("_", " ")
            reasons.discard(word)
            if decide(a, b):
                reasons.add(word)
        return reasons

    return answer


def reference_reasons(a: Any, b: Any) -> set[str]:
    """An honest copy: the own-answer rule reads what an answer names."""
    out = set()
    if a.kind != b.kind:
        out.add("kind")
    if a.name != b.name or a.parameters != b.parameters:
        out.add("problem")
    if any(a.device.get(k) != b.device.get(k) for k in ("name", "key", "capability")) or not a.device:
        out.add("device")
    for key, word in (("power_limit_w", "power limit"), ("driver", "driver")):
        if a.device.get(key) != b.device.get(key):
            out.add(word)
    seen = {reason for r in (a, b) for one in r.clocks for reason in one.get("throttle_reasons") or ()}
    if seen & set(compare.THROTTLED):
        out.add("throttled")
    if any((r.software.get("commit") or {"dirty": True})["dirty"] for r in (a, b)):
        out.add("dirty")
    return out


def test_lists_tuples_and_sets_of_reasons_pass() -> None:
    for kind in (set, list, tuple, frozenset):

        def answer(a: Any, b: Any, kind: Any = kind) -> Any:
            return kind(reference_reasons(a, b))

        assert check.find("may_compare")(answer).state == "passed"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda a, b: set(), "no reason against it"),
        (lambda a, b: set(REASONS), "kind"),
        (lambda a, b: {"weather"}, "weather"),
        (lambda a, b: not reference_reasons(a, b), "a set or list"),
        (lambda a, b: "dirty", "a set or list"),
        (rule(device=lambda a, b: a.device.get("name") != b.device.get("name")), "device"),
        (rule(driver=lambda a, b: False), "driver"),
        (rule(power_limit=lambda a, b: "power_limit_w" in b.device and rule_limit(a, b)), "power limit"),
        (rule(throttled=lambda a, b: bool((a.clocks + b.clocks)[-1].get("throttle_reasons"))), "throttled"),
        (rule(throttled=lambda a, b: any(c.get("throttle_reasons") for c in a.clocks)), "throttled"),
        (rule(dirty=lambda a, b: b.software.get("commit", {"dirty": True}) is None), "dirty"),
        (rule(kind=lambda a, b: False), "kind"),
        (rule(problem=lambda a, b: a.name != b.name), "problem"),
    ],
)
def test_may_compare_near_misses(answer: Any, words: str) -> None:
    refused("may_compare", answer, words)


def rule_limit(a: Any, b: Any) -> bool:
    return bool(a.device.get("power_limit_w") != b.device["power_limit_w"])


def test_a_record_without_readings_does_not_break_the_frame() -> None:
    refused("may_compare", lambda a, b: {one["nothing"] for one in a.clocks}, "KeyError")


def test_pairs_are_records_that_the_schema_takes() -> None:
    found = list(cases.record_pairs())
    assert len({what for what, *_ in found}) == len(found)
    assert {reason for *_, reasons in found for reason in reasons} == set(cases.REASONS)
    for _, a, b, _ in found:
        for one in (a, b):
            schema.validated("pair", one.to_json())


def test_labkit_refuses_a_part_of_them() -> None:
    """Its rule is milder: it never allows what is about the device, kind or clocks."""
    for what, a, b, wanted in cases.record_pairs():
        strict = wanted & {"kind", "device", "power limit", "throttled"}
        assert bool(compare.why_not(a, b)) == bool(strict), what


# --- 15.3


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda run, sample, samples, effect: 1, "factor 2"),
        (lambda run, sample, samples, effect: 7.849 * (run**2 + sample**2 / samples) / effect**2, "whole"),
        (lambda run, sample, samples, effect: str(run), "a number"),
        (lambda run, sample, samples, effect: round(15.7 * (run**2 + sample**2 / samples) / effect**2), ""),
        (lambda run, sample, samples, effect: int(15.7 * sample**2 / samples / effect**2) + 1, "shift"),
        (lambda run, sample, samples, effect: True, ""),
    ],
)
def test_runs_needed_near_misses(answer: Any, words: str) -> None:
    refused("runs_needed", answer, words)


@pytest.mark.parametrize("z", [2.8, 2.80158, 1.96 + 0.84])
def test_the_text_s_rounded_factors_pass(z: float) -> None:
    def answer(run: float, sample: float, samples: int, effect: float) -> Any:
        need = 2 * (run**2 + sample**2 / samples) * z**2 / effect**2
        return np.int64(max(1, -(-need // 1)))

    assert check.find("runs_needed")(answer).state == "passed"


def test_so_many_runs_find_the_effect_about_as_often_as_promised() -> None:
    draw = np.random.default_rng(3)
    for run, sample, samples, effect in ((0.01, 0.02, 4, 0.01), (0.02, 0.01, 20, 0.02)):
        runs = reference.runs_needed(run, sample, samples, effect)
        error = (run**2 + sample**2 / samples) ** 0.5
        before, after = error * draw.standard_normal((2, 20_000, runs)).mean(axis=2)
        found = (after + effect - before) / (error * (2 / runs) ** 0.5) > 1.96
        assert 0.78 < found.mean() < 0.9


# --- 15.4


def jumps(of: Any, threshold: float = 0.03) -> Any:
    def answer(runs: Sequence[Sequence[float]]) -> list[int]:
        levels = [of(run) for run in runs]
        return [i for i in range(1, len(levels)) if abs(levels[i] / levels[i - 1] - 1) > threshold]

    return answer


def test_waiting_one_night_is_not_enough_and_two_are() -> None:
    def patient(ahead: int) -> Any:
        def answer(runs: Sequence[Sequence[float]]) -> Any:
            m = [median(run) for run in runs]
            found, start = [], 0
            for i in range(3, len(m) - 1):
                near = m[max(start, i - 5) : i]
                if i - start > 2 and all(abs(x / median(near) - 1) > 0.03 for x in m[i : i + ahead]):
                    found.append(i)
                    start = i
            return np.array(found, dtype=int)

        return answer

    one, two = check.find("find_changes")(patient(1)), check.find("find_changes")(patient(3))
    assert one.state == "not yet" and two.state == "passed"
    assert one.score is not None and two.score is not None and two.score < one.score


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (jumps(mean), "a change stays"),
        (jumps(median), "a change stays"),
        (jumps(median, 0.5), "too cautious"),
        (lambda runs: [], "too cautious"),
        (lambda runs: range(len(runs)), "a change stays"),
        (lambda runs: [len(runs)], "from 0 to 23"),
        (lambda runs: [-1], "from 0 to 23"),
        (lambda runs: [6.5], "a list of nights"),
        (lambda runs: [True, False], "a list of nights"),
        (lambda runs: 7, "a list of nights"),
        (lambda runs: "7", "a list of nights"),
    ],
)
def test_find_changes_near_misses(answer: Any, words: str) -> None:
    refused("find_changes", answer, words)


def test_labkit_s_own_detector_is_refused_and_lies_between() -> None:
    def answer(runs: Any) -> list[int]:
        return [i for i, one in enumerate(changes(runs)) if one]

    refused("find_changes", answer, "changes")
    exam = cases.examination(10)

    def score(detector: Any) -> int:
        return sum(sum(cases.errors(detector(one.runs), one)) for one in exam)

    assert score(reference.find_changes) < score(answer) < score(jumps(mean))


def test_an_answer_cannot_spoil_the_histories_of_the_next() -> None:
    def answer(runs: list[list[float]]) -> list[int]:
        found = reference_free(runs)
        for run in runs:
            run.clear()
        return found

    def reference_free(runs: list[list[float]]) -> list[int]:
        return [0] if min(map(len, runs)) == 0 else []

    before = cases.examination(3)
    check.find("find_changes")(answer)
    assert cases.examination(3) == before


def test_histories_are_the_same_on_every_machine() -> None:
    """The par and the notebook's checked counts rest on them."""
    found = cases.examination()
    assert sum(len(one.changes) for one in found) == 41
    assert sum(len(one.changes) for one in cases.practice()) == 44
    assert found[0].runs[0][:3] == cases.simulated_history(1000).runs[0][:3]
    for one in found:
        assert len(one.runs) == cases.NIGHTS and {len(run) for run in one.runs} == {cases.SAMPLES}
        assert all(abs(night - change) >= 3 for night in one.busy for change in one.changes)


@given(st.sets(st.integers(0, cases.NIGHTS - 1)))
def test_errors_count_each_alarm_once(alarms: set[int]) -> None:
    truth = cases.Simulated([], (6, 16), ())
    false, missed = cases.errors(sorted(alarms), truth)
    assert false + (2 - missed) == len(alarms)
    assert missed == sum(not alarms & set(range(at, at + 3)) for at in (6, 16))
