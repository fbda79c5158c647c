"""Exercise checks: ``check.<name>(answer)`` says not attempted, not yet, or passed.

A chapter's checks live in ``labkit/check/chNN.py``::

    from labkit.check import Verdict, exercise, forbid_calls, not_yet, passed

    @exercise("02.1", title="Two bits across a byte", par=24, limit=32, unit="sectors")
    def q2_bits(answer) -> Verdict:
        ...

and are found here by name: ``check.q2_bits(my_answer)``. The reference solution is the
function or value of the same name in ``labkit/solutions/chNN.py``.
"""

from __future__ import annotations

from labkit.check.forbid import forbid_calls
from labkit.check.registry import Exercise, exercise, exercises, find
from labkit.check.verdict import Verdict, not_attempted, not_yet, passed

__all__ = [
    "Exercise",
    "Verdict",
    "exercise",
    "exercises",
    "find",
    "forbid_calls",
    "not_attempted",
    "not_yet",
    "passed",
]


def __getattr__(name: str) -> Exercise:
    # Python asks a package for dunder names and __path__ relatives; those are never exercises.
    if name.startswith("_"):
        raise AttributeError(f"module 'labkit.check' has no attribute {name!r}")
    return find(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(item.name for item in exercises())])
