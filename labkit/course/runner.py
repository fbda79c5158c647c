"""Run chapters headlessly: everything is checked first, then each runs on its own, and all are reported."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from labkit import paths
from labkit.atomic import write_json, write_text
from labkit.course import environment, html_export
from labkit.course.execute import CELL_TIMEOUT, Failure, Run, run_notebook
from labkit.course.index import Chapter, choose
from labkit.course.lab import DEVICE_RULE, pick_device
from labkit.course.notebook import Notebook, dumps, read
from labkit.course.params import RESERVED, Parameter, assign, parse_pairs, read_parameters
from labkit.course.rules import truth
from labkit.errors import refuse, require

SUMMARY_VERSION = 1


@dataclass(frozen=True)
class Job:
    """One chapter that will run: its notebook as read, and the values it gets."""

    chapter: Chapter
    path: Path
    book: Notebook
    known: list[Parameter]
    values: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A checked request; building one has run nothing and written nothing."""

    jobs: list[Job]
    device: str
    solve: bool
    out: Path
    timeout: float


@dataclass
class ChapterResult:
    """What one chapter did; ``status`` is passed, failed or interrupted."""

    chapter: Chapter
    status: str
    seconds: float = 0.0
    cells_done: int = 0
    cells_total: int = 0
    device: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)
    failure: Failure | None = None
    notebook: str = ""
    html: str = ""
    note: str = ""


@dataclass
class CourseResult:
    """All results in course order; ``exit_code`` as documented by ``labkit course --help``."""

    out: Path
    results: list[ChapterResult]
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 all passed, 1 a chapter failed, 130 interrupted."""
        if self.interrupted:
            return 130
        return 0 if all(r.status == "passed" for r in self.results) else 1


class Reporter(Protocol):
    """Shows progress; the console is one, tests pass their own."""

    def begin(self, request: Request) -> None:
        """The run starts."""

    def chapter(self, job: Job) -> None:
        """A chapter starts."""

    def cell(self, done: int, total: int) -> None:
        """A code cell completed."""

    def finished(self, result: ChapterResult) -> None:
        """A chapter ended."""

    def end(self, result: CourseResult) -> None:
        """The run ended; called also after an interrupt."""


class Silent:
    """The reporter that says nothing."""

    def begin(self, request: Request) -> None:
        """Nothing."""

    def chapter(self, job: Job) -> None:
        """Nothing."""

    def cell(self, done: int, total: int) -> None:
        """Nothing."""

    def finished(self, result: ChapterResult) -> None:
        """Nothing."""

    def end(self, result: CourseResult) -> None:
        """Nothing."""


def prepare(
    *,
    chapters: str | list[str] | None = None,
    device: str = "auto",
    pairs: list[str] | None = None,
    params: dict[str, Any] | None = None,
    solve: bool = False,
    out: Path | None = None,
    timeout: float = CELL_TIMEOUT,
    folder: Path | None = None,
) -> Request:
    """Check a whole request; nothing runs and nothing is written.

    Args:
        chapters: ``"00,02"``, a range, a list, or None for all that are ready.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        pairs: ``["batch=4"]`` from a command line; ``params``: values from Python.
        solve: check the reference solutions.
        out: folder to write to; default ``results/course``.
        timeout: seconds a cell may take.
        folder: where the notebooks are; default the notebooks folder.

    Raises:
        InputError: for the first thing that is wrong.
    """
    DEVICE_RULE.check("--device", device)
    good = isinstance(timeout, (int, float)) and math.isfinite(timeout) and timeout > 0
    require(good, "--timeout", repr(timeout), "a number of seconds above 0")
    given: dict[str, Any] = {**parse_pairs(pairs or []), **(params or {})}
    # the two that every chapter has may also be given as parameters, as papermill users do
    if "device" in given:
        device = _merged("device", given.pop("device"), device, "auto")
        DEVICE_RULE.check("device", device)
    if "solve" in given:
        solve = _merged("solve", truth().check("solve", given.pop("solve")), solve, False)
    selected = choose(chapters, folder)
    books = {c.number: (path, read(path)) for c in selected if (path := c.notebook(folder)) is not None}
    known = {number: _parameters(path, book) for number, (path, book) in books.items()}
    own = {number: [p for p in found if p.name not in RESERVED] for number, found in known.items()}
    values = assign(given, own)
    resolved = pick_device(device)
    where = _safe_out(out if out is not None else paths.results_dir() / "course", folder)
    jobs = []
    for c in selected:
        path, book = books[c.number]
        full = {"device": resolved, "solve": solve, **values[c.number]}
        jobs.append(Job(c, path, book, own[c.number], full))
    return Request(jobs, resolved, solve, where, float(timeout))


def _merged(name: str, in_parameters: Any, option: Any, default: Any) -> Any:
    if option not in (default, in_parameters):
        refuse(f"-p {name}", repr(in_parameters), f"the same as --{name} ({option!r})", "give it once")
    return in_parameters


def _parameters(path: Path, book: Notebook) -> list[Parameter]:
    try:
        found = read_parameters(book)
    except ValueError as error:
        refuse(path.name, str(error), "a chapter with a valid parameters cell", "labkit notebook check")
    for name in RESERVED:
        require(
            name in {p.name for p in found}, path.name, f"no parameter {name!r}", "device and solve in it"
        )
    return found


def _safe_out(out: Path, folder: Path | None) -> Path:
    """An absolute output folder that is not the notebooks' own."""
    full = Path(os.path.abspath(out))
    require(not full.exists() or full.is_dir(), "--out", f"{out} is a file", "a folder")
    home = Path(os.path.abspath(folder or paths.notebooks_dir()))
    inside = full.resolve() == home.resolve() or home.resolve() in full.resolve().parents
    require(not inside, "--out", str(out), "a folder outside the notebooks", "leave --out away")
    return full


