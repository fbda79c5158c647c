"""The RMSNorm and greedy kernels in the emulator: values, bits, races."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from labkit.errors import InputError
from labkit.kernels import greedy as greedy_module
from labkit.kernels import rmsnorm as rmsnorm_module
from labkit.kernels.greedy import GreedyState, greedy
from labkit.kernels.rmsnorm import rmsnorm

DTYPES = (torch.float16, torch.bfloat16)
WIDTHS = (1, 7, 8, 576, 2047, 2048, 4096, 4104, 11008)
EPS = 1e-6


def inputs(m: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(d)
    x = torch.randn(m, d, generator=source) * 3
    return x.to(dtype), (1 + 0.3 * torch.randn(d, generator=source)).to(dtype)


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_twice_that_of_plain_torch(d: int, dtype: torch.dtype) -> None:
    x, weight = inputs(3, d, dtype)
    exact = F.rms_norm(x.double(), (d,), weight.double(), EPS)
    plain = F.rms_norm(x, (d,), weight, EPS)
    y = rmsnorm(x, weight, EPS)
    bound = 2 * (plain.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max() / 4
    assert (y.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("d", WIDTHS)
def test_bits_of_a_row_depend_on_neither_the_batch_nor_the_address(d: int) -> None:
    x, weight = inputs(5, d, torch.float16)
    y = rmsnorm(x, weight, EPS)
    for i in range(5):
        assert torch.equal(rmsnorm(x[i : i + 1].clone(), weight, EPS), y[i : i + 1])
    odd = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert rmsnorm_module.launch(odd, weight, EPS, y.clone()).source != (
        rmsnorm_module.source(torch.float16, True)
    )
    assert torch.equal(rmsnorm(odd, weight, EPS), y), "element by element is the same sum"
    assert torch.equal(rmsnorm(x, weight, EPS, out=x), y), "in place"


def test_extremes() -> None:
    big = torch.full((1, 64), 6e4).half()
    assert torch.allclose(rmsnorm(big, torch.ones(64).half(), EPS), torch.ones(1, 64).half())
    assert not rmsnorm(torch.zeros(2, 64).half(), torch.ones(64).half(), EPS).any()
    big[0, 3] = float("nan")
    assert rmsnorm(big, torch.ones(64).half(), EPS).isnan().all()
    assert rmsnorm(torch.zeros(0, 64).half(), torch.ones(64).half(), EPS).shape == (0, 64)


@pytest.mark.parametrize("d", [7, 576, 4104])
def test_no_race_and_nothing_out_of_bounds(d: int) -> None:
    x, weight = inputs(3, d, torch.bfloat16)
    y = torch.full_like(x, float("nan"))
    trace = rmsnorm_module.launch(x, weight, EPS, y).trace()
    assert trace.ok, trace.faults
    assert torch.equal(y, rmsnorm(x, weight, EPS))


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, weight = inputs(3, 8, torch.float16)
    for bad, argument in (
        ((x.float(), weight), "x"),
        ((x[0], weight), "x"),
        ((x.t(), weight), "x"),
        ((x, weight[:-1]), "weight"),
        ((x, weight.float()), "weight"),
    ):
        with pytest.raises(InputError, match=f"^{argument}: "):
            rmsnorm(*bad, EPS)
    with pytest.raises(InputError, match=r"^out: "):
        rmsnorm(x, weight, EPS, out=x[:2])


# --- greedy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 300, 5000, 151_936])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_of_the_most_likely_tokens(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[2] = -2.5  # all equal
    state = GreedyState.new(3, 8, "cpu")
    state.lengths.copy_(torch.tensor([0, 5, 7]))
    greedy(logits, state)
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert state.tokens.tolist() == expected and expected[2] == 0
    assert state.lengths.tolist() == [1, 6, 8]
    assert [int(state.history[b, n]) for b, n in enumerate((0, 5, 7))] == expected
    assert not state.status.any() and not state.tickets.any()
    greedy(logits, state)  # the last row is full now: it stays
    assert state.lengths.tolist() == [2, 7, 8]


def test_zeros_of_both_signs_are_equal_and_bad_logits_are_told() -> None:
    logits = torch.full((4, 4000), -1.0).half()
    logits[0, 70], logits[0, 90] = -0.0, 0.0
    logits[1, 3000], logits[1, 3500] = float("nan"), float("inf")
    logits[2, 77] = float("inf")
    logits[3] = float("-inf")
    state = GreedyState.new(4, 2, "cpu")
    greedy(logits, state)
    assert state.tokens.tolist() == [70, 3000, 77, 0]
    assert state.status.tolist() == [0, 1, 1, 1]


def test_greedy_rows_apart_and_races() -> None:
    wide = torch.randn(3, 6000, generator=torch.Generator().manual_seed(2)).half()
    logits = wide[:, :5000]
    state = GreedyState.new(3, 2, "cpu")
    trace = greedy_module.launch(logits, state).trace()
    assert trace.ok, trace.faults
    assert torch.equal(state.tokens, logits.float().argmax(1))
    for bad in (wide.float(), wide[:2], wide[0], wide.t()):
        with pytest.raises(InputError, match=r"^logits: "):
            greedy(bad, state)
