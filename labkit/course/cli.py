"""The commands ``labkit course`` and ``labkit notebook``; the work is imported when one runs."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_PASSED, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

notebook_app = typer.Typer(
    no_args_is_help=True,
    help="Keep notebook files in their canonical form (for authors of chapters).",
)

Files = Annotated[list[Path], typer.Argument(help="Notebook files.")]


def course(
    chapters: Annotated[
        str, typer.Option("--chapters", help="Such as 00,02 or 00-09; all ready ones when left out.")
    ] = "all",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    parameter: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", help="name=value for a chapter's parameter; repeat it."),
    ] = None,
    solve: Annotated[bool, typer.Option("--solve", help="Check every reference solution.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write to [results/course].")] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one cell may take.")] = 300.0,
    list_: Annotated[
        bool, typer.Option("--list", help="Show the chapters and their parameters; run nothing.")
    ] = False,
) -> None:
    """Run chapters headlessly and write executed notebooks, HTML and a summary.

    Exit codes: 0 every chapter passed; 1 a chapter failed; 2 wrong usage, nothing was run;
    130 interrupted.
    """
    _printable_output()
    options = {"chapters": chapters, "device": device, "pairs": parameter or [], "solve": solve}
    try:
        with terminate_as_interrupt():
            code = _course({**options, "out": out, "timeout": timeout}, list_)
    except KeyboardInterrupt:  # before the first chapter began; later the runner reports it
        code = EXIT_INTERRUPTED
    raise typer.Exit(code)


def _course(options: dict[str, Any], list_only: bool) -> int:
    from labkit.course import runner
    from labkit.course.console import Console
    from labkit.errors import InputError

    console = Console()
    try:
        request = runner.prepare(**options)
        if list_only:
            console.listing(request)
            return EXIT_PASSED
        return runner.run(request, console).exit_code
    except InputError as error:
        console.usage(error)
        return EXIT_USAGE


@notebook_app.command("format")
def format_command(files: Files) -> None:
    """Rewrite notebooks in canonical form: ids, metadata, order of keys, no stray outputs."""
    _printable_output()
    from labkit.course.notebook import format_file

    for path in files:
        changed = _or_usage(lambda path=path: format_file(path))
        typer.echo(f"{path}: {'formatted' if changed else 'unchanged'}")


@notebook_app.command("check")
def check_command(
    files: Files,
    format_only: Annotated[
        bool, typer.Option("--format-only", help="Leave out the anatomy of a chapter.")
    ] = False,
) -> None:
    """Check format and anatomy; exit code 1 when a problem was found."""
    _printable_output()
    from labkit.course.gate import gate

    found = 0
    for path in files:
        for problem in _or_usage(lambda path=path: gate(path, anatomy=False if format_only else None)):
            typer.echo(f"{path.name}: {problem}")
            found += 1
    typer.echo(f"{len(files)} notebooks, {found} problems")
    raise typer.Exit(EXIT_FAILED if found else EXIT_PASSED)


@notebook_app.command("refresh")
def refresh_command(
    files: Files,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that one cell may take.")] = 300.0,
) -> None:
    """Run notebooks and store the outputs of their checked cells (those with # NBVAL_CHECK_OUTPUT)."""
    _printable_output()
    from labkit.course.notebook import refresh

    with terminate_as_interrupt():
        for path in files:
            _or_usage(lambda path=path: refresh(path, timeout=timeout))
            typer.echo(f"{path}: refreshed")


def _or_usage(work: Any) -> Any:
    """Run ``work``; an InputError becomes one line and exit code 2."""
    from labkit.errors import InputError

    try:
        return work()
    except InputError as error:
        typer.echo(f"labkit: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _printable_output() -> None:
    """A terminal in GBK or ASCII shows ``?`` for what it cannot print; without this, printing raises."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


@contextlib.contextmanager
def terminate_as_interrupt() -> Any:
    """SIGTERM, and the end of the terminal, take the same way out as Ctrl-C: no kernel or file is left."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ways = [signal.SIGTERM]
    # under nohup it is ignored, and stays so; Windows has none
    if (hang_up := getattr(signal, "SIGHUP", None)) and signal.getsignal(hang_up) is signal.SIG_DFL:
        ways.append(hang_up)
    try:
        before = {way: signal.signal(way, interrupt) for way in ways}
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for way, handler in before.items():
            signal.signal(way, handler)
