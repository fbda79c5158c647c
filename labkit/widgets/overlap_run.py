"""Documents among streams that decode, on one living engine: what ran on which lane, and when.

Policy and overlap are flipped between two runs, never the engine. On a GPU the works' own CUDA events say
when they ran, on one clock for both streams; in a simulation the pretended device does.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from labkit.bench import stages, traces
from labkit.bench.policy_specs import PolicySpec
from labkit.bench.stages import Need, Stage
from labkit.bench.timeline import Timeline, settle, tagged_gaps
from labkit.engine.engine import Engine
from labkit.engine.executor import Executor, Handle, Output, Row
from labkit.engine.metrics import Spread
from labkit.engine.request import Request
from labkit.engine.sampling import SamplingParams
from labkit.errors import require

POLICIES = ("serial", "overlap", "ticks", "mixed")
CHUNKS = (32, 64, 128, 256, 512)
SIZES = {"rtx3050": (4, 512), "h200": (16, 2048), "cuda": (8, 1024)}
"""Where → (streams, tokens of the document)."""

_PROMPT, _WARM, _REST, _MOST = 8, 6, 6, 512
_AROUND = 3.0
"""Steps that a timeline shows before the document and after it."""

_DUST = 1e-6
"""Seconds that sums of times may be off."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Block:
    """A work on the device.

    Attributes:
        lane: "decode" or "prefill". kind: "decode", "prefill" or "mixed".
        start, end: seconds since the document came.
        rows: requests that decode. prompt_tokens: of chunks.
    """

    lane: str
    kind: str
    start: float
    end: float
    rows: int
    prompt_tokens: int

    @property
    def title(self) -> str:
        """What it is, in words."""
        parts = [f"{self.rows} rows decode"] if self.rows else []
        parts += [f"chunk of {self.prompt_tokens}"] if self.prompt_tokens else []
        return f"{' + '.join(parts)}, {1e3 * (self.end - self.start):.3g} ms"


@dataclass(frozen=True)
class Run:
    """One document.

    Attributes:
        blocks: works round the document, in the order of their starts.
        ticks: when one stream got its tokens, in the same seconds.
        gaps: of all streams while the document was computed. step: median gap otherwise.
        ttft: of the document. prompt_rate: its tokens a second.
        busy_both: seconds in which both lanes ran something.
        overlap_steps: engine cycles with prefill and decode work both.
        stream_overlap_steps: those on two CUDA streams.
        answers: tokens of every stream, as far as it came.
        origin: "measured", "simulated from quoted", ... device: its name.
    """

    blocks: tuple[Block, ...]
    ticks: tuple[float, ...]
    gaps: Spread
    step: float
    ttft: float
    prompt_rate: float
    busy_both: float
    overlap_steps: int
    stream_overlap_steps: int
    answers: tuple[tuple[int, ...], ...]
    origin: str
    device: str

    @property
    def largest_gap(self) -> Interval:
        """Start and end of the longest wait of the stream that is shown."""
        return max(itertools.pairwise(self.ticks), key=lambda both: both[1] - both[0])


def beside(decode: Iterable[Interval], prefill: Iterable[Interval]) -> float:
    """Seconds in which both lanes ran something; intervals of one lane do not overlap."""
    right = list(prefill)
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in decode for c, d in right)


class Watched:
    """An executor that remembers when each work ran; all else is the executor's own.

    Attributes:
        seen: (rows, lane, start, end) of every work that has joined, on the executor's clock.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._base: Any = None
        self.seen: list[tuple[Sequence[Row], str, float, float]] = []
        self._zero = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def begin(self) -> None:
        """Forget what was seen, and tie the device's clock to the host's. Nothing may be in flight."""
        self.seen = []
        if self._executor.concurrent:
            import torch

            self._base = torch.cuda.Event(enable_timing=True)
            self._base.record(torch.cuda.default_stream())
            self._base.synchronize()
            self._zero = self._executor.now()

    def join(self, handle: Handle) -> Sequence[Output]:
        """The executor's, and a note."""
        outputs = self._executor.join(handle)
        if self._base is None:
            start, end = handle.start, handle.end
        else:
            events = (handle.work.started, handle.work.ended)
            start, end = (self._zero + self._base.elapsed_time(event) / 1e3 for event in events)
        self.seen.append((handle.batch.rows, handle.batch.lane, start, end))
        return outputs


