"""Rules for a chapter's parameters: each checks one value and says what it would accept.

The constructors take plain literals only: the runner reads them out of a notebook
without running it (see :mod:`labkit.course.params`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from labkit.errors import refuse

TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")


class Rule:
    """What a parameter may be: ``check`` returns the value to use or raises InputError."""

    def expected(self) -> str:
        """The accepted values, in words."""
        raise NotImplementedError

    def check(self, name: str, value: Any) -> Any:
        """Return ``value`` (an int may become a float); raise :class:`labkit.errors.InputError`."""
        raise NotImplementedError


def _range_words(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return f" of at most {high}" if high is not None else ""


def _outside(value: float, low: float | None, high: float | None) -> bool:
    return (low is not None and value < low) or (high is not None and value > high)


@dataclass(frozen=True)
class _Whole(Rule):
    low: int | None
    high: int | None
    multiple_of: int

    def expected(self) -> str:
        step = f", a multiple of {self.multiple_of}" if self.multiple_of != 1 else ""
        return f"a whole number{_range_words(self.low, self.high)}{step}"

    def check(self, name: str, value: Any) -> int:
        # bool is an int in Python; `batch=True` is a mistake, not a batch of one.
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(name, repr(value), self.expected())
        if _outside(value, self.low, self.high) or value % self.multiple_of:
            refuse(name, repr(value), self.expected())
        return value


@dataclass(frozen=True)
class _Number(Rule):
    low: float | None
    high: float | None

    def expected(self) -> str:
        return f"a number{_range_words(self.low, self.high)}"

    def check(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            refuse(name, repr(value), self.expected())
        if _outside(value, self.low, self.high):
            refuse(name, repr(value), self.expected())
        return float(value)


@dataclass(frozen=True)
class _OneOf(Rule):
    choices: tuple[Any, ...]

    def expected(self) -> str:
        return "one of " + ", ".join(repr(choice) for choice in self.choices)

    def check(self, name: str, value: Any) -> Any:
        for choice in self.choices:
            if type(choice) is type(value) and choice == value:
                return choice
        return refuse(name, repr(value), self.expected())


@dataclass(frozen=True)
class _Truth(Rule):
    def expected(self) -> str:
        return "True or False"

    def check(self, name: str, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        # plain papermill hands over "true" as a string and 1 as an int
        word = str(value).strip().lower()
        if isinstance(value, (str, int)) and word in TRUE_WORDS + FALSE_WORDS:
            return word in TRUE_WORDS
        return refuse(name, repr(value), self.expected())


@dataclass(frozen=True)
class _Text(Rule):
    max_length: int
    empty: bool

    def expected(self) -> str:
        least = "" if self.empty else "non-empty "
        return f"{least}text of at most {self.max_length} characters"

    def check(self, name: str, value: Any) -> str:
        if (
            not isinstance(value, str)
            or len(value) > self.max_length
            or (not self.empty and not value.strip())
        ):
            refuse(name, repr(value), self.expected())
        return value


def whole(low: int | None = None, high: int | None = None, *, multiple_of: int = 1) -> Rule:
    """A whole number in ``low..high`` (both ends included), a multiple of ``multiple_of``."""
    return _Whole(low, high, multiple_of)


def number(low: float | None = None, high: float | None = None) -> Rule:
    """A finite number in ``low..high`` (both ends included); the value becomes a float."""
    return _Number(low, high)


def one_of(*choices: Any) -> Rule:
    """One of the literals given, of the same type."""
    if not choices:
        refuse("choices", "none", "at least one choice")
    return _OneOf(choices)


def truth() -> Rule:
    """True or False; the words true/false/yes/no/on/off/1/0 are understood as well."""
    return _Truth()


def text(max_length: int = 2000, *, empty: bool = False) -> Rule:
    """Text of at most ``max_length`` characters; empty only where ``empty`` is True."""
    return _Text(max_length, empty)
