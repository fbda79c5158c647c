"""The executor that computes with torch: serial on a CPU; on a GPU two streams and CUDA graphs.

Its lanes are labkit.engine.lanes, its decode steps in graphs labkit.engine.executor_graphs, and what it
computes with the three kinds of layers: the torch decoder's, the invariant ones (labkit.nn.invariant), and
the kernels' (labkit.models.step_model).
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.cache.paged import PagedKV
from labkit.engine.chunk_graphs import ChunkGraphs
from labkit.engine.executor import Lane, Row
from labkit.engine.executor_graphs import DecodeGraphs
from labkit.engine.lanes import AnyLane, LaunchedWork, make_lanes
from labkit.errors import require
from labkit.models.sampling import greedy
from labkit.models.step_model import DecoderLayers, Layers, StepModel
from labkit.nn.attention import query_tile
from labkit.nn.invariant import DEFAULT_ROWS, InvariantLayers

DEFAULT_CHUNK = 512
DEFAULT_BATCH = 64


class TorchOutput:
    """What came out for one row.

    Attributes:
        token: most likely token; negative where a logit is NaN or none is finite; None where nobody asked.
    """

    __slots__ = ("_logits", "token")

    def __init__(self, token: int | None, logits: Tensor) -> None:
        self.token, self._logits = token, logits

    @property
    def logits(self) -> Tensor:
        """[V], on the device."""
        if self.token is not None and self.token < 0:
            # A step that was fed with it may have overwritten them; all that is left to find is that.
            return torch.full_like(self._logits, float("nan"))
        return self._logits


class TorchBatch:
    """Prepared rows: their tokens and view on the device, and the hidden states between two slices."""

    def __init__(self, rows: Sequence[Row], lane: Lane) -> None:
        self.rows, self.lane = rows, lane
        self.tokens: Any = None
        self.picks: Tensor | None = None
        self.hidden: Tensor | None = None
        self.view: Any = None
        self.graphs: DecodeGraphs | ChunkGraphs | None = None  # that run it, with ``filled``
        self.filled: Any = None

    @property
    def greedy(self) -> bool:
        """Whether any row wants the most likely token."""
        return any(row.greedy for row in self.rows)


class TorchHandle:
    """A launched work."""

    __slots__ = ("batch", "lane", "work")

    def __init__(self, batch: TorchBatch, lane: AnyLane, work: LaunchedWork) -> None:
        self.batch, self.lane, self.work = batch, lane, work


class TorchExecutor:
    """An :class:`labkit.engine.executor.Executor`.

    Args:
        model: a labkit.models.decoder.Decoder, a labkit.models.model.Model, or layers
            (labkit.models.step_model).
        kv: the pool, of the model's device and dtype. What the engine has not asked for may be NaN.
        chunk: most new tokens of a batch beside its decode rows.
        max_batch: most rows.
        max_context: most tokens of a sequence; the model's positions by default.
        most_blocks: that the pool may grow to; as large as it is by default.
        eos_ids: tokens that end a text; the model's by default.
        concurrent: two streams; by default with a StepModel on a GPU, others have one.
        invariant: on a CPU, bits that depend on a row alone (labkit.nn.invariant); kernels on a GPU give them
            anyway, the torch decoder there never does.
        invariant_rows: of a block of that mode.
        graphs: CUDA graphs of decode steps and small chunks, with a StepModel; by default there.

    Raises:
        InputError: parts that do not belong together, by name.
    """

    def __init__(
        self,
        model: Any,
        *,
        kv: PagedKV,
        chunk: int = DEFAULT_CHUNK,
        max_batch: int = DEFAULT_BATCH,
        max_context: int | None = None,
        most_blocks: int | None = None,
        eos_ids: Iterable[int] | None = None,
        concurrent: bool | None = None,
        invariant: bool = False,
        invariant_rows: int = DEFAULT_ROWS,
        graphs: bool | None = None,
    ) -> None:
        for name, value in (("chunk", chunk), ("max_batch", max_batch)):
            require(type(value) is int and value >= 1, name, repr(value), "a whole number of at least 1")
        self.layers = _layers(model, invariant, invariant_rows)
        self.kv, config = kv, self.layers.config
        on_gpu = self.layers.device.type == "cuda"
        shapes = [(one.num_layers, one.num_kv_heads, one.head_dim) for one in (kv.config, config)]
        fits = shapes[0] == shapes[1] and kv.dtype == self.layers.dtype
        fits = fits and kv.device.type == self.layers.device.type
        require(fits, "kv", f"{shapes[0]}, {kv.dtype} on {kv.device}", f"{shapes[1]}, as the model")
        # What the torch decoder's layers keep between calls is made on one stream, and read unguarded.
        can = on_gpu and isinstance(self.layers, StepModel)
        require(can or not concurrent, "concurrent", "True", "two streams, for a StepModel on a GPU")
        self.concurrent = can if concurrent is None else concurrent
        self.lanes = self.concurrent
        most = config.max_position_embeddings
        if isinstance(self.layers, StepModel):
            most = self.layers.max_context
        self.max_context = most if max_context is None else max_context
        require(1 <= self.max_context <= most, "max_context", max_context, f"1 to {most}")
        self.num_layers, self.vocab_size = config.num_layers, config.vocab_size
        self.num_blocks, self.block_size = kv.num_blocks, kv.block_size
        self.most_blocks = kv.num_blocks if most_blocks is None else most_blocks
        least = self.most_blocks >= kv.num_blocks
        require(least, "most_blocks", most_blocks, f"at least the pool's {kv.num_blocks}")
        self.max_rows, self.max_tokens = max_batch, chunk + max_batch
        self.eos_ids = frozenset(config.eos_token_ids if eos_ids is None else eos_ids)
        self._lanes = make_lanes(
            self.layers.device, kv.block_size, query_tile(config.group), concurrent=self.concurrent
        )
        self._graphs = self._make_graphs(graphs)
        self.feeds = bool(self._graphs["decode"])
        # Graphs whose logits the host still wants: until the join another run must not overwrite them.
        self._awaited: set[DecodeGraphs | ChunkGraphs] = set()
        kind = "kernels" if isinstance(self.layers, StepModel) else "decoder"
        kind = (
            f"invariant, blocks of {self.layers.rows}" if isinstance(self.layers, InvariantLayers) else kind
        )
        self.name = f"torch {self.layers.device.type} ({kind})"

    # --- the protocol --------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def idle(self, until: float) -> None:
        """Sleep."""
        time.sleep(max(0.0, until - self.now()))

    def grow(self, num_blocks: int) -> None:
        """Make the pool larger; see the protocol. Addresses change: graphs are captured anew."""
        self.kv.grow(num_blocks)
        self.num_blocks = num_blocks

    def prepare(self, rows: Sequence[Row], lane: Lane) -> TorchBatch:
        """Tokens, view and places of the sampled rows; see the protocol.

        Raises:
            InputError: more rows or tokens than a batch may have, or a table that does not hold them.
        """
        batch = TorchBatch(tuple(rows), lane)
        counts = [row.count for row in rows]
        fits = 0 < len(counts) <= self.max_rows and sum(counts) <= self.max_tokens
        expected = f"at most {self.max_rows} rows of {self.max_tokens}"
        require(fits, "rows", f"{len(counts)} rows of {sum(counts)} tokens", expected)
        for graphs in self._graphs[lane]:
            if graphs not in self._awaited and graphs.takes(batch.rows):
                batch.graphs, batch.filled = graphs, graphs.fill_of(batch.rows)
                return batch
        self._make_eager(batch)
        return batch

    def launch(self, batch: TorchBatch) -> TorchHandle:
        """See the protocol; a decode step is a replay of a graph where there is one."""
        if batch.graphs is None:
            return self.launch_slice(batch, 0, self.num_layers)
        lane = self._lanes[batch.lane]
        with lane.launching() as work, torch.inference_mode():
            found = batch.graphs.run(batch.filled, lane)
            work.outputs = None if found is None else lane.fetch(work, found)
        if any(row.samples and not row.greedy for row in batch.rows):
            self._awaited.add(batch.graphs)
        return TorchHandle(batch, lane, work)

    def launch_slice(self, batch: TorchBatch, first: int, last: int) -> TorchHandle:
        """See the protocol."""
        if batch.graphs is not None:
            if (first, last) == (0, self.num_layers):
                return self.launch(batch)
            self._make_eager(batch)  # graphs hold all layers
        lane = self._lanes[batch.lane]
        with lane.launching() as work, torch.inference_mode():
            slice_ = None if (first, last) == (0, self.num_layers) else (first, last)
            hidden = self.layers.forward(
                batch.tokens, self.kv, batch.view, layers=slice_, hidden=batch.hidden
            )
            ends = last == self.num_layers
            batch.hidden = None if ends else hidden
            if ends and any(row.samples for row in batch.rows):
                picked = hidden if batch.picks is None else hidden.index_select(0, batch.picks)
                logits = self.layers.logits(picked)
                found = lane.fetch(work, greedy(logits)) if batch.greedy else None
                work.outputs = found, logits
        return TorchHandle(batch, lane, work)

    def done(self, handle: TorchHandle) -> bool:
        """See the protocol."""
        return handle.lane.done(handle.work)

    def wait(self, handles: Sequence[TorchHandle], until: float | None = None) -> None:
        """Ask one after the other: a sleep would last 0.1 ms at least, a step may last 1."""
        while not any(self.done(handle) for handle in handles) and (until is None or self.now() < until):
            _let_others_run()

    def join(self, handle: TorchHandle) -> Sequence[TorchOutput]:
        """See the protocol."""
        work, batch = handle.work, handle.batch
        if batch.graphs is not None:
            self._awaited.discard(batch.graphs)
        handle.lane.join(work)
        found, work.outputs = work.outputs, None
        if batch.graphs is not None:
            made = batch.graphs.outputs_of(batch.filled, found)
            outputs = [TorchOutput(token, logits) for token, logits in made]
        elif found is None:
            outputs = []
        else:
            best, logits = found
            tokens = [None] * len(logits) if best is None else best.tolist()
            outputs = [TorchOutput(token, one) for token, one in zip(tokens, logits, strict=True)]
        handle.lane.give_back(work)
        return outputs

    def seconds(self, handle: TorchHandle) -> float | None:
        """From the work's own events on its stream; from the clock on a CPU."""
        return handle.work.seconds

    # --- inside --------------------------------------------------------------------------------------------

    def _make_graphs(self, wanted: bool | None) -> dict[str, list[DecodeGraphs | ChunkGraphs]]:
        """Of each lane: what may run a batch, in the order of preference."""
        model = self.layers
        if not isinstance(model, StepModel):
            require(not wanted, "graphs", "True with the torch decoder", "a StepModel, or False")
            return {"decode": [], "prefill": []}
        if wanted is False:
            return {"decode": [], "prefill": []}

        def chunks() -> ChunkGraphs:
            return ChunkGraphs(
                model,
                self.kv,
                max_rows=self.max_rows,
                max_tokens=self.max_tokens,
                max_context=self.max_context,
            )

        one = chunks()
        # What runs on another stream needs buffers of its own.
        other = chunks() if self.concurrent else one
        decode = DecodeGraphs(model, self.kv, max_batch=self.max_rows, max_context=self.max_context)
        return {"decode": [decode, one], "prefill": [other]}

    def warm(self) -> None:
        """Capture all graphs now, so that no request has to wait for one. Nothing may be in flight."""
        if isinstance(self.layers, StepModel) and self.layers.device.type == "cuda":
            self.layers.load()
        for lane, of_lane in self._graphs.items():
            for graphs in of_lane:
                graphs.warm(self._lanes[lane])

    def _make_eager(self, batch: TorchBatch) -> None:
        """A batch of any rows, as the layers take it."""
        rows, queue = batch.rows, self._lanes[batch.lane]
        require(not any(row.fed for row in rows), "rows", "fed rows", "a decode step that feeds the next")
        batch.graphs = batch.filled = None
        ids = [token for row in rows for token in row.tokens]
        last, picked = -1, []
        for row in rows:
            last += row.count
            if row.samples:
                picked.append(last)
        with queue.current():
            batch.view = queue.view(
                [row.table for row in rows], [row.count for row in rows], [row.start for row in rows]
            )
            batch.tokens = queue.send(ids)
            if picked and len(picked) < len(ids):
                batch.picks = queue.send(picked)


def _layers(model: Any, invariant: bool, rows: int) -> Layers:
    if isinstance(model, StepModel | InvariantLayers | DecoderLayers):
        require(not invariant, "invariant", "True with layers", "a decoder")
        return model
    decoder = getattr(model, "decoder", model)
    return InvariantLayers(decoder, rows=rows) if invariant else DecoderLayers(decoder)


def _let_others_run() -> None:
    """Give the interpreter's lock away for a moment (2 µs on Linux, where a sleep of 0 s takes 80)."""
    if sys.platform == "win32":
        time.sleep(0)
    else:
        select.select((), (), (), 0)
