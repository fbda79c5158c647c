"""Dispatch thresholds: recorded curves, coloured by the kernel that the dispatch table takes at each M.

The choice is made by :class:`labkit.nn.dispatch.DispatchTable` itself, on the device and format of the
record, with the two thresholds as its override; a recorded kernel counts as one that can run. Times
are records (:mod:`labkit.bench.curves`): measured, or quoted from the article. Nothing is timed here.
"""

from __future__ import annotations

import html as _html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes

from labkit import device as devices
from labkit import plots
from labkit.errors import InputError, refuse
from labkit.nn.dispatch import Choice, DispatchTable
from labkit.widgets import base, threshold_picture
from labkit.widgets.threshold_picture import WIDTH, CurveSet, between, m_values

SINGLE, SMALL, TILED = "gemv_single_row", "gemv_small_batch", "gemm_tiled"

_COLORS = {
    SINGLE: plots.BLUE,
    SMALL: plots.ORANGE,
    TILED: plots.GREEN,
    "dequant_matmul": plots.PURPLE,
    "gemv_batch_w3": plots.RED,
}
_OTHERS = (plots.SKY, plots.BLACK, plots.YELLOW)
_STOPS = (*range(17), 20, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Segment:
    """M first..last (None: no bound) goes to one kernel, by one row of the table.

    Attributes:
        kernel: "" when no row's kernel can run.
        choice: what the table answered; None when no row's kernel can run.
        reason: the table's own words.
    """

    first: int
    last: int | None
    kernel: str
    choice: Choice | None
    reason: str

    def covers(self, m: float) -> bool:
        """Whether M = ``m`` is in it."""
        return self.first <= m and (self.last is None or m <= self.last)

    @property
    def range(self) -> str:
        """M range in words."""
        if self.last is None:
            return f"M ≥ {self.first}"
        return f"M = {self.first}" if self.first == self.last else f"M {self.first}–{self.last}"


@dataclass(frozen=True)
class Cost:
    """The chosen kernel against the best at one recorded M.

    Attributes:
        us, best_us: µs a call; ``us`` is None when the chosen kernel has no time at this M.
        percent: how much longer the chosen one takes, 0 for the best; None without a time.
    """

    m: int
    kernel: str
    us: float | None
    best: str
    best_us: float

    @property
    def percent(self) -> float | None:
        return None if self.us is None else 100 * (self.us / self.best_us - 1)


def project_curves() -> list[CurveSet]:
    """All records of the project: ``data/measured``, and the article's points."""
    # Reading records needs the bench package, which a widget with its own curves does not.
    from labkit.bench import curves

    return list(curves.available())


@dataclass
class DispatchThresholds(base.Controller):
    """Two thresholds, one record, and what the dispatch table makes of them.

    Attributes:
        device: key of a device in ``data/devices.json``.
        format: "w4" or "w3".
        shape: "N×K" of the record; empty for the first that the device and format have.
        single_row_up_to, small_batch_up_to: the override, any M from 0; None for the table's own values.
        m: the cursor.
        curves: records; those of the project by default.
        table: the dispatch table that is overridden; the project's by default.
        chapter: number of the notebook that the command line names.
    """

    device: str = ""
    format: str = "w4"
    shape: str = ""
    single_row_up_to: Any = None
    small_batch_up_to: Any = None
    m: int = 1
    curves: Sequence[CurveSet] | None = field(default=None, repr=False)
    table: DispatchTable | None = field(default=None, repr=False)
    chapter: str = "07"
    title: str = field(default="Dispatch thresholds: who computes M rows, and what it costs", repr=False)
    _stops: tuple[float, ...] = field(default=_STOPS, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.curves is None:
            self.curves = project_curves()
        if self.table is None:
            self.table = DispatchTable.load()
        self.device = self.device or (self.curves[0].device if self.curves else next(iter(devices.devices())))
        devices.get_device(self.device)
        own_single, own_small = self.table_thresholds()
        self.single_row_up_to = own_single if self.single_row_up_to is None else self.single_row_up_to
        self.small_batch_up_to = own_small if self.small_batch_up_to is None else self.small_batch_up_to
        given = {m for m in (self.single_row_up_to, self.small_batch_up_to) if type(m) is int and m >= 0}
        recorded = {m for one in self.curves for m in m_values(one)}
        self._stops = tuple(sorted({*_STOPS, own_single, own_small, *recorded, *given}))
        if not self.shape:
            self._first_shape()
        for control in self.controls():
            if not isinstance(control, base.Button):
                control.accept(getattr(self, control.name))

    def controls(self) -> Sequence[base.Control]:
        """Device, format, shape, the two thresholds, the cursor, and the way back to the table's values."""
        cards = tuple((card.name, card.key) for card in devices.devices().values())
        shapes = tuple(dict.fromkeys(_shape(one) for one in self._sets())) or (self.shape,)
        rows = tuple(sorted({m for one in self._sets() for m in m_values(one)})) or (1,)
        return (
            base.Choice("device", "Device", cards),
            base.Choice("format", "Format", (("W4", "w4"), ("W3", "w3"))),
            base.Choice("shape", "N×K", tuple((one, one) for one in shapes)),
            base.Slider("single_row_up_to", "Single row up to M", values=self._stops, fmt="{:.0f}"),
            base.Slider("small_batch_up_to", "Small batch up to M", values=self._stops, fmt="{:.0f}"),
            base.Slider("m", "Cursor M", values=tuple(sorted({1, *rows})), fmt="{:.0f}"),
            base.Button("reset", "The table's own thresholds"),
        )

    def update(self, **changes: Any) -> None:
        """Set controls by name; a shape that the new device and format lack moves to the first they have."""
        super().update(**changes)
        if self.record is None and "shape" not in changes:
            self._first_shape()

    def press(self, name: str) -> None:
        """Take the thresholds that the table has for this device and format."""
        if name != "reset":
            super().press(name)
        self.single_row_up_to, self.small_batch_up_to = self.table_thresholds()

    def _sets(self) -> Sequence[CurveSet]:
        return self.curves or ()

    def _first_shape(self) -> None:
        found = [one for one in self._sets() if (one.device, one.format) == (self.device, self.format)]
        self.shape = _shape((found or self._sets())[0]) if self._sets() else ""

    # ---- the choice ----

    @property
    def record(self) -> CurveSet | None:
        """The curves that are shown; None when this device, format and shape have none."""
        for one in self._sets():
            if (one.device, one.format, _shape(one)) == (self.device, self.format, self.shape):
                return one
        return None

    def table_thresholds(self) -> tuple[int, int]:
        """(single_row_up_to, small_batch_up_to) of the table, for this device and format."""
        table = self.table or DispatchTable.load()
        capability = devices.get_device(self.device).capability
        ends = {SINGLE: 0, SMALL: 0}
        for m in _breaks(table):
            for row in table.candidates("cuda", capability, self.format, "float16", m)[:1]:
                if row.kernel in ends:
                    ends[row.kernel] = max(ends[row.kernel], _STOPS[-1] if row.m_max is None else row.m_max)
        return ends[SINGLE], max(ends[SINGLE], ends[SMALL])

    def override(self, every_format: bool = False) -> dict[str, int]:
        """Parameters for ``DispatchTable.from_params``, for this format or for all."""
        prefix = "" if every_format else f"{self.format}."
        return {
            f"{prefix}single_row_up_to": int(self.single_row_up_to),
            f"{prefix}small_batch_up_to": int(self.small_batch_up_to),
        }

    def papermill_line(self) -> str:
        """The command that runs the chapter with these thresholds (its parameters are for all formats)."""
        chosen = " ".join(f"-p {name}={value}" for name, value in self.override(every_format=True).items())
        return f"labkit course --chapters {self.chapter} {chosen}"

    @property
    def dispatch(self) -> DispatchTable:
        """The table with the override."""
        return DispatchTable.from_params(self.override(), self.table)

    def why_not(self, kernel: str) -> str:
        """Empty for a kernel that has a recorded time, whatever the device; else that it has none."""
        recorded = any(kernel in one.points for one in self._sets())
        return "" if recorded else "no time is recorded for it"

    def choose(self, m: int) -> Segment:
        """What the table takes for M = ``m``: a segment of one M."""
        capability = devices.get_device(self.device).capability
        try:
            choice = self.dispatch.select("cuda", capability, self.format, "float16", m, why_not=self.why_not)
        except InputError as error:
            return Segment(m, m, "", None, error.received)
        return Segment(m, m, choice.kernel, choice, choice.reason)

    def segments(self) -> list[Segment]:
        """The whole axis from M = 1: neighbours go to different kernels."""
        found: list[Segment] = []
        starts = _breaks(self.dispatch)
        for start, after in zip(starts, [*starts[1:], None], strict=True):
            last = None if after is None else after - 1
            here = self.choose(start)
            if found and found[-1].kernel == here.kernel:
                found[-1] = Segment(found[-1].first, last, here.kernel, found[-1].choice, found[-1].reason)
            else:
                found.append(Segment(start, last, here.kernel, here.choice, here.reason))
        return found

    # ---- times ----

    def times(self, m: int) -> dict[str, float]:
        """Kernel → µs at exactly M = ``m``, for the kernels that the table can name; peers are left out."""
        record = self.record
        if record is None:
            return {}
        own = {kernel: dict(line) for kernel, line in record.points.items() if not self.is_peer(kernel)}
        return {kernel: line[m] for kernel, line in own.items() if m in line}

    def is_peer(self, kernel: str) -> bool:
        """Whether a recorded name is no kernel of the table on CUDA (dense cuBLAS, for example)."""
        rows = (self.table or DispatchTable.load()).rows
        return kernel not in {row.kernel for row in rows if row.device == "cuda"}

    def cost(self, m: int) -> Cost | None:
        """The choice at M = ``m`` against the best there; None where nothing is recorded."""
        times = self.times(m)
        if not times:
            return None
        best = min(times, key=lambda kernel: times[kernel])
        kernel = self.choose(m).kernel
        return Cost(m, kernel, times.get(kernel), best, times[best])

    def costs(self) -> list[Cost]:
        """One for every recorded M."""
        record = self.record
        found = [self.cost(m) for m in m_values(record)] if record is not None else []
        return [cost for cost in found if cost is not None]

    @property
    def regret(self) -> float | None:
        """One call at every recorded M: how many % longer than with the best kernel each time. An M at
        which the chosen kernel has no time is left out; None when that leaves nothing."""
        known = [(cost.us, cost.best_us) for cost in self.costs() if cost.us is not None]
        if not known:
            return None
        return 100 * (sum(us for us, _ in known) / sum(best for _, best in known) - 1)

    def chosen_pieces(self) -> list[tuple[str, list[tuple[float, float]]]]:
        """(kernel, [(M, µs)]) of every stretch of a curve that is taken; a threshold T ends it at T + ½."""
        record = self.record
        pieces: list[tuple[str, list[tuple[float, float]]]] = []
        for segment in self.segments() if record is not None else ():
            line = sorted((record.points.get(segment.kernel) or ()) if record is not None else ())
            low = segment.first - 0.5
            high = math.inf if segment.last is None else segment.last + 0.5
            part: list[tuple[float, float]] = []
            for left, right in itertools.pairwise(line):
                start, end = max(low, left[0]), min(high, right[0])
                if start < end:
                    part += [] if part else [(start, between(left, right, start))]
                    part.append((end, between(left, right, end)))
            if part:
                pieces.append((segment.kernel, part))
        return pieces

    # ---- words ----

    def missing(self) -> str:
        """Why there is no picture; "" when there is one."""
        if self.record is not None:
            return ""
        name = devices.get_device(self.device).name
        there = dict.fromkeys(
            f"{one.device} {one.format} {_shape(one)} ({one.origin})" for one in self._sets()
        )
        have = "recorded are: " + ", ".join(dict.fromkeys(there)) if there else "nothing is recorded yet"
        shape = f" {self.shape}" if self.shape else ""
        return f"No times are recorded for {name}, {self.format.upper()}{shape}; {have}."

    def cursor_words(self) -> str:
        """The choice at the cursor, its time, and what it costs."""
        chosen, cost = self.choose(self.m), self.cost(self.m)
        name = chosen.kernel or "no kernel"
        if cost is None:
            return f"M = {self.m}: {name}; no kernel has a time recorded at this M."
        if cost.us is None or cost.percent is None:
            return (
                f"M = {self.m}: {name}, which has no time recorded here; "
                f"best recorded: {cost.best}, {cost.best_us:.3g} µs."
            )
        against = (
            "the best recorded"
            if cost.best == cost.kernel
            else f"{cost.percent:+.1f} % against {cost.best}, {cost.best_us:.3g} µs"
        )
        return f"M = {self.m}: {name}, {cost.us:.3g} µs; {against}."

    def text(self) -> str:
        """Thresholds, ranges, cursor and regret in words."""
        if self.record is None:
            return self.missing()
        ranges = ", ".join(f"{s.range} {s.kernel or 'no kernel'}" for s in self.segments())
        return (
            f"{devices.get_device(self.device).name}, {self.format.upper()} {self.shape} "
            f"({self.record.origin}), single row up to {self.single_row_up_to:g}, small batch up to "
            f"{self.small_batch_up_to:g}: {ranges}. {self.cursor_words()} {self.regret_words()}"
        )

    def regret_words(self) -> str:
        """Total cost in one sentence."""
        costs = self.costs()
        timed = [cost for cost in costs if cost.us is not None]
        if self.regret is None:
            return "No chosen kernel has a recorded time, so the cost is unknown."
        left_out = f"; {len(costs) - len(timed)} left out (no time of the chosen kernel)"
        return (
            f"One call at each of {len(timed)} recorded M: {self.regret:+.1f} % against the best kernel "
            f"each time{left_out if len(timed) < len(costs) else ''}."
        )

    def color(self, kernel: str) -> str:
        """The kernel's colour when it is chosen."""
        names = [name for one in self._sets() for name in one.points if name not in _COLORS]
        extra = sorted(dict.fromkeys(names))
        if kernel in extra:
            return _OTHERS[extra.index(kernel) % len(_OTHERS)]
        return _COLORS.get(kernel, plots.GREY)

    # ---- pictures ----

    def html(self) -> str:
        if self.record is None:
            return f'<p role="alert">{_html.escape(self.missing())}</p>'
        small = "font-size:13px;margin:4px 0"
        mine, why = _html.escape(repr(self.override())), _html.escape(self.choose(self.m).reason)
        origin, provenance = self.record.origin, self.record.provenance
        said = provenance if provenance.startswith(origin) else f"{origin}; {provenance}"
        source = _html.escape(f"Times: {said}")
        return (
            f'<div style="max-width:{WIDTH}px;background:white;color:{plots.INK}">{self.picture()}'
            f'<p style="{small}">{why}</p>'
            f'<p style="{small}">override for {self.format.upper()}: <code>{mine}</code><br>'
            f"for all formats: <code>{self.papermill_line()}</code></p>"
            f'<p style="{small}">{source}</p></div>'
        )

    def picture(self) -> str:
        """SVG: who gets which M, the curves, and the cost at every recorded M."""
        record = self.record
        if record is None:
            return base.svg(WIDTH, 40, [base.label(8, 24, self.missing(), size=12)], label=self.missing())
        return threshold_picture.svg(self, record)


def draw(ax: Axes, state: DispatchThresholds) -> None:
    """The curves as a static figure: thick and coloured where the table takes a kernel, grey elsewhere.

    Raises:
        InputError: no times are recorded for the state's device, format and shape.
    """
    if (record := state.record) is None:
        refuse("state", state.missing(), "a device, format and shape that are recorded")
    threshold_picture.draw(ax, state, record)


def _breaks(table: DispatchTable) -> list[int]:
    """Every M at which some row begins or has ended, from 1: between two of them the choice is one."""
    ends = {row.m_max + 1 for row in table.rows if row.m_max is not None}
    return sorted({1, *(row.m_min for row in table.rows), *ends} - {0})


def _shape(one: CurveSet) -> str:
    return f"{one.n}×{one.k}"
