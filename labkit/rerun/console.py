"""What ``labkit rerun`` shows: the cell that runs on a terminal, a line for each job."""

from __future__ import annotations

from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape

from labkit.rerun.round import Round
from labkit.rerun.suite import Job, Suite

_COLORS = {"passed": "green", "failed": "red"}


class Console:
    """The reporter of the command line; ``file`` is where it writes (default: standard output)."""

    def __init__(self, file: Any = None) -> None:
        self.out = RichConsole(file=file, highlight=False, soft_wrap=True)
        self.status: Any = None

    def listing(self, suite: Suite) -> None:
        """The jobs with their parameters."""
        for job in suite.jobs:
            values = ", ".join(f"{name} = {value!r}" for name, value in job.values.items())
            device = f"device {job.device}; " if job.device else ""
            self.out.print(escape(f"{job.id}: {job.notebook}; {device}{values or 'no parameters'}"))

    def begin(self, made: Round, where: str) -> None:
        """The round starts."""
        for note in made.notes:
            self.out.print(f"[yellow]{escape(note)}[/yellow]")
        kept = f", {len(made.kept)} kept" if made.kept else ""
        words = f"{made.suite.name}: {len(made.todo)} jobs{kept}, {where}, output in {made.folder}"
        self.out.print(escape(words))
        if self.out.is_terminal:
            self.status = self.out.status("")
            self.status.start()

    def event(self, job: Job, event: dict[str, Any]) -> None:
        """A job waits for its turn, or a cell of it has completed."""
        if self.status is not None:
            words = "waiting for another job on this machine"
            if event["event"] == "cell":
                words = f"cell {event['done']} of {event['total']}"
            elif event["event"] == "start":
                words = "starting"
            self.status.update(escape(f"{job.id}: {words}"))

    def job(self, job: Job, entry: dict[str, Any]) -> None:
        """A job ended."""
        state = entry["status"]
        cells = entry.get("cells", {})
        words = f" ({cells.get('done', 0)}/{cells.get('total', 0)} cells, {entry.get('seconds') or 0:.1f} s)"
        self.out.print(f"{escape(job.id)}: [{_COLORS[state]}]{state}[/{_COLORS[state]}]{words}")
        if failure := entry.get("failure"):
            at = f" in code cell {failure['code_cell']} of {failure['of']}" if "code_cell" in failure else ""
            self.out.print(f"   {escape(failure['error'] + at + ': ' + failure['message'].strip()[:600])}")

        if left := entry.get("files_left_out"):
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            self.out.print(f"   [yellow]{escape('not kept: ' + ', '.join(left[:3]) + more)}[/yellow]")

    def end(self, made: Round, before: int) -> None:
        """The round ended; notes before ``before`` were shown."""
        if self.status is not None:
            self.status.stop()
            self.status = None
        for note in made.notes[before:]:
            self.out.print(f"[yellow]{escape(note)}[/yellow]")
        self.out.print()
        self.out.print(escape(repr(made.summary())))
        passed = sum(made.status(job) == "passed" for job in made.suite.jobs)
        word = "interrupted; --resume goes on. " if made.interrupted else ""
        self.out.print(f"\n{word}{passed} of {len(made.suite.jobs)} jobs passed")
        self.out.print(f"summary: {escape(str(made.folder / 'summary.json'))}")
