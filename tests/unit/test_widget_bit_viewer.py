"""The bit viewer against the storage formats of labkit.quant, and its controls."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import InputError
from labkit.quant import pack_w3, pack_w4, packed_bytes, unpack_w3, unpack_w4
from labkit.widgets.base import Slider, View
from labkit.widgets.bit_viewer import COUNT, TINTS, BitViewer, pieces_of

PACK = {"w3": pack_w3, "w4": pack_w4}
UNPACK = {"w3": unpack_w3, "w4": unpack_w4}
RAW_W3 = "b0 & 7|(b0 >> 3) & 7|(b0 >> 6) & 3 / (b1 & 1) << 2|(b1 >> 1) & 7|(b1 >> 4) & 7|"
RAW_W3 += "(b1 >> 7) & 1 / (b2 & 3) << 1|(b2 >> 2) & 7|(b2 >> 5) & 7"


def codes(format: str) -> st.SearchStrategy[tuple[int, ...]]:
    half = 4 if format == "w3" else 8
    return st.tuples(*[st.integers(-half, half - 1)] * COUNT)


@pytest.mark.parametrize("format", ["w3", "w4"])
@given(data=st.data())
def test_bytes_are_those_of_the_storage_format(format: str, data: st.DataObject) -> None:
    values = data.draw(codes(format))
    viewer = BitViewer(format, values)
    packed = PACK[format](torch.tensor([values], dtype=torch.int8))
    assert viewer.data == bytes(packed.flatten().tolist())


@pytest.mark.parametrize("format", ["w3", "w4"])
@given(data=st.data())
def test_codes_follow_the_bytes(format: str, data: st.DataObject) -> None:
    viewer = BitViewer(format)
    raw = data.draw(st.binary(min_size=len(viewer.data), max_size=len(viewer.data)))
    viewer.set_data(raw)
    stored = torch.tensor([list(raw)], dtype=torch.uint8)
    assert list(viewer.codes) == UNPACK[format](stored, COUNT)[0].tolist()
    assert viewer.data == raw


@pytest.mark.parametrize("format", ["w3", "w4"])
@given(data=st.data())
def test_expressions_compute_the_raw_field(format: str, data: st.DataObject) -> None:
    viewer = BitViewer(format, data.draw(codes(format)))
    names = {f"b{i}": value for i, value in enumerate(viewer.data)}
    for field in viewer.fields:
        assert eval(field.expression, {}, names) == field.raw
        assert int(field.raw_bits, 2) == field.raw


def test_expressions_of_w3_are_those_of_the_format_description() -> None:
    expected = [text.replace(" / ", " | ") for text in RAW_W3.split("|")]
    assert [field.expression for field in BitViewer().fields] == expected


def test_only_q2_and_q5_cross_a_byte_edge() -> None:
    assert [field.index for field in BitViewer("w3").fields if field.crosses] == [2, 5]
    assert not [field.index for field in BitViewer("w4").fields if field.crosses]


@pytest.mark.parametrize("bits", [3, 4])
def test_pieces_cover_every_bit_once(bits: int) -> None:
    seen = [
        (piece.byte, piece.low + step)
        for index in range(COUNT)
        for piece in pieces_of(bits, index)
        for step in range(piece.width)
    ]
    assert sorted(seen) == [(byte, bit) for byte in range(bits) for bit in range(8)]


def test_weights_and_bits_per_weight() -> None:
    viewer = BitViewer("w4", (-8, 7, 0, 1, 2, 3, 4, 5), scale=0.5, offset=0.25, group_size=64)
    assert viewer.weights[:3] == (-3.75, 3.75, 0.25)
    assert viewer.bits_per_weight == 4.5
    viewer.update(stored_offset="none", group_size="row")
    assert viewer.bits_per_weight == pytest.approx(packed_bytes("w4", 1, 576, "row") * 8 / 576)


def test_w3_cuts_codes_and_bytes_that_only_w4_has() -> None:
    viewer = BitViewer("w4", (-8, 7, 6, -5, 3, -4, 0, 1), byte=3)
    viewer.update(format="w3")
    assert viewer.codes == (-4, 3, 3, -4, 3, -4, 0, 1)
    assert viewer.byte == 2
    viewer.update(code=7, byte=3)
    assert (viewer.code, viewer.byte) == (3, 2)


def test_setting_a_byte_changes_only_the_codes_it_holds() -> None:
    viewer = BitViewer(codes=(0,) * COUNT)
    viewer.update(byte=1)
    viewer.update(byte_value=255)
    assert viewer.codes == (0, 0, -4, -1, -1, 1, 0, 0)
    assert viewer.byte_value == 255


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": "w5"},
        {"codes": (0,) * 7},
        {"codes": (4,) * 8},
        {"codes": (0.5,) * 8},
        {"selected": 8},
        {"byte": 3},
        {"scale": 0.0},
        {"group_size": 48},
        {"row_length": 0},
    ],
)
def test_a_wrong_state_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        BitViewer(**wrong)  # type: ignore[arg-type]
    assert caught.value.argument == next(iter(wrong))


@pytest.mark.parametrize(
    "wrong", [{"code": 9}, {"byte_value": 256}, {"stored_offset": 0.3}, {"format": "w5"}]
)
def test_a_control_takes_only_its_values(wrong: dict[str, object]) -> None:
    viewer = BitViewer()
    with pytest.raises(InputError):
        viewer.update(**wrong)
    assert viewer == BitViewer()


def test_wrong_number_of_bytes_is_refused() -> None:
    with pytest.raises(InputError, match="3 bytes"):
        BitViewer().set_data(b"1234")


@pytest.mark.parametrize("format", ["w3", "w4"])
def test_picture_shows_every_bit_and_has_words(format: str) -> None:
    viewer = BitViewer(format)
    root = ElementTree.fromstring(viewer.picture())
    space = "{http://www.w3.org/2000/svg}"
    bits = 8 * len(viewer.data)
    assert root.attrib["aria-label"] == viewer.alt()
    assert len(root.findall(f"{space}rect")) == 2 * bits  # once as bytes, once as one number
    marked = [box for box in root.findall(f"{space}rect") if box.attrib["stroke"] != "white"]
    assert len(marked) == 2 * viewer.code_bits
    texts = [text.text for text in root.findall(f"{space}text")]
    assert "".join(t for t in texts if t in ("0", "1"))  # bit values are written out
    assert f"b0 = 0x{viewer.data[0]:02X} = {viewer.data[0]}" in texts


def test_text_spells_out_the_sign_and_the_weight() -> None:
    viewer = BitViewer(selected=5)
    text = viewer.text()
    assert "q5 is in bits 1–0 of b2 and bit 7 of b1: 101. It crosses a byte edge." in text
    assert "5 ≥ 4, so q = 5 − 8 = −3" in text
    assert "−3 × 0.050 = −0.150" in text
    assert "3 + 16 / 32 = 3.500" in text
    viewer.update(selected=6, stored_offset=-0.2)
    assert "0 × 0.050 + (−0.200) = −0.200" in viewer.text()
    assert "3 + (16 + 16) / 32 = 4.000" in viewer.text()


def test_zero_weight_has_no_minus() -> None:
    viewer = BitViewer(codes=(-2, *(0,) * 7), scale=0.05, offset=0.1, selected=0)
    assert "= 0.000." in viewer.text()


def test_table_names_all_codes_and_marks_one() -> None:
    html = BitViewer().html()
    assert re.findall(r">(?:▶ )?(q\d)</td>", html) == [f"q{i}" for i in range(COUNT)]
    assert html.count("▶") == 1
    assert all(tint in html for tint in TINTS)


def test_view_moves_all_inputs_together() -> None:
    viewer = BitViewer()
    view = View(viewer)
    assert view.inputs["stored_offset"].label == "none"
    view.inputs["byte_value"].value = 255
    assert viewer.codes[:2] == (-1, -1)
    assert "b0 = 0xFF = 255" in view.output.value
    view.inputs["selected"].value = 0
    assert view.inputs["code"].value == -1
    view.inputs["code"].value = 7  # W3 ends at 3: the slider goes back
    assert view.inputs["code"].value == 3
    view.inputs["format"].value = "w4"
    view.inputs["code"].value = 7
    assert view.inputs["code"].value == 7
    assert view.inputs["byte_value"].value == viewer.data[0]
    view.inputs["byte"].value = 3
    view.inputs["format"].value = "w3"
    assert view.inputs["byte"].value == 2
    view.inputs["stored_offset"].value = 0.1
    assert viewer.offset == 0.1
    view.inputs["stored_offset"].value = "none"
    assert viewer.offset is None
    assert 'role="alert"' not in view.output.value


def test_every_slider_has_a_label() -> None:
    assert all(control.label for control in BitViewer().controls())
    assert sum(isinstance(control, Slider) for control in BitViewer().controls()) == 5
