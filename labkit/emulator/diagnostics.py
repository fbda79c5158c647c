"""A compiler's complaints, cut down to the kernel's own lines."""

from __future__ import annotations

import re

from labkit.emulator.faults import CompileError, Diagnostic
from labkit.emulator.rewrite import rewrite
from labkit.emulator.tokens import tokenize

_SHOWN = 3
_LINE = re.compile(r"^(?P<file>(?:[A-Za-z]:)?[^:\n]+):(?P<line>\d+):(?:(?P<column>\d+):)?\s*(?P<rest>.*)$")
_SEVERITY = re.compile(
    r"^(?P<kind>fatal error|[Ee]rror|note|warning|\s*required from|\s*required by)\b:?\s*(?P<text>.*)$"
)
# What the compiler says (of gcc or clang) → what to do, for the mistakes that its words do not explain.
_ADVICE = (
    (r"\bmma\.h", "wmma fragments are not emulated; use mma_m16n8k16 of ptx.cuh"),
    (
        r"cooperative_groups(\.h|/)",
        "cooperative groups are not emulated; use __syncthreads() and __syncwarp()",
    ),
    (r"\bcub/", "CUB is not emulated; write the reduction with shared memory or warp shuffles"),
    (r"\bcurand\w*\.h", "cuRAND is not emulated; pass random numbers as an argument"),
    (r"\.(cuh|h|hpp)'? ?(: No such file|file not found)", "pass the header's folder in include_dirs"),
    (r"rvalue as lvalue|not assignable", "threadIdx, blockIdx, blockDim and gridDim cannot be changed"),
    (r"'__(shfl|any|all|ballot)\w*' was not|identifier '__(shfl|any|all|ballot)", "warp operations end in "
     "_sync and take a mask first: __shfl_down_sync(0xffffffff, value, 1)"),
    (r"'__syncthread'", "the barrier is __syncthreads()"),
    (r"storage size of|variable length array", "a __shared__ array has a constant size; write "
     "extern __shared__ float name[]; and give its bytes at the launch (shared_bytes)"),
    (r"(from|of type) '\w+' .*'(u?char|u?short|u?int|u?long|u?longlong|float|double)[24]'", "give every "
     "vector its own braces: float4 v[2] = {{1, 2, 3, 4}, {5, 6, 7, 8}}; {} makes zeros"),
    (r"ambiguous.*half", "convert first: __half2float(h), or __float2half(f)"),
    (r"union member .* non-trivial|copy constructor of '\w+' is implicitly deleted", "copy a member of the "
     "union, not the union: the traced build sees vectors as wholes"),
)  # fmt: skip
# Punctuation of Chinese input methods and word processors that looks like C++.
_FULL_WIDTH = dict(zip("；，（）｛｝［］：“”‘’＝＋－＊／＜＞！", ";,(){}[]:\"\"''=+-*/<>!", strict=True))
_BUILT_IN = {
    "thread_index": "threadIdx",
    "block_index": "blockIdx",
    "block_size": "blockDim",
    "grid_size": "gridDim",
}
_PTX = (
    "inline PTX runs on a GPU only: call a function of ptx.cuh, or put C++ for the emulator beside it, "
    "behind #ifdef __CUEMU__"
)


def compile_error(text: str, filename: str, code: int, output: str, seconds: float) -> CompileError:
    """The error to raise for a compiler run that failed.

    Args:
        text: the kernel's text as the author wrote it.
        filename: its name.
        code: exit code; -1 for a run that took too long.
        output: what the compiler wrote.
        seconds: its time limit.
    """
    if code == -1:
        took = f"the compiler took more than {seconds:.0f} s and was ended"
        return CompileError(filename, (Diagnostic(None, None, took),), "look for a recursive template")
    found = _diagnostics(text, filename, output)
    if all(diagnostic.line is None or _at_the_end(diagnostic.text) for diagnostic in found):
        found = _unclosed(text) or found
    if not found:
        tail = (
            " ".join(output.strip().splitlines()[-2:])[-400:] or f"the compiler ended with exit code {code}"
        )
        return CompileError(filename, (Diagnostic(None, None, tail),))
    return CompileError(filename, tuple(found[:_SHOWN]), _fix(text, found))


def link_error(text: str, filename: str, output: str) -> CompileError:
    """The error to raise when a function that the kernel calls is nowhere defined."""
    source = text.splitlines()
    found: dict[str, Diagnostic] = {}
    for raw in output.splitlines():
        match = re.search(r"undefined (?:reference to|symbol:?) [`']?(.+?)'?$", raw)
        if match is None:
            continue
        name = match[1]
        where = re.search(re.escape(filename) + r":(\d+)", raw)
        line = int(where[1]) if where else None
        quoted = source[line - 1] if line and line <= len(source) else ""
        found.setdefault(name, Diagnostic(line, None, f"{name} is called but not defined", quoted))
    if not found:
        tail = " ".join(output.strip().splitlines()[-3:])[-400:] or "the linker failed"
        return CompileError(filename, (Diagnostic(None, None, tail),))
    fix = "define it in the kernel's text, or include the header that does"
    return CompileError(filename, tuple(found.values())[:_SHOWN], fix)


