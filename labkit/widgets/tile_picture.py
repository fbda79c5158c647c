"""Pictures of :class:`labkit.widgets.tile_picker.TilePicker`: SVG and matplotlib."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from labkit import plots
from labkit.widgets import base
from labkit.widgets.warp_access import BANKS, WarpAccess

if TYPE_CHECKING:
    from labkit.widgets.tile_picker import TilePicker

WIDTH = 680
_SIDE, _FAINT = 292.0, "#5F6670"
_A, _B, _C, _ONE, _PAD = plots.ORANGE, plots.GREEN, plots.PALE, plots.BLUE, "#B9BEC6"
# Words a bank must give, one a wavefront: pale to dark, so that it reads in grey too.
_HEAT = ((1, "#A9DAF6"), (2, plots.SKY), (4, plots.BLUE), (8, "#00304A"))


def bank_words(access: WarpAccess) -> list[int]:
    """Different words wanted of each bank: more than one is a conflict."""
    return [sum(bank in front.words for front in access.wavefronts) for bank in range(BANKS)]


def _heat(words: int) -> str:
    color = plots.PALE
    for least, shade in _HEAT:
        if words >= least:
            color = shade
    return color


def _ink(words: int) -> str:
    return "white" if words >= 4 else plots.INK


def svg(state: TilePicker) -> str:
    """The tile and one thread's share at the left, the figures at the right, the banks below."""
    if state.problem:
        words = f"This tile is not possible: {state.problem}."
        return base.svg(WIDTH, 40, [base.label(8, 24, words, size=13)], label=state.text())
    tile, left_end = _tile(state)
    facts, right_end = _facts(state)
    top = max(left_end, right_end) + 36
    return base.svg(WIDTH, top + 88, [*tile, *facts, *_banks(state, top)], label=state.text())


def _tile(state: TilePicker) -> tuple[list[str], float]:
    """Parts, and where they end."""
    bm, bn, bk = state.bm, state.bn, state.bk
    gap = 6.0
    scale = (_SIDE - gap) / max(bk + bn + state.pad, bk + bm)
    left, top = 8.0, 44.0
    cx, cy = left + bk * scale + gap, top + bk * scale + gap
    rows, columns = state.thread_tile
    parts = [
        base.label(left, 18, f"{bm}×{bn} outputs, {bk} columns of K at a time", size=14, bold=True),
        base.label(left, 36, "blue: one thread's outputs, and what it reads", size=12, color=_FAINT),
        base.rect(cx, top, bn * scale, bk * scale, _B, title=f"shared_b: {bk} × {bn} weights"),
        base.rect(left, cy, bk * scale, bm * scale, _A, title=f"shared_a: {bm} × {bk} activations"),
        base.rect(cx, cy, bn * scale, bm * scale, _C, title=f"{bm} × {bn} outputs of a block"),
    ]
    if state.pad:
        words = f"padding: {state.pad} cells a row"
        parts.append(
            base.rect(cx + bn * scale, top, max(state.pad * scale, 1.5), bk * scale, _PAD, title=words)
        )
    # What one thread reads at one k, and what it holds.
    wide, high = columns * scale, rows * scale
    thin = max(scale, 1.5)
    words = f"one thread: {rows} × {columns} outputs"
    parts += [
        base.rect(cx, cy, wide, high, _ONE, title=words),
        base.rect(cx, top, wide, thin, _ONE, title=f"its {columns} weights at one k"),
        base.rect(left, cy, thin, high, _ONE, title=f"its {rows} activations at one k"),
    ]
    boxes = (
        (cx + bn * scale / 2, top + bk * scale / 2, f"shared_b {bk}×{bn}"),
        (left + bk * scale / 2, cy + bm * scale / 2, f"shared_a {bm}×{bk}"),
        (cx + bn * scale / 2, cy + bm * scale / 2, f"outputs {bm}×{bn}"),
    )
    for x, y, name in boxes:
        if name.startswith("shared_a") and bk * scale < 64:
            parts.append(base.label(left, cy + bm * scale + 16, name, size=12))
        elif name.startswith("shared_a") and bk * scale < 106:
            first, second = name.split(" ")
            parts.append(base.label(x, y - 4, first, size=12, anchor="middle"))
            parts.append(base.label(x, y + 12, second, size=12, anchor="middle"))
        else:
            parts.append(base.label(x, y + 4, name, size=12, anchor="middle"))
    return parts, cy + bm * scale + 16


