"""The error rule: what is wrong is found, whatever way it is wrong."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from labkit.bench import check
from labkit.bench.cases import Case
from labkit.bench.contenders import DENSE, clone, get, random_input, random_weight
from labkit.kernels import registry

CASE = Case("sweep", "w4", 5, 72, 256, 128, ())
WEIGHT = random_weight(CASE, "cpu")
X = random_input(CASE, "cpu")
WANTED = check.reference(X, WEIGHT)


def plain(x: torch.Tensor) -> torch.Tensor:
    return linear(x, WEIGHT.dequantize(torch.float16))


def test_the_reference_is_the_product_in_float64() -> None:
    exact = X.double() @ WEIGHT.dequantize(torch.float64).t()
    assert torch.equal(WANTED.exact, exact)
    assert 0 < WANTED.plain_error <= WANTED.bound / 2


def test_one_product_serves_every_m() -> None:
    found = check.references(X, WEIGHT, [1, 3, 5])
    assert list(found) == [1, 3, 5] and torch.equal(found[5].exact, WANTED.exact)
    for m, one in found.items():
        alone = check.reference(X[:m], WEIGHT)
        assert torch.allclose(one.exact, alone.exact, rtol=1e-12) and one.exact.shape == (m, 72)
        assert 0.5 < one.bound / alone.bound < 2
    assert found[5].allowing(8.0).bound == 4 * found[5].bound


def test_chunks_do_not_change_the_reference(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(check, "_CHUNK_BYTES", 8 * 256 * 7)
    pieces = check.reference(X, WEIGHT)
    assert torch.allclose(pieces.exact, WANTED.exact, rtol=1e-12)
    assert pieces.bound > 0


def test_plain_torch_passes() -> None:
    assert check.check(plain, X, WANTED).problem == ""


def test_one_wrong_element_is_found() -> None:
    def off(x: torch.Tensor) -> torch.Tensor:
        y = plain(x)
        y[4, 71] += 0.25
        return y

    verdict = check.check(off, X, WANTED)
    assert "allowed" in verdict.problem and verdict.max_abs > verdict.bound


def test_unwritten_elements_are_found() -> None:
    def lazy(x: torch.Tensor) -> torch.Tensor:
        y = torch.full((5, 72), float("nan"), dtype=torch.float16)
        y[:, :71] = plain(x)[:, :71]
        return y

    verdict = check.check(lazy, X, WANTED)
    assert verdict.problem == "5 of 360 results are NaN or Inf"
    assert "max_abs" not in verdict.to_json()  # JSON has no infinity


def test_other_shapes_dtypes_and_types_are_found() -> None:
    for call in (lambda x: plain(x).float(), lambda x: plain(x)[:4], lambda x: None):
        assert "returned" in check.check(call, X, WANTED).problem  # type: ignore[arg-type]


def test_a_result_that_changes_between_runs_is_found() -> None:
    calls = iter(range(10))

    def moody(x: torch.Tensor) -> torch.Tensor:
        y = plain(x)
        y[0, 0] *= 1 + next(calls) * 2**-11
        return y

    loose = check.Reference(WANTED.exact, WANTED.plain_error, 1.0)
    assert check.check(moody, X, loose).problem == "a repeat gave other bits"
    assert check.check(moody, X, loose, repeatable=False).problem == ""


def test_own_kernels_and_dense_are_right_on_every_copy() -> None:
    weights = [WEIGHT, clone(WEIGHT)]
    for name in ("dequant_matmul", DENSE):
        calls = get(name).calls(CASE, weights, 2)
        assert len(calls) == 2
        assert all(check.check(call, X, WANTED).problem == "" for call in calls)


def test_a_copy_has_memory_of_its_own() -> None:
    other = clone(WEIGHT)
    assert other.packed.data_ptr() != WEIGHT.packed.data_ptr() and torch.equal(other.packed, WEIGHT.packed)
    dense = get(DENSE).calls(CASE, [WEIGHT], 3)
    assert len(dense) == 3


def test_a_contender_that_cannot_run_says_why() -> None:
    assert "not registered" in get("no_such_kernel").why_not(CASE, WEIGHT)
    registry.register("picky_kernel", lambda x, w: x, available=lambda request: f"not M = {request.m}")
    try:
        assert get("picky_kernel").why_not(CASE, WEIGHT) == "not M = 5"
    finally:
        registry.unregister("picky_kernel")


def test_random_results_have_unit_variance_and_do_not_overflow() -> None:
    assert 0.3 < WANTED.exact.std().item() < 3
