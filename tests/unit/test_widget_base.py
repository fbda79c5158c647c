"""The widget frame: controllers without a browser, and the view on top."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from labkit.errors import InputError
from labkit.widgets import base


@dataclass
class Demo(base.Controller):
    stop: float = 2
    level: int = 3
    share: float = 0.5
    kind: str = "a"
    on: bool = False
    presses: int = 0
    title: str = "Demo <1>"

    def controls(self) -> Sequence[base.Control]:
        return (
            base.Slider("stop", "Stops", values=(1, 2, 4)),
            base.Slider("level", "Level", 0, 10, 1),
            base.Slider("share", "Share", 0, 1, 0.1),
            base.Choice("kind", "Kind", (("A", "a"), ("B", "b"))),
            base.Toggle("on", "On"),
            base.Button("more", "More"),
        )

    def html(self) -> str:
        return f"<p>{self.text()}</p>"

    def text(self) -> str:
        return f"{self.stop} {self.level} {self.share} {self.kind} {self.on} {self.presses}"

    def press(self, name: str) -> None:
        if name != "more":
            super().press(name)
        self.presses += 1
        self.level = 9


def test_importing_the_base_does_not_import_ipywidgets() -> None:
    code = "import sys, labkit.widgets.base; assert 'ipywidgets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 3),
        ("level", 11),
        ("level", True),
        ("share", "x"),
        ("kind", "c"),
        ("on", 1),
        ("more", 1),
        ("no", 1),
    ],
)
def test_update_refuses_and_changes_nothing(name: str, value: object) -> None:
    demo = Demo()
    good = {"share": 0.75} if name != "share" else {"level": 4}
    with pytest.raises(InputError):
        demo.update(**good, **{name: value})
    assert demo == Demo()


def test_update_sets_all() -> None:
    demo = Demo()
    demo.update(stop=4, kind="b", on=True)
    assert (demo.stop, demo.kind, demo.on) == (4, "b", True)


def test_the_view_follows_its_inputs_and_labels_them() -> None:
    view = base.View(Demo())
    assert all(view.inputs[c.name].description == c.label for c in view.controller.controls())
    view.inputs["level"].value = 7
    view.inputs["stop"].value = 4
    view.inputs["kind"].value = "b"
    assert view.output.value == '<div class="labkit-widget"><p>4 7 0.5 b False 0</p></div>'
    kinds = {type(widget).__name__ for widget in view.inputs.values()}
    assert kinds == {"SelectionSlider", "IntSlider", "FloatSlider", "Dropdown", "Checkbox", "Button"}
    assert "Output" not in {type(child).__name__ for child in view.box.children}


def test_a_button_acts_and_moves_the_inputs() -> None:
    view = base.View(Demo())
    view.inputs["more"].click()
    assert view.controller.text().endswith("1")
    assert view.inputs["level"].value == 9


def test_an_error_is_shown_and_not_raised() -> None:
    class Strict(Demo):
        def update(self, **changes: object) -> None:
            raise InputError("kind", "<b>", "something else")

    view = base.View(Strict())
    view.inputs["kind"].value = "b"
    assert view.output.value.startswith('<p role="alert">') and "&lt;b&gt;" in view.output.value


def test_show_prints_the_text_outside_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    assert base.show(Demo()) is None
    assert capsys.readouterr().out == "2 3 0.5 a False 0\n"


def test_svg_parts_are_escaped_and_labelled() -> None:
    parts = [base.rect(0, 0, 1, 2, "#fff", title="a & b"), base.label(1, 2, "<x>", rotate=-90)]
    parts += [base.line([(0, 0), (1, 1)], "#000", dash="4 2"), base.dot(1, 1, "#000", title="p")]
    drawing = base.svg(10, 20, parts, label='say "hi"')
    assert 'aria-label="say &quot;hi&quot;"' in drawing and 'role="img"' in drawing
    assert "a &amp; b" in drawing and "&lt;x&gt;" in drawing and 'stroke-dasharray="4 2"' in drawing


def test_unknown_button_is_refused() -> None:
    with pytest.raises(InputError, match="a button of this widget"):
        base.Controller().press("x")
