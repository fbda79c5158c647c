"""The ``__global__`` functions of a CUDA C++ text, and the parameters of each.

The GPU runner, the resource tables and messages read declarations here, with types resolved through
macros, typedefs and quoted headers. (The emulator asks the C++ compiler for types and sizes instead,
and rewrites the text, for which it needs its tokens: ``labkit.emulator.rewrite``.) Standard library only.
"""

from __future__ import annotations

import ctypes
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import refuse, require
from labkit.kernels.preprocess import Preprocessed, constant, preprocess

_LONG = ctypes.sizeof(ctypes.c_long)

# Canonical name → (kind, bytes): i signed, u unsigned, f float, b bool, h half, g bfloat16.
SCALARS: dict[str, tuple[str, int]] = {
    "bool": ("b", 1),
    "char": ("i", 1),
    "signed char": ("i", 1),
    "unsigned char": ("u", 1),
    "short": ("i", 2),
    "unsigned short": ("u", 2),
    "int": ("i", 4),
    "unsigned": ("u", 4),
    "long": ("i", _LONG),
    "unsigned long": ("u", _LONG),
    "long long": ("i", 8),
    "unsigned long long": ("u", 8),
    "float": ("f", 4),
    "double": ("f", 8),
    "half": ("h", 2),
    "bfloat16": ("g", 2),
}
_LARGEST = {
    ("h", 2): 65504.0,
    ("g", 2): 3.3895313892515355e38,
    ("f", 4): 3.4028234663852886e38,
    ("f", 8): math.inf,
}
_SYNONYMS = {
    "__half": "half",
    "__nv_bfloat16": "bfloat16",
    "nv_bfloat16": "bfloat16",
    "size_t": "unsigned long long",
    "ptrdiff_t": "long long",
    "ssize_t": "long long",
    "uchar": "unsigned char",
    "ushort": "unsigned short",
    "uint": "unsigned",
    "ulong": "unsigned long",
    "longlong": "long long",
    "ulonglong": "unsigned long long",
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
    "int32_t": "int",
    "uint32_t": "unsigned",
    "int64_t": "long long",
    "uint64_t": "unsigned long long",
    "uintptr_t": "unsigned long long",
    "intptr_t": "long long",
    "half2": "half 2",
    "__half2": "half 2",
    "__nv_bfloat162": "bfloat16 2",
    "nv_bfloat162": "bfloat16 2",
}
_VECTOR = re.compile(r"(u?(?:char|short|int|long|longlong)|float|double)([1-4])")
_QUALIFIERS = re.compile(
    r"\b(?:const|volatile|struct|enum|typename|register|__restrict__|__restrict|__grid_constant__)\b"
)
_INTEGER_WORDS = {"signed", "unsigned", "char", "short", "int", "long"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        name: as declared, or ``arg0`` when the declaration has none.
        type: canonical type without qualifiers: ``"int"``, ``"half*"``, ``"uint4*"``.
        pointer: a pointer; a tensor or None is expected.
        const: what it points to is const, so the kernel only reads it.
    """

    name: str
    type: str
    pointer: bool = False
    const: bool = False

    @property
    def pointee(self) -> str:
        """Type that it points to; the type itself for a scalar."""
        return self.type.removesuffix("*").strip() if self.pointer else self.type

    @property
    def size(self) -> int | None:
        """Bytes of the scalar, or of the pointee; None when unknown (void, a struct)."""
        return type_size(self.pointee)

    @property
    def kind(self) -> str | None:
        """Kind letter of the scalar or pointee as in :data:`SCALARS`, None for anything else."""
        known = SCALARS.get(self.pointee)
        return known[0] if known else None

    def __str__(self) -> str:
        return f"{'const ' if self.const else ''}{self.type} {self.name}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One ``__global__`` function.

    Attributes:
        name: identifier in the source; for a template without its arguments.
        line: line of ``__global__`` in the text, from 1.
        template: names of the template parameters; empty for a plain function.
        max_threads: first number of ``__launch_bounds__``, None without one.
        extern_c: declared ``extern "C"``: the name in the binary is the name in the source.
    """

    name: str
    parameters: tuple[Parameter, ...]
    line: int
    template: tuple[str, ...] = ()
    max_threads: int | None = None
    extern_c: bool = False

    def __str__(self) -> str:
        return f"{self.name}({', '.join(str(parameter) for parameter in self.parameters)})"


def entries(
    text: str, defines: Mapping[str, object] | None = None, include_dirs: Sequence[Path] = ()
) -> tuple[Entry, ...]:
    """All kernels that ``text`` defines with these defines, in order.

    Args:
        text: CUDA C++.
        defines: macro name → value, as they will be given to the compiler.
        include_dirs: folders of quoted headers, read for their macros and type names.
    """
    done = preprocess(text, defines, include_dirs)
    names = done.type_names()
    found: dict[str, Entry] = {}
    for start in re.finditer(r"\b__global__\b", done.code):
        entry = _entry(text, done, names, start.start(), start.end())
        if entry is not None:
            found.setdefault(entry.name, entry)
    return tuple(found.values())


def find_entry(
    text: str,
    name: str | None = None,
    defines: Mapping[str, object] | None = None,
    include_dirs: Sequence[Path] = (),
    *,
    filename: str = "kernel.cu",
) -> Entry:
    """The kernel called ``name``; the only one when ``name`` is None.

    A template is asked for with its arguments, ``"gemm<32, half>"``; the result then carries that
    name, and type parameters are replaced in the parameter list.

    Raises:
        InputError: no kernel, no such kernel, or several and no name; lists what exists.
    """
    found = {entry.name: entry for entry in entries(text, defines, include_dirs)}
    require(bool(found), "entry", f"no kernel in {filename}", "at least one __global__ function with a body")
    listed = ", ".join(found)
    if name is None:
        require(len(found) == 1, "entry", f"None, but {filename} has {listed}", "the name of one of them")
        name = next(iter(found))
    base, arguments = _template_call(name)
    if base not in found:
        refuse("entry", repr(name), f"a __global__ function of {filename}: {listed}")
    entry = found[base]
    require(
        len(arguments) == len(entry.template),
        "entry",
        repr(name),
        f"{base}<{', '.join(entry.template)}> with its {len(entry.template)} template arguments"
        if entry.template
        else f"{base!r}: it is no template",
    )
    if not arguments:
        return entry
    return _instantiate(entry, name, dict(zip(entry.template, arguments, strict=True)))


def type_size(name: str) -> int | None:
    """Bytes of a canonical type; None when unknown."""
    if name.endswith("*"):
        return 8
    if name in SCALARS:
        return SCALARS[name][1]
    for scalar in ("half", "bfloat16"):
        if name == f"{scalar} 2":
            return 4
    vector = _VECTOR.fullmatch(name)
    if vector is None:
        return None
    kind = _SYNONYMS.get(vector[1], vector[1])
    return SCALARS[kind][1] * int(vector[2])


def convert_scalar(parameter: Parameter, value: object) -> int | float | bool:
    """``value`` as the C type of a scalar parameter holds it.

    Integers take bool, int and integer NumPy scalars, never a float. ``inf`` and ``nan`` are
    floats; a finite value beyond the type's range is refused.

    Raises:
        InputError: wrong kind, or out of range; names the parameter and its type.
    """
    known = SCALARS.get(parameter.type)
    where = f"argument {parameter.name}"
    if known is None:
        refuse(where, repr(value), f"a {parameter.type}, which cannot be passed by value; use a pointer")
    kind, size = known
    if kind in "iub":
        try:
            whole = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            refuse(where, f"{value!r} ({type(value).__name__})", f"an integer ({parameter.type})")
        low = -(1 << (8 * size - 1)) if kind == "i" else 0
        high = 1 if kind == "b" else (1 << (8 * size - (kind == "i"))) - 1
        require(low <= whole <= high, where, whole, f"{low} to {high} ({parameter.type})")
        return bool(whole) if kind == "b" else whole
    # Not float(): it reads text as well, which is a mistake here.
    convert = getattr(type(value), "__float__", None) or getattr(type(value), "__index__", None)
    if convert is None:
        refuse(where, f"{value!r} ({type(value).__name__})", f"a number ({parameter.type})")
    try:
        number = float(convert(value))
    except (TypeError, ValueError) as error:  # a tensor of several elements
        refuse(where, f"{type(value).__name__}: {error}", f"one number ({parameter.type})")
    largest = _LARGEST[kind, size]
    require(
        not math.isfinite(number) or abs(number) <= largest,
        where,
        number,
        f"at most {largest:g} in magnitude ({parameter.type})",
    )
    return number


# --- reading one declaration ------------------------------------------------------------------------


def _entry(text: str, done: Preprocessed, names: Mapping[str, str], start: int, end: int) -> Entry | None:
    code = done.code
    at = end
    threads = None
    while True:
        word = re.compile(r"\s*([A-Za-z_]\w*|\[\[)").match(code, at)
        if word is None:
            return None
        at = word.end()
        if word[1] == "[[":
            at = code.find("]]", at) + 2
            if at < 2:
                return None
            continue
        following = re.compile(r"\s*\(").match(code, at)
        if following is None:
            continue  # void, static, inline …
        close = _closing(code, following.end() - 1)
        if close is None:
            return None
        inside = code[following.end() : close]
        if word[1] == "__launch_bounds__":
            threads = constant(_split(inside)[0], done) if inside.strip() else None
        if word[1].startswith("__") and word[1].endswith("__"):
            at = close + 1
            continue
        break
    if not re.compile(r"\s*\{").match(code, close + 1):
        return None  # a declaration, or an explicit instantiation
    template, before = _template(code, start)
    return Entry(
        name=done.expand(word[1]),
        parameters=tuple(
            _parameter(piece, index, done, names, template) for index, piece in enumerate(_split(inside))
        ),
        line=code.count("\n", 0, start) + 1,
        template=template,
        max_threads=threads,
        extern_c=_is_extern_c(text, before),
    )


def _is_extern_c(text: str, before: int) -> bool:
    """Literals are blanks in the code, so ``"C"`` is looked up in the text itself (same offsets)."""
    return re.search(r'extern\s+"C"\s*\{?\s*(?:static\s+|inline\s+)*$', text[:before]) is not None


def _template(code: str, start: int) -> tuple[tuple[str, ...], int]:
    """Names of the template parameters before ``start``, and where the declaration begins."""
    head = re.search(r">\s*(?:static\s+|inline\s+)*$", code[:start])
    if head is None:
        return (), start
    depth, at = 0, head.start()
    while at >= 0:
        depth += {">": 1, "<": -1}.get(code[at], 0)
        if depth == 0:
            break
        at -= 1
    word = re.search(r"\btemplate\s*$", code[: max(at, 0)])
    if word is None:
        return (), start
    names = []
    for piece in _split(code[at + 1 : head.start()]):
        found = re.findall(r"[A-Za-z_]\w*", piece.split("=")[0])
        names.append(found[-1] if found else "")
    return tuple(names), word.start()


def _parameter(
    piece: str, index: int, done: Preprocessed, names: Mapping[str, str], template: tuple[str, ...]
) -> Parameter:
    piece = piece.split("=")[0]
    array = re.search(r"\[[^\]]*\]\s*$", piece)
    if array:
        piece = piece[: array.start()]
    # The name comes off before macros are expanded: a macro of the same name is the author's problem.
    last = re.search(r"([A-Za-z_]\w*)\s*$", piece)
    name, kind = f"arg{index}", piece
    if last:
        ahead = _QUALIFIERS.sub(" ", piece[: last.start()]).strip()
        if ahead and last[1] not in _INTEGER_WORDS and not ahead.endswith("::"):
            name, kind = last[1], piece[: last.start()]
    kind = _resolve(kind, done, names, set(template)) + ("*" if array else "")
    stars = kind.count("*")
    before_star = kind.split("*")[0]
    return Parameter(
        name=name,
        type=canonical(before_star) + "*" * stars,
        pointer=stars > 0,
        const=stars == 1 and re.search(r"\bconst\b", before_star) is not None,
    )


def _resolve(kind: str, done: Preprocessed, names: Mapping[str, str], keep: set[str]) -> str:
    for _ in range(16):
        resolved = done.expand(kind)
        resolved = re.sub(
            r"\b[A-Za-z_]\w*\b",
            lambda m: names[m[0]] if m[0] in names and m[0] not in keep and m[0] not in _SYNONYMS else m[0],
            resolved,
        )
        if resolved == kind:
            break
        kind = resolved
    return kind


def canonical(kind: str) -> str:
    """One spelling for a type without its pointer stars: ``unsigned int`` → ``unsigned``."""
    kind = re.sub(r"\s+", " ", _QUALIFIERS.sub(" ", kind)).strip()
    kind = re.sub(r"^(?:::)?(?:std::)?", "", kind)
    words = kind.split()
    if words and all(word in _INTEGER_WORDS for word in words):
        sign = "unsigned " if "unsigned" in words else ""
        if "char" in words:
            return ("signed " if "signed" in words else sign) + "char"
        if "short" in words:
            return f"{sign}short"
        longs = words.count("long")
        return (sign + ("long " * longs if longs else "" if sign else "int")).strip()
    return _SYNONYMS.get(kind, kind)


def _instantiate(entry: Entry, name: str, arguments: Mapping[str, str]) -> Entry:
    def replaced(parameter: Parameter) -> Parameter:
        stars = "*" * parameter.type.count("*")
        kind = parameter.type.rstrip("*")
        kind = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: arguments.get(m[0], m[0]), kind)
        return Parameter(parameter.name, canonical(kind) + stars, parameter.pointer, parameter.const)

    parameters = tuple(replaced(parameter) for parameter in entry.parameters)
    return Entry(name, parameters, entry.line, (), entry.max_threads, entry.extern_c)


def _template_call(name: str) -> tuple[str, list[str]]:
    base, bracket, rest = name.partition("<")
    if not bracket:
        return name.strip(), []
    return base.strip(), [piece.strip() for piece in _split(rest.rstrip().removesuffix(">"))]


def _closing(code: str, start: int) -> int | None:
    """Position of the parenthesis that closes the one at ``start``."""
    depth = 0
    for at in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[at], 0)
        if depth == 0:
            return at
    return None


def _split(text: str) -> list[str]:
    """Pieces between the commas that lie in no bracket; none for an empty list or ``void``."""
    pieces, depth, piece = [], 0, ""
    for char in text:
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(char, 0)
        if char == "," and depth == 0:
            pieces.append(piece)
            piece = ""
        else:
            piece += char
    pieces.append(piece)
    return [] if len(pieces) == 1 and pieces[0].strip() in ("", "void") else pieces
