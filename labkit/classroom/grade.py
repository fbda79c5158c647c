"""Grade many notebooks without nbgrader: each in its own child process, folder, time and memory.

The child takes the student's answers out of the notebook and judges them by the course's checks
(:mod:`labkit.classroom.child`). When an answer hangs, eats the memory or kills its process, the parent
ends the child, notes it, and starts another for the exercises that are left.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.classroom.process import Child, Ended
from labkit.classroom.scores import BROKEN, GRADED, OTHER, UNREADABLE, Gradebook, Graded, Mark, printable
from labkit.classroom.submission import MOST_BYTES, Unreadable, claims, load
from labkit.course.anatomy import exercise_names
from labkit.course.index import choose
from labkit.course.notebook import read
from labkit.errors import refuse, require
from labkit.scratch import Scratch

TIMEOUT, MEMORY = 60.0, 2048
_IGNORED = {".ipynb_checkpoints", ".git", "__pycache__", ".venv"}


@dataclass(frozen=True)
class Request:
    """A checked request; nothing has run.

    Attributes:
        folder: where the notebooks are; ``files``: those found, sorted.
        names: chapter -> names of its exercises, of all chapters that are there.
        ids: exercise name -> id.
        chapters: the ones to grade.
        timeout: seconds an exercise may take; ``memory``: bytes an answer may add.
        jobs: notebooks at once.
    """

    folder: Path
    files: tuple[Path, ...]
    names: dict[str, list[str]]
    ids: dict[str, str]
    courses: dict[str, str]
    chapters: tuple[str, ...]
    timeout: float
    memory: int
    jobs: int


def prepare(
    folder: Path,
    *,
    chapters: str | None = None,
    timeout: float = TIMEOUT,
    memory: int = MEMORY,
    jobs: int = 0,
    course: Path | None = None,
) -> Request:
    """Check everything that can be checked before a child starts.

    Args:
        folder: notebooks handed in, at any depth; the first folder, or else the file, names the student.
        chapters: as for ``labkit course``; None for all.
        timeout: seconds for each exercise.
        memory: MiB that an answer may use on top of the libraries.
        jobs: notebooks at once; 0 for half of the processors.
        course: folder of the course's notebooks (tests).

    Raises:
        InputError: no such folder, no notebook in it, a bad number, an unknown chapter.
    """
    require(folder.is_dir(), "FOLDER", str(folder), "a folder with notebooks that were handed in")
    good = isinstance(timeout, (int, float)) and math.isfinite(timeout) and timeout > 0
    require(good, "--timeout", repr(timeout), "a number of seconds above 0")
    require(256 <= memory <= 1 << 20, "--memory", memory, "256 to 1048576 (MiB)")
    require(0 <= jobs <= 256, "--jobs", jobs, "1 to 256, or 0 for half of the processors")
    files = tuple(sorted(_notebooks(folder)))
    if not files:
        refuse("FOLDER", f"no .ipynb in {folder}", "notebooks that were handed in, at any depth")
    chosen = choose(chapters, course)
    names: dict[str, list[str]] = {}
    ids: dict[str, str] = {}
    courses: dict[str, str] = {}
    for chapter in choose(None, course):
        path = chapter.notebook(course)
        assert path is not None
        names[chapter.number] = exercise_names(read(path))
        ids |= _ids(chapter.number)
        courses[chapter.number] = str(path)
    return Request(
        folder,
        files,
        names,
        ids,
        courses,
        tuple(chapter.number for chapter in chosen),
        float(timeout),
        memory << 20,
        jobs or max(1, (os.cpu_count() or 2) // 2),
    )


def _notebooks(folder: Path) -> Iterator[Path]:
    """Links are followed nowhere: a link handed in may point at anything of the teacher's."""
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _IGNORED]
        for name in names:
            if name.lower().endswith(".ipynb"):
                yield Path(here) / name


_EXERCISE = re.compile(r"@(?:check\.)?exercise\(\s*[\"'](\d\d\.\d+)[\"'].*?\ndef (\w+)", re.DOTALL)


def _ids(chapter: str) -> dict[str, str]:
    """Names and ids of a chapter's exercises, read from the source: its imports may be heavy."""
    source = Path(__file__).resolve().parents[1] / "check" / f"ch{chapter}.py"
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    return {name: id_ for id_, name in _EXERCISE.findall(text)}


def grade(request: Request, told: Callable[[Graded, int, int], None] | None = None) -> Gradebook:
    """Grade all notebooks; ``told(row, done, total)`` after each. Only a bug of the grader raises.

    An interrupt ends the running children and returns what there is.
    """
    rows: dict[Path, Graded] = {}
    stop = threading.Event()
    interrupted = False
    with ThreadPoolExecutor(request.jobs, thread_name_prefix="grade") as pool:
        waiting = {pool.submit(_one, path, request, stop): path for path in request.files}
        try:
            for done in as_completed(waiting):
                rows[waiting[done]] = done.result()
                if told:
                    told(rows[waiting[done]], len(rows), len(request.files))
        except KeyboardInterrupt:
            interrupted = True
            stop.set()
            for future in waiting:
                future.cancel()
    return Gradebook(_twice([rows[path] for path in request.files if path in rows]), interrupted)


