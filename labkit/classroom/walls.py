"""What the operating system keeps from a graded child: Linux's Landlock, where the kernel has it.

With it no program of the child, in whatever language, can write outside its own folder, connect by TCP, or
signal a process outside. Where it is missing (Windows, macOS, old kernels) only the guard in Python stands
(:mod:`labkit.classroom.guard`), and the report says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

# The kernel's names and numbers: include/uapi/linux/landlock.h; the same on every architecture.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 36, 38
_WRITE_FILE = 1 << 1
# remove a folder, remove a file, make a char device, folder, file, socket, fifo, block device, link
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_TCP = 0b11
_SIGNALS = 0b10


class _Rules(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def landlock_version() -> int:
    """The kernel's Landlock ABI; 0 where there is none."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        return max(0, ctypes.CDLL(None).syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG))
    except (OSError, AttributeError):
        return 0


def keep_orphans() -> None:
    """Become the parent of whatever descendants are left without one, on Linux.

    A program that an answer started and that left its group, its session and its environment behind is still
    below this process, where the grader finds it.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Be killed when the grader's thread that started this process ends, on Linux: an answer without an end
    would else run on after a grader that was killed."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def build(writable: Iterable[Path]) -> str:
    """Close this process in for good; children inherit it. Nothing here raises.

    Args:
        writable: folders and devices that may still be written.

    Returns:
        What stands now, such as ``"landlock: files, network, signals"``; empty when nothing does.
    """
    version = landlock_version()
    if version < 1:
        return ""
    files = _CHANGES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    rules = _Rules(files, _TCP if version >= 4 else 0, _SIGNALS if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    library = ctypes.CDLL(None)
    ruleset = library.syscall(_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return ""
    try:
        for path in writable:
            with contextlib.suppress(OSError):
                _allow(library, ruleset, path, files)
        if library.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or library.syscall(_RESTRICT, ruleset, 0):
            return ""
    finally:
        os.close(ruleset)
    words = ["files"] + ["network"] * (version >= 4) + ["signals"] * (version >= 6)
    return f"landlock: {', '.join(words)}"


def _allow(library: ctypes.CDLL, ruleset: int, path: Path, files: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        allowed = files if path.is_dir() else files & (_WRITE_FILE | _TRUNCATE)
        library.syscall(_ADD, ruleset, _PATH_BENEATH, ctypes.byref(_Beneath(allowed, descriptor)), 0)
    finally:
        os.close(descriptor)