def _facts(state: TilePicker) -> tuple[list[str], float]:
    """Parts, and where they end."""
    left, value_at = 326.0, 486.0
    parts = []
    y = 50.0
    for name, value in state.facts():
        bad = name == "does not fit"
        color = plots.RED if bad else plots.INK
        parts.append(base.label(left, y, name, size=13, color=plots.RED if bad else _FAINT))
        for words in textwrap.wrap(value, 24, break_on_hyphens=False):
            parts.append(base.label(value_at, y, words, size=13, bold=True, color=color))
            y += 18
        y += 6
    registers = state.registers
    for words in textwrap.wrap(f"registers: {registers.origin}", 52):
        parts.append(base.label(left, y + 4, words, size=12, color=_FAINT))
        y += 16
    limits = _limits(state, left, y + 14)
    return [*parts, *limits], y + 26 + 18 * len(state.resident.limits)


def _limits(state: TilePicker, left: float, top: float) -> list[str]:
    """Blocks that each resource alone would allow: the shortest bar decides."""
    resident = state.resident
    most = max(resident.limits.values())
    parts = [base.label(left, top, "blocks an SM that each limit alone allows", size=12, color=_FAINT)]
    width = WIDTH - left - 148
    for i, (name, blocks) in enumerate(resident.limits.items()):
        y = top + 8 + 18 * i
        deciding = name in resident.limited_by
        color = plots.RED if deciding else plots.SKY
        parts.append(base.label(left, y + 12, name, size=12, bold=deciding))
        parts.append(base.rect(left + 114, y + 2, max(width * blocks / max(most, 1), 1), 12, color))
        parts.append(base.label(left + 120 + width * blocks / max(most, 1), y + 12, str(blocks), size=12))
    return parts


def _banks(state: TilePicker, top: float) -> list[str]:
    left, step = 152.0, 13.0
    parts = [
        base.label(8, top - 8, "words that one warp wants of each of the 32 banks (source-level)", size=12)
    ]
    for i, (what, access) in enumerate(state.accesses().items()):
        y = top + 26 * i
        parts.append(base.label(8, y + 15, what, size=12))
        for bank, words in enumerate(bank_words(access)):
            x = left + bank * step
            tip = f"bank {bank}: {words} word{'' if words == 1 else 's'}"
            parts.append(base.rect(x, y, step - 1, 20, _heat(words), title=tip))
            if words > 1:
                parts.append(
                    base.label(x + 6, y + 14, str(words), size=11, anchor="middle", color=_ink(words))
                )
        fronts = len(access.wavefronts)
        total = f"{fronts} wavefront{'' if fronts == 1 else 's'}"
        color = plots.RED if fronts > access.ideal_wavefronts else plots.INK
        parts.append(base.label(left + BANKS * step + 8, y + 15, total, size=13, bold=True, color=color))
    return parts


def draw_tile(ax: Axes, state: TilePicker) -> None:
    """The two shared tiles, the block's outputs and one thread's share, to scale."""
    bm, bn, bk = state.bm, state.bn, state.bk
    gap = max(bm, bn) * 0.03
    rows, columns = state.thread_tile
    cx, cy = bk + gap, bk + gap
    boxes = (
        (0, cy, bk, bm, _A, f"shared_a\n{bm}×{bk}"),
        (cx, 0, bn, bk, _B, f"shared_b\n{bk}×{bn}"),
        (cx, cy, bn, bm, _C, f"{bm}×{bn} outputs of a block"),
    )
    for x, y, wide, high, color, words in boxes:
        ax.add_patch(Rectangle((x, y), wide, high, facecolor=color))
        ax.text(x + wide / 2, y + high / 2, words, ha="center", va="center", fontsize=9)
    if state.pad:
        ax.add_patch(Rectangle((cx + bn, 0), state.pad, bk, facecolor=_PAD))
    ax.add_patch(Rectangle((cx, cy), columns, rows, facecolor=_ONE))
    ax.add_patch(Rectangle((cx, 0), columns, 1, facecolor=_ONE))
    ax.add_patch(Rectangle((0, cy), 1, rows, facecolor=_ONE))
    words = f"one thread: {rows}×{columns} outputs, {rows} + {columns} reads at one k"
    ax.annotate(
        words, (cx + columns, cy + rows), (6, -10), textcoords="offset points", fontsize=9, color=_ONE
    )
    ax.set_xlim(0, cx + bn + state.pad)
    ax.set_ylim(cy + bm, 0)
    ax.set_aspect("equal")
    ax.axis("off")


def draw_banks(ax: Axes, state: TilePicker) -> None:
    """One row an access, one column a bank; a number is the words it must give, one a wavefront."""
    colors, texts, names = [], [], []
    for what, access in state.accesses().items():
        wanted = bank_words(access)
        colors.append([_heat(words) for words in wanted])
        texts.append([str(words) if words > 1 else "" for words in wanted])
        fronts = len(access.wavefronts)
        names.append(f"{what}: {fronts} wavefront{'' if fronts == 1 else 's'}")
    plots.cells(ax, colors, texts, row_labels=names, fontsize=8)
    ax.set_xlabel(f"bank 0 … 31, padding {state.pad} (source-level)")
