"""Exercises of chapter 10: runs of slots, an audit of the pool, copy-on-write, a colliding hash, the tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.cache.blocks import BlockAllocator, BlockCopy, BlockTable
from labkit.check import Verdict, exercise, forbid_calls, not_yet, passed
from labkit.check.normalise import items, pair, plain_int

GIVEN = ("Entry", "LeakyAllocator", "gpu_rows")
"""What the notebook uses of this module."""

RUNS = (([4, 5, 9, 2, 3], 3, 18, 4), ([7], 0, 5, 8), ([6, 0, 1], 1, 12, 4), ([3, 1], 2, 2, 2))
"""Block table, start, stop, block size of exercise 10.1; the first is scored."""


# --- 10.1


@exercise("10.1", title="Runs of slots", par=3, limit=5, unit="copies")
def copy_runs(answer: Any) -> Verdict:
    """``copy_runs(blocks, start, stop, block_size)``: (first slot, count) pairs; scored by how many."""
    forbid_calls(answer, ("slots_of", "as_range"))
    score = 0
    for blocks, start, stop, size in RUNS:
        wanted = [blocks[p // size] * size + p % size for p in range(start, stop)]
        case = f"positions {start} to {stop - 1} of blocks {blocks}, block size {size}"
        case = "no position at all" if start == stop else case
        came = items(answer(list(blocks), start, stop, size))
        runs = None if came is None else [_run(one) for one in came]
        if runs is None or None in runs:
            return not_yet("a list of (first slot, count)", _shown(came), f"asked: {case}")
        got = [slot + i for slot, count in runs if slot is not None for i in range(count)]  # type: ignore[misc]
        if got != wanted:
            hint = f"{case}; slot = block × block size + offset"
            if sorted(got) == sorted(wanted):
                hint = f"{case}: the order of the positions must stay"
            return not_yet(f"slots {_short(wanted)}", _short(got), hint)
        score = score or len(runs)
    return passed("every position in its slot, in order", score=score, hint="join runs whose slots follow")


def _run(one: Any) -> tuple[int, int] | None:
    both = pair(one)
    if both is None:
        return None
    slot, count = plain_int(both[0]), plain_int(both[1])
    good = isinstance(slot, int) and isinstance(count, int) and 1 <= count <= 1000
    return (slot, count) if good else None


# --- 10.2


@dataclass(frozen=True)
class Books:
    """A pool's books with planted mistakes.

    Attributes:
        tables: block ids of every live sequence.
        refs: reference count of each block.
        free: the free list.
        wrong: the blocks whose books are wrong.
        hint: what to look at.
    """

    tables: list[list[int]]
    refs: list[int]
    free: list[int]
    wrong: tuple[int, ...]
    hint: str


POOLS = (
    Books([[0, 1], [2]], [1, 1, 1, 0], [3], (), "these books are right"),
    Books([[0, 1], [0, 2], [0]], [3, 1, 1, 0, 0], [4, 3], (), "a shared block counts once for each table"),
    Books(
        [[0]], [1, 0, 0], [2], (1,), "block 1: no table, no reference, and not free: nobody can use it again"
    ),
    Books([[0], [1]], [1, 1, 1, 0], [3], (2,), "block 2 counts a reference that no table holds: a leak"),
    Books([[0, 1], [0]], [1, 1, 0], [2], (0,), "block 0 counts 1, and two tables name it"),
    Books([[0, 1]], [1, 1, 0], [1, 2], (1,), "block 1 is in use and on the free list"),
    Books(
        [[2]], [0, 0, 1], [0, 1, 0], (0,), "block 0 is on the free list twice: it will be handed out twice"
    ),
    Books([[3, 1], [3]], [0, 2, 0, 2, 1], [0, 2, 0], (0, 1, 4), "several blocks may be wrong at once"),
)


@exercise("10.2", title="Audit the pool")
def audit_pool(answer: Any) -> Verdict:
    """``audit_pool(tables, refs, free)``: the blocks whose books are wrong, in any order."""
    forbid_calls(answer, ("validate",))
    for books in POOLS:
        tables, refs, free = [list(t) for t in books.tables], list(books.refs), list(books.free)
        came = items(answer(tables, refs, free))
        got = None if came is None else [plain_int(one) for one in came]
        case = f"tables {books.tables}, refs {books.refs}, free {books.free}"
        if (tables, refs, free) != (books.tables, books.refs, books.free):
            return not_yet(
                "books that stay as they are", "an audit that changes them", "copy before you change"
            )
        if got is None or not all(isinstance(one, int) for one in got):
            return not_yet("a list of block ids", _shown(came), f"asked: {case}")
        if set(got) != set(books.wrong):
            return not_yet(f"{list(books.wrong)} for {case}", sorted(set(got)), books.hint)
    return passed(f"{len(POOLS)} pools, right and wrong ones")


class LeakyAllocator(BlockAllocator):
    """An allocator with one planted mistake: which operation has it is for the validator to find."""

    def append(self, table: BlockTable, tokens: int = 1) -> list[BlockCopy]:
        """As the real one, almost."""
        copies = super().append(table, tokens)
        for copy in copies:
            self._refs[copy.source] += 1
        return copies


# --- 10.3


class _Memory:
    """Sequences in a pool whose slots remember what was written; the answer only keeps the books."""

    def __init__(self, answer: Callable[..., Any], size: int, blocks: int) -> None:
        self.answer, self.size, self.copied = answer, size, 0
        self.refs, self.free = [0] * blocks, list(range(blocks - 1, -1, -1))
        self.slots: dict[int, Any] = {}
        self.tables: dict[str, list[int]] = {}
        self.texts: dict[str, list[Any]] = {}

    def admit(self, name: str, tokens: int) -> None:
        """A sequence in blocks of its own; the checker's work."""
        self.tables[name] = [self.free.pop() for _ in range(-(-tokens // self.size))]
        self.texts[name] = [f"{name}{i}" for i in range(tokens)]
        for block in self.tables[name]:
            self.refs[block] = 1
        for position, text in enumerate(self.texts[name]):
            self.slots[self.slot(name, position)] = text

    def fork(self, name: str, child: str) -> None:
        """Share all blocks; the checker's work."""
        self.tables[child], self.texts[child] = list(self.tables[name]), list(self.texts[name])
        for block in self.tables[child]:
            self.refs[block] += 1

    def slot(self, name: str, position: int) -> int:
        return self.tables[name][position // self.size] * self.size + position % self.size

    def grow(self, name: str) -> Verdict | None:
        """One token by the answer; a verdict where it went wrong."""
        table, length = self.tables[name], len(self.texts[name])
        before = f"blocks {table}, length {length}, block size {self.size}, refs {self.refs}"
        shared_full = length % self.size == 0 and bool(table) and self.refs[table[-1]] > 1
        came = self.answer(table, length, self.refs, self.free, self.size)
        copy = _copy(came)
        if came is not None and copy is None:
            return not_yet("None, or (source, target, tokens)", _shown(came), f"asked: {before}")
        if copy is not None:
            if shared_full:
                return not_yet(f"no copy for {before}", copy, "a full block is never written again: share it")
            source, target, tokens = copy
            for i in range(min(tokens, self.size)):
                self.slots[target * self.size + i] = self.slots.get(source * self.size + i)
            self.copied += tokens
        if len(table) != length // self.size + 1:
            return not_yet(
                f"{length // self.size + 1} blocks for {length + 1} tokens",
                table,
                f"a new block is due: {before}",
            )
        text = f"{name}{length}"
        self.slots[self.slot(name, length)] = text
        self.texts[name].append(text)
        differs = self._differs(name, before)  # a verdict that is not "passed" counts as false
        return differs if differs is not None else self._books(before)

    def _differs(self, grown: str, before: str) -> Verdict | None:
        for name, texts in self.texts.items():
            for position, wanted in enumerate(texts):
                got = self.slots.get(self.slot(name, position))
                if got == wanted:
                    continue
                hint = f"{grown} was asked to grow with {before}"
                if name != grown:
                    hint += f"; {name} shares the block that was written"
                return not_yet(f"position {position} of {name} to hold {wanted!r}", repr(got), hint)
        return None

    def _books(self, before: str) -> Verdict | None:
        for block, count in enumerate(self.refs):
            named = sum(table.count(block) for table in self.tables.values())
            if count != named:
                hint = "a sequence that leaves a block must no longer count" if count > named else before
                return not_yet(f"refs[{block}] = {named}", count, hint)
            if self.free.count(block) != (named == 0):
                return not_yet(f"block {block} free: {named == 0}", f"free list {self.free}", before)
        return None


@exercise("10.3", title="Copy on write", par=6, limit=12, unit="tokens copied", none_ok=True)
def append_token(answer: Any) -> Verdict:
    """``append_token(blocks, length, refs, free, block_size)``: books in place; the copy to make, or None."""
    forbid_calls(answer, ("append_blocks", "BlockAllocator", "fork"))
    for size, tokens in ((4, 8), (8, 3), (1, 2)):
        memory = _Memory(answer, size, 24)
        memory.admit("a", tokens)
        memory.fork("a", "b")
        for name in "abbaab":
            if (verdict := memory.grow(name)) is not None:
                return verdict
    memory = _Memory(answer, 4, 24)
    memory.admit("a", 6)
    for child in "bcd":
        memory.fork("a", child)
    for name in "dcba" * 3:
        if (verdict := memory.grow(name)) is not None:
            return verdict
    hint = "copy only the tokens that are there; the last holder writes in place"
    return passed("four sequences of one prompt, none disturbed", score=memory.copied, hint=hint)


def _copy(came: Any) -> tuple[int, int, int] | None:
    found = items(came)
    numbers = [] if found is None else [plain_int(one) for one in found]
    if len(numbers) != 3 or not all(isinstance(one, int) and one >= 0 for one in numbers):
        return None
    return numbers[0], numbers[1], numbers[2]


# --- 10.4


@dataclass(frozen=True)
class Entry:
    """A cached block of exercise 10.4.

    Attributes:
        block: its id.
        tokens: its token ids.
        parent: block id of the entry before it; None at the start of a prompt.
    """

    block: int
    tokens: tuple[int, ...]
    parent: int | None


def strong_key(previous: Any, tokens: tuple[int, ...]) -> Any:
    """A key that never collides."""
    return (previous, tokens)


def weak_key(previous: Any, tokens: tuple[int, ...]) -> Any:
    """A key that forgets the order of the tokens, and all that came before them."""
    return sum(tokens)


def _cached(make_key: Callable[[Any, tuple[int, ...]], Any], *prompts: tuple[int, ...]) -> dict[Any, Entry]:
    """Blocks of two tokens of each prompt; the content that came first stays."""
    cache: dict[Any, Entry] = {}
    number = 10
    for prompt in prompts:
        key, parent = None, None
        for start in range(0, len(prompt), 2):
            part = prompt[start : start + 2]
            key = make_key(key, part)
            if key in cache and (cache[key].tokens, cache[key].parent) != (part, parent):
                break
            if key not in cache:
                cache[key] = Entry(number, part, parent)
                number += 1
            parent = cache[key].block
    return cache


_LEFT = "one token must be left: its logits are not in the cache"
_PROMPTS: tuple[tuple[Any, tuple[tuple[int, ...], ...], tuple[int, ...], list[int], str], ...] = (
    (strong_key, ((1, 2, 3, 4),), (1, 2, 3, 4, 5), [10, 11], "compare whole blocks, one after the other"),
    (strong_key, ((1, 2, 3, 4),), (1, 2, 3, 4), [10], _LEFT),
    (strong_key, ((1, 2, 3, 4),), (1, 2), [], _LEFT),
    (strong_key, ((1, 2, 3, 4),), (7, 8, 3, 4, 5), [], "behind a block that does not match, nothing can"),
    (weak_key, ((1, 2, 3, 4),), (2, 1, 9), [], "the key is equal, the tokens are not: compare entry.tokens"),
    (weak_key, ((1, 2, 3, 4),), (1, 2, 4, 3, 9), [10], "the second block's key is equal, its tokens are not"),
    (weak_key, ((1, 2, 3, 4), (5, 6)), (5, 6, 3, 4, 9), [12], "block 11 follows 1, 2: compare entry.parent"),
    (weak_key, ((1, 2, 3, 4),), (3, 4, 9), [], "block 11 is a second block: its parent is not None"),
)


@exercise("10.4", title="A hash is not a proof")
def match_prefix(answer: Any) -> Verdict:
    """``match_prefix(tokens, cache, block_size, make_key)``: block ids of the longest cached prefix."""
    forbid_calls(answer, ("PrefixCache",))
    for make_key, prompts, tokens, wanted, hint in _PROMPTS:
        came = items(answer(list(tokens), _cached(make_key, *prompts), 2, make_key))
        got = None if came is None else [plain_int(one) for one in came]
        kind = "keys that collide" if make_key is weak_key else "keys that never collide"
        if got != wanted:
            held = " and ".join(str(list(prompt)) for prompt in prompts)
            case = f"prompt {list(tokens)}, cached {held}, blocks of 2, {kind}"
            return not_yet(f"{wanted} for {case}", _shown(came if got is None else got), hint)
    return passed("no prompt got another prompt's keys and values")


# --- 10.5


@exercise("10.5", title="NaN in the tail")
def attend_tail(answer: Any) -> Verdict:
    """``attend_tail(q, k, v, lengths)``: one query a row over padded keys and values."""
    import torch

    forbid_calls(answer, ("scaled_dot_product_attention", "paged_attention_reference"))
    nan, inf = float("nan"), float("inf")
    kinds = (
        ("stale numbers", 3.0, -5.0, "the tail gets weight: mask the scores before the softmax"),
        ("NaN in K", nan, 1.0, "mask the scores by position; adding to NaN leaves NaN, so replace them"),
        ("NaN in V", 1.0, nan, "its weight is 0, but 0 × NaN is NaN: mask V as well"),
        ("NaN in both", nan, nan, "mask the scores and V"),
        ("infinity in both", inf, -inf, "0 × infinity is NaN too"),
    )
    source = torch.Generator().manual_seed(10)
    q, k, v = (torch.randn(*shape, generator=source) for shape in ((4, 8), (4, 16, 8), (4, 16, 8)))
    lengths = torch.tensor([1, 7, 15, 16])
    tail = torch.arange(16) >= lengths[:, None]
    wanted = torch.stack([_exact(q[b], k[b, :n], v[b, :n]) for b, n in enumerate(lengths.tolist())])
    for name, in_k, in_v, hint in kinds:
        dirty = [x.masked_fill(tail[:, :, None], bad) for x, bad in ((k, in_k), (v, in_v))]
        kept = [x.clone() for x in dirty]
        y = answer(q.clone(), *dirty, lengths.clone())
        if not isinstance(y, torch.Tensor) or y.shape != (4, 8):
            got = f"shape {list(y.shape)}" if isinstance(y, torch.Tensor) else type(y).__name__
            return not_yet("a tensor [4, 8] for q [4, 8] and k, v [4, 16, 8]", got)
        if not all(
            torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(dirty, kept, strict=True)
        ):
            return not_yet(
                "k and v as they were", "changed", "the pool is not yours: masked_fill, not masked_fill_"
            )
        if not torch.allclose(y.double(), wanted, atol=1e-5):
            where = "NaN" if bool(y.isnan().any()) else f"off by {float((y - wanted).abs().max()):.2g}"
            return not_yet(f"attention over the first lengths[b] slots, with {name} behind", where, hint)
    return passed(f"{len(kinds)} kinds of rubbish behind the end, and none comes through")


def _exact(q: Any, k: Any, v: Any) -> Any:
    weights = (k.double() @ q.double() / q.shape[0] ** 0.5).softmax(0)
    return weights @ v.double()


# --- times on a GPU


def gpu_rows(contexts: Sequence[int] = (8192,), batch: int = 16) -> list[dict[str, Any]]:
    """Decode attention of Qwen2.5-3B, timed on this GPU: FP16 and INT8 beside torch on gathered copies.

    Each is found right first, caches cold, in turns.
    """
    from labkit.bench import attention

    options = attention.Options(
        models=("qwen2.5-3b",),
        context=tuple(contexts),
        batch=(batch,),
        formats=("fp16", "int8"),
        device="cuda",
    )
    record = attention.run(options, "chapter 10", report=lambda _: None)
    names = {attention.OURS: "paged kernel", attention.SDPA: "torch, gathered first"}
    rows = []
    for entry in record.entries:
        if entry.contender in names and entry.samples_us:
            share = record.share(entry, "copy_gb_s")
            row = {"what": f"{names[entry.contender]}, {entry.format.upper()}", "context": entry.k}
            row |= {"µs": entry.median_us, "GB/s": entry.weight_gb_s}
            rows.append(row | {"of copy": share, "origin": record.kind})
    return rows


def _short(numbers: Sequence[Any]) -> str:
    text = ", ".join(map(str, numbers[:12]))
    return f"[{text}, …]" if len(numbers) > 12 else f"[{text}]"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
