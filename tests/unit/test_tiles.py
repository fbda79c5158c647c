"""Tensor-core tiles: records read bit by bit, repacking undone for every shape, padding, refusals."""

from __future__ import annotations

import struct
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from test_linear_memory import LiveBytes

from labkit.errors import InputError
from labkit.quant import QuantWeight, TileWeight, padded_k, quantize, repack, unpack, why_not
from labkit.quant.packing import CODE_RANGE
from labkit.quant.tiles import record_bytes

PROPERTY = settings(max_examples=40, deadline=None)
FORMAT = st.sampled_from(["w4", "w3"])
GROUP = st.sampled_from([32, 64, 128, "row"])
OFFSET = st.sampled_from([None, torch.float16, torch.float32])
N = st.one_of(st.sampled_from([1, 8, 16, 31, 32, 33, 64, 65]), st.integers(1, 200))
K = st.one_of(st.sampled_from([1, 31, 33, 127, 128, 129, 256, 576, 1536]), st.integers(1, 700))
BOTH = pytest.mark.parametrize("format", ["w4", "w3"])


def weight_of(
    format: str = "w4",
    n: int = 33,
    k: int = 200,
    group: int | str = 64,
    offset: torch.dtype | None = None,
    *,
    ordered: bool = False,
    seed: int = 0,
) -> QuantWeight:
    generator = torch.Generator().manual_seed(seed)
    low, high = CODE_RANGE[format]
    codes = torch.randint(low, high + 1, (n, k), generator=generator).to(torch.int8)
    groups = 1 if group == "row" else padded_k(format, k, group) // int(group)
    scales = torch.randn(n, groups, generator=generator).half()
    shift = None if offset is None else torch.randn(n, groups, generator=generator).to(offset)
    order = torch.randperm(k, generator=generator) if ordered else None
    return QuantWeight.from_codes(format, codes, scales, shift, group_size=group, k_order=order)


def assert_same(got: QuantWeight, wanted: QuantWeight) -> None:
    assert got.metadata() == wanted.metadata()
    assert got.tensors().keys() == wanted.tensors().keys()
    for name, tensor in wanted.tensors().items():
        assert got.tensors()[name].dtype == tensor.dtype, name
        assert torch.equal(got.tensors()[name], tensor), name


# --- the layout, independently ------------------------------------------------------------------


