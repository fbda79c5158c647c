"""Do the notebook's stubs and the reference solutions take the same arguments?

For an answer that is a text of CUDA C++: do stub and solution declare the same kernel with the same
parameters, and does the exercise know its stub?
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit import check, solutions
from labkit.check import cuda_text
from labkit.course.anatomy import exercise_names
from labkit.course.notebook import read
from labkit.course.source import signature_of, stubs, text_stubs


def differences(path: Path) -> list[str]:
    """One line for each exercise whose stub and solution differ; [] when all agree.

    A function's parameter names, kinds and defaults count, annotations do not; a stub that is
    a value needs a solution that is a value. A text of CUDA C++ is compared by what it declares.
    """
    book = read(path)
    found, texts = stubs(book), text_stubs(book)
    out = []
    for name in exercise_names(book):
        if name not in found:
            out.append(f"{name}: check.{name} is called without an answer")
            continue
        solution = solutions.get(name)
        wanted = signature_of(solution)
        if found[name] != wanted:
            out.append(f"{name}: the stub is {found[name] or 'a value'}, the solution {wanted or 'a value'}")
        elif name in texts:
            out += [f"{name}: {problem}" for problem in _text_problems(name, texts[name][2], solution)]
    return out


def _text_problems(name: str, stub: str, solution: Any) -> list[str]:
    out = []
    given, wanted = check.find(name).text_stub, cuda_text.mark(stub)
    if given != wanted:
        known = f"the stub {given!r}" if given else "no stub"
        out.append(f"the exercise knows {known}; say text_stub={wanted!r} in @exercise")
    if cuda_text.has_marker(solution):
        out.append(f"the solution still says // {cuda_text.MARKER}")
    # without one, an honest answer of one more line could equal the solution and be refused as a copy
    if not cuda_text.has_own_comment(solution, stub):
        out.append("the solution has no comment that the stub does not have")
    if (refused := cuda_text.refusal(solution)) is not None:
        out.append(f"the solution holds {refused[1]}, which an answer may not")
    return out
