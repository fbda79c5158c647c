"""Exercises: their registry, and the frame that turns any answer into a verdict without raising."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import labkit.check as package
from labkit.check import progress, session, stub
from labkit.check.forbid import ForbiddenCall
from labkit.check.own import borrowed
from labkit.check.verdict import NotYet, Verdict, not_attempted, not_yet
from labkit.errors import InputError, require

_registry: dict[str, Exercise] = {}
_RESERVED = {"exercise", "exercises", "find", "forbid_calls", "not_attempted", "not_yet", "passed"}
_RESERVED |= {"progress", "session", "stub", "forbid", "verdict", "signatures", "own", "normalise", "traced"}
_RESERVED |= {"cuda", "cuda_case", "cuda_text"}


class ReferenceFailed(AssertionError):
    """With solve on, a reference solution that does not pass stops the run."""


@dataclass(frozen=True)
class Exercise:
    """One exercise: called with an answer, it returns a :class:`Verdict` and never raises (solve off).

    Attributes:
        id: ``"02.1"``: chapter and place in it.
        name: the attribute of ``labkit.check`` and the name of the reference solution.
        par: a good score; ``limit``: the worst score that passes; ``unit``: of both.
        better: ``"lower"`` or ``"higher"``.
        none_ok: a function that returns None may be right (it changes its argument in place).
        text_stub: mark of the stub (:func:`labkit.check.cuda_text.mark`) when the answer is CUDA C++ text.
    """

    id: str
    name: str
    title: str
    function: Callable[..., Verdict]
    par: float | None = None
    limit: float | None = None
    unit: str = ""
    better: str = "lower"
    none_ok: bool = False
    text_stub: str = ""

    @property
    def chapter(self) -> str:
        """Two digits."""
        return self.id.split(".")[0]

    def __call__(self, answer: Any = None, **context: Any) -> Verdict:
        """Check ``answer``; with solve on, check the reference solution instead and raise if it fails.

        ``context`` is handed to the exercise's function as keywords.
        """
        if session.current.solve:
            return self._check_reference(context)
        verdict = self._framed(self._judge(answer, context, own=True))
        verdict = verdict.with_frame(note=progress.record(self.id, verdict))
        self._log(verdict)
        return verdict

    def _check_reference(self, context: dict[str, Any]) -> Verdict:
        from labkit import solutions

        verdict = self._framed(self._judge(solutions.get(self.id), context)).with_frame(reference=True)
        self._log(verdict)
        if not verdict:
            raise ReferenceFailed(
                f"the reference solution of {self.id} ({self.name}) does not pass:\n{verdict}"
            )
        return verdict

    def _log(self, verdict: Verdict) -> None:
        session.log({"event": "check", "exercise": self.id, "state": verdict.state, "score": verdict.score})

    def _judge(self, answer: Any, context: dict[str, Any], *, own: bool = False) -> Verdict:
        """``own``: refuse what is, or uses, the library's own answer."""
        if stub.is_blank(answer, self.text_stub):
            return not_attempted()
        watched = stub.Watched()
        given = watched.wrap(answer) if isinstance(answer, FunctionType) else answer
        try:
            if own and (name := borrowed(answer) or self._pasted(answer)):
                return _not_own(name)
            verdict = self.function(given, **context)
        except NotImplementedError as error:
            return not_attempted() if _is_own_raise(error, answer) else _raised(error, answer)
        except ForbiddenCall as found:
            return not_yet(
                "your own code", f"a use of {found.name}", f"{found.name} is what you are building here"
            )
        except NotYet as stopped:
            verdict = stopped.verdict
        except (Exception, SystemExit) as error:
            if watched.never_answered and not self.none_ok:
                return _nothing_returned("a value from your function", watched.last)
            return _raised(error, answer)
        if not isinstance(verdict, Verdict):
            raise TypeError(f"exercise {self.id} returned {type(verdict).__name__}; expected a Verdict")
        # stubs are gone by now: this function does something, and gives nothing back
        if verdict.state == "not yet" and watched.never_answered and not self.none_ok:
            return _nothing_returned(verdict.expected, watched.last)
        return verdict

    def _pasted(self, answer: Any) -> str:
        """The name of the reference solution when a text holds all of it, comments too."""
        if not (self.text_stub and isinstance(answer, str)):
            return ""
        from labkit import solutions
        from labkit.check.cuda_text import holds

        try:
            found = holds(answer, solutions.get(self.id))
        except InputError:  # a chapter that is being written has no solution yet
            return ""
        return f"labkit.solutions.ch{self.chapter}.{self.name}" if found else ""

    def _framed(self, verdict: Verdict) -> Verdict:
        framed = verdict.with_frame(
            exercise=self.id,
            title=self.title,
            par=self.par,
            limit=self.limit,
            unit=self.unit,
            better=self.better,
        )
        if framed.state == "passed" and framed.score is not None and self.limit is not None:
            over = framed.score > self.limit if self.better == "lower" else framed.score < self.limit
            if over:
                hint = "the result is right; the score is not good enough yet"
                return framed.with_frame(state="not yet", hint=framed.hint or hint)
        return framed.with_frame(hint="") if framed.state == "passed" else framed


