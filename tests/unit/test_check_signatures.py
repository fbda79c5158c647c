from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from notebook_builder import book, code

from labkit import solutions
from labkit.check.signatures import differences
from labkit.course.notebook import dumps
from labkit.course.source import check_calls, signature_of, stubs


def decode(b0: int, b1: int = 0, *, signed: bool = True) -> int:
    """A reference solution."""
    return b0 + b1 + signed


def _notebook(folder: Path, *sources: str) -> Path:
    path = folder / "00_x.ipynb"
    path.write_text(dumps(book(*map(code, sources))), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("stub", "message"),
    [
        ("def decode(b0, b1=0, *, signed=True):\n    ...\ncheck.decode(decode)", None),
        (
            "def decode(b0: int, b1: int = 0, *, signed: bool = True) -> int:\n    ...\ncheck.decode(decode)",
            None,
        ),
        ("def mine(b0, b1=0, *, signed=True):\n    ...\ncheck.decode(mine)", None),
        ("def decode(b0, b1, *, signed=True):\n    ...\ncheck.decode(decode)", "(b0, b1, *, signed=True)"),
        ("def decode(b0, b1=0, signed=True):\n    ...\ncheck.decode(decode)", "(b0, b1=0, signed=True)"),
        (
            "def decode(b1, b0=0, *, signed=True):\n    ...\ncheck.decode(decode)",
            "(b1, b0=0, *, signed=True)",
        ),
        ("answer = None\ncheck.decode(answer)", "a value"),
        ("check.decode()", "without an answer"),
    ],
)
def test_a_stub_takes_what_the_solution_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stub: str, message: str | None
) -> None:
    monkeypatch.setattr(solutions, "get", lambda name: decode)
    found = differences(_notebook(tmp_path, stub))
    assert found == [] if message is None else len(found) == 1 and message in found[0]


def test_a_value_needs_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solutions, "get", lambda name: 4.5)
    assert differences(_notebook(tmp_path, "ratio = ...\ncheck.ratio(ratio)")) == []
    assert differences(_notebook(tmp_path, "def ratio(x):\n    ...\ncheck.ratio(ratio)"))


def test_the_latest_binding_above_the_check_counts() -> None:
    cells = [code("def f(a):\n    ...\ncheck.one(f)"), code("f = 1\ncheck.two(f)")]
    assert stubs(book(*cells)) == {"one": "(a)", "two": None}


def test_reading_source_never_fails_on_what_is_no_python() -> None:
    assert check_calls("%time check.one(1)") == []
    assert [name for name, _ in check_calls("check.one(1); other.two(2); labkit.check.three(3)")] == [
        "one",
        "three",
    ]


def test_the_signature_of_a_solution_is_read_from_source() -> None:
    outer: Any = decode
    assert signature_of(outer) == "(b0, b1=0, *, signed=True)"
    assert signature_of(3) is None
