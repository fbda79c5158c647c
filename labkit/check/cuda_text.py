"""A student's CUDA C++ as text: is it still the stub, what does it declare, does it stay a kernel?

A stub is a text in the notebook that holds the line ``// YOUR CODE``. Its exercise knows it by a mark,
eight hex digits of its code (:func:`mark`), so that the stub is written once, in the notebook. An answer
with the stub's mark is not attempted: white space and comments do not count, the line ``// YOUR CODE``
may stay or go, and any other change is an attempt.

Only text is read here; :mod:`labkit.check.cuda` runs it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from labkit.kernels.preprocess import without_comments, without_literals
from labkit.kernels.signature import Entry, entries
from labkit.kernels.source import kernels_dir

MARKER = "YOUR CODE"
"""Every stub holds it in a comment: ``// YOUR CODE``."""

INCLUDES = (
    "types.cuh",
    "unpack.cuh",
    "ptx.cuh",
    "cuda_fp16.h",
    "cuda_bf16.h",
    "cuda_runtime.h",
    "stdint.h",
    "assert.h",
    "math.h",
)
"""What an answer may include."""

_MARKER_LINE = re.compile(rf"//[^\n]*\b{MARKER}\b")
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[ \t]*(.*)$", re.MULTILINE)
_HOST = re.compile(
    r"\b(?:asm|__asm|__asm__|__attribute__|__declspec|_Pragma|cuemu\w*|__CUEMU__|no_sanitize\w*)\b"
    r"|\b(?:system|popen|_popen|fopen|freopen|open|dlopen|fork|vfork|exec[lv]\w*|syscall|mmap|socket)\s*\("
    r"|#[ \t]*pragma[ \t]+(?!unroll\b|once\b)\w+|\[\[\s*gnu\b|\bstd::\w*(?:fstream|thread|filesystem)\b",
)


def is_kernel_text(value: object) -> bool:
    """True for a text that holds a ``__global__`` function, stub or answer."""
    return isinstance(value, str) and "__global__" in value


def code_of(text: str) -> str:
    """``text`` without comments and white space, to compare two versions of it."""
    return re.sub(r"\s+", "", without_comments(text))


def mark(text: str) -> str:
    """Eight hex digits that stand for the code of ``text``, comments and white space left out."""
    return hashlib.sha256(code_of(text).encode()).hexdigest()[:8]


def is_unattempted(answer: object, stub_mark: str) -> bool:
    """True for a text with nothing in it but comments, and for the stub itself."""
    return isinstance(answer, str) and (not code_of(answer) or mark(answer) == stub_mark)


def has_marker(text: str) -> bool:
    """Whether a comment of ``text`` says ``// YOUR CODE``."""
    return _MARKER_LINE.search(text) is not None


def holds(text: str, other: str) -> bool:
    """True when ``other`` stands in ``text``, white space aside: its comments count."""
    return "".join(other.split()) in "".join(text.split())


def has_own_comment(text: str, stub: str) -> bool:
    """Whether ``text`` holds a comment that ``stub`` does not."""
    return bool(_comments(text) - _comments(stub))


def _comments(text: str) -> set[str]:
    return {" ".join(found.split()) for found in re.findall(r"//[^\n]*|/\*.*?\*/", text, re.DOTALL)}


def kernels(text: str) -> tuple[Entry, ...]:
    """The ``__global__`` functions of ``text`` with their parameters."""
    return entries(text, include_dirs=(kernels_dir(),))


def declaration(text: str) -> str:
    """All kernels of ``text`` as ``name(type a, type b)``; types in one spelling, so that ``unsigned
    int`` and ``unsigned`` agree."""
    return "; ".join(str(entry) for entry in kernels(text)) or "no kernel"


def stub_problems(literal: str, text: str) -> list[str]:
    """What is wrong with a stub's text in a notebook.

    Args:
        literal: the source of the string constant, quotes and prefix included.
        text: its value.
    """
    found = []
    prefix = literal.lstrip()[: literal.lstrip().find('"')].lower() if '"' in literal else ""
    if "r" not in prefix or '"""' not in literal:
        found.append('write the text as r"""…""": otherwise Python reads its backslashes')
    if text.startswith(("\n", "\r")):
        found.append("begin the text on the line of the quotes: messages count its lines from there")
    if not has_marker(text):
        found.append(f"the stub has no comment // {MARKER}")
    return found


def refusal(text: str, forbidden: Iterable[str] = ()) -> tuple[int, str, str] | None:
    """Why a text is not taken as an answer; None when it is.

    This is about honesty, and about counts that mean something; it is no wall. The emulator compiles
    the text for this machine and runs it with the rights of the user who runs the notebook. The child
    process of a run protects the notebook from a kernel's mistakes, not the machine from its author.

    Args:
        text: CUDA C++.
        forbidden: names that the exercise keeps for itself, such as ``"unpack_w4"``.

    Returns:
        (line from 1, what stands there, a hint).
    """
    code = without_comments(text)
    for found in _INCLUDE.finditer(code):
        name = found[1].strip().strip('<>"')
        if name in INCLUDES:
            continue
        hint = f"an answer may include {', '.join(INCLUDES[:4])}"
        if name.endswith(".cu"):
            hint = "that file is the course's own kernel: read it, close it, and write yours"
        return _line(code, found.start()), found[0].strip(), hint
    code = without_literals(text)
    if (host := _HOST.search(code)) is not None:
        hint = "write plain CUDA C++: kernels, device functions, built-ins and the wrappers of ptx.cuh"
        return _line(code, host.start()), host[0].strip(), hint
    for name in forbidden:
        if (use := re.search(rf"\b{re.escape(name)}\b", code)) is not None:
            return _line(code, use.start()), name, f"{name} is what you are building here"
    return None


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
