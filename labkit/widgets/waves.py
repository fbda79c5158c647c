"""nsplit → waves: how many blocks the z-split GEMM has, and how they fill the SMs of a card.

Grids and rules come from :mod:`labkit.kernels.zsplit`, resident blocks from the compiled kernel's
registers (:mod:`labkit.kernels.resources`). The picture is a model: blocks of equal length, dealt
out evenly, wave after wave. A GPU starts a block as soon as one ends, so waves are not that sharp.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from labkit import device as devices
from labkit import plots
from labkit.errors import InputError, refuse, require
from labkit.kernels.occupancy import Occupancy, Waves
from labkit.widgets import base

_M_STOPS = (1, 2, 4, 8, 16, 32, 64, 128)
_FORMATS = ("q8_0", "q4_0")
_RULES = (("by (N, K) only", "invariant"), ("the seed's, by M too", "seed"))
_GROUP = 32

_FULL, _PART, _IDLE, _FAINT = plots.BLUE, plots.SKY, plots.PALE, "#5F6670"
_WIDTH, _LEFT, _RIGHT = 680, 70, 96
_MOST_ROWS = 5


class Launch(Protocol):
    """What a plan says: :class:`labkit.kernels.zsplit.Plan`, or a stand-in in tests."""

    @property
    def nsplit(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def planes(self) -> int: ...
    @property
    def part_bytes(self) -> int: ...


def zsplit_plan(m: int, n: int, k: int, **options: Any) -> Launch:
    """:func:`labkit.kernels.zsplit.plan`; imported late, because the package needs torch."""
    from labkit.kernels.zsplit.rule import plan

    return plan(m, n, k, **options)


@functools.cache
def zsplit_occupancy(card: str) -> Occupancy:
    """Resident blocks of ``zsplit_gemm`` on a card, by the registers that the compiler gives it there.

    Where no NVRTC is installed, the bound stated in the kernel's file takes the place of the registers.
    """
    from labkit.kernels import resources
    from labkit.kernels.occupancy import occupancy
    from labkit.kernels.source import KernelSource

    source = KernelSource("zsplit.cu", "zsplit_gemm")
    facts = devices.get_device(card)
    try:
        return resources.usage(source, facts.capability).occupancy(facts)
    except InputError:
        bound = resources.stated_registers(source)
        if bound is None:
            raise
        return occupancy(bound, 0, 256, facts)


@dataclass
class SplitWaves(base.Controller):
    """x [M, K] by a grouped weight [N, K], its groups of K cut into ``nsplit`` slices.

    Attributes:
        n, k: output and input features.
        m: rows of x.
        nsplit: slices of K, 1 to the number of groups; 0 for the rule's choice. A block takes one slice;
            with the rule's choice it takes what the rule gives it, perhaps a run of neighbouring slices.
        rule: "invariant" (by N and K only) or "seed".
        card: key of ``data/devices.json``.
        format: "q8_0" or "q4_0": both are stored as one byte a code and a float scale for each group.
        plan, occupancy: where grids and resident blocks come from.
    """

    n: int = 5632
    k: int = 2048
    m: int = 1
    nsplit: int = 1
    rule: str = "invariant"
    card: str = "rtx3050-laptop"
    format: str = "q8_0"
    plan: Callable[..., Launch] = field(default=zsplit_plan, repr=False)
    occupancy: Callable[[str], Occupancy] = field(default=zsplit_occupancy, repr=False)
    title: str = field(default="z-split: slices of K, and the waves that they make", repr=False)

    def __post_init__(self) -> None:
        for name in ("n", "k", "m"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(whole, name, repr(value), "a whole number >= 1")
        require(self.format in _FORMATS, "format", repr(self.format), " or ".join(_FORMATS))
        self.nsplit = self.nsplit or self.by_rule.nsplit
        for control in self.controls():
            if not isinstance(control, base.Button):
                control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Control]:
        """Slices, rows, rule, card, and a button that takes the rule's choice."""
        cards = tuple((f"{card.name} ({card.sms} SMs)", card.key) for card in devices.devices().values())
        return (
            base.Slider("nsplit", "nsplit (slices of K)", 1, self.groups),
            base.Slider("m", "M (rows)", values=tuple(sorted({*_M_STOPS, self.m})), fmt="{:.0f}"),
            base.Choice("rule", "Rule to compare", _RULES),
            base.Choice("card", "Card", cards),
            base.Button("take", "Take the rule's nsplit"),
        )

    def press(self, name: str) -> None:
        """Set ``nsplit`` to what the rule says."""
        if name != "take":
            super().press(name)
        self.nsplit = self.by_rule.nsplit

    # ---- numbers ----

    @property
    def groups(self) -> int:
        """Groups of 32 along K, the last one padded: more slices than these there are not."""
        from labkit.kernels.zsplit.rule import groups_of

        return groups_of(self.k)

    @property
    def launch(self) -> Launch:
        """The launch with ``nsplit`` slices: the rule's own where the rule takes as many."""
        rule = self.by_rule
        return rule if self.nsplit == rule.nsplit else self.sliced(int(self.nsplit))

    @property
    def by_rule(self) -> Launch:
        """The launch that the rule makes."""
        return self.plan(self.m, self.n, self.k, rule=self.rule)

    def sliced(self, nsplit: int) -> Launch:
        """The launch in which each block takes one of ``nsplit`` slices, or all of them past the cap."""
        return self.plan(self.m, self.n, self.k, nsplit=nsplit)

    @property
    def resident(self) -> Occupancy:
        """Blocks an SM of the card holds, and what stops more."""
        return self.occupancy(self.card)

    @property
    def sms(self) -> int:
        """SMs of the card."""
        return devices.get_device(self.card).sms

    @property
    def waves(self) -> Waves:
        """Blocks shared out over the slots of the card."""
        return self.resident.waves(self.launch.blocks)

    def per_sm(self, wave: int) -> list[int]:
        """Blocks on each SM in one wave (0 is the first): dealt out evenly, first SMs first."""
        waves = self.waves
        require(0 <= wave < waves.rounds, "wave", wave, f"0 to {waves.rounds - 1}")
        here = min(waves.slots, waves.grid_blocks - wave * waves.slots)
        each, more = divmod(here, self.sms)
        return [each + (sm < more) for sm in range(self.sms)]

    @property
    def idle_sms(self) -> int:
        """SMs with no block in the last wave, the only one of a small grid."""
        return self.per_sm(self.waves.rounds - 1).count(0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the stored weight: a step reads them once."""
        from labkit.quant.sizes import packed_bytes

        return packed_bytes(self.format, self.n, self.k, _GROUP)

    def extra_percent(self, launch: Launch) -> float:
        """Partial sums written and read back, in % of the weight's bytes."""
        return 100 * 2 * launch.part_bytes / self.weight_bytes

    def sweep(self) -> list[tuple[int, float, float]]:
        """(nsplit, % of slots filled, extra traffic in %) for every nsplit, a block for each slice."""
        found = []
        for nsplit in range(1, self.groups + 1):
            launch = self.sliced(nsplit)
            filled = 100 * self.resident.waves(launch.blocks).utilisation
            found.append((nsplit, filled, self.extra_percent(launch)))
        return found

    # ---- words ----

    def fill_words(self) -> str:
        """Blocks, slots, waves and idle SMs."""
        waves, blocks = self.waves, self.launch.blocks
        last = waves.tail_blocks or waves.slots
        many = f"{waves.rounds} waves, the last with {last} of {waves.slots} slots taken"
        taken = many if waves.rounds > 1 else f"one wave, {last} of {waves.slots} slots taken"
        idle = f"{self.idle_sms} of {self.sms} SMs idle{' in it' if waves.rounds > 1 else ''}"
        return (
            f"{blocks} block{'s' if blocks > 1 else ''} on {self.sms} SMs × {self.resident.blocks} resident: "
            f"{taken}, {idle if self.idle_sms else 'no SM idle'}; {100 * waves.utilisation:.0f} % filled."
        )

    def part_words(self) -> str:
        """The buffer of partial sums, and what it costs."""
        launch = self.launch
        if launch.planes > 1:
            whose = "Slice sums take"
            if launch.planes < launch.nsplit:
                whose = f"A block folds neighbouring slices into {launch.planes} runs. Their sums take"
            return (
                f"{whose} {_bytes(launch.part_bytes)}; written, then read by a second launch, they "
                f"add {self.extra_percent(launch):.2f} % to the {_bytes(self.weight_bytes)} of weights."
            )
        if launch.nsplit == 1:
            return "One slice: no slice sums, no second launch."
        why = "The grid is full without slices"
        if launch != self.by_rule:
            why = "The slice sums of so many rows would pass the cap of the buffer"
        return (
            f"{why}: every block computes all slices itself, one after another. The bits are the same; no "
            "sums are written, and there is no second launch."
        )

    def text(self) -> str:
        """Shape, fill, cost, and the rule's choice."""
        rule = self.by_rule
        stops = " and ".join(self.resident.limited_by)
        card = devices.get_device(self.card).name
        head = f"{self.m}×{self.n}×{self.k} (M×N×K), {self.format}, nsplit {self.nsplit}, {card}: "
        if self.resident.blocks == 0:
            return f"{head}the kernel does not fit this card ({stops})."
        names = {value: name for name, value in _RULES}
        return (
            f"{head}{self.fill_words()} Resident blocks are limited by {stops}. {self.part_words()} "
            f"The rule ({names[self.rule]}) takes nsplit {rule.nsplit}{self._in_runs(rule)}: "
            f"{rule.blocks} blocks, {self.extra_percent(rule):.2f} % extra traffic."
        )

    def headline(self) -> str:
        """Slices, what a block takes of them where it is more than one, and blocks."""
        return f"nsplit {self.nsplit}{self._in_runs(self.launch)}: {self.launch.blocks} blocks"

    @staticmethod
    def _in_runs(launch: Launch) -> str:
        return f", {_folded(launch)}" if launch.planes < launch.nsplit else ""

    # ---- pictures ----

    def rows(self) -> list[tuple[str, list[int] | None]]:
        """(label, blocks on each SM) of every wave; full waves in the middle of many are one row, None."""
        rounds = self.waves.rounds
        if rounds <= _MOST_ROWS:
            return [(f"wave {wave + 1}", self.per_sm(wave)) for wave in range(rounds)]
        middle = f"waves 2–{rounds - 1}: full"
        ends = [(f"wave {wave + 1}", self.per_sm(wave)) for wave in (0, rounds - 1)]
        return [ends[0], (middle, None), ends[1]]

    def html(self) -> str:
        return f'<div style="max-width:{_WIDTH}px;background:white;color:{plots.INK}">{self.picture()}</div>'

    def picture(self) -> str:
        """SVG: SMs × waves, and below it fill and extra traffic against nsplit."""
        if self.resident.blocks == 0:
            return base.svg(_WIDTH, 40, [base.label(8, 24, self.text(), size=12)], label=self.text())
        parts, bottom = self._grid(58)
        parts += [
            base.label(8, 18, self.headline(), size=15, bold=True),
            base.label(8, 40, self.fill_words(), size=12),
        ]
        chart, end = self._chart(bottom + 44)
        return base.svg(_WIDTH, end, [*parts, *chart], label=self.text())

    def _grid(self, top: float) -> tuple[list[str], float]:
        step = (_WIDTH - _LEFT - _RIGHT) / self.sms
        gap = min(1.5, step * 0.2)
        capacity = self.resident.blocks
        parts: list[str] = []
        y = top
        rows = self.rows()
        high = max(26, 60 // len(rows))
        for name, blocks in rows:
            middle = y + high / 2 + 4
            if blocks is None:
                parts.append(base.label(_LEFT, middle, name, size=12, color=_FAINT))
                y += high + 4
                continue
            parts.append(base.label(_LEFT - 8, middle, name, size=12, anchor="end"))
            for sm, count in enumerate(blocks):
                x, filled = _LEFT + sm * step, high * count / capacity
                tip = f"{name}, SM {sm}: {count} of {capacity} blocks"
                parts.append(base.rect(x, y, step - gap, high, _IDLE, title=tip))
                if count:
                    color = _FULL if count == capacity else _PART
                    parts.append(base.rect(x, y + high - filled, step - gap, filled, color, title=tip))
            words = f"{sum(blocks)} of {capacity * self.sms}"
            parts.append(base.label(_WIDTH - _RIGHT + 8, middle, words, size=12))
            y += high + 4
        legend = ((_FULL, "SM full"), (_PART, "partly"), (_IDLE, "idle"))
        x = float(_LEFT)
        for color, name in legend:
            parts += [base.rect(x, y + 4, 12, 12, color), base.label(x + 17, y + 15, name, size=12)]
            x += 84
        words = f"one column an SM, {capacity} resident blocks high; model: equal blocks"
        parts.append(base.label(_WIDTH - 8, y + 15, words, size=12, anchor="end", color=_FAINT))
        return parts, y + 20

    def _chart(self, top: float) -> tuple[list[str], float]:
        floor, height = top + 110, 110.0
        span = max(self.groups - 1, 1)

        def x(nsplit: float) -> float:
            return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (nsplit - 1) / span

        def y(percent: float) -> float:
            return floor - height * min(percent, 100.0) / 100

        parts = []
        sweep = self.sweep()
        top_extra = max(extra for _, _, extra in sweep)
        for percent in (0, 50, 100):
            parts.append(base.line([(_LEFT, y(percent)), (_WIDTH - _RIGHT, y(percent))], plots.PALE, width=1))
            more = "≥ " if percent == 100 and top_extra > 100 else ""
            parts.append(base.label(_LEFT - 8, y(percent) + 4, f"{more}{percent} %", size=12, anchor="end"))
        parts.append(base.line([(x(s), y(fill)) for s, fill, _ in sweep], plots.BLUE, width=1.5))
        parts.append(base.line([(x(s), y(extra)) for s, _, extra in sweep], plots.RED, width=2.5))
        blue, red = "slots filled", "extra traffic, % of the weight's bytes"
        parts += [
            base.label(_LEFT, top - 8, f"blue: {blue}", size=12, color=plots.BLUE),
            base.label(_LEFT + 150, top - 8, f"red: {red}", size=12, color=plots.RED),
        ]
        rule = self.by_rule.nsplit
        parts.append(base.line([(x(rule), top), (x(rule), floor)], plots.INK, dash="4 3"))
        words = f"rule: {rule}"
        parts.append(base.label(x(rule), floor + 16, words, size=12, anchor="middle", bold=True))
        fill, extra = 100 * self.waves.utilisation, self.extra_percent(self.launch)
        parts.append(base.dot(x(self.nsplit), y(fill), plots.BLUE, radius=6, title=f"{fill:.0f} % filled"))
        parts.append(base.dot(x(self.nsplit), y(extra), plots.RED, radius=6, title=f"{extra:.2f} % extra"))
        for nsplit in sorted({1, self.groups}):
            if abs(x(nsplit) - x(rule)) > 48:
                parts.append(base.label(x(nsplit), floor + 16, str(nsplit), size=12, anchor="middle"))
        parts.append(base.label(_WIDTH - _RIGHT + 16, floor + 16, "nsplit", size=12))
        lines = textwrap.wrap(self.part_words(), 104)
        for i, words in enumerate(lines):
            parts.append(base.label(8, floor + 40 + 17 * i, words, size=12))
        return parts, floor + 34 + 17 * len(lines)


def draw(ax: Axes, state: SplitWaves) -> None:
    """SMs × waves as a static figure: one column an SM, one row a wave, filled as high as it has blocks.

    Raises:
        InputError: the kernel does not fit the card.
    """
    capacity = state.resident.blocks
    if capacity == 0:
        refuse("card", state.card, "a card that holds at least one block", state.text())
    rows = state.rows()
    for row, (name, blocks) in enumerate(rows):
        if blocks is None:
            ax.text(0, row + 0.5, name, va="center", fontsize=9)
            continue
        for sm, count in enumerate(blocks):
            ax.add_patch(Rectangle((sm + 0.06, row + 0.08), 0.88, 0.84, facecolor=_IDLE))
            high = 0.84 * count / capacity
            color = _FULL if count == capacity else _PART
            ax.add_patch(Rectangle((sm + 0.06, row + 0.92 - high), 0.88, high, facecolor=color))
        ax.annotate(
            f"{sum(blocks)} of {capacity * state.sms}",
            (1, row + 0.5),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    ax.set_xlim(0, state.sms)
    ax.set_ylim(len(rows), 0)
    ax.set_yticks([i + 0.5 for i, row in enumerate(rows) if row[1]], [name for name, row in rows if row])
    ax.set_xticks([])
    ax.grid(False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    card = devices.get_device(state.card).name
    ax.set_xlabel(f"{card}: {state.sms} SMs, room for {capacity} blocks each (model: blocks of equal length)")
    ax.set_title(state.headline())
    handles = [
        Patch(facecolor=_FULL, label="SM full"),
        Patch(facecolor=_PART, label="partly filled"),
        Patch(facecolor=_IDLE, label="idle"),
    ]
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3, "borderaxespad": 0.2}
    ax.legend(handles=handles, handlelength=1.2, columnspacing=1.0, **place)


def draw_sweep(ax: Axes, state: SplitWaves) -> None:
    """Slots filled and extra traffic against nsplit, with the rule's choice marked."""
    sweep = state.sweep()
    steps = [nsplit for nsplit, _, _ in sweep]
    ax.plot(steps, [fill for _, fill, _ in sweep], color=plots.BLUE, linewidth=1.5, label="slots filled")
    extra = [percent for _, _, percent in sweep]
    ax.plot(steps, extra, color=plots.RED, label="extra traffic, % of the weight's bytes", linestyle="--")
    rule = state.by_rule.nsplit
    ax.axvline(rule, color=plots.INK, linewidth=1, linestyle=":", label=f"the rule's nsplit, {rule}")
    ax.set_ylim(0, max(105.0, *extra))
    ax.set_xlabel("nsplit, slices of K")
    ax.set_ylabel("%")
    ax.legend(loc="best")


def _folded(launch: Launch) -> str:
    """What a block takes, of a launch with fewer planes than slices."""
    return "all in one block" if launch.planes == 1 else f"folded to {launch.planes} runs"


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
