"""The entry for the machine's scheduler: a cron line, systemd units, or a schtasks command.

Paths are absolute and of this machine, at the moment of printing; nothing is installed.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import refuse, require
from labkit.rerun.every import Every, calendars, schtasks

KINDS = ("cron", "systemd", "schtasks")
_SCHTASKS_LIMIT = 261


@dataclass(frozen=True)
class Task:
    """What shall run, and when.

    Attributes:
        name: of the suite. every: when.
        command: absolute program, then arguments. folder: absolute, where it runs.
        log: absolute file that cron's command writes to.
    """

    name: str
    every: Every
    command: tuple[str, ...]
    folder: str
    log: str


def task(name: str, suite: Path, out: Path, every: Every, *, dask: str | None, device: str | None) -> Task:
    """The task that reruns a suite with this interpreter."""
    # not resolved: a virtual environment's python is a link, and is the environment by its place
    python = os.path.abspath(sys.executable)
    command = [python, "-m", "labkit.cli", "rerun", os.path.abspath(suite), "--out", os.path.abspath(out)]
    command += ["--device", device] if device else []
    command += ["--dask", dask] if dask else []
    for text in (*command, os.getcwd()):
        bad = any(ord(char) < 32 or ord(char) == 127 for char in text)
        require(not bad, "path", repr(text), "no line break or control character in it")
    return Task(name, every, tuple(command), os.getcwd(), os.path.abspath(out / "rerun.log"))


def entry(kind: str, one: Task) -> str:
    """The text to print.

    Raises:
        InputError: a rhythm or a path that this scheduler cannot take.
    """
    require(kind in KINDS, "--print", repr(kind), "one of " + ", ".join(KINDS))
    return {"cron": cron, "systemd": systemd, "schtasks": schtasks_line}[kind](one)


def printable(text: str, encoding: str | None) -> None:
    """Refuse a console that would print ? for a letter of a path: the entry would name another file."""
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError as error:
        bad = repr(text[error.start : error.end])
        refuse("path", f"{bad}, which a {encoding} console cannot show", "a path that it can", "PYTHONUTF8=1")


def cron(one: Task) -> str:
    """One line for ``crontab -e``: quoted for /bin/sh, and % as cron wants it."""
    folder = shlex.quote(os.path.dirname(one.log))
    command = f"cd {shlex.quote(one.folder)} && mkdir -p {folder} && {shlex.join(one.command)}"
    command += f" >> {shlex.quote(one.log)} 2>&1"
    # cron itself reads an unescaped % as a line break, inside quotes as well
    return f"{one.every.cron} {command.replace('%', chr(92) + '%')}"


def systemd(one: Task) -> str:
    """A service and a timer, each after a comment with the file that it belongs into."""
    name = f"labkit-{re.sub(r'[^A-Za-z0-9-]+', '-', one.name).strip('-').lower() or 'suite'}"
    folder = one.folder.replace("%", "%%")
    service = [
        f"# ~/.config/systemd/user/{name}.service",
        "[Unit]",
        f"Description=labkit rerun {one.name}",
        "",
        "[Service]",
        "Type=oneshot",
        f"WorkingDirectory={folder}",
        "Environment=PYTHONUTF8=1",
        "ExecStart=" + " ".join(_systemd_word(word, i > 0) for i, word in enumerate(one.command)),
    ]
    timer = [
        f"# ~/.config/systemd/user/{name}.timer",
        "[Unit]",
        f"Description=labkit rerun {one.name}, by the clock",
        "",
        "[Timer]",
        *[f"OnCalendar={calendar}" for calendar in calendars(one.every)],
        "Persistent=true",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    start = f"# then: systemctl --user daemon-reload && systemctl --user enable --now {name}.timer"
    return "\n".join([*service, "", *timer, "", start])


def _systemd_word(word: str, argument: bool) -> str:
    """Quoted as systemd.service(5) says: backslashes and quotes escaped, % doubled, in arguments $ too."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    escaped = escaped.replace("$", "$$") if argument else escaped
    return f'"{escaped}"'


def schtasks_line(one: Task) -> str:
    """A command for cmd.exe (not PowerShell, which reads the inner quotes differently)."""
    for word in one.command:
        odd = '"' in word or "%" in word
        require(not odd, "path", repr(word), 'a path without " and %, which cmd.exe cannot quote')
    inner = " ".join(f'\\"{word}\\"' if re.search(r"[^\w.:\\/-]", word) else word for word in one.command)
    written = inner.replace('\\"', '"')
    if len(written) > _SCHTASKS_LIMIT:
        refuse(
            "--print schtasks",
            f"a command of {len(written)} characters",
            f"at most {_SCHTASKS_LIMIT}, as schtasks takes",
            "shorter paths, or a .cmd file with the command that --print cron shows",
        )
    name = re.sub(r'[\\/:*?"<>|%]+', "-", one.name)
    return f'schtasks /Create /F /TN "labkit rerun {name}" {" ".join(schtasks(one.every))} /TR "{inner}"'
