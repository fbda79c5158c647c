"""The C++ compiler that builds emulated kernels: which one, its flags, and whether there is one at all.

Taken in this order: ``LABKIT_CXX``, then g++, clang++ and c++ on the path, then the ``ziglang`` package
(a compiler as a wheel; also on Windows and macOS).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Literal

from labkit.errors import InputError, refuse
from labkit.probes.fixes import pip_install

Family = Literal["gcc", "clang", "zig"]

VARIABLE = "LABKIT_CXX"
_ON_PATH = ("g++", "clang++", "c++")
_MEMORY_KIB = 8 << 20  # address space of one compiler run: a runaway template must not take the machine

# Meaning of the kernel's arithmetic: wrap-around integers, contraction as nvcc does it, no errno; a null
# pointer is dereferenced, not assumed away; a call returns to the line that made it.
# A student's endless loop must stay one: C++ lets a compiler take it for finite and drop it.
_MEANING = """
    -std=c++20 -fno-finite-loops -fno-strict-aliasing -fwrapv -fno-math-errno -fno-exceptions
    -ffp-contract=fast -fno-delete-null-pointer-checks -fno-optimize-sibling-calls -fvisibility=hidden
    -UNDEBUG -w
"""
# Traced at -O1 with everything off that merges, splits or moves memory accesses.
_TRACE = "-O1 -g"
_TRACE_GCC = """
    -fno-tree-vectorize -fno-tree-slp-vectorize -fno-store-merging -fno-tree-loop-distribute-patterns
    -fno-reorder-blocks -fno-jump-tables -fno-tree-sra -fno-omit-frame-pointer -fsanitize=thread
    --param=tsan-instrument-func-entry-exit=0
"""
# Clang's driver refuses -fsanitize=thread for windows-gnu; the compiler itself takes it everywhere.
_TRACE_CLANG = """
    -fno-vectorize -fno-slp-vectorize -fno-unroll-loops -gdwarf-4 -Xclang -fsanitize=thread
    -mllvm -tsan-distinguish-volatile -mllvm -tsan-instrument-read-before-write
    -mllvm -tsan-instrument-func-entry-exit=0
"""
# Clang gives instructions that it has merged from several lines no line at all.
_LINES_CLANG = """
    -mllvm -simplifycfg-sink-common=false -mllvm -simplifycfg-hoist-common=false -mllvm -enable-tail-merge=0
"""
# Never instrumented, and in no need of a C++ library.
_RUNTIME = """
    -std=c++20 -O2 -fvisibility=hidden -fno-strict-aliasing -fno-exceptions -fno-rtti
    -fno-threadsafe-statics -g0 -w
"""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Args:
        command: how it is called, e.g. ``("/usr/bin/g++",)``.
        family: whose flags it takes.
        version: first line of its ``--version``.
        target: target triple for cross-compilation (zig only); empty for this machine.
    """

    command: tuple[str, ...]
    family: Family
    version: str
    target: str = ""

    @property
    def identity(self) -> str:
        """What a cached result depends on."""
        return " ".join((*self.command, self.version, self.target, "" if self.target else cpu_features()))

    @property
    def windows(self) -> bool:
        """Whether it builds for Windows."""
        return "windows" in self.target if self.target else os.name == "nt"

    @property
    def macos(self) -> bool:
        """Whether it builds for macOS."""
        return "macos" in self.target if self.target else sys.platform == "darwin"

    @property
    def suffix(self) -> str:
        """Ending of a shared library."""
        if self.windows:
            return ".dll"
        return ".dylib" if self.macos else ".so"

    def kernel_flags(self, *, trace: bool, blocks_executed: bool = False) -> list[str]:
        """Flags that compile a kernel's text: optimised, or with every memory access reported."""
        flags = [*_MEANING.split(), f"-DCUEMU_TRACE={int(trace)}", *self._common(), *self._errors()]
        if not self.windows and not self.macos:
            # A local array that is too big faults in the gap below the stack, not in its neighbour.
            flags.append("-fstack-clash-protection")
        if self.family != "gcc":
            flags += _LINES_CLANG.split()
        if not trace:
            return [*flags, "-O3", "-g1" if self.family == "gcc" else "-gline-tables-only"]
        flags += _TRACE.split()
        flags += (_TRACE_GCC if self.family == "gcc" else _TRACE_CLANG).split()
        if self.family == "gcc" and self._major() >= 11:
            flags.append("--param=tsan-distinguish-volatile=1")
        if blocks_executed:
            flags.append("-fsanitize-coverage=trace-pc")
        return flags

    def _major(self) -> int:
        """The compiler's main version number; a big one when its version says nothing."""
        match = re.search(r"\b(\d+)\.\d+\.\d+", self.version)
        return int(match[1]) if match else 99

    def runtime_flags(self, *, trace: bool) -> list[str]:
        """Flags that compile the runtime: never instrumented, with no need of a C++ library."""
        return [*_RUNTIME.split(), *self._common(), *(["-DCUEMU_TRACE_BUILD"] if trace else [])]

    def _common(self) -> list[str]:
        flags = [] if self.windows else ["-fPIC"]
        flags += ["-fno-gnu-unique"] if self.family == "gcc" else ["-fno-sanitize=undefined"]
        if self.target:
            flags += ["-target", self.target]
        elif platform.machine() in ("x86_64", "AMD64"):
            flags.append("-march=native")
        return flags

    def _errors(self) -> list[str]:
        if self.family == "gcc":
            return ["-fmax-errors=12", "-fdiagnostics-color=never", "-ftrack-macro-expansion=0"]
        return ["-ferror-limit=12", "-fno-color-diagnostics", "-fmacro-backtrace-limit=1"]

    def link_command(self, objects: Sequence[str], output: str) -> list[str]:
        """Command that makes a shared library of ``objects``."""
        if self.family == "zig":
            if not self.windows and not self.macos:
                # zig's own driver would build a C++ library first, for minutes; the runtime needs none.
                linker = [*self.command[:-1], "ld.lld"]
                return [*linker, "-shared", "-Bsymbolic", *objects, "-o", output]
            target = ["-target", self.target] if self.target else []
            return [*self.command[:-1], "cc", *target, "-shared", *objects, "-o", output]
        if self.macos:
            return [*self.command, "-dynamiclib", "-undefined", "dynamic_lookup", *objects, "-o", output]
        # An undefined function is an error now, not when the library is loaded.
        symbolic = [] if self.windows else ["-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,--as-needed"]
        return [*self.command, "-shared", *symbolic, *objects, "-o", output]

    def run(self, command: Sequence[str], folder: Path, *, seconds: float) -> tuple[int, str]:
        """Run one command of this compiler.

        Returns:
            Exit code and everything it wrote; exit code -1 when it took longer than ``seconds``.
        """
        if os.name == "posix" and self.family != "zig" and sys.platform != "darwin":
            command = ["/bin/sh", "-c", f'ulimit -v {_MEMORY_KIB} -c 0; exec "$@"', "sh", *command]
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=_environment(),
            start_new_session=os.name == "posix",
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            return -1, ""
        except BaseException:
            _end(process)
            raise
        return process.returncode, output


