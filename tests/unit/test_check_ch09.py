"""Checks of chapter 09: own answers pass, usual mistakes get their hint."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from labkit import check, quoted
from labkit.check import ch09
from labkit.errors import InputError
from labkit.models.error_budget import Part, default_parts, remaining, spend
from labkit.nn.linear import QuantLinear
from labkit.quant import quantize
from labkit.solutions import ch09 as reference


def bill(**changes: Any) -> Any:
    def answer(shape: quoted.ModelShape, bits: int, group: int, context: int) -> float:
        return ch09._bill(shape, bits, group, context, **changes)

    return answer


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (bill(kv_sides=0), "cache is missing"),
        (bill(kv_sides=1), "keys AND values"),
        (bill(tables=1), "untied"),
        (bill(tables=2), "tied model"),
        (bill(table_bits=8), "has scales too"),
        (bill(table_bits=8.5), "FP32"),
        (lambda s, b, g, c: ch09._bill(s, b, g, c, kv_heads=s.num_heads), "only the KV heads"),
        (lambda s, b, g, c: ch09._bill(s, b, 10**9, c), "16-bit scale"),
        (lambda s, b, g, c: 8 * ch09._bill(s, b, g, c), "counted bits"),
        (lambda s, b, g, c: "much", "three sums"),
    ],
)
def test_bill_hint_names_the_mistake(answer: Any, hint: str) -> None:
    verdict = check.find("memory_bill").function(answer)  # these answers are built from the formula
    assert verdict.state == "not yet"
    assert hint in verdict.hint


def test_bill_is_what_the_widget_counts() -> None:
    from labkit.widgets.layer_bits_map import LayerBitsMap

    chart = LayerBitsMap("qwen2.5-7b", attn="w3", mlp="w3", group=64, context=8192)
    assert sum(chart.part_bytes().values()) == reference.memory_bill(chart.shape, 3, 64, 8192)


def test_the_librarys_bill_is_refused() -> None:
    from labkit.widgets.layer_bits_map import LayerBitsMap

    def borrowed(shape, bits, group, context):
        return sum(LayerBitsMap(shape.key, attn=f"w{bits}", mlp=f"w{bits}").part_bytes().values())

    verdict = check.find("memory_bill")(borrowed)
    assert verdict.state == "not yet"
    assert "is what you are building here" in verdict.hint


def blocks_of(rows: int) -> Any:
    def answer(x, weight):
        n = weight.shape[0]
        return torch.cat([x @ weight.dequantize(slice(a, a + rows)).T for a in range(0, n, rows)], 1)

    return answer


def test_blocks_are_scored_by_the_largest() -> None:
    item = check.find("matmul_in_blocks")
    assert (item(blocks_of(63)).state, item(blocks_of(63)).score) == ("passed", 126)
    assert (item(blocks_of(128)).state, item(blocks_of(128)).score) == ("passed", 256)
    assert item(blocks_of(1000)).state == "not yet"  # right, but over the limit
    assert "16 blocks" in item(blocks_of(50)).expected


def test_blocks_mistakes() -> None:
    item = check.find("matmul_in_blocks")
    no_call = item(lambda x, weight: torch.zeros(len(x), weight.shape[0]))
    assert "dequantize" in no_call.expected

    def no_tail(x, weight):
        n = weight.shape[0]
        return torch.cat([x @ weight.dequantize(slice(a, a + 63)).T for a in range(0, n - 62, 63)], 1)

    assert "shorter" in item(no_tail).hint
    turned = item(lambda x, weight: -(x @ weight.dequantize().T))
    assert (turned.state, turned.got) == ("not yet", "other values")
    assert item(lambda x, weight: 3).got == "int"


def swapped(**changes: Any) -> Any:
    def answer(model, name, format, group_size):
        parent, _, last = name.rpartition(".")
        owner = model.get_submodule(parent)
        old = getattr(owner, last)
        weight = quantize(
            changes.get("weight", lambda w: w)(old.weight.detach()), format, changes.get("group", group_size)
        )
        bias = None if changes.get("no_bias") or old.bias is None else old.bias.detach()
        setattr(owner, last, QuantLinear(weight, bias))
        if changes.get("all"):
            model[2] = nn.Linear(40, 8)
        return model

    return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (swapped(no_bias=True), "QuantLinear(weight, bias)"),
        (swapped(group=128), "group_size"),
        (swapped(weight=lambda w: -w), "old.weight"),
        (swapped(all=True), "one layer only"),
        (lambda model, name, format, group_size: model, "setattr"),
        (lambda model, name, format, group_size: nn.Identity(), "in place"),
    ],
)
def test_swap_hint_names_the_mistake(answer: Any, words: str) -> None:
    verdict = check.find("swap_linear")(answer)
    assert verdict.state == "not yet"
    assert words in verdict.hint


def test_budget_ranks_strategies() -> None:
    item = check.find("error_budget")

    def by_cost(parts, budget):
        chosen = []
        for i in sorted(range(len(parts)), key=lambda i: -parts[i].cost):
            if parts[i].extra_bytes <= budget:
                chosen.append(i)
                budget -= parts[i].extra_bytes
        return chosen

    worse = item(by_cost)
    assert worse.state == "not yet"
    assert "for each byte" in worse.hint
    assert "bytes" in item(lambda parts, budget: list(range(60))).got
    assert "different indices" in item(lambda parts, budget: [0, 0]).expected
    assert "different indices" in item(lambda parts, budget: [99]).expected
    assert "budget of 0" in item(lambda parts, budget: [0]).expected
    assert "spend" in item(lambda parts, budget: spend(parts, budget)).got


def own_budget(parts: Any, budget: int) -> list[int]:
    chosen = []
    for i in sorted(range(len(parts)), key=lambda i: -parts[i].cost / parts[i].extra_bytes):
        if parts[i].extra_bytes <= budget:
            chosen.append(i)
            budget -= parts[i].extra_bytes
    return chosen


@pytest.mark.parametrize(
    "dress", [list, set, np.array, torch.tensor, lambda got: [np.int64(i) for i in got], iter]
)
def test_budget_takes_indices_of_any_kind(dress: Any) -> None:
    verdict = check.find("error_budget")(lambda parts, budget: dress(own_budget(parts, budget)))
    assert (verdict.state, verdict.score) == ("passed", 44.5), verdict


@pytest.mark.parametrize("got", [np.ones(60, dtype=bool), ["0"], {0: 1}, 3, np.array([0.5])])
def test_budget_refuses_what_is_no_index(got: Any) -> None:
    assert "different indices" in check.find("error_budget")(lambda parts, budget: got).expected


def test_a_list_that_never_ends_gets_a_verdict() -> None:
    assert check.find("error_budget")(lambda parts, budget: itertools.count()).state == "not yet"


def test_a_forgotten_return() -> None:
    def no_return(x, weight):
        weight.dequantize()

    assert check.find("matmul_in_blocks")(no_return).got == "your function returned None"

    def lost_bias(model, name, format, group_size):
        owner = model.get_submodule(name.rpartition(".")[0])
        old = model.get_submodule(name)
        weight = quantize(old.weight.detach(), format, group_size)
        setattr(owner, name.rpartition(".")[2], QuantLinear(weight, None))

    verdict = check.find("swap_linear")(lost_bias)  # None is right here: the verdict is about the model
    assert verdict.state == "not yet" and "QuantLinear(weight, bias)" in verdict.hint


def test_default_parts_are_the_matrices_of_the_default_model() -> None:
    parts = default_parts()
    shape = quoted.model("smollm2-135m")
    assert len(parts) == 60
    assert 8 * sum(part.extra_bytes for part in parts) == shape.num_layers * shape.layer_weights
    assert all(part.cost > 0 for part in parts)
    assert max(parts, key=lambda part: part.cost).pattern == "model.layers.29.mlp.*_proj"


def test_budget_is_a_quarter_and_par_is_near_the_best() -> None:
    parts = default_parts()
    assert sum(part.extra_bytes for part in parts) == 4 * ch09.BUDGET_BYTES
    attn, mlp = (sorted((p.cost for p in parts if p.role == r), reverse=True) for r in ("attn", "mlp"))
    small, large = parts[0].extra_bytes, parts[1].extra_bytes
    total = sum(attn) + sum(mlp)
    best = min(
        1 - (sum(attn[:a]) + sum(mlp[:m])) / total
        for a in range(31)
        for m in range(31)
        if a * small + m * large <= ch09.BUDGET_BYTES
    )
    par = check.find("error_budget").par
    assert par is not None and 0 <= par - 100 * best < 0.1


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 50)), min_size=1, max_size=12), st.integers(0, 200))
def test_spend_stays_in_the_budget_and_wastes_nothing(items: list[tuple[float, int]], budget: int) -> None:
    parts = [Part("x", i, "mlp", cost, size) for i, (cost, size) in enumerate(items)]
    chosen = spend(parts, budget)
    used = sum(parts[i].extra_bytes for i in chosen)
    assert used <= budget
    assert chosen == sorted(set(chosen))
    assert all(parts[i].extra_bytes > budget - used for i in range(len(parts)) if i not in chosen)


def test_spend_refuses_nonsense() -> None:
    parts = [Part("x", 0, "mlp", 1.0, 4), Part("y", 0, "attn", 1.0, 1)]
    assert spend(parts, 4) == [1]  # the better ratio first, then nothing else fits
    assert remaining(parts, [1]) == 0.5
    with pytest.raises(InputError, match="budget_bytes"):
        spend(parts, -1)
    with pytest.raises(InputError, match="extra_bytes"):
        spend([Part("x", 0, "mlp", 1.0, 0)], 1)