def run(request: Request, reporter: Reporter | None = None) -> CourseResult:
    """Run the chapters one after another; a failing one does not stop the others."""
    tell = reporter or Silent()
    result = CourseResult(request.out, [])
    try:
        request.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse("--out", _in_words(error, request.out), "a folder that can be written")
    tell.begin(request)
    facts = environment.facts()
    entries: dict[str, dict[str, Any]] = {}
    try:
        for job in request.jobs:
            tell.chapter(job)
            one = ChapterResult(job.chapter, "interrupted", parameters=job.values)
            result.results.append(one)
            try:
                _run_job(job, request, one, tell)
            except Exception as error:  # a locked or missing file, a full disk: the other chapters still run
                _failed_outside(one, error, request.out)
            _store(request, one, entries, facts)
            tell.finished(one)
    except KeyboardInterrupt:
        result.interrupted = True
        if result.results and result.results[-1].status == "interrupted":
            _store(request, result.results[-1], entries, facts)
    finally:
        tell.end(result)
    return result


def run_course(
    chapters: str | list[str] | None = None,
    device: str = "auto",
    params: dict[str, Any] | None = None,
    solve: bool = False,
    out: Path | None = None,
    timeout: float = CELL_TIMEOUT,
    progress: Reporter | None = None,
    *,
    folder: Path | None = None,
) -> CourseResult:
    """:func:`prepare` and :func:`run` in one call; InputError before anything ran."""
    request = prepare(
        chapters=chapters, device=device, params=params, solve=solve, out=out, timeout=timeout, folder=folder
    )
    return run(request, progress)


