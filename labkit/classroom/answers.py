"""A student's answers in the course's own notebook: which statements an exercise needs, and no others.

A submitted notebook is never run as it is. Its cells are laid over the course's: a cell of the course
that is no exercise counts in the course's words, whatever the student made of it; what the student wrote
in the exercises, or added, is taken. Of both, only the statements are kept that the answer needs, found by
the names that they read and bind. A stray ``sys.exit()``, a loop without end or a forged ``print`` at the
top of a cell binds nothing that an answer needs, and so never runs.
"""

from __future__ import annotations

import ast
import builtins
import dis
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType

from labkit.course.notebook import Notebook, joined
from labkit.course.source import check_calls

_BUILTIN = frozenset(dir(builtins))
_LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "DELETE_NAME")
_STORES = ("STORE_NAME", "STORE_GLOBAL", "IMPORT_STAR")


@dataclass(frozen=True)
class Cell:
    """A code cell of the merged notebook.

    Attributes:
        source: plain Python, or text that does not parse.
        own: written by the student; else it is the course's.
        label: what a traceback calls it.
    """

    source: str
    own: bool
    label: str


@dataclass(frozen=True)
class Statement:
    """One top-level statement of a cell, with the names it reads and binds."""

    node: ast.stmt
    cell: Cell
    reads: frozenset[str]
    binds: frozenset[str]
    star: bool = False


@dataclass(frozen=True)
class Answer:
    """What has to run for one exercise.

    Attributes:
        exercise: name of the exercise.
        expression: what the student hands to the check, as Python; empty when the cell is missing.
        statements: in order; the last ones are the student's.
        problem: why the cell cannot be read, or empty.
    """

    exercise: str
    expression: str
    statements: tuple[Statement, ...] = ()
    problem: str = ""


def exercises_of(source: str, names: Iterable[str]) -> tuple[str, ...]:
    """The exercises whose checks a cell calls."""
    return tuple(name for name, _ in check_calls(plain_python(source), set(names)))


def plain_python(source: str) -> str:
    """The cell as Python: magics and shell lines become calls, which nothing needs."""
    if not re.search(r"^\s*[!%?]|\?\s*$", source, re.MULTILINE):
        return source
    try:
        ast.parse(source)
        return source
    except (SyntaxError, ValueError):
        from IPython.core.inputtransformer2 import TransformerManager

        try:
            return TransformerManager().transform_cell(source)
        except SyntaxError:
            return source


def answers(course: Notebook, student: Notebook, names: Iterable[str]) -> list[Answer]:
    """One :class:`Answer` for each exercise in ``names``, in the order of the course.

    Args:
        course: the chapter as the course has it.
        student: what was handed in; only its code cells' ids and sources are read.
        names: exercises of the chapter.
    """
    merged = _Merged(course, student, tuple(names))
    return [merged.answer(name) for name in names]


