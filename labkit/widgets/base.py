"""A widget is a controller (state → HTML, pure Python) and one generic view on top of it.

A controller is a dataclass that derives from :class:`Controller`, lists its ``controls``, and
has a field of the same name for each. It is tested without a browser. :class:`View` turns the
controls into ipywidgets and redraws an ``HTML`` widget on every change: no Output widget, no
``interact``, no thread. Sliders and drop-downs carry a visible label and move by keyboard.
"""

from __future__ import annotations

import html as _html
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.errors import InputError, refuse, require


@dataclass(frozen=True)
class Slider:
    """A number. ``values`` (any ascending list) or ``minimum``/``maximum``/``step`` give the stops."""

    name: str
    label: str
    minimum: float = 0
    maximum: float = 1
    step: float = 1
    values: tuple[float, ...] = ()
    fmt: str = "{:g}"

    def accept(self, value: Any) -> float:
        """``value`` when it is a stop or within the range, else InputError."""
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        if self.values:
            expected = "one of " + ", ".join(self.fmt.format(stop) for stop in self.values)
            require(ok and value in self.values, self.name, repr(value), expected)
        else:
            expected = f"{self.minimum:g} to {self.maximum:g}"
            require(ok and self.minimum <= value <= self.maximum, self.name, repr(value), expected)
        return value


@dataclass(frozen=True)
class Choice:
    """One of a few named values: ``options`` are (text shown, value)."""

    name: str
    label: str
    options: tuple[tuple[str, Any], ...]

    def accept(self, value: Any) -> Any:
        """``value`` when it is an option, else InputError."""
        expected = "one of " + ", ".join(repr(option) for _, option in self.options)
        require(any(value == option for _, option in self.options), self.name, repr(value), expected)
        return value


@dataclass(frozen=True)
class Toggle:
    """On or off."""

    name: str
    label: str

    def accept(self, value: Any) -> bool:
        """``value`` when it is a bool, else InputError."""
        require(isinstance(value, bool), self.name, repr(value), "True or False")
        return value


@dataclass(frozen=True)
class Button:
    """An action: pressing it calls ``controller.press(name)``."""

    name: str
    label: str

    def accept(self, value: Any) -> Any:
        """A button holds no value."""
        refuse(self.name, repr(value), "no value: call press() instead")


Control = Slider | Choice | Toggle | Button


class Controller:
    """Base of all widgets. Derive a dataclass; override ``controls``, ``html`` and ``text``.

    Attributes:
        title: one line shown above the controls.
    """

    title: str = ""

    def controls(self) -> Sequence[Control]:
        """The controls, in display order; a field of the same name holds each one's value."""
        return ()

    def html(self) -> str:
        """The picture or table for the present state, as HTML (usually one inline SVG)."""
        raise NotImplementedError

    def text(self) -> str:
        """The same in plain words: shown where HTML is not, and read by screen readers."""
        raise NotImplementedError

    def press(self, name: str) -> None:
        """Carry out a button; override in widgets that have one."""
        refuse(name, name, "a button of this widget")

    def update(self, **changes: Any) -> None:
        """Set controls by name; all are checked before any is set.

        Raises:
            InputError: unknown control, or a value it does not take.
        """
        known = {control.name: control for control in self.controls()}
        for name, value in changes.items():
            require(name in known, "control", repr(name), "one of " + ", ".join(known))
            known[name].accept(value)
        for name, value in changes.items():
            setattr(self, name, value)


