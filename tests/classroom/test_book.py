"""The HTML book and its checker: navigation, contents, and every kind of broken link found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.classroom import book, links
from labkit.cli import app
from labkit.course.index import chapter_named
from labkit.course.notebook import Notebook, dumps, normalise
from labkit.errors import InputError

PAGE = "<!DOCTYPE html><html lang='en'><head><title>t</title></head><body>{}</body></html>"


def chapter(*texts: str, output: str = "") -> Notebook:
    """An executed notebook of markdown cells, and one with HTML as its output."""
    cells: list[dict] = [{"cell_type": "markdown", "source": text, "metadata": {}} for text in texts]
    code = {
        "cell_type": "code",
        "source": "show()\n# NBVAL_CHECK_OUTPUT",
        "metadata": {},
        "execution_count": 1,
    }
    code["outputs"] = [
        {"output_type": "display_data", "metadata": {}, "data": {"text/html": output, "text/plain": "x"}}
    ]
    return normalise({"cells": [*cells, code], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def results(folder: Path, books: dict[str, Notebook], status: str = "passed") -> Path:
    """A folder as ``labkit course`` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {}
    for number, made in books.items():
        name = f"{number}_{chapter_named(number).slug}.ipynb"
        (folder / name).write_text(dumps(made), encoding="utf-8")
        entries[number] = {"status": status, "notebook": name}
    summary = {"version": 1, "chapters": entries}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def good(number: str) -> Notebook:
    return chapter(
        f"# {number} · A chapter\n\nSee [the next](01_roofline.ipynb) and [the map](00_start_here.ipynb).",
        '## Wrong turn: "it was `only` cold"\n\n[up](#Five-questions), [far](07_dispatch.ipynb)',
        "## Five questions",
        output="<img alt='two bars' src='data:image/png;base64,AAAA'/>",
    )


@pytest.fixture
def made(tmp_path: Path) -> Path:
    source = results(tmp_path / "课程 results", {number: good(number) for number in ("00", "01", "02")})
    out = tmp_path / "a book"
    assert book.make(out, results=source) == []
    return out


def test_chapters_are_joined_in_their_order(made: Path) -> None:
    def navigation(name: str) -> list[str]:
        text = (made / name).read_text(encoding="utf-8")
        found = re.findall(r"<nav class='lk-nav.*?</nav>", text, re.DOTALL)
        assert len(found) == 2  # above and below
        return re.findall(r"href='([^']+)'", found[0])

    assert navigation("00_start_here.html") == ["index.html", "01_roofline.html"]
    assert navigation("01_roofline.html") == ["00_start_here.html", "index.html", "02_packing_w4_w3.html"]
    assert navigation("02_packing_w4_w3.html") == ["01_roofline.html", "index.html"]
    index = (made / "index.html").read_text(encoding="utf-8")
    assert index.index("00_start_here.html") < index.index("01_roofline.html") < index.index("02_packing")
    assert "#Five-questions" in index and "Wrong turn" in index


def test_a_chapter_that_is_not_in_the_book_is_no_link(made: Path) -> None:
    text = (made / "00_start_here.html").read_text(encoding="utf-8")
    assert "href='01_roofline.html'" in text and "07_dispatch" not in text and ">far</span>" in text
    assert ".ipynb" not in text


def test_a_book_is_made_again_and_nothing_else_is_overwritten(made: Path, tmp_path: Path) -> None:
    source = results(tmp_path / "less", {"00": good("00")})
    (made / "notes.txt").write_text("mine", encoding="utf-8")
    book.make(made, results=source)
    assert sorted(path.name for path in made.iterdir()) == ["00_start_here.html", "index.html", "notes.txt"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "index.html").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="holds other files"):
        book.make(other, results=source)
    assert (other / "index.html").read_text(encoding="utf-8") == "mine"


