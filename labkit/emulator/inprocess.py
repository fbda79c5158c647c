"""Launches in this process: for labkit's own kernels, which are trusted not to crash."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.emulator import arena
from labkit.emulator.arguments import Buffer
from labkit.emulator.build import Built, copies
from labkit.emulator.faults import Fault, KernelFault
from labkit.emulator.launcher import placed
from labkit.emulator.library import Launch, Library

_PATIENCE = 5.0  # seconds that an interrupted launch gets to end the block it is in


class _Loaded:
    """The copies of one library and the lock of their static state."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.libraries: list[Library] = []
        # Interrupted, but not ended; with the memory that it still uses.
        self.running: tuple[Launch, threading.Event, object] | None = None

    def get(self, built: Built, count: int) -> list[Library]:
        if self.running is not None:
            if not _ended(*self.running[:2]):
                text = "busy: an interrupted launch of this kernel is still in one of its blocks"
                raise KernelFault(Fault("busy", f"{text}. Does it loop for ever? Restart Python."))
            self.running = None
        while len(self.libraries) < count:
            path = built.copy(len(self.libraries))
            self.libraries.append(Library(str(path), built.info))
        return self.libraries[:count]


_loaded: dict[Path, _Loaded] = {}
_signatures: dict[tuple[Path, str], list[dict[str, Any]]] = {}


class InProcess:
    """Runs launches here; the blocks of a fast one in threads, each over its own copy of the library."""

    def signature(self, built: Built, entry: str) -> list[dict[str, Any]]:
        """Kinds and sizes of a kernel's parameters."""
        key = (built.library, entry)
        if key not in _signatures:
            loaded = _loaded.setdefault(built.library, _Loaded())
            with loaded.lock:
                _signatures[key] = loaded.get(built, 1)[0].signature(entry)
        return _signatures[key]

    def launch(
        self, built: Built, request: dict[str, Any], buffers: Sequence[Buffer], limit: float | None
    ) -> dict[str, Any]:
        """Run one launch; ``limit`` is checked between blocks."""
        loaded = _loaded.setdefault(built.library, _Loaded())
        if not request["trace"]:
            total = request["grid"][0] * request["grid"][1] * request["grid"][2]
            count = 1 if request["ordered"] else min(copies(), total)
            with loaded.lock:
                launch = Launch(loaded.get(built, count), request, [buffer.address for buffer in buffers])
                return _run(loaded, launch, limit, buffers)
        layout = arena.arrange(buffers, arena.WIDE)
        memory = mmap.mmap(-1, layout.size)
        base = arena.address_of(memory)
        arena.fill(layout, base)
        regions = [(r.name, i, r.size, r.writable) for i, r in enumerate(layout.regions)]
        request = {**request, "values": placed(request["values"], layout.places), "regions": regions}
        with loaded.lock:
            launch = Launch(loaded.get(built, 1), request, [base + offset for offset in layout.offsets])
            outcome = _run(loaded, launch, limit, memory)
        arena.take_back(layout, base)
        return outcome


def _run(loaded: _Loaded, launch: Launch, limit: float | None, memory: object) -> dict[str, Any]:
    """Run in a thread of its own, so that an interrupt reaches the caller between blocks."""
    outcome: dict[str, Any] = {}
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.update(launch.run())
        except BaseException as error:
            failure.append(error)
        finally:
            done.set()

    start = time.monotonic()
    # An interrupted Thread.join takes the thread for ended (Python 3.11), so an event tells.
    done = threading.Event()
    threading.Thread(target=work, daemon=True).start()
    overdue = False
    try:
        # Short waits: on Windows an interrupt is seen only between them.
        while not done.wait(0.1):
            overdue = limit is not None and time.monotonic() - start > limit
            if overdue:
                launch.stop()
    except BaseException:
        if not _ended(launch, done):
            loaded.running = (launch, done, memory)
        raise
    if failure:
        raise failure[0]
    if overdue and outcome["code"] == 3:
        outcome.update(code=1, error=f"time limit: the launch took more than {limit:g} s and was ended")
    return outcome


def _ended(launch: Launch, done: threading.Event) -> bool:
    """Ask a launch to end, again and again: one that is only starting would not notice the first time."""
    end = time.monotonic() + _PATIENCE
    while not done.is_set() and time.monotonic() < end:
        launch.stop()
        done.wait(0.05)
    return done.is_set()
