"""The process in which students' kernels run. Standard library only; started by its path.

It reads requests from its standard input as frames (four bytes of length, then JSON) and answers in
the same way. The buffers of a launch lie in one shared file that both processes map. The main thread
keeps reading while a launch runs, so the parent's end, seen as the end of the input, ends this process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import os
import struct
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO


def _load_library_module() -> Any:
    """``library.py`` by its path: importing labkit would take longer than most launches."""
    path = Path(__file__).resolve().parent / "library.py"
    spec = importlib.util.spec_from_file_location("labkit_emulator_library", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


library = _load_library_module()


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next request; None at the end of the input."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    body = stream.read(size)
    return json.loads(body) if len(body) == size else None


def write_frame(stream: BinaryIO, value: dict[str, Any]) -> None:
    """Send one answer."""
    body = json.dumps(value).encode()
    stream.write(struct.pack("<I", len(body)) + body)
    stream.flush()


def private_streams() -> tuple[BinaryIO, BinaryIO]:
    """The parent's pipes, moved away from where a kernel's own ``puts`` or ``scanf`` would find them."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, answers


def set_limits(bytes_more: int) -> None:
    """Bound what a kernel can take from the machine; no core files."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for what, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 64 << 20)):
        _lower(resource, what, limit)
    if hasattr(resource, "RLIMIT_AS") and sys.platform != "darwin":
        _lower(resource, resource.RLIMIT_AS, bytes_more)


def _lower(resource: Any, what: int, limit: int) -> None:
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(what, (limit, hard))


# Address space kept out of reach on both sides of the buffers: an int of elements of 4 bytes reaches so far.
GUARD = 8 << 30
_C: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
_FIXED = 0x10  # MAP_FIXED on Linux and macOS


class Arena:
    """The shared file, mapped for one launch; what lies around and between the buffers is out of reach.

    Args:
        descriptor: the file.
        size: bytes of it, whole pages.
        gaps: (offset, bytes) between the buffers, whole pages.
    """

    def __init__(self, descriptor: int, size: int, gaps: list[list[int]]) -> None:
        self._memory: mmap.mmap | None = None
        self._reserved = self._reserve(size)
        if self._reserved:
            self.base = self._reserved + GUARD
            protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
            if _C.mmap(self.base, size, protection, flags, descriptor, 0) != self.base:
                raise OSError(ctypes.get_errno(), "the buffers cannot be mapped")
        else:
            self._memory = mmap.mmap(descriptor, size)
            self._view = ctypes.c_char.from_buffer(self._memory)
            self.base = ctypes.addressof(self._view)
        self._size = size
        if _C is not None:
            _C.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            for offset, length in gaps:
                _C.mprotect(self.base + offset, length, 0)

    @staticmethod
    def _reserve(size: int) -> int:
        """Start of address space for the buffers and a guard on each side; 0 where there is none."""
        if _C is None or sys.maxsize < 1 << 40:
            return 0
        word, number = ctypes.c_size_t, ctypes.c_int
        _C.mmap.argtypes = [ctypes.c_void_p, word, number, number, number, ctypes.c_longlong]
        _C.mmap.restype = ctypes.c_void_p
        _C.munmap.argtypes = [ctypes.c_void_p, word]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANON | getattr(mmap, "MAP_NORESERVE", 0)
        start = _C.mmap(None, size + 2 * GUARD, 0, flags, -1, 0)
        return 0 if start in (None, ctypes.c_void_p(-1).value) else start

    def close(self) -> None:
        """Unmap."""
        if self._reserved:
            _C.munmap(self._reserved, self._size + 2 * GUARD)
        elif self._memory is not None:
            del self._view
            self._memory.close()


class Worker:
    """Answers requests one after another."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO, descriptor: int, memory: int) -> None:
        self._requests, self._answers = requests, answers
        self._descriptor = descriptor
        self._memory = memory
        self._libraries: dict[str, Any] = {}
        self._launch: Any = None

    def serve(self) -> None:
        """Until the parent closes its end; then this process is gone, whatever a kernel is doing."""
        while True:
            request = read_frame(self._requests)
            if request is None:
                os._exit(0)
            if request["do"] == "stop":
                if self._launch is not None:
                    self._launch.stop()
                continue
            threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            answer = self._signature(request) if request["do"] == "signature" else self._run(request)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        write_frame(self._answers, answer)

    def _get(self, path: str, info: dict[str, Any]) -> Any:
        if path not in self._libraries:
            self._libraries[path] = library.Library(path, info)
        return self._libraries[path]

    def _signature(self, request: dict[str, Any]) -> dict[str, Any]:
        set_limits(self._memory)
        return {"signature": self._get(request["paths"][0], request["info"]).signature(request["entry"])}

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        # A trace keeps a record for every word.
        set_limits(self._memory + 2 * GUARD + (20 if request["trace"] else 2) * request["size"])
        libraries = [self._get(path, request["info"]) for path in request["paths"]]
        arena = Arena(self._descriptor, request["size"], request["gaps"])
        try:
            addresses = [arena.base + offset for offset in request["offsets"]]
            self._launch = library.Launch(libraries, request, addresses)
            outcome = self._launch.run()
            outcome["arena"] = arena.base
            return outcome
        finally:
            self._launch = None
            arena.close()


def main() -> None:
    """``worker.py DESCRIPTOR_OR_PATH MEMORY``."""
    where, memory = sys.argv[1:3]
    descriptor = int(where) if where.isdigit() else os.open(where, os.O_RDWR | getattr(os, "O_BINARY", 0))
    requests, answers = private_streams()
    Worker(requests, answers, descriptor, int(memory)).serve()


if __name__ == "__main__":
    main()
