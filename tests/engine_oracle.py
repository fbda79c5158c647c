"""The real engine over the shadow KV: fuzzed runs in which every read, write and token is checked.

:class:`OracleExecutor` is the simulated executor with a :class:`ShadowKV` behind it: a work reads and writes
slots when it is launched and counts as written when it is joined, on the two lanes as two streams. A run
(:class:`Run`) draws sizes, requests, policies and disturbances from one seed.

Any class of the engine can be replaced by a broken one: that is how the tests show their teeth.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from oracle import OracleError, Prefixes, ShadowKV, ShadowWork
from oracle import Row as ShadowRow

from labkit.cache.blocks import slots_of
from labkit.engine import engine as engine_module
from labkit.engine import scheduler as scheduler_module
from labkit.engine.adaptive import Adaptive
from labkit.engine.cost_model import CostModel
from labkit.engine.engine import Engine
from labkit.engine.executor import Lane, Row
from labkit.engine.metrics import Slo
from labkit.engine.policy import Dynamic, Mixed, Overlap, Policy, Serial, Sliced, Ticks
from labkit.engine.pool import Pool
from labkit.engine.request import Request, Status
from labkit.engine.runner import Runner
from labkit.engine.sampling import Sampler, SamplingParams
from labkit.engine.scheduler import Scheduler
from labkit.engine.sim import (
    SimulatedBatch,
    SimulatedExecutor,
    SimulatedHandle,
    SimulatedOutput,
    mix,
    token_after,
)
from labkit.errors import InputError

COST = CostModel(
    name="plain",
    origin="simulated",
    source="made up",
    points=((1, 0.010), (8, 0.010), (64, 0.066)),
    share=0.8,
    num_layers=8,
)
"""10 ms a decode step of up to 8 rows, 1 ms a token beyond."""

STAGES = ("prepare", "launch", "join", "logits", "text")


class InjectedError(Exception):
    """A fault that a run has ordered."""


class OracleExecutor(SimulatedExecutor):
    """Checks every launch against the shadow KV; raises where it was told to.

    Attributes:
        faults: request ids → the stage at which their rows fail, always.
        transient: one batch in so many fails once, whoever is in it; 0 for none.
        violation: the first thing that was wrong; the engine would take it for a fault of its requests.
    """

    def __init__(self, cost: CostModel, rng: random.Random, **sizes) -> None:
        super().__init__(cost, **sizes)
        self.rng = rng
        self.prefixes = Prefixes()
        self.shadow = ShadowKV(self.prefixes, self.block_size)
        self.faults: dict[str, str] = {}
        self.violation: Exception | None = None
        self.transient = 0
        self.seen: Counter[str] = Counter()
        self._along: dict[Request, list[int]] = {}
        self._works: dict[int, ShadowWork] = {}  # of batches, by identity
        self._layers: dict[int, int] = {}  # joined layers of batches that are cut
        self._unjoined: dict[Lane, list[SimulatedHandle]] = {"decode": [], "prefill": []}
        self._streams = 1

    def prepare(self, rows: Sequence[Row], lane: Lane) -> SimulatedBatch:
        self._fault("prepare", rows)
        if len(rows) > self.max_rows or sum(row.count for row in rows) > self.max_tokens:
            self._violated(OracleError(f"{len(rows)} rows, {sum(row.count for row in rows)} tokens"))
        for row in rows:
            if row.stop >= row.request.prompt_len + row.request.max_new:
                self._violated(OracleError(f"{row.request.id} computes a position that nobody attends to"))
        return super().prepare(rows, lane)

    def launch_slice(self, batch: SimulatedBatch, first: int, last: int) -> SimulatedHandle:
        whole = (first, last) == (0, self.num_layers)
        if first == 0:
            self._begin(batch, self._stream(batch.lane, whole))
        elif id(batch) not in self._works or self._layers.get(id(batch)) != first:
            self._violated(OracleError(f"layers {first} to {last} after {self._layers.get(id(batch))}"))
        self.seen["works" if whole else "slices"] += 1
        self.seen["fed rows"] += sum(row.fed for row in batch.rows)
        self._layers[id(batch)] = -last  # until it has joined
        handle = super().launch_slice(batch, first, last)
        self._unjoined[batch.lane].append(handle)
        return handle

    def join(self, handle: SimulatedHandle) -> Sequence[SimulatedOutput]:
        outputs = super().join(handle)
        batch = handle.batch
        if (first := self._unjoined[batch.lane].pop(0)) is not handle:
            self._violated(OracleError(f"{handle.batch.rows} joins before {first.batch.rows} of its lane"))
        self._layers[id(batch)] *= -1
        if not handle.last:
            return outputs
        work = self._works.pop(id(batch))
        if self._is_at_fault("join", batch.rows):
            self._spoil(work)
            raise InjectedError("join")
        try:
            self.shadow.join(work)
        except OracleError as error:
            self._violated(error)
        return [self._answer(row, out) for row, out in zip(self._sampling(batch), outputs)]

    def settle(self) -> None:
        """Nothing is in flight any more."""

    def _violated(self, error: Exception) -> NoReturn:
        self.violation = self.violation or error
        raise error

    def grow(self, num_blocks: int) -> None:
        if self.shadow.in_flight or self._works or not self.num_blocks < num_blocks <= self.most_blocks:
            self._violated(OracleError(f"grown to {num_blocks} with works in flight"))
        self.seen["grown"] += 1
        super().grow(num_blocks)

    # --- what a work touches -------------------------------------------------------------------------------

    def _begin(self, batch: SimulatedBatch, stream: int) -> None:
        rows = []
        try:
            for row in batch.rows:
                reads = slots_of(row.table, 0, row.stop, self.block_size)
                along = self._prefixes_of(row)
                rows.append(ShadowRow(row.request.id, along[: row.stop], reads, reads[row.start :]))
            work = self.shadow.launch(rows, stream=stream)
        except (OracleError, InputError) as error:
            self._violated(error)
        if self._is_at_fault("launch", batch.rows):
            self._spoil(work)
            raise InjectedError("launch")
        self._works[id(batch)] = work
        # A batch that is dropped between its slices is never joined.
        weakref.finalize(batch, self._dropped, id(batch))

    def _dropped(self, batch: int) -> None:
        if (work := self._works.pop(batch, None)) is not None:
            self.seen["dropped"] += 1
            self._spoil(work)

    def _spoil(self, work: ShadowWork) -> None:
        """A work that failed may have written anything to its own slots."""
        self.shadow.in_flight.remove(work)
        self.shadow.memory.update(dict.fromkeys(work.written))

    def _prefixes_of(self, row: Row) -> list[int]:
        request = row.request
        tokens = request.token_ids[: row.stop]
        if row.fed:
            tokens.append(self._fed[request])
        along = self._along.setdefault(request, [])
        if len(along) > len(request.token_ids):
            del along[len(request.token_ids) :]  # what had been fed was dropped
        last = along[-1] if along else self.prefixes.root(request.salt)
        for token in tokens[len(along) :]:
            last = self.prefixes.extend(last, token)
            along.append(last)
        return along

    def _stream(self, lane: Lane, whole: bool) -> int:
        if whole:
            return int(lane == "prefill")
        self._streams += 1  # others run between slices: no order with anyone may be relied upon
        return self._streams

    def _sampling(self, batch: SimulatedBatch) -> list[Row]:
        return [row for row in batch.rows if row.samples]

    # --- faults --------------------------------------------------------------------------------------------

    def _is_at_fault(self, stage: str, rows: Sequence[Row]) -> bool:
        if any(self.faults.get(row.request.id) == stage for row in rows):
            self.seen[f"fault in {stage}"] += 1
            return True
        # A batch of one would be failed for good.
        if self.transient and len(rows) > 1 and self.rng.randrange(self.transient) == 0:
            self.seen["transient faults"] += 1
            return True
        return False

    def _fault(self, stage: str, rows: Sequence[Row]) -> None:
        if self._is_at_fault(stage, rows):
            raise InjectedError(stage)

    def _answer(self, row: Row, output: SimulatedOutput) -> SimulatedOutput:
        if self.faults.get(row.request.id) == "logits":
            self.seen["fault in logits"] += 1
            return Overflowed(-1, output.state, output.vocab_size)
        return output


class Overflowed(SimulatedOutput):
    """Logits of NaN."""

    @property
    def logits(self):
        return super().logits * float("nan")


class Letters:
    """A tokenizer whose tokens are letters; a faulty one breaks at every token."""

    def __init__(self) -> None:
        self.broken: set[object] = set()

    def stream(self, *, special: bool = False) -> Letters:
        return Letters()

    def put(self, token: int) -> str:
        if self.broken:
            raise InjectedError("text")
        return chr(97 + token)

    def finish(self) -> str:
        return self.put(0) if self.broken else ""


@dataclass
class Parts:
    """Classes of a run; a mutation test replaces some."""

    executor: type[OracleExecutor] = OracleExecutor
    scheduler: type[Scheduler] = Scheduler
    runner: type[Runner] = Runner
    pool: type[Pool] = Pool


class Run:
    """One fuzzed run; :meth:`go` raises what it finds."""

    def __init__(self, seed: int, parts: Parts | None = None) -> None:
        self.rng = rng = random.Random(seed)
        parts = parts or Parts()
        self.vocab = rng.choice((2, 3, 5))
        self.size = size = rng.choice((2, 4, 8, 16))
        self.arrivals = self.draw_requests()
        needed = max(-(-(len(prompt) + most - 1) // size) for prompt, most, _ in self.arrivals)
        base = rng.choice((0.0, 1e-3))
        cost = CostModel(
            name="random",
            origin="simulated",
            source="drawn",
            points=((1, base + rng.random() * 1e-3), (64, base + rng.random() * 1e-2)),
            share=rng.choice((0.5, 0.8, 1.0)),
            host=rng.choice((0.0, 1e-4)),
            num_layers=rng.choice((1, 2, 4, 7)),
        )
        most = needed + rng.choice((0, 1, rng.randrange(3 * needed + 2)))
        first = most if rng.random() < 0.7 else rng.randint(1, most)
        max_rows = rng.randint(1, 6)
        self.executor = parts.executor(
            cost,
            rng,
            num_blocks=first,
            most_blocks=most,
            block_size=size,
            vocab_size=self.vocab,
            max_rows=max_rows,
            max_tokens=max_rows + rng.choice((0, 1, 3, 64)),
            eos_ids=rng.choice(((), (self.vocab - 1,))),
            lanes=rng.random() < 0.8,
            feeds=rng.random() < 0.4,
        )
        self.admission = rng.choice(("peak", "now"))
        self.faulty = rng.random() < 0.3
        self.executor.transient = rng.choice((0, 6)) if self.faulty else 0
        self.with_text = rng.random() < 0.3
        before = engine_module.Scheduler, engine_module.Runner, scheduler_module.Pool
        engine_module.Scheduler, engine_module.Runner = parts.scheduler, parts.runner
        scheduler_module.Pool = parts.pool
        try:
            self.engine = Engine(
                self.executor,
                tokenizer=Letters() if self.with_text else None,
                policy=self.draw_policy(),
                admission=self.admission,
                prefix_cache=rng.random() < 0.9,
                overlap=rng.random() < 0.9,
            )
        finally:
            engine_module.Scheduler, engine_module.Runner, scheduler_module.Pool = before
        self.never_short()
        self.requests: list[Request] = []
        self.aborted: set[Request] = set()
        self.seen = self.executor.seen

    def never_short(self) -> None:
        """Under exact admission no started request ever finds a block missing."""
        pool = self.engine.scheduler.pool
        extend = pool.extend

        def checked(request: Request, stop: int) -> bool:
            extended = extend(request, stop)
            if not extended and self.admission == "peak":
                self.executor.violation = OracleError(f"request {request.id} finds no block for {stop}")
            return extended

        pool.extend = checked  # type: ignore[method-assign]

    # --- what is drawn -------------------------------------------------------------------------------------

    def draw_requests(self) -> list[tuple[list[int], int, str]]:
        rng, size = self.rng, self.size
        base = [rng.randrange(self.vocab) for _ in range(2 * size)]
        tenants = rng.choice((("",), ("", "b")))
        arrivals = []
        for _ in range(rng.randint(1, 8)):
            shared = rng.choice((0, size - 1, size, size + 1, 2 * size, 2 * size))
            tail = [rng.randrange(self.vocab) for _ in range(rng.randrange(size + 2))]
            arrivals.append((base[:shared] + tail or [0], rng.randint(1, 8), rng.choice(tenants)))
        return arrivals

    def draw_policy(self) -> Policy:
        rng = self.rng
        chunk = rng.choice((1, 3, self.size - 1, self.size, self.size + 1, 3 * self.size, 64))
        kind = rng.choice((Serial, Overlap, Ticks, Ticks, Dynamic, Mixed, Sliced, Sliced, Adaptive))
        if kind is Dynamic:
            return Dynamic(chunk, least=rng.randint(1, 4), target_gap=rng.choice((None, 2e-3)))
        if kind is Mixed:
            return Mixed(chunk, alone=rng.choice((None, 2 * chunk)), whole=rng.random() < 0.3)
        if kind is Ticks:
            return Ticks(chunk, gap=rng.choice((None, None, 1e-3, 5e-3, 0.1)))
        if kind is Sliced:
            return Sliced(chunk, budget=rng.choice((1e-4, 1e-3)), beside=rng.random() < 0.5)
        if kind is Adaptive:
            slo = Slo(max_gap=rng.choice((1e-3, 1e-2)), ttft=rng.choice((None, 1e-2)))
            ladder = (Sliced(chunk, budget=1e-3), Mixed(chunk), Ticks(chunk), Overlap(chunk))
            if rng.random() < 0.3:
                return Adaptive(slo)
            return Adaptive(slo, ladder, trial=1, memory=1, foresight=rng.random() < 0.5)
        return kind(chunk)

    def draw_params(self, most: int) -> SamplingParams:
        rng = self.rng
        if rng.random() < 0.03:
            return SamplingParams(max_tokens=most, temperature=1.0, seed=rng.randrange(100))
        return SamplingParams(
            max_tokens=most,
            ignore_eos=rng.random() < 0.5,
            stop=("ab",) if self.with_text and rng.random() < 0.3 else (),
        )

    # --- the run -------------------------------------------------------------------------------------------

    def go(self) -> Counter[str]:
        rng, engine = self.rng, self.engine
        for _ in range(5000):
            if self.arrivals and (engine.idle or rng.random() < 0.5):
                self.arrive()
            elif engine.idle:
                break
            elif rng.random() < 0.1:
                self.disturb()
            else:
                engine.step()
            if self.executor.violation is not None:
                raise self.executor.violation
            if rng.random() < 0.05:
                engine.scheduler.pool.validate(engine.scheduler.running)
        else:
            raise OracleError("it does not come to an end")
        self.check()
        return self.seen

    def arrive(self) -> None:
        prompt, most, salt = self.arrivals.pop()
        request = self.engine.add_request(prompt, self.draw_params(most), salt=salt)
        self.requests.append(request)
        if self.faulty and self.rng.random() < 0.3:
            stage = self.rng.choice(STAGES)
            if stage != "text":
                self.executor.faults[request.id] = stage
            elif request.stream is not None:
                self.executor.faults[request.id] = stage
                request.stream._decoder.broken.add(request)

    def disturb(self) -> None:
        rng, engine = self.rng, self.engine
        what = rng.randrange(6)
        if what in (0, 5):
            request = rng.choice([one for one in self.requests if not one.status.final] or [None])
            if request is not None:
                self.seen["aborted in flight" if request.busy else "aborted"] += 1
                self.aborted.add(request)
                engine.abort(request)
        elif what in (1, 2):
            engine.set_policy(self.draw_policy())
            self.seen["policy switched"] += 1
        elif what == 3:
            engine.set_overlap(rng.random() < 0.5)
        elif rng.random() < 0.3:
            engine.scheduler.pool.cache.clear()
            self.seen["cleared"] += 1

    # --- the end -------------------------------------------------------------------------------------------

    def check(self) -> None:
        scheduler, engine = self.engine.scheduler, self.engine
        self.executor.settle()
        scheduler.pool.validate(scheduler.running)
        if scheduler.pool.blocks.num_used or self.executor.shadow.in_flight or self.executor._works:
            raise OracleError(f"{scheduler.pool.blocks.num_used} blocks in use at the end")
        if self.admission == "peak" and scheduler.preemptions:
            raise OracleError(f"{scheduler.preemptions} preemptions under exact admission")
        scheduler.pool.cache.clear()
        scheduler.pool.blocks.validate(())
        if scheduler.pool.blocks.num_free != scheduler.pool.blocks.num_blocks:
            raise OracleError("not every block is free at the end")
        for request in self.requests:
            self.check_request(request)
        counters = engine.counters
        made = sum(len(request.output_ids) for request in self.requests)
        if counters.output_tokens != made or sum(counters.finished.values()) != len(self.requests):
            raise OracleError(f"miscounted: {counters}")
        if counters.prefill_decode_stream_overlap_steps:
            raise OracleError("a simulation has counted a stream overlap")
        self.seen["preempted"] += scheduler.preemptions
        self.seen["hits"] += scheduler.pool.cache.hits
        self.seen["overlaps"] += counters.prefill_decode_overlap_steps

    def check_request(self, request: Request) -> None:
        name = f"request {request.id}"
        fault = self.executor.faults.get(request.id)
        if not request.status.final or request.in_flight or request.table is not None:
            raise OracleError(f"{name} has not ended: {request}")
        if (request.status is Status.ABORTED) != (request.finish_reason == "abort"):
            raise OracleError(f"{name}: {request.status}, {request.finish_reason}")
        if request.status is Status.FAILED and (fault is None or not request.error):
            raise OracleError(f"{name} has failed for another's fault: {request.error}")
        if request.status is Status.ABORTED and request not in self.aborted:
            raise OracleError(f"{name} was aborted by nobody")
        if request in self.aborted and request.status is Status.FINISHED:
            raise OracleError(f"{name} was aborted and went on")
        self.seen[str(request.finish_reason)] += 1
        self.seen["fault in text"] += request.status is Status.FAILED and fault == "text"
        outputs, full = expected_outputs(request, self.vocab)
        made = len(request.output_ids)
        if request.output_ids != outputs[:made]:
            raise OracleError(f"{name}: {request.output_ids}, expected {outputs}")
        if request.status is Status.FINISHED and (made != len(outputs) or request.finish_reason != full):
            raise OracleError(f"{name}: ended by {request.finish_reason} after {made}; expected {outputs}")
        if request.status is Status.FINISHED and fault is not None:
            raise OracleError(f"{name} finished in spite of its fault in {fault}")
        if len(request.token_times) != made or request.token_times != sorted(request.token_times):
            raise OracleError(f"{name}: times {request.token_times}")


def expected_outputs(request: Request, vocab: int) -> tuple[list[int], str]:
    """Its output, and why it ends there: from the prompt and the parameters alone, token by token."""
    params, state, outputs, text = request.params, 1, [], ""
    for token in request.prompt_ids:
        state = mix(state, token)
    assert request.sampler is not None
    sampler = None if params.is_argmax else Sampler(params, vocab)
    while True:
        token = token_after(state, vocab)
        if sampler is not None:
            logits = SimulatedOutput(token, state, vocab).logits
            token = sampler.sample(logits, request.prompt_ids, outputs).token
        outputs.append(token)
        state = mix(state, token)
        if token in request.end_ids:
            return outputs, "stop"
        text += chr(97 + token)
        if any(stop in text for stop in params.stop):
            return outputs, "stop"
        if len(outputs) == params.max_tokens:
            return outputs, "length"


def failure(seed: int, parts: Parts | None = None) -> Exception | None:
    """What a run finds, or None."""
    try:
        Run(seed, parts).go()
    except Exception as found:
        return found
    return None
