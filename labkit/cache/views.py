"""What one step reads and writes in the paged KV: block tables, lengths, slots and tiles as tensors.

B rows (sequences), T new tokens of all rows, row after row, NB blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from labkit.cache import sizes
from labkit.cache.blocks import BlockTable, slots_of, whole
from labkit.errors import refuse, require
from labkit.quant.packing import describe

_ALIGN = 16  # bytes: each part of the buffer starts where a vector load may


@dataclass(frozen=True, slots=True)
class KVView:
    """One step: row b computes counts[b] tokens behind the lengths[b] that it holds.

    Attributes:
        block_tables: int32 [B, NB], unused entries 0.
        lengths: int32 [B], tokens of the row before its new ones.
        query_starts: int32 [B + 1], the row's first token among the T; the last entry is T.
        positions: int32 [T], place of each new token in its sequence.
        slots: int64 [T], where its key and value go.
        tiles: int32 [n, 2], (row, first query of the row) of every tile of queries.
        counts: new tokens of each row.
        contexts: tokens of each row with the new ones: what its last token attends to.
        max_context: the largest of them.
        block_size: token slots a block.
        num_blocks: a pool must have at least so many for these tables.
        query_tile: queries of a tile at most; 0 where the maker of the tiles answers for them.
        padded: counts and contexts are bounds; what each row really has is known on the device alone.
    """

    block_tables: Tensor
    lengths: Tensor
    query_starts: Tensor
    positions: Tensor
    slots: Tensor
    tiles: Tensor
    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    max_context: int
    block_size: int
    num_blocks: int
    query_tile: int = 0
    padded: bool = False

    def __post_init__(self) -> None:
        rows, tokens = len(self.counts), sum(self.counts)
        blocks = -(-self.max_context // self.block_size)
        expected: tuple[tuple[str, Tensor, torch.dtype, tuple[int, ...]], ...] = (
            ("block_tables", self.block_tables, torch.int32, (rows, blocks)),
            ("lengths", self.lengths, torch.int32, (rows,)),
            ("query_starts", self.query_starts, torch.int32, (rows + 1,)),
            ("positions", self.positions, torch.int32, (tokens,)),
            ("slots", self.slots, torch.int64, (tokens,)),
            ("tiles", self.tiles, torch.int32, (self.tiles.shape[0], 2)),
        )
        for name, tensor, dtype, shape in expected:
            if tensor.dtype != dtype or tensor.shape != shape:
                refuse(name, describe(tensor), f"{str(dtype).removeprefix('torch.')} {list(shape)}")
        require(len(self.contexts) == rows, "contexts", len(self.contexts), f"one a row: {rows}")

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.slots.device

    @property
    def tokens(self) -> int:
        """T."""
        return self.slots.shape[0]


class Event(Protocol):
    """What a ring needs of a CUDA event."""

    def query(self) -> bool:
        """Whether the copy in front of it has run."""
        ...

    def record(self) -> None:
        """Mark the place behind the copy that was queued last."""
        ...


@dataclass
class _Slot:
    buffer: Tensor
    event: Event


class StagingRing:
    """Host buffers for copies that run later; one whose copy has not run is never handed out.

    Args:
        make_buffer: ``make_buffer(nbytes)``, a uint8 tensor of at least so many bytes, pinned on a GPU.
        make_event: a fresh event.

    Attributes:
        made: buffers made so far. Where the device keeps up, two.
    """

    def __init__(self, make_buffer: Callable[[int], Tensor], make_event: Callable[[], Event]) -> None:
        self._make_buffer, self._make_event = make_buffer, make_event
        self._slots: list[_Slot] = []  # each with a recorded event, the one used longest ago in front
        self.made = 0

    def copy(self, nbytes: int, fill: Callable[[Tensor], None], send: Callable[[Tensor], Any]) -> Any:
        """Fill a free buffer, send it, and guard it until the copy has run.

        Args:
            nbytes: wanted.
            fill: writes a uint8 buffer [nbytes].
            send: queues its copy on the current stream; what it returns is returned.
        """
        slot = self._free(nbytes)
        view = slot.buffer[:nbytes]
        fill(view)
        try:
            return send(view)
        finally:
            # Also when it failed: a copy may have been queued before.
            slot.event.record()
            self._slots.append(slot)

    def _free(self, nbytes: int) -> _Slot:
        """A buffer of which nothing is pending, taken out of the ring."""
        # All are asked: on another stream a later copy may have run before an earlier one.
        for place, slot in enumerate(self._slots):
            if slot.event.query():
                del self._slots[place]
                if slot.buffer.numel() >= nbytes:
                    return slot
                break  # outgrown: it goes
        self.made += 1
        return _Slot(self._make_buffer(1 << max(10, (nbytes - 1).bit_length())), self._make_event())

    def __len__(self) -> int:
        return len(self._slots)


class ViewBuilder:
    """Makes the views of a device's steps. One builder belongs to one thread.

    On a GPU all of a view is one pinned buffer and one copy, queued on the current stream: the host waits
    for nothing, and the view may be used on that stream alone (or after waiting for it).

    Args:
        device: where the views go.
        block_size: of the pool.
        query_tile: queries of a tile of the prefill kernel; labkit.kernels.paged_attention.query_tile.
        ring: staging buffers; None makes them as the device wants it.
    """

    def __init__(
        self,
        device: torch.device | str,
        block_size: int,
        query_tile: int,
        *,
        ring: StagingRing | None = None,
    ) -> None:
        sizes.check_block_size(block_size)
        whole("query_tile", query_tile, 1)
        self.device, self.block_size, self.query_tile = torch.device(device), block_size, query_tile
        if ring is None and self.device.type == "cuda":
            ring = StagingRing(_pinned, torch.cuda.Event)
        self.ring = ring

    def build(
        self, tables: Sequence[BlockTable], counts: Sequence[int], *, starts: Sequence[int] | None = None
    ) -> KVView:
        """The view of a step.

        Args:
            tables: one for each row; they already hold the slots of the new tokens.
            counts: new tokens of each row, at least 1.
            starts: tokens that each row has computed before; by default ``table.length - count``, right
                where the slots were appended for this step. A prompt in chunks has slots for all of it.

        Raises:
            InputError: another number of rows, a count below 1, or tokens that a table does not hold.
        """
        rows, size = len(tables), self.block_size
        require(rows >= 1 and len(counts) == rows, "counts", f"{len(counts)} for {rows} tables", "one a row")
        if starts is None:
            starts = [table.length - count for table, count in zip(tables, counts, strict=True)]
        require(len(starts) == rows, "starts", f"{len(starts)} for {rows} tables", "one a row")
        contexts: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        tiles: list[int] = []
        query_starts, used, top = [0], [], 0
        for row, (table, count, start) in enumerate(zip(tables, counts, starts, strict=True)):
            wrong = count < 1 or start < 0 or start + count > table.length or table.freed
            if wrong or len(table.blocks) != -(-table.length // size):
                self._refuse_row(row, table, count, start)
            stop = start + count
            slots += slots_of(table, start, stop, size)
            positions += range(start, stop)
            for first in range(0, count, self.query_tile):
                tiles += (row, first)
            query_starts.append(query_starts[-1] + count)
            contexts.append(stop)
            used.append(table.blocks[: -(-stop // size)])
            top = max(top, max(used[-1]))
        width = max(len(blocks) for blocks in used)
        # int64 first, then the int32 parts, each on its own 16 bytes: (first byte, last, shape, values).
        parts, total = [], _aligned(8 * len(slots))
        flat = [block for blocks in used for block in (*blocks, *(0,) * (width - len(blocks)))]
        for values, shape in (
            (flat, (rows, width)),
            (starts, (rows,)),
            (query_starts, (rows + 1,)),
            (positions, (len(slots),)),
            (tiles, (len(tiles) // 2, 2)),
        ):
            parts.append((total, total + 4 * len(values), shape, values))
            total += _aligned(4 * len(values))

        def fill(buffer: Tensor) -> None:
            raw = buffer.numpy()
            raw[: 8 * len(slots)].view(np.int64)[:] = slots
            for begin, end, _, values in parts:
                raw[begin:end].view(np.int32)[:] = values

        buffer = self._sent(total, fill)
        made = [buffer[begin:end].view(torch.int32).view(shape) for begin, end, shape, _ in parts]
        return KVView(
            block_tables=made[0],
            lengths=made[1],
            query_starts=made[2],
            positions=made[3],
            slots=buffer[: 8 * len(slots)].view(torch.int64),
            tiles=made[4],
            counts=tuple(counts),
            contexts=tuple(contexts),
            max_context=max(contexts),
            block_size=size,
            num_blocks=top + 1,
            query_tile=self.query_tile,
        )

    def _sent(self, nbytes: int, fill: Callable[[Tensor], None]) -> Tensor:
        if self.ring is None:  # host memory: the buffer itself, a new one for each view
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            fill(buffer)
            return buffer.to(self.device)

        def send(staged: Tensor) -> Tensor:
            there = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            return there.copy_(staged, non_blocking=True)

        # The event belongs to the stream of the copy, which is the device's own.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            sent: Tensor = self.ring.copy(nbytes, fill, send)
        return sent

    def _refuse_row(self, row: int, table: BlockTable, count: int, start: int) -> None:
        require(not table.freed, "tables", f"row {row}: a table that was freed", "a live one")
        require(count >= 1, "counts", f"{count} in row {row}", "at least 1")
        blocks = -(-table.length // self.block_size)
        held = f"row {row}: {len(table.blocks)} blocks for {table.length} tokens"
        wanted = f"{blocks} blocks of {self.block_size}, the builder's block size"
        require(len(table.blocks) == blocks, "tables", held, wanted)
        refuse(
            "tables",
            f"row {row}: {table.length} slots for positions {start} to {start + count}",
            "a table that holds the new tokens",
            "append before the view is built",
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