class _Merged:
    """The course's cells with the student's laid over them."""

    def __init__(self, course: Notebook, student: Notebook, names: tuple[str, ...]) -> None:
        self.stubs: dict[str, str] = {}
        self.at: dict[str, int] = {}  # exercise -> place of its cell in self.cells
        self.cells: list[Cell] = []
        theirs = [
            (str(cell.get("id", "")), _tidy(joined(cell.get("source", "")))) for cell in _code_cells(student)
        ]
        ours = [(str(cell["id"]), _tidy(joined(cell["source"]))) for cell in _code_cells(course)]
        calls = [exercises_of(source, names) for _, source in theirs]
        homes = {name: at for at, (_, source) in enumerate(ours) for name in exercises_of(source, names)}
        self.stubs = {name: ours[at][1] for name, at in homes.items()}
        taken = self._chosen(homes, ours, theirs, calls)
        places = self._places(ours, theirs)
        course_binds = {
            name for _, source in ours for one in _statements(Cell(source, False, "")) for name in one.binds
        }
        for at in range(-1, len(ours)):
            if at >= 0:
                name = next((name for name, home in homes.items() if home == at), "")
                if name and name in taken:
                    self.at[name] = len(self.cells)
                    self.cells.append(Cell(theirs[taken[name]][1], True, f"your cell of {name}"))
                elif not name:
                    self.cells.append(Cell(ours[at][1], False, f"course cell {at}"))
            for index in (i for i, place in places.items() if place == at and i not in taken.values()):
                source = theirs[index][1]
                if at >= 0 and source == ours[at][1]:
                    continue
                if index in self._same(ours, theirs) and not calls[index]:
                    # a cell of the course that was changed: what it adds counts, what it redefines does not
                    source = _without(source, course_binds)
                self.cells.append(Cell(source, True, f"your cell {index + 1}"))

    @staticmethod
    def _same(ours: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> set[int]:
        ids = {id_ for id_, _ in ours}
        return {index for index, (id_, _) in enumerate(theirs) if id_ in ids}

    @staticmethod
    def _chosen(
        homes: dict[str, int],
        ours: list[tuple[str, str]],
        theirs: list[tuple[str, str]],
        calls: list[tuple[str, ...]],
    ) -> dict[str, int]:
        """Exercise -> index of the student's cell that counts: the last one that is no untouched stub."""
        out = {}
        for name, home in homes.items():
            fits = [
                i
                for i, (id_, _) in enumerate(theirs)
                if name in calls[i] or (id_ == ours[home][0] and not calls[i])
            ]
            changed = [i for i in fits if theirs[i][1] != ours[home][1]]
            if fits:
                out[name] = (changed or fits)[-1]
        return out

    @staticmethod
    def _places(ours: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> dict[int, int]:
        """Student's cell -> the course's cell that it is, or that stands before it (-1: before all)."""
        by_id = {id_: at for at, (id_, _) in enumerate(ours)}
        by_source = {source: at for at, (_, source) in enumerate(ours)}
        out, last = {}, -1
        for index, (id_, source) in enumerate(theirs):
            known = by_id.get(id_, by_source.get(source))
            last = known if known is not None else last
            out[index] = last
        return out

    def answer(self, name: str) -> Answer:
        """The statements that the answer of ``name`` needs."""
        if name not in self.at:
            return Answer(name, "", problem="the exercise's cell is not in this notebook")
        end = self.at[name]
        cell = self.cells[end]
        try:
            ast.parse(plain_python(cell.source))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            words = error.msg if isinstance(error, SyntaxError) else type(error).__name__
            return Answer(name, "None", problem=f"{type(error).__name__}{line} of the cell: {words}")
        expression = _argument(cell.source, name) or _argument(self.stubs[name], name)
        every = [one for part in self.cells[: end + 1] for one in _statements(part)]
        return Answer(name, expression, tuple(needed(every, expression)))


def needed(statements: list[Statement], expression: str) -> list[Statement]:
    """Of ``statements`` those that ``expression`` needs, directly or through others; in their order.

    All statements that bind a needed name count, since a function reads a global when it is called.
    """
    binding: dict[str, list[int]] = {}
    for index, one in enumerate(statements):
        for name in one.binds:
            binding.setdefault(name, []).append(index)
    stars = [index for index, one in enumerate(statements) if one.star]
    names, chosen = list(_reads(expression)), set[int]()
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        found = binding.get(name) or ([] if name in _BUILTIN else stars)
        for index in found:
            if index not in chosen:
                chosen.add(index)
                names += statements[index].reads
    return [statements[index] for index in sorted(chosen)]


def statements_of(source: str, label: str, *, own: bool = False) -> list[Statement]:
    """The statements of one text; [] when it does not parse."""
    return _statements(Cell(source, own, label))


def _code_cells(book: Notebook) -> Iterator[dict]:
    for cell in book["cells"]:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            yield cell


def _tidy(source: object) -> str:
    text = source if isinstance(source, str) else ""
    return text.replace("\r\n", "\n").replace("\r", "\n").strip("\n").rstrip()


def _without(source: str, names: set[str]) -> str:
    """Only the statements that bind nothing in ``names``."""
    kept = [one.node for one in _statements(Cell(source, True, "")) if not one.binds & names]
    return ast.unparse(ast.Module(kept, []))


def _argument(source: str, name: str) -> str:
    """What the last call of ``check.name`` in a cell is given, as Python; empty when it is given nothing."""
    calls = [call for found, call in check_calls(plain_python(source)) if found == name and call.args]
    return ast.unparse(calls[-1].args[0]) if calls else ""


def _statements(cell: Cell) -> list[Statement]:
    try:
        body = ast.parse(plain_python(cell.source)).body
        return [_statement(node, cell) for node in body]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _statement(node: ast.stmt, cell: Cell) -> Statement:
    future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
    reads, binds, star = _names(compile(ast.Module([node], []), "<names>", "exec", dont_inherit=True))
    if future:
        return Statement(node, cell, frozenset(), frozenset())
    changed = set()
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Subscript, ast.Attribute)) and isinstance(inner.ctx, (ast.Store, ast.Del)):
            changed.add(_root(inner))
        elif isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
            changed.add(_root(inner.value.func))  # rows.append(3)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        changed = set()  # what it changes, it changes when it is called
    return Statement(node, cell, frozenset(reads), frozenset(binds | (changed & reads)), star)


def _root(node: ast.expr) -> str:
    """``rows`` of ``rows[0].x``; empty for a bare name (calling it changes nothing that we follow)."""
    inner = node
    while isinstance(inner, (ast.Subscript, ast.Attribute)):
        inner = inner.value
    return inner.id if isinstance(inner, ast.Name) and inner is not node else ""


def _reads(expression: str) -> set[str]:
    return _names(compile(expression, "<names>", "eval", dont_inherit=True))[0]


def _names(code: CodeType) -> tuple[set[str], set[str], bool]:
    """Global names that a code object reads and binds, those of functions in it too; has it ``import *``?"""
    reads, binds, star = set[str](), set[str](), False
    for one in dis.get_instructions(code):
        if one.opname in _LOADS:
            reads.add(str(one.argval))
        elif one.opname in _STORES:
            star = star or one.opname == "IMPORT_STAR"
            binds.add(str(one.argval))
        elif one.opname == "CALL_INTRINSIC_1" and one.argval == 2:  # how Python 3.12 says IMPORT_STAR
            star = True
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, bound, _ = _names(inner)
            reads |= more
            # only `global x` binds outside; a class body's own names are STORE_NAME too
            binds |= {name for name in bound if _declares(inner, name)}
    return reads, binds, star


def _declares(code: CodeType, name: str) -> bool:
    return any(one.opname == "STORE_GLOBAL" and one.argval == name for one in dis.get_instructions(code))
