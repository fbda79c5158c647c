"""Exercises of chapter 16: fill the hours, count the sticks, grade without trust, find the odd exercise."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from labkit.check import Verdict, exercise, forbid_calls, not_yet, passed
from labkit.check.normalise import items, plain_int

GIVEN = ("CASES", "TABLE", "toy_judge", "claims_made", "bank")
"""What the notebook imports from here: an answer may use it."""

# --- 16.1

Wish = tuple[str, int, tuple[str, ...]]
"""(chapter, minutes, chapters it needs)."""

COURSE: tuple[Wish, ...] = (
    ("12", 60, ("11",)),
    ("01", 45, ("00",)),
    ("11", 75, ("01",)),
    ("00", 25, ()),
    ("03", 75, ("01",)),
    ("07", 45, ("03", "01")),
)
"""In the order of wish."""


def _filled(minutes: int, wishes: Sequence[Wish]) -> list[str]:
    known = {number: (cost, needs) for number, cost, needs in wishes}
    chosen: set[str] = set()
    for number, _, _ in wishes:
        missing, waiting = set[str](), [number]
        while waiting:
            one = waiting.pop()
            if one not in chosen and one not in missing:
                missing.add(one)
                waiting += known[one][1]
        cost = sum(known[one][0] for one in missing)
        if cost <= minutes:
            chosen |= missing
            minutes -= cost
    return sorted(chosen)


@exercise("16.1", title="Fill the hours")
def fill_hours(answer: Callable[..., Any]) -> Verdict:
    """``fill_hours(minutes, wishes)``: chapters that fit, with what they need, in course order."""
    forbid_calls(answer, ("plan", "_filled"))
    for minutes in (0, 25, 69, 70, 145, 144, 205, 220, 265, 280, 325, 400):
        wanted = _filled(minutes, COURSE)
        found = items(answer(minutes, list(COURSE)))
        got = None if found is None else [str(one) for one in found]
        if got != wanted:
            return not_yet(f"{wanted} for {minutes} minutes", _shown(got), _why(minutes, wanted, got or []))
    return passed("12 lengths of a class, nobody meets a chapter that they are not ready for")


def _why(minutes: int, wanted: list[str], got: list[str]) -> str:
    known = {number: (cost, needs) for number, cost, needs in COURSE}
    if sorted(got) == wanted:
        return "in course order"
    for one in got:
        if one in known and (lost := set(known[one][1]) - set(got)):
            return f"{one} needs {', '.join(sorted(lost))}"
    if all(one in known for one in got) and sum(known[one][0] for one in got) > minutes:
        return "that takes longer than there is time"
    return "go through the wishes in order; take one together with all that it still needs, if that fits"


# --- 16.2


@exercise("16.2", title="How many sticks?")
def sticks(answer: Callable[..., Any]) -> Verdict:
    """``sticks(gigabytes, laptops, mb_per_s, minutes)``: the fewest that do, None when no number does."""
    for gigabytes, laptops, speed, minutes in (
        (2.0, 30, 100, 20),
        (2.0, 1, 100, 20),
        (3.0, 30, 50, 10),
        (3.0, 30, 50, 1),
        (3.0, 7, 50, 2),
        (3.0, 7, 50, 1.5),  # a copy and a half is one copy
        (1.2, 30, 20, 1),
        (1.2, 30, 20, 0.5),
        (1.2, 60, 40, 45),
    ):
        copies = int(minutes * 60 * speed // (gigabytes * 1000))
        wanted = -(-laptops // copies) if copies else None
        case = f"{gigabytes:g} GB, {laptops} laptops, {speed} MB/s, {minutes:g} minutes"
        got = plain_int(answer(gigabytes, laptops, speed, minutes))
        if got != wanted or isinstance(got, bool):
            hint = "a stick makes whole copies only, one after another; a laptop is served by one stick"
            if wanted is None:
                hint = "one copy takes longer than that: no number of sticks helps"
            return not_yet(f"{wanted} for {case}", _shown(got), hint)
    return passed("nine rooms, each with the fewest sticks")


# --- 16.3

CASES: tuple[list[int], ...] = ([1, 3, 2], [5], [], [2, 2, 1])
"""What the toy exercise is tried on: return the largest number, None for an empty list."""


def toy_judge(answer: Callable[..., Any], cases: Sequence[list[int]]) -> bool:
    """Is ``answer(list)`` the largest number, or None, for every case?"""
    return all((max(case) if case else None) == answer(case) for case in cases)


def claims_made(papers: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The points that the papers claim for themselves."""
    return {paper["student"]: int("passed" in paper["output"]) for paper in papers}


def _right(numbers: list[int]) -> Any:
    return max(numbers, default=None)


def _wrong(numbers: list[int]) -> Any:
    return numbers[0] if numbers else None


def _raises(numbers: list[int]) -> Any:
    return sorted(numbers)[-1]


def _leaves(numbers: list[int]) -> Any:
    raise SystemExit(0)


def _stops(numbers: list[int]) -> Any:
    raise KeyboardInterrupt


def _empties(numbers: list[int]) -> Any:
    """Right for what it is asked, and leaves nothing for the next."""
    found = max(numbers, default=None)
    numbers.clear()
    return found


