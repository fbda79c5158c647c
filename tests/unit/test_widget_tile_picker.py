"""Tile picker: the seed tile by hand, conflicts that come and go, tiles that do not fit, the pictures."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import plots, quoted
from labkit.errors import InputError
from labkit.kernels.occupancy import occupancy
from labkit.widgets import tile_picker, tile_picture
from labkit.widgets.base import View
from labkit.widgets.tile_picker import BESIDE, Registers, TilePicker, compiled_registers

SVG = "{http://www.w3.org/2000/svg}"


def forty(tile: tuple[int, ...], pad: int, format: str, card: str) -> Registers | None:
    """Stands in for the compiler."""
    return Registers(40, "stand-in", True) if tile == tile_picker.SEED_TILE else None


def picker(**changes: Any) -> TilePicker:
    return TilePicker(**{"compiled": forty, **changes})


def test_the_seed_tile_is_the_article_s() -> None:
    tile = picker()
    article = quoted.table(quoted.DEEPINFER, "tiling")
    assert (tile.bm, tile.bn, tile.bk, tile.threads) == tuple(
        article.value(name) for name in ("block_m", "block_n", "block_k", "threads")
    )
    assert tile.thread_tile == (
        article.value("outputs_m_per_thread"),
        article.value("outputs_n_per_thread"),
    )
    assert tile.outputs_per_thread == 8 and tile.threads_along_n == 16
    assert tile.loads_per_fma == 6 / 8  # 8 FMA read 6 shared elements
    assert tile.shared_bytes == 2048 + 4160


def test_the_seed_tile_fills_an_sm_of_the_target_card() -> None:
    tile = picker()
    assert (tile.resident.blocks, tile.resident.warps, tile.resident.max_warps) == (6, 48, 48)
    assert tile.resident.limited_by == ("warps", "registers")
    assert ("blocks an SM", "6, 48 of 48 warps (100%)") in tile.facts()
    assert tile.why_not() == ""


def test_the_compiler_agrees_with_the_estimate_s_constant() -> None:
    found = compiled_registers(tile_picker.SEED_TILE, 1, "w4", "rtx3050-laptop")
    if found is None:
        pytest.skip("no NVRTC on this machine")
    assert found.compiled and "sm_86" in found.origin
    assert found.count == 8 + 6 + BESIDE
    assert compiled_registers((64, 64, 32, 256), 1, "w4", "rtx3050-laptop") is None


def test_bytes_per_flop_by_hand() -> None:
    # One K column: 32 activations of 2 bytes, 64 weights of 33/64 byte, 2·32·64 FLOP.
    assert picker().bytes_per_flop == pytest.approx((64 + 64 * 0.515625) / 4096)
    assert picker(bm=64).bytes_per_flop < picker().bytes_per_flop
    assert picker(bk=128).bytes_per_flop == picker().bytes_per_flop


@pytest.mark.parametrize(
    ("format", "bk", "use"),
    [("w4", 32, 0.5), ("w4", 64, 1), ("w4", 16, 0.25), ("w3", 128, 0.75), ("w3", 32, 12 / 40)],
)
def test_sectors_of_a_row_of_weights(format: str, bk: int, use: float) -> None:
    # w3, bk 32: 12 bytes at 0, 12, 24 (two sectors), 36, …, 84: eight steps touch ten sectors.
    # w3, bk 128: 48 bytes at 0, 48, …: always two sectors.
    assert picker(format=format, bk=bk).sector_use == pytest.approx(use)


@pytest.mark.parametrize(
    ("format", "pad", "store"),
    [("w4", 0, 16), ("w4", 1, 1), ("w4", 2, 1), ("w4", 4, 2), ("w3", 0, 4), ("w3", 1, 1)],
)
def test_padding_frees_the_stores_and_not_the_reads(format: str, pad: int, store: int) -> None:
    tile = picker(format=format, pad=pad)
    assert len(tile.store_b().wavefronts) == store
    assert len(tile.read_a().wavefronts) == 2  # rows 0 and 2 of x lie 128 bytes apart: one bank
    assert len(tile.read_b().wavefronts) == 1


def test_bank_words_by_hand() -> None:
    assert tile_picture.bank_words(picker(pad=0).store_b()) == [16] + 31 * [0]
    assert tile_picture.bank_words(picker(pad=0).read_b()) == [1, 0] * 16


@given(
    bm=st.sampled_from((16, 32, 64, 128)),
    bn=st.sampled_from((32, 64, 128, 256)),
    bk=st.sampled_from((16, 32, 64, 128, 256)),
    threads=st.sampled_from((64, 128, 256, 512, 1024)),
    pad=st.integers(0, 8),
    format=st.sampled_from(("w4", "w3")),
)
def test_any_tile_is_covered_once_or_says_why_not(**sizes: Any) -> None:
    tile = picker(**sizes)
    if tile.problem:
        assert tile.bm * tile.bn < tile.threads
        assert tile.problem in tile.text()
        return
    rows, columns = tile.thread_tile
    assert rows * columns * tile.threads == tile.bm * tile.bn
    assert tile.bm % rows == 0 and tile.bn % columns == 0
    assert 0 < tile.sector_use <= 1
    # Every offset lies inside its tile.
    limits = (tile.bk * (tile.bn + tile.pad), tile.bm * tile.bk, tile.bk * (tile.bn + tile.pad))
    for access, cells in zip(tile.accesses().values(), limits, strict=True):
        assert all(0 <= offset < 2 * cells for offset in access.offsets if offset is not None)
    assert bool(tile.why_not()) == (tile.resident.blocks == 0)


def test_an_estimate_is_labelled() -> None:
    tile = picker(bm=64, bn=64)
    assert tile.thread_tile == (4, 4)
    assert not tile.registers.compiled
    assert tile.registers.origin == "estimate: 16 accumulators + 8 operands + 26 beside"
    assert tile.registers.count == 50
    assert ("registers", "50 (estimate)") in tile.facts() and "estimate: 16" in tile.picture()
    assert ("registers", "40") in picker().facts()


def test_occupancy_is_that_of_the_library() -> None:
    tile = picker(bm=64, bn=128, bk=64, threads=256, card="h200")
    assert tile.resident == occupancy(tile.registers.count, tile.shared_bytes, 256, "h200")


def test_a_tile_too_large_for_shared_memory_says_so() -> None:
    tile = picker(bm=128, bn=256, bk=256, pad=0)
    assert tile.shared_bytes == 2 * 256 * (128 + 256)
    assert tile.why_not() == ("192.0 KiB of shared memory, and a block on RTX 3050 Laptop 4GB has at most 99")
    assert ("does not fit", tile.why_not()) in tile.facts()
    tile.update(card="h200")
    assert tile.why_not() == "" and tile.resident.blocks == 1
    assert ("shared memory", "196,608 B (by opt-in)") in tile.facts()


def test_too_many_registers_say_so() -> None:
    tile = picker(bm=128, bn=256, threads=64)
    assert tile.resident.blocks == 0
    assert "586 registers (estimate: 512 accumulators" in tile.why_not()
    assert ("does not fit", tile.why_not()) in tile.facts()
    ElementTree.fromstring(tile.picture())


@pytest.mark.parametrize(
    "wrong",
    [{"bm": 48}, {"bn": 16}, {"bk": 8}, {"threads": 96}, {"pad": 9}, {"format": "q8_0"}, {"card": "x"}],
)
def test_a_wrong_state_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        picker(**wrong)
    assert caught.value.argument == next(iter(wrong))


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"bm": 128, "bn": 256, "bk": 128},
        {"bm": 16, "bn": 256, "bk": 16, "pad": 8},
        {"bm": 128, "bn": 32, "bk": 128, "card": "h200"},
        {"bm": 16, "bn": 32, "threads": 1024},
        {"bm": 128, "bn": 256, "threads": 64},
    ],
)
def test_the_picture_is_valid_and_stays_inside(sizes: dict[str, Any]) -> None:
    tile = picker(**sizes)
    root = ElementTree.fromstring(tile.picture())
    assert root.attrib["aria-label"] == tile.text()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    boxes = list(root.iter(f"{SVG}rect"))
    for box in boxes:
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width + 0.01
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    banks = [box for box in boxes if (box.findtext(f"{SVG}title") or "").startswith("bank ")]
    assert len(banks) == (0 if tile.problem else 96)
    texts = list(root.iter(f"{SVG}text"))
    assert all(float(text.attrib["font-size"]) >= 11 for text in texts)
    assert all(float(text.attrib["y"]) <= height for text in texts)


def test_the_static_figures() -> None:
    fig, axes = plots.figure(7.2, 5, rows=2)
    tile_picker.draw(axes[0], picker())
    tile_picker.draw_banks(axes[1], picker(pad=0))
    names = [label.get_text() for label in axes[1].get_yticklabels()]
    assert names[0] == "store to shared_b: 16 wavefronts" and names[2] == "read of shared_b: 1 wavefront"
    assert len(axes[1].patches) == 96
    assert any("2×4 outputs" in text.get_text() for text in axes[0].texts)
    assert plots.render(fig, "A tile and its banks").png
    with pytest.raises(InputError, match="some would have none"):
        tile_picker.draw(axes[0], picker(bm=16, bn=32, threads=1024))


def test_the_view_moves() -> None:
    view = View(picker())
    view.inputs["pad"].value = 0
    assert "16 wavefronts" in view.output.value
    view.inputs["bm"].value = 16
    view.inputs["bn"].value = 32
    view.inputs["threads"].value = 1024
    assert "not possible" in view.output.value
