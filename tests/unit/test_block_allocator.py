"""The block allocator: counts, copy-on-write, a pool that changes size, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from labkit.cache.blocks import BlockAllocator, BlockCopy, BlockTable, CacheError, slots_of
from labkit.errors import InputError

# --- a model: every block is a list of the tables that hold it ------------------------------------------


class Allocator(RuleBasedStateMachine):
    """Random calls against a plain model of who holds which block, and of what stands in it."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 2, 3, 8]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockAllocator(num_blocks, block_size)
        self.size = block_size
        self.tables: list[BlockTable] = []
        self.texts: list[list[int]] = []  # what each sequence has written
        self.memory: dict[int, int] = {}  # slot → value
        self.evicted: list[int] = []
        self.pool.on_evict = self.evicted.append
        self.value = 0

    def write(self, table: BlockTable, text: list[int]) -> None:
        for slot in slots_of(table, len(text), table.length, self.size):
            self.value += 1
            self.memory[slot] = self.value
            text.append(self.value)

    def blocks_held(self) -> set[int]:
        return {block for table in self.tables for block in table.blocks}

    @rule(tokens=st.integers(1, 40))
    def allocate(self, tokens: int) -> None:
        available = self.pool.num_blocks - len(self.blocks_held())
        possible = -(-tokens // self.size) <= available
        assert self.pool.can_allocate(tokens) == possible
        if not possible:
            with pytest.raises(InputError, match=r"^tokens: got"):
                self.pool.allocate(tokens)
            return
        table = self.pool.allocate(tokens)
        assert not set(table.blocks) & self.blocks_held()
        self.tables.append(table)
        self.texts.append([])
        self.write(table, self.texts[-1])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def append(self, data: st.DataObject, tokens: int) -> None:
        which = data.draw(st.integers(0, len(self.tables) - 1))
        table, before = self.tables[which], list(self.tables[which].blocks)
        partial = table.length % self.size
        shared = partial and sum(before[-1] in other.blocks for other in self.tables) > 1
        growth = -(-(table.length + tokens) // self.size) - len(before) + bool(shared)
        possible = growth <= self.pool.num_blocks - len(self.blocks_held())
        assert self.pool.can_append(table, tokens) == possible
        if not possible:
            with pytest.raises(InputError, match=r"^tokens: got"):
                self.pool.append(table, tokens)
            assert table.blocks == before
            return
        copies = self.pool.append(table, tokens)
        assert copies == ([BlockCopy(before[-1], table.blocks[len(before) - 1], partial)] if shared else [])
        for copy in copies:
            for offset in range(copy.tokens):
                source = copy.source * self.size + offset
                self.memory[copy.target * self.size + offset] = self.memory[source]
        self.write(table, self.texts[which])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.tables) - 1))
        self.tables.append(self.pool.fork(self.tables[which]))
        self.texts.append(list(self.texts[which]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.tables) - 1))
        length = data.draw(st.integers(0, self.tables[which].length))
        self.pool.truncate(self.tables[which], length)
        del self.texts[which][length:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables.pop(which)
        del self.texts[which]
        self.pool.free(table)
        with pytest.raises(InputError, match="freed"):
            self.pool.free(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def keep_or_drop(self, data: st.DataObject) -> None:
        held = sorted(self.blocks_held())
        if not held:
            return
        block = data.draw(st.sampled_from(held))
        if self.pool.is_kept(block):
            self.pool.drop(block)
        else:
            self.pool.keep(block)

    @rule(by=st.integers(1, 3))
    def grow(self, by: int) -> None:
        if self.pool.num_blocks < 20:
            self.pool.grow(self.pool.num_blocks + by)

    @precondition(lambda self: self.pool.num_blocks > 1)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, self.pool.num_blocks - 1))
        possible = all(block < size for block in self.blocks_held())
        assert self.pool.can_shrink(size) == possible
        if possible:
            self.pool.shrink(size)
            assert self.pool.num_blocks == size
        else:
            with pytest.raises(InputError, match=r"^num_blocks: got"):
                self.pool.shrink(size)

    @invariant()
    def books(self) -> None:
        held = self.blocks_held()
        self.pool.validate(self.tables)
        assert self.pool.num_used == len(held)
        assert self.pool.num_free + self.pool.num_idle == self.pool.num_available
        assert self.pool.num_available == self.pool.num_blocks - len(held)
        for block in held:
            assert self.pool.ref_count(block) == sum(block in table.blocks for table in self.tables)

    @invariant()
    def contents(self) -> None:
        for table, text in zip(self.tables, self.texts, strict=True):
            assert [self.memory[slot] for slot in slots_of(table, 0, table.length, self.size)] == text

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                self.pool.free(table)
            self.pool.validate(())
            assert self.pool.num_used == 0


