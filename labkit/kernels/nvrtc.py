"""CUDA C++ to a cubin with NVRTC: machine code for any architecture, with no GPU and no driver.

libnvrtc and the CUDA headers come from the pip wheels or from a toolkit; the calls are NVRTC's
public C interface through ctypes. Results are kept on disk.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from labkit import atomic, paths
from labkit.errors import InputError, refuse, require
from labkit.kernels.source import KernelSource
from labkit.probes import cuda

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
"""Architectures that labkit's kernels are held to: those of ``data/devices.json``."""

_FORMAT = 3  # of the cached file: raise it when its content or the options' meaning changes
_lock = threading.Lock()


class KernelCompileError(InputError):
    """NVRTC refused the text; the message names the kernel's own line.

    Attributes:
        line: line of the first error in the kernel's file, None when it lies elsewhere.
        log: all that the compiler said.
    """

    def __init__(self, filename: str, log: str) -> None:
        self.log = log
        self.line, where, what = _first_error(filename, log)
        super().__init__(where, what, "CUDA C++ that compiles")


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel.

    Attributes:
        cubin: the ELF file.
        symbol: the kernel's name in it (mangled unless ``extern "C"``).
        arch: such as ``"sm_86"``.
        log: what the compiler said, ptxas's resource lines included.
        nvrtc: version of the library.
    """

    cubin: bytes
    symbol: str
    arch: str
    log: str
    nvrtc: str

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the machine code."""
        return hashlib.sha256(self.cubin).hexdigest()


@dataclass(frozen=True)
class Library:
    """One libnvrtc with the headers that belong to it.

    Attributes:
        archs: compute capabilities that it can compile for, as 86 for sm_86.
        include_dirs: folders to search for ``cuda_fp16.h`` and what it includes.
    """

    path: str
    version: tuple[int, int]
    archs: tuple[int, ...]
    include_dirs: tuple[Path, ...]


# --- architectures ----------------------------------------------------------------------------------


def arch_name(arch: object) -> str:
    """``"sm_86"`` from ``"sm_86"``, ``86``, ``"8.6"`` or ``(8, 6)``.

    Raises:
        InputError: anything else.
    """
    text = f"{arch[0]}{arch[1]}" if isinstance(arch, tuple) and len(arch) == 2 else str(arch)
    found = re.fullmatch(r"(?:sm_?)?(\d{2,3}|\d{1,2}\.\d)([af]?)", text.strip().lower())
    if found is None:
        refuse("arch", repr(arch), "a compute capability, such as sm_86 or 8.6")
    return f"sm_{found[1].replace('.', '')}{found[2]}"


def arch_number(arch: object) -> int:
    """86 from ``"sm_86"`` and its like."""
    return int(re.sub(r"\D", "", arch_name(arch)))