def _run_job(job: Job, request: Request, one: ChapterResult, tell: Reporter) -> None:
    """Execute, write the notebook and its HTML; ``one`` is filled in as far as it came."""
    files = request.out / "files" / job.chapter.number
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True, exist_ok=True)  # a file that is open on Windows outlives rmtree
    for stale in (request.out / job.path.name, request.out / f"{job.path.stem}.html"):
        stale.unlink(missing_ok=True)

    def on_cell(count: int, total: int) -> None:
        one.cells_done, one.cells_total = count, total  # what an interrupt leaves to be told
        tell.cell(count, total)

    done = run_notebook(
        job.book, job.values, timeout=request.timeout, cwd=files, results=files, on_cell=on_cell
    )
    for folder in (files, files.parent):
        with contextlib.suppress(OSError):  # not empty, or held open
            folder.rmdir()
    one.seconds, one.cells_done, one.cells_total = round(done.seconds, 2), done.done, done.total
    one.failure = done.failure
    _read_reports(done, one)
    write_text(request.out / job.path.name, dumps(done.book))
    one.notebook = job.path.name
    page = request.out / f"{job.path.stem}.html"
    try:
        write_text(page, html_export.page(done.book, job.chapter.title))
        one.html = page.name
    except Exception as error:  # the chapter ran; a page that cannot be made must not hide that
        one.note = f"no HTML page: {type(error).__name__}: {error}"
    one.status = "failed" if done.failure else "passed"


def _in_words(error: BaseException, out: Path) -> str:
    """An error as one line; a file's place is told from the output folder on."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    if error.filename is None:
        return error.strerror
    named = Path(os.fsdecode(error.filename))
    shown = named.relative_to(out).as_posix() if out in named.parents else str(named)
    return f"{error.strerror}: {shown}"


def _failed_outside(one: ChapterResult, error: Exception, out: Path) -> None:
    """The chapter failed in its files, not in a cell; a cell's own failure comes first."""
    words = _in_words(error, out)
    one.status = "failed"
    if one.failure is None:
        one.failure = Failure(0, 0, one.cells_total, "", type(error).__name__, words, "")
    else:
        one.note = f"{one.note}; {words}" if one.note else words


def _read_reports(done: Run, one: ChapterResult) -> None:
    """Device and checks, as the kernel itself reported them; of each exercise the last verdict counts."""
    last: dict[str, str] = {}
    for record in done.log:
        if record.get("event") == "start":
            one.device = record.get("device")
        elif record.get("event") == "check":
            last[str(record.get("exercise"))] = str(record.get("state"))
    states = list(last.values())
    names = {"passed": "passed", "not_yet": "not yet", "not_attempted": "not attempted"}
    one.checks = {key: states.count(state) for key, state in names.items()} | {"total": len(states)}


def _entry(one: ChapterResult, facts: dict[str, Any]) -> dict[str, Any]:
    failure = None
    if one.failure:
        f = one.failure
        failure = {
            "code_cell": f.number,
            "of": f.of,
            "error": f.ename,
            "message": f.evalue,
            "source": f.source,
        }
    return {
        "title": one.chapter.title,
        "status": one.status,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": one.seconds,
        "cells": {"done": one.cells_done, "total": one.cells_total},
        "checks": one.checks,
        "device": one.device,
        "parameters": one.parameters,
        "failure": failure,
        "notebook": one.notebook,
        "html": one.html,
        "note": one.note,
        **facts,
    }


def read_summary(out: Path) -> dict[str, Any]:
    """The chapters of ``out/summary.json`` by number; empty when there is none or it is damaged."""
    import json

    try:
        found = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        chapters = found["chapters"] if found["version"] == SUMMARY_VERSION else {}
        return chapters if isinstance(chapters, dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _store(
    request: Request, one: ChapterResult, entries: dict[str, dict[str, Any]], facts: dict[str, Any]
) -> None:
    """Put one chapter into ``entries``, and all of them into the files; a chapter not kept has failed."""
    entries[one.chapter.number] = _entry(one, facts)
    try:
        _write_summary(request, entries)
    except Exception as error:
        if one.status != "interrupted":
            _failed_outside(one, error, request.out)
        entries[one.chapter.number] = _entry(one, facts)  # the next chapter's turn tries again


def _write_summary(request: Request, entries: dict[str, dict[str, Any]]) -> None:
    """summary.json and index.html with this run's entries; what other runs left there stays."""
    chapters = read_summary(request.out) | entries
    ordered = {number: chapters[number] for number in sorted(chapters)}
    summary = {"version": SUMMARY_VERSION, "origin": "measured", "chapters": ordered}
    write_json(request.out / "summary.json", summary)
    write_text(request.out / "index.html", html_export.index(ordered))
