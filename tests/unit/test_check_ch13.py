"""Checks of chapter 13: own answers pass, usual mistakes get their hint."""

from __future__ import annotations

from typing import Any

import pytest
from check_answers import refused
from hypothesis import given
from hypothesis import strategies as st

from labkit import check
from labkit.bench import pareto
from labkit.bench.trial import trial
from labkit.check import ch13
from labkit.engine.adaptive import Adaptive
from labkit.engine.cost_model import rtx3050
from labkit.engine.metrics import Slo
from labkit.engine.policy import DECODE, Mixed, Overlap, Pick, Serial, Sliced
from labkit.errors import InputError
from labkit.solutions import ch13 as reference

# --- the trial


def test_a_trial_says_what_the_benchmark_says() -> None:
    found = trial("serial:128")
    assert found.max_gap == pytest.approx(0.6605) and not found.problem
    assert found.rate == pytest.approx(1024 / found.ttft)
    assert trial(Serial(128)) == found
    assert trial("overlap:128").max_gap == pytest.approx(0.6489)


def test_a_trial_refuses_what_is_no_policy() -> None:
    with pytest.raises(InputError, match="policy"):
        trial("fastest")


def test_streams_that_end_first_are_said() -> None:
    assert "ran beside" in trial("mixed:1", document=4096).problem


def test_adaptive_overshoots_for_its_rungs_not_for_its_looks() -> None:
    """What the chapter's first wrong turn says."""
    bound = 0.370
    slo = Slo(max_gap=bound)
    ladder = (Sliced(512, budget=bound / 4), Mixed(32), Mixed(128), Overlap(256), Overlap(512))
    usual, eager = (trial(Adaptive(slo, ladder, foresight=False, trial=looks)) for looks in (4, 1))
    assert usual.max_gap == eager.max_gap > 1.5 * bound
    assert usual.max_gap == pytest.approx(trial("mixed:128").max_gap)
    fitting = (Mixed(16), Mixed(28), Mixed(48), Mixed(70))
    fitted = trial(Adaptive(slo, fitting, foresight=False))
    assert fitted.max_gap <= bound
    assert usual.rate < fitted.rate < trial("mixed:70").rate
    asks, doubles = trial(Adaptive(slo, ladder)), trial(Adaptive(slo))
    assert asks.max_gap == pytest.approx(trial("mixed:32").max_gap)
    assert asks.max_gap < doubles.max_gap <= bound and asks.rate < usual.rate < doubles.rate


# --- 13.1


def by_hand(*, step_too: bool = False, rows_too: bool = True, over: bool = False) -> Any:
    """The reference with a mistake."""

    def answer(step: Any, chunk: Any, rest: Any, rows: Any, tokens: Any) -> Any:
        slope = (chunk[1] - rest[1]) / (chunk[0] - rest[0])
        gap = rest[1] + slope * (rows * rows_too + tokens - rest[0]) + step * step_too
        serial = chunk[0] / (chunk[1] + step)
        share = tokens / gap / serial
        return gap, 1 / share if over else share

    return answer


def test_an_own_answer_passes() -> None:
    assert check.find("mixed_by_hand")(by_hand()).state == "passed"


def test_by_hand_is_what_the_clock_says() -> None:
    for tokens in (28, 60):
        gap, _ = reference.mixed_by_hand(*ch13.article_sizes(), 4, tokens)
        assert trial(f"mixed:{tokens}").max_gap == pytest.approx(gap)
        assert gap == pytest.approx(rtx3050().products(4 + tokens))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_hand(step_too=True), "no step of their own"),
        (by_hand(rows_too=False), "rows of that forward too"),
        (by_hand(over=True), "over chunk tokens"),
        (lambda *args: 0.2, "(gap in seconds, share)"),
        (lambda *args: ("a", "b"), "(gap in seconds, share)"),
        (lambda *args: (float("nan"), 1.0), "a line through"),
        (lambda step, chunk, rest, rows, tokens: (rtx3050().products(rows + tokens), 1.0), "products"),
    ],
)
def test_by_hand_near_misses(answer: Any, words: str) -> None:
    refused("mixed_by_hand", answer, words)


# --- 13.2


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12, unique=True))
def test_the_reference_has_the_librarys_front(cloud: list[tuple[int, int]]) -> None:
    points = [ch13._point(f"{at}", gap, rate) for at, (gap, rate) in enumerate(cloud)]
    labelled = [(one.label, one.max_gap, one.prompt_rate) for one in points]
    wanted = [one.label for one in pareto.front(points)]
    assert reference.pareto_front(labelled) == wanted
    assert unbeaten(labelled) == wanted


def strict_front(points: Any) -> Any:
    """Beaten only by what is better in both."""
    kept = [p for p in points if not any(q[1] < p[1] and q[2] > p[2] for q in points)]
    return [one[0] for one in sorted(kept, key=lambda one: one[1])]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (strict_front, "one of them better"),
        (lambda points: [one[0] for one in points], "beats"),
        (lambda points: unbeaten(points)[::-1], "smallest gap first"),
        (lambda points: unbeaten(points)[:1], "nothing beats"),
        (lambda points: ["z"], "no label"),
        (lambda points: 3, "a list of labels"),
        (lambda points: [pareto.front(points)], "front"),
    ],
)
def test_front_near_misses(answer: Any, words: str) -> None:
    refused("pareto_front", answer, words)


