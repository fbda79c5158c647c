"""A suite file: notebooks × parameters, checked as a whole before any of it runs.

version: 1
name: quick                 # default: the file's name
device: auto                # of notebooks that have the parameter device
cell_timeout: 120           # seconds that one cell may take
timeout: 600                # seconds that one job may take
exclusive: true             # one job at a time on a machine: two at once would time each other
parameters: {samples: 20}   # for the notebooks that have them
jobs:
  - notebook: bench/gemm.ipynb      # from the suite's folder, else from the notebooks'
    name: gemm-small                # default: the notebook's name
    parameters: {quick: true}
    matrix: {bits: [3, 4]}          # one job for each combination
    timeout: 60
"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from labkit import paths
from labkit.course.execute import CELL_TIMEOUT
from labkit.course.notebook import Notebook, read
from labkit.course.params import Parameter, assign, coerce, read_parameters
from labkit.errors import InputError, refuse, require

JOB_TIMEOUT = 1800.0
MOST_JOBS = 1000
_NAME = re.compile(r"[\w][\w .,=+-]{0,79}")

Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=80)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _JobEntry(_Model):
    notebook: Annotated[str, Field(min_length=1)]
    name: Name | None = None
    device: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    matrix: dict[str, list[Any]] = Field(default_factory=dict)
    timeout: Seconds | None = None
    cell_timeout: Seconds | None = None


class _SuiteFile(_Model):
    version: int
    name: Name | None = None
    device: str = "auto"
    timeout: Seconds = JOB_TIMEOUT
    cell_timeout: Seconds = CELL_TIMEOUT
    exclusive: bool = True
    parameters: dict[str, Any] = Field(default_factory=dict)
    jobs: Annotated[list[_JobEntry], Field(min_length=1)]


@dataclass(frozen=True)
class Job:
    """One notebook with one set of values; everything that a machine needs to run it.

    Attributes:
        id: name of its folder, unique in the suite and safe on every file system.
        notebook: name of the file. book: its content.
        values: parameters, each of the right type. device: "auto", "cpu" or "cuda"; "" when the
            notebook has no such parameter.
        timeout, cell_timeout: seconds.
        exclusive: wait for any other job on the same machine.
    """

    id: str
    notebook: str
    book: Notebook
    values: dict[str, Any]
    device: str
    timeout: float
    cell_timeout: float
    exclusive: bool = True


@dataclass(frozen=True)
class Suite:
    """A checked suite; reading one has run nothing."""

    name: str
    path: Path
    jobs: tuple[Job, ...]


def load(path: Path, *, device: str | None = None) -> Suite:
    """Read and check a suite.

    Args:
        device: instead of the suite's own.

    Raises:
        InputError: for the first thing that is wrong; names the job, the field or the parameter.
    """
    file = _parse(path)
    require(file.version == 1, f"{path.name}: version", file.version, "1")
    name = file.name or path.stem
    require(bool(_NAME.fullmatch(name)), f"{path.name}: name", repr(name), "letters, digits, spaces, - and _")
    used: set[str] = set()
    jobs: list[Job] = []
    for i, entry in enumerate(file.jobs):
        where = f"{path.name}: jobs[{i}]"
        found = _jobs(where, path, file, entry, device)
        for job in found:
            used |= set(job.values)
            jobs.append(job)
        require(
            len(jobs) <= MOST_JOBS,
            f"{path.name}: jobs",
            f"more than {MOST_JOBS}",
            "fewer",
            "a smaller matrix",
        )
    for unknown in set(file.parameters) - used:
        refuse(f"{path.name}: parameters", repr(unknown), "a parameter that one of the notebooks has")
    _distinct(path.name, jobs)
    return Suite(name, Path(path).absolute(), tuple(jobs))


def _parse(path: Path) -> _SuiteFile:
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            "SUITE", f"{path}: {error.strerror or 'unreadable'}", "a suite file (YAML)"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(path.name, "bytes that are no UTF-8", "a suite file (YAML)") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        words = " ".join(str(error).split())
        raise InputError(path.name, f"no YAML ({words[:300]})", "a suite file") from error
    require(isinstance(value, dict), path.name, type(value).__name__, "a mapping with version and jobs")
    try:
        return _SuiteFile.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = path.name
        for part in first["loc"]:
            place += f"[{part}]" if isinstance(part, int) else f": {part}"
        if first["type"] == "extra_forbidden":
            model = _JobEntry if len(first["loc"]) > 1 else _SuiteFile
            refuse(place, "an unknown field", "one of " + ", ".join(model.model_fields))
        if first["type"] == "missing":
            refuse(place, "nothing", "a value")
        refuse(place, repr(first["input"])[:200], first["msg"].removeprefix("Input should be "))


def _jobs(where: str, path: Path, file: _SuiteFile, entry: _JobEntry, device: str | None) -> list[Job]:
    notebook = _find(where, path, entry.notebook)
    book = read(notebook)
    try:
        known = read_parameters(notebook)
    except InputError as error:
        if "0 cells" not in error.received:
            raise
        known = []
    names = {p.name: p for p in known}
    chosen = _device(where, entry, file, device, names)
    fixed = {name: value for name, value in file.parameters.items() if name in names} | entry.parameters
    for name in entry.matrix:
        require(name not in entry.parameters, where, f"{name} in parameters and in matrix", "one of the two")
        require(len(entry.matrix[name]) > 0, f"{where}: matrix: {name}", "no value", "a list of values")
    own = [p for p in known if p.name != "device"]
    elsewhere = any("device" in one for one in (entry.parameters, entry.matrix, file.parameters))
    require(not elsewhere, f"{where}: parameters", "device", "device as a field of the job or of the suite")
    sizes = math.prod(len(values) for values in entry.matrix.values())
    require(sizes <= MOST_JOBS, f"{where}: matrix", f"{sizes} combinations", f"at most {MOST_JOBS}")
    base = entry.name or Path(entry.notebook).stem
    made = []
    for combination in itertools.product(*entry.matrix.values()):
        varied = dict(zip(entry.matrix, combination, strict=True))
        values = _checked(where, fixed | varied, own)
        label = ",".join(f"{name}={values[name]}" for name in varied)
        made.append(
            Job(
                id=_safe(f"{base} {label}".strip()),
                notebook=notebook.name,
                book=book,
                values=values,
                device=chosen,
                timeout=entry.timeout or file.timeout,
                cell_timeout=entry.cell_timeout or file.cell_timeout,
                exclusive=file.exclusive,
            )
        )
    return made


def _find(where: str, suite: Path, name: str) -> Path:
    for home in (suite.parent, paths.notebooks_dir()):
        if (found := home / name).is_file():
            return found
    return refuse(
        f"{where}: notebook", repr(name), f"a notebook in {suite.parent} or in {paths.notebooks_dir()}"
    )


def _device(
    where: str, entry: _JobEntry, file: _SuiteFile, asked: str | None, names: dict[str, Parameter]
) -> str:
    given = asked or entry.device or file.device
    require(given in ("auto", "cpu", "cuda"), f"{where}: device", repr(given), "auto, cpu or cuda")
    if "device" in names:
        return given
    own = entry.device is not None
    require(not own, f"{where}: device", repr(entry.device), "no device: the notebook has no such parameter")
    return ""


def _checked(where: str, given: dict[str, Any], known: list[Parameter]) -> dict[str, Any]:
    """Values of the right type, all of them."""
    by_name = {p.name: p for p in known}
    out = {}
    for name, value in given.items():
        try:
            if name not in by_name:
                assign({name: value}, {where: known})  # refuses; says what it may have been meant to be
            out[name] = _value(by_name[name], value)
        except InputError as error:
            place = f"{where}: {name if name in by_name else 'parameters'}"
            raise InputError(place, error.received, error.expected, error.fix) from None
    return out


def _value(wanted: Parameter, value: Any) -> Any:
    """One value. YAML has types of its own, so text is no number here, and 1 is not true."""
    fits = {"str": str, "bool": bool, "int": int, "float": int | float, "list": list}[wanted.type]
    right = isinstance(value, fits) and (wanted.type == "bool" or not isinstance(value, bool))
    expected = wanted.rule.expected() if wanted.rule else f"{wanted.type}, as {wanted.default!r} is"
    require(right, wanted.name, f"{value!r} ({type(value).__name__})", expected)
    made = coerce(wanted, value)
    try:
        json.dumps(made, allow_nan=False)
    except (TypeError, ValueError):
        refuse(wanted.name, repr(value), "values that JSON has: numbers, text, true, false, lists of them")
    return made


def _safe(name: str) -> str:
    """A folder's name: letters and digits of any script, and a few signs; no end that Windows drops."""
    return re.sub(r"[^\w=,+-]+", "-", name).strip("-")[:80] or "job"


_DEVICES = {"con", "prn", "aux", "nul", *(f"{kind}{n}" for kind in ("com", "lpt") for n in range(1, 10))}


def _distinct(name: str, jobs: list[Job]) -> None:
    """Names that differ by more than case: Windows and macOS hold such names for the same."""
    seen: dict[str, Job] = {}
    for job in jobs:
        folded = job.id.casefold()
        require(folded not in _DEVICES, f"{name}: job", job.id, "a name that Windows has no device for")
        require(folded not in seen, f"{name}: job", f"{job.id} twice", "a name for each job", "name: …")
        seen[folded] = job
