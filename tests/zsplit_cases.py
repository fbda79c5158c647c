"""What the z-split kernels are tested with, on the emulator and on a GPU alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import linear

from labkit.kernels.zsplit import launch as zlaunch
from labkit.kernels.zsplit import reference, rule
from labkit.kernels.zsplit.launch import gemm_launches, int8_launches, quantize_launch, zsplit_gemm
from labkit.quant.grouped import GroupedWeight

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 30, 31, 32, 33, 37, 64)
"""M: every small batch, and both sides of every block boundary."""

COLUMNS = (1, 15, 17, 130)
"""N: no multiple of four columns a thread, of 16 of padding, or of a block."""

DEPTHS = (224, 200, 31, 32)
"""K: seven groups (an odd number), a padded last group, less than a group, one group."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

LEVELS = ("slice", "run", "whole")
"""What a block takes: one slice, the slices of one run, everything. The bits are the same."""

GUARD = 256  # bytes before and after a tensor; keeps 16-byte alignment
_PATTERN = 0x7E  # as a half or a bfloat16 it is huge or NaN: it may not get into a result


def guarded(values: Tensor) -> Tensor:
    """A contiguous copy with GUARD bytes of a pattern on both sides; see :func:`intact`."""
    raw = torch.full((values.nbytes + 2 * GUARD,), _PATTERN, dtype=torch.uint8, device=values.device)
    inside = raw[GUARD : GUARD + values.nbytes].view(values.dtype).view(values.shape)
    inside.copy_(values)
    return inside


def intact(inside: Tensor) -> bool:
    """Nothing was written just before or after the tensor."""
    raw = torch.empty(0, dtype=torch.uint8, device=inside.device).set_(inside.untyped_storage())
    assert raw.numel() == inside.nbytes + 2 * GUARD, "not a guarded tensor"
    return bool((raw[:GUARD] == _PATTERN).all() and (raw[-GUARD:] == _PATTERN).all())


