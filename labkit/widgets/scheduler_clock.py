"""Scheduler clock: arrivals, a chunk size and a policy; what runs on each lane, and what each request sees.

The state is a :class:`labkit.widgets.scheduler_run.Run`, the real scheduler on the simulated clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit import plots
from labkit.widgets import base, scene
from labkit.widgets.scheduler_run import CHUNKS, POLICIES, RATES, Block, Run, Track, run

WIDTH = 680
"""Width of the picture; see :attr:`SchedulerClock.height`."""

COLORS = {"decode": plots.BLUE, "prefill": plots.ORANGE, "mixed": plots.GREEN}
"""Fill of a work by its kind."""

_FAINT, _WAIT, _PROMPT, _BUSY = "#5F6670", plots.PALE, "#F3CF8A", "#DCEAF5"
_LEFT, _RIGHT = 66.0, 12.0
_LANE, _ROW = 26.0, 19.0
_LANES = ("decode", "prefill")
_KEY = (
    ("decode", COLORS["decode"]),
    ("chunk", COLORS["prefill"]),
    ("both in one", COLORS["mixed"]),
    ("prompt waits", _WAIT),
    ("prompt computed", _PROMPT),
)


@dataclass
class SchedulerClock(base.Controller):
    """One crowd under one policy.

    Attributes:
        rate: requests that arrive in a second.
        chunk: prompt tokens of a step, at most.
        policy: "serial", "overlap" or "mixed".
    """

    rate: float = 1.0
    chunk: int = 128
    policy: str = "serial"
    title: str = field(default="Scheduler clock: who runs next, and who waits?", repr=False)

    def __post_init__(self) -> None:
        for control in self.controls():
            control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Slider | base.Choice]:
        """Arrivals, chunk size and policy."""
        return (
            base.Slider("rate", "Arrivals a second", values=RATES),
            base.Slider("chunk", "Chunk size (tokens)", values=CHUNKS),
            base.Choice("policy", "Policy", tuple((name, name) for name in POLICIES)),
        )

    # --- numbers

    @property
    def run(self) -> Run:
        """The replay for the present state."""
        return run(self.rate, self.chunk, self.policy)

    # --- words

    def head(self) -> str:
        """The state in one line."""
        return f"{self.policy}, chunk {self.chunk}, {self.rate:g} requests a second"

    def verdict(self) -> str:
        """The latencies."""
        now, ms = self.run.latency, 1e3
        assert now.ttft.p50 and now.ttft.max and now.itl.p50 and now.itl.p99 and now.itl.max
        return (
            f"TTFT p50 {now.ttft.p50:.2f} s, max {now.ttft.max:.2f} s; "
            f"ITL p50 {ms * now.itl.p50:.0f}, p99 {ms * now.itl.p99:.0f}, max {ms * now.itl.max:.0f} ms; "
            f"{self.run.tokens_s:.1f} tokens/s"
        )

    def text(self) -> str:
        lines = [f"{self.head()} ({self.run.label}, RTX 3050 Laptop).", f"{self.verdict()}."]
        for track in self.run.tracks:
            start, end = track.largest_gap
            first = track.token_times[0] - track.arrival
            lines.append(
                f"  {track.name}: prompt {track.prompt_len}, arrives {track.arrival:.2f} s, "
                f"first token after {first:.2f} s, longest gap {1e3 * (end - start):.0f} ms"
            )
        return "\n".join(lines)

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        return "Two lanes with their works, and a row for each request. " + " ".join(self.text().split())

    # --- picture

    @property
    def height(self) -> float:
        """Height of the picture when it is :data:`WIDTH` wide."""
        return 46 + _drawn(self) + 20

    def shapes(self) -> list[scene.Shape]:
        """The picture, first shape lowest."""
        out: list[scene.Shape] = [
            scene.Words(8, 18, self.verdict(), size=13, bold=True),
            scene.Words(8, 36, f"{self.run.label}, RTX 3050 Laptop", size=12, color=_FAINT),
        ]
        out += self.timeline(46, self.run.end)
        return [*out, *key(self.height - 8)]

    def timeline(self, top: float, end: float) -> list[scene.Shape]:
        """Lanes, requests and the axis, from ``top`` on; ``end`` seconds fill the width."""
        now, scale = self.run, (WIDTH - _LEFT - _RIGHT) / end
        out: list[scene.Shape] = []
        for at, lane in enumerate(_LANES):
            y = top + at * _LANE
            out.append(scene.Words(8, y + 16, lane, size=12, bold=True))
            out.append(scene.Box(_LEFT, y, scale * now.end, _LANE - 5, "#F7F8F9"))
        for block in now.blocks:
            y = top + _LANES.index(block.lane) * _LANE
            out.append(_work(block, y, scale))
        y = top + len(_LANES) * _LANE + 4
        for track in now.tracks:
            out += _track(track, now.blocks, y, scale)
            y += _ROW
        step = next(step for step in (1, 2, 5, 10, 20, 50) if end / step <= 12)
        for tick in range(0, int(end) + 1, step):
            x = _LEFT + tick * scale
            out.append(scene.Path(((x, y), (x, y + 4)), _FAINT, 1))
            label = f"{tick} s" if tick == 0 else str(tick)
            out.append(scene.Words(x, y + 16, label, size=11, anchor="middle", color=_FAINT))
        return out

    def picture(self) -> str:
        """The picture as SVG."""
        return scene.to_svg(WIDTH, self.height, self.shapes(), label=self.alt())

    def html(self) -> str:
        return f'<div style="max-width:{WIDTH}px;background:white;color:{plots.INK}">{self.picture()}</div>'


def _work(block: Block, y: float, scale: float) -> scene.Box:
    x, wide = _LEFT + block.start * scale, max((block.end - block.start) * scale, 0.8)
    return scene.Box(x, y, wide, _LANE - 5, COLORS[block.kind], stroke="white", title=block.title)


def _track(track: Track, blocks: Sequence[Block], y: float, scale: float) -> list[scene.Shape]:
    def at(seconds: float) -> float:
        return _LEFT + seconds * scale

    high, times = _ROW - 6, track.token_times
    low = y + high
    mine = [block for block in blocks if track.name in block.chunks]
    out: list[scene.Shape] = [scene.Words(8, y + 11, f"{track.name} {track.prompt_len}", size=12)]
    wait = f"{track.name} waits {times[0] - track.arrival:.2f} s for its first token"
    out.append(scene.Box(at(track.arrival), y, at(times[0]) - at(track.arrival), high, _WAIT, title=wait))
    for block in mine:
        wide = at(block.end) - at(block.start)
        out.append(scene.Box(at(block.start), y, wide, high, _PROMPT, title=block.title))
    start, end = track.largest_gap
    out.append(scene.Box(at(times[0]), y, at(times[-1]) - at(times[0]), high, _BUSY))
    out += [scene.Path(((at(time), y), (at(time), low)), plots.BLUE, 0.9) for time in times]
    tip = f"longest gap of {track.name}: {1e3 * (end - start):.0f} ms"
    out.append(scene.Box(at(start), low + 1, at(end) - at(start), 2.6, plots.RED, title=tip))
    return out


def key(y: float) -> list[scene.Shape]:
    """What the colours mean, on one line."""
    out: list[scene.Shape] = []
    x = 8.0
    for words, color in _KEY:
        out.append(scene.Box(x, y - 10, 12, 12, color))
        out.append(scene.Words(x + 16, y, words, size=12, color=_FAINT))
        x += 34 + 6.6 * len(words)
    out.append(scene.Words(WIDTH - 8, y, "line: token; red: longest gap", 12, "end", color=_FAINT))
    return out


def draw(ax: Any, *states: SchedulerClock) -> None:
    """Several states below each other on one time axis, each headed by its numbers."""
    shapes: list[scene.Shape] = []
    top, end = 0.0, max(state.run.end for state in states)
    for state in states:
        shapes.append(scene.Words(8, top + 15, f"{state.head()} ({state.run.label})", size=13, bold=True))
        shapes.append(scene.Words(8, top + 31, state.verdict(), size=12))
        shapes += state.timeline(top + 38, end)
        top += 38 + _drawn(state) + 6
    scene.to_axes(ax, WIDTH, draw_height(*states), [*shapes, *key(top + 12)])


def draw_height(*states: SchedulerClock) -> float:
    """Height of :func:`draw`'s picture when it is :data:`WIDTH` wide."""
    return sum(44 + _drawn(state) for state in states) + 18


def _drawn(state: SchedulerClock) -> float:
    """Height of a timeline."""
    return len(_LANES) * _LANE + 4 + _ROW * len(state.run.tracks) + 22
