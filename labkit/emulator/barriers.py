"""Where a barrier is missing, told from the text between the two accesses of a race."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.emulator.tokens import Token, closing, tokenize

_BARRIERS = frozenset(["__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or"])
_LOOPS = frozenset(["for", "while", "do"])


def missing_barrier(lines: Sequence[str], line: int, other_line: int, *, one_warp: bool) -> str:
    """What to do about two accesses of one block that no barrier separates.

    Args:
        lines: the kernel's text.
        line: line of the later access.
        other_line: line of the earlier one.
        one_warp: whether both threads belong to one warp.

    Returns:
        One sentence. The reader may have a barrier between the two lines already: then one access is of
        this round of a loop and the other of the next.
    """
    tokens = tokenize("\n".join(lines))
    first, last = min(line, other_line), max(line, other_line)
    barrier = (
        "__syncthreads() (or __syncwarp(), if no other warp shares it)" if one_warp else "__syncthreads()"
    )
    looping = _in_one_loop(tokens, first, last)
    if first == last:
        if looping and not _barrier_in(tokens, *looping):
            return (
                f"put {barrier} after line {first}, where every thread passes, "
                "before the loop comes back to it."
            )
        return f"read into a variable, then {barrier}, then write."
    if not _barrier_between(tokens, first, last):
        return f"put {barrier} between line {first} and line {last}."
    if looping:
        return (
            f"the barrier between line {first} and line {last} does not hold back the loop's next round: put "
            f"another {barrier} after line {last}, before the loop comes back to line {first}."
        )
    return (
        f"not every thread passes the barrier between line {first} and line {last}: move it to where all do."
    )


def barrier_between(lines: Sequence[str], line: int, other_line: int) -> bool:
    """Whether a ``__syncthreads()`` stands between two lines of a text."""
    tokens = tokenize("\n".join(lines))
    return _barrier_between(tokens, min(line, other_line), max(line, other_line))


def _barrier_between(tokens: Sequence[Token], first: int, last: int) -> bool:
    """On the lines between, at the end of the first, or at the start of the last."""
    for i, token in enumerate(tokens):
        if token.text not in _BARRIERS or token.kind != "word":
            continue
        if first < token.line < last:
            return True
        after = min(closing(tokens, i + 1) + 1, len(tokens))
        rest = [t.text for t in tokens[after:] if t.line == token.line]
        if token.line == first and not set(rest) - {";", "}"}:
            return True
        if token.line == last and (i == 0 or tokens[i - 1].line != last):
            return True
    return False


def _barrier_in(tokens: Sequence[Token], start: int, end: int) -> bool:
    return any(start <= token.line <= end and token.text in _BARRIERS for token in tokens)


def _in_one_loop(tokens: Sequence[Token], first: int, last: int) -> tuple[int, int] | None:
    """First and last line of the innermost loop around both lines."""
    found = None
    for i, token in enumerate(tokens):
        if token.kind != "word" or token.text not in _LOOPS:
            continue
        end = _loop_end(tokens, i)
        if token.line <= first and last <= end and (found is None or token.line >= found[0]):
            found = (token.line, end)
    return found


def _loop_end(tokens: Sequence[Token], i: int) -> int:
    """Line on which the body of the loop that starts at token ``i`` ends."""
    i += 1
    if tokens[i - 1].text != "do" and i < len(tokens):
        i = closing(tokens, i) + 1
    while i < len(tokens) and tokens[i].text != ";":
        if tokens[i].text == "{":
            i = closing(tokens, i)
            break
        i = closing(tokens, i) + 1 if tokens[i].text in ("(", "[") else i + 1
    return tokens[min(i, len(tokens) - 1)].line if tokens else 0