Allocator.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAllocator = Allocator.TestCase


# --- slots ---------------------------------------------------------------------------------------------


@given(
    block_size=st.sampled_from([1, 2, 8, 16, 64]),
    length=st.integers(0, 300),
    data=st.data(),
)
def test_a_slot_is_block_times_block_size_plus_offset(block_size: int, length: int, data) -> None:
    count = -(-length // block_size)
    blocks = data.draw(st.permutations(range(count)))
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    table = BlockTable([block + 2**40 for block in blocks], length)
    expected = [(table.blocks[p // block_size]) * block_size + p % block_size for p in range(start, stop)]
    assert slots_of(table, start, stop, block_size) == expected


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 6), (6, 6)])
def test_slots_that_a_table_does_not_hold_are_refused(start: int, stop: int) -> None:
    with pytest.raises(InputError, match=r"positions: got .* 0 ≤ start ≤ stop ≤ 5"):
        slots_of(BlockTable([3, 1], 5), start, stop, 4)


# --- order of ids --------------------------------------------------------------------------------------


def test_a_fresh_pool_and_a_freed_table_give_consecutive_blocks() -> None:
    pool = BlockAllocator(8, 4)
    table = pool.allocate(13)
    assert table.blocks == [0, 1, 2, 3]
    pool.free(table)
    assert pool.allocate(20).blocks == [0, 1, 2, 3, 4]


def test_new_blocks_of_a_grown_pool_are_handed_out_last() -> None:
    pool = BlockAllocator(2, 1)
    pool.grow(4)
    assert pool.allocate(4).blocks == [0, 1, 2, 3]


def test_idle_blocks_are_taken_after_free_ones_least_recently_released_first() -> None:
    pool, evicted = BlockAllocator(5, 2), []
    pool.on_evict = evicted.append
    first, second = pool.allocate(4), pool.allocate(2)
    for block in (*first.blocks, *second.blocks):
        pool.keep(block)
    pool.free(second)
    pool.free(first)
    assert (pool.num_free, pool.num_idle) == (2, 3)
    assert pool.allocate(4).blocks == [3, 4]
    assert evicted == []
    assert pool.allocate(6).blocks == evicted == [2, 1, 0]  # a table's last block goes first
    assert pool.num_available == 0


def test_a_shared_idle_block_is_not_available_for_the_new_ones() -> None:
    pool, evicted = BlockAllocator(2, 2), []
    pool.on_evict = evicted.append
    table = pool.allocate(4)
    for block in table.blocks:
        pool.keep(block)
    pool.free(table)
    assert pool.num_available == 2
    assert not pool.can_allocate(6, shared=[0])
    with pytest.raises(InputError, match="at most the 1 blocks available"):
        pool.allocate(6, shared=[0])
    pool.validate(())
    revived = pool.allocate(4, shared=[0])
    assert (revived.blocks, evicted) == ([0, 1], [1])
    pool.validate([revived])


# --- writing into what others may read -----------------------------------------------------------------


def test_a_published_block_that_its_only_table_overwrites_is_forgotten_first() -> None:
    pool, evicted = BlockAllocator(4, 4), []
    pool.on_evict = evicted.append
    table = pool.allocate(8)
    pool.keep(table.blocks[1])
    pool.truncate(table, 6)
    assert (pool.append(table), evicted, pool.is_kept(1)) == ([], [1], False)


def test_a_published_block_that_others_hold_is_copied() -> None:
    pool, evicted = BlockAllocator(4, 4), []
    pool.on_evict = evicted.append
    table = pool.allocate(8)
    pool.keep(table.blocks[1])
    other = pool.fork(table)
    pool.truncate(table, 5)
    assert pool.append(table, 2) == [BlockCopy(1, 2, 1)]
    assert (evicted, other.blocks, pool.is_kept(1)) == ([], [0, 1], True)
    pool.validate([table, other])


def test_a_full_last_block_is_never_copied() -> None:
    pool = BlockAllocator(4, 4)
    table = pool.allocate(4)
    fork = pool.fork(table)
    assert pool.append(table) == []
    assert pool.append(fork) == []
    assert (table.blocks, fork.blocks) == ([0, 1], [0, 2])


def test_a_copy_counts_when_asking_for_room() -> None:
    pool = BlockAllocator(2, 4)
    table = pool.allocate(2)
    fork = pool.fork(table)
    assert pool.can_append(table, 2)
    assert not pool.can_append(table, 3)
    last = pool.allocate(1)
    assert not pool.can_append(table)
    with pytest.raises(InputError, match="wait until a table is freed"):
        pool.append(table)
    pool.validate([table, fork, last])
    pool.free(fork)
    assert pool.append(table) == []


def test_a_copy_source_can_be_held() -> None:
    pool = BlockAllocator(4, 4)
    table = pool.allocate(2)
    fork = pool.fork(table)
    (copy,) = pool.append(table)
    held = pool.allocate(4, shared=[copy.source])
    pool.free(fork)
    assert pool.allocate(8).blocks == [2, 3]
    assert not pool.can_allocate(1)
    pool.free(held)
    assert pool.allocate(1).blocks == [copy.source]


def test_truncating_gives_blocks_back() -> None:
    pool = BlockAllocator(4, 4)
    table = pool.allocate(16)
    pool.truncate(table, 9)
    assert (table.blocks, table.length, pool.num_free) == ([0, 1, 2], 9, 1)
    pool.truncate(table, 8)
    assert table.blocks == [0, 1]
    pool.truncate(table, 0)
    assert (table.blocks, table.freed, pool.num_free) == ([], False, 4)
    assert pool.append(table, 3) == []
    pool.validate([table])


# --- size of the pool ----------------------------------------------------------------------------------


def test_shrinking_evicts_idle_blocks_and_refuses_used_ones() -> None:
    pool, evicted = BlockAllocator(6, 1), []
    pool.on_evict = evicted.append
    low, high = pool.allocate(3), pool.allocate(2)
    for block in high.blocks:
        pool.keep(block)
    assert not pool.can_shrink(4)
    with pytest.raises(InputError, match=r"num_blocks: got 4; expected at least 5.*free these tables first"):
        pool.shrink(4)
    pool.free(high)
    assert not pool.can_shrink(2)
    pool.shrink(3)
    assert (pool.num_blocks, pool.num_available, sorted(evicted)) == (3, 0, [3, 4])
    pool.validate([low])
    pool.free(low)
    pool.grow(5)
    table = pool.allocate(5)
    assert sorted(table.blocks) == [0, 1, 2, 3, 4]
    pool.validate([table])


# --- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "4", None])
def test_sizes_of_a_pool_are_checked(value: object) -> None:
    for arguments, name in (((value, 16), "num_blocks"), ((16, value), "block_size")):
        with pytest.raises(
            InputError, match=rf"^{name}: got {value!r}; expected a whole number of at least 1"
        ):
            BlockAllocator(*arguments)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, None])
