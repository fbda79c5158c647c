"""The commands ``labkit release``, ``grade`` and ``book``; the work is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Chapters = Annotated[
    str | None, typer.Option("--chapters", help="Such as 00,02 or 00-09. [default: all that are ready]")
]


def release(
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write.")] = None,
    chapters: Chapters = None,
    executed: Annotated[
        bool, typer.Option("--executed", help="Run the teacher's notebooks, with solutions checked.")
    ] = False,
    nbgrader: Annotated[
        bool, typer.Option("--nbgrader/--no-nbgrader", help="With the source of an nbgrader course.")
    ] = True,
    check: Annotated[
        Path | None, typer.Option("--check", help="Compare a release with the course; write nothing.")
    ] = None,
) -> None:
    """Student notebooks, teacher notebooks with solutions, and an nbgrader course.

    Exit codes: 0 written, or nothing has changed; 1 the release in --check no longer fits the course;
    2 wrong usage, or a chapter that is not fit to be released: nothing was written.
    """
    from labkit.classroom import drift
    from labkit.classroom import release as work
    from labkit.errors import refuse

    if (out is None) == (check is None):
        refuse("--out, --check", "both" if out else "neither", "one of them")
    if check is not None:
        found = drift.problems(check)
        for line in found:
            typer.echo(line)
        typer.echo(f"{check}: {len(found)} differences" if found else f"{check}: fits the course")
        raise typer.Exit(1 if found else 0)
    assert out is not None
    made = work.build(chapters, executed=executed, nbgrader=nbgrader)
    work.write(made, out)
    asked = sum(len(chapter.exercises) for chapter in made.chapters)
    typer.echo(f"{out}: {len(made.chapters)} chapters, {asked} exercises, {len(made.files)} files")
    typer.echo(f"give out {out / work.STUDENT}; keep {out / work.TEACHER}")


def grade(
    folder: Annotated[Path, typer.Argument(help="Notebooks handed in: FOLDER/STUDENT/….ipynb, any depth.")],
    chapters: Chapters = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds an exercise may take.")] = 60.0,
    memory: Annotated[int, typer.Option("--memory", help="MiB an answer may add.")] = 2048,
    jobs: Annotated[int, typer.Option("--jobs", help="Notebooks at once; 0 is half of the processors.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder of grades.csv, exercises.csv, grades.json. [default: results/grades]"
        ),
    ] = None,
) -> None:
    """Score many notebooks, each in its own process, with time and memory limits; no nbgrader, no network.

    What a notebook printed counts for nothing: its answers are taken out and checked again.
    An answer runs with the rights of whoever grades, less what Python and (on Linux) the kernel
    refuse it: for strangers' notebooks use a container as well.

    Exit codes: 0 all were graded; 1 some could not be, or want a look (see status and flags);
    2 wrong usage, nothing was run; 130 interrupted, what was done is written.
    """
    from labkit.classroom import grade as work
    from labkit.classroom.report import Report
    from labkit.course.cli import terminate_as_interrupt
    from labkit.errors import refuse, require

    request = work.prepare(folder, chapters=chapters, timeout=timeout, memory=memory, jobs=jobs)
    where = out if out is not None else work.default_out()
    require(not where.is_file(), "--out", f"{where} is a file", "a folder")
    report = Report()
    with terminate_as_interrupt():
        book = work.grade(request, report.one)
    try:
        book.write(where)
    except OSError as error:
        refuse("--out", f"{error.strerror}: {error.filename}", "a folder that can be written")
    report.end(book, where)
    raise typer.Exit(book.exit_code)


def book(
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    results: Annotated[
        Path | None, typer.Option("--from", help="What labkit course wrote. [default: results/course]")
    ] = None,
    chapters: Chapters = None,
) -> None:
    """The executed course as a book of HTML pages, with links and alt texts checked.

    Exit codes: 0 written and in order; 1 written, and a link, an anchor or an alt text is missing;
    2 wrong usage, or a chapter has no results.
    """
    from labkit.classroom import book as work

    found: list[Any] = work.make(out, results=results, chapters=chapters)
    for line in found:
        typer.echo(line)
    typer.echo(f"{out / work.INDEX}: {len(found)} problems")
    raise typer.Exit(1 if found else 0)
