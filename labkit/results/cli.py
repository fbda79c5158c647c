"""The command ``labkit report``; numpy and matplotlib are loaded when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_SHOWN_MESSAGES = 10


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders or files with results. (default: results/ and data/measured/)"),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with plots here as well.")] = None,
    case: Annotated[str, typer.Option("--case", help='Words that the case holds, such as "w4 8×".')] = "",
    device: Annotated[str, typer.Option("--device", help="Key of the device, such as h200 or cpu.")] = "",
    kind: Annotated[
        str, typer.Option("--kind", help="measured, emulated, simulated or quoted; all when left out.")
    ] = "",
    threshold: Annotated[
        float, typer.Option("--threshold", help="Least change of a median to flag, in percent.")
    ] = 3.0,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept",
            help='Let runs pass that were throttled by this, such as "software power cap"; repeat it.',
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Two files: refuse them unless device and kind are the same."),
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every row and every plot.")] = False,
) -> None:
    """History of results: medians with spread for each case and device, change points marked.

    Runs of different devices are never compared, throttled ones are left out; the report says so. A run is
    a change point when the bootstrap 95 % interval of its median does not overlap that of the up to five
    runs before it and the medians differ by the threshold or more.

    Exit codes: 0 reported; 2 wrong usage, or two runs that must not be compared.
    """
    from labkit import paths
    from labkit.errors import require
    from labkit.results import history
    from labkit.results import report as words
    from labkit.tables import ORIGINS

    require(0 <= threshold <= 100, "--threshold", f"{threshold:g}", "percent from 0 to 100")
    require(kind in ("", *ORIGINS), "--kind", repr(kind), "one of " + ", ".join(ORIGINS))
    places = folders or [p for p in (paths.results_dir(), paths.data_dir() / "measured") if p.is_dir()]
    records, skipped = _records(places, compare, accept or [])
    found = history.gather(records, threshold=threshold / 100, accept=accept or (), skipped=skipped)
    chosen = found.select(case=case, device=device, kind=kind)
    if found.found and not chosen:
        devices = ", ".join(sorted({one.key for one in found.devices}))
        require(
            False, "--case, --device, --kind", "nothing left", f"devices {devices}; fewer words in --case"
        )
    typer.echo(words.text(found, chosen, everything=everything))
    for message in skipped[:_SHOWN_MESSAGES]:
        typer.echo(f"labkit: {message}", err=True)
    if len(skipped) > _SHOWN_MESSAGES:
        typer.echo(f"labkit: … and {len(skipped) - _SHOWN_MESSAGES} more files skipped", err=True)
    if html is not None:
        _write(html, words.page(found, chosen, everything=everything))


def _records(places: list[Path], pair: bool, accept: list[str]) -> tuple[list[Any], list[str]]:
    from labkit.bench import record
    from labkit.errors import require
    from labkit.results import history
    from labkit.results.compare import comparable

    if not pair:
        return history.read(places)
    require(len(places) == 2, "--compare", f"{len(places)} paths", "two files")
    both = [record.read(path) for path in places]
    comparable(*both, accept=accept)
    return both, []


def _write(path: Path, text: str) -> None:
    from labkit.atomic import write_text
    from labkit.errors import InputError, require

    require(not path.is_dir(), "--html", f"{path}, a folder", "the file to write")
    try:
        write_text(path, text)
    except OSError as error:
        raise InputError("--html", f"{path}: {error.strerror}", "a file that can be written") from error
    typer.echo(f"\nwritten: {path}")
