"""The source of an nbgrader course: solutions where the stubs are, a locked test below each exercise.

``nbgrader generate_assignment`` makes the students' version: labkit's own step
(:class:`labkit.classroom.nbgrader_stubs.PutStubs`) puts the course's stubs back, so that a student of an
nbgrader class reads exactly what everybody reads.
"""

from __future__ import annotations

import copy
from typing import Any

from labkit.classroom.answers import exercises_of
from labkit.classroom.solved import solved, stub_of
from labkit.course.anatomy import exercise_names
from labkit.course.notebook import Cell, Notebook, joined, normalise, tags
from labkit.course.params import PARAMETERS_TAG, start_call

SCHEMA = 3
_TEST = """# {id}, 1 point. The course's own check decides; this cell is put back before it is graded.
from labkit.check import find, session

session.current.solve = False
verdict = find("{id}")({answer})
print(verdict)
assert verdict.state == "passed", verdict.state"""

CONFIG = '''"""An nbgrader course made by `labkit release`; run nbgrader in this folder.

    nbgrader generate_assignment NN_slug     students' version in release/NN_slug
    nbgrader autograde NN_slug               of submitted/STUDENT/NN_slug
    nbgrader generate_feedback NN_slug       pages in feedback/STUDENT/NN_slug
"""

import os
import sys

from nbgrader.preprocessors import (
    CheckCellMetadata,
    ClearOutput,
    ComputeChecksums,
    LockCells,
    SaveCells,
)

from labkit.classroom.nbgrader_stubs import PutStubs

# nbgrader starts alembic by its name: this finds it where the environment is not activated
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])

c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "labkit"
c.GenerateAssignment.preprocessors = [
    LockCells,
    PutStubs,
    ClearOutput,
    CheckCellMetadata,
    ComputeChecksums,
    SaveCells,
    CheckCellMetadata,
]
c.Execute.timeout = 300
c.Execute.allow_errors = True
'''


def source_book(book: Notebook, chapter: str) -> Notebook:
    """The instructor's version of a chapter: it earns full marks when it is autograded."""
    from labkit import check

    names = exercise_names(book)
    cells: list[Cell] = []
    for cell in copy.deepcopy(book["cells"]):
        cells.append(cell)
        if cell["cell_type"] != "code":
            continue
        cell["outputs"], cell["execution_count"] = [], None
        source = joined(cell["source"])
        asked = exercises_of(source, names)
        if PARAMETERS_TAG in tags(cell) or start_call(source) is not None:
            # put back before grading: a student's solve = True is worth nothing
            kind = "parameters" if PARAMETERS_TAG in tags(cell) else "start"
            cell["metadata"]["nbgrader"] = _mark(kind, locked=True)
        for name in asked:
            cell["metadata"]["nbgrader"] = _mark(name, solution=True)
            cell["metadata"]["labkit"] = {"stub": source}
            cell["source"] = solved(joined(cell["source"]), name)
        for name in asked:
            text = _TEST.format(id=check.find(name).id, answer=stub_of(source, name)[2])
            test: Cell = {"cell_type": "code", "source": text, "outputs": [], "execution_count": None}
            test["metadata"] = {"nbgrader": _mark(f"test_{name}", grade=True, locked=True, points=1)}
            cells.append(test)
    made = {**copy.deepcopy(book), "cells": cells}
    made["metadata"]["labkit"] = {"release": "nbgrader", "chapter": chapter}
    return normalise(made)


def _mark(name: str, **given: Any) -> dict[str, Any]:
    plain = {"grade": False, "locked": False, "solution": False, "task": False}
    return {"schema_version": SCHEMA, "grade_id": name, **plain, **given}