def read_record(record: bytes, format: str, group: int, offset: str) -> dict[tuple[int, int], tuple]:
    """(row, column) of a record to (code, scale, offset), one code and one bit at a time."""
    code_bytes = 2048 if format == "w4" else 1536
    groups = 128 // group
    found = {}
    for lane in range(32):
        g, q = lane // 4, lane % 4

        def bit(word: int, position: int, lane: int = lane) -> int:
            vector, component = word // 4, word % 4
            at = vector * 512 + lane * 16 + component * 4 + position // 8
            return record[at] >> position % 8 & 1

        for h in range(2):
            for c in range(4):
                for s in range(2):
                    for i in range(4):
                        for e in range(2):
                            row = 16 * h + g + 8 * (i & 1)
                            column = 32 * c + 8 * q + 4 * s + 2 * (i >> 1) + e
                            if format == "w4":
                                places = [(4 * c + 2 * h + s, 4 * i + 16 * e + b) for b in range(4)]
                            else:
                                p = (2 * h + s) * 4 + i
                                places = [
                                    (3 * c + p // 5, 3 * (p % 5) + 16 * e + b)
                                    if p < 15
                                    else (3 * c + b, 15 + 16 * e)
                                    for b in range(3)
                                ]
                            u = sum(bit(*place) << b for b, place in enumerate(places))
                            entry = (column // group) * 32 + (row % 8) * 4 + row // 8
                            scale = struct.unpack_from("<e", record, code_bytes + 2 * entry)[0]
                            shift = 0.0
                            if offset:
                                at = code_bytes + 64 * groups + entry * struct.calcsize(offset)
                                shift = struct.unpack_from("<" + offset, record, at)[0]
                            assert (row, column) not in found
                            found[row, column] = (u - (8 if format == "w4" else 4), scale, shift)
    assert len(found) == 32 * 128
    return found


@BOTH
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "group", "offset"),
    [
        (34, 200, 32, None),
        (46, 136, 64, torch.float16),
        (64, 129, 128, torch.float32),
        (6, 152, "row", torch.float16),  # a row of 152: one scale for both k tiles, the second padded
        (2, 1, 32, None),
    ],
)
def test_records_hold_what_the_formulas_say(format, paired, n, k, group, offset):
    weight = weight_of(format, n, k, group, offset)
    tiles = repack(weight, paired=paired)
    column_group = weight.group_size
    tile_group = column_group if column_group in (32, 64, 128) else 128
    outputs = n // 2 if paired else n
    height = 16 if paired else 32
    assert tiles.outputs == outputs and tiles.tile_group == tile_group
    assert tiles.tiles.dtype == torch.uint8 and tiles.tiles.is_contiguous()
    assert list(tiles.tiles.shape) == [-(-outputs // height), -(-weight.k_padded // 128), tiles.record_bytes]
    codes, scales = weight.codes().tolist(), weight.scales.tolist()
    offsets = None if weight.offset is None else weight.offset.tolist()
    letter = {None: "", torch.float16: "e", torch.float32: "f"}[offset]
    for t in range(tiles.row_tiles):
        for u in range(tiles.k_tiles):
            record = bytes(tiles.tiles[t, u].tolist())
            for (row, column), got in read_record(record, format, tile_group, letter).items():
                stored_column = 128 * u + column
                if paired:
                    inside = 16 * t + row % 16
                    stored_row = inside + (outputs if row >= 16 else 0)
                else:
                    inside = stored_row = 32 * t + row
                row_held = inside < outputs
                group_held = row_held and stored_column // tile_group * tile_group < weight.k_padded
                j = stored_column // column_group if group_held else 0
                if column_group not in (32, 64, 128):
                    j = 0  # one group a row
                code = codes[stored_row][stored_column] if row_held and stored_column < k else 0
                scale = scales[stored_row][j] if group_held else 0.0
                shift = offsets[stored_row][j] if group_held and offsets else 0.0
                assert got == (code, scale, shift), (t, u, row, column)


@pytest.mark.parametrize(
    ("format", "group", "offset", "size"),
    [
        ("w4", 128, None, 2112),
        ("w4", 64, torch.float16, 2304),
        ("w4", 32, torch.float32, 2816),
        ("w3", 128, None, 1600),
        ("w3", 32, torch.float16, 2048),
        ("w3", 128, torch.float32, 1728),
    ],
)
def test_record_size(format, group, offset, size):
    assert record_bytes(format, group, offset) == size
    tiles = repack(weight_of(format, 65, 300, group, offset))
    assert tiles.record_bytes == size and size % 16 == 0
    assert tiles.nbytes == 3 * 3 * size and tiles.bits_per_weight == 8 * tiles.nbytes / (65 * 300)


# --- there and back -----------------------------------------------------------------------------


@PROPERTY
@given(
    format=FORMAT,
    n=N,
    k=K,
    group=GROUP,
    offset=OFFSET,
    ordered=st.booleans(),
    paired=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_unpack_undoes_repack(format, n, k, group, offset, ordered, paired, seed):
    n += n % 2 if paired else 0
    weight = weight_of(format, n, k, group, offset, ordered=ordered, seed=seed)
    assert why_not(weight, paired=paired) == ""
    tiles = repack(weight, paired=paired)
    assert tiles.shape == weight.shape and tiles.paired == paired
    assert_same(unpack(tiles), weight)


@BOTH
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("n", [2, 30, 34, 254])
def test_bands_of_rows_join_without_a_seam(monkeypatch, format, paired, n):
    weight = weight_of(format, n, 260, 32, torch.float32)
    whole = repack(weight, paired=paired)
    for band in (1, 3 * 32 * 384):  # one row tile at a time, three
        monkeypatch.setattr("labkit.quant.tiles.BAND_CODES", band)
        assert torch.equal(repack(weight, paired=paired).tiles, whole.tiles)
        assert_same(unpack(whole), weight)


@BOTH
def test_a_row_of_256_repeats_its_scale(format):
    weight = weight_of(format, 40, 256, 256, torch.float16)
    tiles = repack(weight)
    assert tiles.tile_group == 128 and tiles.group_size == 256 and tiles.k_tiles == 2
    for view in (tiles.scale_view(), tiles.offset_view()):
        assert torch.equal(view[:, 0], view[:, 1])
    assert_same(unpack(tiles), weight)


@BOTH
@pytest.mark.parametrize("paired", [False, True])
def test_dequantize_gives_the_bits_of_the_stored_weight(format, paired):
    weight = weight_of(format, 38, 300, 32, torch.float16, ordered=True)
    tiles = repack(weight, paired=paired)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(tiles.dequantize(dtype), weight.dequantize(dtype))


def test_to_moves_or_keeps():
    tiles = repack(weight_of(ordered=True))
    assert tiles.to("cpu") is tiles
    moved = tiles.to("meta")
    assert moved.device.type == "meta" and moved.k_order.device.type == "meta"
    assert moved.tiles.shape == tiles.tiles.shape


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("paired", [False, True])
def test_the_gpu_makes_the_same_bytes(format, paired):
    weight = weight_of(format, 1000, 1000, 32, torch.float32, ordered=True)
    tiles = repack(weight.to("cuda"), paired=paired)
    assert torch.equal(tiles.tiles.cpu(), repack(weight, paired=paired).tiles)
    assert_same(unpack(tiles).to("cpu"), weight)


# --- padding ------------------------------------------------------------------------------------


@BOTH
def test_what_padding_columns_hold_never_reaches_the_tiles(format):
    weight = weight_of(format, 33, 70, 32, torch.float16)
    poisoned = weight.packed.clone()
    poisoned[:, -9:] = 0xFF  # codes 78..95 of W4, 72..95 of W3: K = 70 uses 70 of 96
    other = replace(weight, packed=poisoned)
    assert not torch.equal(other.packed, weight.packed)
    assert torch.equal(repack(other).tiles, repack(weight).tiles)
    assert_same(unpack(repack(other)), weight)


# --- memory -------------------------------------------------------------------------------------


@BOTH
def test_temporaries_do_not_grow_with_the_weight(format):
    def temporaries(n: int) -> tuple[int, int]:
        width = 3584 // 2 if format == "w4" else 3584 // 8 * 3
        packed = torch.zeros(n, width, dtype=torch.uint8)
        weight = QuantWeight(format, packed, torch.ones(n, 28).half(), None, n, 3584, 128)
        with LiveBytes() as there:
            tiles = repack(weight)
        with LiveBytes() as back:
            stored = unpack(tiles)
        return there.peak - tiles.nbytes, back.peak - stored.nbytes

    small, large = temporaries(2048), temporaries(6144)
    assert max(large) <= 16 << 20
    for first, second in zip(small, large):
        assert second <= first + (1 << 20)  # the check that scales are finite goes over all of them


# --- refusals -----------------------------------------------------------------------------------


@BOTH
def test_why_not_names_the_group(format):
    for group in (32, 64, 128, "row"):
        assert why_not(weight_of(format, 3, 576, group)) == ""
    small = weight_of(format, 3, 576, 16)
    assert why_not(small).startswith("group_size: got 16; expected 32, 64, 128, a multiple of 128 or")
    with pytest.raises(InputError, match="group_size: got 16"):
        repack(small)
    for k in (10, 16, 48):  # a whole row may have any length
        whole = weight_of(format, 3, k, "row")
        assert why_not(whole) == ""
        assert_same(unpack(repack(whole)), whole)


def test_why_not_names_other_weights():
    grouped = quantize(torch.randn(3, 64), "q8_0")
    assert why_not(grouped) == "weight: got GroupedWeight of q8_0; expected a QuantWeight of w4 or w3"
    assert "Tensor" in why_not(torch.zeros(2, 2))
    assert why_not(weight_of(n=33), paired=True).startswith("paired: got N = 33; expected an even N")
    with pytest.raises(InputError, match="weight: got GroupedWeight of q8_0"):
        repack(grouped)
    with pytest.raises(InputError, match="paired: got N = 33"):
        repack(weight_of(n=33), paired=True)
    with pytest.raises(InputError, match="tiles: got QuantWeight; expected a TileWeight"):
        unpack(weight_of())


GOOD = {"format": "w4", "n": 40, "k": 200, "group_size": 64, "tile_group": 64, "offset": torch.float16}
TILES = torch.zeros(2, 2, 2304, dtype=torch.uint8)


def tiles_with(value: float, at: int, dtype: torch.dtype) -> torch.Tensor:
    tiles = TILES.clone()
    tiles[1, 0, at : at + dtype.itemsize] = torch.tensor([value], dtype=dtype).view(torch.uint8)
    return tiles


@pytest.mark.parametrize(
    ("changed", "argument", "words"),
    [
        ({"format": "q4_0"}, "format", "w4 or w3"),
        ({"n": 0}, "n", ">= 1"),
        ({"k": True}, "k", ">= 1"),
        ({"n": 65}, "tiles", "uint8 [3, 2, 2304]"),
        ({"k": 300}, "tiles", "uint8 [2, 3, 2304]"),
        ({"paired": True}, "tiles", "expected uint8 [2, 2, 2304]"),
        ({"paired": 1}, "paired", "True or False"),
        ({"paired": True, "n": 41}, "paired", "an even N"),
        ({"group_size": "row"}, "group_size", "a whole number"),
        ({"group_size": 48}, "group_size", "got 48"),
        ({"group_size": 16}, "group_size", "32, 64, 128, a multiple of 128 or a whole row"),
        ({"tile_group": 128}, "tile_group", "64 for groups of 64"),
        ({"offset": torch.bfloat16}, "offset", "None, float16 or float32"),
        ({"offset": None}, "tiles", "uint8 [2, 2, 2176]"),
        ({"tiles": TILES.char()}, "tiles", "got int8"),
        ({"tiles": None}, "tiles", "NoneType"),
        ({"tiles": tiles_with(float("nan"), 2048, torch.float16)}, "scales", "row tile 1, k tile 0"),
        ({"tiles": tiles_with(float("inf"), 2302, torch.float16)}, "offset", "row tile 1, k tile 0"),
        ({"k_order": torch.zeros(200, dtype=torch.int32)}, "k_order", "not a permutation"),
        ({"k_order": torch.arange(199)}, "k_order", "[200]"),
    ],
)
def test_construction_refuses_by_name(changed, argument, words):
    fields = {**GOOD, "tiles": TILES}
    TileWeight(**fields)
    if changed.get("paired") is True and changed.get("n", 40) == 40:
        changed = {**changed, "tiles": TILES[:1]}  # 20 outputs need two tiles of 16
    with pytest.raises(InputError) as caught:
        TileWeight(**{**fields, **changed})
    assert caught.value.argument == argument
    assert words in str(caught.value)


def test_tiles_off_a_16_byte_boundary_are_copied():
    tiles = repack(weight_of())
    shifted = torch.empty(tiles.tiles.nbytes + 8, dtype=torch.uint8)[8:].view(tiles.tiles.shape)
    shifted.copy_(tiles.tiles)
    assert shifted.data_ptr() % 16 == 8
    again = replace(tiles, tiles=shifted)
    assert again.tiles.data_ptr() % 16 == 0 and torch.equal(again.tiles, tiles.tiles)
    strided = tiles.tiles.transpose(0, 1).contiguous().transpose(0, 1)
    assert replace(tiles, tiles=strided).tiles.is_contiguous()
