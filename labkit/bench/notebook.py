"""What the notebooks of ``notebooks/bench`` call: check the parameters, run with a bar, write, show, judge.

A notebook has the parameters of a ``labkit bench`` command, as text where the command takes text; they become
the same options, and the same function runs them. The record's command line is the one that repeats the run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.bench import notebook_plans
from labkit.bench.notebook_plans import Plan
from labkit.bench.record import Record
from labkit.bench.record import read as read_record
from labkit.check import session
from labkit.course.lab import pick_device
from labkit.course.rules import Rule
from labkit.errors import InputError, refuse, require
from labkit.paths import results_dir
from labkit.tables import Table


class WrongResults(RuntimeError):
    """A run in which something was wrong or failed, or that was interrupted."""


def start(name: str, **params: Any) -> Plan:
    """Check a benchmark's parameters; the one call after the parameters cell. Nothing runs.

    Args:
        name: gemm, gemv, attention, concurrency, jitter or serving.
        params: ``name=(value, rule)`` with a rule of :mod:`labkit.course.rules`; ``device`` is one of them.
            Text that is empty means the benchmark's own default.

    Raises:
        InputError: naming the parameter, what came and what is accepted; or the results folder, when it
            cannot be written.
    """
    values = {}
    for key, pair in params.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Rule)):
            refuse(key, repr(pair), f"a pair (value, rule), such as {key}=({key}, course.whole(1, 64))")
        values[key] = pair[1].check(key, pair[0])
    device = pick_device(values.pop("device", "auto"))
    plan = notebook_plans.make(name, device, values)
    _writable(results_dir() / "bench")
    session.log({"event": "start", "benchmark": name, "device": device})
    return plan


def _writable(folder: Path) -> None:
    """Refuse a place that cannot be written before anything is measured; nothing is made there."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        received, fix = f"{there}: {error.strerror}", "set LABKIT_RESULTS to another folder"
        raise InputError("results folder", received, "a folder that can be written", fix) from error


def run(plan: Plan) -> Record:
    """Run it with a bar of text, which stays in the executed notebook; Stop keeps what was done."""
    with _bar(plan) as step:
        return plan.work(plan.options, plan.command, report=step)


@contextmanager
def _bar(plan: Plan) -> Iterator[Callable[[str], None]]:
    """A report function that moves a bar: plain text, since a widget's state is lost without a browser."""
    from tqdm import tqdm

    form = "{desc}: {percentage:3.0f}%|{bar:24}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
    with tqdm(total=max(plan.lines, 1), desc=plan.name, file=sys.stdout, bar_format=form) as bar:

        def step(line: str) -> None:
            if bar.total is not None and bar.n >= bar.total:
                bar.total += 1  # a line that is no case: "warmed up"
            short = " ".join(line.split())
            bar.set_postfix_str(short[:44] + ("…" if len(short) > 44 else ""), refresh=False)
            bar.update(1)

        yield step
        bar.total = bar.n or bar.total
        bar.refresh()


def write(record: Record) -> Path:
    """Write the record where ``labkit bench`` does; a file of the same second is never replaced.

    Returns:
        Its path, in ``results_dir() / "bench"``.
    """
    folder = results_dir() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    name = Path(record.file_name)
    for number in range(1, 1000):
        path = folder / (name.name if number == 1 else f"{name.stem}-{number}{name.suffix}")
        try:
            path.touch(exist_ok=False)  # several runs of a suite may end in one second
        except FileExistsError:
            continue
        try:
            return record.write(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return refuse("record", f"{name} and 998 more of that second", "a folder with fewer files")


def tables(record: Record) -> list[Table]:
    """What ``labkit bench show`` prints of a record, as tables."""
    from labkit.bench import report

    return report.tables(record)


def show_tables(record: Record) -> None:
    """Display them one below the other, and the notes; outside a notebook they are printed."""
    found = tables(record)
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        print("\n\n".join(map(repr, found)))
    else:
        ipython.display.display(*found)
    for note in record.notes:
        print(f"- {note}")


def verdict(record: Record, path: Path) -> str:
    """One line when everything was right; the same words on every machine.

    Args:
        record: as run. path: where it was written.

    Raises:
        WrongResults: an entry is wrong or failed, or the run was interrupted; says which.
        InputError: the file is no record, or another one.
    """
    back = read_record(path)
    same = (back.started, len(back.entries)) == (record.started, len(record.entries))
    require(same, path.name, "another record", "the one of this run")
    bad = [one for one in record.entries if one.status in ("wrong", "failed")]
    if bad:
        first = bad[0]
        told = f"{first.table}, {first.contender} {first.m}×{first.n}×{first.k}: {first.status}, {first.note}"
        raise WrongResults(f"{len(bad)} of {len(record.entries)} entries are not right; {told}")
    if not record.complete:
        raise WrongResults("the run was interrupted; the record holds what was done")
    counted = any(one.status in ("timed", "emulated") for one in record.entries)
    if not counted:
        why = record.entries[0].note if record.entries else "no entries"
        raise WrongResults(f"there is no figure in the record: {why}")
    return "nothing wrong, nothing failed; the record reads back whole"
