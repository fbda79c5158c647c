"""Errors that a user can act on: each names the argument, what came, what was expected, the fix.

``InputError`` is a ``ValueError``: library callers may catch it as such, and the command
line prints it without a traceback (exit code 2).
"""

from __future__ import annotations

from typing import NoReturn


class InputError(ValueError):
    """A value the caller can correct.

    Args:
        argument: name of the argument, file or field that is wrong.
        received: what came, in words or as a short repr.
        expected: what would have been accepted.
        fix: one line that mends it; empty when ``expected`` already says it.
    """

    def __init__(self, argument: str, received: object, expected: str, fix: str = "") -> None:
        self.argument = argument
        self.received = str(received)
        self.expected = expected
        self.fix = fix
        message = f"{argument}: got {self.received}; expected {expected}"
        super().__init__(f"{message}. Fix: {fix}" if fix else message)


class ModelFileError(InputError):
    """A model file that is corrupt, truncated, or uses a feature labkit does not support."""


class MissingModelError(InputError):
    """No model file at the place that was named; ``fix`` is the line that brings it."""


def refuse(argument: str, received: object, expected: str, fix: str = "") -> NoReturn:
    """Raise :class:`InputError`; a function, so that a check reads as one line."""
    raise InputError(argument, received, expected, fix)


def require(ok: bool, argument: str, received: object, expected: str, fix: str = "") -> None:
    """Raise :class:`InputError` unless ``ok``."""
    if not ok:
        raise InputError(argument, received, expected, fix)
