"""The parent's side of isolated launches: one worker process, kept between launches, replaced when lost.

Nothing outlives this process: the worker ends when its input ends, and the shared file has no name
(POSIX) or is deleted when the worker is closed (Windows).

This guards against mistakes, not against malice: a kernel is a program with its author's rights. It may
open files, start processes, or send a signal to this one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from labkit.emulator import arena, messages
from labkit.emulator.arguments import Buffer
from labkit.emulator.build import Built, copies
from labkit.emulator.launcher import WorkerLost, placed
from labkit.errors import refuse

MEMORY = 3 << 30
"""Bytes of address space that a worker may use beside the launch's own buffers."""

_SCRIPT = Path(__file__).resolve().parent / "worker.py"
_START_SECONDS = 60.0
_GRACE = 0.5  # seconds between asking a launch to end and ending its process
_LATE = 1.5  # seconds after the limit in which the runtime's own ending is expected
_MOST_LIBRARIES = 48  # loaded into one worker; each keeps some memory
_KEPT_BYTES = 64 << 20  # of shared memory kept between launches
# After these the worker's memory cannot be trusted.
_POISONED = ("illegal memory access", "stack overflow", "time limit")
_SIGNALS = {
    "SIGSEGV": ("crash", "it accessed memory that is not its own"),
    "SIGBUS": ("crash", "it accessed memory that is not its own"),
    "SIGABRT": ("crash", "it called abort(), or destroyed memory that is not its own"),
    "SIGFPE": ("crash", "an integer was divided by zero"),
    "SIGILL": ("crash", "it ran into an instruction that does not exist: a function without a return?"),
    "SIGXFSZ": ("crash", "it wrote without end"),
    "SIGKILL": ("crash", "the system ended it, perhaps for want of memory"),
}


class _Shared:
    """The file that holds a launch's buffers, mapped here and in the worker."""

    def __init__(self) -> None:
        self.path = ""
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("labkit-emulator")
        elif os.name == "posix":
            self.descriptor, path = tempfile.mkstemp(prefix="labkit-emulator-")
            os.unlink(path)
        else:
            self.descriptor, self.path = tempfile.mkstemp(prefix="labkit-emulator-")
        self._size = 0

    def map(self, size: int) -> mmap.mmap:
        """The first ``size`` bytes."""
        if size > self._size:
            os.ftruncate(self.descriptor, size)
            self._size = size
        return mmap.mmap(self.descriptor, size)

    def shrink(self) -> None:
        """Give memory back after a big launch."""
        if self._size > _KEPT_BYTES:
            with contextlib.suppress(OSError):  # Windows: still mapped
                os.ftruncate(self.descriptor, 0)
                self._size = 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


