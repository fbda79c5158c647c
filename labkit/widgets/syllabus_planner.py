"""The syllabus planner: hours, students, machines and a purpose become chapters and minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from labkit import plots
from labkit.classroom import syllabus
from labkit.errors import InputError, require
from labkit.widgets import base

_HOURS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_WIDTH, _BAR = 760.0, 46.0
_FAINT = "#5F6670"


@dataclass
class SyllabusPlanner(base.Controller):
    """Choose what the class is for and what it has; see what fits.

    Attributes:
        hours: of the class, breaks included.
        students, machines: two may share a machine.
        track: a name of :data:`labkit.classroom.syllabus.TRACKS`.
    """

    hours: float = 4.0
    students: int = 30
    machines: int = 30
    track: str = "first look"
    title: str = "Syllabus planner: what fits? (simulated from the chapters' planned minutes)"

    def __post_init__(self) -> None:
        for control in self.controls():
            control.accept(getattr(self, control.name))
        self._known = syllabus.lessons()

    def controls(self) -> Sequence[base.Control]:
        return (
            base.Slider("hours", "Hours", values=_HOURS),
            base.Slider("students", "Students", minimum=1, maximum=60),
            base.Slider("machines", "Machines", minimum=1, maximum=60),
            base.Choice("track", "What for", tuple((name, name) for name in syllabus.TRACKS)),
        )

    def plan(self) -> syllabus.Plan:
        """The plan; InputError for more than two students at a machine."""
        return syllabus.plan(
            self.hours,
            track=self.track,
            students=int(self.students),
            machines=int(self.machines),
            known=self._known,
        )

    def text(self) -> str:
        try:
            plan = self.plan()
        except InputError as error:
            return f"{int(self.students)} students at {int(self.machines)} machines: {error.fix}"
        pairs = ", in pairs" if self.students > self.machines else ""
        return f"{self.track}{pairs}; {plan.text()}"

    def html(self) -> str:
        try:
            plan = self.plan()
        except InputError:
            parts = [base.label(8, 34, self.text(), color=plots.RED, bold=True)]
            return base.svg(_WIDTH, 60, parts, label=self.text())
        scale = (_WIDTH - 16) / (60 * plan.hours)
        parts = [base.rect(8, 20, _WIDTH - 16, _BAR, plots.PALE)]
        parts.append(base.rect(8, 20, scale * syllabus.SETUP_MINUTES, _BAR, plots.GREY, title="start"))
        for row in plan.rows:
            x, width = 8 + scale * row.start, scale * row.minutes
            color = plots.BLUE if row.mode == "do" else plots.SKY
            words = f"{row.lesson.number} {row.lesson.title}: {row.mode}, {row.minutes} minutes"
            parts.append(base.rect(x, 20, max(1.0, width - 2), _BAR, color, title=words))
            ink = "white" if row.mode == "do" else plots.INK
            if width > 22:
                parts.append(
                    base.label(x + width / 2, 48, row.lesson.number, anchor="middle", color=ink, bold=True)
                )
        y = 20 + _BAR + 24
        parts.append(base.label(8, y, f"0:00  start, {syllabus.SETUP_MINUTES} min", size=13))
        y += 20
        for row in plan.rows:
            clock = f"{row.start // 60}:{row.start % 60:02}"
            words = f"{clock}  {row.mode}  {row.lesson.number} {row.lesson.title}, {row.minutes} min"
            parts.append(base.label(8, y, words, size=13))
            y += 20
        left = f"pale: {plan.breaks} minutes of breaks, {plan.left} left; clock times without the breaks"
        parts.append(base.label(8, y + 4, left, size=12, color=_FAINT))
        return base.svg(_WIDTH, y + 16, parts, label=self.text())


def draw(ax: Axes, plans: Sequence[syllabus.Plan]) -> None:
    """Plans as bars, one below the other, with the chapters' numbers in them.

    Raises:
        InputError: no plan.
    """
    require(len(plans) > 0, "plans", "none", "at least one plan")
    for y, plan in enumerate(plans):
        ax.barh(y, syllabus.SETUP_MINUTES, color=plots.GREY, height=0.6, label="start" if y == 0 else None)
        for mode, color in (("do", plots.BLUE), ("show", plots.SKY)):
            rows = [row for row in plan.rows if row.mode == mode]
            ax.barh(
                [y] * len(rows),
                [row.minutes for row in rows],
                left=[row.start for row in rows],
                color=color,
                edgecolor="white",
                height=0.6,
                label=mode if y == len(plans) - 1 else None,
            )
            for row in rows:
                ink = "white" if mode == "do" else plots.INK
                middle = row.start + row.minutes / 2
                ax.text(middle, y, row.lesson.number, ha="center", va="center", color=ink, fontsize=8)
    ax.set_yticks(range(len(plans)), [f"{plan.hours:g} h" for plan in plans])
    ax.set_xlabel("minutes without the breaks (simulated from planned minutes)")
    ax.grid(False, axis="y")
    ax.invert_yaxis()
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)
