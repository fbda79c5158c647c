"""Chapter 00's checks: right answers pass, near misses do not."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pytest

from labkit import check
from labkit.check import ch00
from labkit.solutions import ch00 as reference


def test_there_are_24_hidden_reports_unlike_the_small_one() -> None:
    reports = ch00.hidden_reports()
    assert len(reports) == 24 and ch00.sample_report() not in reports and [] in reports


def test_headline_names_the_wrong_line() -> None:
    verdict = check.find("headline")(lambda findings: f"{len(findings)} ok, 0 notes, 0 problems")
    assert verdict.state == "not yet"
    assert "4 ok, 1 notes, 0 problems" in verdict.expected and verdict.hint


def own_headline(findings: Any) -> str:
    states = [finding["state"] for finding in findings]
    return f"{states.count('ok')} ok, {states.count('note')} notes, {states.count('problem')} problems"


def test_planted_fault_scores_by_how_often_it_shows() -> None:
    plant = check.find("plant_fault")
    assert plant.function(reference.plant_fault).score == 2

    def loud(findings: Any) -> str:
        return "0 ok, 0 notes, 0 problems" if len(findings) != 5 else own_headline(findings)

    verdict = plant(loud)
    assert verdict.state == "not yet" and verdict.score is not None and verdict.score > 12

    def crash(findings: Any) -> str:
        return own_headline(findings) if findings[0] else ""

    assert plant(crash).score == 1  # only the empty report shows it


@pytest.mark.parametrize("answer", [own_headline, lambda findings: "wrong at once"])
def test_no_fault_and_an_open_fault_do_not_pass(answer: Any) -> None:
    assert check.find("plant_fault")(answer).state == "not yet"


@pytest.mark.parametrize(
    "answer",
    [
        lambda score, par, limit: "passed" if score < limit else "not yet",
        lambda score, par, limit: "par" if score < par else "passed" if score <= limit else "not yet",
    ],
)
def test_read_score_boundaries(answer: Any) -> None:
    assert check.find("read_score")(answer).state == "not yet"


def own_steady(s: list[float]) -> tuple[float, bool]:
    return median(s[1:]), (max(s[1:]) - min(s[1:])) / median(s[1:]) <= 0.25


@pytest.mark.parametrize("dress", [tuple, list, np.array, lambda two: (np.float64(two[0]), np.bool_(two[1]))])
def test_steady_takes_any_sequence_of_two(dress: Any) -> None:
    verdict = check.find("steady")(lambda s: dress(own_steady(s)))
    assert verdict.state == "passed", verdict


def test_the_notebook_names_the_threshold(checkout: Path) -> None:
    text = (checkout / "notebooks" / "00_start_here.ipynb").read_text(encoding="utf-8")
    assert f"when their spread is at most {ch00.TRUSTED_SPREAD:g}." in text


@pytest.mark.parametrize(
    "answer",
    [
        lambda s: (sorted(s)[len(s) // 2], True),
        lambda s: (sum(s[1:]) / len(s[1:]), max(s[1:]) - min(s[1:]) <= 0.3),
        lambda s: s.sort() or own_steady(s),
        lambda s: (median(s[1:]), (max(s[1:]) - median(s[1:])) / median(s[1:]) <= 0.25),
        lambda s: (median(s[1:]), (median(s[1:]) - min(s[1:])) / median(s[1:]) <= 0.25),
        lambda s: (median(s[1:]), (max(s[1:]) - min(s[1:])) / mean(s[1:]) <= 0.25),
        lambda s: (median(s[1:]), (max(s[1:]) - min(s[1:])) / min(s[1:]) <= 0.25),
        lambda s: (median(s[1:]), (max(s[1:]) - min(s[1:])) / max(s[1:]) <= 0.25),
        lambda s: (median(s[1:]), (max(s[1:]) - min(s[1:])) / median(s[1:]) < 0.25),
        lambda s: (median(s[1:]), max(abs(x - median(s[1:])) for x in s[1:]) <= 0.25 * median(s[1:])),
        lambda s: (median(s[1:]), max(s[1:]) - min(s[1:]) <= 0.3 * median(s[1:])),
        lambda s: (own_steady(s)[0], str(own_steady(s)[1])),
        lambda s: {own_steady(s)[0], own_steady(s)[1]},
        lambda s: 1.0,
    ],
)
def test_steady_near_misses(answer: Any) -> None:
    assert check.find("steady")(answer).state == "not yet"


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (["qwen2.5-7b"], "does not fit"),
        (["smollm2-135m"], "3 more fit"),
        (["gpt"], "gpt"),
        ("qwen2.5-3b", "3 more fit"),
    ],
)
def test_fits_w4_near_misses(answer: Any, part: str) -> None:
    verdict = check.find("fits_w4")(answer)
    assert verdict.state == "not yet" and part in verdict.got
