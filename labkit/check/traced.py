"""A traced integer: behaves like an int under operators, and counts every one of them.

A check gives it to an answer in place of a plain int, to score the answer in operations. What
would hide work from the count (conversion to int, indexing a table, text) is refused.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn


class HiddenWork(TypeError):
    """The answer left the counted operators, so its work cannot be scored."""


OPERATORS = "& | ^ ~ << >> + - * // % and comparisons of ints"
"""What :class:`TracedInt` counts, for messages."""


class TracedInt:
    """An int whose operators are counted in ``counts`` (operator sign to number of uses).

    Results share the counter of their operands, so one counter sees a whole computation. A
    comparison counts as one operation and gives a traced 0 or 1.
    """

    __slots__ = ("counts", "value")

    def __init__(self, value: int, counts: Counter[str]) -> None:
        self.value = value
        self.counts = counts

    def __repr__(self) -> str:
        return f"<traced {self.value}>"

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> NoReturn:
        raise HiddenWork(f"a number that is counted cannot index, print or convert: use {OPERATORS}")

    __int__ = __float__ = __str__ = __index__

    def __format__(self, spec: str) -> NoReturn:
        self.__index__()

    __hash__: Any = None  # a table keyed by the byte would hide the work


def _binary(sign: str, plain: Callable[[int, int], Any]) -> tuple[Any, Any]:
    def forward(self: TracedInt, other: Any) -> Any:
        if not isinstance(other, int | TracedInt):
            # NotImplemented would make == fall back to identity, and quietly be False
            raise HiddenWork(f"{sign} is counted between ints only")
        self.counts[sign] += 1
        return TracedInt(int(plain(self.value, plain_value(other))), self.counts)

    def backward(self: TracedInt, other: Any) -> Any:
        if not isinstance(other, int):
            raise HiddenWork(f"{sign} is counted between ints only")
        self.counts[sign] += 1
        return TracedInt(int(plain(other, self.value)), self.counts)

    return forward, backward


def _unary(sign: str, plain: Callable[[int], int]) -> Any:
    def apply(self: TracedInt) -> TracedInt:
        self.counts[sign] += 1
        return TracedInt(plain(self.value), self.counts)

    return apply


_BINARY = {
    "and": "&",
    "or": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "mod": "%",
}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _sign in _BINARY.items():
    _forward, _backward = _binary(_sign, getattr(operator, f"{_name}_" if _name in ("and", "or") else _name))
    setattr(TracedInt, f"__{_name}__", _forward)
    setattr(TracedInt, f"__r{_name}__", _backward)
for _name, _sign in _COMPARE.items():
    setattr(TracedInt, f"__{_name}__", _binary(_sign, getattr(operator, _name))[0])
for _name, _sign in {"invert": "~", "neg": "-"}.items():
    setattr(TracedInt, f"__{_name}__", _unary(_sign, getattr(operator, _name)))


def plain_value(value: Any) -> Any:
    """The int inside a traced number; anything else unchanged."""
    return value.value if isinstance(value, TracedInt) else value


def count_operations(function: Callable[..., Any], *numbers: int) -> tuple[int, Any]:
    """Call ``function`` on traced ``numbers``.

    Returns:
        How many operators it used, and what it returned.

    Raises:
        HiddenWork: the function failed on traced numbers, whatever the error was.
    """
    counts: Counter[str] = Counter()
    try:
        result = function(*(TracedInt(number, counts) for number in numbers))
    except HiddenWork:
        raise
    except Exception as error:
        # other operators (divmod, /) fail in Python's own words, which name a class nobody wrote
        raise HiddenWork(f"only these operators are counted: {OPERATORS}") from error
    return counts.total(), result
