"""A chapter's anatomy: sizes, and the sections in their order (COURSE.md of the project says why).

Sections are found by the words of their headings, so that an author writes plain markdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from labkit.course.gate import Problem
from labkit.course.notebook import Notebook, is_checked, joined, tags
from labkit.course.source import calls, check_calls

CELLS = (25, 45)
WORDS = (900, 1800)
CODE_LINES = (120, 250)
FIGURES = (2, 4)
WIDGETS = (1, 2)
EXERCISES = (3, 5)
QUESTIONS = 5
GOAL_WORDS = {
    "question": r"\bquestion\b",
    "minutes": r"\bminutes\b",
    "prerequisites": r"\bprerequisites?\b|\byou need\b",
    "labkit gains": r"\blabkit gains\b",
}
ORIGINS = ("measured", "emulated", "simulated", "quoted")
# (what the author reads in a message, words that a heading of that section holds)
SECTIONS = (
    ("One number that hurts", r"number that hurts"),
    ("A prediction", r"predict"),
    ("Wrong turns", r"wrong turn"),
    ("Five questions", r"five questions"),
    ("Further reading", r"further reading"),
    ("Next", r"next\b"),
)
_HEADING = re.compile(r"^#{1,4}\s+(.+)$", re.MULTILINE)
# "1. Why?" as a list, in bold, or as the summary of a fold with the answer in it
_NUMBERED = re.compile(r"^\s*(?:<details[^>]*>)?\s*(?:<summary[^>]*>)?\s*(?:\*\*)?\d+[.)]\s+\S", re.MULTILINE)
_HELPERS = {"exercise", "exercises", "find", "forbid_calls", "passed", "not_yet", "not_attempted"}

Problems = Iterator[Problem]


def check_anatomy(book: Notebook) -> Problems:
    """All problems of a chapter's anatomy."""
    yield from _sizes(book)
    yield from _opening(book)
    yield from _sections(book)
    yield from _questions_and_reading(book)


def visible_code_lines(book: Notebook) -> int:
    """Non-blank lines of code cells that are not hidden."""
    total = 0
    for cell in book["cells"]:
        hidden = cell["metadata"].get("jupyter", {}).get("source_hidden") or "hide-input" in tags(cell)
        if cell["cell_type"] == "code" and not hidden:
            total += sum(1 for line in joined(cell["source"]).splitlines() if line.strip())
    return total


def words(book: Notebook) -> int:
    """Words of prose: markdown without code blocks, HTML tags and link targets."""
    total = 0
    for cell in book["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        text = re.sub(r"```.*?```", " ", joined(cell["source"]), flags=re.DOTALL)
        text = re.sub(r"<[^>]+>|\]\([^)]*\)", " ", text)
        total += len(re.findall(r"[^\W_]+(?:['’.\-][^\W_]+)*", text))
    return total


def figures(book: Notebook) -> int:
    """Calls of plots.show, plus images in markdown."""
    total = 0
    for cell in book["cells"]:
        source = joined(cell["source"])
        if cell["cell_type"] == "code":
            total += len(calls(source, "plots.show"))
        else:
            total += len(re.findall(r"!\[[^\]]+\]\(|<img\b", source))
    return total


def widgets(book: Notebook) -> int:
    """Cells tagged ``widget``, or that call ``widgets.show`` (also as ``base.show``)."""
    total = 0
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            source = joined(cell["source"])
            shown = calls(source, "widgets.show") or calls(source, "base.show")
            total += bool(shown or "widget" in tags(cell))
    return total


def exercise_names(book: Notebook) -> list[str]:
    """The exercises the chapter checks, in order, each once."""
    names: dict[str, None] = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            names.update(
                dict.fromkeys(n for n, _ in check_calls(joined(cell["source"])) if n not in _HELPERS)
            )
    return list(names)


def _sizes(book: Notebook) -> Problems:
    counts = (
        ("cells", len(book["cells"]), CELLS, "cells"),
        ("words", words(book), WORDS, "words of prose"),
        ("code-lines", visible_code_lines(book), CODE_LINES, "visible lines of code"),
        ("figures", figures(book), FIGURES, "figures (plots.show or images)"),
        ("widgets", widgets(book), WIDGETS, "widgets (widgets.show, or a cell tagged widget)"),
        ("exercises", len(exercise_names(book)), EXERCISES, "exercises (different check.<name> calls)"),
    )
    for rule, got, (low, high), what in counts:
        if not low <= got <= high:
            yield Problem(rule, None, f"{got} {what}; expected {low} to {high}")
    if not any(is_checked(cell) for cell in book["cells"]):
        yield Problem("checked", None, "no cell's output is checked (# NBVAL_CHECK_OUTPUT)")
    text = " ".join(joined(cell["source"]).lower() for cell in book["cells"])
    if not any(re.search(rf"\b{origin}\b", text) for origin in ORIGINS):
        yield Problem("origins", None, f"no table says {' / '.join(ORIGINS)}")


def _opening(book: Notebook) -> Problems:
    first = book["cells"][0] if book["cells"] else None
    if first is None or first["cell_type"] != "markdown" or not joined(first["source"]).startswith("# "):
        yield Problem("goal", 0, "the first cell is not markdown with the chapter's title as a # heading")
        return
    opening = ""
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            break
        opening += joined(cell["source"]).lower() + "\n"
    plain = re.sub(r"[`*_]", "", opening)
    for word, pattern in GOAL_WORDS.items():
        if not re.search(pattern, plain):
            yield Problem("goal", 0, f"the goal box before the parameters does not say {word!r}")


def _headings(book: Notebook) -> list[tuple[int, str]]:
    return [
        (index, heading.strip().lower())
        for index, cell in enumerate(book["cells"])
        if cell["cell_type"] == "markdown"
        for heading in _HEADING.findall(re.sub(r"```.*?```", "", joined(cell["source"]), flags=re.DOTALL))
    ]


def _sections(book: Notebook) -> Problems:
    headings = _headings(book)
    last = -1
    for name, pattern in SECTIONS:
        places = [at for at, (_, text) in enumerate(headings) if re.search(pattern, text)]
        later = [at for at in places if at > last]
        if not places:
            yield Problem("section", None, f"no heading for the section {name!r}")
        elif not later:
            yield Problem("section", headings[places[0]][0], f"the section {name!r} comes too early")
        else:
            last = later[0]


def _section_text(book: Notebook, pattern: str) -> tuple[int, str] | None:
    """(cell index, text) from a section's heading to the next heading of the same or a higher level."""
    parts: list[str] = []
    start = level = 0
    for index, cell in enumerate(book["cells"]):
        if cell["cell_type"] != "markdown":
            continue
        for line in joined(cell["source"]).splitlines():
            heading = re.match(r"^(#{1,4})\s+(.+)$", line)
            if level and heading and len(heading[1]) <= level:
                return start, "\n".join(parts)
            if not level and heading and re.search(pattern, heading[2].lower()):
                start, level = index, len(heading[1])
            elif level:
                parts.append(line)
    return (start, "\n".join(parts)) if level else None


def _questions_and_reading(book: Notebook) -> Problems:
    asked = _section_text(book, r"five questions")
    if asked is not None:
        count = len(_NUMBERED.findall(asked[1]))
        if count != QUESTIONS:
            yield Problem("questions", asked[0], f"{count} numbered questions; expected {QUESTIONS}")
    reading = _section_text(book, r"further reading")
    if reading is not None and not re.search(r"^\s*([-*]|\d+[.)])\s+\S", reading[1], re.MULTILINE):
        yield Problem("reading", reading[0], "further reading lists nothing")
