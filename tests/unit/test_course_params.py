from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from notebook_builder import PARAMETERS, START, book, code

from labkit import course
from labkit.course.lab import pick_device
from labkit.course.params import Parameter, assign, coerce, parse_pairs, read_parameters
from labkit.errors import InputError


def _parameters(source: str = PARAMETERS, start: str = START.format(number="00")) -> dict[str, Parameter]:
    found = read_parameters(book(code(source, "parameters"), code(start)))
    return {p.name: p for p in found}


def test_parameters_are_read_with_type_default_help_and_rule() -> None:
    found = _parameters()
    assert [(p.name, p.type, p.default) for p in found.values()] == [
        ("device", "str", "auto"),
        ("solve", "bool", False),
        ("batch", "int", 4),
        ("warm", "bool", True),
        ("note", "str", "a"),
    ]
    assert found["batch"].help == "rows of activations"
    assert found["batch"].rule == course.whole(1, 64)
    assert found["note"].rule is None


@pytest.mark.parametrize("word", ["true", "True", "1", "yes", "on", "YES", " on "])
def test_words_for_true(word: str) -> None:
    assert coerce(_parameters()["warm"], word) is True


@pytest.mark.parametrize("word", ["false", "FALSE", "0", "no", "off"])
def test_words_for_false(word: str) -> None:
    assert coerce(_parameters()["warm"], word) is False


@pytest.mark.parametrize(
    ("source", "name", "value"),
    [
        (PARAMETERS, "warm", "maybe"),
        (PARAMETERS, "warm", "2"),
        (PARAMETERS, "warm", 0.0),
        (PARAMETERS, "batch", "four"),
        (PARAMETERS, "batch", "4.0"),
        (PARAMETERS, "batch", "65"),
        (PARAMETERS, "batch", "0"),
        (PARAMETERS, "batch", True),
        (PARAMETERS, "note", 3),
        ("rate = 0.5", "rate", "fast"),
        ("rate = 0.5", "rate", "nan"),
        ("rate = 0.5", "rate", "inf"),
        ("rate = 0.5", "rate", True),
        ("sizes = [1, 2]", "sizes", "1,2"),
        ("sizes = [1, 2]", "sizes", '{"a": 1}'),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(source: str, name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        coerce(_parameters(source)[name], value)
    assert caught.value.argument == name
    assert caught.value.received.strip("'") == str(value)


@given(st.integers(-(10**12), 10**12))
def test_whole_numbers_survive_the_way_through_text(value: int) -> None:
    assert coerce(Parameter("n", 0, "int", ""), str(value)) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_the_way_through_text(value: float) -> None:
    assert coerce(Parameter("x", 0.0, "float", ""), repr(value)) == value


@given(st.text())
def test_text_is_kept_as_typed(value: str) -> None:
    assert coerce(Parameter("s", "", "str", ""), value) == value


def test_lists_are_json() -> None:
    assert coerce(_parameters("sizes = [1, 2]")["sizes"], "[1, 8, 64]") == [1, 8, 64]


@pytest.mark.parametrize(
    "source",
    ["import os", "a = 1 + b", "a, b = 1, 2", "a = None", "a = {}", "a =", "print(1)", "a: int"],
)
def test_a_parameters_cell_holds_literals_only(source: str) -> None:
    with pytest.raises(InputError):
        _parameters(source)


def test_exactly_one_parameters_cell_is_needed() -> None:
    with pytest.raises(InputError, match="0 cells"):
        read_parameters(book(code("a = 1")))
    with pytest.raises(InputError, match="2 cells"):
        read_parameters(book(code("a = 1", "parameters"), code("b = 1", "parameters")))


def test_a_rule_with_computed_arguments_is_left_to_the_cell() -> None:
    found = _parameters(start='course.start("00", device=device, batch=(batch, course.whole(1, limit)))')
    assert found["batch"].rule is None


def test_pairs_from_the_command_line() -> None:
    assert parse_pairs(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for bad in (["a"], ["=1"], ["1a=2"], ["a=1", "a=2"]):
        with pytest.raises(InputError):
            parse_pairs(bad)


def test_a_name_counts_when_one_chapter_has_it() -> None:
    known = {"00": [Parameter("batch", 4, "int", "")], "01": [Parameter("rate", 0.5, "float", "")]}
    assert assign({"batch": "8"}, known) == {"00": {"batch": 8}, "01": {}}
    with pytest.raises(InputError, match=r"unknown parameter 'bacth'.*batch, rate.*did you mean batch"):
        assign({"bacth": "8"}, known)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (course.whole(1, 8), 8, 9),
        (course.whole(32, 128, multiple_of=32), 64, 48),
        (course.whole(), -5, 1.0),
        (course.number(0, 1), 0.25, 1.5),
        (course.number(), 3, float("nan")),
        (course.one_of("w3", "w4"), "w4", "w5"),
        (course.one_of(3, 4), 3, True),
        (course.one_of(0, 1), 1, True),
        (course.truth(), True, "perhaps"),
        (course.text(5), "abc", "abcdef"),
        (course.text(5), "abc", "  "),
        (course.text(5, empty=True), "", 5),
    ],
)
def test_rules(rule: course.Rule, good: Any, bad: Any) -> None:
    assert rule.check("p", good) == good
    with pytest.raises(InputError) as caught:
        rule.check("p", bad)
    assert caught.value.expected == rule.expected()


def test_start_checks_everything_and_resolves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.course.lab.cuda_available", lambda: False)
    lab = course.start("2", device="auto", solve="no", batch=(4, course.whole(1, 8)))  # type: ignore[arg-type]
    assert (lab.chapter, lab.device, lab.solve, dict(lab.params), lab["batch"]) == (
        "02",
        "cpu",
        False,
        {"batch": 4},
        4,
    )
    with pytest.raises(InputError, match="device"):
        course.start("02", device="gpu")
    with pytest.raises(InputError, match="batch"):
        course.start("02", device="cpu", batch=(9, course.whole(1, 8)))
    with pytest.raises(InputError, match="pair"):
        course.start("02", device="cpu", batch=4)
    with pytest.raises(InputError, match="chapter"):
        course.start("77", device="cpu")
    with pytest.raises(InputError, match="parameter"):
        lab["bits"]


def test_cuda_is_picked_when_there_and_refused_with_a_fix_when_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.course.lab.cuda_available", lambda: True)
    assert (pick_device("auto"), pick_device("cuda"), pick_device("cpu")) == ("cuda", "cuda", "cpu")
    monkeypatch.setattr("labkit.course.lab.cuda_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(InputError) as caught:
        pick_device("cuda")
    assert "labkit doctor" in caught.value.fix
