"""The commands ``labkit rerun`` and ``labkit schedule``; the work is imported when one runs."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from labkit.rerun.every import Every
    from labkit.rerun.suite import Suite

EXIT_INTERRUPTED = 130

SuiteFile = Annotated[
    Path, typer.Argument(metavar="SUITE", help="A suite file (YAML), or the name of one in data/suites.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write to [results/rerun/SUITE].")]
Dask = Annotated[
    str | None, typer.Option("--dask", help="Run over the workers of this Dask scheduler (tcp://HOST:8786).")
]
Device = Annotated[
    str | None, typer.Option("--device", help="auto, cpu or cuda, instead of the suite's own.")
]


def rerun(
    suite: SuiteFile,
    every: Annotated[
        str | None,
        typer.Option(
            "--every", help='Stay and start a round again and again: 30m, 12h, daily, weekly or "0 3 * * *".'
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="With --every: stop after so many.")] = None,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest round; keep jobs that passed.")
    ] = False,
    dask: Dask = None,
    device: Device = None,
    list_: Annotated[
        bool, typer.Option("--list", help="Check the suite and show its jobs; run nothing.")
    ] = False,
) -> None:
    """Run a suite of notebooks × parameters with papermill; one failure does not stop the rest.

    All of the suite is checked first: an unknown parameter or a value of the wrong type runs nothing.
    Each round gets a folder with the executed notebooks, what they wrote, and summary.json.

    Exit codes: 0 every job passed; 1 a job failed or did not run; 2 wrong usage, nothing was run;
    130 interrupted (what was done is kept; --resume goes on).
    """
    from labkit.course.cli import terminate_as_interrupt
    from labkit.errors import require
    from labkit.rerun import every as clock

    rhythm = clock.parse(every) if every is not None else None
    require(rounds is None or rhythm is not None, "--rounds", rounds, "--every as well")
    require(rounds is None or rounds > 0, "--rounds", rounds, "a number from 1 on")
    path = _suite_path(suite)
    checked = _checked(path, device, dask)
    if list_:
        from labkit.rerun.console import Console

        Console().listing(checked)
        return
    home = _home(out, checked)
    try:
        with terminate_as_interrupt():
            if rhythm is None:
                code = _round(checked, home, resume, dask)
            else:
                code = _again(path, checked, home, rhythm, rounds, {"resume": resume, "dask": dask}, device)
    except KeyboardInterrupt:  # between rounds; within one the round itself reports it
        typer.echo("labkit rerun: interrupted", err=True)
        code = EXIT_INTERRUPTED
    raise typer.Exit(code)


def schedule(
    suite: SuiteFile,
    print_: Annotated[str, typer.Option("--print", help="cron, systemd or schtasks.")],
    every: Annotated[
        str,
        typer.Option("--every", help='hourly, daily, weekly (at 03:00) or a cron expression "0 3 * * *".'),
    ] = "daily",
    out: Out = None,
    dask: Dask = None,
    device: Device = None,
) -> None:
    """Print the entry for this machine's scheduler that reruns a suite; nothing is installed.

    Exit codes: 0 printed; 2 wrong usage.
    """
    from labkit.rerun import every as clock
    from labkit.rerun import schedule as entries

    rhythm = clock.parse(every, intervals=False)
    path = _suite_path(suite)
    from labkit.rerun.suite import load

    checked = load(path, device=device)
    task = entries.task(checked.name, path, _home(out, checked), rhythm, dask=dask, device=device)
    text = entries.entry(print_, task)
    entries.printable(text, sys.stdout.encoding)
    typer.echo(text)


def _suite_path(given: Path) -> Path:
    """The file, or the one of that name in data/suites."""
    from labkit.paths import data_dir

    if given.is_file() or given.name != str(given):
        return given
    for name in (given.name, f"{given.name}.yaml"):
        if (found := data_dir() / "suites" / name).is_file():
            return found
    return given


def _checked(path: Path, device: str | None, dask: str | None) -> Suite:
    from labkit.rerun import local
    from labkit.rerun.suite import load

    found = load(path, device=device)
    if dask is None:
        local.check(found)
    return found


def _home(out: Path | None, suite: Suite) -> Path:
    from labkit.errors import require
    from labkit.paths import results_dir

    require(out is None or not out.exists() or out.is_dir(), "--out", f"{out}, a file", "a folder")
    return (out or results_dir() / "rerun" / suite.name).absolute()


def _round(suite: Suite, home: Path, resume: bool, dask: str | None) -> int:
    from labkit.rerun import cluster, local
    from labkit.rerun.console import Console
    from labkit.rerun.round import begin, locked

    show = Console()
    client: Any = cluster.connect(dask) if dask is not None else None
    try:
        with locked(home):
            made = begin(suite, home, resume=resume)
            show.begin(made, f"Dask at {dask}" if dask is not None else "this machine")
            noted = len(made.notes)
            try:
                if client is not None:
                    cluster.run(made, client, on_job=show.job)
                else:
                    local.run(made, on_job=show.job, on_event=show.event)
            except KeyboardInterrupt:
                made.interrupted = True
            finally:
                _end(made, noted, show)
            return made.exit_code
    finally:
        if client is not None:
            client.close()


def _end(made: Any, noted: int, show: Any) -> None:
    try:
        made.write(finished=not made.interrupted and len(made.entries) == len(made.suite.jobs))
    except OSError as error:
        made.notes.append(f"summary.json was not written: {error.strerror or error}")
    show.end(made, noted)


def _again(
    path: Path,
    suite: Suite,
    home: Path,
    rhythm: Every,
    rounds: int | None,
    options: dict[str, Any],
    device: str | None,
) -> int:
    """Round after round; the exit code is the worst one. A suite file that breaks skips its round."""
    from labkit.errors import InputError

    worst, count = 0, 0
    while True:
        began = datetime.now().astimezone()
        try:
            checked = suite if count == 0 else _checked(path, device, options["dask"])
            code = _round(checked, home, **options)
        except InputError as error:
            if count == 0:
                raise
            typer.echo(f"labkit rerun: {error}", err=True)
            code = 1
        if code == EXIT_INTERRUPTED:
            return code
        worst, count = max(worst, code), count + 1
        options = {**options, "resume": False}
        if rounds is not None and count >= rounds:
            return worst
        due = rhythm.after(began)
        typer.echo(f"next round: {due:%Y-%m-%d %H:%M:%S}")
        # in short steps: a laptop that slept must not sleep on
        while (left := (due - datetime.now().astimezone()).total_seconds()) > 0:
            time.sleep(min(left, 30.0))
