"""Checks of chapter 11: own answers pass, usual mistakes get their hint."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from check_answers import refused
from hypothesis import given
from hypothesis import strategies as st

from labkit import check
from labkit.check import ch11
from labkit.engine import metrics, policy
from labkit.engine.admission import Claim, future_peak
from labkit.engine.request import Request
from labkit.engine.sampling import SamplingParams
from labkit.solutions import ch11 as reference

# --- 11.1


def test_the_log_says_what_the_librarys_metrics_say() -> None:
    found = []
    for name in "abcde":
        arrival = next(at for at, who, what in ch11.LOG if (who, what) == (name, "arrive"))
        request = Request(name, (1,), SamplingParams(), arrival)
        for at, who, what in ch11.LOG:
            if (who, what) == (name, "token"):
                request.add_token(0, at)
        found.append(request)
    assert {one.id: metrics.ttft(one) for one in found if one.token_times} == ch11.TTFTS
    assert {one.id: tpot for one in found if (tpot := metrics.tpot(one)) is not None} == ch11.TPOTS
    assert sorted(gap for one in found for gap in metrics.gaps(one)) == list(ch11.GAPS)


def latencies(
    *, since: str = "arrive", count: int = 1, first_gap: bool = False, pooled: bool = False, alone: Any = None
) -> Any:
    """The reference with a mistake."""

    def answer(events: Any) -> Any:
        ttft, tpot, gaps = {}, {}, []
        for name in dict.fromkeys(who for _, who, _ in events):
            start = next(at for at, who, what in events if (who, what) == (name, since))
            times = [at for at, who, what in events if (who, what) == (name, "token")]
            if not times:
                continue
            ttft[name] = times[0] - start
            if len(times) - count > 0:
                tpot[name] = (times[-1] - times[0]) / (len(times) - count)
            elif alone is not None:
                tpot[name] = alone
            times = [start, *times] if first_gap else times
            gaps += [b - a for a, b in itertools.pairwise(times)]
        if pooled:
            times = sorted(at for at, _, what in events if what == "token")
            gaps = [b - a for a, b in itertools.pairwise(times)]
        return ttft, tpot, gaps

    return answer


def test_an_own_answer_passes() -> None:
    assert check.find("latencies")(latencies()).state == "passed"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (latencies(since="start"), "the queue counts"),
        (latencies(count=0), "tokens − 1"),
        (latencies(first_gap=True), "the wait for the first token"),
        (latencies(pooled=True), "same request"),
        (lambda events: 3, "dict of TTFT"),
        (lambda events: ({"c": 1.0}, {}, []), "TTFT of a"),
        (lambda events: ({"a": 1.0, "b": 0.75, "c": 1.0}, {}, []), "never had a token"),
        (latencies(alone=0.0), "two tokens"),
    ],
)
def test_latencies_near_misses(answer: Any, words: str) -> None:
    refused("latencies", answer, words)


# --- 11.2


@given(st.integers(1, 64), st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_the_reference_shares_as_the_library_does(budget: int, wanted: list[int]) -> None:
    given_ = reference.share_chunk(budget, list(wanted))
    assert given_ == policy.share(budget, wanted)


def in_order(order: Any) -> Any:
    """Prompts get what they want one after the other, in an order."""

    def answer(budget: int, wanted: list[int]) -> list[int]:
        given_ = [0] * len(wanted)
        for at in order(wanted):
            given_[at] = min(wanted[at], budget)
            budget -= given_[at]
        return given_

    return answer


def evenly(budget: int, wanted: list[int]) -> list[int]:
    given_ = [0] * len(wanted)
    while budget and sum(given_) < sum(wanted):
        for at, want in enumerate(wanted):
            if budget and given_[at] < want:
                given_[at], budget = given_[at] + 1, budget - 1
    return given_


def test_the_book_first_is_too_slow_for_the_others() -> None:
    verdict = check.find("share_chunk")(in_order(lambda wanted: range(len(wanted))))
    assert verdict.state == "not yet" and verdict.score is not None and verdict.score > 4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (in_order(lambda wanted: sorted(range(len(wanted)), key=wanted.__getitem__)), "every chunk"),
        (evenly, "every chunk"),
        (lambda budget, wanted: [min(budget, wanted[0])] + [0] * (len(wanted) - 1), "leaves over"),
        (lambda budget, wanted: [budget] * len(wanted), "nobody gets more"),
        (lambda budget, wanted: [1.5] * len(wanted), "whole numbers"),
        (lambda budget, wanted: 7, "whole numbers"),
    ],
)
def test_share_chunk_near_misses(answer: Any, words: str) -> None:
    refused("share_chunk", answer, words)


def test_the_librarys_share_is_refused() -> None:
    def borrowed(budget, wanted):
        return policy.share(budget, wanted)

    refused("share_chunk", borrowed, "share")


# --- 11.3


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=7), st.integers(1, 400)
)
def test_the_reference_admits_by_the_librarys_peak(queue: list[tuple[int, int]], slots: int) -> None:
    half = len(queue) // 2
    count = reference.admit(queue[half:], queue[:half], slots)

    def peak(requests: list[tuple[int, int]]) -> int:
        claims = [
            Claim(range(1000 * at, 1000 * at + held), held, left, settled=True)
            for at, (held, left) in enumerate(requests)
        ]
        return future_peak(claims, 1)

    started = queue[:half] + queue[half : half + count]
    assert count == 0 or peak(started) <= slots
    if half + count < len(queue):
        assert peak([*started, queue[half + count]]) > slots


def by_sum(of: Any) -> Any:
    """Start as long as a sum over all stays within the slots."""

    def answer(waiting: Any, running: Any, slots: int) -> int:
        count = 0
        while count < len(waiting) and sum(map(of, running + waiting[: count + 1])) <= slots:
            count += 1
        return count

    return answer


def test_final_lengths_are_safe_but_too_slow() -> None:
    verdict = check.find("admit")(by_sum(sum))
    assert verdict.state == "not yet" and verdict.score is not None and verdict.score > 1.3 * ch11.PAR
    assert "who has left" in verdict.hint


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_sum(lambda one: one[0]), "ends with 20"),
        (by_sum(lambda one: one[0] + one[1] // 2), "ends with 20"),
        (lambda waiting, running, slots: 0, "nobody is started"),
        (lambda waiting, running, slots: 99, "0 to"),
        (lambda waiting, running, slots: 1.5, "whole number"),
    ],
)
def test_admit_near_misses(answer: Any, words: str) -> None:
    refused("admit", answer, words)


def test_who_looks_at_the_end_alone_overflows_in_the_middle() -> None:
    def last_moment(waiting, running, slots):
        def then(requests):
            steps = max(left for _, left in requests)
            return sum(held + left for held, left in requests if left == steps)

        count = 0
        while count < len(waiting) and then(running + waiting[: count + 1]) <= slots:
            count += 1
        return count

    assert check.find("admit")(last_moment).state == "not yet"


# --- 11.4


def one_by_one(rows: Any, forward: Any) -> Any:
    try:
        return dict(zip(rows, forward(rows))), {}
    except Exception:
        tokens, errors = {}, {}
    for row in rows:
        try:
            tokens[row] = forward([row])[0]
        except Exception as error:
            errors[row] = str(error)
    return tokens, errors


def test_one_by_one_passes_above_par() -> None:
    verdict = check.find("end_alone")(one_by_one)
    assert (verdict.state, verdict.score) == ("passed", 9)


def only_memory(rows: Any, forward: Any) -> Any:
    tokens, errors = {}, {}
    try:
        return dict(zip(rows, forward(rows))), {}
    except MemoryError:
        pass
    for row in rows:
        try:
            tokens[row] = forward([row])[0]
        except MemoryError as error:
            errors[row] = str(error)
    return tokens, errors


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (only_memory, "ValueError"),
        (lambda rows, forward: ({}, dict.fromkeys(rows, "out of blocks")), "errors of"),
        (
            lambda rows, forward: (one_by_one(rows, forward)[0] | {"a": 1}, one_by_one(rows, forward)[1]),
            "any company",
        ),
        (
            lambda rows, forward: (
                one_by_one(rows, forward)[0],
                dict.fromkeys(one_by_one(rows, forward)[1], ""),
            ),
            "why",
        ),
        (lambda rows, forward: 5, "dict of tokens"),
    ],
)
def test_end_alone_near_misses(answer: Any, words: str) -> None:
    refused("end_alone", answer, words)


def test_a_batch_that_is_in_order_takes_one_forward() -> None:
    def never_together(rows, forward):
        tokens, errors = {}, {}
        for row in rows:
            try:
                tokens[row] = forward([row])[0]
            except Exception as error:
                errors[row] = str(error)
        return tokens, errors

    refused("end_alone", never_together, "batching")
