"""The text of a kernel: its ``__global__`` functions and parameters, and the one rewrite it needs.

A C++ compiler takes CUDA C++ as it is once the qualifiers are macros, but for shared memory:
``extern __shared__ T x[];`` has no meaning to it, and the runtime must learn where each array lies.
:func:`rewrite` changes these declarations only and keeps every line number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from labkit.emulator.tokens import Token, closing, skip_angles, split, tokenize
from labkit.kernels.preprocess import preprocess


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that take an argument list in parentheses and are not the kernel's name.
_WITH_ARGUMENTS = _words(
    "__launch_bounds__ __attribute__ __align__ alignas __maxnreg__ __cluster_dims__ __block_size__ decltype"
)
# As in include/cuda_emulator.h.
_PREDEFINED = {"__CUEMU__": "1", "__CUDACC__": "1", "__CUDA_ARCH__": "860", "__cplusplus": "202002L"}
_ALIGNING = _words("alignas __align__ __builtin_align__")
_MEMORY = _words("__device__ __constant__ __managed__")
_QUALIFIERS = _words("__restrict__ __restrict restrict __grid_constant__")
_TYPE_WORDS = _words(
    "void bool char short int long float double signed unsigned const volatile struct class enum union "
    "typename auto"
)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Args:
        name: its name; ``argN`` for one without a name.
        type: its C++ type as written, without ``__restrict__``.
    """

    name: str
    type: str

    @property
    def is_pointer(self) -> bool:
        """Whether the type as written is a pointer."""
        return self.type.endswith("*") or "[" in self.type or re.search(r"\*\s*const$", self.type) is not None


@dataclass(frozen=True)
class Entry:
    """A ``__global__`` function that the text defines.

    Args:
        name: its name, with namespaces (``"lab::gemm"``).
        parameters: its parameters in order.
        line: line of its name, from 1.
        template: whether it is a template; then a launch names the arguments (``"gemm<4>"``).
        returns_void: whether it returns nothing, as a kernel must.
    """

    name: str
    parameters: tuple[Parameter, ...]
    line: int
    template: bool = False
    returns_void: bool = True


def active_tokens(text: str, defines: Mapping[str, object] | None = None) -> list[Token]:
    """Tokens of ``text`` outside the branches that are not taken; no directives, no literals.

    Macros of included files are not known here, and a condition that cannot be worked out counts as
    true: this only helps to find kernels and their parameters, the compiler decides.
    """
    return tokenize(preprocess(text, defines, predefined=_PREDEFINED).code)


def entries(text: str, defines: Mapping[str, object] | None = None) -> list[Entry]:
    """The kernels that ``text`` defines, in order; branches of ``#if`` that are not taken are left out."""
    tokens = active_tokens(text, defines)
    spaces = _namespaces(tokens)
    found: dict[str, Entry] = {}
    for i, token in enumerate(tokens):
        if token.text != "__global__" or token.kind != "word":
            continue
        head = _kernel_head(tokens, i)
        if head is None:
            continue
        name_at, open_at, close_at = head
        if not _has_body(tokens, close_at + 1):
            continue
        name = "::".join([*spaces[i], tokens[name_at].text])
        parameters = _parameters(tokens[open_at + 1 : close_at], text)
        before = tokens[_statement_start(tokens, i) : name_at]
        void = any(part.text == "void" for part in before)
        template = any(part.text == "template" for part in before)
        found.setdefault(name, Entry(name, parameters, tokens[name_at].line, template, void))
    return list(found.values())


def _kernel_head(tokens: Sequence[Token], start: int) -> tuple[int, int, int] | None:
    """Indices of the name and of the parentheses of the function declared at ``start``."""
    i = start + 1
    while i < len(tokens):
        token = tokens[i]
        if token.text in ("{", "}", ";", "="):
            return None
        if token.kind == "word" and i + 1 < len(tokens) and tokens[i + 1].text == "(":
            close = closing(tokens, i + 1)
            if token.text not in _WITH_ARGUMENTS:
                return (i, i + 1, close) if close < len(tokens) else None
            i = close
        elif token.text in ("[", "("):
            i = closing(tokens, i)
        i += 1
    return None


def _has_body(tokens: Sequence[Token], i: int) -> bool:
    while i < len(tokens) and tokens[i].text not in ("{", ";", "}"):
        i = closing(tokens, i) + 1 if tokens[i].text in ("(", "[") else i + 1
    return i < len(tokens) and tokens[i].text == "{"


