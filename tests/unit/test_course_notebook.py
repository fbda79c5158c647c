from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from notebook_builder import PARAMETERS, book, chapter, code, full_chapter, text
from typer.testing import CliRunner

from labkit.cli import app
from labkit.course.anatomy import visible_code_lines, words
from labkit.course.gate import gate
from labkit.course.notebook import dumps, format_file, normalise, read, refresh
from labkit.errors import InputError

Cells = list[dict[str, Any]]
# the start call of the small chapter leaves this one out
CHECKED = PARAMETERS.replace('\nnote = "a"', "")


def _write(folder: Path, cells: Cells, name: str = "00_x.ipynb") -> Path:
    path = folder / name
    path.write_text(dumps(book(*cells)), encoding="utf-8")
    return path


def _rules(path: Path, **options: Any) -> list[str]:
    return sorted({problem.rule for problem in gate(path, **options)})


_source = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
_cell = st.builds(
    lambda kind, source: {**code(source), "cell_type": kind}, st.sampled_from(["code", "markdown"]), _source
)


@given(st.lists(_cell, max_size=8))
def test_normalising_twice_changes_nothing_and_the_result_is_valid(cells: Cells) -> None:
    once = normalise(
        {"cells": cells, "metadata": {"widgets": {}, "papermill": 1}, "nbformat": 4, "nbformat_minor": 2}
    )
    again = json.loads(dumps(once))
    assert dumps(normalise(again)) == dumps(once)
    nbformat.validate(nbformat.from_dict(again))
    ids = [cell["id"] for cell in once["cells"]]
    assert len(set(ids)) == len(ids)


def test_normal_form_keeps_what_teaches_and_drops_what_tools_leave() -> None:
    cell = code("x = 1\n# NBVAL_CHECK_OUTPUT\n\n", "b", "a", "a")
    cell["metadata"] |= {"execution": {}, "collapsed": True, "jupyter": {"source_hidden": True}}
    cell["execution_count"] = 7
    cell["outputs"] = [
        {"output_type": "execute_result", "execution_count": 2, "metadata": {"x": 1}, "data": {}}
    ]
    plain = code("y = 2")
    plain["execution_count"], plain["outputs"] = (
        8,
        [{"output_type": "stream", "name": "stdout", "text": "hi"}],
    )
    first, second = book(cell, plain)["cells"]
    assert first["metadata"] == {"jupyter": {"source_hidden": True}, "tags": ["a", "b"]}
    assert first["source"].endswith("OUTPUT")
    assert first["outputs"][0] == {
        "output_type": "execute_result",
        "execution_count": 7,
        "metadata": {},
        "data": {},
    }
    assert (second["execution_count"], second["outputs"]) == (None, [])


def test_ids_follow_content_so_that_an_edit_touches_one_cell() -> None:
    before = book(code("a"), code("b"), code("b"))["cells"]
    after = book(code("new"), code("a"), code("b"), code("b"))["cells"]
    assert [c["id"] for c in after[1:]] == [c["id"] for c in before]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"cells": [], "nbformat": 3}', "\udcff"])
def test_files_that_are_no_notebooks_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.ipynb"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError):
        read(path)
    assert gate(path)
    with pytest.raises(InputError):
        read(tmp_path / "missing.ipynb")


def test_formatting_is_canonical_and_says_whether_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "00_x.ipynb"
    path.write_text(json.dumps(book(*full_chapter())), encoding="utf-8")
    assert _rules(path) == ["canonical"]
    assert format_file(path) is True and format_file(path) is False
    assert _rules(path) == []


def test_a_full_chapter_passes(tmp_path: Path) -> None:
    assert [str(p) for p in gate(_write(tmp_path, full_chapter()))] == []


def _edit(index: int, change: Callable[[dict[str, Any]], object]) -> Callable[[Cells], object]:
    return lambda cells: change(cells[index])


def _set(index: int, **values: Any) -> Callable[[Cells], object]:
    return lambda cells: cells[index].update(values)


def _wrongly_checked(cells: Cells) -> None:
    cells[1]["source"] = 'device = "auto"\nsolve = False\nbatch = 4\nrows = 4'
    pairs = "batch=(batch, course.whole(1, 8)), rows=(batch, course.whole(1, 8))"
    cells[2]["source"] = f'lab = course.start("00", device=device, solve=solve, {pairs})'


