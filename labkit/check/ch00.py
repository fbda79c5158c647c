"""Exercises of chapter 00: read a report, read a score, plant a fault, trust a timing, read the card."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit import quoted
from labkit.check import Verdict, exercise, not_yet, passed
from labkit.check.normalise import pair
from labkit.widgets.machine_card import MachineCard

GIVEN = ("sample_report",)
"""What the notebook imports from here: an answer may use it."""

TRUSTED_SPREAD = 0.25
"""Exact in binary, so that a spread can equal it and `<` differs from `<=` on every machine."""


Finding = Mapping[str, str]


def right_headline(findings: Sequence[Finding]) -> str:
    """What ``headline`` has to return: counts in the order ok, notes, problems."""
    count = {state: sum(f["state"] == state for f in findings) for state in ("ok", "note", "problem")}
    return f"{count['ok']} ok, {count['note']} notes, {count['problem']} problems"


def _finding(name: str, state: str) -> dict[str, str]:
    return {
        "name": name,
        "state": state,
        "value": f"{name} as found",
        "fix": "" if state == "ok" else "do it",
    }


def sample_report() -> list[dict[str, str]]:
    """The small report that the notebook prints: four ok, one note, no problem."""
    names = (("python", "ok"), ("memory", "ok"), ("disk", "ok"), ("torch", "ok"), ("gpu", "note"))
    return [_finding(*pair) for pair in names]


def hidden_reports() -> list[list[dict[str, str]]]:
    """The 24 reports that a planted fault is tried on; unlike :func:`sample_report` on purpose."""
    reports = []
    for ok in (1, 3, 12):
        for note in (0, 2):
            for problem in (0, 1, 3):
                states = ["ok"] * ok + ["note"] * note + ["problem"] * problem
                reports.append([_finding(f"probe {i}", state) for i, state in enumerate(states)])
    two_gpus = [_finding("gpu", "ok"), _finding("gpu", "ok"), _finding("torch", "ok")]
    two_faults = [_finding("model", "problem"), _finding("model", "problem"), _finding("disk", "ok")]
    bare = [{**_finding("path", "problem"), "fix": ""}, _finding("python", "ok")]
    reports += [[], two_gpus, two_faults, bare]
    reports += [list(reversed(two_faults)), [_finding("gpu", "note")] * 2]
    return reports


@exercise("00.1", title="Read a report")
def headline(answer: Callable[[Sequence[Finding]], str]) -> Verdict:
    """Counts of a report, as one line."""
    for report in (sample_report(), *hidden_reports()):
        wanted, got = right_headline(report), answer(report)
        if got != wanted:
            states = ", ".join(finding["state"] for finding in report) or "no finding at all"
            shown = states if len(report) <= 6 else f"{len(report)} findings"
            return not_yet(repr(wanted), f"{got!r} for a report with {shown}", "count each state on its own")
    return passed("right for the small report and for 24 others")


@exercise("00.2", title="Read a score")
def read_score(answer: Callable[[float, float, float], str]) -> Verdict:
    """``"not yet"`` above the limit, ``"par"`` at par or better, else ``"passed"`` (lower is better)."""
    cases = [(96, 24, 32), (33, 24, 32), (32, 24, 32), (25, 24, 32), (24, 24, 32), (7, 24, 32), (1, 1, 1)]
    for score, par, limit in cases:
        wanted = "not yet" if score > limit else "par" if score <= par else "passed"
        if (got := answer(score, par, limit)) != wanted:
            hint = "lower is better here; a score that equals the limit still passes"
            return not_yet(f"{wanted!r} for score {score}, par {par}, limit {limit}", repr(got), hint)
    return passed("every score read as the course reads it")


@exercise("00.3", title="Plant a fault", par=2, limit=12, unit="reports of 24 that show it")
def plant_fault(answer: Callable[[Sequence[Finding]], str]) -> Verdict:
    """A faulty ``headline`` that the small report does not give away."""
    small = sample_report()
    if (got := answer(small)) != right_headline(small):
        hint = "anyone who runs your function once would see the fault: hide it from the small report"
        return not_yet(f"{right_headline(small)!r} for the small report", repr(got), hint)
    if answer(small) != got:
        return not_yet(
            "the same answer twice", "two different answers", "a fault that moves is another lesson"
        )
    shown = 0
    for report in hidden_reports():
        try:
            shown += answer(report) != right_headline(report)
        except Exception:  # a crash is a fault that shows
            shown += 1
    if shown == 0:
        hint = "think of a report that is empty, long, or names one probe twice"
        return not_yet("at least one report of 24 that shows the fault", "none: this function is right", hint)
    return passed("planted, and this check found it", score=shown)


@exercise("00.4", title="Trust a timing")
def steady(answer: Callable[[list[float]], Any]) -> Verdict:
    """(median of the calls after the first, whether their spread is at most 0.25 of it)."""
    cases = [
        [9.0, 1.0, 1.1, 1.0, 1.2],
        [1.0, 1.0, 5.0, 1.1, 1.2],
        [4.0, 2.0, 2.1, 2.0, 2.2, 2.1],
        [1.0, 3.0, 1.0, 1.0],
        [2.0, 1.0, 1.3],
        [9.0, 3.5, 4.0, 4.5],  # exactly 0.25: still at most; of the fastest it would be more
        [9.0, 2.0, 4.0, 4.0, 4.5],  # far below the median, near above it
        [9.0, 3.5, 4.0, 4.75],  # each call near the median, the ends far from each other
        [9.0, 4.0, 4.0, 4.0, 5.0625, 5.0625],  # above 0.25 of the median, below 0.25 of the mean
        [9.0, 5.0, 5.0, 5.0, 3.75, 3.75],  # and the other way round
    ]
    for seconds in cases:
        warm = seconds[1:]
        median = statistics.median(warm)
        trusted = max(warm) - min(warm) <= TRUSTED_SPREAD * median
        given = list(seconds)
        got = answer(given)
        if given != seconds:
            return not_yet("the list left as it was", "a changed list", "sort a copy: sorted(seconds[1:])")
        if not _is_pair_of(got, median, trusted):
            hint = "leave the first call out; then median, and (slowest - fastest) <= 0.25 * median"
            return not_yet(f"({median:g}, {trusted}) for {seconds}", repr(got), hint)
    return passed("first call left out, median taken, spread judged")


def _is_pair_of(got: Any, median: float, trusted: bool) -> bool:
    if (two := pair(got)) is None:
        return False
    try:
        return abs(float(two[0]) - median) <= 1e-9 and float(two[1]) == trusted
    except (TypeError, ValueError, RuntimeError):
        return False


@exercise("00.5", title="Read the machine card")
def fits_w4(answer: Sequence[str]) -> Verdict:
    """Keys of the models that fit the target card in W4 with 8192 tokens of context."""
    wanted = set()
    for key in quoted.models():
        if MachineCard(model=key, bits=4, context=8192).fits:
            wanted.add(key)
    given = {answer} if isinstance(answer, str) else {str(key).strip().lower() for key in answer}
    if unknown := given - set(quoted.models()):
        return not_yet("keys such as " + ", ".join(quoted.models()), ", ".join(sorted(unknown)), "copy a key")
    if too_much := given - wanted:
        hint = "set the widget to that model and look at the red line"
        return not_yet("only models that fit", ", ".join(sorted(too_much)) + " does not fit", hint)
    if missing := wanted - given:
        return not_yet(
            f"{len(wanted)} models", f"{len(given)}; {len(missing)} more fit", "try each model once"
        )
    return passed("these fit the 4 GiB card: " + ", ".join(sorted(wanted)))