def test_token_counts_are_checked_and_nothing_changes(value: object) -> None:
    pool = BlockAllocator(4, 4)
    table = pool.allocate(5)
    for call in (pool.allocate, pool.can_allocate, lambda v: pool.append(table, v)):
        with pytest.raises(InputError, match=r"^tokens: got"):
            call(value)
    with pytest.raises(InputError, match=r"^tokens: got"):
        pool.can_append(table, value)
    for call in (pool.grow, pool.shrink, pool.can_shrink):
        with pytest.raises(InputError, match=r"^num_blocks: got"):
            call(value)
    pool.validate([table])
    assert (table.length, pool.num_free) == (5, 2)


def test_a_request_larger_than_the_pool_is_told_apart_from_one_that_must_wait() -> None:
    pool = BlockAllocator(4, 4)
    with pytest.raises(InputError, match=r"17 \(5 new blocks of 4\).*the pool's 4 blocks.*a larger pool"):
        pool.allocate(17)
    table = pool.allocate(8)
    with pytest.raises(InputError, match=r"the 2 blocks available.*wait until a table is freed"):
        pool.allocate(12)
    pool.validate([table])


def test_a_freed_table_is_of_no_use() -> None:
    pool = BlockAllocator(4, 4)
    table = pool.allocate(5)
    pool.free(table)
    for call in (pool.free, pool.fork, pool.append, pool.can_append, lambda one: pool.truncate(one, 0)):
        with pytest.raises(InputError, match=r"table: got a table that was freed; expected a live table"):
            call(table)
    with pytest.raises(CacheError, match="table 0 was freed"):
        pool.validate([table])
    assert pool.num_free == 4


