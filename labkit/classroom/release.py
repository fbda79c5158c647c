"""What a class is given: student notebooks, teacher notebooks, and the source of an nbgrader course.

Everything is made in memory and looked at before the first file is written: a stub that is already an
answer, an exercise without a solution, or a solution in a student's notebook stops the release. The
manifest ``release.json`` says what the course was then; :mod:`labkit.classroom.drift` compares.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import labkit
from labkit import paths
from labkit.atomic import write_text
from labkit.check.signatures import differences
from labkit.classroom import nbgrader_course
from labkit.classroom.answers import exercises_of
from labkit.classroom.solved import solution_source, solved, stub_of, stub_text
from labkit.course.anatomy import exercise_names
from labkit.course.index import Chapter, choose
from labkit.course.map import exercise_ids
from labkit.course.notebook import Cell, Notebook, dumps, joined, normalise, read
from labkit.errors import refuse, require

MANIFEST, VERSION = "release.json", 1
STUDENT, TEACHER, NBGRADER = "student", "teacher", "nbgrader"
_SHORT = 60  # characters of code below which two people write the same


@dataclass(frozen=True)
class Exercise:
    """An exercise as it was released; the digests are of sources, white space at line ends aside."""

    id: str
    name: str
    stub: str
    solution: str


@dataclass(frozen=True)
class Released:
    """A chapter as it was released; ``text`` is the digest of its cells without their outputs."""

    number: str
    file: str
    text: str
    exercises: tuple[Exercise, ...]


@dataclass(frozen=True)
class Release:
    """All files by their path below the folder, and what they were made from."""

    chapters: tuple[Released, ...]
    files: dict[str, str]

    def manifest(self) -> str:
        """The text of ``release.json``."""
        record = {
            "version": VERSION,
            "labkit": labkit.__version__,
            "chapters": [asdict(chapter) for chapter in self.chapters],
            "files": {name: digest(text) for name, text in sorted(self.files.items())},
        }
        return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def digest(text: str) -> str:
    """SHA-256 of a text, the same for every kind of line end."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def facts(chapter: Chapter, folder: Path | None = None) -> Released:
    """What the course says of a chapter now.

    Raises:
        InputError: a stub or a solution is missing.
    """
    path = chapter.notebook(folder)
    require(path is not None, "chapter", chapter.number, "a chapter whose notebook is there")
    assert path is not None
    book = read(path)
    bare = copy.deepcopy(book)
    for cell in bare["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    found = tuple(
        Exercise(id_, name, digest(stub_text(cell["source"], name)), digest(solution_source(name, name)))
        for name, id_, cell in _exercises(book)
    )
    return Released(chapter.number, path.name, digest(dumps(normalise(bare))), found)


def _exercises(book: Notebook) -> Iterator[tuple[str, str, Cell]]:
    from labkit import check

    names = exercise_names(book)
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            for name in exercises_of(joined(cell["source"]), names):
                yield name, check.find(name).id, cell


def build(
    chapters: str | None = None, *, folder: Path | None = None, executed: bool = False, nbgrader: bool = True
) -> Release:
    """Make a release in memory.

    Args:
        chapters: as for ``labkit course``.
        folder: where the course's notebooks are (tests).
        executed: run the teacher's notebooks, so that their outputs can be read.
        nbgrader: with the source of an nbgrader course; nbgrader itself is not needed for that.

    Raises:
        InputError: for the first thing of the course that is not fit to be handed out.
    """
    made, files = [], dict[str, str]()
    for chapter in choose(chapters, folder):
        path = chapter.notebook(folder)
        assert path is not None
        _fit(chapter, path)
        book = read(path)
        made.append(facts(chapter, folder))
        student = student_book(book, chapter)
        _no_leak(path.name, student, exercise_names(book))
        files[f"{STUDENT}/{path.name}"] = dumps(student)
        files[f"{TEACHER}/{path.name}"] = dumps(teacher_book(book, chapter, executed=executed))
        if nbgrader:
            source = nbgrader_course.source_book(book, chapter.number)
            files[f"{NBGRADER}/source/{path.stem}/{path.name}"] = dumps(source)
    if nbgrader:
        files[f"{NBGRADER}/nbgrader_config.py"] = nbgrader_course.CONFIG
    return Release(tuple(made), files)


