"""Answers in other clothes: NumPy and torch results as the plain values that a check compares."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import numpy as np

_MOST = 10_000  # no right answer is longer, and an iterator may never end


def plain_int(value: Any) -> Any:
    """An int for every kind of integer (NumPy's and torch's too); anything else unchanged."""
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return value


def items(value: Any) -> list[Any] | None:
    """The items of a list, tuple, set, range, array [n] or tensor [n]; None for anything else."""
    if isinstance(value, str | bytes | dict):
        return None
    try:
        return list(itertools.islice(value, _MOST))
    except (TypeError, ValueError, RuntimeError):
        return None


def pair(value: Any) -> tuple[Any, Any] | None:
    """Both values of a sequence of two, in order; None for anything else (a set has no order)."""
    found = None if isinstance(value, set | frozenset) else items(value)
    return (found[0], found[1]) if found is not None and len(found) == 2 else None


def array(value: Any) -> np.ndarray | None:
    """A real-valued NumPy array from an array, a tensor on any device or nested lists; else None."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return found if found.dtype.kind in "biuf" else None
