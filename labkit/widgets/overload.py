"""Overload: arrivals, a queue limit and a bound on the first token; who is served in time, late, or not.

The users are those of :mod:`labkit.widgets.overload_run`: the real scheduler on the simulated clock.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit import plots
from labkit.errors import require
from labkit.widgets import base, scene
from labkit.widgets.overload_run import ROWS, Outcome, User, crowd, serve

WIDTH = 680
"""Width of the picture."""

COUNT = 160
"""Users."""

RATES = (1.0, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
QUEUES = (0, 2, 4, 8, 16, 32, 64, 256)
"""The last is more than all users: no limit."""

BOUNDS = (0.5, 1.0, 2.0, 4.0, 8.0)

COLORS = {"in time": plots.BLUE, "late": plots.ORANGE, "sent away (429)": plots.RED}
"""Fill of a user by what became of it."""

_FAINT = "#5F6670"
_LEFT, _RIGHT, _TOP, _STRIP, _DEEP = 66.0, 12.0, 46.0, 16.0, 150.0
_LEAST, _MOST = 0.1, 100.0
_HEIGHT = 296.0


@functools.cache
def outcome(rate: float, queue: int) -> Outcome:
    """The crowd at a door; clients take no for an answer.

    Raises:
        InputError: a rate or a queue that is not listed.
    """
    require(rate in RATES, "rate", repr(rate), f"one of {RATES}")
    require(queue in QUEUES, "queue", repr(queue), f"one of {QUEUES}")
    return serve(crowd(rate, COUNT), queue)


@dataclass
class Overload(base.Controller):
    """One crowd at one door.

    Attributes:
        rate: users that arrive in a second.
        queue: answers that may wait beyond those that run.
        bound: seconds in which the first token has to come.
    """

    rate: float = 4.0
    queue: int = 256
    bound: float = 2.0
    title: str = field(default="Overload: who is served in time?", repr=False)

    def __post_init__(self) -> None:
        for control in self.controls():
            control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Slider]:
        """Arrivals, queue limit and service level."""
        return (
            base.Slider("rate", "Arrivals a second", values=RATES),
            base.Slider("queue", "Queue limit", values=QUEUES),
            base.Slider("bound", "First token within (s)", values=BOUNDS),
        )

    # --- numbers

    @property
    def outcome(self) -> Outcome:
        """The run for the present state."""
        return outcome(self.rate, self.queue)

    def kind(self, user: User) -> str:
        """A key of :data:`COLORS`."""
        if user.request is None:
            return "sent away (429)"
        return "in time" if _wait(user) <= self.bound else "late"

    @property
    def counts(self) -> dict[str, int]:
        """Users by what became of them."""
        kinds = [self.kind(user) for user in self.outcome.users]
        return {kind: kinds.count(kind) for kind in COLORS}

    # --- words

    def head(self) -> str:
        """The state in one line."""
        limit = "no limit" if self.queue >= COUNT else f"queue limit {self.queue}"
        return f"{self.rate:g} users a second, {limit}, first token within {self.bound:g} s"

    def verdict(self) -> str:
        """What it comes to."""
        now = self.outcome
        p95 = now.latency.ttft.p95
        assert p95 is not None
        return (
            f"goodput {now.goodput(self.bound):.2f} users/s; {len(now.refusals)} times 429; "
            f"TTFT p95 of those let in {p95:.2f} s; {now.tokens_s:.0f} tokens/s"
        )

    def text(self) -> str:
        shares = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        origin = f"{self.outcome.origin}, RTX 3050 Laptop, {ROWS} rows"
        return f"{self.head()} ({origin}).\n{self.verdict()}.\nOf {COUNT} users: {shares}."

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        shown = "A point for each user: when it came, and how long it waited for its first token; "
        return f"{shown}those sent away are on a strip above. " + " ".join(self.text().split())

    # --- picture

    def shapes(self) -> list[scene.Shape]:
        """The picture, first shape lowest."""
        label = f"{self.head()} ({self.outcome.origin}, RTX 3050 Laptop, {ROWS} rows)"
        return [
            scene.Words(8, 18, self.verdict(), size=13, bold=True),
            scene.Words(8, 36, label, size=12, color=_FAINT),
            *self._field(_TOP),
        ]

    def _field(self, top: float) -> list[scene.Shape]:
        """Points, axes and the bar of shares, from ``top`` on."""
        users = self.outcome.users
        wide = WIDTH - _LEFT - _RIGHT
        scale = (wide - 6) / max(user.arrival for user in users)
        floor = top + _STRIP + 8 + _DEEP
        out: list[scene.Shape] = [
            scene.Words(_LEFT - 6, top + 12, "429", size=12, anchor="end", color=COLORS["sent away (429)"]),
            scene.Box(_LEFT, top, wide, _STRIP, "#F7F8F9"),
            scene.Box(_LEFT, floor - _DEEP, wide, _DEEP, "#F7F8F9"),
        ]
        for tick in (0.1, 1, 10, 100):
            y = floor - _deep(tick)
            out.append(scene.Path(((_LEFT, y), (WIDTH - _RIGHT, y)), "#DDE0E4", 1))
            words = f"{tick:g} s" if tick < 100 else "wait 100 s"
            out.append(scene.Words(_LEFT - 6, y + 4, words, size=11, anchor="end", color=_FAINT))
        y = floor - _deep(self.bound)
        out.append(scene.Path(((_LEFT, y), (WIDTH - _RIGHT, y)), plots.GREEN, 2))
        for number, user in enumerate(users, start=1):
            kind = self.kind(user)
            x = _LEFT + 3 + user.arrival * scale
            if user.request is None:
                tip, y = f"user {number}: sent away", top + _STRIP / 2
            else:
                tip, y = f"user {number}: first token after {_wait(user):.2f} s", floor - _deep(_wait(user))
            out.append(scene.Box(x - 2.5, y - 2.5, 5, 5, COLORS[kind], title=tip))
        last = max(user.arrival for user in users)
        step = next(step for step in (5, 10, 20, 50) if last / step <= 10)
        for second in range(0, int(last) + 1, step):
            x = _LEFT + 3 + second * scale
            words = "0 s: arrival" if second == 0 else f"{second}"
            anchor = "start" if second == 0 else "middle"
            out.append(scene.Words(x, floor + 15, words, size=11, anchor=anchor, color=_FAINT))
        return out + self._shares(floor + 26, wide)

    def _shares(self, top: float, wide: float) -> list[scene.Shape]:
        out: list[scene.Shape] = [scene.Words(_LEFT - 6, top + 14, "users", 12, "end")]
        x, key = _LEFT, _LEFT
        for kind, count in self.counts.items():
            length = wide * count / COUNT
            if count:
                out.append(scene.Box(x, top, length, 20, COLORS[kind], title=f"{count} {kind}"))
            x += length
            out.append(scene.Box(key, top + 27, 12, 12, COLORS[kind]))
            out.append(scene.Words(key + 17, top + 37, f"{count} {kind}", size=12))
            key += 60 + 6.6 * len(f"{count} {kind}")
        out.append(scene.Words(WIDTH - _RIGHT, top + 37, "green line: the bound", 12, "end", color=_FAINT))
        return out

    def picture(self) -> str:
        """The picture as SVG."""
        return scene.to_svg(WIDTH, _HEIGHT, self.shapes(), label=self.alt())

    def html(self) -> str:
        return f'<div style="max-width:{WIDTH}px;background:white;color:{plots.INK}">{self.picture()}</div>'


def _wait(user: User) -> float:
    return user.token_times[0] - user.arrival


def _deep(seconds: float) -> float:
    """Height of a wait above the floor; logarithmic."""
    inside = min(max(seconds, _LEAST), _MOST)
    return 4 + (_DEEP - 8) * math.log(inside / _LEAST) / math.log(_MOST / _LEAST)


def draw(ax: Any, *states: Overload) -> None:
    """Several states below each other, each headed by its numbers."""
    shapes: list[scene.Shape] = []
    for at, state in enumerate(states):
        top = at * _HEIGHT
        shapes.append(scene.Words(8, top + 16, f"{state.head()} ({state.outcome.origin})", 13, bold=True))
        shapes.append(scene.Words(8, top + 34, state.verdict(), size=12))
        shapes += state._field(top + _TOP)
    scene.to_axes(ax, WIDTH, draw_height(*states), shapes)


def draw_height(*states: Overload) -> float:
    """Height of :func:`draw`'s picture when it is :data:`WIDTH` wide."""
    return _HEIGHT * len(states)
