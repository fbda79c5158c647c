"""The simulated executor: the real scheduler's works on a clock that costs nothing to wait for.

Tokens are a hash of the prefix, so that every schedule can be checked for exactness; times come from a
:class:`CostModel`. ``concurrent`` is always false: what is simulated never counts as a stream overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.engine.cost_model import CostModel
from labkit.engine.executor import Lane, Row
from labkit.engine.request import Request
from labkit.engine.sampling import SamplingParams
from labkit.errors import require

if TYPE_CHECKING:
    from torch import Tensor

    from labkit.engine.engine import Engine

_MASK = (1 << 61) - 1


def mix(state: int, token: int) -> int:
    """One step of the pretended model's hash; 1 is the state of the empty prefix."""
    return (state * 0x9E3779B97F4A7C15 + token + 1) & _MASK


def token_after(state: int, vocab_size: int) -> int:
    """The most likely token after a prefix of that state."""
    return (state >> 7) % vocab_size


@dataclass(frozen=True, slots=True)
class SimulatedOutput:
    """The pretended model's answer for one row."""

    token: int
    state: int
    vocab_size: int

    @property
    def logits(self) -> Tensor:
        """[V] from the state alone; its largest value is at ``token``."""
        import torch

        generator = torch.Generator().manual_seed(self.state)
        logits = torch.randn(self.vocab_size, generator=generator)
        logits[self.token] = logits.max() + 0.5
        return logits


class SimulatedBatch:
    """Prepared rows, and what their tokens hash to."""

    def __init__(self, rows: Sequence[Row], lane: Lane, seconds: float) -> None:
        self.rows, self.lane, self.seconds = rows, lane, seconds


class SimulatedHandle:
    """A launched work: ``left`` seconds of it are to be done, alone on the device."""

    def __init__(
        self, batch: SimulatedBatch, seconds: float, outputs: list[SimulatedOutput], last: bool
    ) -> None:
        self.batch, self.left, self.outputs = batch, seconds, outputs
        self.last = last  # it ends with the last layer
        self.start: float | None = None
        self.end: float | None = None


