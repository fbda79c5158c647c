"""Do the notebook's stubs and the reference solutions take the same arguments?"""

from __future__ import annotations

from pathlib import Path

from labkit import solutions
from labkit.course.anatomy import exercise_names
from labkit.course.notebook import read
from labkit.course.source import signature_of, stubs


def differences(path: Path) -> list[str]:
    """One line for each exercise whose stub and solution differ; [] when all agree.

    A function's parameter names, kinds and defaults count, annotations do not; a stub that is
    a value needs a solution that is a value.
    """
    book = read(path)
    found = stubs(book)
    out = []
    for name in exercise_names(book):
        if name not in found:
            out.append(f"{name}: check.{name} is called without an answer")
            continue
        wanted = signature_of(solutions.get(name))
        if found[name] != wanted:
            out.append(f"{name}: the stub is {found[name] or 'a value'}, the solution {wanted or 'a value'}")
    return out
