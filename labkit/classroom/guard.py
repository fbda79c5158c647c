"""What a graded answer may not do to the process that judges it.

An answer runs in the judge's process, because checks call it with Python objects. Two things keep it
honest: an audit hook refuses what no answer needs (other people's files, processes, the network, the
judge's frames), and after each answer the judge's code is compared with what it was. This stops mistakes
and the usual tricks. It is no proof against an expert: Python cannot be one. What the operating system
can enforce is in :mod:`labkit.classroom.walls`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

STUDENT = "<student "
"""How the file names of a student's code begin."""

# Refused while an answer may run, whoever asks.
_NEVER: tuple[str, ...] = ("os.kill", "os.fork", "os.posix_spawn", "os.exec", "os.spawn", "os.system")
_NEVER += ("os.startfile", "socket.", "sys.addaudithook", "sys._current_frames", "pty.spawn", "resource.")
_NEVER += ("signal.pthread_kill", "webbrowser.open", "ftplib.", "smtplib.", "urllib.Request")
# Refused when the student's code is on the stack: labkit and the libraries do these for good reasons.
_FROM_STUDENT: tuple[str, ...] = ("subprocess.Popen", "ctypes.", "gc.", "sys.settrace", "sys.setprofile")
_FROM_STUDENT += ("cpython.", "winreg.", "_winapi.CreateProcess", "sys.monitoring")
# Refused when the student's own line asks.
_DIRECT = ("sys._getframe", "sys._getframemodulename")
_READ_FRAMES = ("tb_frame", "f_code", "gi_code", "cr_code", "ag_code")
_CHANGE_FILES: tuple[str, ...] = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.mkdir",
)
_CHANGE_FILES += ("os.link", "os.symlink", "os.utime", "os.setxattr", "os.removexattr", "shutil.rmtree")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOST = 20


class Refused(PermissionError):
    """An answer tried what no answer needs."""


_SYSTEM: tuple[str, ...] = (
    "/usr",
    "/lib",
    "/lib64",
    "/opt",
    "/sys",
    "/dev",
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
)
_SYSTEM += ("/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd", "/etc/mime.types")


class Guard:
    """Switched on with :meth:`watching`; :attr:`tried` lists what was refused."""

    def __init__(
        self, own: Path, secret_folders: tuple[Path, ...] = (), readable: tuple[Path, ...] = ()
    ) -> None:
        """What an answer may do with files.

        Args:
            own: may be read and written.
            secret_folders: may not be read, wherever they are.
            readable: the course's own; beside these only Python, its packages and the system can be read:
                what others handed in, the teacher's folders and the tests of the course hold answers.
        """
        self.tried: list[str] = []
        self._own = os.path.realpath(own)
        self._secret = tuple(os.path.realpath(folder) + os.sep for folder in secret_folders)
        places = [sys.prefix, sys.base_prefix, *readable, *_SYSTEM, os.environ.get("SYSTEMROOT", "")]
        self._readable = tuple({form for one in places if str(one) for form in _forms(one)})
        self._on = False
        self._inside = threading.local()
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Refuse while the block runs."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on or getattr(self._inside, "yes", False):
            return
        self._inside.yes = True
        try:
            why = self._why(event, args)
        finally:
            self._inside.yes = False
        if why:
            if len(self.tried) < _MOST:
                self.tried.append(why)
            raise Refused(f"an answer may not do this: {why}")

    def _why(self, event: str, args: tuple[Any, ...]) -> str:
        """What is refused, in words; empty when it may go on."""
        if event.startswith(_NEVER):
            return event
        if event == "open":
            return self._opened(args)
        if event in _CHANGE_FILES:
            # a link may point anywhere: what is written through it is looked at when it is written
            paths = args[:2] if event in ("os.rename", "os.link") else args[event == "os.symlink" :][:1]
            # the last argument of most is a folder's descriptor; where it cannot be named, it is refused
            at = args[-1] if event not in ("os.truncate", "os.setxattr", "os.removexattr") else -1
            outside = [path for path in paths if not self._is_own(path, at)]
            return f"{event} outside its folder" if outside else ""
        if event.startswith(_FROM_STUDENT):
            return event if _student_calls() else ""
        if event == "import" and str(args[0]).startswith("labkit.solutions"):
            return "import labkit.solutions" if _student_calls() else ""
        direct = event in _DIRECT or (event == "object.__getattr__" and args[1] in _READ_FRAMES)
        return f"a look at {args[1] if len(args) > 1 else 'the frames'}" if direct and _student_asks() else ""

    def _opened(self, args: tuple[Any, ...]) -> str:
        path, mode, flags = (*args, None, None, None)[:3]
        if isinstance(path, int):
            return ""
        writes = bool(isinstance(mode, str) and set(mode) & set("wax+"))
        writes = writes or bool(isinstance(flags, int) and flags & _WRITING)
        if writes and not self._is_own(path):
            return "a file written outside its folder"
        with contextlib.suppress(TypeError, ValueError, OSError):
            real = os.path.realpath(os.fsdecode(path))
            if self._hidden(real) and _student_calls():
                return f"a look into {Path(real).parent.name}/{Path(real).name}"
        return ""

    def _hidden(self, real: str) -> bool:
        """May an answer not read this?"""
        mine = f"{os.sep}proc{os.sep}{os.getpid()}"
        if real.startswith((*self._secret, f"{mine}/mem", f"{mine}/fd", f"{mine}/environ")):
            return True
        known = (self._own, mine, *self._readable)
        return not any(real == one or real.startswith(one.rstrip(os.sep) + os.sep) for one in known)

    def _is_own(self, path: Any, folder: Any = -1) -> bool:
        if path is None or isinstance(path, int):
            return isinstance(path, int) and path >= 0
        with contextlib.suppress(TypeError, ValueError, OSError):
            text = os.fsdecode(path)
            if isinstance(folder, int) and folder >= 0:
                text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
            real = os.path.realpath(text)
            return real == os.devnull or real == self._own or real.startswith(self._own + os.sep)
        return False


