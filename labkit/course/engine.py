"""The papermill engine of the course: nbclient with a kernel we own, count and always end."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import sys
from typing import Any

import psutil
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_event_loop, run_sync
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine

from labkit.course.execute import ipc_prefix, pinned_timeout
from labkit.course.output import CellText, finish

KERNEL_START_SECONDS = 120
# a loaded machine can take seconds to hand over a cell's last output
OUTPUT_WAIT_SECONDS = 60


class PinnedKernel(AsyncKernelManager):
    """Always this interpreter: a ``python3`` kernelspec in the home folder may name another one."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """The spec, made here instead of looked up."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python", interrupt_mode="signal")


class _Client(PapermillNotebookClient):
    """Counts the cells that really completed; an exception of any kind leaves its cell uncounted."""

    state: Any = None
    text: CellText = CellText()
    replied: bool = False

    def execute_cell(self, cell: Any, cell_index: int, *args: Any, **kwargs: Any) -> Any:
        """Run one cell; same contract as nbclient's."""
        self.state.at = cell_index
        self.text, self.replied = CellText(), False
        try:
            result = super().execute_cell(cell, cell_index, *args, **kwargs)
        finally:
            finish(cell.get("outputs", []))
        # nbclient returns in the same way for a cell that it skips: text, empty, tagged skip-execution
        if self.replied:
            self.state.completed(cell_index)
        return result

    def note_reply(self, **_: Any) -> None:
        """The kernel has answered: the cell really ran."""
        self.replied = True

    def output(self, outs: Any, msg: Any, display_id: Any, cell_index: int) -> Any:
        """Keep one output; same contract as nbclient's."""
        made = super().output(outs, msg, display_id, cell_index)
        if made is not None:
            self.text.take(outs)
        return made


class LabkitEngine(Engine):
    """Registered with papermill under the name ``labkit``."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **kwargs: Any) -> None:
        """Run all cells; the notebook and the first error land in ``kwargs["labkit_state"]``."""
        state = kwargs["labkit_state"]
        state.book = nb_man.nb
        kernel = PinnedKernel(kernel_name=kernel_name)
        kernel.connection_file = str(state.scratch / "kernel.json")
        if prefix := ipc_prefix(state.scratch):
            kernel.transport, kernel.ip = "ipc", prefix
        client = _Client(
            nb_man,
            km=kernel,
            timeout=pinned_timeout(state.timeout),
            startup_timeout=KERNEL_START_SECONDS,
            iopub_timeout=OUTPUT_WAIT_SECONDS,
            store_widget_state=False,
            coalesce_streams=False,  # quadratic in a line's length; labkit.course.output does it instead
        )
        client.state = state
        client.on_cell_executed = client.note_reply
        try:
            client.execute(**state.launch)
        except Exception as error:
            state.error = error
            raise
        finally:
            # papermill adds its own error cells to this very object afterwards
            state.book = copy.deepcopy(nb_man.nb)
            _end(kernel, client)


def _end(kernel: PinnedKernel, client: _Client) -> None:
    """Stop tasks, channels and kernel, whatever happened; also after Ctrl-C during the kernel's start."""
    _cancel_tasks()
    if client.kc is not None:
        client.kc.stop_channels()
    if kernel.has_kernel:
        run_sync(kernel.shutdown_kernel)(now=True)
    kernel.cleanup_resources()
    _kill_half_started(kernel.connection_file)


def _cancel_tasks() -> None:
    """An interrupt leaves nbclient's watchers waiting; they would print a traceback at exit."""
    loop = ensure_event_loop()
    if loop.is_running():
        return  # called from a notebook: this loop is Jupyter's own, the watchers live elsewhere
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _kill_half_started(connection_file: str) -> None:
    """A kernel whose start was interrupted is not known to its manager yet; find it by its file."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if connection_file in child.cmdline():
                    child.kill()
                    child.wait(timeout=10)
