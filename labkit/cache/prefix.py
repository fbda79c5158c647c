"""Prefix cache: full blocks that a new prompt may share, found by content.

Every full block has a key: a hash chained over the tenant's salt, the parent block's key and the block's
token ids. The key only finds a candidate. What is served has been compared: the token ids of the block,
and its parent, which was compared before it; so no collision can hand out another prompt's keys and
values.

Content is published once the work that wrote it has joined, never before: a match is read at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from labkit.cache.blocks import BlockAllocator, BlockTable, CacheError, whole
from labkit.errors import refuse, require

Hasher = Callable[[str, bytes, tuple[int, ...]], bytes]  # salt, parent's key (empty at the root), token ids


def chained_hash(salt: str, parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """Key of a block: 16 bytes of BLAKE2b over (salt, parent key, token ids).

    Raises:
        InputError: token ids that are not whole numbers of 64 bits.
    """
    try:
        ids = array("q", tokens)
    except (TypeError, OverflowError):
        refuse("tokens", list(tokens), "whole numbers of 64 bits")
    text = salt.encode(errors="surrogatepass")  # JSON can carry half a surrogate pair
    head = len(text).to_bytes(8, "little")  # where the salt ends; parent and ids have fixed lengths
    return blake2b(b"".join((head, text, parent, ids)), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One full block whose content can be matched.

    Attributes:
        block: block id.
        key: its hash.
        salt: tenant.
        parent: the entry of the block before it; None at the start of a prompt.
        tokens: its token ids.
        children: entries that continue it; forgotten together with it, as they could not be reached.
        alive: cleared when the entry is forgotten.
    """

    block: int
    key: bytes
    salt: str
    parent: CachedBlock | None = field(repr=False)
    tokens: tuple[int, ...]
    children: dict[CachedBlock, None] = field(default_factory=dict, repr=False)
    alive: bool = True


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of a prompt.

    Attributes:
        blocks: its blocks, in order.
        length: its tokens.
        entries: the cache's entries of these blocks.
    """

    blocks: tuple[int, ...]
    length: int
    entries: tuple[CachedBlock, ...] = field(repr=False, compare=False)


class PrefixCache:
    """Finds shared prefixes for new tables and keeps the content of released blocks.

    Args:
        allocator: pool of the blocks; one prefix cache a pool.
        hasher: (salt, parent key, token ids) → key. Its collisions cost hits, never correctness.

    Attributes:
        queries: prompt tokens looked up, by :meth:`allocate` alone.
        hits: those of them found in the cache.

    Raises:
        InputError: an allocator that has a prefix cache already; in every method, empty prompts, a salt
            that is not text, freed tables.
    """

    def __init__(self, allocator: BlockAllocator, *, hasher: Hasher = chained_hash) -> None:
        require(
            isinstance(allocator, BlockAllocator), "allocator", type(allocator).__name__, "BlockAllocator"
        )
        require(allocator.on_evict is None, "allocator", "one with a prefix cache", "one without")
        allocator.on_evict = self._evicted
        self.allocator = allocator
        self.hasher = hasher
        self.queries = self.hits = 0
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}

    @property
    def num_cached(self) -> int:
        """Blocks that can be matched, used and idle ones."""
        return len(self._by_block)

    def match(self, tokens: Sequence[int], *, salt: str = "") -> PrefixMatch:
        """The longest cached prefix in whole blocks; changes nothing.

        At least one token is left over: a prompt's last token must be computed for its logits.
        """
        self._check_prompt(tokens, salt)
        size = self.allocator.block_size
        entries: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for start in range(0, self._shareable(len(tokens)), size):
            part = tuple(tokens[start : start + size])
            entry = self._by_key.get(self._key(salt, parent, part))
            if entry is None or not self._same(entry, salt, parent, part):
                break
            entries.append(entry)
            parent = entry
        blocks = tuple(entry.block for entry in entries)
        return PrefixMatch(blocks, len(blocks) * size, tuple(entries))

    def can_allocate(self, tokens: Sequence[int], *, salt: str = "") -> bool:
        """Whether :meth:`allocate` would succeed now."""
        self._check_prompt(tokens, salt)
        # Sharing never needs more than this: a matched block is used, or idle and so itself available.
        if self.allocator.can_allocate(len(tokens)):
            return True
        return self.allocator.can_allocate(len(tokens), self.match(tokens, salt=salt).blocks)

    def allocate(self, tokens: Sequence[int], *, salt: str = "") -> tuple[BlockTable, int]:
        """A table for all of ``tokens``, and how many of them are cached: 0 to len(tokens) − 1."""
        match = self.match(tokens, salt=salt)
        table = self.allocator.allocate(len(tokens), match.blocks)
        table.published = list(match.entries)
        self.queries += len(tokens)
        self.hits += match.length
        return table, match.length

    def publish(self, table: BlockTable, tokens: Sequence[int], computed: int, *, salt: str = "") -> None:
        """Make the full blocks among the first ``computed`` tokens matchable.

        Call it when the work that wrote them has joined; goes on where the last call stopped. Of equal
        content the block published first stays. Under a key that other content holds nothing is
        published, nor anything behind it.

        Args:
            table: blocks of the sequence.
            tokens: its token ids, at least ``computed``.
            computed: tokens whose keys and values are in the table's slots, on every layer.
        """
        self.allocator.check_table(table)
        require(isinstance(salt, str), "salt", repr(salt), "text")
        whole("computed", computed, 0)
        most = min(len(tokens), table.length)
        require(computed <= most, "computed", computed, f"at most {most} (tokens given, table's length)")
        size, chain = self.allocator.block_size, table.published
        while chain and not chain[-1].alive:
            chain.pop()
        if chain and chain[-1].salt != salt:
            refuse("salt", repr(salt), f"{chain[-1].salt!r}, as when the table's first blocks were published")
        for index in range(len(chain), computed // size):
            parent = chain[-1] if chain else None
            part = tuple(tokens[index * size : (index + 1) * size])
            key = self._key(salt, parent, part)
            entry = self._by_key.get(key)
            if entry is None:
                entry = self._add(CachedBlock(table.blocks[index], key, salt, parent, part))
            elif not self._same(entry, salt, parent, part):
                return
            chain.append(entry)

    def clear(self) -> None:
        """Forget everything; idle blocks become free, counters stay."""
        for entry in [entry for entry in self._by_block.values() if entry.parent is None]:
            self._forget(entry)
            self.allocator.drop(entry.block)

    def validate(self) -> None:
        """Compare the entries with each other and with the allocator's books.

        Raises:
            CacheError: with every disagreement found.
        """
        findings: list[str] = []
        for block, entry in self._by_block.items():
            name = f"cached block {block}"
            if not entry.alive or entry.block != block:
                findings.append(f"{name} is listed under a stale entry of block {entry.block}")
            if self._by_key.get(entry.key) is not entry:
                findings.append(f"{name} is not found under its key")
            if not self.allocator.is_kept(block):
                findings.append(f"{name} is not kept by the allocator")
            if entry.key != self._key(entry.salt, entry.parent, entry.tokens):
                findings.append(f"{name} has the key of other content")
            if len(entry.tokens) != self.allocator.block_size:
                findings.append(f"{name} holds {len(entry.tokens)} token ids")
            parent = entry.parent
            if parent is not None and (not parent.alive or entry not in parent.children):
                findings.append(f"{name} hangs on block {parent.block}, which has forgotten it")
            if any(child.parent is not entry or not child.alive for child in entry.children):
                findings.append(f"{name} has a child that is not its own")
        kept = sum(self.allocator.is_kept(block) for block in range(self.allocator.num_blocks))
        if not kept == len(self._by_block) == len(self._by_key):
            findings.append(f"{kept} kept blocks, {len(self._by_block)} cached, {len(self._by_key)} keys")
        if findings:
            raise CacheError(findings)

    def _shareable(self, tokens: int) -> int:
        """Tokens of a prompt that may come from the cache: whole blocks, and at least one is left."""
        return (tokens - 1) // self.allocator.block_size * self.allocator.block_size

    def _key(self, salt: str, parent: CachedBlock | None, tokens: tuple[int, ...]) -> bytes:
        return self.hasher(salt, parent.key if parent is not None else b"", tokens)

    def _same(
        self, entry: CachedBlock, salt: str, parent: CachedBlock | None, tokens: tuple[int, ...]
    ) -> bool:
        """Whether an entry found by key is this very prefix; the parent was compared before."""
        return entry.tokens == tokens and entry.parent is parent and entry.salt == salt

    def _add(self, entry: CachedBlock) -> CachedBlock:
        self.allocator.keep(entry.block)
        self._by_key[entry.key] = self._by_block[entry.block] = entry
        if entry.parent is not None:
            entry.parent.children[entry] = None
        return entry

    def _evicted(self, block: int) -> None:
        """The allocator hands out a block, or lets its table overwrite it."""
        self._forget(self._by_block[block])

    def _forget(self, top: CachedBlock) -> None:
        """Remove an entry and all that hangs on it; the allocator keeps none but ``top`` afterwards."""
        if top.parent is not None:
            del top.parent.children[top]
        entries = [top]
        for entry in entries:  # grows on the way
            entries.extend(entry.children)
            entry.alive = False
            entry.children = {}
            del self._by_key[entry.key], self._by_block[entry.block]
            if entry is not top:
                self.allocator.drop(entry.block)

    def _check_prompt(self, tokens: Sequence[int], salt: str) -> None:
        require(isinstance(salt, str), "salt", repr(salt), "text")
        require(len(tokens) > 0, "tokens", "an empty prompt", "at least one token id")
