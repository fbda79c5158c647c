"""With solve off, no exercise takes the course's own answer, however it is dressed."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch

import labkit
from labkit import check, solutions
from labkit.check import progress
from labkit.check.ch00 import sample_report
from labkit.check.own import borrowed
from labkit.solutions import ch02 as reference

EXERCISES = check.exercises()
FUNCTIONS = [item for item in EXERCISES if callable(solutions.get(item.id))]


def _by_name(item: Any) -> str:
    return str(item.id)


def _refused(item: check.Exercise, answer: Any) -> None:
    verdict = item(answer)
    assert verdict.state == "not yet", verdict
    assert verdict.expected == "an answer of your own" and "labkit." in verdict.got
    assert "solutions.show" in verdict.hint


@pytest.mark.parametrize("item", EXERCISES, ids=_by_name)
def test_the_reference_solution_is_refused_and_not_recorded_as_passed(item: check.Exercise) -> None:
    _refused(item, solutions.get(item.id))
    assert progress.load()[0][item.id].state == "not yet"


_WRAPPERS = {
    "global": "def answer({all}):\n    return solutions.get({id!r})({all})",
    "from labkit": "def answer({all}):\n    from labkit import solutions as s\n"
    "    return s.get({id!r})({all})",
    "import module": "def answer({all}):\n    import labkit.solutions.ch{ch} as s\n"
    "    return s.{name}({all})",
    "from module": "def answer({all}):\n    from labkit.solutions.ch{ch} import {name} as f\n"
    "    return f({all})",
    "attribute": "def answer({all}):\n    return labkit.solutions.get({id!r})({all})",
    "by text": "def answer({all}):\n    import importlib\n"
    "    return getattr(importlib.import_module('labkit.solutions.ch{ch}'), {name!r})({all})",
    "exec": "def answer({all}):\n    s = {{}}\n    exec('from labkit import solutions', s)\n"
    "    return s['solutions'].get({id!r})({all})",
    "alias": "f = solutions.get({id!r})\ndef answer({all}):\n    return f({all})",
    "helper": "def help({all}):\n    return solutions.get({id!r})({all})\n"
    "def answer({all}):\n    return help({all})",
    "in a dict": "box = {{'f': [solutions.get({id!r})]}}\ndef answer({all}):\n    return box['f'][0]({all})",
    "default": "def answer({all}, *, f=solutions.get({id!r})):\n    return f({all})",
    "closure": "def make(f):\n    def answer({all}):\n        return f({all})\n    return answer\n"
    "answer = make(solutions.get({id!r}))",
    "class": "class Mine:\n    def __call__(self, {all}):\n        return solutions.get({id!r})({all})\n"
    "answer = Mine()",
    "method": "class Mine:\n    def go(self, {all}):\n        return solutions.get({id!r})({all})\n"
    "answer = Mine().go",
    "check module": "def answer({all}):\n    import labkit.check.ch{ch}\n"
    "    return solutions.get({id!r})({all})",
    "proxy": "def answer({all}):\n    check.find({id!r})\n    return None",
    "partial": "answer = functools.partial(solutions.get({id!r}))",
    "wraps": "def mine({all}):\n    return 0\n@functools.wraps(mine)\n"
    "def answer({all}):\n    return solutions.get({id!r})({all})",
    "renamed": "f = solutions.get({id!r})\nanswer = types.FunctionType(f.__code__, dict(f.__globals__))\n"
    "answer.__module__ = '__main__'",
}


@pytest.mark.parametrize("way", _WRAPPERS)
@pytest.mark.parametrize("item", FUNCTIONS, ids=_by_name)
def test_a_wrapped_reference_is_refused(item: check.Exercise, way: str) -> None:
    names = ", ".join(inspect.signature(solutions.get(item.id)).parameters)
    source = _WRAPPERS[way].format(all=names, id=item.id, ch=item.chapter, name=item.name)
    scope: dict[str, Any] = {"__name__": "__main__", "solutions": solutions, "labkit": labkit, "check": check}
    scope |= {"functools": functools, "types": importlib.import_module("types")}
    exec(source, scope)
    _refused(item, scope["answer"])


def test_helpers_of_the_checks_are_refused() -> None:
    from labkit.check import ch00, ch09

    def bill(shape, bits, group, context):
        return ch09._bill(shape, bits, group, context)

    def inside(shape, bits, group, context):
        from labkit.check.ch09 import _bill

        return _bill(shape, bits, group, context)

    _refused(check.memory_bill, bill)
    _refused(check.memory_bill, inside)
    _refused(check.headline, ch00.right_headline)


solution_by_another_name = reference.q2_and_q5


def test_only_what_the_code_names_counts() -> None:
    """This module imports check, solutions and a reference; an answer that names none of them is honest."""

    def fields(b0, b1, b2):
        """Not taken from labkit.solutions, nor from labkit.check."""
        return b0 >> 6 | (b1 & 1) << 2, b1 >> 7 | (b2 & 3) << 1

    assert check.q2_and_q5(fields).state == "passed"
    assert borrowed(lambda: sample_report()) == ""  # handed out by the chapter
    assert borrowed(lambda: solution_by_another_name) == "labkit.solutions.ch02.q2_and_q5"


numbers = np.arange(4)


class Holder:
    check = 3


def test_arrays_and_attributes_of_the_same_name_are_harmless() -> None:
    assert borrowed(lambda: numbers.sum() + numbers[0]) == ""
    assert borrowed(lambda holder: holder.check + holder.solutions) == ""
    assert borrowed(Holder()) == "" and borrowed(Holder) == ""
    assert borrowed(torch.ones(3)) == "" and borrowed(torch.nn.functional.linear) == ""


def test_an_equal_value_that_somebody_typed_is_honest() -> None:
    assert check.best_layout(("w4", 128, True)).state == "passed"
    assert check.fits_w4(["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"]).state == "passed"


@pytest.mark.parametrize("value", [5, "labkit.solutions", None, len, object(), [1, [2]], int, {}, labkit])
def test_plain_values_are_nobodys(value: Any) -> None:
    assert borrowed(value) == ""