def test_chapters_without_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no results of the course"):
        book.make(tmp_path / "out", results=tmp_path)
    failed = results(tmp_path / "failed", {"00": good("00")}, status="failed")
    with pytest.raises(InputError, match="chapter 00 failed"):
        book.make(tmp_path / "out", results=failed)
    fine = results(tmp_path / "fine", {"00": good("00")})
    with pytest.raises(InputError, match="no results of chapter 01"):
        book.make(tmp_path / "out", results=fine, chapters="01")
    assert not (tmp_path / "out").exists()


def test_what_a_chapter_got_wrong_is_said_and_the_exit_code_is_1(tmp_path: Path) -> None:
    bad = chapter(
        "# 00\n\n[gone](data.csv) [no anchor](#nowhere)", output="<img src='data:image/png;base64,AA'>"
    )
    source = results(tmp_path / "results", {"00": bad})
    run = CliRunner().invoke(app, ["book", "--out", str(tmp_path / "out"), "--from", str(source)])
    assert run.exit_code == 1 and "3 problems" in run.output
    for words in ("what is not there: data.csv", "anchor that is not there: #nowhere", "without alt text"):
        assert words in run.output
    fine = results(tmp_path / "fine", {"00": good("00")})
    run = CliRunner().invoke(app, ["book", "--out", str(tmp_path / "fine out"), "--from", str(fine)])
    assert run.exit_code == 0 and "0 problems" in run.output


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("<a href='none.html'>x</a>", "what is not there: none.html"),
        ("<a href='#none'>x</a>", "anchor that is not there: #none"),
        ("<a href='b.html#none'>x</a>", "anchor that is not there: b.html#none"),
        ("<a href='../out.html'>x</a>", "out of the book"),
        ("<a href='/etc/hosts'>x</a>", "out of the book"),
        ("<a href='javascript:go()'>x</a>", "opens nowhere else"),
        ("<a href='file:///c:/x.html'>x</a>", "opens nowhere else"),
        ("<img src='b.html'>", "without alt text"),
        ("<img src='b.html' alt='  '>", "without alt text"),
        ("<img src='none.png' alt='x'>", "a file that is not there: none.png"),
        ("<script src='https://cdn.example/x.js'></script>", "fetched from the network"),
        ("<link rel='stylesheet' href='//cdn.example/x.css'>", "fetched from the network"),
        ("<svg role='img'></svg>", "without aria-label"),
        ("<p id='one'></p><p id='one'></p>", "the id one is used twice"),
    ],
)
def test_the_checker_finds(tmp_path: Path, body: str, words: str) -> None:
    (tmp_path / "a.html").write_text(PAGE.format(body), encoding="utf-8")
    (tmp_path / "b.html").write_text(PAGE.format("<p id='here'></p>"), encoding="utf-8")
    (found,) = links.problems(tmp_path)
    assert found.startswith("a.html: ") and words in found


def test_the_checker_accepts_what_works(tmp_path: Path) -> None:
    body = (
        "<h2 id='a-%22b%22'>x</h2><a name='old' id='old'></a><a href='#a-%22b%22'>1</a>"
        "<a href='sub/b.html#%E4%B8%AD'>2</a>"
        "<a href='https://example.org/x'>3</a><a href='#old'>4</a><a href='sub/'>5</a><a>6</a>"
        "<a href='sub/b%20c.txt'>7</a><img alt='x' src='data:image/png;base64,AA'>"
        "<svg role='img' aria-label='y'></svg>"
    )
    (tmp_path / "a.html").write_text(PAGE.format(body), encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text(
        PAGE.format("<p id='中'></p><a href='../a.html'>x</a>"), encoding="utf-8"
    )
    (tmp_path / "sub" / "b c.txt").write_text("x", encoding="utf-8")
    assert links.problems(tmp_path) == []


def test_the_checker_does_not_pass_an_empty_or_foreign_folder(tmp_path: Path) -> None:
    assert links.problems(tmp_path) == [f"no page in {tmp_path}"]
    (tmp_path / "a.html").write_bytes(b"\xff\xfe\xff")
    (found,) = links.problems(tmp_path)
    assert "cannot be read" in found
    (tmp_path / "a.html").write_text("<p>x", encoding="utf-8")
    assert links.problems(tmp_path) == ["a.html: no title", "a.html: no language"]
