"""The shadow-KV oracle: thousands of fuzzed runs of the real cache, and broken caches that it must catch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest
from choices import Choices
from oracle import OracleError, Prefixes, Row, ShadowKV, expected_token
from oracle_driver import Driver, Parts, Step, failure, run, shrunk

from labkit.cache.blocks import BlockAllocator, BlockCopy, BlockTable, slots_of
from labkit.cache.prefix import CachedBlock, PrefixCache

# Another first seed gives other runs: LABKIT_ORACLE_SEED=10000 pytest tests/unit/test_shadow_kv.py
FIRST_SEED = int(os.environ.get("LABKIT_ORACLE_SEED", "0"))
RUNS, PART = 10_000, 1_000

EVENTS = (
    "aborted",
    "aborted in flight",
    "cleared",
    "copies",
    "evicted",
    "finished",
    "forked",
    "grown",
    "hits",
    "preempted",
    "rejected",
    "rewound",
    "shrunk",
)


# --- the real cache ------------------------------------------------------------------------------------


class CountingCache(PrefixCache):
    """Counts evictions, so that a fuzzer that no longer causes any does not pass for a good one."""

    evictions = 0

    def _evicted(self, block: int) -> None:
        type(self).evictions += 1
        super()._evicted(block)


@pytest.mark.parametrize("part", range(RUNS // PART))
def test_every_token_reads_its_own_prefix(part: int) -> None:
    CountingCache.evictions = 0
    seen: Counter[str] = Counter()
    first = FIRST_SEED + part * PART
    for seed in range(first, first + PART):
        choices = Choices(seed)
        try:
            seen += run(choices, Parts(cache=CountingCache))
        except Exception as found:
            kept = shrunk(choices.drawn)
            pytest.fail(f"seed {seed}: {found!r}\nshrunk, for a test: Choices(replay={kept})")
    seen["evicted"] = CountingCache.evictions
    assert [event for event in EVENTS if seen[event] < 50] == []


def test_a_seed_is_one_run() -> None:
    first, again = Choices(5), Choices(5)
    assert run(first) == run(again)
    assert first.drawn == again.drawn
    assert run(Choices(replay=first.drawn)) == run(Choices(5))


# --- broken caches -------------------------------------------------------------------------------------


class PublishBeforeJoin(Driver):
    def launch(self, steps: list[Step], *, stream: int) -> int:
        launched = super().launch(steps, stream=stream)
        for step in steps:
            one = step.sequence
            self.cache.publish(one.table, one.tokens, step.stop, salt=one.salt)
        return launched


class PublishAborted(Driver):
    def retire(self, sequence) -> None:
        self.cache.publish(sequence.table, sequence.tokens, sequence.table.length, salt=sequence.salt)
        super().retire(sequence)


class FreeEarly(Driver):
    def retire(self, sequence) -> None:
        self.blocks.free(sequence.table)


class CopyUnpinned(Driver):
    def pin(self, copies: Sequence[BlockCopy]) -> list[BlockTable]:
        return []


class CopyForgotten(Driver):
    def pin(self, copies: list[BlockCopy]) -> list[BlockTable]:
        copies.clear()
        return []


class NoComparison(PrefixCache):
    def _same(self, entry, salt, parent, tokens) -> bool:
        return True


class TokensOnly(PrefixCache):
    def _same(self, entry: CachedBlock, salt, parent, tokens) -> bool:
        return entry.tokens == tokens and entry.salt == salt


class AnyTenant(PrefixCache):
    def _same(self, entry: CachedBlock, salt, parent, tokens) -> bool:
        return entry.tokens == tokens and entry.parent is parent


class WholePrompt(PrefixCache):
    def _shareable(self, tokens: int) -> int:
        return tokens // self.allocator.block_size * self.allocator.block_size


class CountedTwice(PrefixCache):
    def can_allocate(self, tokens, *, salt="") -> bool:
        self.queries += len(tokens)
        return super().can_allocate(tokens, salt=salt)


class EvictedUnheard(PrefixCache):
    def _evicted(self, block: int) -> None:
        pass


class NoCopyOnWrite(BlockAllocator):
    def _must_copy(self, block: int) -> bool:
        return False


class CopyTooShort(BlockAllocator):
    def append(self, table: BlockTable, tokens: int = 1) -> list[BlockCopy]:
        return [BlockCopy(c.source, c.target, c.tokens - 1) for c in super().append(table, tokens)]


class CopyUncounted(BlockAllocator):
    def _growth(self, table: BlockTable, tokens: int) -> int:
        return self.blocks_for(table.length + tokens) - len(table.blocks)


class OverwritePublished(BlockAllocator):
    def append(self, table: BlockTable, tokens: int = 1) -> list[BlockCopy]:
        last = table.blocks[-1]
        kept, self._kept[last] = self._kept[last], 0
        copies = super().append(table, tokens)
        self._kept[last] = kept
        return copies


class SharedUncounted(BlockAllocator):
    def allocate(self, tokens: int, shared: Sequence[int] = ()) -> BlockTable:
        table = super().allocate(tokens, shared)
        for block in shared:
            if self._refs[block] > 1:
                self._refs[block] -= 1
        return table


class SharedStillIdle(BlockAllocator):
    def allocate(self, tokens: int, shared: Sequence[int] = ()) -> BlockTable:
        idle = [block for block in shared if block in self._idle]
        table = super().allocate(tokens, shared)
        self._idle.update(dict.fromkeys(idle))
        return table


class ForkUncounted(BlockAllocator):
    def fork(self, table: BlockTable) -> BlockTable:
        published = list(table.published)
        return BlockTable(list(table.blocks), table.length, pool=self, published=published)


class LeakOnTruncate(BlockAllocator):
    def truncate(self, table: BlockTable, length: int) -> None:
        for block in table.blocks[self.blocks_for(length) :]:
            self._refs[block] += 1
        super().truncate(table, length)


def next_slot(table: BlockTable, start: int, stop: int, block_size: int) -> list[int]:
    """The last slot of a block, off by one."""
    slots = slots_of(table, start, stop, block_size)
    return [slot + (slot % block_size == block_size - 1) for slot in slots]


def first_block(table: BlockTable, start: int, stop: int, block_size: int) -> list[int]:
    """A chunk's slots counted from its own first block on, as if that were full."""
    base = table.blocks[start // block_size] * block_size - start // block_size * block_size
    slots = slots_of(table, start, stop, block_size)
    return [base + start] + slots[1:] if start % block_size else [*slots[:-1], base + stop - 1]


def swapped_slots(table: BlockTable, start: int, stop: int, block_size: int) -> list[int]:
    """Reads and writes that disagree on the order within a block."""
    return sorted(slots_of(table, start, stop, block_size))


MUTANTS = {
    "publish before join": Parts(driver=PublishBeforeJoin),
    "publish an aborted prompt": Parts(driver=PublishAborted),
    "free early": Parts(driver=FreeEarly),
    "copy's source not held": Parts(driver=CopyUnpinned),
    "copy not executed": Parts(driver=CopyForgotten),
    "no comparison": Parts(cache=NoComparison),
    "own tokens compared only": Parts(cache=TokensOnly),
    "salt not compared": Parts(cache=AnyTenant),
    "whole prompt matched": Parts(cache=WholePrompt),
    "queries counted twice": Parts(cache=CountedTwice),
    "evicted block still matched": Parts(cache=EvictedUnheard),
    "no copy-on-write": Parts(allocator=NoCopyOnWrite),
    "copy one token short": Parts(allocator=CopyTooShort),
    "copy not counted in can_append": Parts(allocator=CopyUncounted),
    "published block overwritten": Parts(allocator=OverwritePublished),
    "shared block without a reference": Parts(allocator=SharedUncounted),
    "shared block left on the idle list": Parts(allocator=SharedStillIdle),
    "fork without references": Parts(allocator=ForkUncounted),
    "truncate leaks": Parts(allocator=LeakOnTruncate),
    "slot off by one at a block's end": Parts(slots=next_slot),
    "chunk read from its first block": Parts(slots=first_block),
    "slots sorted": Parts(slots=swapped_slots),
}


# The books find these before a wrong prefix is read.
BOOKS_ONLY = {"copy not counted in can_append", "truncate leaks"}

# Shrunk examples; where the driver comes to draw in another order, shrink them again.
KEPT = {
    "publish before join": ("0 0 0 0 0 0 0 2 2 0 0 0 0 0 0 0 1 3 0 0 0 0 0 0 0 0 2 2 1 0 0 0 1 1 1"),
    "free early": (
        "1 0 0 0 0 0 0 0 0 0 0 4 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 3 0 0 0 1 2 1 0 1 0 0 0 1 "
        "0 0 0 0 0 1 1 0 0 1"
    ),
    "copy's source not held": (
        "2 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 2 0 2 0 0 0 1 0 0 0 0 0 0 0 0 2 0 0 2 2 2 0 0 0 0 "
        "1 1 0 0 0 0 1 1 0 0 0 1 0 0 0 3 2 0 0 0 1 4 0 0 1 0 0 3 4"
    ),
    "no comparison": ("0 0 0 1 0 0 0 6 0 2 0 1 0 0 0 0 0 0 0 0 0 0 2 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 2"),
    "no copy-on-write": (
        "2 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 2 0 6 0 0 0 0 0 0 0 0 0 0 0 1 0 9 0 0 0 0 0 0 0 0 "
        "0 0 0 0 0 0 1 0 1 0 1 0 1 0 0 1 2"
    ),
    "slot off by one at a block's end": ("0 0 0 0 0 0 0 0 3"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_cache_is_caught(name: str) -> None:
    for seed in range(4_000):
        found = failure(Choices(seed), MUTANTS[name])
        if isinstance(found, OracleError) or (found is not None and name in BOOKS_ONLY):
            return
    pytest.fail(f"{name}: not caught by 4,000 runs")


@pytest.mark.parametrize("name", KEPT)
def test_a_shrunk_example_fails_in_the_broken_cache_alone(name: str) -> None:
    kept = list(map(int, KEPT[name].split()))
    assert isinstance(failure(Choices(replay=kept), MUTANTS[name]), OracleError)
    assert failure(Choices(replay=kept)) is None


def test_shrinking_keeps_the_failure_and_leaves_little() -> None:
    parts = MUTANTS["whole prompt matched"]
    seed = next(seed for seed in range(100) if failure(Choices(seed), parts) is not None)
    choices = Choices(seed)
    failure(choices, parts)
    kept = shrunk(choices.drawn, parts)
    assert failure(Choices(replay=kept), parts) is not None
    assert len(kept) < len(choices.drawn) // 4


# --- the oracle itself ---------------------------------------------------------------------------------


@pytest.fixture
def shadow() -> ShadowKV:
    return ShadowKV(Prefixes(), block_size=4)


def row(shadow: ShadowKV, tokens: str, slots: Sequence[int], *, new: int) -> Row:
    """A row of single-digit tokens whose last ``new`` are computed."""
    prefixes = shadow.prefixes.along(map(int, tokens))
    return Row("row", prefixes, slots, slots[len(slots) - new :])


def test_what_has_joined_is_read(shadow: ShadowKV) -> None:
    shadow.join(shadow.launch([row(shadow, "123", [8, 9, 10], new=3)]))
    shadow.join(shadow.launch([row(shadow, "1234", [8, 9, 10, 11], new=1)], stream=1))


def test_a_wrong_prefix_is_named(shadow: ShadowKV) -> None:
    shadow.join(shadow.launch([row(shadow, "123", [8, 9, 10], new=3)]))
    with pytest.raises(OracleError, match=r"row, position 1, slot 9: reads \['':1 2\].* is \['':1 5\]"):
        shadow.launch([row(shadow, "1534", [8, 9, 10, 11], new=1)])
    with pytest.raises(OracleError, match=r"position 0, slot 12: reads \[nothing\]"):
        shadow.launch([row(shadow, "1234", [12, 9, 10, 11], new=1)])


def test_another_tenants_prefix_is_a_wrong_one(shadow: ShadowKV) -> None:
    shadow.join(shadow.launch([row(shadow, "12", [0, 1], new=2)]))
    other = Row("other", shadow.prefixes.along([1, 2, 3], "b"), [0, 1, 2], [2])
    with pytest.raises(OracleError, match=r"other, position 0, slot 0"):
        shadow.launch([other])


def test_a_stream_sees_its_own_earlier_work_and_no_other_does(shadow: ShadowKV) -> None:
    first = shadow.launch([row(shadow, "12", [0, 1], new=2)], stream=1)
    following = row(shadow, "123", [0, 1, 2], new=1)
    with pytest.raises(OracleError, match=r"slot 0: reads \[nothing\]"):
        shadow.launch([following], stream=0)
    second = shadow.launch([following], stream=1)
    with pytest.raises(OracleError, match="joins before"):
        shadow.join(second)
    shadow.join(first)
    shadow.join(second)
    assert not shadow.in_flight


def test_two_streams_must_not_touch_a_slot_that_one_writes(shadow: ShadowKV) -> None:
    shadow.join(shadow.launch([row(shadow, "12", [0, 1], new=2)]))
    shadow.launch([row(shadow, "123", [0, 1, 2], new=1)], stream=0)
    for slots in ([0, 5], [5, 2]):  # what the other work reads, what it writes
        with pytest.raises(OracleError, match=rf"touch slots \[{slots[0] if slots[0] < 5 else 2}\]"):
            shadow.launch([row(shadow, "77", slots, new=2)], stream=1)
    shadow.launch([row(shadow, "127", [0, 1, 7], new=1)], stream=1)


def test_rows_of_a_work_must_not_touch_each_others_slots(shadow: ShadowKV) -> None:
    shadow.join(shadow.launch([row(shadow, "12", [0, 1], new=2)]))
    with pytest.raises(OracleError, match="writes a slot twice"):
        shadow.launch([row(shadow, "3", [4], new=1), row(shadow, "5", [4], new=1)])
    with pytest.raises(OracleError, match=r"writes slots it reads: \[1\]"):
        shadow.launch([row(shadow, "123", [0, 1, 2], new=1), row(shadow, "5", [1], new=1)])


def test_slot_mapping_and_block_table_must_agree(shadow: ShadowKV) -> None:
    prefixes = shadow.prefixes.along([1, 2])
    with pytest.raises(OracleError, match=r"writes slots \[4, 6\], its table says \[4, 5\]"):
        shadow.launch([Row("row", prefixes, [4, 5], [4, 6])])
    with pytest.raises(OracleError, match="reads 3 slots for 2 positions"):
        shadow.launch([Row("row", prefixes, [4, 5, 6], [5, 6])])


def test_copies_run_in_order_before_the_rows(shadow: ShadowKV) -> None:
    shadow.join(shadow.launch([row(shadow, "12", [0, 1], new=2)]))
    copies = [(0, 1, 2), (1, 2, 2)]
    work = shadow.launch([row(shadow, "123", [8, 9, 10], new=1)], copies)
    with pytest.raises(OracleError, match=r"touch slots \[1\]"):  # a copy's source counts as read
        shadow.launch([row(shadow, "9", [1], new=1)], stream=1)
    shadow.join(work)
    assert [shadow.prefixes.text(shadow.memory[slot]) for slot in (5, 9, 10)] == ["'':1 2"] * 2 + ["'':1 2 3"]


def test_the_pretended_model_says_the_same_from_prefix_and_from_tokens() -> None:
    prefixes = Prefixes()
    said = set()
    for start in range(50):
        tokens = [start, 7, start // 3]
        token = prefixes.next_token(prefixes.along(tokens, "any")[-1], 5)
        assert token == expected_token(tokens, 5)
        said.add(token)
    assert said == set(range(5))
