"""Fields of configuration files can hold anything: what is not of the expected kind is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from labkit.errors import ModelFileError

MAX_TOKEN_ID = (1 << 31) - 1
_SHOWN = 80


def shown(value: object) -> str:
    """``value`` for a message: "nothing" for None, cut short, never an error (10**5000 has no repr)."""
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def is_whole(value: object) -> bool:
    """An int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """An int or float (no bool) with a finite float value; 10**400 has none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def whole(
    record: Mapping[str, Any], key: str, default: int | None = None, *, least: int | None = None
) -> int:
    """``record[key]``, or ``default`` when it is absent and there is one.

    Raises:
        ModelFileError: absent without default, not a whole number, or below ``least``.
    """
    value = record.get(key, default)
    if not is_whole(value) or (least is not None and value < least):  # type: ignore[operator]
        expected = "a whole number" if least is None else f"a whole number of at least {least}"
        raise ModelFileError(key, shown(value), expected)
    return int(value)  # type: ignore[arg-type]


def number(record: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """``record[key]`` as for :func:`whole`, finite."""
    value = record.get(key, default)
    if not is_number(value):
        raise ModelFileError(key, shown(value), "a finite number")
    return float(value)  # type: ignore[arg-type]


def truth(record: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """``record[key]``, or ``default`` when it is absent or null."""
    value = record.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelFileError(key, shown(value), "true or false")
    return value


def token_ids(value: object, where: str) -> tuple[int, ...]:
    """Token ids of a field that holds none (None), one, or a list of them; doubles are dropped."""
    if value is None:
        return ()
    found: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    for token in found:
        # Some published configurations name ids past the embedding; those are never produced.
        if not is_whole(token) or not 0 <= token <= MAX_TOKEN_ID:
            raise ModelFileError(where, shown(token), f"a whole number from 0 to {MAX_TOKEN_ID}")
    return tuple(dict.fromkeys(found))
