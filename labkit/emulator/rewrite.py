"""The one rewrite that a kernel's text needs: shared memory and device variables.

A C++ compiler takes CUDA C++ as it is once the qualifiers are macros, but for shared memory:
``extern __shared__ T x[];`` has no meaning to it, and the runtime must learn where each array lies.
:func:`rewrite` changes these declarations only and keeps every line number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labkit.emulator.statements import (
    TYPE_WORDS,
    has_body,
    joined,
    kernel_head,
    statement_end,
    statement_start,
    words,
)
from labkit.emulator.tokens import Token, closing, skip_angles, split, tokenize

_ALIGNING = words("alignas __align__ __builtin_align__")
_MEMORY = words("__device__ __constant__ __managed__")


@dataclass(frozen=True)
class _Declarator:
    name: str
    dims: str  # "[32][33]"
    stars: str  # "*" for a pointer kept in shared memory


@dataclass(frozen=True)
class _Edit:
    start: int
    end: int
    new: str


def rewrite(text: str) -> str:
    """``text`` with its ``__shared__`` and ``__device__`` variables made known to the runtime.

    ``extern __shared__ T x[];`` becomes a pointer to the block's dynamic shared memory. Every other
    declaration stays and is followed by a call that registers it. Line numbers stay. A declaration inside
    a macro is left alone.
    """
    tokens = [token for token in tokenize(text) if token.kind != "directive"]
    at_file_scope = _file_scope(tokens)
    edits: list[_Edit] = []
    edits.extend(_device_edits(tokens, at_file_scope))
    register_in_kernels = ""
    for i, first, last in _shared_statements(tokens):
        statement = tokens[first:last]
        declared = _declaration(statement)
        if declared is None:
            continue
        type_text, declarators = declared
        span = text[tokens[first].start : tokens[last].end]
        if any(part.text == "extern" for part in statement):
            new = _dynamic(type_text, declarators, file_scope=at_file_scope[i])
            edits.append(_Edit(tokens[first].start, tokens[last].end, new + "\n" * span.count("\n")))
            continue
        edits.extend(_static_edits(statement))
        calls = "".join(f' CUEMU_REG_SHARED({d.name}, "{_escape(d.dims)}");' for d in declarators)
        if at_file_scope[i]:
            register_in_kernels += calls
        else:
            edits.append(_Edit(tokens[last].end, tokens[last].end, calls))
    if register_in_kernels:
        edits.extend(_Edit(at, at, register_in_kernels) for at in _kernel_bodies(tokens))
    return _apply(text, edits)


def _shared_statements(tokens: Sequence[Token]) -> Iterator[tuple[int, int, int]]:
    """Of every declaration with ``__shared__``: the index of that word, of its first token, of its ``;``."""
    previous_end = -1
    for i, token in enumerate(tokens):
        if token.text != "__shared__" or token.kind != "word" or i <= previous_end:
            continue
        last = statement_end(tokens, i)
        if last is not None:
            previous_end = last
            yield i, statement_start(tokens, i), last


def keeps_state(text: str) -> bool:
    """Whether ``text`` has ``__device__`` variables, which all blocks of a launch share."""
    return "CUEMU_REG_DEVICE(" in rewrite(text)


def initialised_shared(text: str) -> int | None:
    """Line of the first ``__shared__`` variable with an initial value, which CUDA does not allow."""
    tokens = [token for token in tokenize(text) if token.kind != "directive"]
    for i, _, last in _shared_statements(tokens):
        for part in split(tokens[i:last]):
            after_name = (_name_index(part) or 0) + 1
            while after_name < len(part) and part[after_name].text == "[":
                after_name = closing(part, after_name) + 1
            if after_name < len(part) and part[after_name].text == "=":
                return tokens[i].line
    return None


def _apply(text: str, edits: Sequence[_Edit]) -> str:
    pieces: list[str] = []
    position = 0
    for edit in sorted(edits, key=lambda e: (e.start, e.end)):
        pieces += [text[position : edit.start], edit.new]
        position = edit.end
    return "".join(pieces) + text[position:]


def _declaration(statement: Sequence[Token]) -> tuple[str, list[_Declarator]] | None:
    """Type and declarators of a shared-memory declaration; None when it has no name."""
    plain = _without_storage(statement)
    parts = split(plain)
    names = [_name_index(part) for part in parts]
    if any(index is None for index in names):
        return None
    declarators: list[_Declarator] = []
    type_tokens: list[Token] = []
    for number, (part, index) in enumerate(zip(parts, names, strict=True)):
        assert index is not None
        before = part[:index]
        stars = 0
        while before and before[-1].text == "*":
            before = before[:-1]
            stars += 1
        if number == 0:
            type_tokens = list(before)
        declarators.append(_Declarator(part[index].text, _dims(part[index + 1 :]), "*" * stars))
    return joined(type_tokens), declarators


def _without_storage(statement: Sequence[Token]) -> list[Token]:
    """The statement without ``__shared__``, ``extern``, ``static`` and alignment."""
    kept: list[Token] = []
    i = 0
    while i < len(statement):
        token = statement[i]
        if token.text in _ALIGNING or token.text == "__attribute__":
            i = closing(statement, i + 1)
        elif token.text not in ("__shared__", "extern", "static"):
            kept.append(token)
        i += 1
    return kept


def _name_index(part: Sequence[Token]) -> int | None:
    """Index of the declared name: the last word before the dimensions or the initialiser."""
    name: int | None = None
    i = 0
    while i < len(part):
        token = part[i]
        if token.kind == "word":
            name = i
            if i + 1 < len(part) and part[i + 1].text == "<":
                i = max(skip_angles(part, i + 1) - 1, i)
        elif token.text == "{" and name is not None and part[0].text in ("struct", "union", "class"):
            i = closing(part, i)
            name = None
        elif token.text in ("[", "=", "{"):
            break
        elif token.text == "(":
            if i and part[i - 1].text == "decltype":
                i = closing(part, i)
                name = None
            else:
                return None  # a pointer to an array, or a constructor call: left alone
        i += 1
    if name is not None and part[name].text in TYPE_WORDS:
        return None
    return name


def _dims(tokens: Sequence[Token]) -> str:
    out = ""
    i = 0
    while i < len(tokens) and tokens[i].text == "[":
        close = closing(tokens, i)
        out += "[" + " ".join(token.text for token in tokens[i + 1 : close]) + "]"
        i = close + 1
    return out


def _static_edits(statement: Sequence[Token]) -> Iterator[_Edit]:
    """``static`` is in the macro already; ``alignas`` may not follow it, the attribute may."""
    for i, token in enumerate(statement):
        if token.text == "static":
            yield _Edit(token.start, token.end, "")
        elif token.text in _ALIGNING:
            close = closing(statement, i + 1)
            if close < len(statement):
                yield _Edit(token.start, token.end, "__attribute__((aligned")
                yield _Edit(statement[close].end, statement[close].end, "))")


def _device_edits(tokens: Sequence[Token], at_file_scope: Sequence[bool]) -> Iterator[_Edit]:
    """``__device__`` variables are registered; ``__constant__`` ones lose a second ``static``."""
    previous_end = -1
    for i, token in enumerate(tokens):
        if token.text not in ("__device__", "__constant__") or i <= previous_end or not at_file_scope[i]:
            continue
        last = statement_end(tokens, i)
        if last is None:
            continue
        first = statement_start(tokens, i)
        statement = tokens[first:last]
        words = {part.text for part in statement}
        if words & {"template", "extern", "__shared__", "__global__"}:
            continue
        declared = _declaration([part for part in statement if part.text not in _MEMORY])
        if declared is None:
            continue  # a function
        previous_end = last
        if "__constant__" in words:
            yield from (_Edit(part.start, part.end, "") for part in statement if part.text == "static")
        else:
            calls = "".join(f" CUEMU_REG_DEVICE({d.name})" for d in declared[1])
            yield _Edit(tokens[last].end, tokens[last].end, calls)


def _dynamic(type_text: str, declarators: Sequence[_Declarator], *, file_scope: bool) -> str:
    storage = "static " if file_scope else ""
    out: list[str] = []
    for declarator in declarators:
        inner = re.sub(r"^\[[^\]]*\]", "", declarator.dims)
        element = type_text + declarator.stars
        if inner:
            pointer, cast = f"{element} (* const {declarator.name}){inner}", f"{element} (*){inner}"
        else:
            pointer, cast = f"{element}* const {declarator.name}", f"{element}*"
        out.append(f"{storage}{pointer} = reinterpret_cast<{cast}>(cuemu_dyn_shared());")
    return " ".join(out)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _file_scope(tokens: Sequence[Token]) -> list[bool]:
    """For every token, whether no function or class is around it."""
    around: list[bool] = []
    stack: list[bool] = []  # of each open brace: whether it belongs to a namespace or linkage block
    for i, token in enumerate(tokens):
        if token.kind == "punct" and token.text == "{":
            j = i - 1
            while j >= 0 and (tokens[j].kind == "word" or tokens[j].text == "::"):
                if tokens[j].text == "namespace":
                    break
                j -= 1
            linkage = i >= 2 and tokens[i - 1].kind == "string" and tokens[i - 2].text == "extern"
            stack.append(linkage or (j >= 0 and tokens[j].text == "namespace"))
        elif token.kind == "punct" and token.text == "}" and stack:
            stack.pop()
        around.append(all(stack))
    return around


def _kernel_bodies(tokens: Sequence[Token]) -> Iterator[int]:
    """Offset just inside the body of every kernel."""
    for i, token in enumerate(tokens):
        if token.text != "__global__":
            continue
        head = kernel_head(tokens, i)
        if head is None or not has_body(tokens, head[2] + 1):
            continue
        j = head[2] + 1
        while tokens[j].text != "{":
            j = closing(tokens, j) + 1 if tokens[j].text in ("(", "[") else j + 1
        yield tokens[j].end
