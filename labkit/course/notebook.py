"""Notebook files in one canonical form: what git sees changes only when the content does.

Outputs are kept only in *checked* cells: those with the line ``# NBVAL_CHECK_OUTPUT``, whose
stored output every test run compares.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from labkit.atomic import write_text
from labkit.errors import refuse

CHECK_MARK = "# NBVAL_CHECK_OUTPUT"
CHECK_TAG = "nbval-check-output"
SKIP_TAG = "skip-execution"
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "name": "python"}
_CELL_METADATA = ("deletable", "editable", "jupyter", "labkit", "nbgrader", "slideshow", "tags")

Cell = dict[str, Any]
Notebook = dict[str, Any]


def joined(source: str | list[str]) -> str:
    """nbformat keeps text as a string or as a list of lines; here it is always a string."""
    return source if isinstance(source, str) else "".join(source)


def is_checked(cell: Cell) -> bool:
    """True for a code cell whose output is compared by the tests."""
    if cell.get("cell_type") != "code":
        return False
    lines = joined(cell.get("source", "")).splitlines()
    return CHECK_TAG in tags(cell) or any(line.strip() == CHECK_MARK for line in lines)


def tags(cell: Cell) -> list[str]:
    """The cell's tags, [] when there are none."""
    found = cell.get("metadata", {}).get("tags", [])
    return [str(tag) for tag in found] if isinstance(found, list) else []


def parse(text: str, name: str = "notebook") -> Notebook:
    """Read notebook JSON; InputError (naming the line) when it is not one of nbformat 4."""
    try:
        book = json.loads(text)
    except json.JSONDecodeError as error:
        refuse(name, f"broken JSON in line {error.lineno}: {error.msg}", "a notebook file")
    if not isinstance(book, dict) or not isinstance(book.get("cells"), list) or book.get("nbformat") != 4:
        refuse(name, "JSON that is no notebook", "a notebook of nbformat 4")
    return book


def read(path: Path) -> Notebook:
    """Read a notebook file; InputError when it is missing or broken."""
    try:
        return parse(path.read_text(encoding="utf-8"), path.name)
    except FileNotFoundError:
        return refuse("notebook", str(path), "a notebook file that exists")
    except UnicodeDecodeError:
        return refuse("notebook", f"{path.name} is not UTF-8", "a notebook file")


def normalise(book: Notebook) -> Notebook:
    """The canonical form of a notebook: a new dictionary; normalising twice changes nothing.

    Ids come from the cell's content, so converting a script again gives the same file.
    Kept of the metadata: kernelspec python3, the language, and a cell's tags and teaching fields.
    """
    cells = [_normal_cell(cell) for cell in book["cells"]]
    seen: dict[str, int] = {}
    for cell in cells:
        digest = hashlib.sha256(f"{cell['cell_type']}\n{cell['source']}".encode()).hexdigest()[:10]
        count = seen[digest] = seen.get(digest, 0) + 1
        cell["id"] = digest if count == 1 else f"{digest}-{count}"
    metadata: dict[str, Any] = {"kernelspec": dict(KERNELSPEC), "language_info": dict(LANGUAGE)}
    for key in ("labkit", "title"):
        if key in book.get("metadata", {}):
            metadata[key] = book["metadata"][key]
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _normal_cell(cell: Cell) -> Cell:
    source = joined(cell.get("source", "")).replace("\r\n", "\n").replace("\r", "\n").strip("\n").rstrip()
    kept = {k: v for k, v in cell.get("metadata", {}).items() if k in _CELL_METADATA}
    if "tags" in kept:
        kept["tags"] = sorted(set(tags(cell)))
        if not kept["tags"]:
            del kept["tags"]
    out: Cell = {"cell_type": cell.get("cell_type", "raw"), "id": "", "metadata": kept, "source": source}
    if out["cell_type"] == "code":
        checked = is_checked(cell)
        out["execution_count"] = cell.get("execution_count") if checked else None
        outputs = cell.get("outputs", []) if checked else []
        out["outputs"] = [_normal_output(o, out["execution_count"]) for o in outputs]
    elif cell.get("attachments"):
        out["attachments"] = cell["attachments"]
    return out


def _normal_output(output: dict[str, Any], count: int | None) -> dict[str, Any]:
    out = {k: v for k, v in output.items() if k != "transient"}
    if "metadata" in out:
        out["metadata"] = {}
    if out.get("output_type") == "execute_result":
        out["execution_count"] = count
    if "text" in out:
        out["text"] = joined(out["text"])
    if isinstance(out.get("data"), dict):
        out["data"] = {
            kind: value if kind.endswith("json") else joined(value) for kind, value in out["data"].items()
        }
    return out


def dumps(book: Notebook) -> str:
    """Canonical text: sorted keys, one-space indent, text as lists of lines, UTF-8, one final newline."""

    def lines(text: str) -> list[str]:
        # nbformat splits at \n only; str.splitlines would also split at form feeds
        return re.findall(r"[^\n]*\n|[^\n]+", text)

    out = json.loads(json.dumps(book))
    for cell in out["cells"]:
        cell["source"] = lines(joined(cell["source"]))
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = lines(joined(output["text"]))
            for kind, value in output.get("data", {}).items():
                if isinstance(value, str) and not kind.endswith("json"):
                    output["data"][kind] = lines(value)
    return json.dumps(out, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def format_file(path: Path) -> bool:
    """Rewrite ``path`` in canonical form; True when that changed it."""
    text = path.read_bytes().decode("utf-8") if path.is_file() else ""
    new = dumps(normalise(read(path)))
    if new != text:
        write_text(path, new)
    return new != text


def refresh(path: Path, *, timeout: float = 300.0) -> None:
    """Run the notebook (parameters as written, solve off) and store the outputs of its checked cells.

    Raises:
        InputError: when a cell fails; the file is left as it was.
    """
    from labkit.course.execute import run_notebook

    book = normalise(read(path))
    run = run_notebook(book, {}, timeout=timeout)
    if run.failure is not None:
        refuse(path.name, f"cell {run.failure.cell} failed: {run.failure.summary()}", "a notebook that runs")
    ran = [cell for cell in run.book["cells"] if "injected-parameters" not in tags(cell)]
    for cell, done in zip(book["cells"], ran, strict=True):
        if is_checked(cell):
            cell["outputs"] = done["outputs"]
            cell["execution_count"] = done["execution_count"]
    write_text(path, dumps(normalise(book)))