def poisoned(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A guarded [m, n] of NaN: a cell that stays NaN was not written."""
    return guarded(torch.full((m, n), float("nan"), dtype=dtype, device=device))


def weight_of(n: int, k: int, form: str = "q8_0", device: str = "cpu") -> GroupedWeight:
    """Codes over their whole range, scales of both signs and zero among them, guards around both."""
    source = torch.Generator().manual_seed(10 * n + k)
    low = -128 if form == "q8_0" else -8
    codes = torch.randint(low, -low, (n, k), generator=source, dtype=torch.int8)
    scales = torch.randn(n, -(-k // 32), generator=source) * 0.02
    scales.view(-1)[3::7] = 0
    return guarded_weight(GroupedWeight.from_rows(form, codes, scales).to(device))


def guarded_weight(weight: GroupedWeight) -> GroupedWeight:
    """The weight with guards around each of its tensors."""
    return replace(weight, codes_t=guarded(weight.codes_t), scales_t=guarded(weight.scales_t))


def first_rows(weight: GroupedWeight, n: int) -> GroupedWeight:
    """The first n output rows as a weight of its own."""
    return guarded_weight(weight.select_rows(torch.arange(n, device=weight.device)))


def x_of(m: int, k: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)).to(dtype).to(device)


def gemm(x: Tensor, weight: GroupedWeight, **options: Any) -> Tensor:
    """zsplit_gemm into a poisoned, guarded output, every buffer checked after."""
    x = guarded(x)
    out = poisoned(x.shape[0], weight.n, x.dtype, x.device)
    for launch in gemm_launches(x, weight, out, **options):
        launch.run()
    return _checked(out, x, weight.codes_t, weight.scales_t)


def gemm_int8(
    codes: Tensor, scales: Tensor, weight: GroupedWeight, dtype: torch.dtype, **options: Any
) -> Tensor:
    """zsplit_gemm_int8 into a poisoned, guarded output, every buffer checked after."""
    codes, scales = guarded(codes), guarded(scales)
    out = poisoned(codes.shape[0], weight.n, dtype, codes.device)
    for launch in int8_launches(codes, scales, weight, out, **options):
        launch.run()
    return _checked(out, codes, scales, weight.codes_t, weight.scales_t)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """zsplit_quantize into guarded outputs."""
    x = guarded(x)
    m, groups = x.shape[0], rule.groups_of(x.shape[1])
    codes = guarded(torch.full((m, groups * 32), 99, dtype=torch.int8, device=x.device))
    scales = poisoned(m, groups, torch.float32, x.device)
    quantize_launch(x, codes, scales).run()
    for tensor in (x, codes, scales):
        assert intact(tensor), "written beyond a buffer"
    return codes, scales


def _checked(out: Tensor, *inputs: Tensor) -> Tensor:
    assert not out.isnan().any(), "a cell was not written"
    for tensor in (out, *inputs):
        assert intact(tensor), "written beyond a buffer"
    return out


@contextmanager
def forced_grid(level: str, runs: int | None = None) -> Iterator[None]:
    """Launches whose blocks take one of :data:`LEVELS`, whatever the rule says; ``runs`` in place of its."""

    def planned(m: int, n: int, k: int, **options: Any) -> rule.Plan:
        found = rule.plan(m, n, k, **options)
        x, y, _ = found.grid
        parts = found.runs if runs is None else runs
        z = {"slice": found.nsplit, "run": parts, "whole": 1}[level]
        return rule.Plan(found.nsplit, parts, (x, y, z), z * m * n * 4 if z > 1 else 0)

    with mock.patch.object(zlaunch, "plan", planned):
        yield


def run_counts(nsplit: int) -> list[int]:
    """Runs to try: none, one, two of unequal length, as many as slices."""
    return sorted({1, min(2, nsplit), max(1, nsplit - 1), nsplit})


# --- checks that both runners make ----------------------------------------------------------------------


def check_float_bits(dtype: torch.dtype, k: int, device: str = "cpu") -> None:
    """Every M, N and nsplit: bits of the reference, whoever shares the batch; repeats; runs; every grid."""
    n, m = COLUMNS[-1], ROWS[-1]
    whole = weight_of(n, k, device=device)
    x = x_of(m, k, dtype, device)
    groups = rule.groups_of(k)
    for nsplit in range(1, groups + 1):
        expected = reference.float_reference(x, whole, nsplit)
        assert torch.equal(gemm(x, whole, nsplit=nsplit), expected), f"nsplit = {nsplit}"
        assert torch.equal(gemm(x, whole, nsplit=nsplit), expected), "another result on a repeat"
        for runs in run_counts(nsplit):
            expected = reference.float_reference(x[:7], whole, nsplit, runs)
            for level in LEVELS:
                with forced_grid(level, runs):
                    seven, one = (gemm(x[:m], whole, nsplit=nsplit) for m in (7, 1))
                where = f"{nsplit} slices in {runs} runs, a block takes: {level}"
                assert torch.equal(seven, expected) and torch.equal(one, expected[:1]), where
    nsplit = min(3, groups)
    expected = reference.float_reference(x, whole, nsplit)
    for columns in COLUMNS:
        weight = first_rows(whole, columns)
        for rows in ROWS:
            y = gemm(x[:rows], weight, nsplit=nsplit)
            assert torch.equal(y, expected[:rows, :columns]), f"M = {rows}, N = {columns}"


def check_int8_bits(dtype: torch.dtype, k: int, device: str = "cpu") -> None:
    """As :func:`check_float_bits` for int8 activations, their rounding included."""
    n, m = COLUMNS[-1], ROWS[-1]
    whole = weight_of(n, k, device=device)
    x = x_of(m, k, dtype, device)
    codes, scales = quantized(x)
    for mine, meant in zip((codes, scales), reference.quantize_reference(x)):
        assert torch.equal(mine, meant)
    groups = rule.groups_of(k)
    for nsplit in range(1, groups + 1):
        expected = reference.int8_reference(codes, scales, whole, nsplit, dtype)
        assert torch.equal(gemm_int8(codes, scales, whole, dtype, nsplit=nsplit), expected)
        for runs in run_counts(nsplit):
            expected = reference.int8_reference(codes[:5], scales[:5], whole, nsplit, dtype, runs)
            for level in LEVELS:
                with forced_grid(level, runs):
                    few = gemm_int8(codes[:5], scales[:5], whole, dtype, nsplit=nsplit)
                    one = gemm_int8(codes[:1], scales[:1], whole, dtype, nsplit=nsplit)
                where = f"{nsplit} slices in {runs} runs, a block takes: {level}"
                assert torch.equal(few, expected) and torch.equal(one, expected[:1]), where
    nsplit = min(3, groups)
    expected = reference.int8_reference(codes, scales, whole, nsplit, dtype)
    for columns in COLUMNS:
        weight = first_rows(whole, columns)
        for rows in ROWS:
            y = gemm_int8(codes[:rows], scales[:rows], weight, dtype, nsplit=nsplit)
            assert torch.equal(y, expected[:rows, :columns]), f"M = {rows}, N = {columns}"


def check_plan_switches(dtype: torch.dtype, device: str = "cpu") -> None:
    """Ragged sizes, the rule's own plans on both sides of every switch of z: one reference, the same bits."""
    n, k = 601, 1000  # 32 groups, the last one padded
    weight = weight_of(n, k, device=device)
    # A target of 24 blocks: 24 slices in 16 runs; z = 24 at M = 1, 16 up to M = 28, then 1 with 24 blocks.
    with mock.patch.object(rule, "TARGET_BLOCKS", 24):
        x = x_of(33, k, dtype, device)
        slices, runs = rule.invariant_nsplit(n, k), rule.invariant_runs(n, k)
        expected = reference.float_reference(x, weight, slices, runs)
        codes, scales = quantized(x)
        expected_int8 = reference.int8_reference(codes, scales, weight, slices, dtype, runs)
        seen = []
        for m in (1, 2, 5, 28, 29, 33):
            seen.append(rule.plan(m, n, k).planes)
            assert torch.equal(gemm(x[:m], weight), expected[:m]), f"M = {m}, z = {seen[-1]}"
            y = gemm_int8(codes[:m], scales[:m], weight, dtype)
            assert torch.equal(y, expected_int8[:m]), f"int8, M = {m}, z = {seen[-1]}"
        assert (slices, runs, seen) == (24, 16, [24, 16, 16, 16, 1, 1])
    if dtype == torch.float32:
        assert not torch.equal(reference.float_reference(x[:1], weight, slices), expected[:1]), "a blunt case"


def check_many_outputs(device: str = "cpu") -> None:
    """On both sides of the switch of the reduce's block, and with more runs than threads an output."""
    k = 992  # 31 groups in 31 slices
    for m, n in ((4, 8192), (4, 8200)):
        weight, x = weight_of(n, k, device=device), x_of(m, k, torch.float32, device)
        launches = list(gemm_launches(x, weight, torch.empty(m, n, device=device), nsplit=31))
        few = m * n <= rule.REDUCE_FEW_OUTPUTS
        assert launches[1].block == ((16, 16) if few else (256, 1))
        picked = torch.tensor([0, 1, 4095, n - 2, n - 1], device=device)
        expected = reference.float_reference(x, weight.select_rows(picked), 31)
        assert torch.equal(gemm(x, weight, nsplit=31)[:, picked], expected)


def check_integers(device: str = "cpu", defines: tuple[tuple[str, int], ...] = ()) -> None:
    """With scales of one every sum is a whole number below 2**24: exact, whatever the slices."""
    n, k, m = 37, 224, 6
    source = torch.Generator().manual_seed(5)
    codes = torch.randint(-128, 128, (n, k), generator=source, dtype=torch.int8)
    codes[0] = -128  # the largest dot there is
    weight = guarded_weight(GroupedWeight.from_rows("q8_0", codes, torch.ones(n, 7)).to(device))
    x = torch.randint(-127, 128, (m, k), generator=source, dtype=torch.int8)
    x[0] = -127
    exact = (x.long() @ codes.long().t()).float().to(device)
    ones = torch.ones(m, 7, device=device)
    for nsplit in range(1, 8):
        y = gemm_int8(x.to(device), ones, weight, torch.float32, nsplit=nsplit, defines=defines)
        assert torch.equal(y, exact), f"nsplit = {nsplit}"


def check_accurate(dtype: torch.dtype, device: str = "cpu") -> None:
    """Error against FP64 at most twice that of plain torch in the activation's dtype."""
    for form in ("q8_0", "q4_0"):
        for n, k in ((130, 224), (17, 200)):
            weight = weight_of(n, k, form, device)
            dense = weight.dequantize(torch.float64)
            for m in (1, 5, 33):
                x = x_of(m, k, dtype, device)
                exact = linear(x.double(), dense)
                plain = linear(x.float(), weight.dequantize(dtype).float()).to(dtype).double()
                unit = torch.finfo(dtype).eps / 2 * exact.abs()
                rounding = 2.0**-24 * linear(x.double().abs(), dense.abs())
                error = gemm(x, weight).double() - exact
                assert rms(error) <= 2 * max(rms(plain - exact), rms(unit) / 2, rms(rounding))
                assert error.abs().max() <= 2 * max((plain - exact).abs().max(), unit.max(), rounding.max())


def check_extremes(device: str = "cpu") -> None:
    """Activations of 6e4 do not overflow inside; a result beyond FP16 is infinite, as in torch."""
    weight = weight_of(130, 224, device=device)
    x = torch.full((5, 224), 6e4, dtype=torch.float16, device=device)
    x[:, 1::2] *= -1
    x[2] = 0
    exact = linear(x.double(), weight.dequantize(torch.float64))
    y = gemm(x, weight)
    assert not y[2].any()
    beyond, inside = exact.abs() > 65520 * 1.001, exact.abs() < 65504 * 0.999
    assert beyond.any() and inside.any(), "the case must have both"
    assert torch.equal(y[beyond].double(), exact[beyond].sign() * float("inf"))
    slack = 2.0**-11 * exact.abs() + 2.0**-20 * linear(
        x.double().abs(), weight.dequantize(torch.float64).abs()
    )
    assert ((y.double() - exact).abs() <= slack)[inside].all()
    tiny = torch.full((1, 224), 2.0**-24, dtype=torch.float16, device=device)  # the least half there is
    assert torch.equal(gemm(tiny.float(), weight).half(), gemm(tiny, weight))
    x[1, 3], x[3, 4] = float("nan"), float("inf")
    for result in (zsplit_gemm(x, weight), zlaunch.zsplit_gemm_int8(x, weight)):
        assert result[1].isnan().all() and not result[3].isfinite().any()
        assert not result[2].any()


def check_identity(dtype: torch.dtype, device: str = "cpu") -> None:
    """An identity matrix gives the weight back, rounded once."""
    weight = weight_of(37, 70, device=device)
    eye = torch.eye(70, dtype=dtype, device=device)
    assert torch.equal(gemm(eye, weight).t(), weight.dequantize(torch.float32).to(dtype))


def rms(value: Tensor) -> float:
    return value.square().mean().sqrt().item()
