"""Questions about the source of notebook cells, answered from the syntax tree."""

from __future__ import annotations

import ast
import inspect

from labkit.course.notebook import Notebook, joined


def tree(source: str) -> ast.Module:
    """The syntax tree of a cell; an empty one when the cell is no plain Python."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def calls(source: str, dotted: str) -> list[ast.Call]:
    """All calls whose function is written ``dotted``, or ends in ``.dotted``."""
    out = []
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = ast.unparse(node.func)
            if name == dotted or name.endswith("." + dotted):
                out.append(node)
    return out


def check_calls(source: str, names: set[str] | None = None) -> list[tuple[str, ast.Call]]:
    """The ``check.<name>(...)`` calls of a cell as (name, call); with ``names``, only those."""
    out = []
    for node in ast.walk(tree(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value)
        if owner in ("check", "labkit.check") and (names is None or node.func.attr in names):
            out.append((node.func.attr, node))
    return out


def signature(node: ast.FunctionDef) -> str:
    """A function's parameters as text, annotations left out: ``(x, *, base=2)``."""
    args = node.args
    for one in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
        if one is not None:
            one.annotation = None
    return f"({ast.unparse(args)})"


def signature_of(value: object) -> str | None:
    """The same text for a function object (from its source), None for a plain value.

    A text of CUDA C++ has a signature as well: its kernels and their parameters.
    """
    if isinstance(value, str) and "__global__" in value:
        from labkit.check.cuda_text import declaration

        return declaration(value)
    if not inspect.isfunction(value):
        return None
    import textwrap

    node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    return signature(node) if isinstance(node, ast.FunctionDef) else None


def stubs(book: Notebook) -> dict[str, str | None]:
    """What the notebook hands to each check: exercise name -> the stub's signature, None for a value.

    An argument that is a name is looked up in the cells above; the latest binding counts.
    """
    bound: dict[str, str | None] = {}
    out: dict[str, str | None] = {}
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = joined(cell["source"])
        for node in tree(source).body:
            if isinstance(node, ast.FunctionDef):
                bound[node.name] = signature(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                text = node.value.value if isinstance(node.value, ast.Constant) else None
                bound.update({t.id: signature_of(text) for t in targets if isinstance(t, ast.Name)})
        for name, call in check_calls(source):
            argument = call.args[0] if call.args else None
            if isinstance(argument, ast.Name) and argument.id in bound:
                out[name] = bound[argument.id]
            elif argument is not None:
                out[name] = None
    return out


def text_stubs(book: Notebook) -> dict[str, tuple[int, str, str]]:
    """The texts of CUDA C++ that the notebook hands to checks, written as one literal.

    Returns:
        Exercise name -> (index of the cell that holds the text, source of the literal, the text).
    """
    bound: dict[str, tuple[int, str, str]] = {}
    out: dict[str, tuple[int, str, str]] = {}
    for index, cell in enumerate(book["cells"]):
        if cell["cell_type"] != "code":
            continue
        source = joined(cell["source"])
        for node in tree(source).body:
            if not isinstance(node, ast.Assign):
                continue
            text = node.value.value if isinstance(node.value, ast.Constant) else None
            for target in node.targets:
                if not isinstance(target, ast.Name):
                    continue
                bound.pop(target.id, None)
                if isinstance(text, str) and "__global__" in text:
                    literal = ast.get_source_segment(source, node.value) or ""
                    bound[target.id] = (index, literal, text)
        for name, call in check_calls(source):
            argument = call.args[0] if call.args else None
            if isinstance(argument, ast.Name) and argument.id in bound:
                out[name] = bound[argument.id]
    return out
