"""Round-to-nearest quantisers: error bounds, extreme values, refusals."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from labkit.errors import InputError
from labkit.quant import GROUP_SIZES, GroupedWeight, QuantWeight, quantize
from labkit.quant import quantize as quantize_function
from labkit.quant.packing import CODE_RANGE

KINDS = [("w4", False), ("w4", True), ("w3", False), ("w3", True), ("q8_0", False), ("q4_0", False)]
SUBNORMAL = 2.0**-24


def scale_by_column(weight: QuantWeight | GroupedWeight) -> torch.Tensor:
    scales = weight.scales if isinstance(weight, QuantWeight) else weight.scales_t[:, : weight.n].t()
    return scales.double().abs()[:, torch.arange(weight.k) // weight.group_size]


def assert_within_bound(original: torch.Tensor, weight: QuantWeight | GroupedWeight) -> None:
    """|w - deq| <= scale/2, plus the rounding of the scale itself at the outermost code."""
    low = -CODE_RANGE[weight.format][0]
    scale = scale_by_column(weight)
    error = (original.double() - weight.dequantize(torch.float64)).abs()
    rounding = low * torch.clamp(scale * 2.0**-11, min=SUBNORMAL / 2)
    float32 = original.double().abs() * 2.0**-22
    worst = error - (scale / 2 + rounding + float32)
    assert worst.max() <= 0, f"{error.flatten()[worst.argmax()]} at scale {scale.flatten()[worst.argmax()]}"


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    group=st.sampled_from([*GROUP_SIZES, "row"]),
    n=st.integers(1, 5),
    k=st.integers(1, 600),
    spread=st.floats(-6, 4),
    shift=st.floats(-3, 3),
    seed=st.integers(0, 2**31),
)
def test_error_is_at_most_half_a_scale(kind, group, n, k, spread, shift, seed):
    format, offset = kind
    generator = torch.Generator().manual_seed(seed)
    original = (torch.randn(n, k, generator=generator) + shift) * 10.0**spread
    weight = quantize(original, format, group if format in ("w4", "w3") else 32, offset=offset)
    assert weight.shape == (n, k)
    assert_within_bound(original, weight)


@pytest.mark.parametrize(("format", "offset"), KINDS)
def test_the_whole_code_range_is_used(format, offset):
    original = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    codes = quantize(original, format, offset=offset).codes()
    low, high = CODE_RANGE[format]
    assert codes.unique().numel() == (high - low + 1 if format != "q8_0" else 255)


def test_on_a_grid_quantising_is_exact():
    for format in ("w4", "w3"):
        low, high = CODE_RANGE[format]
        codes = torch.arange(low, high + 1).repeat(2, 16)
        for scale in (0.25, -0.25):
            weight = quantize(codes * scale, format, 32)
            assert torch.equal(weight.dequantize(), codes * scale)
        weight = quantize(codes * 0.5 + 3.0, format, 32, offset=True)
        assert torch.equal(weight.dequantize(), codes * 0.5 + 3.0)


@pytest.mark.parametrize(("format", "offset"), KINDS)
def test_all_zero_groups_stay_zero(format, offset):
    original = torch.zeros(2, 96)
    original[0, 40] = 1.5
    weight = quantize(original, format, offset=offset)
    restored = weight.dequantize()
    assert torch.equal(restored[:, :32], original[:, :32]) and torch.equal(restored[1], original[1])
    assert restored[0, 40] == pytest.approx(1.5, rel=2**-10)


@pytest.mark.parametrize("value", [1.0, -3.7, 1000.123, -6e4, 1e-7])
def test_constant_groups(value):
    original = torch.full((2, 50), value)
    for format, offset in KINDS:
        weight = quantize(original, format, offset=offset)
        assert_within_bound(original, weight)
        # The outermost code or the offset reaches the constant, to the rounding of float16.
        worst = (weight.dequantize() - original).abs().max().item()
        assert worst <= max(abs(value) * 2**-10, 2**-24)


@pytest.mark.parametrize(("format", "offset"), KINDS)
@pytest.mark.parametrize("size", [6e4, 1e-3, 1e-6, 1e-7, 1e-12, 1e-30])
def test_huge_and_tiny_values(format, offset, size):
    original = torch.randn(4, 128, generator=torch.Generator().manual_seed(3)).clamp(-1, 1) * size
    weight = quantize(original, format, offset=offset)
    assert torch.isfinite(weight.dequantize()).all()
    assert_within_bound(original, weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_give_what_float32_gives(dtype):
    original = torch.randn(5, 100, generator=torch.Generator().manual_seed(4)).to(dtype)
    for format, offset in KINDS:
        ours = quantize(original, format, offset=offset).dequantize()
        assert torch.equal(ours, quantize(original.float(), format, offset=offset).dequantize())


def test_the_caller_keeps_its_weight():
    original = torch.randn(4, 64)
    before = original.clone()
    for format, offset in KINDS:
        quantize(original, format, offset=offset)
    assert torch.equal(original, before)


def test_row_chunks_change_nothing(monkeypatch):
    original = torch.randn(37, 96, generator=torch.Generator().manual_seed(5))
    whole = [quantize(original, format, offset=offset).dequantize() for format, offset in KINDS]
    monkeypatch.setitem(quantize_function.__globals__, "_CHUNK_BYTES", 4 * 96 * 5)
    for (format, offset), expected in zip(KINDS, whole):
        assert torch.equal(quantize(original, format, offset=offset).dequantize(), expected)


def test_offset_is_float16_and_helps_a_shifted_weight():
    original = torch.rand(32, 256, generator=torch.Generator().manual_seed(6)) + 0.5
    plain, shifted = quantize(original, "w3", 64), quantize(original, "w3", 64, offset=True)
    assert plain.offset is None and shifted.offset.dtype == torch.float16
    error = [(weight.dequantize() - original).square().mean().item() for weight in (plain, shifted)]
    assert error[1] < error[0] / 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("format", "offset"), KINDS)
def test_nan_and_inf_are_refused_by_name_and_place(bad, format, offset):
    original = torch.zeros(3, 40)
    original[2, 37] = bad
    with pytest.raises(InputError, match=rf"^lm_head: got {bad} at \[2, 37\]"):
        quantize(original, format, offset=offset, argument="lm_head")


def test_a_scale_or_offset_past_float16_is_refused():
    wide = torch.zeros(3, 64)
    wide[1, 40] = 1e6  # scale 125000
    with pytest.raises(InputError, match=r"scale -1\.25e\+05 at row 1, group 1.*65504"):
        quantize(wide, "w4", 32)
    with pytest.raises(InputError, match=r"offset 5.* at row 1, group 1"):
        quantize(wide, "w4", 32, offset=True)
    with pytest.raises(InputError, match=r"offset 7e[+]04 at row 0"):
        quantize(torch.full((1, 32), 7e4), "w4", 32, offset=True)
    # The extremes of float32 itself must not turn into NaN on the way.
    far = torch.tensor([[3.4e38, -3.4e38] * 16])
    with pytest.raises(InputError, match="fits float16"):
        quantize(far, "w3", 32, offset=True)
    # A float32 scale has the room.
    assert_within_bound(far, quantize(far, "q8_0"))
    # The largest that fits.
    assert_within_bound(torch.full((1, 32), 8 * 65504.0), quantize(torch.full((1, 32), 8 * 65504.0), "w4"))


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ((torch.zeros(2, 3, dtype=torch.int32), "w4"), "weight"),
        ((torch.zeros(6), "w4"), "weight"),
        ((torch.zeros(0, 3), "w4"), "weight"),
        (([[1.0]], "w4"), "weight"),
        ((torch.ones(2, 32), "w2"), "format"),
        ((torch.ones(2, 32), "w4", 48), "group_size"),
        ((torch.ones(2, 32), "w4", "column"), "group_size"),
        ((torch.ones(2, 32), "w4", 32.0), "group_size"),
        ((torch.ones(2, 32), "q8_0", 64), "group_size"),
        ((torch.ones(2, 32), "q8_0", "row"), "group_size"),
    ],
)
def test_refusals(arguments, argument):
    with pytest.raises(ValueError) as caught:
        quantize(*arguments)
    assert caught.value.argument == argument


def test_offset_refusals():
    with pytest.raises(InputError, match="q4_0 has no offset"):
        quantize(torch.ones(2, 32), "q4_0", offset=True)
    with pytest.raises(InputError, match="offset: got 'yes'"):
        quantize(torch.ones(2, 32), "w4", offset="yes")


@pytest.mark.parametrize("format", ["w4", "w3", "q8_0"])
def test_a_parameter_leaves_no_autograd_graph(format):
    """Scales with a graph would keep a float copy of every weight, and could not be copied."""
    layer = torch.nn.Linear(96, 32, bias=False)
    weight = quantize(layer.weight, format, 32, offset=format != "q8_0")
    for name, tensor in weight.tensors().items():
        assert tensor.grad_fn is None and not tensor.requires_grad, name
    assert torch.equal(copy.deepcopy(weight).dequantize(), weight.dequantize())
