"""Exercises of chapter 15: a case that cannot lie, what may be compared, runs needed, what changed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from labkit.bench.record import Entry
from labkit.check import Verdict, exercise, forbid_calls, not_yet, passed
from labkit.check import ch15_cases as cases
from labkit.check.normalise import items, plain_int
from labkit.errors import InputError
from labkit.results import schema

# --- 15.1


@exercise("15.1", title="A case that cannot lie")
def measure(answer: Callable[..., Any]) -> Verdict:
    """``measure(problem, samples)``: an Entry; nothing is timed that was not first found right."""
    forbid_calls(answer, ("interleave", "time_calls"))
    pattern = (0.05, 0.001, 0.0012, 0.0011, 0.004, 0.001)
    for seconds, samples in ((pattern, 5), ((0.2, 0.002), 8), ((3e-4, 2.5e-7), 12)):
        problem = cases.Problem(seconds)
        entry = _entry(answer(problem, samples), "timed")
        wanted = [1e6 * seconds[min(1 + i, len(seconds) - 1)] for i in range(samples)]
        _timed_well(entry, problem, wanted)
        if entry.error != {"max_abs": 1e-4, "bound": 1e-3}:
            return not_yet("error={'max_abs': 0.0001, 'bound': 0.001}", entry.error, "keep what error() said")
    for error in (2e-3, math.inf, math.nan):
        problem = cases.Problem(error=error)
        entry = _entry(answer(problem, 6), "wrong", f"an error of {error:g} where 0.001 is allowed")
        hint = "look at the result before the clock: what is wrong is not timed, however fast it is"
        if entry.samples_us or problem.readings:
            return not_yet("no samples, and no look at the clock", _shown(entry.samples_us), hint)
    for trouble in (RuntimeError("out of memory"), ValueError("m = 64 is no multiple of 128")):
        entry = _entry(answer(cases.Problem(raises=trouble), 6), "failed", "a call that raises")
        if str(trouble) not in entry.note or entry.samples_us:
            return not_yet(f"note with {str(trouble)!r}, no samples", _shown(entry.note), "say why it failed")
    return passed("timed, wrong or failed: each says so itself, and the record goes through the schema")


def _entry(got: Any, status: str, case: str = "a good problem") -> Entry:
    """An entry with this status that its record's schema takes."""
    from labkit.check.verdict import NotYet

    if not isinstance(got, Entry):
        raise NotYet(not_yet("an Entry", type(got).__name__, "Entry(**problem.place, status=..., ...)"))
    if got.status != status:
        hint = "NaN is above no bound, and below none: ask whether the error is within it" * (
            status == "wrong"
        )
        raise NotYet(not_yet(f"status {status!r} for {case}", repr(got.status), hint))
    if any(getattr(got, name) != value for name, value in cases.PLACE.items()):
        raise NotYet(not_yet("the place of the problem", _shown(got), "Entry(**problem.place, ...)"))
    # an infinite or missing error has no place in JSON: that of a wrong result may be left out
    kept = {name: value for name, value in got.error.items() if math.isfinite(value)}
    try:
        record = cases.lab_record(entries=[Entry(**{**vars(got), "error": kept})])
        schema.validated("your record", record.to_json())
    except (InputError, TypeError, ValueError) as error:
        raise NotYet(not_yet("an entry that the schema takes", error, "plain floats, in µs")) from None
    return got


def _timed_well(entry: Entry, problem: cases.Problem, wanted: list[float]) -> None:
    from labkit.check.verdict import NotYet

    got = list(entry.samples_us)
    if len(got) == len(wanted) and all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-3), got, wanted)):
        return
    hint = "one sample a call: clock, call, clock"
    if len(got) != len(wanted):
        hint = f"{len(wanted)} samples were asked for"
    elif math.isclose(got[0], 1e6 * problem.seconds[0], rel_tol=1e-3):
        hint = "the first call loads, compiles and allocates; make one before (the one that you check)"
    elif math.isclose(1e6 * got[0], wanted[0], rel_tol=1e-3):
        hint = "the clock says seconds, samples_us holds microseconds"
    elif max(got) >= 1e6:
        hint = "error() was between the two looks at the clock"
    raise NotYet(not_yet(_shown([round(one, 3) for one in wanted]), _shown(got), hint))


# --- 15.2

_HINTS = {
    "kind": "an emulated or simulated figure is no measured one",
    "problem": "the name of the benchmark, and its parameters",
    "device": "name, key and capability; two records that name no device are not of the same one",
    "power limit": "what only one of them says is not the same",
    "driver": "what only one of them says is not the same",
    "throttled": "any reading of either record; THROTTLED lists the reasons that count, 'idle' is none",
    "dirty": "either of them; a commit that is not named is as bad",
}


