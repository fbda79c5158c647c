"""The C interface of a built kernel, and one launch through it.

Standard library only and no imports from labkit: the worker process loads this file by its path.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_TEXT = ctypes.c_char_p
_PATIENCE = 0.3  # seconds that the other copies get to end after a fault


class Library:
    """One loaded copy of a built kernel; its statics belong to it alone.

    Args:
        path: the shared library.
        info: what ``labkit.emulator.lines.read`` found in the file.
    """

    def __init__(self, path: str, info: dict[str, Any]) -> None:
        self.path = path
        self._lib = ctypes.CDLL(path)
        lib = self._lib
        lib.cuemu_error.restype = lib.cuemu_output.restype = lib.cuemu_trace_json.restype = _TEXT
        lib.cuemu_launch.argtypes = [_POINTER, _POINTER, _POINTER, _POINTER, _SIZE, *[ctypes.c_uint64] * 3]
        lib.cuemu_trace_buffer.argtypes = [_TEXT, _POINTER, _SIZE, ctypes.c_int]
        lib.cuemu_trace_module.argtypes = lib.cuemu_trace_params.argtypes = [_POINTER, _SIZE]
        lib.cuemu_set_stack.argtypes = lib.cuemu_trace_dyn.argtypes = [_SIZE]
        if self.has("cuemu_set_blocks"):
            lib.cuemu_set_blocks.argtypes = [_POINTER, _SIZE]
        if self.has("cuemu_set_limit"):
            lib.cuemu_set_limit.argtypes = [ctypes.c_double]
            lib.cuemu_set_limit.restype = None
        launch = ctypes.cast(lib.cuemu_launch, _POINTER).value or 0
        # Difference between an address here and in the file.
        self.base = launch - info["anchor"]
        self._constant = info["constant"]
        self._constant_known = False

    def has(self, name: str) -> bool:
        """Whether the library exports ``name``."""
        return hasattr(self._lib, name)

    def signature(self, entry: str) -> list[dict[str, Any]]:
        """For each parameter its ``kind``, ``size`` and, for pointers, ``pointee`` size and ``of``."""
        kinds = self._call(f"cuemu_sig_{entry}", _TEXT).decode()
        sizes = self._call(f"cuemu_sizes_{entry}", ctypes.POINTER(ctypes.c_int))
        parameters = [
            {"kind": kind, "size": sizes[i], "pointee": 0, "of": "-"} for i, kind in enumerate(kinds)
        ]
        if self.has(f"cuemu_pointee_{entry}"):
            pointees = self._call(f"cuemu_pointee_{entry}", ctypes.POINTER(ctypes.c_int))
            of = self._call(f"cuemu_pointee_kind_{entry}", _TEXT).decode()
            for i, parameter in enumerate(parameters):
                parameter.update(pointee=pointees[i], of=of[i])
        return parameters

    def _call(self, name: str, result: Any) -> Any:
        function = getattr(self._lib, name)
        function.restype = result
        return function()

    def stop(self) -> None:
        """Ask the launch that runs in another thread to end after the block it is in."""
        if self.has("cuemu_stop"):
            self._lib.cuemu_stop()

    def set_limit(self, seconds: float) -> None:
        """End a launch after ``seconds`` wherever it is; 0 for no limit."""
        if self.has("cuemu_set_limit"):
            self._lib.cuemu_set_limit(seconds)

    def run(self, entry: str, arguments: Any, request: dict[str, Any], first: int, step: int) -> int:
        """Run blocks ``first, first + step, …``; the runtime's return code."""
        function = ctypes.cast(getattr(self._lib, f"cuemu_call_{entry}"), _POINTER)
        grid = (ctypes.c_uint * 3)(*request["grid"])
        block = (ctypes.c_uint * 3)(*request["block"])
        total = request["grid"][0] * request["grid"][1] * request["grid"][2]
        return self._lib.cuemu_launch(function, arguments, grid, block, request["shared"], first, step, total)

    def run_traced(self, entry: str, arguments: Any, request: dict[str, Any], regions: Sequence[Any]) -> int:
        """Run the blocks in ``request["blocks"]`` (None: all), recording every access."""
        lib, trace = self._lib, request["trace"]
        if not self._constant_known:
            for start, size in self._constant:
                lib.cuemu_trace_module(self.base + start, size)
            self._constant_known = True
        lib.cuemu_trace_begin(trace["race"], trace["stats"], trace["stop"], trace["blocks_executed"])
        try:
            for name, address, size, writable in regions:
                lib.cuemu_trace_buffer(name.encode(), address, size, int(writable))
            lib.cuemu_trace_dyn(request["shared"])
            lib.cuemu_trace_params(ctypes.addressof(arguments), ctypes.sizeof(arguments))
            blocks = request["blocks"]
            if blocks is None:
                return self.run(entry, arguments, request, 0, 1)
            if self.has("cuemu_set_blocks"):
                lib.cuemu_set_blocks((ctypes.c_uint64 * len(blocks))(*blocks), len(blocks))
                return self.run(entry, arguments, request, 0, 1)
            for block in blocks:
                if code := self.run(entry, arguments, request, block, 1 << 60):
                    return code
            return 0
        finally:
            lib.cuemu_trace_end()

    def trace_data(self) -> dict[str, Any]:
        """What the last traced launch recorded."""
        return json.loads(self._lib.cuemu_trace_json().decode("utf-8", "replace"))

    def error(self) -> str:
        """Why the last launch failed; addresses in it are those of this process."""
        return (self._lib.cuemu_error() or b"").decode("utf-8", "replace")

    def take_output(self) -> str:
        """What the kernel printed since the last call."""
        text = (self._lib.cuemu_output() or b"").decode("utf-8", "replace")
        self._lib.cuemu_clear_output()
        return text


