"""Checks of chapter 16: own answers pass, usual mistakes get their hint."""

from __future__ import annotations

import itertools
from typing import Any

from check_answers import refused

from labkit import check
from labkit.check import ch16

# --- 16.1


def test_hours_filled_without_needs_too_long_or_unsorted() -> None:
    def without_needs(minutes: int, wishes: Any) -> list[str]:
        out = []
        for number, cost, _ in wishes:
            if cost <= minutes:
                out.append(number)
                minutes -= cost
        return sorted(out)

    refused("fill_hours", without_needs, "needs")
    refused("fill_hours", lambda minutes, wishes: ["00", "01"], "longer than there is time")
    refused("fill_hours", lambda m, w: list(reversed(_fill(m, w))), "in course order")
    refused("fill_hours", lambda m, w: _fill(m, w)[:1], "go through the wishes")
    refused("fill_hours", lambda m, w: 5, "[] for 0 minutes")

    def stops_at_the_first_that_does_not_fit(minutes: int, wishes: Any) -> list[str]:
        chosen: list[str] = []
        for at in range(len(wishes)):
            more = _fill(minutes, wishes[: at + 1] + [one for one in wishes[at + 1 :] if False])
            if wishes[at][0] not in more:
                break
            chosen = more
        return sorted(chosen)

    assert check.fill_hours(stops_at_the_first_that_does_not_fit).state == "not yet"


def _fill(minutes: int, wishes: Any) -> list[str]:
    """Another way to the same: by trying every set, the wishes deciding in their order."""
    known = {number: (cost, needs) for number, cost, needs in wishes}
    chosen: set[str] = set()
    for number, _, _ in wishes:
        best = None
        for size in range(1, len(known) + 1):
            for extra in itertools.combinations(sorted(known), size):
                trial = chosen | set(extra)
                whole = all(need in trial for one in trial for need in known.get(one, (0, ()))[1])
                if number in trial and whole and best is None:
                    best = trial
        if best is not None and sum(known[one][0] for one in best) <= minutes:
            chosen = best
    return sorted(chosen)


def test_another_way_to_fill_the_hours_passes() -> None:
    assert check.fill_hours(_fill).state == "passed"


# --- 16.2


def test_sticks_with_the_usual_mistakes() -> None:
    def parts(gigabytes: float, laptops: int, speed: float, minutes: float) -> int:
        return -(-int(laptops * gigabytes * 1000 / speed) // int(minutes * 60))

    refused("sticks", parts, "whole copies only")
    refused("sticks", lambda g, n, s, m: 1, "whole copies")
    refused("sticks", lambda g, n, s, m: _sticks(g, n, s, m) or 0, "no number of sticks helps")
    assert check.sticks(_sticks).state == "passed"


def _sticks(gigabytes: float, laptops: int, speed: float, minutes: float) -> int | None:
    """By counting up."""
    for number in range(1, laptops + 1):
        one = -(-laptops // number)
        if one * gigabytes * 1000 / speed <= minutes * 60:
            return number
    return None


# --- 16.3


def test_the_papers_are_what_the_chapter_says() -> None:
    claimed = ch16.claims_made(ch16.bank())
    assert sum(claimed.values()) == 5 and sum(ch16.POINTS.values()) == 3
    alone = {}
    for paper in ch16.bank():
        try:
            alone[paper["student"]] = int(ch16.toy_judge(paper["answer"], [list(one) for one in ch16.CASES]))
        except BaseException:
            alone[paper["student"]] = 0
    assert alone == ch16.POINTS


def grader(*, copies: str = "deep", stops: Any = BaseException, claims: bool = False) -> Any:
    """A grader with one mistake."""

    def grade_all(papers: Any, judge: Any, cases: Any) -> dict[str, int]:
        points = {}
        for paper in papers:
            given = {"deep": [list(one) for one in cases], "shallow": list(cases), "none": cases}[copies]
            try:
                points[paper["student"]] = int(judge(paper["answer"], given))
            except stops:
                points[paper["student"]] = 0
            if claims:
                points[paper["student"]] = int("passed" in paper["output"])
        return points

    return grade_all


def test_graders_that_trust() -> None:
    assert check.grade_all(grader()).state == "passed"
    refused("grade_all", grader(claims=True), "is no evidence")
    refused("grade_all", grader(copies="none"), "copy of its own")
    refused("grade_all", grader(copies="shallow"), "copy of its own")
    refused("grade_all", grader(stops=Exception), "the grading ended")
    refused("grade_all", grader(stops=(Exception, SystemExit)), "KeyboardInterrupt")
    refused("grade_all", lambda papers, judge, cases: {}, "one entry a student")
    refused("grade_all", lambda papers, judge, cases: {p["student"]: 1 for p in papers}, "student 2")


# --- 16.4


def test_the_odd_exercise_and_its_neighbours() -> None:
    def lowest_share(table: Any) -> int:
        shares = [sum(row[column] for row in table) for column in range(len(table[0]))]
        return shares.index(min(shares))

    def with_itself(table: Any) -> int:
        def value(column: int) -> float:
            order = sorted(table, key=lambda row: -sum(row))
            half = len(table) // 2
            return sum(row[column] for row in order[:half]) - sum(row[column] for row in order[-half:])

        return min(range(len(table[0])), key=value)

    refused("odd_exercise", lowest_share, "the discriminations are")
    refused("odd_exercise", with_itself, "*other* exercises")
    refused("odd_exercise", lambda table: "x", "'x'")
    import numpy as np

    def by_numpy(table: Any) -> Any:
        rows = np.array(table)
        others = rows.sum(axis=1, keepdims=True) - rows
        half = len(rows) // 2
        order = np.argsort(-others, axis=0, kind="stable")
        ranked = np.take_along_axis(rows, order, axis=0)
        return np.argmin(ranked[:half].sum(axis=0) - ranked[-half:].sum(axis=0))

    assert check.odd_exercise(by_numpy).state == "passed"


def test_no_table_depends_on_how_ties_are_sorted() -> None:
    for table in ch16._tables():
        values = [ch16._discrimination(table, column) for column in range(len(table[0]))]
        turned = [ch16._discrimination(table[::-1], column) for column in range(len(table[0]))]
        assert values == turned and values.count(min(values)) == 1
