"""Is there an answer at all? A stub is recognised without running it where that is possible."""

from __future__ import annotations

import dis
from types import FunctionType
from typing import Any

_QUIET = {"RESUME", "NOP", "POP_TOP", "CACHE", "PRECALL", "COPY_FREE_VARS", "MAKE_CELL"}
_EMPTY_RETURN = [["LOAD_CONST", "RETURN_VALUE"], ["RETURN_CONST"]]


def is_blank(answer: Any, text_stub: str = "") -> bool:
    """True for None, ``...``, NotImplemented, a container of only those, or a stub function.

    ``text_stub`` is the mark of a CUDA C++ stub; then an unchanged or empty text is blank too.
    """
    if text_stub and isinstance(answer, str):
        from labkit.check.cuda_text import is_unattempted

        return is_unattempted(answer, text_stub)
    if answer is None or answer is Ellipsis or answer is NotImplemented:
        return True
    if isinstance(answer, dict):
        return bool(answer) and all(is_blank(value) for value in answer.values())
    if isinstance(answer, (list, tuple)):
        return bool(answer) and all(is_blank(value) for value in answer)
    return isinstance(answer, FunctionType) and is_stub(answer)


def is_stub(function: FunctionType) -> bool:
    """True when the body is only a docstring, ``...``, ``pass``, ``return None`` or NotImplementedError.

    Byte code, not source: source is missing for functions typed at a prompt.
    """
    instructions = [i for i in dis.get_instructions(function) if i.opname not in _QUIET]
    names = [i.opname for i in instructions]
    if names in _EMPTY_RETURN:
        return instructions[0].argval is None or instructions[0].argval is Ellipsis
    loads = [i.argval for i in instructions if i.opname == "LOAD_GLOBAL"]
    raising = bool(names) and "RAISE_VARARGS" in names and loads == ["NotImplementedError"]
    # `raise NotImplementedError("...")` loads a name and a text, calls, raises; anything more is an answer
    return raising and all(
        name in {"LOAD_GLOBAL", "LOAD_CONST", "PUSH_NULL", "CALL", "CALL_FUNCTION", "RAISE_VARARGS"}
        for name in names
    )


class Watched:
    """Calls a student's function and remembers whether it ever gave anything back."""

    def __init__(self) -> None:
        self.calls = 0
        self.only_blank = True
        self.last: Any = None

    def wrap(self, function: Any) -> Any:
        """A stand-in for ``function`` with the same name, signature and ``__wrapped__``."""
        import functools

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            try:
                value = function(*args, **kwargs)
            except BaseException:
                self.only_blank = False
                raise
            self.last = value
            if not (value is None or value is NotImplemented or value is Ellipsis):
                self.only_blank = False
            return value

        return watched

    @property
    def never_answered(self) -> bool:
        """True when the function was called and every call gave nothing back."""
        return self.calls > 0 and self.only_blank
