"""Reference solutions, shown on request: ``solutions.show("02.1")``.

``labkit/solutions/chNN.py`` holds one function or value for each exercise of the chapter,
with the exercise's name and, for a function, the signature of the notebook's stub. A solution in
CUDA C++ is a text; it is shown as it would stand in a file, with the comment above it.
"""

from __future__ import annotations

import ast
import html
import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from labkit.errors import refuse


@dataclass(frozen=True)
class Shown:
    """The source of one solution; a notebook displays it.

    Attributes:
        exercise, title: its id, and a few words.
        source: Python, or CUDA C++ when ``comment`` is ``"//"``.
        comment: how a comment begins in that language.
    """

    exercise: str
    title: str
    source: str
    comment: str = "#"

    def __repr__(self) -> str:
        return f"{self.comment} Solution of {self.exercise}: {self.title}\n{self.source}"

    def _repr_html_(self) -> str:
        head = html.escape(f"Solution of {self.exercise}: {self.title}")
        return (
            f"<details open><summary>{head}</summary>"
            f"<pre style='background:#f6f8fa;padding:.7em;overflow-x:auto'>{html.escape(self.source)}</pre>"
            f"</details>"
        )


def _exercise(name: str) -> Any:
    from labkit import check

    try:
        return check.find(name)
    except AttributeError as error:
        return refuse("exercise", repr(name), f"an exercise such as '02.1' ({error})")


def _module(chapter: str) -> ModuleType:
    name = f"labkit.solutions.ch{chapter}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return refuse("solution", f"chapter {chapter}", f"the module {name}")


def get(name: str) -> Any:
    """The reference solution (a function or a value) of an exercise, by its id or name."""
    item = _exercise(name)
    module = _module(item.chapter)
    if not hasattr(module, item.name):
        refuse("solution", item.name, f"a function or value of that name in {module.__name__}")
    return getattr(module, item.name)


def show(name: str) -> Shown:
    """The source of the solution of exercise ``name`` (``"02.1"`` or its name), with the comment above it."""
    item = _exercise(name)
    module = _module(item.chapter)
    source = inspect.getsource(module)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if item.name not in _defined(node):
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while first > 0 and lines[first - 1].startswith("#"):
            first -= 1
        value = getattr(module, item.name)
        if isinstance(value, str) and "__global__" in value:
            above = [f"//{line[1:]}" for line in lines[first : node.lineno - 1] if line.startswith("#")]
            text = "\n".join([f"// {item.name}", *above, value.strip("\n")])
            return Shown(item.id, item.title, text, "//")
        return Shown(item.id, item.title, "\n".join(lines[first : node.end_lineno]))
    return refuse("solution", item.name, f"a function or value of that name in {module.__name__}")


def _defined(node: ast.stmt) -> set[str]:
    """The names a top-level statement binds, as far as solutions use them."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}
