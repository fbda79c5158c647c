"""A tokenizer for C++ text: enough to find declarations without being fooled by comments or strings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PATTERN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<comment>//(?:[^\n\\]|\\\r?\n|\\)*|/\*.*?(?:\*/|\Z))
  | (?P<raw>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)")
  | (?P<string>(?:u8|[uUL])?"(?:[^"\\\n]|\\.)*(?:"|(?=\n)|\Z))
  | (?P<char>(?:u8|[uUL])?'(?:[^'\\\n]|\\.)+')
  | (?P<word>[A-Za-z_]\w*)
  | (?P<number>\.?\d(?:[eEpP][+-]|'\w|[\w.])*)
  | (?P<punct>::|->|&&|\|\||.)
    """,
    re.VERBOSE | re.DOTALL,
)
# A directive ends at the line's end, unless that is escaped or inside a comment.
_DIRECTIVE = re.compile(r"#(?:/\*.*?\*/|\\\r?\n|//(?:[^\n\\]|\\\r?\n|\\)*|[^\n])*", re.DOTALL)
_OPEN = frozenset("([{")
_CLOSE = frozenset(")]}")


@dataclass(frozen=True, slots=True)
class Token:
    """One piece of C++ text.

    Args:
        kind: ``word``, ``number``, ``punct``, ``string``, ``char``, ``raw`` or ``directive``.
        text: the characters.
        start: offset of the first character in the text.
        line: line number, from 1.
    """

    kind: str
    text: str
    start: int
    line: int

    @property
    def end(self) -> int:
        """Offset one past the last character."""
        return self.start + len(self.text)


def tokenize(text: str) -> list[Token]:
    """All tokens of ``text`` but blanks and comments; a preprocessor directive is one token."""
    return list(_tokens(text))


def _tokens(text: str) -> Iterator[Token]:
    position, line = 0, 1
    line_is_blank = True  # nothing but blanks and comments since the line began
    while position < len(text):
        if line_is_blank and text[position] == "#":
            match = _DIRECTIVE.match(text, position)
            kind = "directive"
        else:
            match = _PATTERN.match(text, position)
            kind = (match and match.lastgroup) or "punct"
        assert match is not None  # both patterns take any character that gets here
        piece = match.group()
        if kind == "mark":
            kind = "raw"
        if kind not in ("space", "comment"):
            yield Token(kind, piece, position, line)
            line_is_blank = False
        if "\n" in piece and kind == "space":
            line_is_blank = True
        line += piece.count("\n")
        position += len(piece)


def closing(tokens: Sequence[Token], index: int) -> int:
    """Index of the bracket that closes the one at ``index``; ``len(tokens)`` when there is none."""
    depth = 0
    for i in range(index, len(tokens)):
        if tokens[i].kind != "punct":
            continue
        if tokens[i].text in _OPEN:
            depth += 1
        elif tokens[i].text in _CLOSE:
            depth -= 1
            if depth <= 0:
                return i
    return len(tokens)


def skip_angles(tokens: Sequence[Token], index: int) -> int:
    """Index after the template arguments that open at ``index`` (a ``<``); ``index`` if they never close."""
    depth, i = 0, index
    while i < len(tokens):
        piece = tokens[i].text
        if tokens[i].kind == "punct":
            if piece == "<":
                depth += 1
            elif piece == ">":
                depth -= 1
                if depth == 0:
                    return i + 1
            elif piece in _OPEN:
                i = closing(tokens, i)
            elif piece in ";}":
                break
        i += 1
    return index


def split(tokens: Sequence[Token], separator: str = ",") -> list[list[Token]]:
    """The runs of ``tokens`` between separators that are outside every bracket and template argument."""
    parts: list[list[Token]] = [[]]
    i = 0
    while i < len(tokens):
        token = tokens[i]
        end = i + 1
        if token.kind == "punct":
            if token.text == separator:
                parts.append([])
                i = end
                continue
            if token.text in _OPEN:
                end = min(closing(tokens, i) + 1, len(tokens))
            elif token.text == "<" and i and tokens[i - 1].kind == "word":
                end = max(skip_angles(tokens, i), end)
        parts[-1].extend(tokens[i:end])
        i = end
    return parts
