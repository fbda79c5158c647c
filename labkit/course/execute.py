"""Run one notebook in a fresh kernel of this interpreter, and prove that every code cell completed.

papermill sets the parameters and drives the cells; around it stand a pinned kernel, a time-out
a cell, and our own count of completed cells: papermill ends quietly when a cell calls sys.exit(0).
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.check.session import LOG_VARIABLE
from labkit.course.notebook import SKIP_TAG, Notebook, dumps, joined, tags
from labkit.scratch import Scratch

CELL_TIMEOUT = 300.0
_IPC_PATH_LIMIT = 80
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ENGINE = "labkit"

OnCell = Callable[[int, int], None]


@dataclass(frozen=True)
class Failure:
    """Why a notebook did not complete.

    Attributes:
        cell: index in the executed notebook (papermill's injected cell counts).
        number: which code cell it is, from 1, or 0 outside the cells; ``of``: how many there are.
    """

    cell: int
    number: int
    of: int
    source: str
    ename: str
    evalue: str
    traceback: str

    @property
    def where(self) -> str:
        """Such as ``code cell 3 of 9``; a failure of files or of the kernel's start has no cell."""
        return f"code cell {self.number} of {self.of}" if self.number else "outside the cells"

    def summary(self) -> str:
        """One line: the error's name and message."""
        first = self.evalue.strip().splitlines()[0] if self.evalue.strip() else ""
        return f"{self.ename}: {first}" if first else self.ename


@dataclass
class Run:
    """One executed notebook; ``log`` holds what course.start and the checks reported."""

    book: Notebook
    failure: Failure | None
    done: int
    total: int
    seconds: float
    log: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class _Progress:
    """Shared with the papermill engine: which cells completed, and what stopped the run."""

    on_cell: OnCell | None
    total: int
    launch: dict[str, Any]
    scratch: Path
    timeout: float
    done: set[int] = field(default_factory=set)
    book: Any = None
    at: int = 0
    error: BaseException | None = None

    def completed(self, index: int) -> None:
        self.done.add(index)
        if self.on_cell:
            self.on_cell(len(self.done), self.total)


def code_cells(book: Notebook) -> list[int]:
    """Indices of the code cells that hold code; an empty cell has nothing to complete."""
    return [
        index
        for index, cell in enumerate(book["cells"])
        if cell["cell_type"] == "code" and joined(cell["source"]).strip()
    ]


def run_notebook(
    book: Notebook,
    parameters: dict[str, Any],
    *,
    timeout: float = CELL_TIMEOUT,
    cwd: Path | None = None,
    results: Path | None = None,
    on_cell: OnCell | None = None,
) -> Run:
    """Execute a notebook and say how far it came; only an interrupt raises.

    Args:
        book: the notebook; it is not changed.
        parameters: values injected after the cell tagged ``parameters``.
        timeout: seconds that one cell may take.
        cwd: the kernel's working folder (default: a scratch folder, removed afterwards).
        results: what ``labkit.paths.results_dir()`` is in the kernel (default: a scratch folder).
        on_cell: called as on_cell(done, total) after each code cell.
    """
    started = time.perf_counter()
    with Scratch("lk") as scratch:
        log = scratch / "log.jsonl"
        launch = {"env": _environment(scratch, log, results), "cwd": str(cwd or _made(scratch / "work"))}
        total = len(code_cells(book)) + bool(parameters)
        state = _Progress(on_cell, total, launch, scratch, timeout)
        _drive(book, parameters, state)
        executed = _plain(state.book) if state.book is not None else copy.deepcopy(book)
        failure = _failure(executed, state)
        return Run(executed, failure, len(state.done), total, time.perf_counter() - started, _read_log(log))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _environment(scratch: Path, log: Path, results: Path | None) -> dict[str, str]:
    """The kernel's environment: this checkout importable, nobody's own progress or IPython set-up touched."""
    root = str(Path(__file__).resolve().parents[2])
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    env.setdefault("LABKIT_CACHE", str(paths.cache_dir()))  # compiled kernels are nobody's state
    env["LABKIT_STATE"] = str(_made(scratch / "state"))
    # the kernel is killed at the end, so nothing in it runs that would remove its temporary files
    env |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(_made(scratch / "tmp")))
    env["IPYTHONDIR"] = str(_made(scratch / "ipython"))
    env[LOG_VARIABLE] = str(log)
    # the kernel talks to no debugger here, and would print a note about frozen modules otherwise
    env["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    env["LABKIT_RESULTS"] = str(results if results is not None else scratch / "results")
    return env


def _drive(book: Notebook, parameters: dict[str, Any], state: _Progress) -> None:
    """Hand the notebook to papermill; every end but an interrupt is kept in ``state``."""
    import nbformat

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # third-party import and event-loop notes are not the user's business
        from papermill.execute import execute_notebook

        _register_engine()
        logging.getLogger("papermill").setLevel(logging.CRITICAL)
        # a file in a folder of our own making: papermill takes braces in a path for a template
        source = state.scratch / "in.ipynb"
        source.write_text(dumps(book), encoding="utf-8", newline="\n")
        name = str(source).replace("{", "{{").replace("}", "}}")
        try:
            execute_notebook(
                name,
                None,
                parameters,
                engine_name=_ENGINE,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                request_save_on_cell_execute=False,
                labkit_state=state,
            )
        except KeyboardInterrupt:
            raise
        except (Exception, SystemExit) as error:
            # errors inside a cell come with the cell's own output; the rest is kept here
            if not isinstance(error, nbformat.ValidationError) and state.error is None:
                state.error = error


def _register_engine() -> None:
    from papermill.engines import papermill_engines

    if _ENGINE not in papermill_engines._engines:
        from labkit.course.engine import LabkitEngine

        papermill_engines.register(_ENGINE, LabkitEngine)


def _plain(node: Any) -> Notebook:
    """A notebook without nbformat's classes and without papermill's and the widgets' bookkeeping."""
    book: Notebook = json.loads(json.dumps(node))
    book["metadata"].pop("widgets", None)
    book["metadata"].pop("papermill", None)
    for cell in book["cells"]:
        cell["source"] = joined(cell["source"])
        cell["metadata"].pop("papermill", None)
        cell["metadata"].pop("execution", None)
    return book


def _read_log(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    out = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            out.append(json.loads(line))
        except ValueError:  # the kernel died while it wrote this line
            continue
    return out


def _failure(book: Notebook, state: _Progress) -> Failure | None:
    """The first code cell with an error, or the one where the run ended although cells remain."""
    wanted = code_cells(book)
    for number, index in enumerate(wanted, 1):
        cell = book["cells"][index]
        for output in cell.get("outputs", []):
            if output.get("output_type") == "error":
                text = "\n".join(output.get("traceback", []))
                return _made_failure(book, index, number, wanted, output["ename"], output["evalue"], text)
        if index not in state.done:
            ename, evalue = _why_stopped(state)
            if SKIP_TAG in tags(cell):
                ename, evalue = "Skipped", f"the cell is tagged {SKIP_TAG} and did not run"
            return _made_failure(book, index, number, wanted, ename, evalue, "")
    if state.error is not None:
        return Failure(0, 0, len(wanted), "", type(state.error).__name__, str(state.error), "")
    return None


def _made_failure(
    book: Notebook, index: int, number: int, wanted: list[int], ename: str, evalue: str, traceback: str
) -> Failure:
    if ename == "SystemExit":
        evalue = f"the cell ended the notebook (exit {evalue or 0}); the cells below did not run"
    source = joined(book["cells"][index]["source"])
    return Failure(index, number, len(wanted), source, ename, _ANSI.sub("", evalue), _ANSI.sub("", traceback))


def _why_stopped(state: _Progress) -> tuple[str, str]:
    name = type(state.error).__name__ if state.error is not None else "Unfinished"
    if name == "CellTimeoutError":
        return name, f"the cell took longer than {pinned_timeout(state.timeout)} seconds"
    if name == "DeadKernelError":
        return name, "the kernel died in this cell (killed, out of memory, or a crash in native code)"
    if state.error is None:
        return name, "the notebook stopped before this cell"
    return name, str(state.error)


def pinned_timeout(seconds: float) -> int:
    """nbclient counts whole seconds and takes 0 for "no limit"."""
    return max(1, math.ceil(seconds))


def ipc_prefix(scratch: Path) -> str | None:
    """A socket path where the system has them and it is short enough; None means TCP.

    Two runs side by side can be given the same free TCP port; files of one's own never clash.
    """
    prefix = scratch / "k"
    ascii_only = str(prefix).isascii()
    return (
        str(prefix) if sys.platform != "win32" and ascii_only and len(str(prefix)) < _IPC_PATH_LIMIT else None
    )
