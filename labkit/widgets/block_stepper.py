"""Block stepper: requests share a pool of KV blocks, one event after the other, for any block size.

The state is a frame of :func:`labkit.widgets.block_story.story`, which replays its events on the library's
allocator and prefix cache.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit import plots
from labkit.widgets import base, scene
from labkit.widgets.block_story import BLOCK_SIZES, Frame, story

WIDTH = 680
"""Width of the picture; see :attr:`BlockStepper.height`."""

COLORS = {
    "A": plots.SKY,
    "B": plots.ORANGE,
    "C": "#6FCFB4",
    "D": plots.PURPLE,
    "E": plots.YELLOW,
    "G": "#C5CF6D",
}
"""Fill of the slots that a request wrote; light enough for its letter in ink."""

_FAINT, _STALE, _EMPTY, _MARK = "#5F6670", "#8A8F98", "#F4F5F7", plots.RED
_SIDE, _ROW, _TABLE = 8.0, 24.0, 172.0
_POOL_ROWS, _POOL_ROW = 2, 76.0
_SLOT_HIGH = 24.0
_LETTER = 11


@dataclass
class BlockStepper(base.Controller):
    """One moment of the story.

    Attributes:
        block_size: slots of a block; the pool stays at 64 slots.
        step: events so far.
    """

    block_size: int = 4
    step: int = 7
    title: str = field(default="Block stepper: who holds which block?", repr=False)

    def __post_init__(self) -> None:
        for control in self.controls():
            if not isinstance(control, base.Button):
                control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Control]:
        """Event and block size, and two buttons for single steps."""
        return (
            base.Slider("step", "Event", 0, len(story(BLOCK_SIZES[0])) - 1),
            base.Slider("block_size", "Block size (tokens)", values=BLOCK_SIZES),
            base.Button("next", "Next event"),
            base.Button("back", "One back"),
        )

    def press(self, name: str) -> None:
        """One event on, or back; at either end nothing happens."""
        if name not in ("next", "back"):
            super().press(name)
        last = len(story(self.block_size)) - 1
        self.step = min(self.step + 1, last) if name == "next" else max(self.step - 1, 0)

    # --- numbers

    @property
    def frame(self) -> Frame:
        """The books now."""
        return story(self.block_size)[self.step]

    @property
    def shared_blocks(self) -> int:
        """Blocks that more than one table refers to."""
        return sum(count > 1 for count in self.frame.refs)

    # --- words

    def head(self) -> str:
        """The event in one line."""
        return f"{self.step}. {self.frame.title}"

    def verdict(self) -> str:
        """The counts."""
        now = self.frame
        return (
            f"{now.tokens} tokens in {now.used} used blocks; {now.idle} idle, {now.free} free; "
            f"{now.empty} used slots empty; sharing spares {now.saved} slots"
        )

    def text(self) -> str:
        lines = [f"Block size {self.block_size}. {self.head()}: {self.frame.note}."]
        lines += [f"  {name}: {length} tokens, blocks {list(ids)}" for name, ids, length in self.frame.tables]
        return "\n".join([*lines, f"{self.verdict()}."])

    def alt(self) -> str:
        """What :meth:`picture` shows, in words."""
        return "Block tables of the requests, and the pool block by block. " + " ".join(self.text().split())

    # --- picture

    @property
    def height(self) -> float:
        """Height of the picture when it is :data:`WIDTH` wide."""
        return self._pool_top(82) + _POOL_ROWS * _POOL_ROW + 30

    def _pool_top(self, top: float) -> float:
        return top + _ROW * max(3, len(self.frame.tables)) + 14

    def shapes(self) -> list[scene.Shape]:
        """The picture, first shape lowest."""
        out: list[scene.Shape] = [scene.Words(_SIDE, 18, self.head(), size=14, bold=True)]
        lines = textwrap.wrap(f"{_capital(self.frame.note)}. {_capital(self.verdict())}.", 104)
        out += [scene.Words(_SIDE, 38 + 17 * i, line, size=12) for i, line in enumerate(lines)]
        top = 82.0
        out += self.tables(top)
        out += self.pool(self._pool_top(top))
        return [*out, *self.key(self.height - 10)]

    def tables(self, top: float) -> list[scene.Shape]:
        """The block table of every request, from ``top`` on."""
        out: list[scene.Shape] = []
        if not self.frame.tables:
            out.append(scene.Words(_SIDE, top + 15, "no request", size=12, color=_FAINT))
        for i, (name, blocks, length) in enumerate(self.frame.tables):
            y = top + _ROW * i
            out.append(scene.Box(_SIDE, y, 18, 18, COLORS[name]))
            out.append(scene.Words(_SIDE + 9, y + 14, name, size=12, anchor="middle", bold=True))
            out.append(scene.Words(_SIDE + 26, y + 14, f"{length} tokens: blocks", size=12))
            wide = min(26.0, (WIDTH - _TABLE - _SIDE) / len(blocks))
            for place, block in enumerate(blocks):
                x = _TABLE + wide * place
                shared = self.frame.refs[block] > 1
                tip = f"positions {place * self.block_size} to {(place + 1) * self.block_size - 1} of {name}"
                fill = plots.PALE if shared else "white"
                out.append(scene.Box(x, y, wide - 2, 18, fill, stroke=scene.INK, title=tip))
                middle, number = x + (wide - 2) / 2, str(block)
                out.append(scene.Words(middle, y + 13.5, number, _LETTER, "middle", bold=shared))
        return out

    def pool(self, top: float) -> list[scene.Shape]:
        """Every block of the pool with its slots, from ``top`` on."""
        out: list[scene.Shape] = []
        now, size = self.frame, self.block_size
        a_row = len(now.refs) // _POOL_ROWS
        gap = 4.0 if size == 2 else 7.0
        slot_wide = ((WIDTH - 2 * _SIDE + gap) / a_row - gap) / size
        for block, (refs, kept) in enumerate(zip(now.refs, now.kept, strict=True)):
            x = _SIDE + (block % a_row) * (slot_wide * size + gap)
            y = top + (block // a_row) * _POOL_ROW
            wide = slot_wide * size
            names = "".join(name for name, blocks, _ in now.tables if block in blocks)
            state = names if refs else ("idle" if kept else "")
            marked = block in now.touched
            ink = _MARK if marked else scene.INK
            out.append(scene.Words(x, y + 12, str(block), _LETTER, color=ink, bold=marked))
            for offset in range(size):
                out += self._slot(x + offset * slot_wide, y + 17, slot_wide, block, offset)
            edge = _MARK if marked else scene.INK if refs or kept else "#C3C8CF"
            low, high, right = y + 17, y + 17 + _SLOT_HIGH, x + wide
            frame = ((x, low), (right, low), (right, high), (x, high), (x, low))
            out.append(scene.Path(frame, edge, width=2.4 if marked else 1.2))
            label = " ".join(state) if refs and size > 2 else state
            color = scene.INK if refs else _FAINT
            out.append(scene.Words(x + wide / 2, y + 55, label, size=_LETTER, anchor="middle", color=color))
        return out

    def _slot(self, x: float, y: float, wide: float, block: int, offset: int) -> list[scene.Shape]:
        name = self.frame.slots[block * self.block_size + offset]
        live = name.isupper()
        fill = COLORS[name] if live else _EMPTY
        said = f"written by {name}" if live else f"stale, left by {name.upper()}" if name else "never written"
        tip = f"slot {block * self.block_size + offset}: {said}"
        out: list[scene.Shape] = [scene.Box(x, y, wide, _SLOT_HIGH, fill, stroke="white", title=tip)]
        if name:
            color, middle = scene.INK if live else _STALE, x + wide / 2
            out.append(scene.Words(middle, y + 16.5, name, _LETTER, "middle", color=color, bold=live))
        return out

    def key(self, y: float) -> list[scene.Shape]:
        """What the marks mean, on one line."""
        words = "A: written by A. a: stale, nobody may read it. Below a block: who refers to it."
        return [
            scene.Words(_SIDE, y, words, size=12, color=_FAINT),
            scene.Words(WIDTH - _SIDE, y, "Red: touched now.", size=12, anchor="end", color=_MARK),
        ]

    def picture(self) -> str:
        """The picture as SVG."""
        return scene.to_svg(WIDTH, self.height, self.shapes(), label=self.alt())

    def html(self) -> str:
        return f'<div style="max-width:{WIDTH}px;background:white;color:{plots.INK}">{self.picture()}</div>'


def draw(ax: Any, *states: BlockStepper) -> None:
    """Moments below each other as a static figure, each headed by its event."""
    shapes: list[scene.Shape] = []
    top = 0.0
    for state in states:
        shapes.append(scene.Words(_SIDE, top + 16, state.head(), size=13, bold=True))
        shapes.append(scene.Words(_SIDE, top + 33, f"{_capital(state.frame.note)}.", size=12))
        shapes += [*state.tables(top + 42), *state.pool(_pool_of(state, top))]
        top += _drawn(state)
    scene.to_axes(ax, WIDTH, draw_height(*states), [*shapes, *states[0].key(top + 10)])


def draw_height(*states: BlockStepper) -> float:
    """Height of :func:`draw`'s picture when it is :data:`WIDTH` wide."""
    return sum(map(_drawn, states)) + 18


def _pool_of(state: BlockStepper, top: float) -> float:
    return top + 42 + _ROW * len(state.frame.tables) + 8


def _drawn(state: BlockStepper) -> float:
    return _pool_of(state, 0) + _POOL_ROWS * _POOL_ROW + 4


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
