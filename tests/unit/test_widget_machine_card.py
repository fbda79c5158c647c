"""The machine card's controller."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from labkit import quoted
from labkit.errors import InputError
from labkit.widgets.base import View
from labkit.widgets.machine_card import RESERVE_GIB, Card, MachineCard, this_machine


def test_the_article_s_model_fits_the_target_card() -> None:
    card = MachineCard()
    used = card.memory_gib()
    assert used["weights"] == pytest.approx(3.0857e9 * 0.515625 / 2**30, rel=1e-4)
    assert used["reserve"] == RESERVE_GIB
    assert card.fits and card.cards[0].name == "RTX 3050 Laptop 4GB"
    assert 100 < card.ceiling_tok_s < 120.7  # the cache is read as well


def test_7b_in_w4_does_not_fit_4_gib() -> None:
    card = MachineCard(model="qwen2.5-7b", context=8192)
    assert not card.fits
    assert "does not fit" in card.text() and "does not fit" in card.html()
    assert "if it did" in card.html()
    card.update(bits=3)
    assert card.fits


@pytest.mark.parametrize(
    ("model", "bits", "group"),
    [
        ("smollm2-135m", 4, 64),
        ("qwen2.5-3b", 4, 128),
        ("qwen2.5-3b", 8, 32),
        ("qwen2.5-3b", 16, None),
    ],
)
def test_group_follows_the_model(model: str, bits: int, group: int | None) -> None:
    assert MachineCard(model=model, bits=bits).group == group


def test_this_machine_comes_first() -> None:
    mine = this_machine(16 * 2**30, 25.0, "2 cores")
    card = MachineCard(extra=(mine,))
    assert card.cards[0] == Card("This machine", 16.0, 25.0, "2 cores", "measured")
    assert "figures: measured" in card.html()
    with pytest.raises(InputError, match="bandwidth_gb_s"):
        this_machine(1, 0, "")


@pytest.mark.parametrize("change", [{"card": 99}, {"model": "gpt"}, {"bits": 5}, {"context": 1000}])
def test_bad_state_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError):
        MachineCard(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", list(quoted.models()))
@pytest.mark.parametrize("bits", [3, 4, 8, 16])
def test_the_bar_stays_inside_the_card(model: str, bits: int) -> None:
    root = ET.fromstring(MachineCard(model=model, bits=bits, context=32768).html())
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= 640.01


def test_the_view_names_every_choice() -> None:
    view = View(MachineCard())
    view.inputs["model"].value = "qwen2.5-7b"
    assert "3.66 GiB" in view.output.value
    assert next(label for label, _ in view.inputs["card"].options) == "RTX 3050 Laptop 4GB"
