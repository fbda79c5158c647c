"""The W4/W3 seed kernels in the emulator: values, poison, guards, repeats."""

from __future__ import annotations

import sys

import pytest
import seed_cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seed_cases import CASES, Case

from labkit.errors import InputError
from labkit.kernels import runner
from labkit.kernels.seed.launch import GEMM_TILED, GEMV_BATCH, GEMV_ROW, KERNELS, plan, with_batch_tile


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_identity_poison_guards_and_repeats(case: Case) -> None:
    seed_cases.check_case(case, "cpu")


@pytest.mark.parametrize("entry", KERNELS)
def test_large_activations(entry: str) -> None:
    seed_cases.check_large_activations(entry, "cpu")


@pytest.mark.parametrize("format", ["w4", "w3"])
def test_a_row_does_not_know_its_batch(format: str) -> None:
    seed_cases.check_a_row_does_not_know_its_batch(format, "cpu")


@pytest.mark.parametrize("entry", KERNELS)
def test_padding_is_never_read(entry: str) -> None:
    seed_cases.check_padding_is_never_read(entry, "cpu")


@pytest.mark.skipif(sys.platform == "win32", reason="needs memory that is reserved and never touched")
@pytest.mark.parametrize("entry", KERNELS)
def test_offsets_beyond_2_to_the_31(entry: str) -> None:
    """Row n of the codes begins n * 2^29 (W3: 3 * 2^27) bytes in: those of the last rows beyond 2^31."""
    kernel, n, k, padded = KERNELS[entry], 9, 32, 1 << 30
    weight = seed_cases.random_weight(kernel.format, n, k, 32, None)
    stride = weight.packed.shape[1] * padded // k
    assert (n - 1) * stride > 2**31
    packed = seed_cases.untouched(n * stride)
    for row in range(n):
        packed[row * stride : row * stride + weight.packed.shape[1]] = weight.packed[row].numpy()
    x = seed_cases.random_x(1, k)
    out = torch.full((1, n), float("nan"), dtype=torch.float16)
    args = [x, packed, weight.scales, None, out, 1, n, k, padded, 31]  # 31: one scale a row
    runner.load(kernel.source(None, True), "cpu")(kernel.grid(1, n), (kernel.threads,), args)
    seed_cases.check_accurate(out, x, weight)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_small_shape(data: st.DataObject) -> None:
    kernel = KERNELS[data.draw(st.sampled_from(sorted(KERNELS)))]
    group = data.draw(st.sampled_from([16, 32, 64, 128, "row"]))
    m, n, k = (data.draw(st.integers(1, most)) for most in (40, 70, 140))
    weight = seed_cases.random_weight(kernel.format, n, k, group, None, seed=m)
    x = seed_cases.guarded(seed_cases.random_x(m, k))
    if kernel.why_not(weight):
        with pytest.raises(InputError, match="group size"):
            plan(kernel, x, weight)
        return
    launched = seed_cases.launch(kernel, x, seed_cases.guarded_weight(weight))
    seed_cases.check_accurate(launched.run(), x, weight)
    seed_cases.check_written(launched)


def test_x_at_an_odd_address_is_read_in_halves() -> None:
    weight = seed_cases.random_weight("w4", 9, 64, 32, None)
    whole = torch.zeros(3 * 64 + 1, dtype=torch.float16)
    x = whole[1:].view(3, 64)
    x.copy_(seed_cases.random_x(3, 64))
    shifted, aligned = plan(GEMV_ROW["w4"], x, weight), plan(GEMV_ROW["w4"], x.clone(), weight)
    assert shifted.source.define_map["VECTOR_X"] == "0" and aligned.source.define_map["VECTOR_X"] == "1"
    assert torch.equal(shifted.run(), aligned.run())


@pytest.mark.parametrize("rows", [1, 3])
def test_other_batch_tiles_give_the_same_bits(rows: int) -> None:
    weight, x = seed_cases.random_weight("w3", 9, 96, 32, None), seed_cases.random_x(7, 96)
    tile = with_batch_tile(GEMV_BATCH["w3"], rows)
    assert tile.grid(7, 9) == (2, -(-7 // rows))
    assert torch.equal(plan(tile, x, weight).run(), plan(GEMV_BATCH["w3"], x, weight).run())
    assert torch.equal(plan(tile, x, weight, ROLLED=1).run(), plan(tile, x, weight).run())


def test_grid_limits_are_refused_by_name() -> None:
    assert GEMM_TILED["w4"].grid(100_000, 65) == (2, 3125)
    assert GEMV_ROW["w3"].grid(65_535, 9) == (2, 65_535)
    with pytest.raises(InputError, match=r"gemv_row_w3: M: got 65536; expected at most 65535 rows"):
        GEMV_ROW["w3"].grid(65_536, 9)
    with pytest.raises(InputError, match=r"gemm_tiled_w4: M: got 2097121"):
        GEMM_TILED["w4"].grid(2_097_121, 9)
    assert GEMV_BATCH["w4"].max_rows == 524_280


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 64)}, "x: got float32 [2, 64]"),
        ({"x": torch.zeros(2, 63).half()}, "x: got float16 [2, 63]"),
        ({"x": torch.zeros(0, 64).half()}, "x: got float16 [0, 64]"),
        ({"x": torch.zeros(64, 2).half().t()}, "not contiguous"),
        ({"x": torch.zeros(2, 64, device="meta").half()}, "x: got on meta; expected on cpu"),
        ({"out": torch.zeros(2, 8).half()}, "out: got float16 [2, 8]"),
        ({"kernel": GEMM_TILED["w3"]}, "w3 weights only"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict, words: str) -> None:
    weight = seed_cases.random_weight("w4", 9, 64, 32, None)
    arguments = {"kernel": GEMM_TILED["w4"], "x": torch.zeros(2, 64).half(), "weight": weight, **change}
    with pytest.raises(InputError) as caught:
        plan(**arguments)
    assert words in str(caught.value)
