"""A small C preprocessor: enough to read a kernel's declarations, never to compile it.

It removes comments and string contents, follows ``#if``/``#ifdef`` with the given defines, and
collects object-like macros and type names. Line numbers stay as they are. The emulator finds kernels
with it as well. Standard library only.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.errors import InputError

# What a kernel's text may ask about the compiler; declarations do not depend on the architecture.
PREDEFINED = {"__CUDACC__": "1", "__CUDACC_RTC__": "1", "__CUDA_ARCH__": "800", "__cplusplus": "201703"}

_COMMENT_OR_LITERAL = re.compile(
    r'//(?:[^\n\\]|\\\n|\\)*|/\*.*?\*/|R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'',
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)(.*)$", re.DOTALL)
_TYPEDEF = re.compile(r"\btypedef\s+([\w:\s]+?[\s*]+)(\w+)\s*;")
_USING = re.compile(r"\busing\s+(\w+)\s*=\s*([\w:\s*<>,]+?)\s*;")
_IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*\b")
_MOST_EXPANSIONS = 32
_CONDITIONALS = ("if", "ifdef", "ifndef", "elif", "elifdef", "elifndef", "else", "endif")


def read_text(path: Path) -> str:
    """The CUDA C++ of a file.

    Raises:
        InputError: it cannot be read, or is not UTF-8 (an editor that saves as GBK or UTF-16).
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(
            path.name, f"bytes that are no UTF-8 in line {line}", "UTF-8", "save it as UTF-8"
        ) from error
    except OSError as error:
        raise InputError(path.name, error.strerror or "unreadable", "a file that can be read") from error


def without_comments(text: str) -> str:
    """``text`` with comments as blanks, newlines kept."""
    return _COMMENT_OR_LITERAL.sub(lambda m: _blank(m[0]) if m[0].startswith(("//", "/*")) else m[0], text)


def without_literals(text: str) -> str:
    """``text`` with comments, strings and character constants as blanks, newlines kept."""
    return _COMMENT_OR_LITERAL.sub(lambda m: _blank(m[0]), text)


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


@dataclass
class Preprocessed:
    """A text after its conditionals.

    Attributes:
        code: the text itself; directives, dead branches, comments and literals are blanks.
        headers: the same of every quoted header that it includes, for their type names.
        macros: object-like macros that are defined at the end.
    """

    code: str = ""
    headers: str = ""
    macros: dict[str, str] = field(default_factory=dict)

    def expand(self, text: str) -> str:
        """``text`` with object-like macros replaced."""
        for _ in range(_MOST_EXPANSIONS):
            expanded = _IDENTIFIER.sub(lambda m: self.macros.get(m[0], m[0]), text)
            if expanded == text:
                break
            text = expanded
        return text

    def type_names(self) -> dict[str, str]:
        """Names given by ``typedef`` and ``using`` → the type they stand for."""
        found: dict[str, str] = {}
        for text in (self.headers, self.code):
            found |= {name: kind.strip() for kind, name in _TYPEDEF.findall(text)}
            found |= dict(_USING.findall(text))
        return found


def preprocess(
    text: str,
    defines: Mapping[str, object] | None = None,
    include_dirs: Sequence[Path] = (),
    *,
    predefined: Mapping[str, str] = PREDEFINED,
) -> Preprocessed:
    """Read ``text`` as a compiler with ``-Dname=value`` for every define would.

    Args:
        text: CUDA C++.
        defines: name → value; True stands for 1.
        include_dirs: folders of the quoted headers; a header that is not there is skipped.
        predefined: macros of the compiler itself.

    Returns:
        Its ``code`` has every remaining character where ``text`` has it.
    """
    done = Preprocessed(macros=dict(predefined))
    done.macros |= {name: define_text(value) for name, value in (defines or {}).items()}
    done.code = _read(text, done, tuple(include_dirs), set())
    return done


def define_text(value: object) -> str:
    """The text of a ``-D`` value: True and False are 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)


@dataclass
class _Branch:
    """One open ``#if``: whether the lines count, and whether a branch of it has been taken."""

    live: bool
    taken: bool


