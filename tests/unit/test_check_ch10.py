"""Checks of chapter 10: own answers pass, usual mistakes get their hint."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import check
from labkit.cache.blocks import BlockAllocator, BlockTable, CacheError, slots_of
from labkit.check import ch10
from labkit.solutions import ch10 as reference


def judged(name: str, answer: Any) -> Any:
    """The verdict of an answer that may be made of the course's own."""
    exercise = check.find(name)
    return exercise._framed(exercise._judge(answer, {}))


# --- 10.1


@given(
    blocks=st.permutations(range(8)),
    size=st.sampled_from([1, 2, 4]),
    ends=st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted),
)
def test_runs_are_the_slots_of_the_library(blocks: list[int], size: int, ends: list[int]) -> None:
    start, stop = ends
    table = BlockTable(blocks[: -(-8 // size)], 8)
    got = reference.copy_runs(table.blocks, start, stop, size)
    assert [slot + i for slot, count in got for i in range(count)] == slots_of(table, start, stop, size)
    assert all(a[0] + a[1] != b[0] for a, b in itertools.pairwise(got))


def runs_of(most: int) -> Any:
    """Right, but no run is longer than ``most`` tokens."""

    def answer(blocks: list[int], start: int, stop: int, block_size: int) -> list[tuple[int, int]]:
        slots = [blocks[p // block_size] * block_size + p % block_size for p in range(start, stop)]
        found: list[tuple[int, int]] = []
        for slot in slots:
            if found and sum(found[-1]) == slot and found[-1][1] < most:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((slot, 1))
        return found

    return answer


@pytest.mark.parametrize(
    ("most", "state", "score"), [(99, "passed", 3), (5, "passed", 4), (1, "not yet", 15)]
)
def test_runs_are_scored_by_their_number(most: int, state: str, score: int) -> None:
    verdict = check.find("copy_runs")(runs_of(most))
    assert (verdict.state, verdict.score) == (state, score), verdict


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda b, a, z, s: [(b[p // s] * s, 1) for p in range(a, z)], "offset"),
        (lambda b, a, z, s: [(p, 1) for p in range(a, z)], "slot = block"),
        (lambda b, a, z, s: sorted(runs_of(99)(b, a, z, s)), "order"),
        (
            lambda b, a, z, s: runs_of(99)(b, a, z + 1, s) if a < z < 18 else runs_of(99)(b, a, z, s),
            "block size 8",
        ),
        (lambda b, a, z, s: [1, 2], "asked"),
        (lambda b, a, z, s: 5, "asked"),
    ],
)
def test_runs_near_misses(answer: Any, words: str) -> None:
    verdict = check.find("copy_runs")(answer)
    assert verdict.state == "not yet" and words in verdict.hint, verdict


def test_the_librarys_slots_are_refused() -> None:
    def borrowed(blocks, start, stop, block_size):
        return [(slot, 1) for slot in slots_of(BlockTable(blocks, stop), start, stop, block_size)]

    verdict = check.find("copy_runs")(borrowed)
    assert verdict.state == "not yet" and "slots_of" in verdict.got


def test_runs_may_be_numpy_or_tensors() -> None:
    verdict = judged("copy_runs", lambda b, a, z, s: torch.tensor(reference.copy_runs(b, a, z, s)))
    assert verdict.state == "passed", verdict


# --- 10.2


def test_the_planted_pools_are_what_they_say() -> None:
    """The library's validator finds the same books wrong, where its state can be set to them."""
    for books in ch10.POOLS:
        pool = BlockAllocator(len(books.refs), 1)
        pool._refs, pool._free = list(books.refs), type(pool._free)(books.free)
        tables = [BlockTable(list(blocks), len(blocks)) for blocks in books.tables]
        if not books.wrong:
            pool.validate(tables)
            continue
        with pytest.raises(CacheError) as caught:
            pool.validate(tables)
        named = {int(finding.split()[1]) for finding in caught.value.findings}
        assert named == set(books.wrong)


def audit(*, shared: bool = True, listed: bool = True, counts: bool = True) -> Any:
    """An audit that leaves something out."""

    def answer(tables: Any, refs: Any, free: Any) -> set[int]:
        wrong = set()
        for block, count in enumerate(refs):
            named = sum(block in table for table in tables)
            named = named if shared else min(named, 1)
            if counts and count != named:
                wrong.add(block)
            if listed and free.count(block) != (named == 0):
                wrong.add(block)
        return wrong

    return answer


def test_an_own_audit_passes() -> None:
    assert check.find("audit_pool")(audit()).state == "passed"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (audit(shared=False), "once for each table"),
        (audit(listed=False), "nobody can use it again"),
        (audit(counts=False), "block 0 counts 1"),
        (lambda t, r, f: [b for b, n in enumerate(r) if n == 0 and b not in f], "leak"),
        (lambda t, r, f: [], "nobody can use it again"),
        (lambda t, r, f: ["x"], ""),
        (lambda t, r, f: sorted(f.pop() for _ in r[:1]), "copy before"),
    ],
)
def test_audits_that_miss_something(answer: Any, words: str) -> None:
    verdict = check.find("audit_pool")(answer)
    assert verdict.state == "not yet" and words in verdict.hint, verdict


def test_the_leaky_allocator_leaks_at_the_copy_alone() -> None:
    pool = ch10.LeakyAllocator(8, 4)
    table = pool.allocate(6)
    pool.append(table, 3)
    pool.truncate(table, 6)
    fork = pool.fork(table)
    pool.validate([table, fork])
    assert len(pool.append(fork)) == 1
    with pytest.raises(CacheError, match="block 1 counts 2 references"):
        pool.validate([table, fork])


# --- 10.3


def append(*, copy: str = "partial", always: bool = False, full: bool = False, keep: bool = False) -> Any:
    """The reference with a mistake."""

    def answer(blocks: Any, length: int, refs: Any, free: Any, block_size: int) -> Any:
        offset = length % block_size
        if offset == 0 and not (full and refs[blocks[-1]] > 1):
            blocks.append(free.pop())
            refs[blocks[-1]] = 1
            return None
        old = blocks[-1]
        if copy == "never" or (refs[old] == 1 and not always):
            return None
        blocks[-1] = free.pop()
        refs[blocks[-1]] = 1
        if not keep:
            refs[old] -= 1
            if refs[old] == 0:
                free.append(old)
        return old, blocks[-1], offset if copy == "partial" else block_size

    return answer


def test_appends_are_scored_by_what_they_copy() -> None:
    item = check.find("append_token")
    assert (item(append()).state, item(append()).score) == ("passed", 6)
    whole = item(append(copy="whole"))
    assert (whole.state, whole.score) == ("passed", 12)
    greedy = item(append(always=True))
    assert greedy.state == "not yet" and greedy.score is not None and greedy.score > 12, greedy
    assert "last holder" in greedy.hint


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (append(copy="never"), "shares the block that was written"),
        (append(full=True), "never written again"),
        (append(keep=True), "must no longer count"),
        (lambda b, n, r, f, s: 7, "asked"),
        (lambda b, n, r, f, s: r.reverse(), "new block is due"),
        (lambda b, n, r, f, s: (b[-1], b[-1], -1), "asked"),
    ],
)
def test_append_near_misses(answer: Any, words: str) -> None:
    verdict = check.find("append_token")(answer)
    assert verdict.state == "not yet" and words in verdict.hint, verdict


def test_a_copy_to_a_block_that_stays_on_the_free_list_is_seen() -> None:
    def answer(blocks, length, refs, free, block_size):
        before = list(free)
        made = append()(blocks, length, refs, free, block_size)
        free[:] = before
        return made

    verdict = check.find("append_token")(answer)
    assert verdict.state == "not yet" and "free" in f"{verdict.expected} {verdict.got}", verdict
