"""Tables of the course: every row says where its numbers come from.

Pure Python, so that it works where matplotlib or torch do not. The plain-text form has
aligned columns and no colours, so nbval can compare it.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.errors import require

ORIGINS = ("measured", "emulated", "simulated", "quoted")
"""Kinds of numbers, in the order in which they are listed everywhere."""

_EMPTY = "–"
_TINTS = {"measured": "#0072B2", "emulated": "#009E73", "simulated": "#B37700", "quoted": "#5F6670"}


@dataclass(frozen=True)
class Table:
    """Cells already formatted as text; shows itself as HTML or as aligned plain text."""

    headers: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    right: tuple[bool, ...]  # column is right-aligned (numbers)
    caption: str = ""
    origin_column: int | None = None

    def __repr__(self) -> str:
        columns = list(zip(self.headers, *self.cells, strict=True))
        widths = [max(_width(text) for text in column) for column in columns]

        def line(texts: Sequence[str]) -> str:
            parts = (_pad(t, w, r) for t, w, r in zip(texts, widths, self.right, strict=True))
            return "  ".join(parts).rstrip()

        lines = [self.caption] if self.caption else []
        lines += [line(self.headers), "  ".join("-" * width for width in widths)]
        return "\n".join(lines + [line(row) for row in self.cells])

    def _repr_html_(self) -> str:
        aligned = ["right" if right else "left" for right in self.right]
        head = "".join(
            f'<th scope="col" style="text-align:{side}">{html.escape(text)}</th>'
            for text, side in zip(self.headers, aligned, strict=True)
        )
        body = ""
        for row in self.cells:
            body += "<tr>"
            for i, (text, side) in enumerate(zip(row, aligned, strict=True)):
                tint = f";color:{_TINTS[text]};font-weight:600" if i == self.origin_column else ""
                body += f'<td style="text-align:{side}{tint}">{html.escape(text)}</td>'
            body += "</tr>"
        caption = ""
        if self.caption:
            style = "caption-side:top;text-align:left;font-weight:600"
            caption = f'<caption style="{style}">{html.escape(self.caption)}</caption>'
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str] | Mapping[str, str] | None = None,
    *,
    caption: str = "",
    formats: Mapping[str, str] | None = None,
    origins: bool = True,
) -> Table:
    """A table of numbers.

    Args:
        rows: one mapping a row, keyed by column name. With ``origins`` each has the key
            ``"origin"``, one of :data:`ORIGINS`. A missing value or None shows as a dash.
        columns: keys to show, in order, or key → header (put the unit in the header).
            Left out: the keys of the first row.
        caption: one line above the table.
        formats: key → format spec, such as ``{"ms": ".3f", "speedup": ".2f"}``. Without one,
            a float shows four significant digits, a bool yes or no, anything else ``str``.
        origins: False for tables that hold no figures (definitions, file lists).

    Returns:
        A :class:`Table`; as the last value of a cell it displays itself.

    Raises:
        InputError: no rows, an unknown column, a row without a valid origin.
    """
    require(len(rows) > 0, "rows", "none", "at least one row")
    keys, headers = _columns(rows, columns)
    if origins:
        for i, row in enumerate(rows):
            received = repr(row.get("origin", "no origin"))
            require(
                row.get("origin") in ORIGINS, f"rows[{i}]['origin']", received, "one of " + ", ".join(ORIGINS)
            )
        if "origin" not in keys:
            keys, headers = [*keys, "origin"], [*headers, "origin"]
    known = {key for row in rows for key in row}
    for key in keys:
        require(key in known, "columns", repr(key), "one of " + ", ".join(sorted(known)))
    specs = dict(formats or {})
    cells = tuple(tuple(_text(row.get(key), specs.get(key)) for key in keys) for row in rows)
    right = tuple(_is_number_column([row.get(key) for row in rows]) for key in keys)
    return Table(tuple(headers), cells, right, caption, keys.index("origin") if origins else None)


def _columns(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | Mapping[str, str] | None
) -> tuple[list[str], list[str]]:
    if columns is None:
        return list(rows[0]), list(rows[0])
    if isinstance(columns, Mapping):
        return list(columns.keys()), list(columns.values())
    return list(columns), list(columns)


def _text(value: Any, spec: str | None) -> str:
    if value is None:
        return _EMPTY
    if isinstance(value, bool):
        return "yes" if value else "no"
    if spec is not None and not isinstance(value, str):
        return format(value, spec)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _is_number_column(values: Sequence[Any]) -> bool:
    present = [value for value in values if value is not None]
    return bool(present) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in present)


def _width(text: str) -> int:
    """Columns of a terminal that ``text`` takes: East Asian wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space