class _Worker:
    """A running worker process."""

    def __init__(self) -> None:
        self.shared = _Shared()
        self.libraries: set[str] = set()
        self.launches = 0
        self._errors: BinaryIO = tempfile.TemporaryFile(prefix="labkit-emulator-")  # noqa: SIM115
        where = self.shared.path or str(self.shared.descriptor)
        # -I -S: nothing of the user's environment, and a start of a few milliseconds.
        command = [sys.executable, "-I", "-S", str(_SCRIPT), where, str(MEMORY)]
        options: dict[str, Any] = {}
        if os.name == "posix":
            # Its own session: the terminal's interrupt is for the parent, which ends the worker.
            options = {
                "start_new_session": True,
                "pass_fds": () if self.shared.path else (self.shared.descriptor,),
            }
        else:
            options = {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, **options
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, request: dict[str, Any]) -> None:
        body = json.dumps(request).encode()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone; the wait for the answer will say so
            self.process.stdin.write(struct.pack("<I", len(body)) + body)
            self.process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next answer; None when the worker is gone.

        Raises:
            TimeoutError: none within ``seconds``.
        """
        end = time.monotonic() + seconds
        while True:
            # Short waits: on Windows an interrupt is seen only between them.
            left = end - time.monotonic()
            try:
                return self._answers.get(timeout=max(0.0, min(left, 0.2)))
            except queue.Empty:
                if left <= 0:
                    raise TimeoutError from None

    def _read(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        try:
            while len(head := stream.read(4)) == 4:
                (size,) = struct.unpack("<I", head)
                body = stream.read(size)
                if len(body) < size:
                    break
                answer = json.loads(body)
                self._answers.put(answer if isinstance(answer, dict) else None)
        except (OSError, ValueError):
            pass  # the kernel wrote over the worker's memory
        self._answers.put(None)

    def last_words(self) -> str:
        """The end of what it wrote to its error stream."""
        with contextlib.suppress(OSError, ValueError):
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - 2000))
            return self._errors.read(2000).decode("utf-8", "replace").strip()
        return ""

    def close(self, patience: float = 0.0) -> int | None:
        """End it; its exit code."""
        process = self.process
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        if process.poll() is None:
            with contextlib.suppress(OSError):
                if os.name == "posix":
                    os.killpg(process.pid, signal.SIGKILL)  # it leads a session: its children go, too
                else:
                    process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        assert process.stdout is not None
        # The reader thread sees the end of the stream by itself; closing under it would block.
        self._errors.close()
        self.shared.close()
        return process.returncode


class Isolated:
    """Runs launches in the worker; threads of this process take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._owner = os.getpid()
        self._signatures: dict[tuple[Path, str], list[dict[str, Any]]] = {}

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if one is running."""
        return self._worker.process.pid if self._worker and self._worker.alive else None

    def signature(self, built: Built, entry: str) -> list[dict[str, Any]]:
        """Kinds and sizes of a kernel's parameters."""
        key = (built.library, entry)
        if key not in self._signatures:
            request = {"do": "signature", "paths": [str(built.library)], "info": built.info, "entry": entry}
            with self._lock, self._ended_on_interrupt():
                answer = self._ask(self._ready(request["paths"]), request, _START_SECONDS)
            self._signatures[key] = answer["signature"]
        return self._signatures[key]

    def launch(
        self, built: Built, request: dict[str, Any], buffers: Sequence[Buffer], limit: float | None
    ) -> dict[str, Any]:
        """Run one launch on copies of the buffers and copy back what the kernel may write.

        Raises:
            WorkerLost: the process ended, or took longer than ``limit``.
        """
        layout = arena.arrange(buffers, arena.WIDE if request["trace"] else arena.PAGE)
        total = request["grid"][0] * request["grid"][1] * request["grid"][2]
        count = 1 if request["trace"] or request["ordered"] else min(copies(), total)
        message = {
            **request,
            "do": "launch",
            "paths": [str(built.copy(i)) for i in range(count)],
            "info": built.info,
            "values": placed(request["values"], layout.places),
            "regions": [(r.name, i, r.size, r.writable) for i, r in enumerate(layout.regions)],
            "offsets": layout.offsets,
            "gaps": [] if request["trace"] else layout.gaps,
            "size": layout.size,
            "limit": limit or 0.0,
        }
        with self._lock, self._ended_on_interrupt():
            used = self._worker is not None and self._worker.launches > 0
            try:
                return self._launch(message, layout, limit)
            except WorkerLost as lost:
                # An earlier launch may have spoilt the worker's memory unseen: ask a fresh one.
                if lost.kind == "time limit" or not used:
                    raise
                return self._launch(message, layout, limit)

    def _launch(self, message: dict[str, Any], layout: arena.Layout, limit: float | None) -> dict[str, Any]:
        worker = self._ready(message["paths"])
        try:
            memory = worker.shared.map(layout.size)
        except OSError as error:
            refuse("args", f"{layout.size} bytes: {error}", "buffers that fit into memory twice")
        base = arena.address_of(memory)
        arena.fill(layout, base)
        outcome = self._ask(worker, message, limit)
        arena.take_back(layout, base)
        if not outcome["code"] and not message["trace"] and (beside := arena.overrun(layout, base)):
            region, offset = beside
            fault = messages.beside(region.name, offset, region.size, region.itemsize)
            outcome.update(code=1, fault=fault)
            self._drop()
            return outcome
        if outcome["code"]:
            self._explain(outcome, layout)
            if outcome["abandoned"] or outcome["error"].startswith(_POISONED):
                self._drop()
        if self._worker is not None:
            self._worker.launches += 1
            self._worker.shared.shrink()
        return outcome

    def _explain(self, outcome: dict[str, Any], layout: arena.Layout) -> None:
        """Name the buffer that an illegal address is nearest to."""
        address = messages.illegal_address(outcome["error"])
        if address is not None:
            outcome["place"] = arena.nearest(layout, address - outcome["arena"], address)

    # ------------------------------------------------------------------------------------ the process

    def _ready(self, paths: Iterable[str]) -> _Worker:
        if self._owner != os.getpid():  # after a fork: the worker is the other process's
            self._worker, self._owner = None, os.getpid()
        if self._worker is not None:
            full = len(self._worker.libraries | set(paths)) > _MOST_LIBRARIES
            if full or not self._worker.alive:
                self._drop()
        if self._worker is None:
            self._worker = _Worker()
        self._worker.libraries.update(paths)
        return self._worker

    def _ask(self, worker: _Worker, request: dict[str, Any], limit: float | None) -> dict[str, Any]:
        """The worker's answer. Always of the worker whose shared file holds the buffers: one that has died
        since then must not be replaced by another, which would find its own file empty."""
        start = time.monotonic()
        worker.send(request)
        try:
            # The runtime ends a launch at its limit and knows the line; this is for when it cannot.
            answer = worker.receive(limit + _LATE if limit is not None else 1e9)
        except TimeoutError:
            answer = self._overdue(worker, limit or 0.0, start)
        if answer is None:
            raise self._lost(worker, time.monotonic() - start)
        if "failed" in answer:
            self._drop()
            raise WorkerLost("crash", f"crash: the kernel cannot be launched: {answer['failed']}", 0.0)
        return answer

    def _overdue(self, worker: _Worker, limit: float, start: float) -> dict[str, Any]:
        """Ask the launch to end; then end it."""
        worker.send({"do": "stop"})
        try:
            answer = worker.receive(_GRACE)
        except TimeoutError:
            answer = None
        text = f"time limit: the launch took more than {limit:g} s and was ended"
        if answer is None:
            self._drop()
            raise WorkerLost("time limit", f"{text}. {messages.TIME_LIMIT}", time.monotonic() - start)
        if answer["code"] == 3:
            answer.update(code=1, error=text)
        return answer

    def _lost(self, worker: _Worker, seconds: float) -> WorkerLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(1.0)  # a kernel may have closed the pipe and live on
        code = worker.process.poll()
        words = worker.last_words().splitlines()
        self._drop()
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            kind, reason = _SIGNALS.get(name, ("crash", f"it was ended by {name}"))
        elif code is not None and code >= 0xC0000000:
            kind, reason = "crash", f"Windows ended it with status {code:#x}"
        else:
            kind, reason = "exit", f"it called exit({code})" if code is not None else "it stopped answering"
        text = f"{kind}: the kernel ended its process: {reason}"
        if words and kind == "crash":
            text += f" ({words[-1][:200]})"
        return WorkerLost(kind, text + ". trace() checks every access and names the line.", seconds)

    def _drop(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()

    @contextlib.contextmanager
    def _ended_on_interrupt(self) -> Any:
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self._drop()
            raise

    def close(self) -> None:
        """End the worker; the next launch starts another."""
        if self._owner == os.getpid() and self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close(patience=1.0)


_isolated: Isolated | None = None
_creating = threading.Lock()


def isolated() -> Isolated:
    """The launcher of this process; its worker starts with the first launch."""
    global _isolated
    with _creating:
        if _isolated is None:
            _isolated = Isolated()
            atexit.register(_isolated.close)
        return _isolated