def _environment() -> dict[str, str]:
    """The caller's, with messages in English and nothing that changes what a compiler does."""
    ignored = ("CPATH", "CPLUS_INCLUDE_PATH", "LD_PRELOAD", "GCC_COLORS", "LANGUAGE")
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    environment["LC_ALL"] = "C"
    return environment


def _end(process: subprocess.Popen[str]) -> None:
    """End a compiler and the programs it started."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.communicate()


def find() -> Compiler:
    """The compiler to use.

    Raises:
        InputError: there is none, or ``LABKIT_CXX`` names none; the fix is the line that brings one.
    """
    return _find(os.environ.get(VARIABLE, ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find(wish: str, path: str) -> Compiler:
    if wish:
        if wish == "zig":
            compiler = _zig()
            if compiler is None:
                refuse(VARIABLE, "zig, which is not installed", "a C++ compiler", pip_install("ziglang"))
            return compiler
        try:
            command = tuple(shlex.split(wish, posix=os.name == "posix"))
        except ValueError:  # an open quotation mark
            command = (wish,)
        found = _probe(command) if command else None
        if found is None:
            refuse(VARIABLE, repr(wish), "a C++ compiler that runs", f"unset {VARIABLE}, or name another one")
        return found
    for name in _ON_PATH:
        if where := shutil.which(name, path=path or None):
            compiler = _probe((where,))
            if compiler is not None:
                return compiler
    compiler = _zig()
    if compiler is None:
        raise InputError(
            "C++ compiler",
            "none",
            "g++ or clang++ on the path, or the ziglang package",
            pip_install("ziglang"),
        )
    return compiler


def _probe(command: tuple[str, ...]) -> Compiler | None:
    """The compiler behind ``command``; None when it does not run or is of no known family."""
    try:
        done = subprocess.run(
            [*command, "--version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=30,
            check=False,
            env=_environment(),
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode:
        return None
    first = (done.stdout.strip().splitlines() or [""])[0]
    if "clang" in done.stdout.lower():
        return Compiler(command, "clang", first)
    if re.search(r"\bg(cc|\+\+)\b", first, re.I) or _predefines_gnuc(command):
        return Compiler(command, "gcc", first)
    return None


def _predefines_gnuc(command: tuple[str, ...]) -> bool:
    """Whether ``command`` is GCC under another name (``c++``): its version may not say so."""
    try:
        done = subprocess.run(
            [*command, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return b"#define __GNUC__ " in done.stdout


def _zig() -> Compiler | None:
    if util.find_spec("ziglang") is None:
        return None
    command = (sys.executable, "-m", "ziglang", "c++")
    try:
        done = subprocess.run(
            [*command[:-1], "version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode:
        return None
    return Compiler(command, "zig", f"zig {done.stdout.strip()}")


def cross(target: str) -> Compiler | None:
    """zig as a compiler for another machine, e.g. ``"x86_64-windows-gnu"``; None without ziglang."""
    zig = _zig()
    return None if zig is None else Compiler(zig.command, "zig", zig.version, target)


@functools.lru_cache(maxsize=1)
def cpu_features() -> str:
    """A short name for this CPU's instruction set: code built for one machine may not run on the next."""
    text = f"{platform.machine()} {platform.processor()}"
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features", "model name")):
                text += line
                if not line.startswith("model name"):
                    break
    except OSError:
        pass
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe() -> tuple[bool, str, str]:
    """What the doctor says of the compiler: whether there is one, one line, the line that brings one."""
    try:
        compiler = find()
    except InputError as error:
        return False, f"no C++ compiler: the emulator cannot run ({error.received})", error.fix
    where = "the ziglang package" if compiler.family == "zig" else " ".join(compiler.command)
    return True, f"{compiler.version} ({where})", ""
