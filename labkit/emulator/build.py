"""Kernel text to a shared library: compiled once, kept in the cache, never seen half-written.

One folder a build under ``labkit.paths.cache_dir()/emulator``, named by everything the result depends
on: text, flags, compiler, CPU, runtime, included files. It is made elsewhere and renamed into place, so
two processes may build the same kernel at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.emulator import lines, toolchain
from labkit.emulator.diagnostics import compile_error, link_error
from labkit.emulator.rewrite import rewrite
from labkit.emulator.toolchain import Compiler
from labkit.errors import InputError
from labkit.paths import cache_dir

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent / "kernels"
COMPILE_SECONDS = 60.0
# The runtime is compiled once a machine. On Windows and macOS zig's first link builds parts of its own
# library, for minutes.
RUNTIME_SECONDS = 300.0
LINK_SECONDS = 900.0
_SOURCES = (".h", ".cuh", ".cpp")
_KEPT = {"kernel": 600, "runtime": 24}  # builds kept in the cache; the oldest go first
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
_building = threading.RLock()


@dataclass(frozen=True)
class Built:
    """A built library.

    Args:
        library: path of the shared library.
        info: what :func:`labkit.emulator.lines.read` found in it.
        digest: SHA-256 of the file.
    """

    library: Path
    info: dict[str, Any]
    digest: str

    def copy(self, number: int) -> Path:
        """Path of the ``number``-th identical copy: each loaded copy has its own static variables."""
        if number == 0:
            return self.library
        path = self.library.with_name(f"{self.library.stem}.{number}{self.library.suffix}")
        if not path.exists() or _digest(path) != self.digest:
            temporary = Path(tempfile.mkdtemp(dir=self.library.parent)) / path.name
            shutil.copyfile(self.library, temporary)
            with contextlib.suppress(PermissionError):  # Windows: another process has it loaded
                os.replace(temporary, path)
            shutil.rmtree(temporary.parent, ignore_errors=True)
        return path


@dataclass(frozen=True)
class Request:
    """What to build.

    Args:
        text: the kernel's text, unchanged.
        filename: its name in messages.
        entries: kernels to export, with template arguments: ``("gemm<4>",)``.
        defines: macros, as with ``-D``.
        include_dirs: folders searched before labkit's own.
        trace: build that reports every memory access.
        blocks_executed: traced build that counts instructions by basic block, too.
    """

    text: str
    filename: str
    entries: tuple[str, ...]
    defines: Mapping[str, object]
    include_dirs: tuple[Path, ...]
    trace: bool = False
    blocks_executed: bool = False


def build(request: Request) -> Built:
    """The library for ``request``, from the cache or newly built.

    Raises:
        CompileError: the compiler does not take the text.
        InputError: there is no compiler.
    """
    compiler = toolchain.find()
    unit = _translation_unit(request)
    folders = [*request.include_dirs, KERNELS, HERE / "include"]
    flags = compiler.kernel_flags(trace=request.trace, blocks_executed=request.blocks_executed)
    flags += [f"-D{name}={_macro(value)}" for name, value in request.defines.items()]
    with _building:
        runtime = _runtime(compiler, trace=request.trace)
        key = _key("kernel", unit, repr(flags), runtime.digest, compiler.identity, *_included(unit, folders))
        flags += [f"-I{folder}" for folder in folders]

        def make(folder: Path) -> Path:
            source = folder / "labkit_kernel.cpp"
            source.write_text(unit, encoding="utf-8")
            command = [*compiler.command, *flags, "-c", source.name, "-o", "kernel.o"]
            code, output = compiler.run(command, folder, seconds=COMPILE_SECONDS)
            if code:
                _refuse_full_disk(output)
                raise compile_error(request.text, request.filename, code, output, COMPILE_SECONDS)
            # The runtime first: its own start-up must precede the registration of the kernel's variables.
            return _link(compiler, folder, [str(runtime.library), "kernel.o"], request)

        return _cached(key, make, lambda path: lines.read(path, request.filename, "labkit_kernel.cpp"))


def identifier(entry: str) -> str:
    """The exported name of a kernel: ``gemm<4>`` becomes ``gemm_4_``."""
    return re.sub(r"\W", "_", entry)


def _macro(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _translation_unit(request: Request) -> str:
    name = request.filename.replace("\\", "\\\\").replace('"', '\\"')
    exports = "".join(f"CUEMU_EXPORT({identifier(entry)}, {entry})\n" for entry in request.entries)
    text = rewrite(request.text)
    return f'#include "cuda_emulator.h"\n#line 1 "{name}"\n{text}\n#line 1 "{lines.EXPORTS}"\n{exports}'


def _runtime(compiler: Compiler, *, trace: bool) -> Built:
    """The runtime's object file; ``digest`` names its contents."""
    flags = compiler.runtime_flags(trace=trace)
    parts = [*_folder_parts("include"), *_folder_parts("runtime")]
    key = _key("runtime", repr(flags), compiler.identity, *parts)

    def make(folder: Path) -> Path:
        command = [*compiler.command, *flags, f"-I{HERE / 'include'}", f"-I{HERE / 'runtime'}"]
        command += ["-c", str(HERE / "runtime" / "emulator.cpp"), "-o", "runtime.o"]
        code, output = compiler.run(command, folder, seconds=RUNTIME_SECONDS)
        if code:
            _refuse_full_disk(output)
            raise InputError(
                "C++ compiler",
                f"an error from {compiler.version}: {output.strip()[-2000:] or 'no answer in time'}",
                "a compiler that builds the emulator's runtime",
                f"set {toolchain.VARIABLE} to another compiler, or to zig",
            )
        return folder / "runtime.o"

    return _cached(key, make, lambda path: {})


