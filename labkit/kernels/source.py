"""A kernel by file, entry and compile-time constants: what both runners are given.

The ``.cu`` and ``.cuh`` files beside this module are the only source of every kernel.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from labkit.errors import refuse, require
from labkit.kernels.preprocess import define_text, read_text
from labkit.kernels.signature import Entry, Parameter, entries, find_entry

Defines = Mapping[str, object] | Iterable[tuple[str, object]]


def kernels_dir() -> Path:
    """Folder of the packaged ``.cu`` and ``.cuh`` files."""
    return Path(__file__).resolve().parent


def kernel_files() -> tuple[str, ...]:
    """Packaged ``.cu`` files, sorted: names below :func:`kernels_dir`, with forward slashes."""
    root = kernels_dir()
    return tuple(sorted(path.relative_to(root).as_posix() for path in root.rglob("*.cu")))


@dataclass(frozen=True)
class KernelSource:
    """One kernel of one file with its compile-time constants; hashable, so it can be a cache key.

    Args:
        file: name of a packaged ``.cu`` file, or the path of any other.
        entry: name of the ``__global__`` function; None when the file has only one.
        defines: macro name → value (int, float, bool or str), as ``-Dname=value``.
        own_text: the CUDA C++ itself; then ``file`` is only the name that messages carry.

    Raises:
        InputError: unknown file or entry (lists what exists), or a define that is no macro.
    """

    file: str
    entry: str | None = None
    defines: Defines = ()
    own_text: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        given = self.defines.items() if isinstance(self.defines, Mapping) else self.defines
        pairs = sorted((str(name), _define(str(name), value)) for name, value in given)
        object.__setattr__(self, "file", str(self.file))
        object.__setattr__(self, "defines", tuple(pairs))
        object.__setattr__(self, "entry", self.signature.name)

    @classmethod
    def from_text(
        cls, text: str, entry: str | None = None, defines: Defines = (), *, filename: str = "kernel.cu"
    ) -> KernelSource:
        """A kernel written in a notebook cell."""
        return cls(filename, entry, defines, text)

    @property
    def path(self) -> Path | None:
        """Its file on disk; None for a text of its own."""
        return None if self.own_text is not None else find_file(self.file)

    @property
    def name(self) -> str:
        """Name of the ``__global__`` function, with template arguments if it has any."""
        return self.signature.name

    @property
    def filename(self) -> str:
        """The name that compilers are told, without folders."""
        return Path(self.file).name

    @property
    def text(self) -> str:
        """The CUDA C++ as it is now."""
        path = self.path
        return self.own_text or "" if path is None else _read(path, path.stat().st_mtime_ns)

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        """Folders of its quoted headers: the file's own, then the packaged ones."""
        path = self.path
        own = () if path is None or path.parent == kernels_dir() else (path.parent,)
        return (*own, kernels_dir())

    @property
    def define_map(self) -> dict[str, str]:
        """The defines as name → text."""
        return dict(self.defines)  # type: ignore[arg-type]

    @property
    def signature(self) -> Entry:
        """The declaration: parameters, line, launch bounds."""
        return _signature(self.text, self.entry, tuple(self.defines), self.include_dirs, self.filename)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters in order, types resolved with the defines."""
        return self.signature.parameters

    @property
    def digest(self) -> str:
        """Hash of the text, of every quoted header that it reaches, and of the defines (not the entry)."""
        done = hashlib.sha256(repr((self.text, self.defines)).encode())
        for name, content in sorted(_headers(self.text, self.include_dirs).items()):
            done.update(name.encode() + b"\0" + content.encode())
        return done.hexdigest()


def _headers(text: str, folders: tuple[Path, ...], found: dict[str, str] | None = None) -> dict[str, str]:
    """Path → content of all quoted headers, also those in branches that are not compiled."""
    found = {} if found is None else found
    for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', text, re.MULTILINE):
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is not None and str(path) not in found:
            found[str(path)] = content = _read(path, path.stat().st_mtime_ns)
            _headers(content, (path.parent, *folders), found)
    return found


def find_file(name: str) -> Path:
    """The ``.cu`` file called ``name``: a path that exists, or a packaged file.

    Raises:
        InputError: neither; lists the packaged files.
    """
    packaged = kernels_dir() / name
    for path in (packaged, packaged.with_name(packaged.name + ".cu"), Path(name)):
        if path.is_file():
            return path
    listed = ", ".join(kernel_files()) or "none"
    refuse("file", repr(name), f"the path of a .cu file, or a packaged one: {listed}")


def find_source(name: str, defines: Defines = ()) -> list[KernelSource]:
    """Kernels by a name as typed: a file (all its kernels) or an entry of a packaged file.

    Raises:
        InputError: neither a file nor an entry; lists both.
    """
    if Path(name).is_file() or name in kernel_files() or f"{name}.cu" in kernel_files():
        whole = find_file(name)
        text = read_text(whole)
        macros = dict(defines.items() if isinstance(defines, Mapping) else defines)
        found = entries(text, macros, (whole.parent, kernels_dir()))
        inside = whole.is_relative_to(kernels_dir())
        file = whole.relative_to(kernels_dir()).as_posix() if inside else str(whole)
        require(bool(found), "kernel", f"no kernel in {whole.name}", "at least one __global__ function")
        plain = [entry for entry in found if not entry.template]
        if not plain:
            listed = ", ".join(f"{entry.name}<{', '.join(entry.template)}>" for entry in found)
            refuse(
                "kernel", f"{whole.name}, which has only templates: {listed}", "a kernel that is no template"
            )
        return [KernelSource(file, entry.name, defines) for entry in plain]
    known = packaged_entries()
    base = name.partition("<")[0].strip()
    if base not in known:
        listed = ", ".join(sorted(known)) or "none"
        refuse("kernel", repr(name), f"a .cu file or one of the kernels {listed}")
    return [KernelSource(known[base], name, defines)]


def packaged_entries() -> dict[str, str]:
    """Every kernel of the packaged files with default defines: entry name → file name."""
    found: dict[str, str] = {}
    for file in kernel_files():
        text = read_text(kernels_dir() / file)
        found |= {entry.name: file for entry in entries(text, include_dirs=(kernels_dir(),))}
    return found


def _define(name: str, value: object) -> str:
    require(re.fullmatch(r"[A-Za-z_]\w*", name) is not None, "defines", repr(name), "the name of a C macro")
    require(
        isinstance(value, bool | int | float | str) and "\n" not in str(value),
        f"defines[{name!r}]",
        repr(value),
        "a number, or a text of one line",
    )
    return define_text(value)


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> str:
    """``changed`` is part of the key: a file that was edited is read again."""
    return read_text(path)


@functools.lru_cache(maxsize=512)
def _signature(
    text: str,
    entry: str | None,
    defines: tuple[tuple[str, str], ...],
    include_dirs: tuple[Path, ...],
    filename: str,
) -> Entry:
    return find_entry(text, entry, dict(defines), include_dirs, filename=filename)
