"""The executed course as a book of HTML pages: contents, next and previous, readable with no network."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.atomic import write_text
from labkit.classroom import links
from labkit.course import html_export
from labkit.course.index import Chapter, all_chapters, choose
from labkit.course.notebook import Notebook, read
from labkit.course.runner import read_summary
from labkit.errors import refuse, require

BACK = '<p class="lk-back"><a href="index.html">Course map</a></p>'
"""The line of a chapter's page (:mod:`labkit.course.html_export`) that the book's navigation replaces."""

INDEX = "index.html"
_MARK = "<!-- labkit book -->"
_CSS = """<style>
.lk-nav { display:flex; flex-wrap:wrap; gap:.4rem 1.5rem; justify-content:space-between;
  font:14px/1.5 system-ui, sans-serif; margin:1rem 0; padding:.5rem 0; border-bottom:1px solid #dfe4ea; }
.lk-nav.end { border:0; border-top:1px solid #dfe4ea; margin-top:3rem; }
.lk-nav a { color:#1f6feb; text-decoration:underline; }
</style>"""
_CHAPTER_LINK = re.compile(
    r"""<a\b[^>]*href=["'](?:\./)?(\d\d_\w+)\.(?:html|ipynb)(#[^"']*)?["'][^>]*>(.*?)</a>""", re.DOTALL
)


@dataclass(frozen=True)
class Page:
    """One chapter of the book."""

    chapter: Chapter
    file: str
    book: Notebook
    entry: dict[str, Any]


def make(out: Path, *, results: Path | None = None, chapters: str | None = None) -> list[str]:
    """Write the book and check it.

    Args:
        out: the folder to write; new, empty, or an older book.
        results: what ``labkit course`` wrote (default: ``results/course``).
        chapters: as for ``labkit course``; None for all that the results hold.

    Returns:
        Problems of the pages, as :func:`labkit.classroom.links.problems` finds them.

    Raises:
        InputError: a chapter has no results or failed, ``out`` holds something else.
    """
    source = results if results is not None else paths.results_dir() / "course"
    pages = _pages(source, chapters)
    older = (out / INDEX).is_file() and _MARK in (out / INDEX).read_text(encoding="utf-8", errors="replace")
    free = not out.exists() or (out.is_dir() and (older or not any(out.iterdir())))
    require(free, "--out", f"{out} holds other files", "a new or empty folder, or an older book")
    if older:
        for stale in out.glob("[0-9][0-9]_*.html"):
            stale.unlink()
    try:
        sections = []
        for at, page in enumerate(pages):
            before = pages[at - 1] if at else None
            after = pages[at + 1] if at + 1 < len(pages) else None
            text = _chapter_page(page, before, after, {one.file for one in pages})
            sections.append(_sections(text))
            write_text(out / page.file, text)
        write_text(out / INDEX, _index(pages, sections))
    except OSError as error:
        refuse("--out", f"{error.strerror}: {error.filename}", "a folder that can be written")
    return links.problems(out)


def _pages(results: Path, chapters: str | None) -> list[Page]:
    entries = read_summary(results)
    fix = "labkit course --solve"
    require(bool(entries), "results", f"no results of the course in {results}", "results of a run", fix)
    if chapters is None:
        wanted = [chapter for chapter in all_chapters() if chapter.number in entries]
    else:
        wanted = choose(chapters)
    out = []
    for chapter in wanted:
        entry = entries.get(chapter.number)
        if entry is None:
            refuse("chapters", f"no results of chapter {chapter.number}", "chapters that ran", fix)
        if entry.get("status") != "passed":
            refuse("chapters", f"chapter {chapter.number} {entry.get('status')}", "chapters that passed", fix)
        path = results / Path(str(entry.get("notebook"))).name
        out.append(Page(chapter, f"{path.stem}.html", _joined(path), entry))
    return out


def _joined(path: Path) -> Notebook:
    """The notebook with every text as one string, as nbconvert wants it."""
    import nbformat

    read(path)  # says in words what is wrong with a file that is no notebook
    return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)


def _chapter_page(page: Page, before: Page | None, after: Page | None, files: set[str]) -> str:
    text = html_export.page(page.book, f"{page.chapter.number} {page.chapter.title}")
    if BACK not in text:
        refuse("page", f"{page.file} without its course-map line", f"the line {BACK}")
    nav = _nav(before, after)
    text = text.replace(BACK, f"{_CSS}<nav class='lk-nav' aria-label='chapters'>{nav}</nav>", 1)
    end = f"<nav class='lk-nav end' aria-label='chapters, again'>{nav}</nav>"
    # the last one: a cell's own output may hold the words too
    head, body, tail = text.rpartition("</main>")
    text = f"{head}{end}{body}{tail}" if body else text
    return _CHAPTER_LINK.sub(lambda found: _kept(found, files), text)


def _kept(found: re.Match[str], files: set[str]) -> str:
    """A link to a chapter leads to its page; to one that is not in this book it is plain text."""
    file = f"{found[1]}.html"
    if file not in files:
        return f"<span title='not in this book'>{found[3]}</span>"
    return f"<a href='{file}{found[2] or ''}'>{found[3]}</a>"


def _nav(before: Page | None, after: Page | None) -> str:
    def link(page: Page | None, words: str) -> str:
        if page is None:
            return "<span></span>"
        title = html.escape(f"{page.chapter.number} {page.chapter.title}")
        return f"<a href='{page.file}'>{words.format(title)}</a>"

    return f"{link(before, '← {}')}<a href='{INDEX}'>Contents</a>{link(after, '{} →')}"


def _index(pages: list[Page], sections: list[list[tuple[str, str]]]) -> str:
    rows = ""
    for page, own in zip(pages, sections, strict=True):
        c = page.chapter
        parts = "".join(f'<li><a href="{page.file}#{anchor}">{words}</a></li>' for words, anchor in own)
        rows += (
            f"<li><a class='title' href='{page.file}'>{c.number} {html.escape(c.title)}</a>"
            f"<div class='q'>{html.escape(c.question)} {c.minutes} minutes.</div>"
            f"<details><summary>Sections</summary><ul>{parts}</ul></details></li>"
        )
    minutes = sum(page.chapter.minutes for page in pages)
    lead = f"{len(pages)} chapters, {minutes / 60:.1f} hours; executed, readable with no network."
    style = html_export._STYLE + "ol.book{list-style:none;padding:0} ol.book>li{margin:.9rem 0}"
    return (
        f"<!DOCTYPE html>\n{_MARK}<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Low-bit LLM inference on small GPUs</title><style>{style}</style></head><body><main>"
        f"<h1>Low-bit LLM inference on small GPUs</h1><p class='lead'>{lead}</p>"
        f"<ol class='book'>{rows}</ol></main></body></html>\n"
    )


_HEADING = re.compile(r"<h2 id=\"([^\"]+)\">(.*?)<a class=\"anchor-link\"", re.DOTALL)


def _sections(text: str) -> list[tuple[str, str]]:
    """(words, anchor) of a page's headings of the second level."""
    return [(re.sub(r"<[^>]+>", "", words), anchor) for anchor, words in _HEADING.findall(text)]