def pack(values: Sequence[Sequence[Any]], addresses: Sequence[int]) -> Any:
    """The kernel's arguments as the runtime takes them: pointers to values, then the values.

    Args:
        values: for each argument ``("value", hex bytes)``, ``("pointer", buffer, delta)`` or ``("null",)``.
        addresses: address of each buffer.
    """
    chunks: list[bytes] = []
    for kind, *rest in values:
        if kind == "value":
            chunks.append(bytes.fromhex(rest[0]))
        else:
            address = addresses[rest[0]] + rest[1] if kind == "pointer" else 0
            chunks.append(address.to_bytes(8, "little"))
    offsets, position = [], 8 * len(chunks)
    for chunk in chunks:
        position = (position + 15) & ~15
        offsets.append(position)
        position += max(len(chunk), 8)
    # At least one word: an array of nothing has no address.
    memory = (ctypes.c_uint64 * max(1, (position + 7) // 8))()
    start = ctypes.addressof(memory)
    for i, (chunk, offset) in enumerate(zip(chunks, offsets)):
        memory[i] = start + offset
        ctypes.memmove(start + offset, chunk, len(chunk))
    return memory


class Launch:
    """One launch over one or more copies of a library.

    Args:
        libraries: copies; a traced launch uses the first.
        request: ``entry``, ``grid``, ``block``, ``shared``, ``values``, ``regions``, ``trace``, ``blocks``,
            ``limit`` (seconds until the runtime itself ends it; 0: never. With a limit, copies that do not
            end after another's fault are left running, and ``abandoned`` in the outcome says so).
        addresses: address of each buffer in this process.
    """

    def __init__(
        self, libraries: Sequence[Library], request: dict[str, Any], addresses: Sequence[int]
    ) -> None:
        grid = request["grid"]
        wanted = 1 if request["trace"] else min(len(libraries), grid[0] * grid[1] * grid[2])
        self._libraries = list(libraries[:wanted])
        self._request = request
        self._addresses = addresses
        self._abandons = request["limit"] > 0
        self.abandoned = False
        self._stopped = False

    def stop(self) -> None:
        """End the launch between two blocks; a copy that is only starting may need to be asked again."""
        self._stopped = True
        for library in self._libraries:
            library.stop()

    def run(self) -> dict[str, Any]:
        """Run to the end; ``code``, ``error``, ``output``, ``seconds``, ``base``, and ``trace`` if traced."""
        request = self._request
        arguments = pack(request["values"], self._addresses)
        for library in self._libraries:
            library.set_limit(request["limit"])
        start = time.perf_counter()
        results = self._traced(arguments) if request["trace"] else self._fast(arguments)
        seconds = time.perf_counter() - start
        outcome: dict[str, Any] = {
            "code": 0,
            "error": "",
            "seconds": seconds,
            "base": self._libraries[0].base,
        }
        # A fault says more than "stopped", which the other copies report after it.
        pairs = sorted(zip(self._libraries, results), key=lambda pair: pair[1][0] == 3)
        for library, (code, error) in pairs:
            if code:
                outcome.update(code=code, error=error, base=library.base)
                break
        outcome["abandoned"] = self.abandoned
        outcome["output"] = "".join(library.take_output() for library in self._libraries)
        if request["trace"]:
            outcome["trace"] = self._libraries[0].trace_data()
        return outcome

    def _traced(self, arguments: Any) -> list[tuple[int, str]]:
        regions = [
            (name, self._addresses[buffer], size, writable)
            for name, buffer, size, writable in self._request["regions"]
        ]
        library = self._libraries[0]
        code = library.run_traced(self._request["entry"], arguments, self._request, regions)
        return [(code, library.error() if code else "")]

    def _fast(self, arguments: Any) -> list[tuple[int, str]]:
        count = len(self._libraries)
        results = [(0, "")] * count

        def work(index: int) -> None:
            if self._stopped:
                results[index] = (3, "")
                return
            library = self._libraries[index]
            code = library.run(self._request["entry"], arguments, self._request, index, count)
            if code:  # the error belongs to the thread that ran
                results[index] = (code, library.error())
                self.stop()

        if count == 1:
            work(0)
            return results
        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            # After a fault the others end with their block, unless they are in an endless loop.
            while thread.is_alive() and not (self._stopped and self._abandons):
                thread.join(0.05)
                if self._stopped:
                    self.stop()
            thread.join(_PATIENCE)
        self.abandoned = any(thread.is_alive() for thread in threads)
        return results
