"""Looks through a folder of HTML pages: links that lead nowhere, missing anchors, pictures without words."""

from __future__ import annotations

from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# what nbconvert writes where the notebook says nothing
_NO_WORDS = ("", "no description has been provided for this image")
_FETCHED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}


class _Page(HTMLParser):
    """What one page offers (ids) and needs (links, files, words for pictures)."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: set[str] = set()
        self.twice: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.problems: list[str] = []
        self.title = ""
        self.language = ""
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        for name in ("id", "name") if tag == "a" else ("id",):
            if one := given.get(name):
                # id and name of one anchor may be the same
                if one in self.ids and name == "id":
                    self.twice.add(one)
                self.ids.add(one)
        if tag == "html":
            self.language = given.get("lang", "")
        if tag in ("a", "area") and "href" in given:
            self.links.append(given["href"])
        if tag in _FETCHED and (where := given.get(_FETCHED[tag])):
            self.fetched.append(where)
        if tag == "img" and given.get("alt", "").strip().lower() in _NO_WORDS:
            self.problems.append(f"a picture without alt text: {given.get('src', '')[:40]}")
        if tag == "svg" and given.get("role") == "img" and not given.get("aria-label", "").strip():
            self.problems.append("a drawing without aria-label")
        self._in_title = self._in_title or tag == "title"

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data


def problems(folder: Path, *, offline: bool = True) -> list[str]:
    """All problems of the ``.html`` pages below ``folder``, as ``page: what is wrong``; [] when all is well.

    Args:
        folder: the root; a link may not lead out of it.
        offline: also refuse pictures, scripts and styles that would come from the network.

    Links to other sites are not followed. A page is read as UTF-8.
    """
    pages = {path: _read(path) for path in sorted(folder.rglob("*.html"))}
    if not pages:
        return [f"no page in {folder}"]
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder).as_posix()
        if isinstance(page, str):
            found.append(f"{name}: {page}")
            continue
        lines = [*page.problems, *(f"the id {one} is used twice" for one in sorted(page.twice))]
        lines += [] if page.title.strip() else ["no title"]
        lines += [] if page.language else ["no language"]
        lines += _targets(path, folder, pages, page.links)
        lines += _files(path, folder, page.fetched, offline)
        found += [f"{name}: {line}" for line in lines]
    return found


def _read(path: Path) -> _Page | str:
    page = _Page()
    try:
        page.feed(path.read_text(encoding="utf-8"))
        page.close()
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read: {error}"
    return page


def _targets(path: Path, folder: Path, pages: dict[Path, _Page | str], links: Iterable[str]) -> list[str]:
    lines = []
    for link in links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            if parts.scheme not in ("http", "https", "mailto"):
                lines.append(f"a link that opens nowhere else: {link}")
            continue
        target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
        if not _inside(target, folder):
            lines.append(f"a link out of the book: {link}")
        elif not target.exists():
            lines.append(f"a link to what is not there: {link}")
        elif parts.fragment:
            page = next((one for at, one in pages.items() if at.resolve() == target.resolve()), None)
            # as browsers do: the anchor as it is written, then decoded
            wanted = {parts.fragment, unquote(parts.fragment)}
            if not isinstance(page, _Page) or not wanted & page.ids:
                lines.append(f"a link to an anchor that is not there: {link}")
    return lines


def _files(path: Path, folder: Path, fetched: Iterable[str], offline: bool) -> list[str]:
    lines = []
    for where in fetched:
        parts = urlsplit(where)
        if parts.scheme == "data":
            continue
        if parts.scheme or parts.netloc:
            lines += [f"fetched from the network: {where}"] if offline else []
            continue
        target = (path.parent / unquote(parts.path)).resolve()
        if not _inside(target, folder) or not target.is_file():
            lines.append(f"a file that is not there: {where}")
    return lines


def _inside(target: Path, folder: Path) -> bool:
    root = folder.resolve()
    return target.resolve() == root or root in target.resolve().parents
