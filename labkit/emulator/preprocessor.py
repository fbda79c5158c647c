"""Which lines of a kernel's text the compiler will see: ``#if``, ``#ifdef`` and their kin.

A small model of the C preprocessor. It knows the macros that are passed with ``-D`` and the plain
``#define NAME value`` of the text itself, not those of included files: an expression that it cannot
evaluate counts as true. It only helps to find kernels and their parameters; the compiler decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from labkit.emulator.tokens import Token, tokenize

_PREDEFINED = {"__CUEMU__": "1", "__CUDACC__": "1", "__cplusplus": "202002L"}
_DEFINED = re.compile(r"\bdefined\s*(?:\(\s*(\w+)\s*\)|(\w+))")
_NUMBER = re.compile(r"\b(0[xX][0-9a-fA-F]+|\d+)[uUlL]*\b")
_SAFE = re.compile(r"^(?:0[xX][0-9a-fA-F]+|\d+|and|or|not|[-+*/%<>=!&|^~() ])*$")


def active_tokens(text: str, defines: Mapping[str, object] | None = None) -> list[Token]:
    """Tokens of ``text`` outside the branches that are not taken, directives left out."""
    macros = dict(_PREDEFINED)
    macros.update({name: str(value) for name, value in (defines or {}).items()})
    kept: list[Token] = []
    # A frame per open #if: (this branch is read, a branch was read already, the outside is read).
    frames: list[tuple[bool, bool, bool]] = []
    for token in tokenize(text):
        reading = frames[-1][0] if frames else True
        if token.kind != "directive":
            if reading:
                kept.append(token)
            continue
        name, rest = _directive(token.text)
        if name in ("if", "ifdef", "ifndef"):
            taken = reading and _condition(name, rest, macros)
            frames.append((taken, taken, reading))
        elif name in ("elif", "elifdef", "elifndef") and frames:
            _, done, outside = frames[-1]
            taken = outside and not done and _condition(name.removeprefix("el"), rest, macros)
            frames[-1] = (taken, done or taken, outside)
        elif name == "else" and frames:
            _, done, outside = frames[-1]
            frames[-1] = (outside and not done, True, outside)
        elif name == "endif" and frames:
            frames.pop()
        elif name == "define" and reading:
            match = re.match(r"(\w+)(\(?)\s*(.*)", rest, re.DOTALL)
            if match:
                macros[match[1]] = "" if match[2] else match[3].strip()
        elif name == "undef" and reading:
            macros.pop(rest.strip(), None)
    return kept


def _directive(text: str) -> tuple[str, str]:
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"/\*.*?\*/|//.*", " ", text, flags=re.DOTALL)
    match = re.match(r"#\s*(\w*)\s*(.*)", text, re.DOTALL)
    return (match[1], match[2].strip()) if match else ("", "")


def _condition(name: str, rest: str, macros: Mapping[str, str]) -> bool:
    if name == "ifdef":
        return rest.split()[:1] != [] and rest.split()[0] in macros
    if name == "ifndef":
        return not _condition("ifdef", rest, macros)
    return _evaluate(rest, macros)


def _evaluate(expression: str, macros: Mapping[str, str]) -> bool:
    expression = _DEFINED.sub(lambda m: str(int((m[1] or m[2]) in macros)), expression)
    for _ in range(8):  # macros may name macros
        replaced = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: f"({macros.get(m[0], '0') or '0'})", expression)
        if replaced == expression:
            break
        expression = replaced
    expression = _NUMBER.sub(lambda m: str(int(m[1], 16 if m[1][:2].lower() == "0x" else 10)), expression)
    expression = expression.replace("&&", " and ").replace("||", " or ").replace("\t", " ")
    expression = re.sub(r"!(?!=)", " not ", expression).replace("/", "//").strip()
    # The pattern admits numbers and operators only, so eval can call nothing; ** could take for ever.
    if len(expression) > 500 or "**" in expression or "<<" in expression or not _SAFE.match(expression):
        return True
    try:
        return bool(eval(expression, {"__builtins__": {}}))
    except Exception:
        return True