@exercise("15.2", title="May these be compared?")
def may_compare(answer: Callable[..., Any]) -> Verdict:
    """``may_compare(a, b)``: the reasons against it, none when a commit is all that differs."""
    forbid_calls(answer, ("why_not", "comparable", "throttling", "differences", "unnamed"))
    count = 0
    for what, a, b, wanted in cases.record_pairs():
        for one, other in ((a, b), (b, a)):
            count += 1
            found = items(answer(one, other))
            if found is None or not all(isinstance(reason, str) for reason in found):
                return not_yet("a set or list of reasons, empty when there is none", _shown(found))
            if unknown := set(found) - set(cases.REASONS):
                return not_yet("only words of REASONS", ", ".join(sorted(unknown)))
            if set(found) != wanted:
                reason = min(set(found) ^ wanted, key=cases.REASONS.index)
                expected = f"{_listed(wanted)} for {what}"
                return not_yet(expected, _listed(set(found)), f"{reason}: {_HINTS[reason]}")
    return passed(f"{count // 2} pairs, each in both orders; most of them prove nothing")


def _listed(reasons: set[str]) -> str:
    return ", ".join(sorted(reasons, key=cases.REASONS.index)) or "no reason against it"


# --- 15.3

_Z = statistics.NormalDist().inv_cdf


def _runs(run: float, sample: float, samples: int, effect: float) -> int:
    spread = 2 * (run**2 + sample**2 / samples)
    return max(1, math.ceil(spread * ((_Z(0.975) + _Z(0.8)) / effect) ** 2))


@exercise("15.3", title="How many runs?")
def runs_needed(answer: Callable[..., Any]) -> Verdict:
    """``runs_needed(run, sample, samples, effect)``: runs before and after, each."""
    for run, sample, samples, effect in (
        (0.01, 0.02, 20, 0.03),
        (0.01, 0.02, 2000, 0.03),
        (0.01, 0.02, 1, 0.03),
        (0.0, 0.02, 20, 0.03),
        (0.03, 0.02, 20, 0.03),
        (0.01, 0.0, 1, 0.01),
        (0.05, 0.10, 5, 0.02),
        (0.001, 0.001, 20, 0.05),
    ):
        wanted = _runs(run, sample, samples, effect)
        got = plain_int(answer(run, sample, samples, effect))
        got = int(got) if isinstance(got, float) and got.is_integer() else got
        if got != wanted or isinstance(got, bool):
            case = f"run {run:.1%}, sample {sample:.1%}, {samples} samples, effect {effect:.1%}"
            return not_yet(f"{wanted} for {case}", _shown(got), _why_runs(got, wanted, run, sample, samples))
    return passed("eight benches; look at the second: 100 times the samples, and hardly a run saved")


def _why_runs(got: Any, wanted: int, run: float, sample: float, samples: int) -> str:
    if isinstance(got, float):
        return "a whole number of runs, rounded up"
    if not isinstance(got, int):
        return "a number of runs"
    if wanted == 1 and got < 1:
        return "at least one run"
    if run and got < wanted:
        return (
            "a run's shift does not get smaller with its samples; and both sides are uncertain (a factor 2)"
        )
    return "variance of the mean of r runs: (run² + sample² / samples) / r; twice that for a difference"


# --- 15.4


@exercise(
    "15.4", title="What changed, and when?", par=9, limit=25, unit="false alarms and misses", none_ok=True
)
def find_changes(answer: Callable[..., Any]) -> Verdict:
    """``find_changes(runs)``: the nights at which the code changed; 40 histories, 41 changes."""
    forbid_calls(answer, ("changes", "gather", "of_folders"))
    false = missed = 0
    for truth in cases.examination():
        found = items(answer([list(run) for run in truth.runs]))
        nights = None if found is None else [plain_int(night) for night in found]
        whole = nights is not None and all(isinstance(night, int) for night in nights)
        if nights is None or not whole or any(isinstance(night, bool) for night in found or ()):
            return not_yet("a list of nights, such as [7, 15]; [] for none", _shown(found))
        if outside := [night for night in nights if not 0 <= night < len(truth.runs)]:
            return not_yet(f"nights from 0 to {len(truth.runs) - 1}", _shown(outside[0]))
        wrong, lost = cases.errors(nights, truth)
        false, missed = false + wrong, missed + lost
    hint = "a neighbour is gone after a night or two, a change stays: wait, and look at the nights after it"
    if missed > false:
        hint = "you miss more than you invent: the threshold, or what you compare with, is too cautious"
    return passed(f"{false} false alarms, {missed} of 41 changes missed", score=false + missed, hint=hint)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