def test_a_table_of_another_pool_is_refused_and_neither_pool_changes() -> None:
    mine, other = BlockAllocator(4, 4), BlockAllocator(4, 4)
    table, theirs = mine.allocate(5), other.allocate(5)
    fork = mine.fork(table)
    for one in (table, fork):
        for call in (other.free, other.fork, other.append, other.can_append, lambda t: other.truncate(t, 0)):
            with pytest.raises(InputError, match=r"^table: got a table of another pool"):
                call(one)
    mine.validate([table, fork])
    other.validate([theirs])


@pytest.mark.parametrize("blocks", [[], [0], [0, 1, 2]])
def test_a_table_whose_blocks_do_not_fit_its_length_is_refused(blocks: list[int]) -> None:
    pool = BlockAllocator(4, 4)
    table = pool.allocate(5)
    table.blocks = blocks
    for call in (pool.free, pool.fork, pool.append, lambda one: pool.truncate(one, 1)):
        with pytest.raises(InputError, match=rf"table: got {len(blocks)} blocks for 5 tokens; expected 2 "):
            call(table)
    with pytest.raises(InputError, match="table: got list"):
        pool.free(blocks)  # type: ignore[arg-type]


def test_truncating_to_more_than_there_is_is_refused() -> None:
    pool = BlockAllocator(4, 4)
    table = pool.allocate(5)
    for length in (6, -1, True):
        with pytest.raises(InputError, match=rf"^length: got {length}"):
            pool.truncate(table, length)


@pytest.mark.parametrize(
    ("shared", "reason"),
    [
        ([2], "block 2, free"),
        ([0, 0], "each block once"),
        ([0, 1], "8 tokens"),
        ([4], "block: got 4"),
        ([-1], "-1"),
    ],
)
def test_shared_blocks_are_checked(shared: list[int], reason: str) -> None:
    pool = BlockAllocator(4, 4)
    table = pool.allocate(8)
    with pytest.raises(InputError, match=reason):
        pool.allocate(7, shared=shared)
    pool.validate([table])


def test_keep_and_drop_are_checked() -> None:
    pool = BlockAllocator(2, 4)
    table = pool.allocate(4)
    with pytest.raises(InputError, match="1, unused"):
        pool.keep(1)
    with pytest.raises(InputError, match="0, not kept"):
        pool.drop(0)
    pool.keep(0)
    with pytest.raises(InputError, match="0, kept already"):
        pool.keep(0)
    pool.free(table)
    assert pool.num_idle == 1
    pool.drop(0)
    assert (pool.num_idle, pool.num_free) == (0, 2)
    pool.validate(())


@pytest.mark.parametrize("size", [4, 5])
def test_growing_means_more_and_shrinking_means_fewer(size: int) -> None:
    pool = BlockAllocator(4, 4)
    with pytest.raises(InputError, match="fewer than the 4 blocks"):
        pool.shrink(size)
    with pytest.raises(InputError, match="more than the 4 blocks"):
        pool.grow(8 - size)


# --- the validator -------------------------------------------------------------------------------------


def test_the_validator_lists_every_disagreement() -> None:
    pool = BlockAllocator(6, 4)
    table, lost = pool.allocate(8), pool.allocate(4)
    pool.validate([table, lost])
    with pytest.raises(CacheError) as found:
        pool.validate([table])
    assert found.value.findings == ("block 2 counts 1 references, 0 tables name it",)
    table.blocks = [0, 0, 9]
    pool._free.append(3)
    pool._idle[4] = None
    with pytest.raises(CacheError) as found:
        pool.validate([table, lost])
    assert found.value.findings == (
        "table 0 has 3 blocks for 8 tokens",
        "table 0 names a block twice: [0, 0, 9]",
        "block 9 is named, but not in the pool",
        "block 0 counts 1 references, 2 tables name it",
        "block 1 counts 1 references, 0 tables name it",
        "block 3 is listed as free 2 times",
        "block 4 is listed as idle",
    )
