"""Works: what is computed together, from its rows to its join.

All kinds take the same three steps, each once (a sliced prefill launches and joins once a slice):

    work.prepare(executor)              # host: token ids, view, staging
    work.launch(executor)               # queued on the work's lane, comes back at once
    outputs = work.finish(executor)     # waits for this work alone; its own time is then in ``seconds``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from labkit.engine.executor import Batch, Executor, Handle, Lane, Output, Row


class Work:
    """Rows that are computed in one forward; its subclasses say of which kind.

    Attributes:
        rows, lane: what, and where.
        complete: all layers have been computed and joined.
        launched: clock at its first launch; None before.
        seconds: time it took on its own stream, summed over slices; from the clock where the executor
            records none. 0 before it has joined.
        span: clock from its last launch to that launch's join, waiting included.
        ahead: launched before the decode work ahead of it had joined; some of its rows are ``fed``.
    """

    has_decode: ClassVar[bool] = False
    has_prefill: ClassVar[bool] = False

    def __init__(self, rows: Sequence[Row], lane: Lane) -> None:
        self.rows = tuple(rows)
        self.lane: Lane = lane
        self.complete = self.ahead = False
        self.launched: float | None = None
        self.seconds = self.span = 0.0
        self._batch: Batch = None
        self._handle: Handle = None
        self._started = 0.0

    @property
    def prepared(self) -> bool:
        """Whether there is a batch to launch."""
        return self._batch is not None

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(row.count for row in self.rows)

    @property
    def prompt_rows(self) -> tuple[Row, ...]:
        """The rows that are chunks of a prompt."""
        return self.rows if self.has_prefill else ()

    @property
    def prompt_tokens(self) -> int:
        """New tokens of these."""
        return sum(row.count for row in self.prompt_rows)

    @property
    def prompt_context(self) -> float:
        """Positions before one of these tokens, and its own half of the chunk: the mean over all of them."""
        middles = sum(row.count * (row.start + row.stop) / 2 for row in self.prompt_rows)
        return middles / max(self.prompt_tokens, 1)

    def prepare(self, executor: Executor) -> None:
        """Make the batch; nothing runs yet."""
        self._batch = executor.prepare(self.rows, self.lane)

    def launch(self, executor: Executor) -> None:
        """Queue it on its lane."""
        self._started = executor.now()
        if self.launched is None:
            self.launched = self._started
        self._handle = self._launch(executor)

    def done(self, executor: Executor) -> bool:
        """Whether :meth:`finish` would come back without waiting."""
        return executor.done(self._handle)

    @staticmethod
    def wait(works: Sequence[Work], executor: Executor, until: float | None = None) -> None:
        """Until one of them is done, or the clock has come so far."""
        executor.wait([work._handle for work in works], until)

    def finish(self, executor: Executor) -> Sequence[Output]:
        """Wait for it; outputs of the rows that sample, in order (none where layers are left)."""
        outputs = executor.join(self._handle)
        self.span = executor.now() - self._started
        own = executor.seconds(self._handle)
        own = self.span if own is None else own
        self.seconds += own
        self._handle = None
        self._joined(own)
        return outputs

    def alone(self, row: Row) -> Work:
        """A work of the same kind with one row of this one; used where the whole has failed."""
        return type(self)((row,), self.lane)

    def _launch(self, executor: Executor) -> Handle:
        return executor.launch(self._batch)

    def _joined(self, seconds: float) -> None:
        self.complete, self._batch = True, None

    def __repr__(self) -> str:
        names = ", ".join(f"{row.request.id}[{row.start}:{row.stop}]" for row in self.rows)
        return f"{type(self).__name__}({names}; {self.lane})"


class DecodeWork(Work):
    """One new token of every row."""

    has_decode = True


class PrefillWork(Work):
    """Chunks of prompts (or of what a preempted request must compute again)."""

    has_prefill = True


class MixedWork(Work):
    """Decode rows and chunks in one forward; ``decode_rows`` of them, in front, decode."""

    has_decode = has_prefill = True

    def __init__(self, rows: Sequence[Row], lane: Lane, decode_rows: int) -> None:
        super().__init__(rows, lane)
        self.decode_rows = decode_rows

    @property
    def prompt_rows(self) -> tuple[Row, ...]:
        return self.rows[self.decode_rows :]

    def alone(self, row: Row) -> Work:
        decodes = row in self.rows[: self.decode_rows]
        return (DecodeWork if decodes else PrefillWork)((row,), self.lane)


class SlicedPrefillWork(PrefillWork):
    """A prefill that is cut at layer boundaries: other works run between its slices.

    Attributes:
        layer: layers computed and joined.
        next_layers: layers of the slice that is launched next, is in flight, or has joined last.
        slice_seconds: time of the slice that joined last.
    """

    def __init__(self, rows: Sequence[Row], lane: Lane, num_layers: int) -> None:
        super().__init__(rows, lane)
        self.num_layers = num_layers
        self.layer = self.next_layers = 0
        self.slice_seconds = 0.0

    def alone(self, row: Row) -> Work:
        return PrefillWork((row,), self.lane)

    def _launch(self, executor: Executor) -> Handle:
        self.next_layers = min(max(self.next_layers, 1), self.num_layers - self.layer)
        return executor.launch_slice(self._batch, self.layer, self.layer + self.next_layers)

    def _joined(self, seconds: float) -> None:
        self.slice_seconds = seconds
        self.layer += self.next_layers
        if self.layer == self.num_layers:
            super()._joined(seconds)
