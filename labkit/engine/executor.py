"""What the engine asks of whoever computes: a torch model on a GPU or a CPU, or a cost model on a clock.

The scheduler decides *what* is computed and holds the books; an executor only computes. Every work goes
through the same calls, in this order:

    batch = executor.prepare(rows, lane)     # host work: views, staging; nothing runs yet
    handle = executor.launch(batch)          # or launch_slice for some of its layers
    ... executor.done(handle) ...            # polled, as often as one likes; or wait for one of several
    outputs = executor.join(handle)          # exactly once; blocks until it has run

A **lane** is an order: works of one lane run one after the other, in the order of their launches. Works of
two lanes have no order, and the scheduler never lets two unjoined works touch one slot unless both only
read it, or both are on one lane. An executor with ``concurrent`` false may run every work inside ``launch``
(a CPU does), so ``done`` is always true. One with ``concurrent`` true has a stream per lane, "decode" at
the higher priority, with scratch and staging of its own per stream.

All calls come from one thread at a time, though not always the same one (labkit.engine.engine steps in
worker threads): set the device, the stream and inference mode inside each call. On the CPU a complete
executor is: build the view in ``prepare``, run the decoder in ``launch``, time it there, keep the outputs
until ``join``. On a GPU, ``launch`` replays a graph (decode rows alone) or queues kernels (anything else),
copies the found tokens to pinned memory and records an event behind the copy; ``done`` asks that event,
``join`` waits for it alone, never for the device.

What the engine relies on, and every executor owes:

1. **Waits are paired.** A lane's stream waits for the default stream before its first kernel of a work
   (weights, pool growth), and the default stream waits for the lane before outputs are read at the join.
   Where a row reads slots that an *earlier, joined* work of the other lane wrote, nothing more is needed.
2. **Nothing is read after the join.** ``join`` returns only when the work has run and every staging buffer
   of its batch may be used again. Until then the scheduler keeps all blocks that its rows name.
3. **No synchronising in prepare and launch.** They queue work and come back, so that the other lane's work
   goes on; one that must allocate does so on its own lane's stream.
4. **Bits depend on the row alone**: not on its mates, the lane, the slices, or the padding of a batch.
5. **A failure leaves nothing behind.** If ``prepare``, ``launch`` or ``join`` raises, no kernel of that
   batch is running or will run when the exception leaves; other works are untouched and are joined as
   usual. The engine then tries the rows one by one, so slots may be written again with the same values.
   A handle whose ``join`` raised is not joined again; a batch whose launch raised is not launched again.
6. **Own times.** ``seconds`` of a handle comes from that handle's own pair of events, on its own stream
   (monotonic clock on a CPU), after its join; None if none were recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from labkit.engine.request import Request

if TYPE_CHECKING:
    from torch import Tensor

    from labkit.cache.blocks import BlockTable

Lane: TypeAlias = Literal["decode", "prefill"]
"""Where a work runs; see the head of the module."""

Batch: TypeAlias = Any
"""What ``prepare`` made; opaque to the engine."""

Handle: TypeAlias = Any
"""A launched work; opaque to the engine, hashable by identity."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a work computes for one request: positions ``start`` … ``stop`` − 1.

    Tokens and blocks do not change from ``prepare`` to ``join``, except that the table's length and blocks
    may grow at the end; an executor reads them in ``prepare`` alone.

    Attributes:
        request: whose tokens; ``token_ids`` holds at least ``stop`` of them, ``table`` their slots.
        start: positions before it are computed and joined (or come earlier on the same lane).
        stop: behind the last position; ``stop - start`` is 1 for a decode row.
        samples: logits of position ``stop - 1`` are wanted.
        fed: the token at ``start`` is not known to the host: it is the most likely token that the previous
            work of the same lane, not joined, finds for this request, and stays on the device. Only a
            decode row that samples greedily, and only where the executor ``feeds``.
    """

    request: Request
    start: int
    stop: int
    samples: bool
    fed: bool = False

    @property
    def count(self) -> int:
        """New tokens, at least 1."""
        return self.stop - self.start

    @property
    def tokens(self) -> list[int]:
        """Token ids of the new positions; empty where ``fed``."""
        return self.request.token_ids[self.start : self.stop]

    @property
    def table(self) -> BlockTable:
        """Blocks of the sequence; they cover ``stop`` tokens at least."""
        table = self.request.table
        assert table is not None  # a row is made for requests that hold blocks only
        return table

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is all that is wanted of the logits."""
        return self.samples and self.request.params.is_argmax