def target_for(capability: tuple[int, int]) -> str:
    """Architecture to compile for so that a GPU of this capability runs it.

    Its own, or the nearest lower one of the same major number, whose machine code it runs too.

    Raises:
        InputError: no library here knows any such architecture.
    """
    known = {number for library in libraries() for number in library.archs}
    exact = capability[0] * 10 + capability[1]
    usable = [number for number in known if number // 10 == capability[0] and number <= exact]
    if not usable:
        _no_library(f"sm_{exact}")
    return f"sm_{max(usable)}"


# --- the library ------------------------------------------------------------------------------------


@functools.cache
def libraries() -> tuple[Library, ...]:
    """Every libnvrtc on this machine that can be loaded, wheels first."""
    found = []
    headers = [(folder, _headers_version(folder)) for folder in cuda.find_headers()]
    for path in cuda.find_nvrtc():
        try:
            version_text = cuda.nvrtc_version(str(path))
            library = _load(str(path))
            count = ctypes.c_int()
            _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
            archs = (ctypes.c_int * count.value)()
            _check(library, library.nvrtcGetSupportedArchs(archs))
        except (OSError, AttributeError):  # AttributeError: NVRTC before 11.2 cannot be asked
            continue
        major, minor = (int(piece) for piece in version_text.split("."))
        own = sorted(headers, key=lambda pair: _distance(pair[1], (major, minor)))
        # Headers of another major version do not compile with this library.
        folders = [folder for folder, version in own if version[0] == major][:1]
        folders += [folder / "cccl" for folder in folders if (folder / "cccl").is_dir()]
        found.append(Library(str(path), (major, minor), tuple(archs), tuple(folders)))
    return tuple(found)


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    """libnvrtc with the library of built-in functions that it opens by name.

    Some wheels do not tell the loader to look beside libnvrtc, so that one is opened first.
    """
    folder = Path(path).parent
    if sys.platform == "win32":
        os.add_dll_directory(str(folder))
    for builtins in sorted(folder.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(path)


def library_for(arch: object) -> Library:
    """The first library that can target ``arch``, one with headers before one without.

    Raises:
        InputError: none can; lists what those here can do.
    """
    number = arch_number(arch)
    able = [library for library in libraries() if number in library.archs]
    if not able:
        _no_library(arch_name(arch))
    return next((library for library in able if library.include_dirs), able[0])


def _no_library(arch: str) -> None:
    if not libraries():
        refuse("arch", f"{arch}, and libnvrtc was not found", "NVRTC", cuda.COMPILER_FIX)
    known = "; ".join(
        f"NVRTC {'.'.join(map(str, library.version))}: " + ", ".join(f"sm_{n}" for n in library.archs)
        for library in libraries()
    )
    refuse("arch", arch, known, "install a newer NVRTC: " + cuda.COMPILER_FIX)


def _headers_version(folder: Path) -> tuple[int, int]:
    """CUDA version that the headers of ``folder`` belong to, (0, 0) when they do not say."""
    with contextlib.suppress(OSError):
        text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
        if found:
            return int(found[1]) // 1000, int(found[1]) % 1000 // 10
    return 0, 0


def _distance(version: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int]:
    return abs(version[0] - wanted[0]), abs(version[1] - wanted[1])


def _check(library: ctypes.CDLL, code: int) -> None:
    if code != 0:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise OSError(f"NVRTC: {library.nvrtcGetErrorString(code).decode()}")


# --- compiling --------------------------------------------------------------------------------------


def compile_cubin(source: KernelSource, arch: object = "sm_86", options: Sequence[str] = ()) -> Compiled:
    """Machine code of ``source`` for ``arch``; from the disk when it was compiled before.

    Args:
        source: the kernel.
        arch: such as ``"sm_86"``, ``86``, ``(8, 6)``.
        options: further options of NVRTC, such as ``"--use_fast_math"``.

    Raises:
        KernelCompileError: an error in the text (an InputError).
        InputError: NVRTC or the headers missing, or an architecture that NVRTC does not know.
    """
    name = arch_name(arch)
    library = library_for(name)
    arguments = (
        "-std=c++17",
        f"-arch={name}",
        "-lineinfo",
        "--ptxas-options=-v",
        # Newer libraries keep a cache of their own, and say nothing of registers when it answers.
        *(("--no-cache",) if library.version >= (12, 9) else ()),
        *(f"-D{macro}={value}" for macro, value in source.define_map.items()),
        *options,
    )
    # All kernels of a file come in one cubin; a name that C++ mangles must be asked for.
    entry = "" if source.signature.extern_c else source.name
    parts = (_FORMAT, library.version, arguments, source.digest, source.filename, entry)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    kept = cache_folder() / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        done = _read(kept)
        return done if entry else replace(done, symbol=source.name)
    folders = (*source.include_dirs, *library.include_dirs)
    with _lock:
        done = _compile(library, source, name, (*arguments, *(f"-I{folder}" for folder in folders)))
    with contextlib.suppress(OSError):  # a home folder that cannot be written only costs time
        _write(kept, done)
    return done


def _compile(library: Library, source: KernelSource, arch: str, arguments: tuple[str, ...]) -> Compiled:
    nvrtc = _load(library.path)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()
    _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.text.encode(), source.filename.encode(), 0, None, None
        ),
    )
    try:
        entry = source.name.encode()
        _check(nvrtc, nvrtc.nvrtcAddNameExpression(program, entry))
        # Options hold folders: under a GBK locale their bytes on disk are not the UTF-8 of their text.
        texts = (ctypes.c_char_p * len(arguments))(*(os.fsencode(text) for text in arguments))
        code = nvrtc.nvrtcCompileProgram(program, len(arguments), texts)
        log = _bytes(nvrtc, program, "nvrtcGetProgramLog").rstrip(b"\0").decode("utf-8", "replace")
        if code != 0:
            _refuse_text(library, source.filename, log or nvrtc.nvrtcGetErrorString(code).decode())
        lowered = ctypes.c_char_p()
        _check(nvrtc, nvrtc.nvrtcGetLoweredName(program, entry, ctypes.byref(lowered)))
        symbol = (lowered.value or entry).decode()
        cubin = _bytes(nvrtc, program, "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Compiled(cubin, symbol, arch, log.strip(), ".".join(map(str, library.version)))


def _refuse_text(library: Library, filename: str, log: str) -> None:
    missing = re.search(r'cannot open source file "(cuda_\w+\.h\w*|mma\.h)"', log)
    if missing and not library.include_dirs:
        refuse(missing[1], "no such file", "the CUDA headers", cuda.HEADERS_FIX)
    option = re.search(
        r"^(?:nvrtc|Command-line) error\s*:\s*([^\n]*)|^nvrtc: error: ([^\n]*)", log, re.MULTILINE
    )
    if option:
        refuse(
            "arch or options",
            option[1] or option[2],
            f"what NVRTC {'.'.join(map(str, library.version))} takes",
        )
    raise KernelCompileError(filename, log)


def _bytes(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, what + "Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, what)(program, content))
    return content.raw


def _first_error(filename: str, log: str) -> tuple[int | None, str, str]:
    """Line, place in words, and text of the first error of an NVRTC log."""
    found = re.search(
        r"^(?P<file>[^\n(]*)\((?P<line>\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (?P<what>[^\n]*)"
        r"(?:\n(?P<text>[^\n]+)\n\s*\^)?",
        log,
        re.MULTILINE,
    )
    if found is None:
        lines = [line for line in log.splitlines() if line.strip()]
        return None, filename, lines[0] if lines else "an error without a message"
    file, line = Path(found["file"]).name, int(found["line"])
    text = f": {found['text'].strip()}" if found["text"] else ""
    return (line if file == filename else None), f"{file} line {line}", found["what"].strip() + text


# --- what is kept -----------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Folder of compiled kernels."""
    return paths.cache_dir() / "cubin"


def _read(path: Path) -> Compiled:
    kept = json.loads(path.read_text(encoding="utf-8"))
    cubin = base64.b64decode(kept["cubin"], validate=True)
    require(cubin[:4] == b"\x7fELF", "cache", "no ELF file", "a cubin")
    return Compiled(cubin, kept["symbol"], kept["arch"], kept["log"], kept["nvrtc"])


def _write(path: Path, done: Compiled) -> None:
    kept = {"symbol": done.symbol, "arch": done.arch, "nvrtc": done.nvrtc, "log": done.log}
    atomic.write_json(path, kept | {"cubin": base64.b64encode(done.cubin).decode()})
