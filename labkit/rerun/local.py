"""Run the jobs of a round here, one after another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from labkit.course.lab import pick_device
from labkit.errors import InputError
from labkit.rerun import spec
from labkit.rerun.perform import perform
from labkit.rerun.round import Round
from labkit.rerun.suite import Job, Suite

OnJob = Callable[[Job, dict[str, Any]], None]
OnEvent = Callable[[Job, dict[str, Any]], None]


def check(suite: Suite) -> None:
    """Refuse a device that this machine lacks, before anything runs."""
    for job in suite.jobs:
        if job.device not in ("", "auto"):
            try:
                pick_device(job.device)
            except InputError as error:
                raise InputError(f"{job.id}: device", error.received, error.expected, error.fix) from None


def run(made: Round, *, on_job: OnJob, on_event: OnEvent) -> None:
    """Run what is to do; one failure does not stop the rest, an interrupt keeps what was done."""
    try:
        for job in made.todo:
            packed = perform(spec.dumps(job), functools.partial(on_event, job))
            on_job(job, made.done(job, packed))
    except KeyboardInterrupt:
        made.interrupted = True