def _namespaces(tokens: Sequence[Token]) -> list[list[str]]:
    """For every token, the names of the namespaces around it."""
    around: list[list[str]] = []
    stack: list[list[str]] = []
    pending: list[str] | None = None
    for i, token in enumerate(tokens):
        if token.text == "namespace" and token.kind == "word":
            pending = []
            for following in tokens[i + 1 :]:
                if following.kind == "word":
                    pending.append(following.text)
                elif following.text != "::":
                    if following.text != "{":
                        pending = None  # an alias or a using-directive
                    break
        elif token.text == "{" and token.kind == "punct":
            stack.append(pending or [])
            pending = None
        elif token.text == "}" and token.kind == "punct" and stack:
            stack.pop()
        around.append([name for names in stack for name in names])
    return around


def _parameters(tokens: Sequence[Token], text: str) -> tuple[Parameter, ...]:
    if not tokens or (len(tokens) == 1 and tokens[0].text == "void"):
        return ()
    return tuple(_parameter(part, index, text) for index, part in enumerate(split(tokens)))


def _parameter(tokens: Sequence[Token], index: int, text: str) -> Parameter:
    tokens = [token for token in tokens if token.text not in _QUALIFIERS]
    for i, token in enumerate(tokens):
        if token.text == "=":
            tokens = tokens[:i]
            break
    array = ""
    while tokens and tokens[-1].text == "]":
        opening = max(i for i, token in enumerate(tokens) if token.text == "[")
        array = _join(tokens[opening:]) + array
        tokens = tokens[:opening]
    named = (
        len(tokens) > 1
        and tokens[-1].kind == "word"
        and tokens[-1].text not in _TYPE_WORDS
        and tokens[-2].text != "::"
        and any(t.kind == "word" and t.text not in ("const", "volatile") for t in tokens[:-1])
    )
    if named:
        return Parameter(tokens[-1].text, _join(tokens[:-1]) + array)
    return Parameter(f"arg{index}", _join(tokens) + array)


def _join(tokens: Sequence[Token]) -> str:
    """Tokens as one line, spaced as a person would: ``const half*``."""
    out = ""
    for token in tokens:
        if (
            out
            and (out[-1].isalnum() or out[-1] in "_*&>")
            and (token.text[0].isalnum() or token.text[0] == "_")
        ):
            out += " "
        out += token.text
    return out


def made_by_macro(text: str) -> bool:
    """Whether a macro of ``text`` makes kernels, whose names and parameters only the compiler knows."""
    return any(token.kind == "directive" and "__global__" in token.text for token in tokenize(text))


def keeps_state(text: str) -> bool:
    """Whether ``text`` has ``__device__`` variables, which all blocks of a launch share."""
    return "CUEMU_REG_DEVICE(" in rewrite(text)


# ------------------------------------------------------------------------------------------ rewriting


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
        last = _statement_end(tokens, i)
        if last is not None:
            previous_end = last
            yield i, _statement_start(tokens, i), last


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


def _statement_start(tokens: Sequence[Token], i: int) -> int:
    while i > 0:
        before = tokens[i - 1]
        if before.kind == "punct" and before.text in (";", "{", "}", ":"):
            break
        if before.kind == "punct" and before.text == ")":
            opening = _opening(tokens, i - 1)
            if opening == 0 or tokens[opening - 1].text not in _WITH_ARGUMENTS:
                break  # if (…) __shared__ …
            i = opening
        i -= 1
    return i


def _opening(tokens: Sequence[Token], i: int) -> int:
    depth = 0
    for j in range(i, -1, -1):
        if tokens[j].kind == "punct":
            depth += {")": 1, "(": -1}.get(tokens[j].text, 0)
            if depth == 0:
                return j
    return 0


def _statement_end(tokens: Sequence[Token], i: int) -> int | None:
    while i < len(tokens):
        token = tokens[i]
        if token.kind == "punct":
            if token.text == ";":
                return i
            if token.text in ("(", "[", "{"):
                i = closing(tokens, i)
            elif token.text in (")", "]", "}"):
                return None
        i += 1
    return None


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
        while before and before[-1].text in ("*", "const", "volatile") and number + stars > -1:
            if before[-1].text != "*":
                break
            before = before[:-1]
            stars += 1
        if number == 0:
            type_tokens = list(before)
        declarators.append(_Declarator(part[index].text, _dims(part[index + 1 :]), "*" * stars))
    return _join(type_tokens), declarators


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
    if name is not None and part[name].text in _TYPE_WORDS:
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
        last = _statement_end(tokens, i)
        if last is None:
            continue
        first = _statement_start(tokens, i)
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
        head = _kernel_head(tokens, i)
        if head is None or not _has_body(tokens, head[2] + 1):
            continue
        j = head[2] + 1
        while tokens[j].text != "{":
            j = closing(tokens, j) + 1 if tokens[j].text in ("(", "[") else j + 1
        yield tokens[j].end