def _read(text: str, done: Preprocessed, include_dirs: tuple[Path, ...], seen: set[Path]) -> str:
    kept: list[str] = []
    branches: list[_Branch] = []
    bare, start = without_literals(text), 0
    for line in _logical_lines(without_comments(text)):
        # A raw string may span lines and hold what looks like a directive: blank in ``bare``.
        plain, start = bare[start : start + len(line)], start + len(line) + 1
        live = all(branch.live for branch in branches)
        if not plain.lstrip().startswith("#"):
            kept.append(plain if live else _blank(line))
            continue
        kept.append(_blank(line))
        directive = _DIRECTIVE.match(line)
        if directive is None:
            continue  # a lone #
        word, rest = directive[1], re.sub(r"\\\r?\n", " ", directive[2]).strip()
        if word in _CONDITIONALS:
            _branch(word, rest, branches, done)
        elif live and word == "define":
            name = re.match(r"(\w+)(?!\w|\()", rest)
            if name:  # a macro with arguments is left alone
                done.macros[name[1]] = rest[name.end() :].strip()
        elif live and word == "undef":
            done.macros.pop(rest, None)
        elif live and word == "include" and rest.startswith('"'):
            _include(rest.strip('"'), done, include_dirs, seen)
    return "\n".join(kept)


def _logical_lines(text: str) -> list[str]:
    """Lines; one that ends in a backslash keeps its newline and the next line."""
    lines: list[str] = []
    joined = ""
    for line in text.split("\n"):
        joined += line
        if line.removesuffix("\r").endswith("\\"):
            joined += "\n"
            continue
        lines.append(joined)
        joined = ""
    return lines + [joined] if joined else lines


def _branch(word: str, rest: str, branches: list[_Branch], done: Preprocessed) -> None:
    if word in ("if", "ifdef", "ifndef"):
        live = _holds(word, rest, done)
        branches.append(_Branch(live, live))
    elif not branches:
        return  # the compiler will say so
    elif word == "endif":
        branches.pop()
    else:
        branch = branches[-1]
        live = not branch.taken and (word == "else" or _holds(word.removeprefix("el"), rest, done))
        branch.live, branch.taken = live, branch.taken or live


def _holds(word: str, rest: str, done: Preprocessed) -> bool:
    """The condition of an ``if``, ``ifdef`` or ``ifndef``."""
    if word == "if":
        return evaluate(rest, done)
    return (rest.split()[0] in done.macros if rest else False) == (word == "ifdef")


def _include(name: str, done: Preprocessed, include_dirs: tuple[Path, ...], seen: set[Path]) -> None:
    for folder in include_dirs:
        path = folder / name
        if path.is_file():
            if path not in seen:
                seen.add(path)
                header = _read(read_text(path), done, (path.parent, *include_dirs), seen)
                done.headers += header + "\n"
            return


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate(condition: str, done: Preprocessed) -> bool:
    """An ``#if`` condition; one that is too clever for this reader counts as true."""
    value = constant(condition, done, unknown_as_zero=True)
    return value is None or value != 0


def constant(expression: str, done: Preprocessed, *, unknown_as_zero: bool = False) -> int | None:
    """An integer constant expression, or None when this reader cannot work it out.

    Args:
        expression: C++ text.
        done: its macros are replaced.
        unknown_as_zero: what ``#if`` does with a name that is no macro.
    """
    text = re.sub(
        r"\bdefined\s*(?:\(\s*(\w+)\s*\)|(\w+))",
        lambda m: "1" if (m[1] or m[2]) in done.macros else "0",
        expression,
    )
    text = done.expand(text)
    text = re.sub(r"\b(0[xX][0-9a-fA-F]+|\d+)[uUlL]*\b", r"\1", text)
    text = re.sub(r"\b0+(\d)", r"\1", text)
    text = re.sub(r"\btrue\b", "1", re.sub(r"\bfalse\b", "0", text))
    if unknown_as_zero:
        text = _IDENTIFIER.sub("0", text)
    text = text.replace("&&", " and ").replace("||", " or ").replace("/", "//")
    text = re.sub(r"!(?!=)", " not ", text)
    try:
        return int(_value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, KeyError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(value) for value in values)
        case ast.BoolOp(values=values):
            return any(_value(value) for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_value(operand)
        case ast.BinOp(op=ast.LShift(), right=right) if _value(right) > 63:
            raise ValueError("a shift beyond any C integer, which Python would work out for ever")
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _COMPARE[type(op)](_value(left), _value(right))
    raise ValueError(ast.dump(node))
