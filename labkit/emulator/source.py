"""The kernels that a text defines, and their parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.emulator.statements import TYPE_WORDS, has_body, joined, kernel_head, statement_start, words
from labkit.emulator.tokens import Token, split, tokenize
from labkit.kernels.preprocess import preprocess

# As in include/cuda_emulator.h.
_PREDEFINED = {"__CUEMU__": "1", "__CUDACC__": "1", "__CUDA_ARCH__": "860", "__cplusplus": "202002L"}
_QUALIFIERS = words("__restrict__ __restrict restrict __grid_constant__")


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
        head = kernel_head(tokens, i)
        if head is None:
            continue
        name_at, open_at, close_at = head
        if not has_body(tokens, close_at + 1):
            continue
        name = "::".join([*spaces[i], tokens[name_at].text])
        parameters = _parameters(tokens[open_at + 1 : close_at], text)
        before = tokens[statement_start(tokens, i) : name_at]
        void = any(part.text == "void" for part in before)
        template = any(part.text == "template" for part in before)
        found.setdefault(name, Entry(name, parameters, tokens[name_at].line, template, void))
    return list(found.values())


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
        array = joined(tokens[opening:]) + array
        tokens = tokens[:opening]
    named = (
        len(tokens) > 1
        and tokens[-1].kind == "word"
        and tokens[-1].text not in TYPE_WORDS
        and tokens[-2].text != "::"
        and any(t.kind == "word" and t.text not in ("const", "volatile") for t in tokens[:-1])
    )
    if named:
        return Parameter(tokens[-1].text, joined(tokens[:-1]) + array)
    return Parameter(f"arg{index}", joined(tokens) + array)


def made_by_macro(text: str) -> bool:
    """Whether a macro of ``text`` makes kernels, whose names and parameters only the compiler knows."""
    return any(token.kind == "directive" and "__global__" in token.text for token in tokenize(text))
