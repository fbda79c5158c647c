"""Fixtures that the unit tests share."""

from __future__ import annotations

import pytest

from labkit.check import session


@pytest.fixture(autouse=True)
def _solve_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks look at the answer they are given, whatever an earlier test has left."""
    monkeypatch.setattr(session.current, "solve", False)
    monkeypatch.setattr(session.current, "chapter", None)