FAULTS: dict[str, tuple[str, Callable[[Cells], object]]] = {
    "semicolon": ("semicolon", _set(6, source="value = 1;")),
    "semicolon before a comment": ("semicolon", _set(6, source="value = 1;  # quiet\n")),
    "count lost": ("checked", _set(4, execution_count=None)),
    "outputs lost": ("checked", _set(4, outputs=[])),
    "stderr stored": ("checked", _edit(4, lambda c: c["outputs"][0].update(name="stderr"))),
    "picture stored": (
        "checked",
        _set(4, outputs=[{"output_type": "display_data", "metadata": {}, "data": {"image/png": "AA=="}}]),
    ),
    "no cell checked": ("checked", _set(4, source="print(1)")),
    "conflict": ("conflict", _set(6, source="<<<<<<< ours\na = 1\n=======\na = 2\n>>>>>>> theirs")),
    "markdown image": ("alt-text", _set(3, source="## One number that hurts\n\n![](a.png)")),
    "html image": ("alt-text", _set(3, source="## One number that hurts\n\n<img src='a.png'>")),
    "empty html alt": ("alt-text", _set(3, source="## One number that hurts\n\n<img alt='' src='a.png'>")),
    "figure": ("alt-text", _set(19, source="plots.show(figure)")),
    "empty figure alt": ("alt-text", _set(19, source='plots.show(figure, alt=" ")')),
    "raising cell": ("raises", _edit(6, lambda c: c["metadata"].update(tags=["raises-exception"]))),
    "skipped cell": ("skipped", _edit(6, lambda c: c["metadata"].update(tags=["skip-execution"]))),
    "unchecked parameter": ("unchecked", _set(1, source='device = "auto"\nsolve = False\nbatch = 4')),
    "parameter checked under another's name": ("unchecked", _wrongly_checked),
    "no parameters": ("parameters", _edit(1, lambda c: c["metadata"].clear())),
    "no device": ("parameters", _set(1, source="solve = False")),
    "computed parameter": ("parameters", _set(1, source='device = "auto"\nsolve = False\nx = 1 + y')),
    "no start": ("start", _set(2, source="lab = 1")),
    "two starts": ("start", _set(6, source='course.start("00")')),
    "processes": ("processes", _set(6, source="import multiprocessing")),
    "shell": ("magic", _set(6, source="!ls")),
    "few cells": ("cells", lambda cells: cells.__delitem__(slice(6, 18))),
    "many cells": ("cells", lambda cells: cells[6:6] * 1 + cells.__iadd__([text("more")] * 20)),
    "few words": ("words", _set(5, source="## Predict first")),
    "many words": ("words", _set(5, source="## Predict first\n\n" + "word " * 1500)),
    "few lines": ("code-lines", lambda cells: [cell.update(source="a = 1") for cell in cells[6:19]]),
    "many lines": ("code-lines", _set(6, source="a = 1\n" * 200)),
    "one figure": ("figures", _set(19, source="a = 1")),
    "no widget": ("widgets", _edit(25, lambda c: c.update(source="a = 1"))),
    "few exercises": ("exercises", _set(23, source="check.two(None)")),
    "no origin": ("origins", _set(26, source="The table says nothing.")),
    "no title": ("goal", _set(0, source="A chapter")),
    "no goal": ("goal", _set(0, source="# 00 A chapter\n\n" + "words " * 200)),
    "section missing": ("section", _set(24, source="## Right turns\n\n" + "words " * 200)),
    "section too early": ("section", lambda cells: cells.insert(3, cells.pop(24))),
    "four questions": ("questions", _set(27, source="## Five questions\n\n1. a\n2. b\n3. c\n4. d")),
    "no reading": ("reading", _set(28, source="## Further reading\n\nNothing.\n\n## Next\n\nChapter 01.")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_gate_finds_a_planted_fault(tmp_path: Path, fault: str) -> None:
    rule, plant = FAULTS[fault]
    cells = copy.deepcopy(full_chapter())
    plant(cells)
    path = tmp_path / "00_x.ipynb"
    # written as it is: formatting would mend some of these faults
    whole = book(*cells)
    for made, planted in zip(whole["cells"], cells, strict=True):
        if planted["cell_type"] == "code":
            made["execution_count"], made["outputs"] = planted["execution_count"], planted["outputs"]
    path.write_text(dumps(whole), encoding="utf-8")
    assert rule in _rules(path), [str(p) for p in gate(path)]


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("nbformat", lambda b: b.update(nbformat_minor=4)),
        ("ids", lambda b: b["cells"][1].update(id=b["cells"][0]["id"])),
        ("ids", lambda b: b["cells"][1].pop("id")),
        ("kernelspec", lambda b: b["metadata"]["kernelspec"].update(name="julia")),
        ("widgets", lambda b: b["metadata"].update(widgets={"a": 1})),
        ("stray-output", lambda b: b["cells"][2].update(execution_count=3)),
        ("canonical", lambda b: b["metadata"].update(vscode={})),
    ],
)
def test_the_gate_reads_the_file_itself(tmp_path: Path, rule: str, change: Callable[[Any], object]) -> None:
    whole = json.loads(dumps(book(*full_chapter())))
    change(whole)
    path = tmp_path / "00_x.ipynb"
    path.write_text(dumps(whole), encoding="utf-8")
    assert rule in _rules(path)


