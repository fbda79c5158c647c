"""The commands that the doctor's fixes are made of, right for this system and this interpreter."""

from __future__ import annotations

import os
import shlex
import sys

WINDOWS = os.name == "nt"


def python_command(executable: str = "") -> str:
    """An interpreter as typed in a shell; a bare ``pip`` might belong to another Python."""
    path = executable or sys.executable
    if WINDOWS:
        return f'& "{path}"' if " " in path else path
    return shlex.quote(path)


def pip_install(what: str, executable: str = "") -> str:
    """``python -m pip install`` of packages at the course's versions, from the checkout's folder."""
    return f"{python_command(executable)} -m pip install -c constraints.txt {what}"


def set_up() -> str:
    """The line that makes the course's environment."""
    return r"py -3 labkit\bootstrap.py" if WINDOWS else "make course   (or: python3 labkit/bootstrap.py)"
