"""The oracle's runs again, through what an engine uses: views as tensors, storage that holds numbers."""

from __future__ import annotations

import itertools

import decode_cases as cases
import pytest
import torch
from choices import Choices
from oracle_driver import Driver, Parts, Step, Work, failure
from torch import Tensor

from labkit.cache.blocks import BlockCopy
from labkit.cache.paged import PagedKV
from labkit.cache.views import KVView, ViewBuilder

WIDTH = 8
CONFIG = cases.config(num_heads=1, num_kv_heads=1, head_dim=WIDTH, num_layers=1)


def encoded(prefixes: list[int]) -> Tensor:
    """Prefix numbers as heads [T, 1, D] of digits that INT8 stores exactly: the first one sets scale 1."""
    digits = [[127, *(prefix // 100**place % 100 for place in range(WIDTH - 1))] for prefix in prefixes]
    return torch.tensor(digits, dtype=torch.float32).view(-1, 1, WIDTH)


def decoded(heads: Tensor) -> list[int]:
    """Prefix numbers of heads [1, S, D]."""
    return [sum(int(d) * 100**place for place, d in enumerate(row[1:])) for row in heads[0].tolist()]


class TensorDriver(Driver):
    """Executes each work when it joins, on storage of floats or INT8, as its view says."""

    kv_dtype: torch.dtype | None = None
    head_major = False

    def __init__(self, choices: Choices, parts: Parts) -> None:
        super().__init__(choices, parts)
        self.builder = ViewBuilder("cpu", self.size, query_tile=3)
        self.kv = PagedKV(
            CONFIG,
            num_blocks=self.blocks.num_blocks,
            block_size=self.size,
            kv_dtype=self.kv_dtype,
            head_major=self.head_major,
        )
        for tensor in (self.kv.layers[0].keys, self.kv.layers[0].values):
            tensor.fill_(99)  # no slot holds a prefix yet
        self.views: dict[Work, tuple[KVView, list[BlockCopy], list[list[int]]]] = {}

    def launch(self, steps: list[Step], *, stream: int) -> int:
        if not super().launch(steps, stream=stream):
            return 0
        counts, prefixes = [], []
        for step in steps:
            counts.append(step.stop + len(step.drafts) - step.sequence.computed)
            prefixes.append(step.sequence.prefixes[: step.stop])
            for token in step.drafts:
                prefixes[-1].append(self.prefixes.extend(prefixes[-1][-1], token))
        starts = [step.sequence.computed for step in steps]
        view = self.builder.build([step.sequence.table for step in steps], counts, starts=starts)
        copies = [copy for step in steps for copy in step.copies]
        self.views[self.in_flight[-1]] = view, copies, prefixes
        return 1

    def join(self, work: Work) -> None:
        view, copies, prefixes = self.views.pop(work)
        self.kv.copy_blocks(copies)
        starts = view.lengths.tolist()
        new = encoded([one for row, start in zip(prefixes, starts, strict=True) for one in row[start:]])
        self.kv.write(0, new, -new, view.slots)
        for table, context, wanted in zip(view.block_tables, view.contexts, prefixes, strict=True):
            keys, values = self.kv.gather(0, table, context)
            assert decoded(keys) == decoded(-values) == wanted
        super().join(work)

    def resize(self) -> None:
        super().resize()
        if self.blocks.num_blocks > self.kv.num_blocks:
            self.kv.grow(self.blocks.num_blocks)


class RolledSlots(ViewBuilder):
    """Each new token goes to the slot of the one before it."""

    def build(self, tables, counts, *, starts=None) -> KVView:
        view = super().build(tables, counts, starts=starts)
        view.slots.copy_(view.slots.roll(1))
        return view


def outcomes(driver: type[TensorDriver], runs: int):
    """Failures of so many runs with block sizes that storage has."""
    sizes = (Choices(seed).pick((2, 4, 8, 16)) for seed in itertools.count())
    seeds = (seed for seed, size in enumerate(sizes) if size >= 8)
    return [failure(Choices(seed), Parts(driver=driver)) for seed in itertools.islice(seeds, runs)]


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("head_major", [False, True])
def test_storage_holds_what_the_shadow_says(kv_dtype: torch.dtype | None, head_major: bool) -> None:
    stored = {"kv_dtype": kv_dtype, "head_major": head_major}
    driver = type("Stored", (TensorDriver,), stored)
    assert [found for found in outcomes(driver, 50) if found is not None] == []


def test_a_view_with_its_slots_in_another_order_is_caught() -> None:
    class Rolled(TensorDriver):
        def __init__(self, choices: Choices, parts: Parts) -> None:
            super().__init__(choices, parts)
            self.builder = RolledSlots("cpu", self.size, query_tile=3)

    assert any(isinstance(found, AssertionError) for found in outcomes(Rolled, 5))


def test_copies_that_are_not_executed_are_caught() -> None:
    class Uncopied(TensorDriver):
        def join(self, work: Work) -> None:
            view, _, prefixes = self.views[work]
            self.views[work] = view, [], prefixes
            super().join(work)

    assert any(isinstance(found, AssertionError) for found in outcomes(Uncopied, 50))
