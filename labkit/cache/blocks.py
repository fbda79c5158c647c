"""Blocks of the paged KV cache: who holds which block, and nothing about what is in it.

A block is ``block_size`` token slots of every layer; a block table lists the blocks of a sequence in
order. Blocks are reference-counted: a prompt's prefix, or a fork, is held by several tables at once.

A block is in one of three states:

- *used*: at least one table refers to it;
- *idle*: no table does, but the prefix cache keeps its content; handed out again, least recently
  released first, only when no free block is left;
- *free*: neither.

The allocator trusts its owner on time: a table is freed, truncated or forked only after the last
launched work that names its blocks has joined.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from labkit.errors import refuse, require

if TYPE_CHECKING:
    from labkit.cache.prefix import CachedBlock


class CacheError(RuntimeError):
    """The books of a cache disagree with themselves: a defect of its owner, never of the input.

    Attributes:
        findings: one line for every disagreement.
    """

    def __init__(self, findings: Iterable[str]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(self.findings))


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in order; made and changed by :class:`BlockAllocator` only.

    Attributes:
        blocks: block ids; always just enough for ``length``.
        length: tokens held, that is slots handed out (written or not).
        freed: set by :meth:`BlockAllocator.free`; the table is of no use afterwards.
        pool: whose blocks they are; no other allocator takes the table.
        published: the prefix cache's entries for the leading full blocks, so that publishing goes on
            where it stopped.
    """

    blocks: list[int]
    length: int
    freed: bool = False
    pool: BlockAllocator | None = field(default=None, repr=False, compare=False)
    published: list[CachedBlock] = field(default_factory=list, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: slots 0 … tokens − 1 of ``source`` go to ``target``, in every layer.

    Copies are executed in the order in which they were returned, and before anything of the step is
    written. Until they have run nobody else may be given ``source``: where works overlap, its owner
    holds it meanwhile (``allocate(block_size, shared=[source])``, freed at the join).
    """

    source: int
    target: int
    tokens: int


def slots_of(table: BlockTable, start: int, stop: int, block_size: int) -> list[int]:
    """Slots of positions start … stop − 1 of a sequence: block · block_size + offset.

    The only place where a position becomes an address (int64 on a device: a pool may hold more than
    2³¹ elements).

    Raises:
        InputError: positions that the table does not hold.
    """
    if not 0 <= start <= stop <= table.length:
        refuse("positions", f"{start} to {stop}", f"0 ≤ start ≤ stop ≤ {table.length}, the table's length")
    if stop == start + 1:  # a decode step
        return [table.blocks[start // block_size] * block_size + start % block_size]
    slots: list[int] = []
    for index in range(start // block_size, -(-stop // block_size)):
        base = table.blocks[index] * block_size
        first = max(start - index * block_size, 0)
        last = min(stop - index * block_size, block_size)
        slots.extend(range(base + first, base + last))
    return slots


def whole(argument: str, value: object, least: int) -> None:
    """Refuse whatever is not a whole number of at least ``least``."""
    if type(value) is not int or value < least:
        refuse(argument, repr(value), f"a whole number of at least {least}")


class BlockAllocator:
    """A pool of blocks with reference counts; every operation is O(1) per block it touches.

    Args:
        num_blocks: blocks of the pool; it can grow and shrink later.
        block_size: tokens a block, at least 1 (storage and kernels take fewer: 8, 16, 32, 64).

    Attributes:
        on_evict: called with a block whose kept content is about to be overwritten; set by the prefix
            cache, which answers by forgetting it.

    Raises:
        InputError: here and in every method: sizes below their least value, tables that were freed or
            do not fit their length, more than is available. Nothing has changed when one is raised.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        whole("num_blocks", num_blocks, 1)
        whole("block_size", block_size, 1)
        self.block_size = block_size
        self.on_evict: Callable[[int], None] | None = None
        self._refs = [0] * num_blocks
        self._kept = bytearray(num_blocks)
        # A stack with the lowest id on top: a fresh pool gives runs of consecutive ids, which storage can
        # read without gathering. Blocks that the pool grew by lie at the bottom.
        self._free = deque(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to and whose content nobody keeps."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks that no table refers to, their content kept by the prefix cache."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table refers to."""
        return len(self._refs) - self.num_available

    def ref_count(self, block: int) -> int:
        """Tables that refer to a block."""
        self._check_block(block)
        return self._refs[block]

    def is_kept(self, block: int) -> bool:
        """Whether the prefix cache keeps a block's content."""
        self._check_block(block)
        return bool(self._kept[block])

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def can_allocate(self, tokens: int, shared: Sequence[int] = ()) -> bool:
        """Whether :meth:`allocate` would succeed now."""
        needed, available = self._demand(tokens, shared)
        return needed <= available

    def allocate(self, tokens: int, shared: Sequence[int] = ()) -> BlockTable:
        """A table for ``tokens`` ≥ 1 tokens.

        Args:
            tokens: tokens of the whole table, those in ``shared`` among them.
            shared: full blocks that the table begins with, used or idle; each gets one more reference,
                and an idle one comes back to life.
        """
        needed, available = self._demand(tokens, shared)
        if needed > available:
            self._refuse_size("tokens", tokens, needed, available)
        for block in shared:  # before any new block is taken: an idle one must not be evicted for it
            if not self._refs[block]:
                del self._idle[block]
            self._refs[block] += 1
        return BlockTable([*shared, *(self._take() for _ in range(needed))], tokens, pool=self)

    def can_append(self, table: BlockTable, tokens: int = 1) -> bool:
        """Whether :meth:`append` would succeed now."""
        return self._growth(table, tokens) <= self.num_available

    def append(self, table: BlockTable, tokens: int = 1) -> list[BlockCopy]:
        """Hand out slots for ``tokens`` ≥ 1 more tokens.

        A partial last block that other tables refer to as well is replaced by a copy. One that is the
        table's alone, but published (the table was truncated into it), is forgotten by the prefix cache,
        since it will be overwritten.

        Returns:
            Copies to execute before anything is written; none, or one.
        """
        growth = self._growth(table, tokens)
        if growth > self.num_available:
            self._refuse_size("tokens", f"{tokens} more", growth, self.num_available)
        copies: list[BlockCopy] = []
        offset = table.length % self.block_size
        last = table.blocks[-1] if offset else -1
        if offset and self._must_copy(last):
            table.blocks[-1] = self._take()
            copies.append(BlockCopy(last, table.blocks[-1], offset))
            self._release(last)
        elif offset and self._kept[last]:
            self._evict(last)
        table.length += tokens
        for _ in range(self.blocks_for(table.length) - len(table.blocks)):
            table.blocks.append(self._take())
        return copies

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same tokens; every block is shared, a partial last one included, and so
        are slots not yet written: fork what has been computed."""
        self.check_table(table)
        for block in table.blocks:
            self._refs[block] += 1
        return BlockTable(list(table.blocks), table.length, pool=self, published=list(table.published))

    def truncate(self, table: BlockTable, length: int) -> None:
        """Keep the first ``length`` tokens, from 0 to all; blocks beyond them go back."""
        self.check_table(table)
        whole("length", length, 0)
        require(length <= table.length, "length", length, f"0 to {table.length}, the table's length")
        blocks = self.blocks_for(length)
        for block in reversed(table.blocks[blocks:]):
            self._release(block)
        del table.blocks[blocks:]
        del table.published[length // self.block_size :]
        table.length = length

    def free(self, table: BlockTable) -> None:
        """Give every block of a table back; once."""
        self.check_table(table)
        # From the end: a block then outlives those that can only be matched through it.
        for block in reversed(table.blocks):
            self._release(block)
        table.blocks, table.published, table.length, table.freed = [], [], 0, True

    def grow(self, num_blocks: int) -> None:
        """Enlarge the pool to ``num_blocks`` in all; the storage must have grown before."""
        whole("num_blocks", num_blocks, 1)
        old = self.num_blocks
        require(num_blocks > old, "num_blocks", num_blocks, f"more than the {old} blocks of the pool")
        self._refs.extend([0] * (num_blocks - old))
        self._kept.extend(bytes(num_blocks - old))
        self._free.extendleft(range(old, num_blocks))

    def can_shrink(self, num_blocks: int) -> bool:
        """Whether no table refers to block ``num_blocks`` or one beyond it."""
        whole("num_blocks", num_blocks, 1)
        return num_blocks < self.num_blocks and not any(self._refs[num_blocks:])

    def shrink(self, num_blocks: int) -> None:
        """Reduce the pool to ``num_blocks`` in all; idle blocks beyond are evicted, used ones refused."""
        whole("num_blocks", num_blocks, 1)
        old = self.num_blocks
        require(num_blocks < old, "num_blocks", num_blocks, f"fewer than the {old} blocks of the pool")
        used = [block for block in range(num_blocks, old) if self._refs[block]]
        if used:
            text = f"at least {used[-1] + 1}: tables refer to {len(used)} of the blocks beyond"
            refuse("num_blocks", num_blocks, text, "free these tables first")
        for block in [block for block in self._idle if block >= num_blocks]:
            # An eviction takes what hangs on the block along, perhaps a later one of this list.
            if self._kept[block]:
                del self._idle[block]
                self._evict(block)
        self._free = deque(block for block in self._free if block < num_blocks)
        del self._refs[num_blocks:], self._kept[num_blocks:]

    def keep(self, block: int) -> None:
        """The prefix cache holds on to a used block's content: without references it becomes idle."""
        self._check_block(block)
        require(self._refs[block] > 0, "block", f"{block}, unused", "a block that a table refers to")
        require(not self._kept[block], "block", f"{block}, kept already", "a block that is not kept")
        self._kept[block] = 1

    def drop(self, block: int) -> None:
        """The prefix cache lets go of a block's content; an idle block becomes free."""
        self._check_block(block)
        require(bool(self._kept[block]), "block", f"{block}, not kept", "a block that is kept")
        self._kept[block] = 0
        if not self._refs[block]:
            del self._idle[block]
            self._free.append(block)

    def validate(self, tables: Iterable[BlockTable]) -> None:
        """Recompute every count from ``tables``, all that are live.

        Raises:
            CacheError: with every disagreement found.
        """
        findings: list[str] = []
        counted: Counter[int] = Counter()
        for number, table in enumerate(tables):
            name = f"table {number}"
            if table.freed:
                findings.append(f"{name} was freed")
            if len(table.blocks) != self.blocks_for(table.length):
                findings.append(f"{name} has {len(table.blocks)} blocks for {table.length} tokens")
            if len(set(table.blocks)) != len(table.blocks):
                findings.append(f"{name} names a block twice: {table.blocks}")
            counted.update(table.blocks)
        on_stack = Counter(self._free)
        stray = {*counted, *on_stack, *self._idle}.difference(range(self.num_blocks))
        findings.extend(f"block {block} is named, but not in the pool" for block in sorted(stray))
        for block, refs in enumerate(self._refs):
            if refs != counted[block]:
                findings.append(f"block {block} counts {refs} references, {counted[block]} tables name it")
            idle = not refs and bool(self._kept[block])
            if (block in self._idle) != idle:
                findings.append(f"block {block} is {'' if block in self._idle else 'not '}listed as idle")
            if on_stack[block] != (not refs and not self._kept[block]):
                findings.append(f"block {block} is listed as free {on_stack[block]} times")
        if findings:
            raise CacheError(findings)

    def _must_copy(self, block: int) -> bool:
        return self._refs[block] > 1

    def _growth(self, table: BlockTable, tokens: int) -> int:
        """Blocks that an append takes, the copy of a shared partial block included; checks both."""
        self.check_table(table)
        whole("tokens", tokens, 1)
        growth = self.blocks_for(table.length + tokens) - len(table.blocks)
        if table.length % self.block_size and self._must_copy(table.blocks[-1]):
            growth += 1
        return growth

    def _demand(self, tokens: int, shared: Sequence[int]) -> tuple[int, int]:
        """New blocks that an allocation takes, and blocks there are for it."""
        whole("tokens", tokens, 1)
        idle = 0
        for block in shared:
            self._check_block(block)
            if not self._refs[block]:
                require(block in self._idle, "shared", f"block {block}, free", "used or idle blocks")
                idle += 1
        if shared:
            require(len(set(shared)) == len(shared), "shared", list(shared), "each block once")
            held = len(shared) * self.block_size
            require(held <= tokens, "shared", f"{held} tokens", f"at most the table's {tokens} tokens")
        return self.blocks_for(tokens) - len(shared), self.num_available - idle

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._evict(block)
        self._refs[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if not self._refs[block]:
            if self._kept[block]:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _evict(self, block: int) -> None:
        self._kept[block] = 0
        if self.on_evict is not None:
            self.on_evict(block)

    def _check_block(self, block: int) -> None:
        if type(block) is not int or not 0 <= block < len(self._refs):
            refuse("block", repr(block), f"a block id from 0 to {len(self._refs) - 1}")

    def check_table(self, table: BlockTable) -> None:
        """Refuse what is not a live table of this form."""
        if not isinstance(table, BlockTable):
            refuse("table", type(table).__name__, "a BlockTable made by allocate or fork")
        if table.freed:
            refuse("table", "a table that was freed", "a live table", "free and use a table only once")
        if table.pool is not self:
            refuse("table", "a table of another pool", "one that allocate or fork of this pool made")
        if len(table.blocks) != -(-table.length // self.block_size):
            held = f"{len(table.blocks)} blocks for {table.length} tokens"
            refuse("table", held, f"{self.blocks_for(table.length)} blocks of {self.block_size} tokens")

    def _refuse_size(self, argument: str, received: object, needed: int, available: int) -> None:
        text = f"{received} ({needed} new blocks of {self.block_size})"
        if needed > self.num_blocks:
            refuse(argument, text, f"at most the pool's {self.num_blocks} blocks", "use a larger pool")
        refuse(argument, text, f"at most the {available} blocks available", "wait until a table is freed")