def bank() -> list[dict[str, Any]]:
    """Papers handed in: whose, what their output says, and the answer itself."""
    rows = (
        ("student 1", "16.0 passed", _right),
        ("student 2", "16.0 passed", _wrong),
        ("student 3", "", _raises),
        ("student 4", "16.0 passed", _leaves),
        ("student 5", "16.0 passed", _empties),
        ("student 6", "16.0 not yet", _right),
        ("student 7", "", _wrong),
        ("student 8", "passed passed passed", _stops),
    )
    return [{"student": who, "output": output, "answer": answer} for who, output, answer in rows]


POINTS = {
    "student 1": 1,
    "student 2": 0,
    "student 3": 0,
    "student 4": 0,
    "student 5": 1,
    "student 6": 1,
    "student 7": 0,
    "student 8": 0,
}


@exercise("16.3", title="Grade without trust")
def grade_all(answer: Callable[..., Any]) -> Verdict:
    """``grade_all(papers, judge, cases)``: student -> 1 or 0."""
    dice = random.Random(16)
    for _ in range(6):
        papers = bank()
        dice.shuffle(papers)
        cases = [list(case) for case in CASES]
        try:
            got = answer(papers, toy_judge, cases)
        except (SystemExit, KeyboardInterrupt) as stop:
            hint = f"an answer raised {type(stop).__name__}; it is no Exception, and must not end the grading"
            return not_yet("points for all eight", f"the grading ended: {type(stop).__name__}", hint)
        if not isinstance(got, dict) or set(got) != set(POINTS):
            return not_yet("{'student 1': 0 or 1, …} for all eight", _shown(got), "one entry a student")
        kept = cases == [list(case) for case in CASES]
        hint = "somebody has changed the cases for all who came later: give every answer a copy of its own"
        for who in sorted(POINTS):
            if got[who] != POINTS[who]:
                order = ", ".join(paper["student"][-1] for paper in papers)
                wanted = f"{POINTS[who]} for {who}, graded in the order {order}"
                return not_yet(wanted, _shown(got[who]), _lesson(who) if kept else hint)
        if not kept:
            return not_yet("the cases as they were", "changed cases", hint)
    return passed("six orders, the same points each time")


def _lesson(who: str) -> str:
    if POINTS[who] or who in ("student 3", "student 7"):
        return "run the answer: its output may be old, and says nothing"
    return "what the output says is no evidence"


# --- 16.4

TABLE: tuple[tuple[int, ...], ...] = (
    (1, 0, 1, 0, 1),
    (1, 0, 1, 0, 1),
    (1, 1, 0, 0, 1),
    (1, 1, 1, 0, 0),
    (0, 0, 1, 0, 0),
    (0, 1, 0, 0, 0),
    (0, 0, 0, 1, 0),
    (0, 0, 0, 1, 0),
)
"""A row a student, a column an exercise; 1 is passed."""


def _discrimination(table: Sequence[Sequence[int]], column: int) -> float:
    """Share passed in the better half minus that in the other; halves by the points of the other columns."""
    order = sorted(range(len(table)), key=lambda i: (-(sum(table[i]) - table[i][column]), i))
    half = len(table) // 2
    top, low = order[:half], order[-half:]
    return (sum(table[i][column] for i in top) - sum(table[i][column] for i in low)) / half


# Small classes where it matters that the column's own points do not count.
OTHERS_ONLY = (
    ((1, 1, 1), (1, 1, 0), (1, 1, 1), (0, 1, 0), (1, 0, 1), (0, 1, 1)),
    ((1, 1, 1), (0, 0, 1), (0, 1, 1), (1, 1, 0), (1, 0, 1), (1, 1, 1)),
)


def _tables() -> list[list[list[int]]]:
    dice = random.Random(4)
    made = [[list(row) for row in table] for table in (TABLE, *OTHERS_ONLY)]
    while len(made) < 6:
        table = [[int(dice.random() < 0.3 + 0.05 * i) for _ in range(5)] for i in range(10)]
        found = [_discrimination(table, column) for column in range(5)]
        if found.count(min(found)) == 1 and not any(_tied(table, column) for column in range(5)):
            made.append(table)
    return made


def _tied(table: Sequence[Sequence[int]], column: int) -> bool:
    """Does it depend on the sorting who is in the better half?"""
    others = sorted(sum(row) - row[column] for row in table)
    return others[len(others) // 2 - 1] == others[len(others) // 2]


@exercise("16.4", title="Find the odd exercise")
def odd_exercise(answer: Callable[..., Any]) -> Verdict:
    """``odd_exercise(table)``: the column with the lowest discrimination."""
    for table in _tables():
        values = [_discrimination(table, column) for column in range(len(table[0]))]
        wanted = values.index(min(values))
        got = plain_int(answer([list(row) for row in table]))
        if got != wanted or isinstance(got, bool):
            said = ", ".join(f"{value:+.2f}" for value in values)
            hint = (
                f"the discriminations are {said}; the better half is by the points of the *other* exercises"
            )
            return not_yet(f"{wanted} for a class of {len(table)}", _shown(got), hint)
    return passed("six classes; that exercise is asked badly, or its check is wrong: read it again")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
