"""What a check says: not attempted, not yet, or passed; as text and as HTML, the same on every run."""

from __future__ import annotations

import html
from dataclasses import dataclass, replace
from typing import Any, Literal

State = Literal["not attempted", "not yet", "passed"]

_COLORS = {
    "not attempted": ("#5a6472", "#f3f5f7"),
    "not yet": ("#8a5a00", "#fff6e0"),
    "passed": ("#1b6e3c", "#e8f6ed"),
}


@dataclass(frozen=True)
class Verdict:
    """One answer's verdict. The exercise returns it; the frame fills in what it knows.

    Attributes:
        state: ``"not attempted"``, ``"not yet"`` or ``"passed"``.
        message: one sentence for a pass, or for a stub.
        expected, got, hint: the three parts of "not yet".
        score: a number to compare with par, or None.
        exercise, title, par, limit, unit, better: filled in by the frame.
        reference: True when the reference solution was checked (solve on).
        note: why the progress could not be saved; empty when it was.
    """

    state: State
    message: str = ""
    expected: str = ""
    got: str = ""
    hint: str = ""
    score: float | None = None
    exercise: str = ""
    title: str = ""
    par: float | None = None
    limit: float | None = None
    unit: str = ""
    better: str = "lower"
    reference: bool = False
    note: str = ""

    def __bool__(self) -> bool:
        return self.state == "passed"

    def with_frame(self, **values: Any) -> Verdict:
        """The same verdict with the frame's fields set."""
        return replace(self, **values)

    def score_line(self) -> str:
        """Such as ``96 sectors, par 24, pass <= 32``; empty without a score."""
        if self.score is None:
            return ""
        parts = [f"{_plain(self.score)} {self.unit}".strip()]
        if self.par is not None:
            parts.append(f"par {_plain(self.par)}")
        if self.limit is not None:
            parts.append(f"pass {'<=' if self.better == 'lower' else '>='} {_plain(self.limit)}")
        return ", ".join(parts)

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) pairs below the heading; a label may be empty."""
        rows = [("", self.message), ("score", self.score_line()), ("expected", self.expected)]
        rows += [("got", self.got), ("hint", self.hint), ("note", self.note)]
        return [(label, value) for label, value in rows if value]

    def heading(self) -> str:
        """Such as ``02.1 passed: Two bits across a byte``."""
        state = f"{self.state} (reference solution)" if self.reference else self.state
        head = f"{self.exercise} {state}".strip()
        return f"{head}: {self.title}" if self.title else head

    def __repr__(self) -> str:
        out = [self.heading()]
        for label, value in self.lines():
            prefix = f"  {label}: " if label else "  "
            out.append(prefix + value.replace("\n", "\n" + " " * len(prefix)))
        return "\n".join(out)

    def _repr_html_(self) -> str:
        ink, paper = _COLORS[self.state]
        rows = ""
        for label, value in self.lines():
            name = f"<b>{label}</b> " if label else ""
            rows += f"<div style='white-space:pre-wrap'>{name}{html.escape(value)}</div>"
        return (
            f"<div style='border-left:4px solid {ink};background:{paper};color:#1f2630;"
            f"padding:.5em .9em;margin:.3em 0'>"
            f"<div style='color:{ink};font-weight:600'>{html.escape(self.heading())}</div>{rows}</div>"
        )


def _plain(value: float) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() else f"{number:.4g}"


class NotYet(Exception):
    """Ends a check from inside a helper; the frame shows its verdict."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(str(verdict))


def passed(message: str = "", *, score: float | None = None, hint: str = "") -> Verdict:
    """The answer is right; ``score`` is compared with the exercise's par and limit by the frame.

    ``hint`` is shown only when the score does not pass.
    """
    return Verdict("passed", message=message, hint=hint, score=None if score is None else float(score))


def not_yet(expected: object, got: object, hint: str = "", *, score: float | None = None) -> Verdict:
    """The answer is not right yet: what was expected, what came, one hint."""
    return Verdict(
        "not yet",
        expected=str(expected),
        got=str(got),
        hint=hint,
        score=None if score is None else float(score),
    )


def not_attempted(message: str = "") -> Verdict:
    """There is no answer so far; never shown in red."""
    return Verdict("not attempted", message=message or "write your answer above and run this cell again")