def _nothing_returned(expected: str, value: Any) -> Verdict:
    return not_yet(expected, f"your function returned {value!r}", "did you forget `return`?")


def _is_own_raise(error: BaseException, answer: Any) -> bool:
    """True for ``raise NotImplementedError`` in the answer's module; torch raises it for its own reasons."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals is getattr(answer, "__globals__", frame.f_globals)


def _not_own(name: str) -> Verdict:
    hint = "solutions.show(...) is there to be read; close it and write the answer in your own words"
    return not_yet("an answer of your own", f"a use of {name}, which is the course's own answer", hint)


def _raised(error: BaseException, answer: Any) -> Verdict:
    """The verdict for an answer that raised: which error, and which line of the answer."""
    code = getattr(answer, "__code__", None)
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if code is not None and frame.f_code is code:
            where = f", in line {line - code.co_firstlineno + 1} of your function"
    # addresses change from run to run, and the text is compared by the notebook tests
    words = re.sub(r" at 0x[0-9a-fA-F]+", "", str(error))
    got = f"{type(error).__name__}: {words}" if words else type(error).__name__
    kind = "" if code is not None else f" (your answer is of type {type(answer).__name__})"
    return not_yet(
        "an answer that runs", f"{got}{where}{kind}", "call it yourself in a cell and read the error"
    )


def exercise(
    id: str,
    *,
    title: str,
    par: float | None = None,
    limit: float | None = None,
    unit: str = "",
    better: str = "lower",
    none_ok: bool = False,
    text_stub: str = "",
) -> Callable[[Callable[..., Verdict]], Exercise]:
    """Register a check function under its own name: ``check.<name>``.

    Args:
        id: ``"02.1"``; the first part is the chapter.
        title: a few words for the verdict and the map.
        par, limit, unit, better, none_ok: see :class:`Exercise`; without ``limit`` any score passes.
        text_stub: see :class:`Exercise`; a test says the right mark when the notebook's stub changes.
    """
    require(re.fullmatch(r"\d\d\.\d+", id) is not None, "id", repr(id), "such as '02.1'")
    require(better in ("lower", "higher"), "better", repr(better), "'lower' or 'higher'")

    def wrap(function: Callable[..., Verdict]) -> Exercise:
        name = function.__name__
        taken = _registry.get(name)
        other = taken is not None and taken.function.__module__ != function.__module__
        twin = next((e for e in _registry.values() if e.id == id and e.name != name), None)
        require(
            not other and name not in _RESERVED, "exercise", name, "a name no other chapter or helper uses"
        )
        require(twin is None, "id", f"{id} twice ({name})", "one exercise an id")
        made = Exercise(id, name, title, function, par, limit, unit, better, none_ok, text_stub)
        _registry[name] = made
        return made

    return wrap


@functools.cache
def _chapter_modules() -> tuple[str, ...]:
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(name for name in names if re.fullmatch(r"ch\d\d", name)))


def _load(module: str) -> None:
    if module in _chapter_modules():
        importlib.import_module(f"labkit.check.{module}")


def exercises(chapter: str | None = None) -> list[Exercise]:
    """All exercises, or one chapter's, in order of their ids (this imports the check modules)."""
    for module in _chapter_modules():
        if chapter is None or module == f"ch{chapter}":
            _load(module)
    found = [item for item in _registry.values() if chapter is None or item.chapter == chapter]
    return sorted(found, key=lambda item: (item.chapter, int(item.id.split(".")[1])))


def find(name: str) -> Exercise:
    """The exercise called ``name`` or with the id ``name``; AttributeError with the nearest names.

    The running chapter's module is tried first: the others may import heavy things.
    """
    if name in _RESERVED:  # a module of this package that is being imported
        raise AttributeError(f"{name} is no exercise")
    if session.current.chapter:
        _load(f"ch{session.current.chapter}")
    if name not in _registry:
        exercises()
    for item in _registry.values():
        if name in (item.name, item.id):
            return item
    known = [item.name for item in exercises()]
    near = difflib.get_close_matches(name, known, n=3)
    here = [item.name for item in exercises(session.current.chapter)] if session.current.chapter else known
    say = f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(here) or 'none'}"
    raise AttributeError(f"labkit.check has no exercise {name!r}; {say}")
