"""The result file: one schema for every kind of result, its version, and what older files become.

The fields are those of :class:`labkit.bench.record.Record` and its entries; pydantic checks them,
strictly (a number in quotes is no number), when a file is read. Keys that this version does not know
are left out, so a file of a later minor change is still read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labkit.errors import InputError, refuse, require
from labkit.results import honest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from labkit.bench.record import Record

NAME = "labkit.result"
VERSION = 2
"""2 (2026-12): ``version`` apart from the schema's name, ``source``; 1 was "labkit.bench/1"."""

_OLD = "labkit.bench/1"


def _from_1(value: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had no quoted results, so nothing to name as a source."""
    return {**value, "schema": NAME, "version": 2, "source": value.get("source", "")}


UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""Version → what makes the next version of a file's content; returns a new object."""


def version_of(source: str, value: Any) -> int:
    """The version of a file's content; InputError when it is no result file of a known version."""
    if not isinstance(value, dict):
        refuse(source, f"schema of {type(value).__name__}", f"a result file ({NAME}, version {VERSION})")
    named, version = value.get("schema"), value.get("version")
    if named == _OLD:
        return 1
    require(
        named == NAME, source, f"schema {named!r}", f"a result file of labkit ({NAME}, version {VERSION})"
    )
    if not isinstance(version, int) or isinstance(version, bool) or version < 2:
        refuse(f"{source}: version", repr(version), f"a whole number from 2 to {VERSION}")
    require(
        version <= VERSION, f"{source}: version", version, f"at most {VERSION}", "a newer labkit reads it"
    )
    return version


def upgraded(source: str, value: Any) -> dict[str, Any]:
    """A file's content as this version has it; what is given is not changed."""
    version = version_of(source, value)
    while version < VERSION:
        value = UPGRADES[version](value)
        version += 1
    found: dict[str, Any] = value
    return found


@functools.cache
def adapter() -> TypeAdapter[Record]:
    """pydantic's validator of a record; made once, at the first reading."""
    from pydantic import TypeAdapter

    from labkit.bench.record import Record

    return TypeAdapter(Record)


def parse(source: str, text: str) -> Record:
    """A record out of a file's text.

    Raises:
        InputError: not JSON, another schema, a newer version, a field that is missing or of the
            wrong type, or a record that contradicts itself (:mod:`labkit.results.honest`); names ``source``
            and the field.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(source, f"no whole JSON ({error})", "a record of labkit bench") from error
    return validated(source, upgraded(source, value))


def validated(source: str, value: dict[str, Any]) -> Record:
    """A record out of an object of this version."""
    from pydantic import ValidationError

    try:
        found = adapter().validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise _in_words(source, error.errors()[0]) from None
    honest.check(source, found)
    return found


_EXPECTED = {
    "list_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
}


def _in_words(source: str, error: Any) -> InputError:
    """The first finding of pydantic as our own error: file, place, what came, what was expected."""
    where = ""
    *outer, last = error["loc"] or ("",)
    if error["type"] == "missing":
        return InputError(_place(source, outer), f"no {last}", f"the field {last}")
    where = _place(source, error["loc"])
    inner = error.get("ctx", {}).get("error")
    if isinstance(inner, InputError):
        return InputError(f"{where}: {inner.argument}", inner.received, inner.expected, inner.fix)
    came = error["input"]
    plain = came is None or isinstance(came, float)
    expected = _EXPECTED.get(error["type"], error["msg"].removeprefix("Input should be "))
    return InputError(where, repr(came) if plain else type(came).__name__, expected)


def _place(source: str, location: Any) -> str:
    text = source
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f": {part}"
    return text
