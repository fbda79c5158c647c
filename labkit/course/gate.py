"""The gate that every notebook passes before it is kept: file format and a chapter's anatomy.

Each rule is a function from a notebook to problems; a problem names its rule and its cell.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from labkit.course.notebook import SKIP_TAG, Cell, Notebook, dumps, is_checked, joined, normalise, parse, tags
from labkit.course.params import (
    PARAMETERS_TAG,
    RESERVED,
    checked_names,
    is_benchmark,
    read_parameters,
    start_call,
)
from labkit.course.source import calls, text_stubs
from labkit.errors import InputError

CHAPTER_NAME = re.compile(r"\d\d_\w+\.ipynb")
_CONFLICT = re.compile(r"^\s*\"?(<{7}|>{7})( |$)", re.MULTILINE)
_MARKDOWN_IMAGE = re.compile(r"!\[([^\]]*)\]\(")
_HTML_IMAGE = re.compile(r"<img\b[^>]*>", re.IGNORECASE)
_HTML_ALT = re.compile(r"\balt\s*=\s*(\"[^\"]+\"|'[^']+')", re.IGNORECASE)
_UNSTORABLE = ("image/png", "image/jpeg", "application/vnd.jupyter.widget-view+json")


@dataclass(frozen=True)
class Problem:
    """One thing to mend: the rule's name, the cell's index (None: the whole file), and what is wrong."""

    rule: str
    cell: int | None
    message: str

    def __str__(self) -> str:
        where = f"cell {self.cell}: " if self.cell is not None else ""
        return f"{where}{self.message} [{self.rule}]"


Problems = Iterator[Problem]


def gate(path: Path, *, anatomy: bool | None = None) -> list[Problem]:
    """All problems of a notebook file; [] when it passes.

    Args:
        path: the file.
        anatomy: check a chapter's anatomy too; None means for files named ``NN_name.ipynb``.

    Raises:
        InputError: when there is no such file.
    """
    if not path.is_file():
        raise InputError("notebook", str(path), "a notebook file that exists")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return [Problem("utf-8", None, "the file is not UTF-8")]
    if _CONFLICT.search(text):
        return [Problem("conflict", None, "the file holds marks of an unresolved merge conflict")]
    try:
        book = parse(text, path.name)
    except InputError as error:
        return [Problem("json", None, str(error))]
    found = list(check_format(book))
    if dumps(normalise(book)) != text:
        found.append(Problem("canonical", None, "not in canonical form; run labkit notebook format"))
    if anatomy if anatomy is not None else CHAPTER_NAME.fullmatch(path.name):
        from labkit.course.anatomy import check_anatomy

        found += check_anatomy(book)
        if any(is_benchmark(source) for _, _, source in _cells(book, "code")):
            found.append(Problem("start", None, "a chapter starts as a benchmark; it calls course.start"))
    return found


def check_format(book: Notebook) -> Problems:
    """The rules for every notebook, chapters and benchmarks alike."""
    for rule in _FORMAT_RULES:
        yield from rule(book)


def _cells(book: Notebook, kind: str) -> Iterator[tuple[int, Cell, str]]:
    for index, cell in enumerate(book["cells"]):
        if cell.get("cell_type") == kind:
            yield index, cell, joined(cell.get("source", ""))


def _ids(book: Notebook) -> Problems:
    if (book.get("nbformat"), book.get("nbformat_minor")) != (4, 5):
        got = f"{book.get('nbformat')}.{book.get('nbformat_minor')}"
        yield Problem("nbformat", None, f"nbformat {got}; expected 4.5")
    seen: set[str] = set()
    for index, cell in enumerate(book["cells"]):
        name = cell.get("id")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            yield Problem("ids", index, "no valid id")
        elif name in seen:
            yield Problem("ids", index, f"the id {name} is used twice")
        else:
            seen.add(name)


def _metadata(book: Notebook) -> Problems:
    metadata = book.get("metadata", {})
    if metadata.get("kernelspec", {}).get("name") != "python3":
        yield Problem("kernelspec", None, "the kernelspec is not python3")
    if "widgets" in metadata:
        yield Problem("widgets", None, "widget state is stored in the metadata")


def _semicolons(book: Notebook) -> Problems:
    for index, _, source in _cells(book, "code"):
        if any(_ends_in_semicolon(source)):
            yield Problem("semicolon", index, "a line ends in a semicolon; it silences nothing in the tests")


def _ends_in_semicolon(source: str) -> Iterator[bool]:
    last = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
                yield last == ";"
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                last = token.string
    except (tokenize.TokenError, IndentationError, SyntaxError):
        # a line magic is no Python; look at the bare text
        yield any(line.rstrip().endswith(";") for line in source.splitlines())


def _checked(book: Notebook) -> Problems:
    for index, cell, _ in _cells(book, "code"):
        outputs = cell.get("outputs", [])
        if not is_checked(cell):
            if outputs or cell.get("execution_count") is not None:
                yield Problem("stray-output", index, "an unchecked cell holds an output or a count")
            continue
        if cell.get("execution_count") is None or not outputs:
            yield Problem(
                "checked", index, "a checked cell holds no count or no output; run labkit notebook refresh"
            )
        for output in outputs:
            data = output.get("data", {})
            png = "data:image/png" in joined(data.get("text/html", ""))
            if png or any(kind in data for kind in _UNSTORABLE):
                yield Problem(
                    "checked", index, "a checked cell holds a picture or a widget, which differs by machine"
                )
            if output.get("output_type") == "error" or output.get("name") == "stderr":
                yield Problem("checked", index, "a checked cell holds an error or text on stderr")


def _conflicts(book: Notebook) -> Problems:
    for index, cell in enumerate(book["cells"]):
        if _CONFLICT.search(joined(cell.get("source", ""))):
            yield Problem("conflict", index, "a mark of an unresolved merge conflict")


def _alt_text(book: Notebook) -> Problems:
    for index, _, source in _cells(book, "markdown"):
        prose = re.sub(r"```.*?```|`[^`]*`", "", source, flags=re.DOTALL)
        if any(not alt.strip() for alt in _MARKDOWN_IMAGE.findall(prose)):
            yield Problem("alt-text", index, "an image without alt text")
        if any(not _HTML_ALT.search(image) for image in _HTML_IMAGE.findall(prose)):
            yield Problem("alt-text", index, "an <img> without alt text")
    for index, _, source in _cells(book, "code"):
        for call in calls(source, "plots.show"):
            alt = next((k.value for k in call.keywords if k.arg == "alt"), None)
            alt = call.args[1] if alt is None and len(call.args) > 1 else alt
            if alt is None or (isinstance(alt, ast.Constant) and not str(alt.value or "").strip()):
                yield Problem("alt-text", index, 'plots.show without alt="..."')


def _tagged(book: Notebook) -> Problems:
    for index, cell in enumerate(book["cells"]):
        if "raises-exception" in tags(cell):
            yield Problem("raises", index, "a cell may not raise; show the error with try/except")
        if SKIP_TAG in tags(cell):
            yield Problem("skipped", index, f"a cell tagged {SKIP_TAG} is never run; let the code decide")


def _parameters(book: Notebook) -> Problems:
    try:
        names = [p.name for p in read_parameters(book)]
    except InputError as error:
        yield Problem("parameters", None, str(error))
        return
    cells = book["cells"]
    benchmark = any(is_benchmark(source) for _, _, source in _cells(book, "code"))
    for name in ("device",) if benchmark else RESERVED:  # a benchmark has no exercises to solve
        if name not in names:
            yield Problem("parameters", None, f"the parameters cell has no {name}")
    at = next(i for i, cell in enumerate(cells) if PARAMETERS_TAG in tags(cell))
    following = next((i for i in range(at + 1, len(cells)) if cells[i]["cell_type"] == "code"), None)
    if following is None or start_call(joined(cells[following]["source"])) is None:
        message = (
            "the code cell after the parameters does not call course.start (a benchmark: notebook.start)"
        )
        yield Problem("start", following, message)
    else:
        checked = checked_names(joined(cells[following]["source"]))
        for name in names:
            if name not in checked and (benchmark or name not in RESERVED):
                message = f"the parameter {name} is never checked; give the start call {name}=({name}, RULE)"
                yield Problem("unchecked", following, message)
    starts = [i for i, _, source in _cells(book, "code") if start_call(source) is not None]
    if len(starts) > 1:
        yield Problem("start", starts[1], "the notebook is started twice")


def _processes(book: Notebook) -> Problems:
    for index, _, source in _cells(book, "code"):
        if re.search(r"^\s*(import|from)\s+multiprocessing\b|ProcessPoolExecutor", source, re.MULTILINE):
            yield Problem("processes", index, "multiprocessing does not work from a notebook on Windows")
        if re.search(r"^\s*[!%]", source, re.MULTILINE):
            yield Problem("magic", index, "a shell escape or magic; the notebooks hold plain Python")


def _text_stubs(book: Notebook) -> Problems:
    texts = text_stubs(book).values()
    if not texts:
        return
    from labkit.check.cuda_text import stub_problems

    for index, literal, text in texts:
        for problem in stub_problems(literal, text):
            yield Problem("text-stub", index, problem)


_FORMAT_RULES: tuple[Callable[[Notebook], Problems], ...] = (
    _ids,
    _metadata,
    _semicolons,
    _checked,
    _conflicts,
    _alt_text,
    _tagged,
    _parameters,
    _processes,
    _text_stubs,
)
