"""Decode steps as CUDA graphs: one for each padded number of rows and each capacity of the block tables.

A replay computes one token of every row: ids, lengths and block tables go to the device in one copy, the
step is labkit.models.decode_step over the engine's pool, and the most likely tokens stay on the device, so
that a row of the next step can be fed with one before the host has seen it. Padding rows have length -1: the
kernels leave them alone. On a CPU the same step runs in the emulator, launch by launch.

B rows of the step, padded; NB blocks of a block table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.cache.paged import PagedKV
from labkit.engine.executor import Row
from labkit.engine.lanes import AnyLane, StreamLane
from labkit.engine.request import Request, Status
from labkit.errors import require
from labkit.kernels.capture import capturing
from labkit.kernels.greedy import GreedyState
from labkit.kernels.paged_attention import Plan, Scratch, plan
from labkit.kernels.paged_plan import multiprocessors_of
from labkit.models.decode_step import DecodeStep, StepBuffers
from labkit.models.step_model import HEAD_ROWS, StepModel

FIRST_CAPACITY = 1024
"""Tokens of the smallest graphs' sequences; the next have four times as many, up to the longest context."""


class Captured:
    """Launches that are captured once and replayed: a graph for each key, one memory pool for all.

    They must never run at once: all belong to one lane.

    Args:
        kv: graphs are dropped when its addresses have changed.
        capture: False launches everything anew each time.
    """

    def __init__(self, kv: PagedKV, capture: bool) -> None:
        self.kv, self.capture = kv, capture
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._generation = kv.generation

    def __len__(self) -> int:
        return len(self._graphs)

    def holds(self, key: Any) -> bool:
        """Whether a run with this key captures nothing."""
        self.look()
        return not self.capture or key in self._graphs

    def look(self) -> bool:
        """Drop everything if the pool has moved; whether it had."""
        moved = self._generation != self.kv.generation
        if moved:
            self._graphs.clear()
            self._pool = None  # its memory goes with the last graph
            self._generation = self.kv.generation
        return moved

    def run(self, key: Any, work: Callable[[], None]) -> None:
        """Queue ``work`` on the current stream: a replay where it is captured."""
        graph = self._graphs.get(key)
        if graph is None:
            work()
        else:
            graph.replay()

    def record(self, key: Any, work: Callable[[], None], stream: torch.cuda.Stream) -> None:
        """Capture ``work``, which is run once before: that loads and prepares whatever a capture may not."""
        with torch.cuda.device(stream.device):
            work()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # "thread_local": what other threads do meanwhile is theirs.
            with capturing(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                work()
            self._pool = graph.pool()
        self._graphs[key] = graph


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Host side of one step.

    Attributes:
        rows, capacity: of the graph that runs it.
        ids: token of each row, where the host knows it.
        sources: row of the last step that finds the token; -1 where ``ids`` has it.
        lengths: tokens of each row before the new one.
        tables: block table of each row.
        requests: whose rows they are.
    """

    rows: int
    capacity: int
    ids: list[int]
    sources: list[int]
    lengths: list[int]
    tables: list[list[int]]
    requests: list[Request]


class DecodeGraphs:
    """The decode lane's steps and the buffers that they share.

    All that crosses between host and device lies in one buffer, in this order, for M = ``max_batch`` rows:
    found tokens int64 [M], given ids int64 [M], sources int64 [M], lengths int32 [M], status int32 [M], block
    tables int32 [B, NB]. A step is sent everything from the given ids on, and gives back everything up to
    the block tables.

    Args:
        model: weights and products.
        kv: the pool.
        max_batch: most rows.
        max_context: most tokens of a row.
        capture: make graphs; by default on a GPU.

    Attributes:
        logits: [M, V], of the last step.
    """

    def __init__(
        self,
        model: StepModel,
        kv: PagedKV,
        *,
        max_batch: int,
        max_context: int,
        capture: bool | None = None,
    ) -> None:
        require(not kv.head_major, "kv", "head-major storage", "PagedKV(head_major=False) for kernels")
        self.model, self.kv, self.max_context = model, kv, max_context
        capture = model.device.type == "cuda" if capture is None else capture
        self.captured = Captured(kv, capture)
        # A multiple of four keeps every part on 16 bytes.
        self.max_batch = most = -(-max_batch // 4) * 4
        self.sizes = _sizes(most)
        self.capacities = capacities_for(max_context, kv.block_size)
        config, device = model.config, model.device
        width = self.capacities[-1] // kv.block_size
        with torch.inference_mode(False):
            self._memory = torch.zeros(32 * most + 4 * most * width, dtype=torch.uint8, device=device)
            self._buffers = StepBuffers.new(config, model.weights, most, HEAD_ROWS)
            self._inputs = torch.zeros(most, dtype=torch.int64, device=device)
            whole = GreedyState.new(most, self.capacities[-1], device)
        longs = self._memory[: 24 * most].view(torch.int64)
        self._known, self._sources = longs[: 2 * most], longs[2 * most :]
        ints = self._memory[24 * most : 32 * most].view(torch.int32)
        self._state = replace(whole, tokens=longs[:most], lengths=ints[:most], status=ints[most:])
        self.logits = self._buffers.logits[:most]
        self._scratch = self._largest_scratch()
        self._steps: dict[tuple[int, int], DecodeStep] = {}
        self._last: dict[Request, int] = {}

    # --- a step --------------------------------------------------------------------------------------------

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether the rows are a decode step. The last token of a prompt is none: it may be computed beside
        one, and each has logits of its own."""
        decodes = all(row.count == 1 and row.samples for row in rows) and len(rows) <= self.max_batch
        return decodes and all(row.request.status is Status.DECODE for row in rows)

    def fill_of(self, rows: Sequence[Row]) -> DecodeRows:
        """What goes to the device for a step.

        Raises:
            InputError: a table that does not hold the new token, or a fed row that the last step had not.
        """
        size, ids, sources, lengths, tables = self.kv.block_size, [], [], [], []
        for row in rows:
            used = -(-row.stop // size)
            held = len(row.table.blocks)
            enough = not row.table.freed and used <= held and row.stop <= self.max_context
            require(enough, "rows", f"{held} blocks for {row.stop} tokens", "a live table with room for them")
            tables.append(row.table.blocks[:used])
            lengths.append(row.start)
            if row.fed:
                require(row.request in self._last, "rows", "a fed row", "one that the last step computed")
                ids.append(0)
                sources.append(self._last[row.request])
            else:
                ids.append(row.request.token_ids[row.start])
                sources.append(-1)
        longest = max(row.stop for row in rows)
        return DecodeRows(
            next(n for n in self.sizes if n >= len(rows)),
            next(n for n in self.capacities if n >= longest),
            ids,
            sources,
            lengths,
            tables,
            [row.request for row in rows],
        )

    @torch.inference_mode()
    def run(self, step: DecodeRows, lane: AnyLane) -> Tensor:
        """Queue a step on the lane, whose stream is current.

        Returns:
            Device bytes for :meth:`outputs_of`; the next step overwrites them, in the order of the lane.
        """
        key = step.rows, step.capacity
        if not self.captured.holds(key):
            self._record(key, lane)
        self._send(step, lane)
        self.captured.run(key, lambda: self._work(key))
        self._last = {request: row for row, request in enumerate(step.requests)}
        return self._memory[: 32 * self.max_batch]

    def outputs_of(self, step: DecodeRows, found: Tensor | None) -> list[tuple[int, Tensor]]:
        """Most likely token of every row, -1 where the logits are of no use, and its logits.

        Args:
            found: host bytes of what :meth:`run` gave.
        """
        assert found is not None
        most = self.max_batch
        tokens = found[: 8 * most].view(torch.int64).tolist()
        status = found[28 * most : 32 * most].view(torch.int32).tolist()
        rows = range(len(step.ids))
        return [(-1 if status[row] else tokens[row], self.logits[row]) for row in rows]

    @torch.inference_mode()
    def warm(self, lane: AnyLane) -> None:
        """Capture everything now, so that no step has to."""
        with lane.launching():
            for rows in self.sizes:
                for capacity in self.capacities:
                    if not self.captured.holds((rows, capacity)):
                        self._record((rows, capacity), lane)

    # --- inside --------------------------------------------------------------------------------------------

    def _send(self, step: DecodeRows, lane: AnyLane) -> None:
        most, width = self.max_batch, step.capacity // self.kv.block_size
        rows = len(step.ids)

        def fill(buffer: Tensor) -> None:
            raw = buffer.numpy()
            raw[: 16 * most].view(np.int64)[:] = 0
            ids, sources = raw[: 16 * most].view(np.int64).reshape(2, most)
            ids[:rows] = step.ids
            sources[:] = np.arange(most) + most
            for row, source in enumerate(step.sources):
                if source >= 0:
                    sources[row] = source
            lengths, status = raw[16 * most : 24 * most].view(np.int32).reshape(2, most)
            lengths[:] = -1
            lengths[:rows] = step.lengths
            status[:] = 0
            tables = raw[24 * most :].view(np.int32).reshape(step.rows, width)
            tables[:] = 0
            for row, blocks in enumerate(step.tables):
                tables[row, : len(blocks)] = blocks

        lane.copy_to(self._memory[8 * most :], 24 * most + 4 * step.rows * width, fill)

    def _record(self, key: tuple[int, int], lane: AnyLane) -> None:
        """Capture a step; it runs once on padding rows alone, which moves and finds nothing."""
        assert isinstance(lane, StreamLane)
        self._send(DecodeRows(*key, [], [], [], [], []), lane)
        self.captured.record(key, lambda: self._work(key), lane.stream)

    def _work(self, key: tuple[int, int]) -> None:
        """The launches of a step."""
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._step(*key)
        torch.index_select(self._known, 0, self._sources[: step.batch], out=step.inputs)
        step.run()

    def _step(self, rows: int, capacity: int) -> DecodeStep:
        model, most = self.model, self.max_batch
        width = capacity // self.kv.block_size
        tables = self._memory[32 * most :].view(torch.int32)[: rows * width].view(rows, width)
        whole = self._state
        names = ("tokens", "lengths", "history", "status", "part", "tickets")
        state = GreedyState(**{name: getattr(whole, name)[:rows] for name in names})
        units = rows * model.config.num_kv_heads
        return DecodeStep(
            model.config,
            model.weights,
            batch=rows,
            capacity=capacity,
            products=model.products,
            paged=(self.kv, tables),
            inputs=self._inputs[:rows],
            state=state,
            buffers=self._buffers.first(rows),
            scratch=replace(self._scratch, planned=self._plan(units, capacity)),
            tables=(model.cos, model.sin),
        )

    def _plan(self, units: int, capacity: int) -> Plan:
        int8 = self.kv.kv_dtype == torch.int8
        return plan(units, capacity, multiprocessors_of(self.model.device), int8=int8)

    def _largest_scratch(self) -> Scratch:
        """Room for every step; they never run at once."""
        config, largest = self.model.config, None
        for rows in self.sizes:
            for capacity in self.capacities:
                made = Scratch.new(
                    rows,
                    config.num_kv_heads,
                    config.group,
                    config.head_dim,
                    capacity,
                    self.model.device,
                    planned=self._plan(rows * config.num_kv_heads, capacity),
                )
                if largest is None:
                    largest = made
                    continue
                parts = {}
                for name in ("part", "part_ml", "tickets"):
                    one, other = getattr(largest, name), getattr(made, name)
                    parts[name] = one if one.numel() >= other.numel() else other
                largest = replace(largest, **parts)
        assert largest is not None
        return largest


def _sizes(most: int) -> list[int]:
    """Padded numbers of rows: powers of two, and the most."""
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*sizes, most]


def capacities_for(max_context: int, block_size: int) -> list[int]:
    """Tokens that the tables of a graph have room for, each whole blocks."""
    found, capacity = [], FIRST_CAPACITY
    while capacity < max_context:
        found.append(capacity)
        capacity *= 4
    return [*found, -(-max_context // block_size) * block_size]
