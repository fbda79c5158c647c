"""Refuse an answer that calls the library's own answer: its byte code is read, it is not run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any


class ForbiddenCall(Exception):
    """Raised by :func:`forbid_calls`; the frame turns it into "not yet"."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"the answer uses {name}, which is the library's own answer")


def forbid_calls(answer: Any, names: str | Iterable[str]) -> None:
    """Refuse ``answer`` when it, or a function of the notebook that it uses, names one of ``names``.

    Args:
        answer: a function (anything else holds no code and is accepted).
        names: function names such as ``"unpack_w3"``; of a dotted name the last part counts.

    Raises:
        ForbiddenCall: inside an exercise the frame shows it as "not yet".
    """
    wanted = {name.rsplit(".", 1)[-1] for name in ([names] if isinstance(names, str) else names)}
    for used in _used_names(answer, set()):
        if used in wanted:
            raise ForbiddenCall(used)


def _used_names(item: Any, seen: set[int]) -> Iterator[str]:
    """Every name, string constant and real name of what ``item``'s code can reach in its own module."""
    if isinstance(item, functools.partial):
        item = item.func
    if not isinstance(item, (FunctionType, type)):
        item = getattr(item, "__func__", None) or vars(type(item)).get("__call__")
    if isinstance(item, type):
        for member in vars(item).values():
            yield from _used_names(member, seen) if isinstance(member, FunctionType) else ()
        return
    if not isinstance(item, FunctionType):
        return
    if isinstance(wrapped := getattr(item, "__wrapped__", None), FunctionType):
        yield from _used_names(wrapped, seen)
        if item.__globals__.get("__name__") == "labkit.check.stub":  # the frame's own stand-in
            return
    if id(item) in seen:
        return
    seen.add(id(item))
    # A function from a bare exec has no module.
    if (item.__module__ or "").split(".")[0] == "labkit":
        yield item.__name__
    names: set[str] = set()
    for code in _codes(item.__code__):
        names.update(code.co_names)
        names.update(value for value in code.co_consts if isinstance(value, str))
    reached: list[Any] = list(item.__defaults__ or ())
    for name in sorted(names):
        value = item.__globals__.get(name)
        # a helper of the student's own may have any name; what it uses is read below
        if not _is_own(value, item):
            yield name
        reached.append(value)
    for cell in item.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            reached.append(cell.cell_contents)
    for value in reached:
        if _is_own(value, item):
            yield from _used_names(value, seen)
        elif not isinstance(value, ModuleType) and isinstance(real := getattr(value, "__name__", None), str):
            # `mine = unpack_w3` above the answer hides the name; the object still carries it
            yield real


def _is_own(value: Any, item: FunctionType) -> bool:
    """True for a function or class of the module that the answer lives in (the notebook)."""
    return isinstance(value, FunctionType | type) and value.__module__ == item.__module__


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)
