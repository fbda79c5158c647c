"""Is the answer the student's own? What its code reaches is read, not run."""

from __future__ import annotations

import dis
import functools
import itertools
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import labkit

_PACKAGES = ("labkit.solutions", "labkit.check")
_FOLDERS = tuple(str(Path(labkit.__file__).parent / name.split(".")[1]) for name in _PACKAGES)
_IN_TEXT = re.compile(r"\blabkit(?:\.|\s+import\s+)(solutions|check)\b")
_DEPTH = 8
_ITEMS = 1000
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def borrowed(answer: Any) -> str:
    """What ``answer`` is or reaches of ``labkit.solutions`` or ``labkit.check``; ``""`` for one's own work.

    Read are the names in the code of the answer and of the notebook's functions it uses, their imports,
    defaults and closures. A name that the code does not mention does not count, nor does what a chapter
    hands out on purpose (``GIVEN`` in its check module).
    """
    return next(_found(answer, "", {}, _DEPTH), "")


def _found(value: Any, home: str, seen: dict[int, Any], depth: int) -> Iterator[str]:
    """Names of borrowed things in ``value``; ``home`` is the module whose functions are read too."""
    if id(value) in seen or depth == 0:
        return
    seen[id(value)] = value  # kept alive: an id is reused as soon as its object is gone
    if name := _forbidden(value):
        yield name
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _found(part, home, seen, depth - 1)
    elif isinstance(value, MethodType):
        yield from _found(value.__func__, home, seen, depth - 1)
        yield from _found(value.__self__, home, seen, depth - 1)
    elif isinstance(value, dict | list | tuple | set | frozenset):
        for part in itertools.islice(value.values() if isinstance(value, dict) else value, _ITEMS):
            yield from _found(part, home, seen, depth - 1)
    elif isinstance(value, FunctionType):
        if _is_own(value.__module__, home) or value.__module__ in (None, "builtins"):
            yield from _in_function(value, seen, depth)
    elif isinstance(value, type):
        if _is_own(value.__module__, home):
            for member in vars(value).values():
                member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
                yield from _found(member, value.__module__, seen, depth - 1)
    elif not isinstance(value, ModuleType) and _is_own(type(value).__module__, home):
        yield from _found(type(value), home, seen, depth - 1)
        yield from _found(getattr(value, "__dict__", None), home, seen, depth - 1)


def _is_own(module: str | None, home: str) -> bool:
    """True for the notebook's module: what a library's functions use is not the student's doing."""
    if home:
        return module == home
    name = module or ""
    if name == "__main__":  # its file may be the kernel's launcher, among the libraries
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.split(".")[0] not in ("labkit", "builtins") and not file.startswith(_LIBRARIES)


def _in_function(function: FunctionType, seen: dict[int, Any], depth: int) -> Iterator[str]:
    home = function.__module__ or str(function.__globals__.get("__name__", ""))
    reached: list[Any] = [function.__defaults__, function.__kwdefaults__, function.__dict__]
    for cell in function.__closure__ or ():
        try:
            reached.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    for code in _codes(function.__code__):
        texts = {text for text in code.co_consts if isinstance(text, str) and text != function.__doc__}
        yield from (f"labkit.{hit[1]}" for hit in map(_IN_TEXT.search, sorted(texts)) if hit)
        yield from (name for name in code.co_names if _inside(name))  # import labkit.solutions.ch02
        # an attribute may share its name with a global of the notebook, such as `check`: only loads count
        loads = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        used = [function.__globals__.get(name) for name in sorted(loads)]
        root = "labkit" in {*code.co_names, *texts} or any(value is labkit for value in used)
        yield from (name for name in _PACKAGES if root and name.split(".")[1] in {*code.co_names, *texts})
        for module in (value for value in used if isinstance(value, ModuleType)):
            yield from filter(None, (_forbidden(vars(module).get(name)) for name in code.co_names))
        reached += used
    for value in reached:
        yield from _found(value, home, seen, depth - 1)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def _inside(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in _PACKAGES)


def _forbidden(value: Any) -> str:
    """The public name of a thing of the two packages, ``""`` for anything else."""
    if isinstance(value, ModuleType):
        return value.__name__ if _inside(value.__name__) else ""
    if isinstance(value, list | tuple | dict | set):
        return _reference_value(value)
    if isinstance(value, FunctionType):
        return _named(value, value.__module__ or "")
    kind = value if isinstance(value, type) else type(value)
    return _named(kind, kind.__module__ if isinstance(kind.__module__, str) else "")


def _named(value: Any, module: str) -> str:
    name = value.__qualname__
    given = getattr(sys.modules.get(module), "GIVEN", ())
    if name.split(".")[0] in given or not (_inside(module) or _in_folder(value)):
        return ""
    return f"{module}.{name}" if _inside(module) else _PACKAGES[0]


def _in_folder(value: Any) -> bool:
    # the code's file tells the truth even when the function was renamed or built again
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(_FOLDERS)


def _reference_value(value: Any) -> str:
    """A reference solution that is a value is known by identity: an equal one may be typed by anybody."""
    for module in [name for name in sys.modules if name.startswith("labkit.solutions.")]:
        for name, item in vars(sys.modules[module]).items():
            if item is value and value and not name.startswith("_"):
                return f"{module}.{name}"
    return ""
