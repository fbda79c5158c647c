"""What can go wrong in a kernel, said in the words of its own lines."""

from __future__ import annotations

from dataclasses import dataclass, field

from labkit.errors import InputError

Position = tuple[int, int, int]
"""Block or thread coordinates (x, y, z)."""


@dataclass(frozen=True)
class Fault:
    """One thing that a launch did wrong.

    Args:
        kind: what it is: ``out-of-bounds``, ``race``, ``uninitialised``, ``deadlock``, …
        message: all of it in words, with the lines' text and one hint.
        line: line of the kernel's text; None when it is not known.
        block: block that did it.
        thread: thread that did it.
        buffer: parameter or shared array; empty when there is none.
        offset: byte offset in the buffer.
        size: bytes accessed.
        other_line: line of the other access of a race, or of the other wait of a divergent barrier.
        other_block: block of the other access.
        other_thread: thread of the other access.
        count: how often it was seen.
        fatal: whether the launch ended there.
        file: file that ``line`` is in.
    """

    kind: str
    message: str
    line: int | None = None
    block: Position | None = None
    thread: Position | None = None
    buffer: str = ""
    offset: int | None = None
    size: int = 0
    other_line: int | None = None
    other_block: Position | None = None
    other_thread: Position | None = None
    count: int = 1
    fatal: bool = False
    file: str = ""

    def __str__(self) -> str:
        return self.message


class KernelFault(RuntimeError):
    """A launch that went wrong; ``fault`` holds the facts, the message the words."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.message)

    @property
    def kind(self) -> str:
        """What it is, e.g. ``"deadlock"``."""
        return self.fault.kind

    @property
    def line(self) -> int | None:
        """Line of the kernel's text."""
        return self.fault.line

    @property
    def block(self) -> Position | None:
        """Block that did it."""
        return self.fault.block

    @property
    def thread(self) -> Position | None:
        """Thread that did it."""
        return self.fault.thread

    def __reduce__(self) -> tuple[type[KernelFault], tuple[Fault]]:
        return KernelFault, (self.fault,)


@dataclass(frozen=True)
class Diagnostic:
    """One error of the compiler at a line of the kernel's text (None: elsewhere)."""

    line: int | None
    column: int | None
    text: str
    source: str = field(default="")


class CompileError(InputError):
    """The compiler did not take the kernel's text; the message shows the first errors at their lines."""

    def __init__(self, filename: str, diagnostics: tuple[Diagnostic, ...], fix: str = "") -> None:
        self.diagnostics = diagnostics
        self.filename = filename
        self.argument, self.received, self.expected, self.fix = filename, "an error", "CUDA C++", fix
        message = "\n".join(_shown(filename, diagnostic) for diagnostic in diagnostics)
        ValueError.__init__(self, f"{message}\nFix: {fix}" if fix else message)

    @property
    def line(self) -> int | None:
        """Line of the first error."""
        return self.diagnostics[0].line if self.diagnostics else None

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, tuple[Diagnostic, ...], str]]:
        return CompileError, (self.filename, self.diagnostics, self.fix)


def _shown(filename: str, diagnostic: Diagnostic) -> str:
    if diagnostic.line is None:
        return f"{filename}: {diagnostic.text}"
    out = f"{filename} line {diagnostic.line}: {diagnostic.text}"
    if diagnostic.source.strip():
        out += "\n" + quoted_line(diagnostic.line, diagnostic.source)
        if diagnostic.column and diagnostic.column <= len(diagnostic.source):
            blanks = "".join(c if c == "\t" else " " for c in diagnostic.source[: diagnostic.column - 1])
            out += f"\n{'':5} | {blanks}^"
    return out


def quoted_line(number: int, source: str) -> str:
    """A line of the kernel as messages show it."""
    return f"{number:5} | {source.rstrip()}"
