"""Run the jobs of a round over the workers of a Dask cluster: several laptops of a classroom.

A job travels as text and comes back as bytes, so the workers need labkit (the same sources) and no
shared folder. A worker that dies gives its job back: Dask runs it again on another one.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from labkit.errors import InputError, refuse
from labkit.rerun import spec
from labkit.rerun.local import OnJob
from labkit.rerun.perform import failed, perform
from labkit.rerun.round import Round
from labkit.rerun.suite import Job

CONNECT_SECONDS = 20
NO_WORKER_SECONDS = 60.0
_LOOK_SECONDS = 1.0


def connect(address: str) -> Any:
    """A client of the scheduler at ``address``, such as tcp://192.168.0.10:8786.

    Raises:
        InputError: Dask is not installed, or no scheduler answers there.
    """
    try:
        from distributed import Client
    except ImportError:
        refuse("--dask", "no package distributed", "Dask", 'pip install "labkit[sweep]"')
    try:
        return Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        words = f"{address}: {' '.join(str(error).split())[:200] or type(error).__name__}"
        fix = "dask scheduler; then, on each machine, dask worker ADDRESS --nthreads 1"
        raise InputError("--dask", words, "the address of a Dask scheduler", fix) from error


def run(made: Round, client: Any, *, on_job: OnJob, no_worker_seconds: float = NO_WORKER_SECONDS) -> None:
    """Run what is to do on the cluster.

    A job whose worker dies runs elsewhere; Dask gives up on a job that takes several workers with it. When
    no worker is left for a while, the rest stays not run, for ``--resume``.
    """
    pending: dict[Any, Job] = {}
    try:
        for job in made.todo:
            # pure=False: the same job of the next round must run again, not be remembered
            text = spec.dumps(job, source=spec.source_hash())
            pending[client.submit(perform, text, pure=False)] = job
        with client.as_current():
            _collect(made, client, pending, on_job, no_worker_seconds)
    except KeyboardInterrupt:
        made.interrupted = True
    finally:
        with contextlib.suppress(Exception):  # the scheduler may have gone
            client.cancel(list(pending), force=True)


def _collect(made: Round, client: Any, pending: dict[Any, Job], on_job: OnJob, patience: float) -> None:
    from distributed import wait

    seen_worker = time.monotonic()
    while pending:
        try:
            done = wait(list(pending), timeout=_LOOK_SECONDS, return_when="FIRST_COMPLETED").done
        except TimeoutError:
            done = set()
        for future in done:
            job = pending.pop(future)
            on_job(job, _kept(made, job, future))
        if done or _workers(client):
            seen_worker = time.monotonic()
        elif time.monotonic() - seen_worker > patience:
            made.notes.append(
                f"no worker for {patience:g} seconds: {len(pending)} jobs did not run; --resume"
            )
            return


def _kept(made: Round, job: Job, future: Any) -> dict[str, Any]:
    if future.status == "finished":
        packed = future.result()
        future.release()  # the scheduler need not keep the bytes
        return made.done(job, packed)
    error = future.exception() if future.status == "error" else None
    result: dict[str, Any] = {"id": job.id, "notebook": job.notebook, "parameters": job.values}
    name = type(error).__name__ if error else str(future.status)
    words = " ".join(str(error or "the cluster lost the job").split())
    return made.note(job, failed(result, name, words))


def _workers(client: Any) -> int:
    """How many workers the scheduler has; 0 when it does not answer either."""
    try:
        return len(client.nthreads())
    except Exception:  # any broken connection means the same here
        return 0