def _twice(rows: list[Graded]) -> tuple[Graded, ...]:
    """Two notebooks of one student and chapter: both are shown, and both say so."""
    from collections import Counter
    from dataclasses import replace

    count = Counter((row.student, row.chapter) for row in rows if row.status == GRADED)
    return tuple(
        replace(row, flags=(*row.flags, f"{count[row.student, row.chapter]} notebooks of this chapter"))
        if row.status == GRADED and count[row.student, row.chapter] > 1
        else row
        for row in rows
    )


def _one(path: Path, request: Request, stop: threading.Event) -> Graded:
    began = time.perf_counter()
    inside = path.relative_to(request.folder)
    student = printable(inside.parts[0] if len(inside.parts) > 1 else inside.stem)
    file = printable(inside.as_posix())
    with Scratch("labkit-grade-") as scratch:
        own = scratch.resolve()
        copy = own / "handed-in.ipynb"
        try:
            _copy(path, copy)
        except Unreadable as error:
            return Graded(student, file, UNREADABLE, reason=str(error))
        row = _graded(student, file, copy, own, request, stop)
        seconds = round(time.perf_counter() - began, 2)
        return Graded(**{**vars(row), "seconds": seconds, "flags": _flags(row, path, inside)})


def _copy(path: Path, copy: Path) -> None:
    try:
        facts = os.lstat(path)
        if not stat.S_ISREG(facts.st_mode):
            raise Unreadable("a link or a device, not a plain file")
        if facts.st_size > MOST_BYTES:
            raise Unreadable(
                f"{facts.st_size >> 20} MiB; a notebook handed in may have {MOST_BYTES >> 20} MiB"
            )
        shutil.copyfile(path, copy)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None


def _graded(
    student: str, file: str, copy: Path, own: Path, request: Request, stop: threading.Event
) -> Graded:
    """Start children until every exercise of the notebook has a mark."""
    marks: dict[str, Mark] = {}
    chapter, stands = "", ""
    while True:
        payload = {
            "notebook": str(copy),
            "folder": str(own),
            "names": request.names,
            "courses": request.courses,
            "chapters": request.chapters,
            "memory": request.memory,
            "skip": sorted(marks),
        }
        child = Child(own, payload)
        ended = child.run(request.timeout, request.memory, stop)
        for record in ended.records:
            kind = record["event"]
            if kind == "unreadable":
                return Graded(student, file, UNREADABLE, reason=str(record["reason"]))
            if kind == "other chapter":
                reason = f"it is of chapter {record['chapter']}"
                return Graded(student, file, OTHER, str(record["chapter"]), reason=reason)
            if kind == "broken":
                return Graded(student, file, BROKEN, chapter, reason=str(record["reason"]))
            if kind == "book":
                chapter, stands = str(record["chapter"]), str(record["walls"])
            if kind == "verdict":
                marks[record["exercise"]] = _mark(record, request.ids)
        if ended.whole:
            break
        if not ended.exercise and not (ended.records and ended.records[-1].get("state") == "tampered"):
            return Graded(student, file, BROKEN, chapter, reason=f"the grading process: {ended.why}")
        if ended.exercise:
            name = ended.exercise
            marks[name] = Mark(request.ids.get(name, name), name, ended.state, None, ended.why)
        if stop.is_set():
            return Graded(student, file, BROKEN, chapter, reason="interrupted")
    ordered = tuple(marks[name] for name in request.names[chapter] if name in marks)
    return Graded(student, file, GRADED, chapter, ordered, walls=stands)


def _mark(record: dict[str, Any], ids: dict[str, str]) -> Mark:
    name, score = record["exercise"], record["score"]
    return Mark(ids.get(name, name), name, record["state"], score, record["message"], tuple(record["tried"]))


def _flags(row: Graded, path: Path, inside: Path) -> tuple[str, ...]:
    """What a teacher should look at: tricks, and a notebook that claims more than it holds."""
    flags = [f"{mark.exercise} {mark.state}" for mark in row.marks if mark.state in ("tampered", "crashed")]
    tried = sorted({one for mark in row.marks for one in mark.tried})
    flags += [f"tried: {', '.join(tried[:3])}"] if tried else []
    if row.status == GRADED:
        with contextlib.suppress(Unreadable):
            passed = {mark.exercise for mark in row.marks if mark.state == "passed"}
            known = {mark.exercise for mark in row.marks}
            if more := sorted((claims(load(path)) & known) - passed):
                flags.append(f"its outputs claim {', '.join(more)}")
        named = re.match(r"(\d\d)_", inside.name)
        if named and named[1] != row.chapter:
            flags.append(f"named {named[1]}, holds chapter {row.chapter}")
    return tuple(flags)


def default_out() -> Path:
    """Where ``labkit grade`` writes without ``--out``."""
    return paths.results_dir() / "grades"


__all__ = ["MEMORY", "TIMEOUT", "Ended", "Request", "default_out", "grade", "prepare"]
