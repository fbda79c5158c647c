"""Refuse an answer that calls the library's own answer: its byte code is read, it is not run."""

from __future__ import annotations

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
    item = _unwrapped(item)
    if id(item) in seen:
        return
    seen.add(id(item))
    names: set[str] = set()
    for code in _codes(item.__code__):
        names.update(code.co_names)
        names.update(value for value in code.co_consts if isinstance(value, str))
    yield from sorted(names)
    reached: list[Any] = [item.__globals__[name] for name in sorted(names) if name in item.__globals__]
    for cell in item.__closure__ or ():
        try:
            reached.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    reached += item.__defaults__ or ()
    for value in reached:
        if isinstance(value, ModuleType):
            continue
        # `mine = unpack_w3` above the answer hides the name; the object still carries it
        if isinstance(real := getattr(value, "__name__", None), str):
            yield real
        if getattr(value, "__module__", None) == item.__module__:
            yield from _used_names(value, seen)


def _unwrapped(function: FunctionType) -> FunctionType:
    inner = function
    while isinstance(wrapped := getattr(inner, "__wrapped__", None), FunctionType):
        inner = wrapped
    return inner


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)
