"""Does a release still fit the course? What was changed since, in the course and in the release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.classroom.release import digest, facts, read_manifest
from labkit.course.index import all_chapters
from labkit.errors import InputError


def problems(out: Path, *, folder: Path | None = None) -> list[str]:
    """One line for each difference; [] while the release can be used.

    Args:
        out: a folder written by ``labkit release``.
        folder: where the course's notebooks are (tests).

    Raises:
        InputError: no release there.
    """
    manifest = read_manifest(out)
    found = []
    chapters = {chapter.number: chapter for chapter in all_chapters()}
    for then in manifest["chapters"]:
        number = str(then.get("number"))
        if number not in chapters or chapters[number].notebook(folder) is None:
            found.append(f"chapter {number} is not in the course any more")
            continue
        try:
            now = facts(chapters[number], folder)
        except InputError as error:
            found.append(f"chapter {number}: {error}")
            continue
        found += [f"chapter {number}: {line}" for line in _chapter(then, now)]
    for name, wanted in manifest["files"].items():
        found += _file(out, str(name), str(wanted))
    return found


def _chapter(then: dict[str, Any], now: Any) -> list[str]:
    lines = []
    if then["file"] != now.file:
        lines.append(f"its file was {then['file']}, and is {now.file}")
    before = {one["name"]: one for one in then["exercises"]}
    after = {one.name: one for one in now.exercises}
    for name, one in before.items():
        if name not in after:
            lines.append(f"exercise {one['id']} {name} is gone")
            continue
        new = after[name]
        if one["id"] != new.id:
            lines.append(f"exercise {name} was {one['id']}, and is {new.id}")
        if one["stub"] != new.stub:
            lines.append(f"the stub of {new.id} {name} was changed")
        if one["solution"] != new.solution:
            lines.append(f"the solution of {new.id} {name} was changed: the teacher's notebook is old")
    lines += [f"exercise {after[name].id} {name} is new" for name in after if name not in before]
    if then["text"] != now.text and not lines:
        lines.append("its text was changed")
    return lines


def _file(out: Path, name: str, wanted: str) -> list[str]:
    path = out / name
    if out.resolve() not in path.resolve().parents:
        return [f"{name}: not in the release's folder"]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return [f"{name} is missing or cannot be read"]
    return [] if digest(text) == wanted else [f"{name} was changed after the release"]