@dataclass
class Machine:
    """One engine that lives as long as the notebook.

    Attributes:
        where: key of :data:`SIZES`.
        stage: what it runs on.
        engine: its policy and its overlap are set before each run.
    """

    where: str
    stage: Stage
    engine: Engine = field(init=False)
    _watched: Watched = field(init=False)
    _known: dict[tuple[str, bool, int], Run] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._watched = Watched(self.stage.executor)
        self.stage.warm()
        self.engine = Engine(cast(Executor, self._watched), policy="serial", prefix_cache=False)

    def run(self, policy: str, overlap: bool, chunk: int) -> Run:
        """Flip, insert a document, and say what came of it; a state that is known is not run again.

        Raises:
            InputError: a policy or a chunk that is not listed.
        """
        require(policy in POLICIES, "policy", repr(policy), "one of " + ", ".join(POLICIES))
        require(chunk in CHUNKS, "chunk", repr(chunk), f"one of {CHUNKS}")
        key = policy, bool(overlap), chunk
        if key not in self._known:
            if self.stage.real:  # what a first run makes is no gap
                self._run(*key)
            self._known[key] = self._run(*key)
        return self._known[key]

    def forget(self, policy: str, overlap: bool, chunk: int) -> None:
        """Let the next :meth:`run` of that state run again."""
        self._known.pop((policy, overlap, chunk), None)

    def _run(self, policy: str, overlap: bool, chunk: int) -> Run:
        engine, (count, length) = self.engine, SIZES[self.where]
        engine.set_policy(PolicySpec(policy, chunk).make())
        engine.set_overlap(overlap)
        if self.stage.real:
            gc.collect()
        self._watched.begin()
        before = engine.counters.copy()
        vocab = self.stage.executor.vocab_size
        params = SamplingParams(max_tokens=_MOST, ignore_eos=True)
        streams = [engine.add_request(traces.prompt(12, i, _PROMPT, vocab), params) for i in range(count)]
        line = Timeline(engine, streams)

        def ended() -> bool:
            return any(one.status.final for one in streams)

        one = SamplingParams(max_tokens=1, ignore_eos=True)
        settle(engine, streams, _WARM, until=ended)
        document = engine.add_request(traces.prompt(12, count, length, vocab), one)
        try:
            while not document.status.final:
                engine.step()
            settle(engine, streams, _REST, until=ended)
        finally:  # stopped by hand, too: the next run wants the engine for itself
            for request in (*streams, document):
                engine.abort(request)
            engine.run()
        return self._figures(line, document, before)

    def _figures(self, line: Timeline, document: Request, before: Any) -> Run:
        streams, came = line.streams, document.arrival
        begun = max(stream.token_times[0] for stream in streams)
        gaps = tagged_gaps(line, begun)
        step = Spread.of(gap.seconds for gap in gaps if gap.tag == "none").p50 or 0.0
        ttft = document.token_times[0] - came
        # A simulated clock never stands still between two runs, and rounds: what ends on the edge stays in.
        low, high = -_AROUND * step - _DUST, ttft + _AROUND * step + _DUST
        seen = [_block(*one, came) for one in self._watched.seen]
        lanes = [[(one.start, one.end) for one in seen if one.lane == lane] for lane in ("decode", "prefill")]
        times = (time - came for time in streams[0].token_times)
        after = self.engine.counters
        name = "prefill_decode_overlap_steps", "prefill_decode_stream_overlap_steps"
        both, two = (getattr(after, one) - getattr(before, one) for one in name)
        return Run(
            blocks=tuple(sorted((one for one in seen if low < one.end <= high), key=lambda one: one.start)),
            ticks=tuple(time for time in times if low < time <= high),
            gaps=Spread.of(gap.seconds for gap in gaps if gap.tag != "none"),
            step=step,
            ttft=ttft,
            prompt_rate=document.prompt_len / ttft,
            busy_both=beside(*lanes),
            overlap_steps=both,
            stream_overlap_steps=two,
            answers=tuple(tuple(stream.output_ids) for stream in streams),
            origin=self.stage.origin,
            device=str(self.stage.device["name"]),
        )


def _block(rows: Sequence[Row], lane: str, start: float, end: float, zero: float) -> Block:
    chunks = sum(row.count for row in rows if row.start < row.request.prompt_len)
    decoding = sum(row.start >= row.request.prompt_len for row in rows)
    kind = "mixed" if chunks and decoding else "prefill" if chunks else "decode"
    return Block(lane, kind, start - zero, end - zero, decoding, chunks)


@functools.cache
def machine(where: str) -> Machine:
    """The machine of that name; made once.

    Args:
        where: "cuda" (random weights of Qwen2.5-3B, W4), or a cost model: "rtx3050", "h200".

    Raises:
        InputError: an unknown name.
    """
    require(where in SIZES, "where", repr(where), "one of " + ", ".join(SIZES))
    streams, document = SIZES[where]
    context = max(_PROMPT + _MOST, document + 64)
    tokens = streams * (_PROMPT + _MOST) + document + 64
    need = Need(rows=streams + 1, context=context, tokens=tokens, chunk=max(CHUNKS))
    return Machine(where, stages.make(where, need, report=lambda _: None))