def _diagnostics(text: str, filename: str, output: str) -> list[Diagnostic]:
    written = text.splitlines()
    compiled = rewrite(text).splitlines()
    found: list[Diagnostic] = []
    seen: set[tuple[int | None, str]] = set()
    own_line: tuple[int, int | None] | None = None  # the kernel's line that the compiler is working on
    lost: tuple[str, bool] | None = None  # an error in a header, waiting for the line that led to it
    for raw in output.splitlines():
        match = _LINE.match(raw)
        if match is None:
            continue
        own = match["file"].replace("\\", "/").endswith(filename)
        line, column = int(match["line"]), int(match["column"]) if match["column"] else None
        severity = _SEVERITY.match(match["rest"])
        kind, message = (severity["kind"].strip().lower(), severity["text"]) if severity else ("context", "")
        if own and kind not in ("error", "fatal error", "warning"):
            own_line = (line, column)
            if lost:
                _add(found, seen, lost[0], line, None, written, compiled)
                lost = None
            continue
        if kind not in ("error", "fatal error"):
            continue
        message = _plain(message)
        if own:
            _add(found, seen, message, line, column, written, compiled)
        elif own_line is not None:
            _add(found, seen, message, own_line[0], None, written, compiled)
        else:
            if lost:
                _add(found, seen, lost[0], None, None, written, compiled)
            lost = (message, True)
    if lost:
        _add(found, seen, lost[0], None, None, written, compiled)
    # An error with a line tells more than one without.
    return [d for d in found if d.line is not None] or found


def _add(
    found: list[Diagnostic],
    seen: set[tuple[int | None, str]],
    message: str,
    line: int | None,
    column: int | None,
    written: list[str],
    compiled: list[str],
) -> None:
    if (line, message) in seen or any(d.line == line and line is not None for d in found):
        return  # one error a line: the rest follow from the first
    seen.add((line, message))
    source = ""
    if line is not None and 1 <= line <= len(written):
        source = written[line - 1]
        if column is not None:
            if line > len(compiled) or compiled[line - 1][:column] != source[:column]:
                column = None  # the line was rewritten before this column
            else:
                # g++ counts bytes.
                column = len(source.encode("utf-8")[: column - 1].decode("utf-8", "replace")) + 1
    found.append(Diagnostic(line, column, message, source))


def _plain(message: str) -> str:
    message = re.sub(r"\s*\[-W[^\]]*\]|\s*\[-f[^\]]*\]", "", message)
    message = message.replace("‘", "'").replace("’", "'")
    for function, variable in _BUILT_IN.items():
        message = message.replace(f"cuemu::{function}()", variable)
    message = re.sub(r"\b__half\b", "half", message)
    return re.sub(r" [({]aka '[^']*'[)}]", "", message).strip()


def _at_the_end(message: str) -> bool:
    return "end of input" in message or message == "expected '}'"


def _unclosed(text: str) -> list[Diagnostic]:
    """The opening bracket that is never closed: the compiler sees it only at the end."""
    opened = []
    for token in tokenize(text):
        if token.kind == "punct" and token.text in "([{":
            opened.append(token)
        elif token.kind == "punct" and token.text in ")]}" and opened:
            opened.pop()
    if not opened:
        return []
    line = opened[-1].line
    column = opened[-1].start - (text.rfind("\n", 0, opened[-1].start) + 1) + 1
    message = f"this {opened[-1].text} is never closed"
    return [Diagnostic(line, column, message, text.splitlines()[line - 1])]


def _fix(text: str, found: list[Diagnostic]) -> str:
    if "<<<" in text:
        return "leave out the host's code: the kernel is launched from Python"
    if re.search(r"\basm\b", text) and any(d.line is None or "asm" in d.source for d in found):
        return _PTX
    for diagnostic in found:
        code = (token for token in tokenize(diagnostic.source) if token.kind in ("word", "punct", "number"))
        if strange := next((c for token in code for c in token.text if c in _FULL_WIDTH), None):
            return f"type {_FULL_WIDTH[strange]} instead of {strange}"
        # A barrier after an unfinished line reads as a call of it: the macro begins with a bracket.
        stumbles = r"expected '[,;]|expected .*';'|expression cannot be used as a function|called object type"
        if re.match(stumbles, diagnostic.text) and _starts_line(diagnostic):
            return f"is there a ';' missing at the end of the line above line {diagnostic.line}?"
        for pattern, advice in _ADVICE:
            if re.search(pattern, diagnostic.text):
                return advice
    return ""


def _starts_line(diagnostic: Diagnostic) -> bool:
    """Whether the compiler stumbled over the first thing on a line: what is missing is on the one before."""
    column = diagnostic.column or 0
    return column > 0 and not diagnostic.source[: column - 1].strip()
