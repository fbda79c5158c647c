"""The roofline widget's controller."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from labkit.errors import InputError
from labkit.widgets.base import View
from labkit.widgets.roofline import Roofline


def test_the_target_card_at_m_1() -> None:
    roof = Roofline()
    assert roof.bytes_a_weight == 0.515625
    assert roof.ridge == pytest.approx(16.516, abs=0.001)
    assert roof.limit == "memory"
    assert roof.tokens_per_second == pytest.approx(120.67, abs=0.01)


def test_past_the_ridge_the_arithmetic_is_the_limit() -> None:
    roof = Roofline()
    roof.update(m=64)
    assert roof.limit == "arithmetic"
    assert roof.seconds[1] > roof.seconds[0]
    assert "limit: arithmetic" in roof.text()


def test_fp16_has_no_groups() -> None:
    roof = Roofline()
    roof.update(bits=16, group=32)
    assert roof.bytes_a_weight == 2.0 and "FP16" in roof.text()


def test_measured_values_become_stops() -> None:
    roof = Roofline(bandwidth_gb_s=23.7, tflops=0.31)
    controls = {control.name: control for control in roof.controls()}
    assert 23.7 in controls["bandwidth_gb_s"].values and 0.31 in controls["tflops"].values  # type: ignore[union-attr]
    roof.update(bandwidth_gb_s=192.0)
    assert roof.bandwidth_gb_s == 192.0


@pytest.mark.parametrize(
    "bad", [{"m": 0}, {"bits": 5}, {"group": 7}, {"bandwidth_gb_s": -1.0}, {"tflops": 0.0}]
)
def test_bad_state_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Roofline(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("m", [1, 16, 512])
@pytest.mark.parametrize("bandwidth", [12.0, 192.0, 4800.0])
@pytest.mark.parametrize("tflops", [0.1, 12.3, 989.0])
def test_the_drawing_is_valid_and_stays_inside(m: int, bandwidth: float, tflops: float) -> None:
    drawing = re.match(r"<svg.*?</svg>", Roofline(m=m, bandwidth_gb_s=bandwidth, tflops=tflops).html())
    assert drawing is not None
    root = ET.fromstring(drawing.group())
    space = "{http://www.w3.org/2000/svg}"
    for circle in root.iter(f"{space}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 640 and 0 <= float(circle.attrib["cy"]) <= 330
    for path in root.iter(f"{space}polyline"):
        for point in path.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 640 and 0 <= y <= 330
    assert min(float(t.attrib["font-size"]) for t in root.iter(f"{space}text")) >= 12


def test_the_view_redraws() -> None:
    view = View(Roofline())
    view.inputs["m"].value = 64
    assert "compute with 64 rows" in view.output.value