def beats(one: Any, other: Any) -> bool:
    return one[0] <= other[0] and one[1] >= other[1] and one != other


def unbeaten(points: Any) -> list[str]:
    kept = [one for one in points if not any(beats(other[1:], one[1:]) for other in points)]
    return [one[0] for one in sorted(kept, key=lambda one: one[1])]


# --- 13.3


def proofs(cases: Any) -> dict[str, Any]:
    return {
        mine[0]: (case, mine[1], other[1])
        for case, points in cases.items()
        for mine in points
        for other in points
        if other[0] != mine[0] and beats(other[2:], mine[2:])
    }


def test_own_proofs_pass() -> None:
    assert check.find("where_each_loses")(proofs).state == "passed"


def test_on_the_simulated_card_every_policy_but_mixed_and_ticks_loses() -> None:
    assert set(proofs(ch13._simulated_cases())) == {"serial", "overlap", "sliced"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda cases: {}, "an entry for"),
        (lambda cases: [], "a dict by policy"),
        (lambda cases: {"mixed": ("nowhere", "a", "b")}, "one of"),
        (lambda cases: {"mixed": "mixed:64"}, "label of the winner"),
        (lambda cases: {"ticks": ("slow card, max", "ticks:512", "mixed:64")}, "gap"),
        (lambda cases: {"mixed": ("slow card, max", "mixed:128", "mixed:64")}, "another policy"),
        (lambda cases: {"mixed": ("slow card, max", "serial:128", "mixed:64")}, "a point of mixed"),
        (lambda cases: {"mixed": ("slow card, max", ["mixed:64"], "mixed:64")}, "answer that runs"),
        (lambda cases: {"mixed": ("slow card, max", "mixed:63", "serial:128")}, "two labels"),
    ],
)
def test_where_each_loses_near_misses(answer: Any, words: str) -> None:
    refused("where_each_loses", answer, words)


# --- 13.4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("overlap:128", "649 ms"),
        ("mixed:48", "252 ms"),
        ("adaptive@370ms", "352 ms"),
        ("adaptive@250ms", "reads the weights"),
        ("dynamic:512@250ms", "288 ms"),
        ("ticks:512", "8.3"),
        ("sliced:512@100ms", "reads the weights"),
        ("mixed:32", "reads the weights"),
        ("mixed", "321 ms"),
        ("fastest", "NAME[:CHUNK][@TARGET]"),
        ("mixed:0", "NAME[:CHUNK][@TARGET]"),
        ("mixed:64@5ms", "NAME[:CHUNK][@TARGET]"),
        (64, "as text"),
        (Mixed(47), "as text"),
    ],
)
def test_hold_sla_near_misses(answer: Any, words: str) -> None:
    verdict = check.find("hold_sla")(answer)
    assert verdict.state == "not yet", verdict
    assert words in f"{verdict.expected} {verdict.got} {verdict.hint} {verdict.score_line()}", verdict


def test_no_other_mixed_chunk_is_better_than_par() -> None:
    found = {chunk: trial(f"mixed:{chunk}") for chunk in range(30, 60)}
    held = {chunk: one.ttft for chunk, one in found.items() if one.max_gap <= ch13.BOUND}
    assert min(held, key=held.__getitem__) == 47
    assert check.find("hold_sla")("mixed:44").state == "passed"


# --- 13.5


def fixed(tokens: int, alone: int = 128) -> Any:
    def answer(view: Any, seconds: Any, bound: Any) -> Any:
        if view.prefill_waits:
            return Pick("mixed", tokens) if view.ready else Pick("prefill", alone)
        return DECODE

    return answer


def test_no_fixed_chunk_passes() -> None:
    for tokens in (20, 26, 27):
        verdict = check.find("next_work")(fixed(tokens))
        assert verdict.state == "not yet" and "fill the bound" in verdict.hint
        assert verdict.score is not None and verdict.score > 10.9
    refused("next_work", fixed(28), "with 24 streams")
    refused("next_work", fixed(47), "with 8 streams")


def test_an_own_policy_passes_above_par() -> None:
    def careful(view, seconds, bound):
        if view.prefill_waits and view.ready:
            least = max(n for n in range(1, 256) if n == 1 or seconds(view.ready + n) <= 0.97 * bound)
            return Pick("mixed", least)
        return Pick("prefill", 64) if view.prefill_waits else DECODE

    verdict = check.find("next_work")(careful)
    assert verdict.state == "passed" and verdict.score is not None and verdict.score > ch13.PAR


def decode_only(view: Any, seconds: Any, bound: Any) -> Any:
    return DECODE


def alternating(view: Any, seconds: Any, bound: Any) -> Any:
    if not view.in_flight:
        return Pick("prefill", 16) if view.prefill_waits else DECODE
    return None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (decode_only, "stuck"),
        (alternating, "a run that counts"),
        (lambda view, seconds, bound: "mixed:64", "Pick"),
        (lambda view, seconds, bound: 28, "Pick"),
        (lambda view, seconds, bound: Pick("slice", 64), "decode, prefill or mixed"),
        (lambda view, seconds, bound: Pick("mixed", 0), "at least one whole token"),
        (lambda view, seconds, bound: Pick("mixed", 2.5), "at least one whole token"),  # type: ignore[arg-type]
        (lambda view, seconds, bound: Mixed(28).pick(view), "Mixed"),
    ],
)
def test_next_work_near_misses(answer: Any, words: str) -> None:
    refused("next_work", answer, words)
