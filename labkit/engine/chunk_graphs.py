"""Prompt chunks and mixed steps as CUDA graphs, for the sizes at which launching takes longer than computing.

A step of any rows is padded to a number of tokens: padding tokens have slot -1, which nothing is written to,
and belong to no tile of queries; padding tiles begin behind their row. So a graph serves every mix of chunks
and decode rows of that size. The bits are those of the same launches without a graph. On a CPU the padded
step runs in the emulator, launch by launch.

T tokens of the step, padded; B rows, always the most; NB blocks of a block table; S rows that sample, padded;
n tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from labkit.cache.blocks import slots_of
from labkit.cache.paged import PagedKV
from labkit.cache.views import KVView
from labkit.engine.executor import Row
from labkit.engine.executor_graphs import Captured, capacities_for
from labkit.engine.lanes import AnyLane, StreamLane
from labkit.errors import require
from labkit.models.sampling import greedy
from labkit.models.step_model import StepModel
from labkit.nn.attention import query_tile

MOST_TOKENS = 640
"""Larger steps are launched one kernel after the other: the device takes longer than the host."""

_FINE, _STEP = 128, 64  # sizes grow by halves up to the first, then by the second

_FEW_SAMPLES = 8

Key = tuple[int, int, int]
"""T, capacity of the block tables in tokens, S."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Host side of one step: its key, and the values of every part of the buffer in order (see _Parts)."""

    key: Key
    samples: int
    longs: tuple[list[int], ...]  # token ids, slots, picked rows
    ints: tuple[list[int], ...]  # positions, lengths, query starts, tiles
    tables: list[list[int]]


class _Parts:
    """Where the inputs of a key lie in the buffer, each on 16 bytes: int64 first, then int32."""

    def __init__(self, key: Key, rows: int, block_size: int, queries: int) -> None:
        tokens, capacity, samples = key
        self.width = capacity // block_size
        # As many tiles as tokens would mean a token a tile (labkit.kernels.paged_attention).
        tiles = tokens if queries == 1 else rows + tokens // queries
        tiles += queries > 1 and tiles == tokens
        self.tiles, self.rows = tiles, rows
        self.longs = _places(0, 8, (tokens, tokens, samples))
        begin = self.longs[-1][1]
        self.ints = _places(begin, 4, (tokens, rows, rows + 1, 2 * tiles, rows * self.width))
        self.nbytes = self.ints[-1][1]


