"""Chapter 01's checks: right answers pass, near misses do not, the library's own answer is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from labkit import check, device
from labkit.check.ch01 import CountedWeights
from labkit.errors import InputError
from labkit.solutions import ch01 as reference


def test_the_library_s_own_answer_is_refused() -> None:
    for name, answer in (
        ("weight_bytes", lambda bits, group, offset: device.bytes_per_weight(bits, group, offset)),
        ("ceiling", lambda w, size, gb: device.decode_ceiling_tok_s(w * size, gb)),
        ("ridge", lambda t, gb, size: device.ridge_m(t, gb, size)),
    ):
        assert check.find(name)(answer).state == "not yet"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("weight_bytes", lambda bits, group, offset: bits / 8),
        ("weight_bytes", lambda bits, group, offset: bits / 8 + (0 if group is None else 2 / group)),
        ("ceiling", lambda weights, size, gb: gb * 2**30 / (weights * size)),
        ("ceiling", lambda weights, size, gb: weights * size / (gb * 1e9)),
        ("ridge", lambda tflops, gb, size: tflops * 1e12 * size / (gb * 1e9)),
        ("tiled_gb_s", lambda row, bits: row["n"] * row["k"] * bits / 8 / row["tiled_ms"] / 1e6),
        ("tiled_gb_s", lambda row, bits: "fast"),
    ],
)
def test_near_misses(name: str, answer: Any) -> None:
    verdict = check.find(name)(answer)
    assert verdict.state == "not yet" and verdict.hint


def test_numpy_scalars_are_numbers() -> None:
    assert check.find("weight_bytes").function(lambda *a: np.float32(reference.weight_bytes(*a)))


def naive(weights: CountedWeights, x: np.ndarray) -> np.ndarray:
    return np.array([[row @ weights.row(n) for n in range(weights.shape[0])] for row in x], dtype=np.float32)


def test_batched_rows_scores_the_reads() -> None:
    batched = check.find("batched_rows")
    assert batched.function(reference.batched_rows).score == 1
    slow = batched(naive)
    assert slow.state == "not yet" and slow.score == 13
    assert "swap the two loops" in slow.hint


def by_columns(weights: CountedWeights, x: np.ndarray) -> np.ndarray:
    return np.stack([x @ weights.row(n) for n in range(weights.shape[0])], axis=1)


@pytest.mark.parametrize(
    "dress", [torch.tensor, np.ndarray.tolist, lambda y: torch.tensor(y).requires_grad_(), np.float64]
)
def test_batched_rows_takes_any_matrix(dress: Any) -> None:
    verdict = check.find("batched_rows")(lambda weights, x: dress(by_columns(weights, x)))
    assert (verdict.state, verdict.score) == ("passed", 1), verdict


@pytest.mark.parametrize(
    "answer",
    [
        lambda weights, x: [[1.0], [1.0, 2.0]],
        lambda weights, x: "rows",
        lambda weights, x: x @ weights._values.T,
        lambda weights, x: np.zeros((x.shape[0], weights.shape[0])),
        lambda weights, x: np.zeros((2, 2)),
        lambda weights, x: 3,
    ],
)
def test_batched_rows_near_misses(answer: Any) -> None:
    assert check.find("batched_rows")(answer).state == "not yet"


def test_counted_weights_count_and_refuse() -> None:
    weights = CountedWeights(np.ones((3, 4)))
    weights.row(0)
    weights.row(2)
    assert weights.row_reads == 2 and weights.reads_per_weight == pytest.approx(2 / 3)
    with pytest.raises(InputError, match="0 to 2"):
        weights.row(3)
    with pytest.raises(ValueError, match="read-only"):
        weights.row(1)[0] = 5
    with pytest.raises(InputError, match="matrix"):
        CountedWeights(np.ones(3))