class Output(Protocol):
    """What came out for one row that samples. A batch without such rows needs no head at all."""

    @property
    def token(self) -> int | None:
        """Most likely token, the lowest id among equals (labkit.models.sampling.greedy); negative where a
        logit is NaN or none is finite; None where it was not looked for: the engine then samples from
        ``logits``. Looked for at least in rows that are ``greedy``, or in none."""

    @property
    def logits(self) -> Tensor:
        """[V] of any floating dtype, on any device; may be fetched only when asked for. Asked for before
        the first launch that follows the join, or never. With ``feeds`` one launch of the same lane comes
        between a work's own launch and its join, so two sets of outputs are alive."""


class Executor(Protocol):
    """Computes rows; see the head of the module for the order of calls and what each owes.

    Attributes:
        concurrent: the two lanes are two CUDA streams that really run side by side. False for the CPU and
            for every simulation, however it models lanes: it is what ``prefill_decode_stream_overlap_steps``
            counts by.
        lanes: whether works of different lanes may be in flight at once. False makes the engine put every
            work on lane "decode" (CPU). True where ``concurrent`` is, and for simulations of it.
        feeds: rows may be ``fed``, so that the next decode work is launched before the last has joined.
        num_layers: of the model; what ``launch_slice`` counts in.
        vocab_size: V of the logits.
        num_blocks, block_size: of the KV pool, now; see :class:`Growing`.
        max_context: positions that the model has; a sequence never grows beyond it.
        max_rows: most rows of one batch; as many requests run at once, so that one decode step holds all.
        max_tokens: most new tokens of one batch (scratch), at least ``max_rows``; chunks are cut to it.
        eos_ids: tokens at which the model ends a text.
        name: for records and /status: "torch cuda", "torch cpu", "simulated ...".
    """

    concurrent: bool
    lanes: bool
    feeds: bool
    num_layers: int
    vocab_size: int
    block_size: int
    max_context: int
    max_rows: int
    max_tokens: int
    eos_ids: frozenset[int]
    name: str

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, now."""

    def now(self) -> float:
        """Seconds on this executor's clock, never going back (time.monotonic, or the simulated clock)."""

    def idle(self, until: float) -> None:
        """Nothing to do before ``until``: sleep, or set the simulated clock forward."""

    def prepare(self, rows: Sequence[Row], lane: Lane) -> Batch:
        """Everything a launch needs, made on the host: token ids, KV view, sampling positions.

        Rows of one new token (decode) and of several (chunks) may be mixed; a batch of decode rows alone
        is what a CUDA graph of the padded size is for. Copies to the device are queued on the lane's
        stream: no synchronisation, and no staging buffer whose copy may be pending.

        Raises:
            Exception: any; the engine then prepares the rows one by one and fails those that raise alone.
        """

    def launch(self, batch: Batch) -> Handle:
        """Queue all layers and the head on the batch's lane, and come back at once.

        The start event, if times are wanted, is recorded after the wait for the default stream, the end
        event after the last kernel (the copy of outputs included); both only when launched on a stream.
        The same as ``launch_slice(batch, 0, num_layers)``, but may replay a graph.
        """

    def launch_slice(self, batch: Batch, first: int, last: int) -> Handle:
        """Queue layers ``first`` … ``last`` − 1 of a batch; the embedding comes before layer 0, and the
        last norm and the head after layer ``num_layers - 1``.

        Called for ascending ranges that follow each other without a gap, each joined before the next is
        launched; works of other rows, on either lane, run in between, so hidden states between slices lie
        in memory that belongs to the batch. No shape changes: the bits are those of ``launch``. A batch
        may be dropped between slices (its requests failed or were aborted): its memory goes with it.
        """

    def done(self, handle: Handle) -> bool:
        """Whether ``join`` would come back without waiting; never waits."""

    def wait(self, handles: Sequence[Handle], until: float | None = None) -> None:
        """Until one of them is done, or the clock has come so far."""

    def join(self, handle: Handle) -> Sequence[Output]:
        """Wait until a work has run; its outputs, one for each row with ``samples``, in their order.

        Empty for a slice that does not end with the last layer. Called once for each handle, in any order
        over lanes, in the order of launches within one.
        """

    def seconds(self, handle: Handle) -> float | None:
        """Time that a joined work took on its own stream, see 6.; None if it was not recorded."""


@runtime_checkable
class Growing(Protocol):
    """An executor that can make its pool larger while the engine runs; one that cannot lacks both.

    Attributes:
        most_blocks: that the pool may grow to.
    """

    most_blocks: int

    def grow(self, num_blocks: int) -> None:
        """Make the pool larger, to ``num_blocks`` ≤ ``most_blocks`` in all; every block keeps its content.

        Called only while nothing is in flight and no batch stands between two slices, so that addresses
        may change; graphs are captured anew when they are next needed.

        Raises:
            Exception: any, such as out of memory; the pool is then usable at its old size, and the engine
                does not ask again.
        """
