"""Solutions as the cells of a notebook: what a teacher sees, and what a perfect student would hand in."""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType
from typing import Any

from labkit import solutions
from labkit.classroom.answers import needed, statements_of
from labkit.course.notebook import joined
from labkit.course.source import check_calls, tree
from labkit.errors import refuse


def solution_source(name: str, target: str) -> str:
    """The reference solution of exercise ``name``, bound to ``target``, with all it needs.

    Comments of a CUDA C++ text are left out: with them it would be the course's own text.
    """
    value = solutions.get(name)
    module = inspect.getmodule(value) or _module_of(name)
    text = inspect.getsource(module)
    wanted = needed(statements_of(text, module.__name__), name)
    if not wanted:
        refuse("solution", name, f"a function or value of that name in {module.__name__}")
    parts = []
    for one in wanted:
        segment = ast.get_source_segment(text, one.node) or ""
        if name in one.binds and isinstance(one.node, (ast.Assign, ast.AnnAssign)):
            segment = _bound(one.node, value, segment, target)
        parts.append(segment)
    if isinstance(wanted[-1].node, ast.FunctionDef) and target != name:
        parts.append(f"{target} = {name}")
    imports = [part for part in parts if re.match(r"(import|from)\s", part)]
    rest = [part for part in parts if part not in imports]
    return "\n\n\n".join(filter(None, ["\n".join(imports), *rest]))


def _module_of(name: str) -> ModuleType:
    import importlib

    from labkit import check

    return importlib.import_module(f"labkit.solutions.ch{check.find(name).chapter}")


def _bound(node: ast.Assign | ast.AnnAssign, value: Any, segment: str, target: str) -> str:
    text = segment[segment.index("=") + 1 :].strip()
    if isinstance(value, str) and "__global__" in value:
        bare = re.sub(r"[ \t]*//[^\n]*", "", value)
        text = f'r"""{bare.strip()}\n"""'
    return f"{target} = {text}"


def stub_of(source: str, name: str) -> tuple[int, int, str]:
    """(first line, line after the last, name bound) of the stub in the cell that checks exercise ``name``.

    Raises:
        InputError: the cell hands the check something that is not bound in this cell.
    """
    calls = [call for found, call in check_calls(source) if found == name and call.args]
    argument = calls[-1].args[0] if calls else None
    for node in tree(source).body:
        bound = _bound_name(node)
        if isinstance(argument, ast.Name) and bound == argument.id:
            return node.lineno - 1, node.end_lineno or node.lineno, bound
    return refuse(name, "a check whose answer is not bound in the same cell", "a stub above the check")


def _bound_name(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def solved(source: str | list[str], name: str) -> str:
    """An exercise's cell with the reference solution where the stub was."""
    text = joined(source)
    first, last, bound = stub_of(text, name)
    lines = text.splitlines()
    return "\n".join([*lines[:first], solution_source(name, bound), *lines[last:]])


def stub_text(source: str | list[str], name: str) -> str:
    """The stub itself."""
    text = joined(source)
    first, last, _ = stub_of(text, name)
    return "\n".join(text.splitlines()[first:last])
