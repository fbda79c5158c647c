"""Statements and the heads of kernels in a sequence of tokens, and words that are no names."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.emulator.tokens import Token, closing


def words(text: str) -> frozenset[str]:
    """The words of ``text``."""
    return frozenset(text.split())


# Words that take an argument list in parentheses and are not the kernel's name.
WITH_ARGUMENTS = words(
    "__launch_bounds__ __attribute__ __align__ alignas __maxnreg__ __cluster_dims__ __block_size__ decltype"
)
TYPE_WORDS = words(
    "void bool char short int long float double signed unsigned const volatile struct class enum union "
    "typename auto"
)


def statement_start(tokens: Sequence[Token], i: int) -> int:
    """Index of the first token of the statement that token ``i`` is in."""
    while i > 0:
        before = tokens[i - 1]
        if before.kind == "punct" and before.text in (";", "{", "}", ":"):
            break
        if before.kind == "punct" and before.text == ")":
            opening = _opening(tokens, i - 1)
            if opening == 0 or tokens[opening - 1].text not in WITH_ARGUMENTS:
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


def statement_end(tokens: Sequence[Token], i: int) -> int | None:
    """Index of the ``;`` after token ``i``; None when a bracket around them closes first."""
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


def joined(tokens: Sequence[Token]) -> str:
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


def kernel_head(tokens: Sequence[Token], start: int) -> tuple[int, int, int] | None:
    """Indices of the name and of the parentheses of the function declared at ``start``."""
    i = start + 1
    while i < len(tokens):
        token = tokens[i]
        if token.text in ("{", "}", ";", "="):
            return None
        if token.kind == "word" and i + 1 < len(tokens) and tokens[i + 1].text == "(":
            close = closing(tokens, i + 1)
            if token.text not in WITH_ARGUMENTS:
                return (i, i + 1, close) if close < len(tokens) else None
            i = close
        elif token.text in ("[", "("):
            i = closing(tokens, i)
        i += 1
    return None


def has_body(tokens: Sequence[Token], i: int) -> bool:
    """Whether a function's head that ends before token ``i`` is followed by a body."""
    while i < len(tokens) and tokens[i].text not in ("{", ";", "}"):
        i = closing(tokens, i) + 1 if tokens[i].text in ("(", "[") else i + 1
    return i < len(tokens) and tokens[i].text == "{"
