"""Storage formats: bits by hand, pack and unpack for every K and code, sizes, refusals."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from labkit.errors import InputError
from labkit.quant import (
    GROUP_SIZES,
    GroupedWeight,
    QuantWeight,
    check_shape,
    concat_rows,
    pack_w3,
    pack_w4,
    packed_bytes,
    padded_k,
    quantize,
    unpack_w3,
    unpack_w4,
)
from labkit.quant.packing import CODE_RANGE

K = st.integers(1, 4096)
PACKED = st.sampled_from(["w4", "w3"])
GROUP = st.sampled_from([*GROUP_SIZES, "row"])
PROPERTY = settings(max_examples=60, deadline=None)


def codes_of(format: str, n: int, k: int, seed: int) -> torch.Tensor:
    """Random codes; as far as n*k allows, every code value is among them."""
    low, high = CODE_RANGE[format]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(low, high + 1, (n * k,), generator=generator).to(torch.int8)
    every = torch.arange(low, high + 1).to(torch.int8)[: n * k]
    codes[torch.randperm(n * k, generator=generator)[: every.numel()]] = every
    return codes.view(n, k)


def weight_of(
    format: str = "w4", n: int = 3, k: int = 70, group: int | str = 32, offset: torch.dtype | None = None
) -> QuantWeight:
    groups = padded_k(format, k, group) // (padded_k(format, k, "row") if group == "row" else int(group))
    generator = torch.Generator().manual_seed(7)
    scales = torch.randn(n, groups, generator=generator).half()
    shift = None if offset is None else torch.randn(n, groups, generator=generator).to(offset)
    return QuantWeight.from_codes(format, codes_of(format, n, k, 5), scales, shift, group_size=group)


# --- bits ---------------------------------------------------------------------------------------


def test_w3_bytes_by_hand():
    # 24 bits, code i in bits 3i..3i+2; two's complement: -1=111 -2=110 -3=101 -4=100.
    codes = torch.tensor(
        [
            # q = 1, 2, 3, -4, -3, -2, -1, 0: fields 001 010 011 100 101 110 111 000
            # b0 = q2 low 2 bits 11 | 010 | 001 = 0b11010001; b1 = q5 bit 0 | 101 | 100 | q2 bit 2
            # = 0 101 100 0 = 0b01011000; b2 = 000 | 111 | q5 high bits 11 = 0b00011111
            [1, 2, 3, -4, -3, -2, -1, 0],
            # q2 and q5 alone, all ones: b0 = 11000000, b1 = 1 000 000 1, b2 = 000 000 11
            [0, 0, -1, 0, 0, -1, 0, 0],
            # q2 = -4 has only its top bit, which is bit 0 of b1; q5 = 1 only its lowest, bit 7 of b1
            [0, 0, -4, 0, 0, 1, 0, 0],
        ],
        dtype=torch.int8,
    )
    expected = torch.tensor([[0xD1, 0x58, 0x1F], [0xC0, 0x81, 0x03], [0x00, 0x81, 0x00]], dtype=torch.uint8)
    assert torch.equal(pack_w3(codes), expected)
    assert torch.equal(unpack_w3(expected, 8), codes)


def test_w3_follows_the_formula_of_the_design_for_every_byte_triple():
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (64, 3 * 32), generator=generator).to(torch.uint8)
    b0, b1, b2 = packed.view(64, 32, 3).int().unbind(-1)
    fields = [
        b0 & 7,
        (b0 >> 3) & 7,
        (b0 >> 6) & 3 | (b1 & 1) << 2,
        (b1 >> 1) & 7,
        (b1 >> 4) & 7,
        (b1 >> 7) & 1 | (b2 & 3) << 1,
        (b2 >> 2) & 7,
        (b2 >> 5) & 7,
    ]
    raw = torch.stack(fields, -1).view(64, 256)
    expected = torch.where(raw >= 4, raw - 8, raw)
    assert torch.equal(unpack_w3(packed, 256).int(), expected)


def test_w4_bytes_by_hand():
    codes = torch.tensor([[1, -1, -8, 7]], dtype=torch.int8)
    assert torch.equal(pack_w4(codes), torch.tensor([[0xF1, 0x78]], dtype=torch.uint8))


@PROPERTY
@given(k=K, n=st.integers(1, 3), seed=st.integers(0, 2**31), format=st.sampled_from(["w4", "w3"]))
def test_unpack_undoes_pack(k, n, seed, format):
    codes = codes_of(format, n, k, seed)
    pack, unpack, multiple = (pack_w4, unpack_w4, 2) if format == "w4" else (pack_w3, unpack_w3, 8)
    padded = torch.nn.functional.pad(codes, (0, -k % multiple))
    packed = pack(padded)
    assert packed.dtype == torch.uint8
    assert packed.shape == (n, padded.shape[1] * int(format[1]) // 8)
    assert torch.equal(unpack(packed, k), codes)


@PROPERTY
@given(
    k=K, n=st.integers(1, 4), seed=st.integers(0, 2**31), format=st.sampled_from(["w4", "w3"]), group=GROUP
)
def test_codes_survive_and_size_is_by_formula(k, n, seed, format, group):
    codes = codes_of(format, n, k, seed)
    kp = padded_k(format, k, group)
    groups = 1 if group == "row" else kp // group
    weight = QuantWeight.from_codes(
        format, codes, torch.ones(n, groups, dtype=torch.float16), group_size=group
    )
    assert torch.equal(weight.codes(), codes)
    assert torch.equal(weight.dequantize(), codes.float())
    code_bytes = kp // 2 if format == "w4" else 3 * kp // 8
    assert weight.nbytes == packed_bytes(format, n, k, group) == n * (code_bytes + 2 * groups)
    for dtype in (torch.float16, torch.float32):
        shift = torch.zeros(n, groups, dtype=dtype)
        shifted = QuantWeight.from_codes(format, codes, weight.scales, shift, group_size=group)
        assert shifted.nbytes == packed_bytes(format, n, k, group, dtype)


@PROPERTY
@given(k=K, n=st.integers(1, 40), seed=st.integers(0, 2**31), format=st.sampled_from(["q8_0", "q4_0"]))
def test_grouped_codes_survive_and_size_is_by_formula(k, n, seed, format):
    codes = codes_of(format, n, k, seed)
    groups = -(-k // 32)
    weight = GroupedWeight.from_rows(format, codes, torch.ones(n, groups))
    assert torch.equal(weight.codes(), codes)
    assert torch.equal(weight.dequantize(), codes.float())
    npad = -(-n // 16) * 16
    assert weight.codes_t.shape == (32 * groups, npad) and weight.scales_t.shape == (groups, npad)
    assert weight.nbytes == packed_bytes(format, n, k, 32) == npad * 32 * groups + 4 * npad * groups
    assert int(weight.codes_t.sum()) == int(codes.int().sum())  # padding holds zeros


def test_every_code_value_of_every_format():
    for format, (low, high) in CODE_RANGE.items():
        codes = torch.arange(low, high + 1).to(torch.int8).repeat(3, 2)
        assert codes.unique().numel() == high - low + 1
        groups = -(-codes.shape[1] // 32)
        if format in ("w4", "w3"):
            scales = torch.ones(3, groups, dtype=torch.float16)
            assert torch.equal(QuantWeight.from_codes(format, codes, scales, group_size=32).codes(), codes)
        else:
            assert torch.equal(GroupedWeight.from_rows(format, codes, torch.ones(3, groups)).codes(), codes)


def test_pack_accepts_views_at_odd_offsets():
    base = codes_of("w3", 9, 25, 1)
    view = base[1:, 1:17]  # neither contiguous nor aligned
    assert torch.equal(unpack_w3(pack_w3(view), 16), view)
    assert torch.equal(unpack_w4(pack_w4(view.t().contiguous().t()), 16), view)
    row = base.reshape(-1)[3:19].view(2, 8)  # contiguous, but starts in the middle of a word
    assert torch.equal(unpack_w3(pack_w3(row), 8), row)


# --- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["w4", "w3"])
@pytest.mark.parametrize("offset", [None, torch.float16, torch.float32])
def test_dequantize_is_code_times_scale_plus_offset(format, offset):
    weight = weight_of(format, offset=offset)
    column = torch.arange(70) // 32
    expected = weight.codes().float() * weight.scales.float()[:, column]
    if weight.offset is not None:
        expected += weight.offset.float()[:, column]
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.dequantize(rows=slice(1, None)), expected[1:])
    assert torch.equal(weight.dequantize(torch.bfloat16), expected.bfloat16())


def test_padding_never_reaches_a_result():
    weight = weight_of("w3", k=70, offset=torch.float16)
    poisoned = weight.packed.clone()
    poisoned[:, -9:] = 0xFF  # the last 24 codes; K = 70 uses 70 of 96
    other = QuantWeight("w3", poisoned, weight.scales, weight.offset, 3, 70, 32)
    assert torch.equal(other.dequantize(), weight.dequantize())
    assert torch.equal(other.codes(), weight.codes())


def test_select_rows_moves_codes_and_scales():
    index = torch.tensor([2, 0, 2])
    for weight in (weight_of(offset=torch.float32), quantize(torch.randn(3, 70), "q8_0")):
        chosen = weight.select_rows(index)
        assert chosen.shape == (3, 70)
        assert torch.equal(chosen.dequantize(), weight.dequantize()[index])
        assert torch.equal(weight.gather_rows(index.view(3, 1)), weight.dequantize()[index].view(3, 1, 70))
        assert weight.gather_rows(index[:0]).shape == (0, 70)
        with pytest.raises(InputError, match=r"ids: got 0\.\.3; expected 0\.\.2"):
            weight.select_rows(torch.tensor([0, 3]))
        with pytest.raises(InputError, match="integer tensor"):
            weight.select_rows(torch.tensor([0.0]))


def test_concat_promotes_offsets_exactly():
    parts = [weight_of(offset=None), weight_of(n=2, offset=torch.float16), weight_of(offset=torch.float32)]
    whole = concat_rows(parts)
    assert whole.shape == (8, 70) and whole.offset.dtype == torch.float32
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert concat_rows(parts[:2]).offset.dtype == torch.float16
    assert concat_rows(parts[:1]).offset is None
    with pytest.raises(InputError, match=r"weights\[1\].group_size: got 16"):
        concat_rows([parts[0], weight_of(group=16)])
    with pytest.raises(InputError, match=r"weights\[1\].format"):
        concat_rows([parts[0], weight_of("w3")])
    with pytest.raises(InputError, match="at least one"):
        concat_rows([])


def test_k_order_puts_columns_back():
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    plain = weight_of(offset=torch.float32)
    moved = QuantWeight("w4", plain.packed, plain.scales, plain.offset, 3, 70, 32, order)
    expected = torch.empty(3, 70)
    expected[:, order] = plain.dequantize()
    assert torch.equal(moved.dequantize(), expected)
    assert torch.equal(moved.dequantize_stored(), plain.dequantize())
    again = QuantWeight.from_tensors(moved.tensors(), moved.metadata())
    assert torch.equal(again.dequantize(), expected)
    with pytest.raises(InputError, match="k_order: got not a permutation"):
        QuantWeight("w4", plain.packed, plain.scales, None, 3, 70, 32, torch.zeros(70, dtype=torch.int32))
    with pytest.raises(InputError, match=r"weights\[1\].k_order"):
        concat_rows([plain, moved])


# --- refusals -----------------------------------------------------------------------------------


def fields_of(**changed):
    packed, scales = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 2, dtype=torch.float16)
    good = {
        "format": "w4",
        "packed": packed,
        "scales": scales,
        "offset": None,
        "n": 4,
        "k": 64,
        "group_size": 32,
    }
    return {**good, **changed}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changed", "argument", "words"),
    [
        ({"format": "w5"}, "format", "'w5'"),
        ({"n": 0}, "n", "0"),
        ({"k": 0}, "k", "0"),
        ({"group_size": 48}, "group_size", '16, 32, 64, 128 or "row"'),
        ({"group_size": "row"}, "group_size", "a whole number"),
        ({"packed": torch.zeros(4, 32, dtype=torch.int8)}, "packed", "int8 [4, 32]; expected uint8 [4, 32]"),
        ({"packed": torch.zeros(32, 4, dtype=torch.uint8)}, "packed", "looks transposed"),
        ({"packed": torch.zeros(4, 31, dtype=torch.uint8)}, "packed", "[4, 31]; expected uint8 [4, 32]"),
        ({"packed": None}, "packed", "NoneType"),
        ({"scales": torch.ones(4, 2)}, "scales", "float32 [4, 2]; expected float16 [4, 2]"),
        ({"scales": torch.ones(2, 4).half()}, "scales", "looks transposed"),
        ({"scales": torch.ones(4, 3).half()}, "scales", "[4, 3]"),
        ({"scales": torch.tensor([[1, NAN]] * 4).half()}, "scales", "nan at [0, 1]"),
        ({"scales": torch.tensor([[INF, 1]] * 4).half()}, "scales", "inf at [0, 0]"),
        ({"offset": torch.zeros(4, 2).bfloat16()}, "offset", "float16 or float32 [4, 2]"),
        ({"offset": torch.tensor([[-INF, 1]] * 4)}, "offset", "-inf at [0, 0]"),
        ({"scales": torch.ones(4, 2, device="meta").half()}, "scales", "on meta"),
    ],
)
def test_construction_refuses_by_name(changed, argument, words):
    QuantWeight(**fields_of())
    with pytest.raises(ValueError) as caught:
        QuantWeight(**fields_of(**changed))
    assert caught.value.argument == argument
    assert words in str(caught.value)


def test_grouped_refuses_by_name():
    codes, scales = torch.zeros(32, 16, dtype=torch.int8), torch.ones(1, 16)
    GroupedWeight("q4_0", codes, scales, 5, 20)
    for arguments, argument, words in (
        (("q5_0", codes, scales, 5, 20), "format", "q8_0 or q4_0"),
        (("q4_0", codes, scales, 5, 20, 64), "group_size", "32"),
        (("q4_0", codes, scales, 5, 40), "codes_t", "[64, 16]"),
        (("q4_0", codes.t().contiguous(), scales, 5, 20), "codes_t", "looks transposed"),
        (("q4_0", codes.float(), scales, 5, 20), "codes_t", "expected int8"),
        (("q4_0", codes + 8, scales, 5, 20), "codes_t", "-8..7"),
        (("q8_0", codes, scales.half(), 5, 20), "scales_t", "float32"),
        (("q8_0", codes, scales * NAN, 5, 20), "scales_t", "nan at [0, 0]"),
    ):
        with pytest.raises(InputError) as caught:
            GroupedWeight(*arguments)
        assert caught.value.argument == argument and words in str(caught.value)


def test_packing_refuses_by_name():
    with pytest.raises(InputError, match="K = 3; expected K a multiple of 2"):
        pack_w4(torch.zeros(1, 3, dtype=torch.int8))
    with pytest.raises(InputError, match="K = 12; expected K a multiple of 8"):
        pack_w3(torch.zeros(1, 12, dtype=torch.int8))
    with pytest.raises(InputError, match=r"values 0\.\.8; expected -8\.\.7"):
        pack_w4(torch.tensor([[0, 8]], dtype=torch.int8))
    with pytest.raises(InputError, match=r"values -5\.\.0; expected -4\.\.3"):
        pack_w3(torch.tensor([[-5, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.int8))
    with pytest.raises(InputError, match=r"codes: got int32 \[1, 2\]"):
        pack_w4(torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(InputError, match="k: got k = 9"):
        unpack_w4(torch.zeros(1, 4, dtype=torch.uint8), 9)
    with pytest.raises(InputError, match="multiple of 3"):
        unpack_w3(torch.zeros(1, 4, dtype=torch.uint8), 8)


def test_dequantize_refuses_by_name():
    weight = weight_of()
    with pytest.raises(InputError, match=r"dtype: got torch\.int8"):
        weight.dequantize(torch.int8)
    with pytest.raises(InputError, match="positive step"):
        weight.dequantize(rows=slice(None, None, -1))
    with pytest.raises(InputError, match="rows: got int"):
        weight.dequantize(rows=1)
    assert weight.dequantize(rows=slice(2, 1)).shape == (0, 70)


def test_check_shape_names_a_transposed_weight():
    weight = weight_of()
    check_shape(weight, 3, 70)
    with pytest.raises(InputError, match=r"q_proj: got \[3, 70\]; expected \[70, 3\].*transposed"):
        check_shape(weight, 70, 3, "q_proj")
    with pytest.raises(InputError, match=r"expected \[3, 71\]$"):
        check_shape(torch.zeros(3, 70), 3, 71)


def test_sizes_refuse_by_name():
    with pytest.raises(InputError, match="offset_dtype"):
        packed_bytes("w4", 1, 32, 32, torch.bfloat16)
    with pytest.raises(InputError, match="q8_0 has no offset"):
        packed_bytes("q8_0", 1, 32, 32, torch.float16)
    with pytest.raises(InputError, match="n: got 0"):
        packed_bytes("w4", 0, 32, 32)
    with pytest.raises(InputError, match="group_size: got True"):
        packed_bytes("w4", 1, 1, True)