def write(release: Release, out: Path) -> None:
    """Write a release; files of an older one that are not in it go, what others put there stays.

    Raises:
        InputError: ``out`` is a file, lies in the course, or holds something that is no release.
    """
    require(not out.exists() or out.is_dir(), "--out", f"{out} is a file", "a folder")
    home = paths.notebooks_dir().resolve()
    inside = out.resolve() == home or home in out.resolve().parents
    require(not inside, "--out", str(out), "a folder outside the course's notebooks")
    known = out.is_dir() and (out / MANIFEST).is_file()
    free = not out.exists() or known or not any(out.iterdir())
    require(free, "--out", f"{out} holds other files", "a new or empty folder, or an older release")
    before = read_manifest(out)["files"] if known else {}
    try:
        for name, text in release.files.items():
            write_text(out / name, text)
        for name in set(before) - set(release.files):
            stale = out / name
            if out.resolve() in stale.resolve().parents:
                stale.unlink(missing_ok=True)
        write_text(out / MANIFEST, release.manifest())
    except OSError as error:
        refuse("--out", f"{error.strerror}: {error.filename}", "a folder that can be written")


def read_manifest(out: Path) -> dict[str, Any]:
    """The manifest of a release; InputError when there is none or it cannot be read."""
    try:
        found = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        good = found["version"] == VERSION
        good = good and isinstance(found["files"], dict) and isinstance(found["chapters"], list)
    except (OSError, ValueError, KeyError, TypeError):
        good, found = False, {}
    require(good, "FOLDER", f"{out} without a {MANIFEST} of this version", "a folder made by labkit release")
    return found


def student_book(book: Notebook, chapter: Chapter) -> Notebook:
    """Stubs, no outputs at all: a stored output may give an answer away."""
    made = _bare(book)
    made["metadata"]["labkit"] = {"release": STUDENT, "chapter": chapter.number}
    return normalise(made)


def teacher_book(book: Notebook, chapter: Chapter, *, executed: bool = False) -> Notebook:
    """The same with each solution below its exercise; ``executed`` with all outputs, solutions checked.

    Raises:
        InputError: executed, and a cell failed.
    """
    from labkit import solutions

    made = _bare(book)
    cells: list[Cell] = []
    by_id: dict[str, list[str]] = {cell["id"]: [] for cell in made["cells"]}
    for name, id_, cell in _exercises(book):
        shown = solutions.show(name)
        kind = "c++" if shown.comment == "//" else "python"
        by_id[cell["id"]].append(f"**Solution of {id_}: {shown.title}**\n\n```{kind}\n{shown.source}\n```")
    for cell in made["cells"]:
        cells.append(cell)
        cells += [
            {"cell_type": "markdown", "metadata": {"tags": ["solution"]}, "source": text}
            for text in by_id[cell["id"]]
        ]
    made["cells"] = cells
    made["metadata"]["labkit"] = {"release": TEACHER, "chapter": chapter.number}
    plain = normalise(made)
    if not executed:
        return plain
    from labkit.course.execute import run_notebook

    run = run_notebook(plain, {"device": "cpu", "solve": True})
    if run.failure is not None:
        refuse(f"chapter {chapter.number}", run.failure.summary(), "a chapter that runs", "labkit course")
    done: Notebook = run.book
    done["metadata"]["labkit"] = made["metadata"]["labkit"]
    return done


def _bare(book: Notebook) -> Notebook:
    made = copy.deepcopy(book)
    for cell in made["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return made


def _fit(chapter: Chapter, path: Path) -> None:
    """Refuse a chapter whose notebook, checks and solutions do not fit each other."""
    book = read(path)
    asked = sorted(id_ for _, id_, _ in _exercises(book))
    ids = sorted(exercise_ids(chapter.number))
    if asked != ids:
        refuse(path.name, f"exercises {', '.join(asked)}", f"those of its checks: {', '.join(ids)}")
    if wrong := differences(path):
        refuse(path.name, wrong[0], "stubs that fit their solutions")
    for name, id_, cell in _exercises(book):
        text = joined(cell["source"])
        if not is_stub_text(text, name):
            refuse(path.name, f"{id_} {name}: the notebook holds an answer", "a stub")
        solved(text, name)


def is_stub_text(source: str, name: str) -> bool:
    """Is what the cell hands to the check a stub? Read without running the cell."""
    import ast

    from labkit import check
    from labkit.check.stub import is_blank

    node = ast.parse(stub_text(source, name)).body[0]
    if isinstance(node, ast.Assign):
        try:
            return is_blank(ast.literal_eval(node.value), check.find(name).text_stub)
        except ValueError:
            return False
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), "<stub>", "exec"), scope)
    return is_blank(scope[stub_of(source, name)[2]])


def _no_leak(file: str, student: Notebook, names: list[str]) -> None:
    """No solution, however it is indented, stands in what students get."""
    plain = "".join("\n".join(joined(cell["source"]) for cell in student["cells"]).split())
    for name in names:
        for part in solution_source(name, name).split("\n\n\n"):
            body = "".join(part.split("\n", 1)[-1].split())
            if len(body) >= _SHORT and body in plain:
                refuse(file, f"the solution of {name} stands in it", "a notebook that gives no answer away")
