"""Tables: origins, formats, plain text and HTML."""

from __future__ import annotations

from typing import Any

import pytest

from labkit import tables
from labkit.errors import InputError

ROWS: list[dict[str, Any]] = [
    {"name": "copy", "ms": 1.5, "ok": True, "origin": "measured"},
    {"name": "数据", "ms": None, "ok": False, "origin": "quoted"},
]


def test_plain_text_is_aligned_and_carries_the_origin() -> None:
    text = repr(tables.table(ROWS, {"name": "what", "ms": "time (ms)", "ok": "ok"}, caption="Two rows"))
    assert text == (
        "Two rows\n"
        "what  time (ms)  ok   origin\n"
        "----  ---------  ---  --------\n"
        "copy        1.5  yes  measured\n"
        "数据          –  no   quoted"
    )


def test_html_has_headers_tints_and_no_raw_markup() -> None:
    made = tables.table([{"a": "<b>", "origin": "quoted"}], caption="x & y")._repr_html_()
    assert "&lt;b&gt;" in made and "<b>" not in made and "x &amp; y" in made
    assert made.count('scope="col"') == 2
    assert 'font-weight:600">quoted' in made


@pytest.mark.parametrize("origin", ["guessed", None, ""])
def test_a_row_without_a_valid_origin_is_refused(origin: str | None) -> None:
    with pytest.raises(InputError, match=r"rows\[1\]\['origin'\]"):
        tables.table([ROWS[0], {"name": "x", "origin": origin}])


def test_tables_without_figures_need_no_origin() -> None:
    made = tables.table([{"word": "M", "means": "rows"}], origins=False)
    assert made.headers == ("word", "means") and made.origin_column is None


def test_formats_and_defaults() -> None:
    row = {"a": 1234.5678, "b": 0.5, "c": 7, "origin": "measured"}
    made = tables.table([row], formats={"a": ".1f", "b": ".0%"})
    assert made.cells == (("1234.6", "50%", "7", "measured"),)
    assert tables.table([row], ["a"]).cells == (("1235", "measured"),)
    assert made.right == (True, True, True, False)


def test_unknown_column_and_empty_table_are_refused() -> None:
    with pytest.raises(InputError, match="columns"):
        tables.table(ROWS, ["nope"])
    with pytest.raises(InputError, match="rows"):
        tables.table([])