def _link(compiler: Compiler, folder: Path, objects: Sequence[str], request: Request) -> Path:
    output = folder / f"kernel{compiler.suffix}"
    command = compiler.link_command(objects, output.name)
    code, text = compiler.run(command, folder, seconds=LINK_SECONDS)
    if code:
        _refuse_full_disk(text)
        raise link_error(request.text, request.filename, text)
    return output


# ---------------------------------------------------------------------------------------------- keys


def _key(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return f"{parts[0]}-{digest.hexdigest()[:24]}"


def _folder_parts(name: str) -> Iterator[str]:
    for path in sorted((HERE / name).iterdir()):
        if path.suffix in _SOURCES:
            yield path.name
            yield path.read_text(encoding="utf-8")


def _included(text: str, folders: Sequence[Path]) -> Iterator[str]:
    """Names and texts of the files that ``text`` includes from ``folders``, and those that they include."""
    seen: set[Path] = set()
    waiting = [text]
    while waiting:
        for quoted, angled in _INCLUDE.findall(waiting.pop()):
            for folder in folders:
                path = folder / (quoted or angled)
                if path.is_file():
                    if path not in seen:
                        seen.add(path)
                        content = path.read_text(encoding="utf-8", errors="replace")
                        waiting.append(content)
                        yield str(path)
                        yield content
                    break


# --------------------------------------------------------------------------------------------- cache


def _cached(key: str, make: Callable[[Path], Path], read: Callable[[Path], dict[str, Any]]) -> Built:
    root = cache_dir() / "emulator"
    final = root / key
    built = _load(final)
    if built is not None:
        return built
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Short, and on the same file system, so that it can be renamed.
        work = Path(tempfile.mkdtemp(dir=root, prefix=".new-"))
    except OSError as error:
        raise _bad_cache(root, f"which cannot be written ({error.strerror})") from None
    try:
        path = make(work)
        meta = {"file": path.name, "sha256": _digest(path), "info": read(path)}
        (work / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        for leftover in work.iterdir():
            if leftover.name not in (path.name, "meta.json", "labkit_kernel.cpp"):
                leftover.unlink()
        _move(work, final)
    except OSError as error:
        raise _bad_cache(root, f"where a file cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _prune(root)
    built = _load(final)
    if built is None:
        raise _bad_cache(root, "where a file that was just written cannot be read")
    return built


def _bad_cache(root: Path, what: str) -> InputError:
    fix = "set LABKIT_CACHE to a folder on a local disk"
    return InputError("cache folder", f"{root}, {what}", "a folder that keeps files", fix)


def _refuse_full_disk(output: str) -> None:
    """A compiler that finds the disk full says so in words of its own."""
    if "No space left on device" in output:
        raise _bad_cache(cache_dir() / "emulator", "or the compiler's temporary folder: no space is left")


def _move(work: Path, final: Path) -> None:
    """Rename ``work`` to ``final``; a good folder of another process stays, a damaged one goes."""
    for _ in range(5):
        with contextlib.suppress(OSError):
            work.rename(final)
            return
        if _load(final, remember=False) is not None:
            return
        aside = Path(tempfile.mkdtemp(dir=final.parent, prefix=".old-"))
        with contextlib.suppress(OSError):
            final.rename(aside / "damaged")
        shutil.rmtree(aside, ignore_errors=True)


_loaded: dict[Path, tuple[tuple[int, int], Built]] = {}


def _load(folder: Path, *, remember: bool = True) -> Built | None:
    """What is in the cache under ``folder``; None when it is missing or damaged."""
    meta = folder / "meta.json"
    try:
        stat = meta.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        known = _loaded.get(folder)
        if known and known[0] == stamp and known[1].library.stat().st_size:
            return known[1]
        data = json.loads(meta.read_text(encoding="utf-8"))
        library = folder / data["file"]
        # A damaged library can end the process that loads it, so it is checked before.
        if _digest(library) != data["sha256"]:
            return None
        os.utime(folder)
        built = Built(library, data["info"], data["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if remember:
        _loaded[folder] = (stamp, built)
    return built


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _prune(root: Path) -> None:
    """Remove the oldest builds once there are too many."""
    with contextlib.suppress(OSError):
        for kind, most in _KEPT.items():
            kept = sorted(root.glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime)
            if len(kept) > most:
                for path in kept[: len(kept) - most * 3 // 4]:
                    _loaded.pop(path, None)
                    shutil.rmtree(path, ignore_errors=True)


@functools.lru_cache(maxsize=1)
def copies() -> int:
    """How many copies of a library a fast launch spreads its blocks over."""
    if hasattr(os, "sched_getaffinity"):
        available = len(os.sched_getaffinity(0))
    else:
        available = os.cpu_count() or 1
    return max(1, min(available, 4))
