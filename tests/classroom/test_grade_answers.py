"""A student's notebook over the course's: which cells count, and which statements run."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.classroom.answers import Answer, answers, needed, statements_of
from labkit.classroom.submission import Unreadable, chapter_of, claims, load


def book(*cells: tuple[str, str]) -> dict[str, Any]:
    """A notebook of (id, source)."""
    return {
        "cells": [
            {"cell_type": "code", "id": id_, "source": source, "outputs": [], "metadata": {}}
            for id_, source in cells
        ]
    }


COURSE = book(
    ("p", "device = 'auto'\nsolve = False"),
    ("i", "import math\nfrom labkit import check\nSCALE = 3"),
    ("one", "def one(x):\n    raise NotImplementedError\n\n\ncheck.one(one)"),
    ("mid", "SCALE = 4\nprint(SCALE)"),
    ("two", "two = ...\ncheck.two(two)"),
)


def answer(student: dict[str, Any], name: str = "one") -> Answer:
    return next(one for one in answers(COURSE, student, ["one", "two"]) if one.exercise == name)


def value(found: Answer) -> Any:
    scope: dict[str, Any] = {}
    for one in found.statements:
        exec(compile(ast.Module([one.node], []), "x", "exec"), scope)
    return eval(found.expression, scope)


def with_cells(**sources: str) -> dict[str, Any]:
    """The course with some cells replaced, by id."""
    made = book(*((c["id"], c["source"]) for c in COURSE["cells"]))
    for cell in made["cells"]:
        cell["source"] = sources.get(cell["id"], cell["source"])
    return made


def test_the_answer_is_taken_with_what_it_needs_and_nothing_else() -> None:
    student = with_cells(
        one="import sys\nsys.exit(0)\nhelper = [1]\nhelper.append(2)\nprint(1)\n\n\ndef one(x):\n"
        "    return x * SCALE + len(helper) + math.floor(0.5)\n\n\ncheck.one(one)\nwhile True: pass"
    )
    found = answer(student)
    texts = [ast.unparse(one.node) for one in found.statements]
    assert texts[:2] == ["import math", "SCALE = 3"]
    assert texts[2:4] == ["helper = [1]", "helper.append(2)"] and texts[4].startswith("def one")
    assert len(texts) == 5 and value(found)(2) == 8


def test_a_name_that_comes_later_does_not_count_and_one_above_does() -> None:
    assert value(answer(with_cells(two="two = SCALE\ncheck.two(two)"), "two")) == 4
    assert value(answer(with_cells(one="one = lambda x: SCALE\ncheck.one(one)")))(0) == 3


def test_course_cells_count_in_the_courses_words_but_additions_stay() -> None:
    student = with_cells(
        p="device = 'auto'\nsolve = True\nmine = 7",
        i="import math, cmath\nfrom labkit import check\nSCALE = 99\nimport string",
        one="def one(x):\n    return SCALE, mine, solve, string.digits\n\n\ncheck.one(one)",
    )
    assert value(answer(student))(0) == (3, 7, False, "0123456789")


def test_an_added_cell_helps_and_the_last_real_attempt_counts() -> None:
    stub = COURSE["cells"][2]["source"]
    cells = [(c["id"], c["source"]) for c in COURSE["cells"]]
    cells.insert(2, ("new", "def helper():\n    return 5"))
    cells.insert(4, ("again", "def one(x):\n    return helper() + x\n\n\ncheck.one(one)"))
    assert cells[3] == ("one", stub)
    assert value(answer(book(*cells)))(1) == 6


def test_ids_may_be_lost_and_checks_may_be_removed() -> None:
    without_ids = with_cells(one="def one(x):\n    return x\n\n\ncheck.one(one)")
    for cell in without_ids["cells"]:
        cell["id"] = ""
    assert value(answer(without_ids))(4) == 4
    assert value(answer(with_cells(one="def one(x):\n    return -x")))(4) == -4
    assert value(answer(with_cells(one="def best(x):\n    return 2\n\n\ncheck.one(best)")))(0) == 2


def test_what_cannot_be_read_says_so() -> None:
    broken = answer(with_cells(one="def one(x:\n"))
    assert "SyntaxError" in broken.problem and broken.statements == ()
    gone = book(*((c["id"], c["source"]) for c in COURSE["cells"] if c["id"] != "one"))
    assert answer(gone).expression == "" and "not in this notebook" in answer(gone).problem
    assert answer(gone, "two").problem == ""


def test_magics_are_nothing() -> None:
    found = answer(with_cells(one="%time print(1)\n!ls\ndef one(x):\n    return x\n\n\ncheck.one(one)"))
    assert value(found)(3) == 3 and len(found.statements) == 1


def test_both_exercises_in_one_cell() -> None:
    both = with_cells(one="def one(x):\n    return 1\n\n\ntwo = 2\ncheck.one(one)\ncheck.two(two)")
    both["cells"] = [cell for cell in both["cells"] if cell["id"] != "two"]
    assert value(answer(both))(0) == 1 and value(answer(both, "two")) == 2


NAMES = "abcdef"


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES))), max_size=12))
def test_the_slice_gives_what_everything_gives(lines: list[tuple[str, set[str]]]) -> None:
    text = "\n".join(f"{name} = [{', '.join(sorted(reads))}]" for name, reads in lines)
    every = statements_of(text, "x")
    kept = needed(every, "a")

    def run(statements: list[Any]) -> Any:
        scope: dict[str, Any] = {}
        for one in statements:
            try:
                exec(compile(ast.Module([one.node], []), "x", "exec"), scope)
            except NameError:
                continue
        return scope.get("a", "none")

    assert run(every) == run(kept)
    assert all(one in every for one in kept)


def test_chapters_are_known_by_their_checks(tmp_path: Any) -> None:
    names = {"00": ["zero"], "01": ["one", "two"]}
    made = {"cells": book(("x", "check.one(1)\ncheck.zero(1)"), ("y", "check.two(2)"))["cells"]}
    assert chapter_of(made, names) == "01"
    with pytest.raises(Unreadable, match="no exercise"):
        chapter_of(book(("x", "print(1)")), names)
    with pytest.raises(Unreadable, match="plain file"):
        load(tmp_path)


def test_claims_are_read_from_text_and_html() -> None:
    made = book(("x", ""))
    made["cells"][0]["outputs"] = [
        {"text": ["00.1 ", "passed: a\n"]},
        {"data": {"text/html": "<b>00.2 passed (reference solution)</b>", "x": 5}},
        "odd",
        {"text": "00.3 not yet"},
    ]
    assert claims(made) == {"00.1", "00.2"}
