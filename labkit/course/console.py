"""What `labkit course` shows: a bar for each chapter on a terminal, a line for each otherwise."""

from __future__ import annotations

from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from labkit.course.execute import Failure
from labkit.course.html_export import checks_line
from labkit.course.runner import ChapterResult, CourseResult, Job, Request
from labkit.errors import InputError

_COLORS = {"passed": "green", "failed": "red", "interrupted": "yellow"}
_SOURCE_LINES = 40


class Console:
    """The reporter of the command line; ``file`` is where it writes (default: standard output).

    ``terminal`` says whether that is one; None means to ask it.
    """

    def __init__(self, file: Any = None, *, terminal: bool | None = None) -> None:
        self.out = RichConsole(file=file, highlight=False, soft_wrap=True, force_terminal=terminal)
        self.errors = RichConsole(file=file, stderr=file is None, highlight=False, soft_wrap=True)
        self.live: Progress | None = None
        self.course_task: Any = None
        self.cell_task: Any = None

    def usage(self, error: InputError) -> None:
        """One message, no traceback."""
        self.errors.print(f"[red]labkit course:[/red] {escape(str(error))}")

    def listing(self, request: Request) -> None:
        """The chapters that would run, with their parameters."""
        for job in request.jobs:
            self.out.print(f"{job.chapter.number}  {escape(job.chapter.title)}")
            for p in job.known:
                rule = f" ({p.rule.expected()})" if p.rule else ""
                text = f"    {p.name} = {p.default!r}{rule}  {p.help}"
                self.out.print(escape(text.rstrip()))

    def begin(self, request: Request) -> None:
        """Open the bars, or print one line."""
        self.out.print(
            f"{len(request.jobs)} chapters, device {request.device}, output in {escape(str(request.out))}"
        )
        if not self.out.is_terminal:
            return
        self.live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.out,
        )
        self.live.start()
        self.course_task = self.live.add_task("Course", total=len(request.jobs))

    def chapter(self, job: Job) -> None:
        """A bar for the chapter's cells."""
        if self.live is not None:
            name = f"{job.chapter.number} {job.chapter.title}"
            self.cell_task = self.live.add_task(escape(name), total=None)

    def cell(self, done: int, total: int) -> None:
        """Move the chapter's bar."""
        if self.live is not None:
            self.live.update(self.cell_task, completed=done, total=total)

    def finished(self, result: ChapterResult) -> None:
        """One line for the chapter; a failing one shows its cell and its error."""
        if self.live is not None:
            self.live.remove_task(self.cell_task)
            self.live.advance(self.course_task)
        color = _COLORS[result.status]
        checks = checks_line(result.checks)
        said = f", exercises: {checks}" if checks else ""
        self.out.print(
            f"{result.chapter.number} {escape(result.chapter.title)}: [{color}]{result.status}[/{color}]"
            f" ({result.cells_done}/{result.cells_total} cells, {result.seconds:.1f} s{said})"
        )
        if result.note:
            self.out.print(f"   {escape(result.note)}")
        if result.failure is not None:
            self._failure(result.failure)

    def _failure(self, failure: Failure) -> None:
        self.out.print(f"   [red]{failure.where}[/red] {escape(failure.summary())}")
        lines = failure.source.splitlines()
        for number, line in enumerate(lines[:_SOURCE_LINES], 1):
            self.out.print(f"   {number:>3} | {escape(line)}")
        if len(lines) > _SOURCE_LINES:
            self.out.print(f"       ({len(lines) - _SOURCE_LINES} more lines)")
        for line in failure.traceback.splitlines()[-15:]:
            self.out.print(f"   {escape(line)}")

    def end(self, result: CourseResult) -> None:
        """Close the bars and say where to look."""
        if self.live is not None:
            self.live.stop()
            self.live = None
        passed = sum(r.status == "passed" for r in result.results)
        word = ""
        if result.interrupted and result.results:
            last = result.results[-1]
            word = f"interrupted in {last.chapter.number} after {last.cells_done}/{last.cells_total} cells; "
        self.out.print(f"{word}{passed} of {len(result.results)} chapters passed")
        self.out.print(f"Open {escape(str(result.out / 'index.html'))}")