class ChunkGraphs:
    """Steps of one lane.

    Args:
        model: layers and head.
        kv: the pool.
        max_rows: most rows of a step.
        max_tokens: most new tokens of a step.
        max_context: most tokens of a row.
        capture: make graphs; by default on a GPU.

    Attributes:
        sizes: padded numbers of tokens.
    """

    def __init__(
        self,
        model: StepModel,
        kv: PagedKV,
        *,
        max_rows: int,
        max_tokens: int,
        max_context: int,
        capture: bool | None = None,
    ) -> None:
        require(not kv.head_major, "kv", "head-major storage", "PagedKV(head_major=False) for kernels")
        self.model, self.kv, self.max_rows, self.max_context = model, kv, max_rows, max_context
        capture = model.device.type == "cuda" if capture is None else capture
        self.captured = Captured(kv, capture)
        self.sizes = _sizes(min(max_tokens, MOST_TOKENS))
        self.capacities = capacities_for(max_context, kv.block_size)
        few = min(_FEW_SAMPLES, max_rows)
        whole = model.head_rows(few) >= max_rows  # a dense head computes as many either way
        self.samples = sorted({0, max_rows if whole else few, max_rows})
        self._queries = query_tile(model.config.group)
        largest = self._parts((self.sizes[-1], self.capacities[-1], self.samples[-1]))
        with torch.inference_mode(False):
            self._memory = torch.zeros(largest.nbytes, dtype=torch.uint8, device=model.device)
            self._found = torch.zeros(max_rows, dtype=torch.int64, device=model.device)
            self._logits = torch.zeros(
                model.head_rows(max_rows), model.config.vocab_size, dtype=model.dtype, device=model.device
            )

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether there is a graph for so many tokens; none for rows that are fed."""
        return sum(row.count for row in rows) <= self.sizes[-1] and not any(row.fed for row in rows)

    def fill_of(self, rows: Sequence[Row]) -> ChunkRows:
        """What goes to the device for a step.

        Raises:
            InputError: a table that does not hold the new tokens.
        """
        size, most = self.kv.block_size, self.max_rows
        ids: list[int] = []
        slots: list[int] = []
        picks: list[int] = []
        positions: list[int] = []
        tiles: list[int] = []
        lengths, starts, tables = [], [0], []
        for number, row in enumerate(rows):
            table, stop = row.table, row.stop
            enough = not table.freed and stop <= min(len(table.blocks) * size, self.max_context)
            require(
                enough, "rows", f"{table.length} slots for {stop} tokens", "a live table with room for them"
            )
            ids += row.tokens
            slots += slots_of(table, row.start, stop, size)
            positions += range(row.start, stop)
            lengths.append(row.start)
            starts.append(starts[-1] + row.count)
            for first in range(0, row.count, self._queries):
                tiles += (number, first)
            if row.samples:
                picks.append(starts[-1] - 1)
            tables.append(table.blocks[: -(-stop // size)])
        longest = max(row.stop for row in rows)
        key = (
            next(n for n in self.sizes if n >= len(ids)),
            next(n for n in self.capacities if n >= longest),
            next(n for n in self.samples if n >= len(picks)),
        )
        starts += [starts[-1]] * (most - len(rows))
        return ChunkRows(key, len(picks), (ids, slots, picks), (positions, lengths, starts, tiles), tables)

    @torch.inference_mode()
    def run(self, step: ChunkRows, lane: AnyLane) -> Tensor | None:
        """Queue a step on the lane, whose stream is current.

        Returns:
            int64 [S] on the device for :meth:`outputs_of`; the next step overwrites them. None where no row
            samples.
        """
        key = step.key
        if not self.captured.holds(key):
            self._record(key, lane)
        self._send(step, lane)
        self.captured.run(key, self._work(key))
        return self._found if step.samples else None

    def outputs_of(self, step: ChunkRows, found: Tensor | None) -> list[tuple[int, Tensor]]:
        """Most likely token of every row that samples, -1 where the logits are of no use, and its logits.

        Args:
            found: on the host, of :meth:`run`.
        """
        if found is None:
            return []
        return list(zip(found[: step.samples].tolist(), self._logits[: step.samples], strict=True))

    @torch.inference_mode()
    def warm(self, lane: AnyLane) -> None:
        """Capture every size now, so that no step has to."""
        with lane.launching():
            for key in itertools.product(self.sizes, self.capacities, self.samples):
                if not self.captured.holds(key):
                    self._record(key, lane)

    # --- inside --------------------------------------------------------------------------------------------

    def _parts(self, key: Key) -> _Parts:
        return _Parts(key, self.max_rows, self.kv.block_size, self._queries)

    def _record(self, key: Key, lane: AnyLane) -> None:
        """Capture a step; it runs once on padding alone, which writes and finds nothing."""
        assert isinstance(lane, StreamLane)
        starts = [0] * (self.max_rows + 1)
        self._send(ChunkRows(key, 0, ([], [], []), ([], [], starts, []), []), lane)
        self.captured.record(key, self._work(key), lane.stream)

    def _work(self, key: Key) -> Callable[[], None]:
        """The launches of a step."""

        def work() -> None:
            view, tokens, picks = self._inputs(key)
            hidden = self.model.forward(tokens, self.kv, view)
            if key[2]:
                logits = self.model.logits(hidden.index_select(0, picks), out=self._logits)
                self._found[: key[2]].copy_(greedy(logits))

        return work

    def _inputs(self, key: Key) -> tuple[KVView, Tensor, Tensor]:
        """A view of the padded step, its token ids and its picked rows, all in the buffer."""
        parts, rows = self._parts(key), self.max_rows
        ids, slots, picks = (self._memory[a:b].view(torch.int64) for a, b in parts.longs)
        ints = [self._memory[a:b].view(torch.int32) for a, b in parts.ints]
        tokens, capacity, samples = key
        positions, lengths, starts, tiles, tables = ints
        view = KVView(
            block_tables=tables[: rows * parts.width].view(rows, parts.width),
            lengths=lengths[:rows],
            query_starts=starts[: rows + 1],
            positions=positions[:tokens],
            slots=slots[:tokens],
            tiles=tiles[: 2 * parts.tiles].view(parts.tiles, 2),
            counts=(tokens, *(0,) * (rows - 1)),
            contexts=(capacity,) * rows,
            max_context=capacity,
            block_size=self.kv.block_size,
            num_blocks=self.kv.num_blocks,
            padded=True,
        )
        return view, ids[:tokens], picks[:samples]

    def _send(self, step: ChunkRows, lane: AnyLane) -> None:
        parts, tokens = self._parts(step.key), step.key[0]

        def fill(buffer: Tensor) -> None:
            raw = buffer.numpy()
            raw[:] = 0
            for (begin, end), values in zip(parts.longs, step.longs, strict=True):
                raw[begin:end].view(np.int64)[: len(values)] = values
            begin, end = parts.longs[1]
            raw[begin:end].view(np.int64)[len(step.longs[1]) :] = -1
            for (begin, end), values in zip(parts.ints[:-1], step.ints, strict=True):
                raw[begin:end].view(np.int32)[: len(values)] = values
            begin, end = parts.ints[3]
            used = len(step.ints[3]) // 2
            behind = raw[begin:end].view(np.int32)[: 2 * parts.tiles].reshape(-1, 2)[used:]
            behind[:] = parts.rows - 1, tokens + 1
            begin, end = parts.ints[4]
            cells = parts.rows * parts.width
            tables = raw[begin:end].view(np.int32)[:cells].reshape(parts.rows, parts.width)
            for row, blocks in enumerate(step.tables):
                tables[row, : len(blocks)] = blocks

        lane.copy_to(self._memory, parts.nbytes, fill)


def _sizes(most: int) -> list[int]:
    """Padded numbers of tokens: 16, 24, 32, 48 … 128, 192, 256 … and the most."""
    halves = [size for power in range(4, 8) for size in (1 << power, 3 << (power - 1))]
    sizes = [*(size for size in halves if size <= _FINE), *range(_FINE + _STEP, most, _STEP)]
    return [*(size for size in sizes if size < most), most]


def _places(begin: int, width: int, counts: Sequence[int]) -> list[tuple[int, int]]:
    """First and last byte of parts of so many numbers, each on 16 bytes."""
    found = []
    for count in counts:
        end = begin + -(-count * width // 16) * 16
        found.append((begin, end))
        begin = end
    return found
