"""The fragment and tile maps: against the emulator's mma, against the packed tiles, and by hand."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import emulator, plots
from labkit.check.cuda_case import product_case
from labkit.errors import InputError
from labkit.quant.tiles import repack
from labkit.widgets import fragment_map, mma_layout
from labkit.widgets.base import View
from labkit.widgets.fragment_map import FragmentMap, TileMap
from labkit.widgets.mma_layout import OPERANDS, locate

SVG = "{http://www.w3.org/2000/svg}"

# Every lane's registers come from and go to memory as they are: [lane][register]. D = A · B.
RAW = r"""#include "ptx.cuh"
extern "C" __global__ void raw_mma(const unsigned* a, const unsigned* b, float* c)
{
    const int lane = threadIdx.x;
    float sums[4] = {};
    mma_m16n8k16(sums, a + 4 * lane, b + 2 * lane, sums);
    for (int i = 0; i < 4; ++i) {
        c[4 * lane + i] = sums[i];
    }
}
"""


def fragments(name: str, matrix: torch.Tensor) -> torch.Tensor:
    """A matrix as half [32, registers, 2], by the map."""
    one = OPERANDS[name]
    out = torch.zeros(32, one.registers, one.positions, dtype=torch.float16)
    for row in range(one.rows):
        for column in range(one.columns):
            out[one.holder(row, column)] = matrix[row, column]
    return out


def test_the_map_is_that_of_the_instruction() -> None:
    random = torch.Generator().manual_seed(1)
    a = torch.randint(-4, 5, (16, 16), generator=random).half()
    b = torch.randint(-4, 5, (16, 8), generator=random).half()
    packed = [fragments(name, matrix).view(torch.int32) for name, matrix in (("A", a), ("B", b))]
    sums = torch.full((32, 4), float("nan"))
    kernel = emulator.compile(RAW, isolate=False)
    kernel((1,), (32,), [packed[0].contiguous(), packed[1].contiguous(), sums])
    wanted = a.float() @ b.float()
    for lane in range(32):
        for register in range(4):
            assert sums[lane, register] == wanted[mma_layout.C.place(lane, register, 0)]


@pytest.mark.parametrize("name", list(OPERANDS))
def test_place_and_holder_are_inverse_and_cover_the_matrix(name: str) -> None:
    one = OPERANDS[name]
    holders = [(m, r, p) for m in range(32) for r in range(one.registers) for p in range(one.positions)]
    places = {one.place(*holder): holder for holder in holders}
    assert len(places) == one.rows * one.columns == len(holders)
    assert all(one.holder(*place) == holder for place, holder in places.items())


def test_the_map_by_hand() -> None:
    # PTX manual, m16n8k16: lane 13 is g = 3, q = 1
    assert mma_layout.A.place(13, 0, 0) == (3, 2)
    assert mma_layout.A.place(13, 1, 1) == (11, 3)
    assert mma_layout.A.place(13, 2, 0) == (3, 10)
    assert mma_layout.B.place(13, 1, 1) == (11, 3)
    assert mma_layout.C.place(13, 3, 0) == (11, 3)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: mma_layout.A.place(32, 0, 0), "lane"),
        (lambda: mma_layout.B.place(0, 2, 0), "register"),
        (lambda: mma_layout.C.place(0, 0, 1), "position"),
        (lambda: mma_layout.B.holder(0, 8), "batch"),
        (lambda: locate("w4", 32, 0), "row"),
        (lambda: locate("w3", 0, 128), "column"),
        (lambda: locate("w2", 0, 0), "format"),
        (lambda: FragmentMap(lane=32), "lane"),
        (lambda: TileMap(format="w2"), "format"),
    ],
)
def test_numbers_outside_are_refused_by_name(call: Any, argument: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.argument == argument


@pytest.mark.parametrize(("format", "bias"), [("w4", 8), ("w3", 4)])
def test_the_tile_map_is_that_of_the_packed_tiles(format: str, bias: int) -> None:
    weight = product_case(format, 64, 256, group_size=128).weight
    records = repack(weight).tiles
    words = records[..., : records.shape[-1] // 512 * 512].contiguous().view(torch.int32).long()
    codes = weight.codes().int() + bias
    for row in range(32):
        for column in range(128):
            piece, value, done = locate(format, row, column), torch.zeros(2, 2).long(), 0
            for word, bit, width in zip(piece.words, piece.bits, piece.width, strict=True):
                at = 128 * (word // 4) + 4 * piece.lane + word % 4
                value |= (words[..., at] >> bit & (1 << width) - 1) << done
                done += width
            assert value.tolist() == codes[row::32, column::128].tolist(), (row, column)
            assert piece.byte == 512 * (piece.words[0] // 4) + 16 * piece.lane + 4 * (piece.words[0] % 4)


@pytest.mark.parametrize("format", ["w4", "w3"])
def test_every_bit_of_a_record_belongs_to_one_weight(format: str) -> None:
    seen = set()
    for row in range(32):
        for column in range(128):
            piece = locate(format, row, column)
            for word, bit, width in zip(piece.words, piece.bits, piece.width, strict=True):
                new = {(piece.lane, word, bit + i) for i in range(width)}
                assert not new & seen
                seen |= new
    assert len(seen) == 32 * 128 * int(format[1])


def test_a_lane_s_columns_are_eight_neighbours_of_each_chunk() -> None:
    for lane in range(32):
        state = TileMap(row=lane // 4, column=8 * (lane % 4))
        columns = sorted({column for _, column in state.siblings()})
        assert state.piece.lane == lane and len(state.siblings()) == 128
        assert columns == [32 * c + 8 * (lane % 4) + j for c in range(4) for j in range(8)]
        assert all(locate("w3", *place).lane == lane for place in state.siblings())


# --- controllers


@given(
    operand=st.sampled_from(list(OPERANDS)),
    changes=st.lists(
        st.one_of(
            st.fixed_dictionaries({"lane": st.integers(0, 31)}),
            st.fixed_dictionaries({"register": st.integers(0, 3), "position": st.integers(0, 1)}),
            st.fixed_dictionaries({"row": st.integers(0, 15), "column": st.integers(0, 15)}),
            st.fixed_dictionaries({"operand": st.sampled_from(list(OPERANDS))}),
        ),
        max_size=5,
    ),
)
def test_holder_and_element_always_agree(operand: str, changes: list[dict[str, Any]]) -> None:
    state = FragmentMap(operand=operand)
    for change in changes:
        state.update(**change)
        assert state.matrix.place(state.lane, state.register, state.position) == (state.row, state.column)
        assert (state.row, state.column) in state.held()


def test_picking_an_element_finds_the_lane() -> None:
    state = FragmentMap(row=3, column=11)
    assert (state.lane, state.register, state.position) == (13, 2, 1)
    assert "row 3, k 11 is in lane 13, register 2, high half" in state.text()
    state.update(operand="C")
    assert state.position == 0 and "half" not in state.describe()
    state.update(column=15)  # the sums have eight columns
    assert state.column == 7


def test_w3_s_sixteenth_field_is_three_bits_of_three_words() -> None:
    state = TileMap(format="w3", row=26, column=47)
    assert state.piece.register == 3 and state.piece.words == (3, 4, 5)
    assert state.bits() == [(3, [31]), (4, [31]), (5, [31])]
    assert "bit 31 of word 3, bit 31 of word 4, bit 31 of word 5" in state.text()
    assert TileMap(format="w4", row=26, column=47).bits() == [(7, [28, 29, 30, 31])]


@pytest.mark.parametrize(
    "state",
    [FragmentMap(), FragmentMap(operand="B", lane=31), FragmentMap(operand="C", lane=9), TileMap(),
     TileMap("w3", 31, 127), TileMap("w4", 31, 127)],
    ids=lambda state: state.describe(),
)  # fmt: skip
def test_the_pictures_are_valid_and_stay_inside(state: Any) -> None:
    root = ElementTree.fromstring(state.picture())
    assert root.attrib["aria-label"] == state.alt()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width + 1
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    texts = list(root.iter(f"{SVG}text"))
    assert all(float(text.attrib["font-size"]) >= 11 for text in texts)
    assert all(float(text.attrib["y"]) <= height for text in texts)


def test_the_static_figures() -> None:
    fig, axes = plots.figure(7.2, 7, rows=2)
    fragment_map.draw(axes[0])
    fragment_map.draw_tile(axes[1], TileMap())
    assert plots.render(fig, "Three fragments and a tile").png
    assert sum(text.get_text() == "5" for text in axes[0].texts) >= 8 + 4 + 4


def test_the_view_moves_the_other_sliders() -> None:
    view = View(FragmentMap())
    view.inputs["row"].value = 9
    assert view.inputs["lane"].value == 4 and view.inputs["register"].value == 1
    view.inputs["lane"].value = 31
    assert view.inputs["row"].value == 15 and view.inputs["column"].value == 6
    tile = View(TileMap())
    tile.inputs["format"].value = "w3"
    tile.inputs["row"].value = 31
    assert "lane 28" in tile.output.value