def _forms(path: Any) -> tuple[str, str]:
    """A path as it is written, and where it leads: a link may stand for either."""
    return os.path.abspath(path), os.path.realpath(path)


def _student_calls() -> bool:
    """Is there code of the student on this thread's stack?"""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(STUDENT):
            return True
        frame = frame.f_back
    return False


def _student_asks() -> bool:
    """Is the line that asks the student's own, or one of `inspect` and `traceback` for it?"""
    frame: Any = sys._getframe(1)
    here = __file__
    while frame is not None and frame.f_code.co_filename == here:
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__") in ("inspect", "traceback"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(STUDENT)


# --- is the judge still the judge? ---------------------------------------------------------------------

_LIBRARIES = ("builtins", "math", "operator", "statistics", "itertools", "random", "numpy", "torch")


class Judge:
    """A picture of the judge's code, to be compared later."""

    def __init__(self) -> None:
        self._root = str(Path(__file__).resolve().parents[1]) + os.sep
        self._before = dict(self._picture())

    def changed(self) -> str:
        """The first name that is not what it was, such as ``labkit.check.ch00.headline``; else empty."""
        now = dict(self._picture())
        for name, was in self._before.items():
            if now.get(name) != was:
                return name
        return next((name for name in now if name not in self._before and self._foreign(name)), "")

    def _picture(self) -> Iterator[tuple[str, Any]]:
        for name, module in list(sys.modules.items()):
            if not isinstance(module, ModuleType):
                continue
            if name in _LIBRARIES or name == "labkit" or name.startswith("labkit."):
                values = name.startswith("labkit.check.ch")
                for key, value in list(vars(module).items()):
                    yield from _seen(f"{name}.{key}", value, values and not key.startswith("__"))
        tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        if tensor is not None:
            for key, value in list(vars(tensor).items()):
                yield f"torch.Tensor.{key}", id(value)

    def _foreign(self, dotted: str) -> bool:
        """A function of labkit that came later, and was not written there."""
        if not dotted.startswith("labkit."):
            return False
        module, _, key = dotted.rpartition(".")
        value = vars(sys.modules[module]).get(key) if module in sys.modules else None
        return isinstance(value, FunctionType) and value.__code__.co_filename.startswith(STUDENT)


def _seen(name: str, value: Any, values: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        yield name, (id(value), value.__code__, value.__defaults__, repr(value.__kwdefaults__))
    elif isinstance(value, type):
        yield name, id(value)
        if value.__module__.startswith("labkit"):
            for key, member in list(vars(value).items()):
                code = getattr(member, "__code__", None)
                if key not in ("__annotations__", "__doc__"):
                    yield f"{name}.{key}", (id(member), code)
    elif callable(value):
        yield name, id(value)
    elif values and isinstance(value, (dict, list, set, tuple, str, int, float)):
        yield name, repr(value)


# --- what an answer gives back --------------------------------------------------------------------------

_PLAIN = ("builtins", "numpy", "torch", "labkit", "collections", "fractions", "decimal", "itertools", "types")
_TRICKS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__hash__", "__class__")
_ITEMS, _DEPTH = 2000, 6


def trick(value: Any, depth: int = _DEPTH) -> str:
    """The name of a type in ``value`` that decides by itself what it equals; empty for honest values."""
    kind = type(value)
    module = str(kind.__module__).split(".")[0]
    if module not in _PLAIN:
        here = [part for part in kind.__mro__ if str(part.__module__).split(".")[0] not in _PLAIN]
        if module == "unittest" or any(name in vars(part) for part in here for name in _TRICKS):
            return f"{kind.__module__}.{kind.__qualname__}"
    if depth and kind in (list, tuple, set, frozenset, dict):
        items = list(value.items()) if kind is dict else list(value)
        for item in items[:_ITEMS]:
            if found := trick(item, depth - 1):
                return found
    return ""
