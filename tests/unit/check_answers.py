"""What tests of exercises say about an answer."""

from __future__ import annotations

from typing import Any

from labkit import check


def refused(name: str, answer: Any, words: str) -> None:
    """The exercise's verdict is "not yet", with these words in it."""
    verdict = check.find(name)(answer)
    assert verdict.state == "not yet", verdict
    assert words in f"{verdict.expected} {verdict.got} {verdict.hint}", verdict