class SimulatedExecutor:
    """An :class:`labkit.engine.executor.Executor` on a simulated clock.

    Args:
        cost: what works take.
        num_blocks, most_blocks, block_size: of the pretended pool; it does not grow by default.
        vocab_size: of the pretended model.
        max_context, max_rows, max_tokens, eos_ids, feeds: see the protocol.
        lanes: pretend two streams; False runs everything in order, as a CPU does.
    """

    concurrent = False

    def __init__(
        self,
        cost: CostModel,
        *,
        num_blocks: int = 2048,
        most_blocks: int | None = None,
        block_size: int = 16,
        vocab_size: int = 32_000,
        max_context: int = 32_768,
        max_rows: int = 64,
        max_tokens: int = 8192,
        eos_ids: Iterable[int] = (),
        lanes: bool = True,
        feeds: bool = False,
    ) -> None:
        self.cost = cost
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.most_blocks = num_blocks if most_blocks is None else most_blocks
        self.max_context, self.max_rows, self.max_tokens = max_context, max_rows, max_tokens
        self.eos_ids = frozenset(eos_ids)
        self.lanes, self.feeds = lanes, feeds
        self.num_layers = cost.num_layers
        self.name = f"simulated {cost.name} ({cost.origin})"
        self._now = 0.0
        self._queues: dict[Lane, deque[SimulatedHandle]] = {"decode": deque(), "prefill": deque()}
        self._states: dict[Request, tuple[int, int]] = {}  # tokens hashed so far, and the hash
        self._fed: dict[Request, int] = {}  # what the decode lane's last work found

    # --- the protocol --------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds on the simulated clock."""
        return self._now

    def idle(self, until: float) -> None:
        """Set the clock forward."""
        self._advance(until)

    def grow(self, num_blocks: int) -> None:
        """Costs nothing here."""
        self.num_blocks = num_blocks

    def prepare(self, rows: Sequence[Row], lane: Lane) -> SimulatedBatch:
        """Costs nothing here."""
        return SimulatedBatch(rows, lane, self.cost.seconds(rows))

    def launch(self, batch: SimulatedBatch) -> SimulatedHandle:
        """Queue a whole forward."""
        return self.launch_slice(batch, 0, self.num_layers)

    def launch_slice(self, batch: SimulatedBatch, first: int, last: int) -> SimulatedHandle:
        """Queue some layers; the outputs are known at once, but nobody sees them before the join."""
        ends = last == self.num_layers
        outputs = self._outputs(batch.rows) if ends else []
        seconds = batch.seconds * (last - first) / self.num_layers
        self._advance(self._now + self.cost.host)
        handle = SimulatedHandle(batch, seconds, outputs, ends)
        self._queues[batch.lane].append(handle)
        return handle

    def done(self, handle: SimulatedHandle) -> bool:
        """Whether it has ended by now."""
        return handle.end is not None

    def wait(self, handles: Sequence[SimulatedHandle], until: float | None = None) -> None:
        """Set the clock to the first of their ends, or forward to that time."""
        while not any(self.done(handle) for handle in handles) and (until is None or self._now < until):
            end = self._next_end()
            self._advance(end if until is None else min(end, until))

    def join(self, handle: SimulatedHandle) -> Sequence[SimulatedOutput]:
        """Set the clock to the work's end, if that is still to come."""
        while handle.end is None:
            self._advance(self._next_end())
        return handle.outputs

    def seconds(self, handle: SimulatedHandle) -> float | None:
        """From its start on its lane to its end."""
        if handle.start is None or handle.end is None:
            return None
        return handle.end - handle.start

    # --- the pretended device ------------------------------------------------------------------------------

    def _heads(self) -> list[SimulatedHandle]:
        return [queue[0] for queue in self._queues.values() if queue]

    def _slowdown(self, running: int) -> float:
        return max(1.0, self.cost.share * running)

    def _next_end(self) -> float:
        heads = self._heads()
        return self._now + min(head.left for head in heads) * self._slowdown(len(heads))

    def _advance(self, until: float) -> None:
        """Run the device until a time; works end, and those behind them start, on the way."""
        while heads := self._heads():
            for head in heads:
                if head.start is None:
                    head.start = self._now
            slow = self._slowdown(len(heads))
            shortest = min(head.left for head in heads)
            end = self._now + shortest * slow
            if end > until:
                for head in heads:
                    head.left -= (until - self._now) / slow
                break
            self._now = end
            for head in heads:
                head.left -= shortest
                if head.left <= 1e-15:
                    head.end = end
                    self._queues[head.batch.lane].popleft()
        self._now = max(self._now, until)

    # --- the pretended model -------------------------------------------------------------------------------

    def _outputs(self, rows: Sequence[Row]) -> list[SimulatedOutput]:
        outputs = []
        for row in rows:
            if row.samples:
                state = self._state(row)
                token = token_after(state, self.vocab_size)
                outputs.append(SimulatedOutput(token, state, self.vocab_size))
                self._fed[row.request] = token
        return outputs

    def _state(self, row: Row) -> int:
        request = row.request
        length, state = self._states.get(request, (0, 1))
        if length > row.start:
            length, state = 0, 1  # taken back, or tried again: from the beginning
        for token in request.token_ids[length : row.stop]:
            state = mix(state, token)
        if row.fed:
            state = mix(state, self._fed[request])
        if request.remaining <= 1 or request.status.final:
            self._states.pop(request, None)
            self._fed.pop(request, None)
        else:
            self._states[request] = row.stop, state
        return state


# --- traces -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace; ``time`` in seconds on the executor's clock, whenever it is taken up."""

    time: float
    prompt: Sequence[int]
    params: SamplingParams


def replay(engine: Engine, arrivals: Iterable[Arrival]) -> list[Request]:
    """Run a trace to its end, open loop; the requests in order of arrival."""
    waiting = deque(sorted(arrivals, key=lambda arrival: arrival.time))
    requests = []
    while waiting or not engine.idle:
        while waiting and waiting[0].time <= engine.executor.now():
            arrival = waiting.popleft()
            requests.append(engine.add_request(arrival.prompt, arrival.params, arrival=arrival.time))
        if engine.idle and waiting:
            engine.executor.idle(waiting[0].time)
        else:
            engine.step()
    return requests


def document_trace(
    *,
    streams: int = 3,
    answer: int = 64,
    document: int = 189,
    at: float = 0.5,
    documents: int = 1,
    every: float = 1.0,
) -> list[Arrival]:
    """Steady streams of short prompts, and one or more long documents that arrive among them.

    Args:
        streams, answer: how many, and tokens that each writes.
        document: tokens of each document. at, every: when the first comes, and how far apart they are.
    """
    require(streams >= 1 and document >= 1, "streams", streams, "at least 1, and a document")
    steady = [
        Arrival(0.0, [7 + 13 * number + i for i in range(8)], SamplingParams(max_tokens=answer))
        for number in range(streams)
    ]
    long = [
        Arrival(at + number * every, [number + 3 * i for i in range(document)], SamplingParams(max_tokens=2))
        for number in range(documents)
    ]
    return steady + long