class View:
    """ipywidgets for a controller: ``inputs`` by control name, ``output`` (HTML), ``box`` (all).

    Needs ipywidgets. Setting ``inputs[name].value`` acts exactly as the user's hand does.
    """

    def __init__(self, controller: Controller) -> None:
        import ipywidgets

        self.controller = controller
        self.inputs: dict[str, Any] = {}
        for control in controller.controls():
            self.inputs[control.name] = self._input(ipywidgets, control)
        self.output = ipywidgets.HTML(value=self._drawn())
        rows = [ipywidgets.HTML(value=f"<b>{_html.escape(controller.title)}</b>")] if controller.title else []
        self.box = ipywidgets.VBox([*rows, *self.inputs.values(), self.output])

    def _input(self, ipywidgets: Any, control: Control) -> Any:
        common: dict[str, Any] = {"description": control.label, "style": {"description_width": "11em"}}
        wide = ipywidgets.Layout(width="min(34em, 100%)")
        if isinstance(control, Button):
            button = ipywidgets.Button(description=control.label)
            button.on_click(lambda _: self._pressed(control.name))
            return button
        value = getattr(self.controller, control.name)
        widget: Any
        if isinstance(control, Toggle):
            widget = ipywidgets.Checkbox(value=value, indent=True, **common)
        elif isinstance(control, Choice):
            widget = ipywidgets.Dropdown(options=list(control.options), value=value, layout=wide, **common)
        elif control.values:
            stops = [(control.fmt.format(stop), stop) for stop in control.values]
            widget = ipywidgets.SelectionSlider(options=stops, value=value, layout=wide, **common)
        else:
            whole = all(
                float(v).is_integer() for v in (control.minimum, control.maximum, control.step, value)
            )
            kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
            number = int if whole else float
            bounds = {"min": control.minimum, "max": control.maximum, "step": control.step, "value": value}
            widget = kind(**{key: number(v) for key, v in bounds.items()}, layout=wide, **common)
        widget.observe(lambda change: self._changed(control.name, change["new"]), names="value")
        return widget

    def _changed(self, name: str, value: Any) -> None:
        if getattr(self.controller, name) == value:
            return
        try:
            self.controller.update(**{name: value})
        except InputError as error:
            self.output.value = f'<p role="alert">{_html.escape(str(error))}</p>'
            return
        self.refresh()

    def _pressed(self, name: str) -> None:
        try:
            self.controller.press(name)
        except InputError as error:
            self.output.value = f'<p role="alert">{_html.escape(str(error))}</p>'
            return
        self.refresh()

    def _drawn(self) -> str:
        return f'<div class="labkit-widget">{self.controller.html()}</div>'

    def refresh(self) -> None:
        """Redraw, and move the inputs to the controller's values (a button may have changed them)."""
        for name, widget in self.inputs.items():
            if hasattr(widget, "value") and widget.value != getattr(self.controller, name):
                widget.value = getattr(self.controller, name)
        self.output.value = self._drawn()


def show(controller: Controller) -> View | None:
    """Display ``controller`` in a notebook; print its text anywhere else.

    The output also holds the HTML of the first state, so that a page made from the notebook
    (print, export, a viewer without widgets) still shows it.

    Returns:
        None, so that a cell that ends in ``show(...)`` has one output. Use ``View`` for a handle.
    """
    if (ipython := sys.modules.get("IPython")) is None or ipython.get_ipython() is None:
        print(controller.text())
        return None
    view = View(controller)
    bundle = {
        "application/vnd.jupyter.widget-view+json": {
            "version_major": 2,
            "version_minor": 0,
            "model_id": view.box.model_id,
        },
        "text/html": controller.html(),
        "text/plain": controller.text(),
    }
    ipython.display.display(bundle, raw=True)
    _SHOWN.append(view)
    return None


# Widgets live as long as the kernel: without a reference Python would collect the view behind them.
_SHOWN: list[View] = []


# --- SVG, by hand: small, no dependency, fast enough to redraw on every slider step -----------------


def svg(width: float, height: float, parts: Sequence[str], *, label: str) -> str:
    """An ``<svg>`` of ``parts`` that scales to the page; ``label`` is read by screen readers."""
    return (
        f'<svg role="img" aria-label="{_html.escape(label)}" viewBox="0 0 {width:g} {height:g}" '
        f'style="width:100%;max-width:{width:g}px;background:white;font-family:sans-serif" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def rect(x: float, y: float, w: float, h: float, fill: str, *, stroke: str = "none", title: str = "") -> str:
    """A rectangle; ``title`` shows on hover."""
    tip = f"<title>{_html.escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" '
        f'fill="{fill}" stroke="{stroke}">{tip}</rect>'
    )


def line(
    points: Sequence[tuple[float, float]], color: str, *, width: float = 2, dash: str = "", opacity: float = 1
) -> str:
    """A polyline through ``points``."""
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" '
        f'stroke-width="{width:g}" stroke-opacity="{opacity:g}"{dashes}/>'
    )


def dot(x: float, y: float, color: str, *, radius: float = 5, title: str = "") -> str:
    """A filled circle; ``title`` shows on hover."""
    tip = f"<title>{_html.escape(title)}</title>" if title else ""
    return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius:g}" fill="{color}" stroke="white">{tip}</circle>'


def label(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 13,
    anchor: str = "start",
    color: str = "#22262B",
    bold: bool = False,
    rotate: float = 0,
) -> str:
    """Text at (x, y); ``anchor`` is start, middle or end."""
    weight = ' font-weight="600"' if bold else ""
    turn = f' transform="rotate({rotate:g} {x:.2f} {y:.2f})"' if rotate else ""
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" text-anchor="{anchor}" '
        f'fill="{color}"{weight}{turn}>{_html.escape(text)}</text>'
    )
