from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import check, solutions
from labkit.check import forbid_calls, not_yet, passed, registry, session
from labkit.check.registry import ReferenceFailed, exercise
from labkit.errors import InputError


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Exercises that a test registers vanish with it, and so does the solve flag."""
    check.exercises()  # imported once for all: a later import would register into the copy
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(session, "current", session.Session())
    monkeypatch.setattr(session.current, "solve", False)
    yield


# what the library would answer
library = ModuleType("labkit.pretended")
exec("def library_double(x):\n    return 2 * x", library.__dict__)
library_double = library.library_double


@pytest.fixture
def double() -> check.Exercise:
    @exercise("99.1", title="Double it", par=2, limit=4, unit="steps")
    def double_it(answer: Any, score: float | None = None) -> check.Verdict:
        forbid_calls(answer, "quant.library_double")
        got = answer(3)
        return passed("right", score=score) if got == 6 else not_yet(6, got, "add it to itself")

    return double_it


def _ellipsis(x: int) -> Any: ...


def _documented(x: int) -> Any:
    """To do."""


def _passing(x: int) -> Any:
    pass


def _none(x: int) -> Any:
    return None


def _raising(x: int) -> Any:
    raise NotImplementedError


def _raising_with_text(x: int) -> Any:
    """To do."""
    raise NotImplementedError("your turn")


def _computing_nothing(x: int) -> Any:
    y = x + 1  # noqa: F841


def _printing(x: int) -> Any:
    print(2 * x)


@pytest.mark.parametrize(
    "stub",
    [None, ..., NotImplemented, [None, ...], {"a": None}, (None, (None,))]
    + [_ellipsis, _documented, _passing, _none, _raising, _raising_with_text],
    ids=lambda stub: getattr(stub, "__name__", repr(stub)),
)
def test_a_stub_is_not_attempted(double: check.Exercise, stub: Any) -> None:
    verdict = double(stub)
    assert verdict.state == "not attempted"
    assert "not attempted" in repr(verdict)
    assert not verdict


@pytest.mark.parametrize("answer", [_computing_nothing, _printing])
def test_a_forgotten_return_is_an_attempt(double: check.Exercise, answer: Any) -> None:
    verdict = double(answer)
    assert verdict.state == "not yet" and verdict.expected == "6"
    assert verdict.got == "your function returned None" and "forget `return`" in verdict.hint

    @exercise("99.6", title="t")
    def opens_it(answer: Any) -> check.Verdict:
        return passed() if len(answer(3)) else not_yet(1, 2)

    assert opens_it(answer).got == "your function returned None"  # and no TypeError about len()

    @exercise("99.7", title="t", none_ok=True)
    def in_place(answer: Any) -> check.Verdict:
        answer(3)
        return not_yet("a change", "none", "change it")

    assert in_place(answer).hint == "change it"


def test_the_three_states_and_the_score(double: check.Exercise) -> None:
    assert double(lambda x: x + x).state == "passed"
    wrong = double(lambda x: x)
    assert (wrong.state, wrong.expected, wrong.got, wrong.hint) == ("not yet", "6", "3", "add it to itself")
    good = double(lambda x: x + x, score=3)
    assert good.state == "passed" and good.score_line() == "3 steps, par 2, pass <= 4"
    slow = double(lambda x: x + x, score=9)
    assert slow.state == "not yet" and slow.score_line().startswith("9 steps") and slow.hint


def test_a_higher_score_can_be_the_better_one() -> None:
    @exercise("99.2", title="t", par=9, limit=5, better="higher")
    def high(answer: Any) -> check.Verdict:
        return passed(score=answer)

    assert high(7).state == "passed" and high(7).score_line().endswith("pass >= 5")
    assert high(4).state == "not yet"


@pytest.mark.parametrize(
    "answer", [5, "text", object(), [1], lambda: 1, lambda x: 1 / 0, lambda x: exit(), len]
)
def test_no_answer_makes_a_check_raise(double: check.Exercise, answer: Any) -> None:
    assert double(answer).state == "not yet"


@given(
    st.one_of(
        st.integers(), st.text(), st.lists(st.none() | st.integers()), st.dictionaries(st.text(), st.none())
    )
)
def test_any_value_gets_a_verdict(answer: Any) -> None:
    @exercise("99.3", title="t")
    def any_value(answer: Any) -> check.Verdict:
        return passed() if answer(1) else not_yet(1, 2)

    assert any_value(answer).state in ("not yet", "not attempted")


def test_an_error_in_the_answer_names_its_line_and_no_address(double: check.Exercise) -> None:
    def answer(x: int) -> int:
        x += 1
        raise ValueError(f"bad {object()}")

    text = repr(double(answer))
    assert "ValueError: bad <object object>" in text and "line 3" in text and "0x" not in text
    assert repr(double(answer)) == text


def test_an_error_of_a_library_is_an_attempt(double: check.Exercise) -> None:
    scope: dict[str, Any] = {"__name__": "torch_like"}
    exec("def missing(x):\n    raise NotImplementedError('no kernel for this')", scope)

    def answer(x: int) -> Any:
        return scope["missing"](x)

    verdict = double(answer)
    assert verdict.state == "not yet" and "no kernel for this" in verdict.got


def test_a_keyboard_interrupt_is_the_users(double: check.Exercise) -> None:
    def answer(x: int) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        double(answer)


def test_html_escapes_what_a_student_wrote(double: check.Exercise) -> None:
    shown = double(lambda x: "<script>")._repr_html_()
    assert "<script>" not in shown and "&lt;script&gt;" in shown


def _helper(x: int) -> int:
    return library_double(x)


_alias = library_double


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: library_double(x),
        lambda x: _helper(x),
        lambda x: _alias(x),
        lambda x: sum([library_double(y) for y in [x]]),
        lambda x: (lambda: library_double(x))(),
        lambda x, f=library_double: f(x),
        lambda x: getattr(library, "library_double")(x),  # noqa: B009
        lambda x: library.library_double(x),
        functools.partial(_helper),
        functools.wraps(_documented)(lambda x: library_double(x)),
        library_double,
    ],
)
def test_the_librarys_own_answer_is_refused(double: check.Exercise, answer: Any) -> None:
    verdict = double(answer)
    assert verdict.state == "not yet" and "library_double" in verdict.got


def test_a_helper_of_ones_own_may_have_the_same_name(double: check.Exercise) -> None:
    own: dict[str, Any] = {"__name__": "__main__"}
    exec("def library_double(x):\n    return x + x\ndef answer(x):\n    return library_double(x)", own)
    assert double(own["answer"]).state == "passed"
    exec("def library_double(x):\n    return mine(x)", own)
    own["mine"] = library_double
    assert double(own["answer"]).state == "not yet"


def test_forbidding_leaves_honest_answers_and_plain_values_alone() -> None:
    forbid_calls(lambda x: x + x, ["library_double"])
    forbid_calls(7, ["library_double"])
    forbid_calls(sorted, ["library_double"])


def test_an_unknown_check_says_what_is_near(double: check.Exercise) -> None:
    assert check.double_it is double
    assert registry.find("99.1") is double
    assert "double_it" in dir(check)
    with pytest.raises(AttributeError, match="did you mean double_it"):
        check.find("doubel_it")
    with pytest.raises(AttributeError, match="did you mean double_it"):
        getattr(check, "doubel_it")  # noqa: B009
    assert not hasattr(check, "__wrapped__")


def test_registering_is_strict() -> None:
    for bad in ("9.1", "99", "99.x"):
        with pytest.raises(InputError):
            exercise(bad, title="t")
    with pytest.raises(InputError):

        @exercise("99.4", title="t")
        def passed(answer: Any) -> check.Verdict:  # the name of a helper
            return check.passed()

    @exercise("99.5", title="t")
    def first(answer: Any) -> Any:
        return "no verdict"

    with pytest.raises(InputError):

        @exercise("99.5", title="t")
        def second(answer: Any) -> check.Verdict:
            return check.passed()

    with pytest.raises(TypeError, match="Verdict"):
        first(1)


def test_solve_checks_the_reference_and_raises_when_it_fails(
    double: check.Exercise, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.current.solve = True
    monkeypatch.setattr(solutions, "get", lambda name: lambda x: x + x)
    verdict = double(None)
    assert verdict.state == "passed" and verdict.reference and "reference solution" in repr(verdict)
    for wrong in (lambda x: x, None, lambda x: 1 / 0):
        monkeypatch.setattr(solutions, "get", lambda name, wrong=wrong: wrong)
        with pytest.raises(ReferenceFailed, match=r"99\.1"):
            double(lambda x: 6)


def test_every_registered_exercise_has_a_solution_that_is_shown_and_passes() -> None:
    found = [item for item in check.exercises() if item.chapter != "99"]
    assert found
    for item in found:
        assert item.name in solutions.show(item.id).source
        solutions.get(item.id)


def test_a_solution_that_does_not_exist_is_refused_readably() -> None:
    with pytest.raises(InputError, match="exercise"):
        solutions.show("98.1")


def test_progress_that_could_not_be_saved_is_said_beside_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.check import progress

    monkeypatch.setattr(progress, "record", lambda exercise, verdict: "not saved: the disk is full")
    verdict = check.headline(lambda findings: "nothing")
    assert "note: not saved: the disk is full" in repr(verdict)
    assert "not saved: the disk is full" in verdict._repr_html_()
