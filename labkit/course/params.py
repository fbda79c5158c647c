"""A chapter's parameters, read from its source without running it, and the values given for them.

papermill only warns about an unknown name and hands over ``true`` as a string; here the
parameters cell and the ``course.start`` call are parsed, so both are refused before a cell runs.
"""

from __future__ import annotations

import ast
import difflib
import io
import json
import math
import re
import tokenize
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.course import rules
from labkit.course.notebook import Notebook, joined, read, tags
from labkit.errors import refuse

PARAMETERS_TAG = "parameters"
RESERVED = ("device", "solve")
CHAPTER_STARTS = ("course.start", "labkit.course.start")
BENCHMARK_STARTS = ("notebook.start", "labkit.bench.notebook.start")
_RULES: dict[str, Callable[..., rules.Rule]] = {
    "whole": rules.whole,
    "number": rules.number,
    "one_of": rules.one_of,
    "truth": rules.truth,
    "text": rules.text,
}
_TYPE_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
_TYPE_WORDS |= {"list": "a JSON list such as [1, 2]"}


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell.

    Attributes:
        type: ``"bool"``, ``"int"``, ``"float"``, ``"str"`` or ``"list"``: the type of the default.
        help: the comment behind it, or "".
        rule: what ``course.start`` accepts for it, or None.
    """

    name: str
    default: Any
    type: str
    help: str
    rule: rules.Rule | None = None


def read_parameters(source: Path | Notebook) -> list[Parameter]:
    """The parameters of a notebook in the order of its cell.

    Raises:
        InputError: no or several cells tagged ``parameters``, or a line that is not ``name = literal``.
    """
    book = read(source) if isinstance(source, Path) else source
    where = source.name if isinstance(source, Path) else "notebook"
    cells = [c for c in book["cells"] if c["cell_type"] == "code" and PARAMETERS_TAG in tags(c)]
    if len(cells) != 1:
        refuse(where, f"{len(cells)} cells tagged {PARAMETERS_TAG}", "one such cell")
    text = joined(cells[0]["source"])
    comments = _comments(text)
    found_rules = _start_rules(book)
    out = []
    for node in _parsed(text, where).body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if isinstance(node, ast.AnnAssign):
            target = node.target
        value = getattr(node, "value", None)
        if not isinstance(target, ast.Name) or value is None:
            refuse(where, f"line {node.lineno} of the parameters cell", "lines of the form name = literal")
        try:
            default = ast.literal_eval(value)
        except ValueError:
            refuse(where, f"{target.id} = {ast.unparse(value)}", "a literal bool, int, float, str or list")
        kind = type(default).__name__
        if kind not in _TYPE_WORDS:
            refuse(where, f"{target.id} of type {kind}", "a literal bool, int, float, str or list")
        line = node.end_lineno or node.lineno
        out.append(Parameter(target.id, default, kind, comments.get(line, ""), found_rules.get(target.id)))
    return out


def _parsed(text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        return refuse(where, f"a syntax error in line {error.lineno} of the parameters cell", "valid Python")


def _comments(text: str) -> dict[int, str]:
    out = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                out[token.start[0]] = token.string.lstrip("# ").strip()
    except tokenize.TokenError:
        return {}
    return out


def start_call(cell_source: str) -> ast.Call | None:
    """The ``course.start(...)`` call in a cell's source, or a benchmark's; None when there is none."""
    try:
        tree = ast.parse(cell_source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (*CHAPTER_STARTS, *BENCHMARK_STARTS):
            return node
    return None


def is_benchmark(cell_source: str) -> bool:
    """The cell starts a benchmark of ``notebooks/bench``, not a chapter."""
    call = start_call(cell_source)
    return call is not None and ast.unparse(call.func) in BENCHMARK_STARTS


def checked_names(cell_source: str) -> set[str]:
    """The parameters that a cell's ``course.start`` call checks: its pairs ``name=(name, rule)``."""
    call = start_call(cell_source)
    return {
        keyword.arg
        for keyword in (call.keywords if call else [])
        if keyword.arg and isinstance(keyword.value, ast.Tuple) and len(keyword.value.elts) == 2
        if isinstance(first := keyword.value.elts[0], ast.Name) and first.id == keyword.arg
    }


def _start_rules(book: Notebook) -> dict[str, rules.Rule]:
    """Rules by parameter name, from the pairs ``name=(name, course.whole(1, 64))`` of the start call."""
    out: dict[str, rules.Rule] = {}
    for cell in book["cells"]:
        call = start_call(joined(cell["source"])) if cell["cell_type"] == "code" else None
        if call is None:
            continue
        for keyword in call.keywords:
            pair = keyword.value
            if not isinstance(pair, ast.Tuple) or len(pair.elts) != 2:
                continue
            name, rule = pair.elts
            if isinstance(name, ast.Name) and isinstance(rule, ast.Call) and (made := _rule(rule)):
                out[name.id] = made
        break
    return out


def _rule(call: ast.Call) -> rules.Rule | None:
    """The rule a call builds, None when its arguments are not literals (the cell itself checks then)."""
    make = _RULES.get(ast.unparse(call.func).rsplit(".", 1)[-1])
    if make is None:
        return None
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        named = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg is not None}
        return make(*args, **named)
    except (ValueError, TypeError):
        return None


def coerce(parameter: Parameter, value: Any) -> Any:
    """The value for a parameter, from command-line text or of the right type already.

    Raises:
        InputError: naming the parameter, what came, and what its type and rule accept.
    """
    converted = _typed(parameter, value)
    return parameter.rule.check(parameter.name, converted) if parameter.rule else converted


def _typed(parameter: Parameter, value: Any) -> Any:
    name, kind = parameter.name, parameter.type
    expected = parameter.rule.expected() if parameter.rule else _TYPE_WORDS[kind]
    given_text = value.strip() if isinstance(value, str) else None
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "bool":
        word = given_text.lower() if given_text is not None else str(value).lower()
        if isinstance(value, (bool, str, int)) and word in rules.TRUE_WORDS + rules.FALSE_WORDS:
            return word in rules.TRUE_WORDS
    if kind == "int":
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if given_text is not None and re.fullmatch(r"[+-]?\d+", given_text):
            return int(given_text)
    if kind == "float" and not isinstance(value, bool):
        try:
            number = float(given_text if given_text is not None else value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
    if kind == "list":
        try:
            items = json.loads(given_text) if given_text is not None else value
        except ValueError:
            items = None
        if isinstance(items, (list, tuple)):
            return list(items)
    return refuse(name, repr(value), expected)


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """``["batch=4"]`` -> ``{"batch": "4"}``; InputError for text without ``=`` or a name twice."""
    out: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            refuse("-p", repr(pair), "name=value, such as -p batch=4")
        if name in out:
            refuse("-p", f"{name} twice", "each name once")
        out[name] = value
    return out


def assign(given: Mapping[str, Any], known: Mapping[str, list[Parameter]]) -> dict[str, dict[str, Any]]:
    """Values for each chapter: a name counts when at least one chapter has it.

    Args:
        given: name -> text or value, as typed by the user.
        known: chapter number -> its parameters.

    Raises:
        InputError: for a name that no chapter has, or a value that a chapter refuses.
    """
    names = sorted({p.name for parameters in known.values() for p in parameters})
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            fix = f"did you mean {near[0]}?" if near else ""
            refuse("-p", f"unknown parameter {name!r}", f"one of {', '.join(names) or 'none'}", fix)
    return {
        number: {p.name: coerce(p, given[p.name]) for p in parameters if p.name in given}
        for number, parameters in known.items()
    }
