"""The pool: which request holds which blocks, and whether another one can be started.

- A block is published to the prefix cache when the work that wrote it has joined, never before.
- A block is freed when the last launched work that names it has joined, never before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias, cast

from labkit.cache.blocks import BlockAllocator, BlockTable
from labkit.cache.prefix import PrefixCache
from labkit.engine.admission import Claim, peak_fits
from labkit.engine.executor import Executor, Growing, Row
from labkit.engine.request import Request, Status
from labkit.errors import require

Admission: TypeAlias = Literal["peak", "now"]
"""When a request is started: when it fits even at the largest future sum of all that are started, so that
nothing started is ever taken back; or when its prompt fits now."""


class Pool:
    """The block allocator and the prefix cache, in terms of requests.

    Args:
        executor: asked for its sizes only.
        admission: see :data:`Admission`.
        prefix_cache: share the blocks of equal prefixes.

    Attributes:
        blocks, cache: the books of blocks.
        gave_back: something came back, or may fit better, since it was last cleared.
        wanted: blocks that the pool is to grow to; 0 where it is large enough, or as large as it may be.
    """

    def __init__(
        self, executor: Executor, *, admission: Admission = "peak", prefix_cache: bool = True
    ) -> None:
        require(admission in ("peak", "now"), "admission", repr(admission), '"peak" or "now"')
        self.executor, self.admission, self.prefix_cache = executor, admission, prefix_cache
        self.blocks = BlockAllocator(executor.num_blocks, executor.block_size)
        self.cache = PrefixCache(self.blocks)
        self.gave_back = True
        self.wanted = 0
        self._most = executor.num_blocks
        if isinstance(executor, Growing):
            self._most = max(self._most, executor.most_blocks)
        self._ended: dict[Request, BlockTable] = {}  # ended, but named by launched work

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can ever hold: the grown pool's, or the model's positions."""
        return min(self._most * self.blocks.block_size, self.executor.max_context)

    def fits(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether a waiting request can be started beside the running ones; if not, growth is wanted."""
        fits = self._fits(request, running)
        if not fits:
            self._want_more()
        return fits

    def grow(self) -> None:
        """Make the pool as large as is wanted. Nothing may be in flight.

        Raises:
            Exception: the executor's; the pool then stays as it is, and is not asked to grow again.
        """
        wanted, self.wanted = self.wanted, 0
        try:
            cast(Growing, self.executor).grow(wanted)
        except Exception:
            self._most = self.blocks.num_blocks
            raise
        self.blocks.grow(wanted)
        self.gave_back = True

    def _want_more(self) -> None:
        """Twice as much, in steps up to what it may be: few steps, and little that nobody needs."""
        if self.blocks.num_blocks < self._most:
            self.wanted = min(2 * self.blocks.num_blocks, self._most)

    def _fits(self, request: Request, running: Iterable[Request]) -> bool:
        tokens, blocks, running = request.token_ids, self.blocks, list(running)
        match = self.cache.match(tokens, salt=request.salt).blocks if self.prefix_cache else ()
        if self.admission == "now":
            # A block of reserve for each that runs, or what was just taken back would start at once.
            return blocks.can_allocate(len(tokens) + len(running) * blocks.block_size, match)
        new = range(-1, len(match) - blocks.blocks_for(len(tokens)) - 1, -1)  # ids of blocks to come
        claims = [Claim([*match, *new], len(tokens), _growth(request, len(tokens)), settled=False)]
        for one in running:
            assert one.table is not None
            length = one.table.length
            claims.append(Claim(one.table.blocks, length, _growth(one, length), one.status is Status.DECODE))
        claims += [Claim(table.blocks, table.length, 0, settled=False) for table in self._ended.values()]
        # With works that run ahead, a row's last blocks come back one step later.
        lag = 1 if self.executor.feeds else 0
        return peak_fits(claims, blocks.num_blocks, blocks.block_size, lag=lag)

    def start(self, request: Request) -> None:
        """Blocks for all tokens that it has; what the prefix cache knows counts as computed."""
        tokens, cached = request.token_ids, 0
        if self.prefix_cache:
            request.table, cached = self.cache.allocate(tokens, salt=request.salt)
        else:
            request.table = self.blocks.allocate(len(tokens))
        request.cached_len = request.computed_len = request.launched_len = cached

    def extend(self, request: Request, stop: int) -> bool:
        """See that its table holds ``stop`` tokens; False, and growth is wanted, if a block is missing."""
        table = request.table
        assert table is not None
        if (more := stop - table.length) > 0:
            # Nothing is ever forked here, so a partial last block has one table, and no copies come back.
            room = -table.length % self.blocks.block_size
            if more > room and not self.blocks.can_append(table, more):
                self._want_more()
                return False
            self.blocks.append(table, more)
        return True

    def can_extend_by_one(self, requests: Iterable[Request]) -> bool:
        """Whether all of these could take one token more, together."""
        size = self.blocks.block_size
        needed = sum(one.table is not None and one.table.length % size == 0 for one in requests)
        return needed <= self.blocks.num_available

    def publish(self, row: Row) -> None:
        """The work of a row has joined: the blocks that it filled can be matched."""
        size = self.blocks.block_size
        if self.prefix_cache and row.stop // size > row.start // size:
            request = row.request
            self.cache.publish(row.table, request.token_ids, row.stop, salt=request.salt)

    def take_back(self, request: Request) -> None:
        """The blocks of a request that is to be computed again later, and has nothing in flight."""
        self._free(request)
        request.cached_len = request.computed_len = request.launched_len = 0

    def end(self, request: Request) -> None:
        """A request has ended; its blocks come back now, or at its last join."""
        if request.busy:
            assert request.table is not None
            self._ended[request] = request.table
        else:
            self._free(request)
        self.gave_back = True

    def joined(self, request: Request) -> None:
        """One launched work less names the blocks of a request that has ended."""
        if not request.busy:
            self._ended.pop(request, None)
            self._free(request)

    def validate(self, running: Iterable[Request]) -> None:
        """Recompute all books.

        Raises:
            CacheError: with every disagreement found.
        """
        tables = [request.table for request in running] + list(self._ended.values())
        self.blocks.validate(table for table in tables if table is not None)
        self.cache.validate()

    def _free(self, request: Request) -> None:
        if request.table is not None:
            self.blocks.free(request.table)
            request.table = None
            self.gave_back = True


def _growth(request: Request, length: int) -> int:
    """Tokens that its table may still grow by; the last token needs no slot, as nothing attends to it."""
    return request.prompt_len + request.max_new - 1 - length