def test_conflict_marks_are_named_although_they_break_the_json(tmp_path: Path) -> None:
    path = tmp_path / "00_x.ipynb"
    whole = dumps(book(*full_chapter()))
    path.write_text("<<<<<<< ours\n" + whole + "=======\n>>>>>>> theirs\n", encoding="utf-8")
    assert _rules(path) == ["conflict"]


def test_other_notebooks_need_the_format_only(tmp_path: Path) -> None:
    cells = full_chapter()[:3]
    assert _rules(_write(tmp_path, cells, "gemm.ipynb")) == []
    assert "cells" in _rules(_write(tmp_path, cells, "gemm.ipynb"), anatomy=True)
    assert _rules(_write(tmp_path, cells, "00_x.ipynb"), anatomy=False) == []


def test_counts_are_of_what_a_reader_sees() -> None:
    hidden = code("a\nb")
    hidden["metadata"]["jupyter"] = {"source_hidden": True}
    counted = book(
        code("a\n\n# b\nc"),
        hidden,
        code("d", "hide-input"),
        text("one <b>two</b> [three](http://x)\n```\nno\n```"),
    )
    assert visible_code_lines(counted) == 3
    assert words(counted) == 3


def test_refresh_stores_checked_outputs_only_and_they_are_stable(tmp_path: Path) -> None:
    path = chapter(
        tmp_path,
        "00_x",
        "print(lab.device)",
        "# NBVAL_CHECK_OUTPUT\nprint('one')\n{'a': 1}",
        parameters=CHECKED,
    )
    refresh(path)
    cells = read(path)["cells"]
    assert cells[3]["outputs"] == [] and cells[3]["execution_count"] is None
    assert cells[4]["execution_count"] == 4
    assert [o["output_type"] for o in cells[4]["outputs"]] == ["stream", "execute_result"]
    assert _rules(path, anatomy=False) == []
    stored = path.read_bytes()
    refresh(path)
    assert path.read_bytes() == stored


def test_refresh_leaves_a_failing_notebook_as_it_was(tmp_path: Path) -> None:
    path = chapter(tmp_path, "00_x", "1/0")
    before = path.read_bytes()
    with pytest.raises(InputError, match="ZeroDivisionError"):
        refresh(path)
    assert path.read_bytes() == before


def test_the_commands_for_authors(tmp_path: Path) -> None:
    run = CliRunner()
    path = tmp_path / "00_x.ipynb"
    path.write_text(json.dumps(book(*full_chapter())), encoding="utf-8")
    assert run.invoke(app, ["notebook", "check", str(path)]).exit_code == 1
    done = run.invoke(app, ["notebook", "format", str(path)])
    assert done.exit_code == 0 and "formatted" in done.output
    assert run.invoke(app, ["notebook", "check", str(path)]).exit_code == 0
    assert run.invoke(app, ["notebook", "check", str(tmp_path / "none.ipynb")]).exit_code == 2
