"""The prefix cache: what is matched, what is never matched, and the counters."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from labkit.cache.blocks import BlockAllocator, BlockTable, CacheError, slots_of
from labkit.cache.prefix import PrefixCache, chained_hash
from labkit.errors import InputError


def same_key(salt: str, parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """Every block collides with every other."""
    return b"same"


def last_token(salt: str, parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """Many collisions."""
    return bytes([tokens[-1]])


def make(num_blocks: int = 16, block_size: int = 4, **options) -> tuple[BlockAllocator, PrefixCache]:
    pool = BlockAllocator(num_blocks, block_size)
    return pool, PrefixCache(pool, **options)


def computed(cache: PrefixCache, tokens: list[int], *, salt: str = "") -> BlockTable:
    """A prompt that went all the way: allocated, computed, published."""
    table, _ = cache.allocate(tokens, salt=salt)
    cache.publish(table, tokens, len(tokens), salt=salt)
    return table


# --- against a model: whatever is matched holds that very prefix -----------------------------------------


class Prefix(RuleBasedStateMachine):
    """Random requests; memory says which prefix, of which tenant, each slot was last written for."""

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.sampled_from([1, 2, 3]),
        hasher=st.sampled_from([chained_hash, same_key, last_token]),
    )
    def start(self, num_blocks: int, block_size: int, hasher) -> None:
        self.pool, self.cache = make(num_blocks, block_size, hasher=hasher)
        self.size = block_size
        self.memory: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.live: list[tuple[BlockTable, str, list[int], int]] = []  # table, salt, tokens, computed
        self.queries = self.hits = 0

    def check_match(self, tokens: list[int], salt: str) -> int:
        match = self.cache.match(tokens, salt=salt)
        assert match.length == len(match.blocks) * self.size < len(tokens)
        for position in range(match.length):
            slot = match.blocks[position // self.size] * self.size + position % self.size
            assert self.memory[slot] == (salt, tuple(tokens[: position + 1]))
        return match.length

    def compute(self, table: BlockTable, salt: str, tokens: list[int], start: int, stop: int) -> None:
        for position, slot in enumerate(slots_of(table, start, stop, self.size), start):
            self.memory[slot] = (salt, tuple(tokens[: position + 1]))

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        salt=st.sampled_from(["", "b"]),
        share=st.integers(0, 8),
    )
    def request(self, tokens: list[int], salt: str, share: int) -> None:
        matched = self.check_match(tokens, salt)
        if not self.cache.can_allocate(tokens, salt=salt):
            with pytest.raises(InputError, match=r"^tokens: got"):
                self.cache.allocate(tokens, salt=salt)
            return
        table, cached = self.cache.allocate(tokens, salt=salt)
        assert cached == matched
        self.queries += len(tokens)
        self.hits += cached
        stop = min(cached + share, len(tokens))
        self.compute(table, salt, tokens, cached, stop)
        self.live.append((table, salt, tokens, stop))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """A chunk more, or a token more, then published."""
        at = data.draw(st.integers(0, len(self.live) - 1))
        table, salt, tokens, done = self.live[at]
        if done == len(tokens):
            if not self.pool.can_append(table):
                return
            for copy in self.pool.append(table):
                for offset in range(copy.tokens):
                    source = self.memory[copy.source * self.size + offset]
                    self.memory[copy.target * self.size + offset] = source
            tokens = [*tokens, data.draw(st.integers(0, 1))]
        stop = data.draw(st.integers(done, len(tokens)))
        self.compute(table, salt, tokens, done, stop)
        self.cache.publish(table, tokens, stop, salt=salt)
        self.live[at] = (table, salt, tokens, stop)
        for end in range(1, len(tokens) + 1):
            self.check_match(tokens[:end], salt)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.live) - 1))
        table, salt, tokens, done = self.live[at]
        length = data.draw(st.integers(0, done))
        self.pool.truncate(table, length)
        self.live[at] = (table, salt, tokens[:length], length)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, salt, tokens, done = data.draw(st.sampled_from(self.live))
        if done == len(tokens):
            self.live.append((self.pool.fork(table), salt, tokens, done))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table, *_ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.free(table)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert (self.cache.num_cached, self.pool.num_idle) == (0, 0)

    @invariant()
    def books(self) -> None:
        self.pool.validate([table for table, *_ in self.live])
        self.cache.validate()
        assert (self.cache.queries, self.cache.hits) == (self.queries, self.hits)


Prefix.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPrefix = Prefix.TestCase


# --- the key -------------------------------------------------------------------------------------------


def test_the_default_key_is_blake2b_over_salt_parent_and_token_ids() -> None:
    ids = b"".join(token.to_bytes(8, "little") for token in (7, 2**40))
    text = (2).to_bytes(8, "little") + "ä".encode() + b"parent" + ids
    assert chained_hash("ä", b"parent", (7, 2**40)) == hashlib.blake2b(text, digest_size=16).digest()
    assert chained_hash("", b"", (97,) * 4) != chained_hash("a", b"", (97,) * 4)


@pytest.mark.parametrize("tokens", [(1.5, 2), ("a", "b"), (2**63, 1), (None, 1)])
def test_token_ids_that_are_not_whole_numbers_are_refused(tokens: tuple) -> None:
    pool, cache = make(block_size=2)
    with pytest.raises(InputError, match=r"^tokens: got .*whole numbers of 64 bits"):
        cache.allocate([*tokens, 1])
    pool.validate(())
    assert pool.num_used == cache.queries == 0


# --- what is matched -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 8)]
)
def test_whole_blocks_are_shared_and_one_token_is_always_left(prompt: int, cached: int) -> None:
    pool, cache = make()
    first = computed(cache, list(range(11)))
    second, found = cache.allocate(list(range(prompt)))
    shared = cached // 4
    assert (found, second.length, second.blocks[:shared]) == (cached, prompt, first.blocks[:shared])
    assert not set(second.blocks[shared:]) & set(first.blocks)
    assert [pool.ref_count(block) for block in second.blocks] == [2] * shared + [1] * (
        len(second.blocks) - shared
    )


def test_released_blocks_are_still_matched() -> None:
    pool, cache = make()
    tokens = list(range(9))
    pool.free(computed(cache, tokens))
    assert (pool.num_used, pool.num_idle, cache.num_cached) == (0, 2, 2)
    table, cached = cache.allocate(tokens)
    assert (cached, pool.num_idle) == (8, 0)
    pool.validate([table])


def test_only_what_was_computed_is_matched() -> None:
    _, cache = make()
    tokens = list(range(13))
    table, _ = cache.allocate(tokens)
    lengths = []
    for done in (0, 3, 4, 7, 8, 12, 13):
        cache.publish(table, tokens, done)
        lengths.append(cache.match(tokens).length)
    assert lengths == [0, 0, 4, 4, 8, 12, 12]


def test_an_aborted_prompt_leaves_nothing_readable_beyond_what_was_published() -> None:
    pool, cache = make()
    tokens = list(range(13))
    table, _ = cache.allocate(tokens)
    cache.publish(table, tokens, 6)
    pool.free(table)
    assert (cache.match(tokens).length, pool.num_idle, pool.num_free) == (4, 1, 15)


def test_another_tenant_matches_nothing() -> None:
    _, cache = make()
    tokens = list(range(9))
    computed(cache, tokens, salt="one")
    assert cache.match(tokens, salt="one").length == 8
    assert cache.match(tokens, salt="two").length == cache.match(tokens).length == 0


def test_another_token_ends_the_match() -> None:
    _, cache = make()
    computed(cache, list(range(13)))
    assert cache.match([0, 1, 2, 3, 4, 5, 6, 99, *range(8, 13)]).length == 4
    assert cache.match([99, *range(1, 13)]).length == 0


def test_the_first_published_block_of_equal_content_stays() -> None:
    pool, cache = make()
    tokens = list(range(9))
    first, _ = cache.allocate(tokens)
    second, _ = cache.allocate(tokens)
    cache.publish(second, tokens, 9)
    cache.publish(first, tokens, 9)
    assert cache.match(tokens).blocks == tuple(second.blocks[:2])
    pool.free(first)
    assert (pool.num_idle, cache.num_cached) == (0, 2)
    cache.validate()


def test_a_table_publishes_its_own_block_again_when_the_first_one_was_evicted() -> None:
    pool, cache = make(num_blocks=6)
    tokens = list(range(12))
    first, _ = cache.allocate(tokens[:8])
    second, _ = cache.allocate(tokens)
    cache.publish(first, tokens, 8)
    cache.publish(second, tokens, 12)  # its third block hangs on the first table's second one
    pool.free(first)
    assert cache.match([*tokens, 0]).length == 12
    other = pool.allocate(8)  # evicts the second block, and with it what can be reached through it only
    assert cache.match([*tokens, 0]).length == 4 * (pool.num_idle)
    cache.validate()
    pool.validate([second, other])
    cache.publish(second, tokens, 12)
    assert cache.match([*tokens, 0]).length == 12
    cache.validate()


# --- collisions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hasher", [same_key, last_token])
def test_a_colliding_key_serves_nothing(hasher) -> None:
    pool, cache = make(hasher=hasher)
    tokens = [1, 2, 3, 9, 5]
    table = computed(cache, tokens)
    assert cache.match(tokens).length == 4
    other = [4, 4, 4, 9, 5]
    assert cache.match(other).length == 0
    second = computed(cache, other)  # the key is taken: not published, and nothing is lost
    assert (cache.match(other).length, cache.match(tokens).length) == (0, 4)
    assert not set(table.blocks) & set(second.blocks)
    cache.validate()
    pool.validate([table, second])


def test_equal_tokens_behind_another_prefix_are_not_matched_under_a_weak_key() -> None:
    _, cache = make(hasher=last_token)
    computed(cache, [0, 0, 0, 1, 7, 7, 7, 2, 5])
    computed(cache, [3, 3, 3, 4, 7, 7, 7, 2, 5])
    assert cache.match([0, 0, 0, 1, 7, 7, 7, 2, 5]).length == 8
    assert cache.match([3, 3, 3, 4, 7, 7, 7, 2, 5]).length == 4


def test_a_truncated_table_publishes_what_it_holds_now() -> None:
    pool, cache = make(block_size=2)
    old = [1, 2, 3, 4, 5, 6]
    table = computed(cache, old)
    for length, expected in ((4, 4), (3, 2)):
        new = [*old[:length], 9, 9, 9, 9]
        pool.truncate(table, length)
        pool.append(table, 4)
        cache.publish(table, new, len(new))
        assert cache.match([*new, 0]).length == len(new) // 2 * 2
        assert cache.match([*old[:4], 9, 9, 5, 5, 0]).length == (6 if length == 4 else 2)
        assert cache.match([*old, 0]).length == (6 if length == 4 else expected)
        cache.validate()
        pool.validate([table])


# --- eviction ------------------------------------------------------------------------------------------


def test_the_prefix_released_longest_ago_is_evicted_first_its_end_before_its_beginning() -> None:
    pool, cache = make(num_blocks=4, block_size=2)
    for first in (10, 20):
        pool.free(computed(cache, [first, first + 1, first + 2, first + 3]))
    table, cached = cache.allocate([10, 11, 12])  # its second block evicts the end of the older prompt
    assert (cached, pool.num_idle) == (2, 2)
    pool.free(table)
    lengths = []
    for _ in range(4):
        pool.allocate(2)
        lengths.append((cache.match([10, 11, 12, 13, 0]).length, cache.match([20, 21, 22, 23, 0]).length))
        cache.validate()
    assert lengths == [(2, 4), (2, 2), (2, 0), (0, 0)]


def test_can_allocate_counts_an_idle_match_once() -> None:
    pool, cache = make(num_blocks=3, block_size=2)
    tokens = [1, 2, 3, 4]
    pool.free(computed(cache, tokens))
    held = pool.allocate(2)
    assert (pool.num_free, pool.num_idle) == (0, 2)
    assert cache.can_allocate([1, 2, 3, 4])
    assert not cache.can_allocate([1, 2, 3, 4, 5])
    with pytest.raises(InputError, match="at most the 0 blocks available"):
        cache.allocate([1, 2, 3, 4, 5])
    assert cache.queries == 4
    pool.validate([held])


def test_can_allocate_sees_that_shared_blocks_need_no_room() -> None:
    pool, cache = make(num_blocks=3, block_size=2)
    table = computed(cache, [1, 2, 3, 4])
    assert cache.can_allocate([1, 2, 3, 4, 5])
    assert not cache.can_allocate([1, 2, 9, 9, 5])
    second, cached = cache.allocate([1, 2, 3, 4, 5])
    assert cached == 4
    pool.validate([table, second])


def test_clearing_forgets_everything_and_takes_nothing_away() -> None:
    pool, cache = make()
    tokens = list(range(9))
    table = computed(cache, tokens)
    pool.free(computed(cache, [5, *tokens]))
    cache.clear()
    assert (cache.num_cached, pool.num_idle, cache.match(tokens).length) == (0, 0, 0)
    pool.validate([table])
    cache.validate()
    cache.publish(table, tokens, 9)
    assert cache.match(tokens).length == 8


# --- counters ------------------------------------------------------------------------------------------


def test_queries_and_hits_are_counted_once_by_allocate_alone() -> None:
    _, cache = make()
    tokens = list(range(10))
    computed(cache, tokens)
    for _ in range(3):
        cache.match(tokens)
        cache.can_allocate(tokens)
    assert (cache.queries, cache.hits) == (10, 0)
    cache.allocate(tokens)
    assert (cache.queries, cache.hits) == (20, 8)


# --- bad input -----------------------------------------------------------------------------------------


def test_bad_arguments_are_refused_by_name() -> None:
    pool, cache = make()
    tokens = list(range(9))
    table, _ = cache.allocate(tokens)
    with pytest.raises(InputError, match="allocator: got one with a prefix cache"):
        PrefixCache(pool)
    with pytest.raises(InputError, match="allocator: got int"):
        PrefixCache(3)  # type: ignore[arg-type]
    for call in (cache.match, cache.can_allocate, cache.allocate):
        with pytest.raises(InputError, match="tokens: got an empty prompt"):
            call([])
        with pytest.raises(InputError, match="salt: got None"):
            call(tokens, salt=None)
    for count, reason in ((-1, "computed: got -1"), (10, "at most 9"), (True, "computed: got True")):
        with pytest.raises(InputError, match=reason):
            cache.publish(table, tokens, count)
    with pytest.raises(InputError, match="at most 5"):
        cache.publish(table, tokens[:5], 6)
    cache.publish(table, tokens, 9, salt="one")
    with pytest.raises(InputError, match="salt: got 'two'; expected 'one'"):
        cache.publish(table, tokens, 9, salt="two")
    pool.free(table)
    with pytest.raises(InputError, match="table: got a table that was freed"):
        cache.publish(table, tokens, 9)
    pool.validate(())
    cache.validate()


def test_a_prompt_larger_than_the_pool_is_refused_and_nothing_leaks() -> None:
    pool, cache = make(num_blocks=2)
    pool.free(computed(cache, list(range(5))))
    assert not cache.can_allocate(list(range(9)))
    with pytest.raises(InputError, match=r"tokens: got 9 \("):
        cache.allocate(list(range(9)))
    pool.validate(())
    assert (pool.num_idle, cache.queries) == (1, 5)


# --- the validator -------------------------------------------------------------------------------------


def test_the_validator_lists_every_disagreement() -> None:
    pool, cache = make()
    table = computed(cache, list(range(9)))
    parent, child = (cache._by_block[block] for block in table.blocks[:2])
    child.tokens = (4, 5, 6, 99)
    parent.children.clear()
    pool.drop(0)
    with pytest.raises(CacheError) as found:
        cache.validate()
    assert found.value.findings == (
        "cached block 0 is not kept by the allocator",
        "cached block 1 has the key of other content",
        "cached block 1 hangs on block 0, which has forgotten it",
        "1 kept blocks, 2 cached, 2 keys",
    )


def test_half_a_surrogate_pair_is_a_salt_like_any_other() -> None:
    """JSON can carry one, and UTF-8 cannot."""
    pool = BlockAllocator(4, 4)
    cache = PrefixCache(pool)
    table = computed(cache, list(range(9)), salt="\ud800")
    assert cache.match(list(range(9)), salt="\ud800").length == 8
    assert cache.match(list(range(9)), salt="\ud801").length == 0
    pool.free(table)
    cache.validate()
