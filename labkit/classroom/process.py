"""One child process of the grader: started, listened to, watched, and surely ended with all it started."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

START_SECONDS = 180.0
_SCRIPT = Path(__file__).with_name("child.py")
_LINE = 1 << 16
_MOST_PROCESSES = 64
_LOOK_SECONDS = 0.2
_ROUNDS = 20
_MARK = "LABKIT_GRADE"
# What a program needs of the machine; nothing that is the teacher's own.
_KEPT: tuple[str, ...] = (
    "PATH",
    "SYSTEMROOT",
    "SYSTEMDRIVE",
    "WINDIR",
    "COMSPEC",
    "PATHEXT",
    "LD_LIBRARY_PATH",
    "LANG",
)
_KEPT += ("NUMBER_OF_PROCESSORS", "PROCESSOR_ARCHITECTURE", "LABKIT_CXX", "VIRTUAL_ENV", "CONDA_PREFIX")


@dataclass
class Ended:
    """How a child ended.

    Attributes:
        records: the signed lines that came, in order.
        whole: it said itself that it was done.
        exercise: the exercise that was being judged when it ended, or empty.
        state: what that exercise gets; ``why``: in words.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    whole: bool = False
    exercise: str = ""
    state: str = "crashed"
    why: str = ""


class Child:
    """A child for one notebook; use :meth:`run` once."""

    def __init__(self, own: Path, payload: Mapping[str, Any]) -> None:
        self._key = secrets.token_bytes(32)
        self._token = secrets.token_hex(16)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._seen: set[psutil.Process] = set()  # below the judge, at any time
        home = own / f"home-{self._token[:6]}"
        for folder in (home, home / "tmp"):
            folder.mkdir()
        # -I: no PYTHON* variables, no user site, not the working folder; -B: no byte code into the course
        command = [sys.executable, "-I", "-B", "-X", "utf8", str(_SCRIPT)]
        options: dict[str, Any] = {"start_new_session": True} if os.name == "posix" else {}
        with (own / f"errors-{self._token[:6]}").open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=home,
                env=self._environment(home),
                **options,
            )
        self._errors = Path(errors.name)
        request = json.dumps({**payload, "key": self._key.hex()}).encode() + b"\n"
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(request)
            self._process.stdin.close()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _environment(self, home: Path) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name.upper() in _KEPT}
        temporary = str(home / "tmp")
        env |= {"HOME": str(home), "USERPROFILE": str(home), "APPDATA": str(home), "LOCALAPPDATA": str(home)}
        env |= {"TMPDIR": temporary, "TEMP": temporary, "TMP": temporary, "IPYTHONDIR": str(home / "ipython")}
        env |= {"LABKIT_STATE": str(home / "state"), "LABKIT_RESULTS": str(home / "results")}
        env |= {"MPLCONFIGDIR": str(home / "mpl"), "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1"}
        return env | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", _MARK: self._token}

    def _read(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := stream.readline(_LINE):
                self._lines.put(line)
                if len(line) >= _LINE:
                    break
        self._lines.put(None)

    def run(self, timeout: float, memory: int, stop: threading.Event) -> Ended:
        """Listen until it is done, breaks a limit, or dies; then end it and everything it started.

        Args:
            timeout: seconds for each exercise.
            memory: bytes that the process and its children may add while an answer runs.
            stop: set by an interrupt.
        """
        ended = Ended()
        try:
            self._listen(ended, timeout, memory, stop)
        finally:
            self._end()
        return ended

    def _listen(self, ended: Ended, timeout: float, memory: int, stop: threading.Event) -> None:
        deadline, base, look = time.monotonic() + START_SECONDS, 0, 0.0
        while True:
            now = time.monotonic()
            if stop.is_set():
                ended.why = "interrupted"
                return
            if now > deadline:
                ended.state = "time limit"
                ended.why = f"longer than {timeout:g} s" if ended.exercise else "it did not start in time"
                return
            if now >= look:
                used, count = self._used()
                look = now + _LOOK_SECONDS
                if ended.exercise and used - base > memory:
                    ended.state, ended.why = "memory limit", f"more than {memory >> 20} MiB"
                    return
                if count > _MOST_PROCESSES:
                    ended.state, ended.why = "crashed", f"more than {_MOST_PROCESSES} processes"
                    return
            try:
                line = self._lines.get(timeout=max(0.01, min(_LOOK_SECONDS, deadline - now)))
            except queue.Empty:
                continue
            if line is None:
                ended.why = self._last_words()
                return
            record = self._signed(line, len(ended.records) + 1)
            if record is None:
                ended.state, ended.why = "tampered", "a line that the judge did not sign"
                return
            ended.records.append(record)
            kind = record["event"]
            if kind == "begin":
                ended.exercise, deadline = str(record["exercise"]), time.monotonic() + timeout
                base = base or self._used()[0]
            elif kind == "verdict":
                ended.exercise, deadline = "", time.monotonic() + START_SECONDS
            elif kind == "end":
                ended.whole = True
                return

    def _signed(self, line: bytes, number: int) -> dict[str, Any] | None:
        mark, _, text = line.rstrip(b"\n").partition(b" ")
        wanted = hmac.new(self._key, text, hashlib.sha256).hexdigest().encode()
        if not hmac.compare_digest(mark, wanted):
            return None
        record = json.loads(text)
        return record if record.get("n") == number else None

    def _used(self) -> tuple[int, int]:
        """(bytes in use by it and its children, how many processes)."""
        used = count = 0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            below = process.children(recursive=True)
            self._seen.update(below)
            for one in [process, *below]:
                with contextlib.suppress(psutil.Error):
                    used += one.memory_info().rss
                    count += 1
        return used, count

    def _last_words(self) -> str:
        """Why it ended by itself: its exit code, and what it said before answers ran."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
        words = ""
        with contextlib.suppress(OSError), self._errors.open("rb") as file:
            file.seek(max(0, self._errors.stat().st_size - 300))
            words = " ".join(file.read(300).decode("utf-8", "replace").split())
        return f"its process ended (exit code {code}) {words}".rstrip()

    @staticmethod
    def _killed(found: list[psutil.Process]) -> int:
        """Kill them: stopped first, so that none starts another meanwhile. How many were alive."""
        alive = 0
        for act in ("suspend", "kill"):
            for one in found:
                with contextlib.suppress(psutil.Error):
                    if one.status() != psutil.STATUS_ZOMBIE:
                        alive += act == "kill"
                        getattr(one, act)()
        return alive

    def _end(self) -> None:
        """Kill the tree, its session, and whatever carries our mark; then wait."""
        with contextlib.suppress(psutil.Error):
            judge = psutil.Process(self._process.pid)
            judge.suspend()  # alive, it stays the parent of every orphan: none is out of sight
            for _ in range(_ROUNDS):
                if not self._killed(judge.children(recursive=True)):
                    break
        self._killed([one for one in self._seen if one.is_running()])
        with contextlib.suppress(OSError):
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._process.kill()
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if one.environ().get(_MARK) == self._token:
                    one.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
