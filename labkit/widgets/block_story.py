"""A small story of requests that share a pool of blocks, event by event, on the library's own allocator.

:func:`story` replays it for one block size and keeps a :class:`Frame` after every event: who holds which
block, and which request wrote which slot. A prompt's first eight tokens are the same for A, B, D and E (a
system prompt); the pool has 64 slots whatever the block size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from labkit.cache.blocks import BlockAllocator, BlockCopy, BlockTable, slots_of
from labkit.cache.prefix import PrefixCache
from labkit.errors import InputError, require

POOL_SLOTS = 64
BLOCK_SIZES = (2, 4, 8, 16)
SYSTEM = tuple(range(100, 108))
"""The shared beginning of the prompts."""


@dataclass(frozen=True)
class Frame:
    """The books after one event.

    Attributes:
        title: what happened, a few words.
        note: what it did to the blocks.
        tables: request → (block ids, tokens held), in order of arrival.
        refs: tables that refer to each block.
        kept: whether the prefix cache keeps a block's content.
        slots: for each slot the request that wrote it, in lower case once the value is stale: left over in a
            block that was given up, or taken again since; an empty text where nothing was ever written.
        touched: blocks that the event took, copied or wrote.
        cached: prompt tokens found in the prefix cache so far.
    """

    title: str
    note: str
    tables: tuple[tuple[str, tuple[int, ...], int], ...]
    refs: tuple[int, ...]
    kept: tuple[bool, ...]
    slots: tuple[str, ...]
    touched: frozenset[int]
    cached: int

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return len(self.slots) // len(self.refs)

    @property
    def used(self) -> int:
        """Blocks that a table refers to."""
        return sum(count > 0 for count in self.refs)

    @property
    def idle(self) -> int:
        """Blocks that only the prefix cache keeps."""
        return sum(kept and not count for kept, count in zip(self.kept, self.refs, strict=True))

    @property
    def free(self) -> int:
        """Blocks that are neither."""
        return len(self.refs) - self.used - self.idle

    @property
    def tokens(self) -> int:
        """Tokens of all requests, shared ones counted for each."""
        return sum(length for _, _, length in self.tables)

    @property
    def empty(self) -> int:
        """Slots without a token in used blocks: what the block size costs."""
        size = self.block_size
        used = [self.slots[b * size : (b + 1) * size] for b, count in enumerate(self.refs) if count]
        return sum(not slot.isupper() for block in used for slot in block)

    @property
    def saved(self) -> int:
        """Tokens that sharing keeps only once."""
        return self.tokens - (self.used * self.block_size - self.empty)


class _Teller:
    """Replays events on an allocator and writes frames."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.allocator = BlockAllocator(POOL_SLOTS // block_size, block_size)
        self.prefix = PrefixCache(self.allocator)
        self.tables: dict[str, BlockTable] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.slots = [""] * POOL_SLOTS
        self.frames: list[Frame] = []
        self.touched: set[int] = set()

    def frame(self, title: str, note: str) -> None:
        blocks = range(self.allocator.num_blocks)
        for block in blocks:
            if not self.allocator.ref_count(block) and not self.allocator.is_kept(block):
                self.spoil(block)
        self.allocator.validate(self.tables.values())
        self.prefix.validate()
        self.frames.append(
            Frame(
                title,
                note,
                tuple((name, tuple(t.blocks), t.length) for name, t in self.tables.items()),
                tuple(map(self.allocator.ref_count, blocks)),
                tuple(map(self.allocator.is_kept, blocks)),
                tuple(self.slots),
                frozenset(self.touched),
                self.prefix.hits,
            )
        )
        self.touched = set()

    def write(self, name: str, start: int) -> None:
        table = self.tables[name]
        for slot in slots_of(table, start, table.length, self.size):
            self.slots[slot] = name
            self.touched.add(slot // self.size)

    def spoil(self, block: int) -> None:
        """What the block holds is of no use to anybody any more."""
        part = slice(block * self.size, (block + 1) * self.size)
        self.slots[part] = [slot.lower() for slot in self.slots[part]]

    def take(self, blocks: list[int]) -> None:
        """Blocks are handed out anew, with whatever is left in them."""
        for block in blocks:
            self.spoil(block)
            self.touched.add(block)

    def admit(self, name: str, prompt: tuple[int, ...], why: str) -> None:
        idle = {b for b in range(self.allocator.num_blocks) if not self.allocator.ref_count(b)}
        idle = {b for b in idle if self.allocator.is_kept(b)}
        table, cached = self.prefix.allocate(prompt)
        self.tables[name], self.prompts[name] = table, prompt
        new = table.blocks[cached // self.size :]
        self.take(new)
        self.write(name, cached)
        shared = table.blocks[: cached // self.size]
        evicted = idle.intersection(new)
        woken = idle.intersection(shared)
        note = f"{_count(len(new), 'new block')} for {len(prompt) - cached} tokens"
        if shared:
            note = f"{cached} tokens found in {_ids(shared)}{' (idle, now alive)' if woken else ''}; " + note
        elif prompt[:8] == SYSTEM and self.prefix.queries > len(prompt):
            note += "; nothing shared: no whole block of equal tokens"
        if evicted:
            note += f"; evicted: {_ids(sorted(evicted))}"
        self.frame(f"{name} arrives: {why}", note)

    def grow(self, name: str, tokens: int, why: str) -> None:
        table = self.tables[name]
        before, old = len(table.blocks), table.length
        copies: list[BlockCopy] = self.allocator.append(table, tokens)
        for copy in copies:
            source, target = copy.source * self.size, copy.target * self.size
            self.take([copy.target])
            self.slots[target : target + copy.tokens] = self.slots[source : source + copy.tokens]
        new = table.blocks[before:]
        self.take(new)
        self.write(name, old)
        if copies:
            note = f"{_ids([copies[0].source])} is shared: copy {_count(copies[0].tokens, 'token')} to "
            note += f"{_ids([copies[0].target])}, then write there"
        elif new:
            note = f"{'the last block is full: ' if old % self.size == 0 else ''}{_ids(new)} taken"
        else:
            note = f"there is room in {_ids([table.blocks[-1]])}: no new block"
        self.frame(f"{name} grows by {tokens}{why}", note)

    def fork(self, name: str, child: str) -> None:
        self.tables[child] = self.allocator.fork(self.tables[name])
        self.prompts[child] = self.prompts[name]
        held = len(self.tables[child].blocks)
        note = f"no block is taken and none is copied: {_count(held, 'block')} counted once more"
        self.frame(f"{name} forks to {child}", note)

    def publish(self, *names: str) -> None:
        for name in names:
            prompt = self.prompts[name]
            self.prefix.publish(self.tables[name], prompt, len(prompt))
        note = f"{_count(self.prefix.num_cached, 'full block')} can be matched from now on"
        self.frame(f"the work of {' and '.join(names)} has joined: publish", note)

    def free(self, *names: str) -> None:
        before = self.allocator.num_free
        for name in names:
            self.allocator.free(self.tables.pop(name))
        gone = self.allocator.num_free - before
        idle = self.allocator.num_idle
        note = f"{_count(gone, 'block')} free again, {idle} kept as idle"
        self.frame(f"{' and '.join(names)} end{'s' if len(names) == 1 else ''}", note)

    def refuse(self, name: str, tokens: int) -> None:
        available = self.allocator.num_available
        try:
            self.prefix.allocate(tuple(range(200, 200 + tokens)))
        except InputError:
            needed = self.allocator.blocks_for(tokens)
            note = f"it needs {_count(needed, 'block')}, {available} can be had: refused, nothing has changed"
            self.frame(f"{name} arrives: {tokens} tokens", note)
        else:  # a story that cannot be told
            raise AssertionError(f"{name} was admitted")


@functools.cache
def story(block_size: int) -> tuple[Frame, ...]:
    """The frames of the story, the empty pool first.

    Raises:
        InputError: another block size than :data:`BLOCK_SIZES`.
    """
    expected = "one of " + ", ".join(map(str, BLOCK_SIZES))
    require(block_size in BLOCK_SIZES, "block_size", repr(block_size), expected)
    told = _Teller(block_size)
    told.frame("an empty pool", f"{POOL_SLOTS} slots in {told.allocator.num_blocks} blocks of {block_size}")
    told.admit("A", (*SYSTEM, 1, 2), "prompt of 10 tokens")
    told.grow("A", 1, ", its first answer")
    told.publish("A")
    told.admit("B", (*SYSTEM, 3, 4, 5, 6), "12 tokens, the first 8 those of A")
    told.publish("B")
    told.fork("A", "C")
    told.grow("C", 1, ", a second answer")
    told.grow("A", 1, "")
    told.free("A", "C")
    told.free("B")
    told.admit("D", (*SYSTEM, 7, 8, 9), "11 tokens, the same first 8")
    told.grow("D", 6, "")
    told.free("D")
    told.admit("E", (*SYSTEM, *range(300, 340)), "48 tokens, the same first 8")
    told.refuse("F", 24)
    told.free("E")
    told.admit("G", tuple(range(400, 460)), "60 tokens, unlike any other")
    return tuple(told.frames)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ids(blocks: list[int] | tuple[int, ...]) -> str:
    noun = "block" if len(blocks) == 1 else "blocks"
    return f"{noun} {', '.join(map(str, blocks))}"
