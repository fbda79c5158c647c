"""The occupancy card's controller."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from labkit.errors import InputError
from labkit.widgets.base import View
from labkit.widgets.occupancy_card import OccupancyCard


def test_forty_registers_fill_the_target_card_and_forty_one_do_not() -> None:
    card = OccupancyCard()
    assert (card.resident.warps, card.working_warps) == (48, 48)
    card.update(registers=41)
    assert card.resident.warps == 40
    card.update(registers=64)
    assert card.resident.warps == 32 and "32 of 48 warps (67%)" in card.text()


def test_a_grid_too_small_for_the_card_leaves_room_that_no_register_explains() -> None:
    card = OccupancyCard(card="h200")
    assert card.resident.warps == 48
    assert card.working_warps == pytest.approx(704 / 132 * 8)
    card.update(grid=5632)
    assert card.working_warps == 48


def test_shared_memory_can_be_the_limit() -> None:
    card = OccupancyCard(shared_kib=48)
    assert card.resident.limited_by == ("shared memory",) and card.resident.blocks == 2


def test_nothing_fits() -> None:
    card = OccupancyCard(registers=128, threads=1024)
    assert card.resident.blocks == 0 and "No block fits" in card.text()
    assert "no block fits" in card.html()


@pytest.mark.parametrize("bad", [{"registers": 8}, {"threads": 100}, {"shared_kib": 49}, {"card": "none"}])
def test_bad_state_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InputError):
        OccupancyCard(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("card", ["rtx3050-laptop", "h200", "rtx5090"])
@pytest.mark.parametrize("registers", [16, 40, 128])
@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_the_drawing_is_valid_and_stays_inside(card: str, registers: int, threads: int) -> None:
    drawing = re.search(r"<svg.*?</svg>", OccupancyCard(registers, threads, card=card).html())
    assert drawing is not None
    root = ET.fromstring(drawing.group())
    width, height = (float(part) for part in root.attrib["viewBox"].split()[2:])
    space = "{http://www.w3.org/2000/svg}"
    rects = root.findall(f"{space}rect")
    assert len(rects) == OccupancyCard(card=card).resident.max_warps
    for each in rects:
        assert float(each.attrib["x"]) + float(each.attrib["width"]) <= width
        assert float(each.attrib["y"]) + float(each.attrib["height"]) <= height
    for each in root.findall(f"{space}text"):
        assert float(each.attrib["y"]) <= height


def test_view_moves_the_state() -> None:
    pytest.importorskip("ipywidgets")
    view = View(OccupancyCard())
    view.inputs["registers"].value = 64
    assert view.controller.registers == 64 and "32 warps" in view.output.value  # type: ignore[attr-defined]
