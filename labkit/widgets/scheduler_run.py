"""A small crowd of requests under the real scheduler, on the simulated clock: what ran when, and for whom."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.engine.cost_model import rtx3050
from labkit.engine.engine import Engine
from labkit.engine.metrics import Latency, span
from labkit.engine.policy import Mixed, Overlap, Policy, Serial
from labkit.engine.request import Request
from labkit.engine.sampling import SamplingParams
from labkit.engine.sim import Arrival, SimulatedExecutor, replay
from labkit.engine.work import MixedWork, Work
from labkit.errors import require

POLICIES: dict[str, type[Serial] | type[Mixed]] = {"serial": Serial, "overlap": Overlap, "mixed": Mixed}
RATES = (0.5, 1.0, 1.5, 2.0, 4.0)
CHUNKS = (16, 32, 64, 128, 256, 512)

PROMPTS = (24, 40, 16, 320, 32, 90, 20, 48)
"""Tokens of each request's prompt: one is long."""

ANSWERS = (60, 44, 70, 30, 50, 36, 56, 40)
"""Tokens of each answer."""


@dataclass(frozen=True)
class Block:
    """A work on the clock.

    Attributes:
        lane: "decode" or "prefill".
        kind: "decode", "prefill" or "mixed".
        start, end: seconds.
        rows: requests that decode. prompt_tokens: of chunks.
        chunks: names of the requests whose prompts it computes.
    """

    lane: str
    kind: str
    start: float
    end: float
    rows: int
    prompt_tokens: int
    chunks: tuple[str, ...]

    @property
    def title(self) -> str:
        """What it is, in words."""
        parts = [f"{self.rows} rows decode"] if self.rows else []
        parts += [f"chunk of {self.prompt_tokens} of {', '.join(self.chunks)}"] if self.chunks else []
        return f"{' + '.join(parts)}, {1e3 * (self.end - self.start):.0f} ms"


@dataclass(frozen=True)
class Track:
    """One request on the clock: its arrival, its prompt's length, and when each token was known."""

    name: str
    prompt_len: int
    arrival: float
    token_times: tuple[float, ...]

    @property
    def largest_gap(self) -> tuple[float, float]:
        """Start and end of its longest inter-token latency."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return max(pairs, key=lambda both: both[1] - both[0])


@dataclass(frozen=True)
class Run:
    """A whole replay.

    Attributes:
        blocks: works in the order of their starts. tracks: requests in the order of arrival.
        latency: TTFT, TPOT and ITL of all. tokens_s: output tokens a second.
        overlap_steps: cycles with prefill and decode work both.
        label: of every figure here: where the costs come from.
    """

    blocks: tuple[Block, ...]
    tracks: tuple[Track, ...]
    latency: Latency
    tokens_s: float
    overlap_steps: int
    label: str

    @property
    def end(self) -> float:
        """Seconds at the last token."""
        return max(track.token_times[-1] for track in self.tracks)


def arrivals(rate: float) -> list[Arrival]:
    """The crowd; ``rate`` (requests a second) only stretches the clock, the draws stay."""
    dice, now, out = random.Random(4), 0.0, []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        ids = [dice.randrange(32_000) for _ in range(prompt)]
        out.append(Arrival(now, ids, SamplingParams(max_tokens=answer)))
        now += dice.expovariate(1.0) / rate
    return out


def record(engine: Engine) -> list[tuple[Work, float, float]]:
    """A list that fills while the engine runs: each work that has joined, with its start and end."""
    log: list[tuple[Work, float, float]] = []

    ends: dict[str, float] = {}

    def joined(work: Work, now: float) -> None:
        # A work that was launched behind another one of its lane starts at that one's end.
        start = max(now if work.launched is None else work.launched, ends.get(work.lane, 0.0))
        ends[work.lane] = start + work.seconds
        log.append((work, start, ends[work.lane]))

    engine.runner.watch = joined
    return log


@functools.cache
def run(rate: float, chunk: int, policy: str) -> Run:
    """Replay the crowd on the RTX 3050's cost model.

    Raises:
        InputError: a rate, a chunk or a policy that is not listed.
    """
    require(rate in RATES, "rate", repr(rate), f"one of {RATES}")
    require(chunk in CHUNKS, "chunk", repr(chunk), f"one of {CHUNKS}")
    require(policy in POLICIES, "policy", repr(policy), "one of " + ", ".join(POLICIES))
    chosen: Policy = POLICIES[policy](chunk)
    engine = Engine(SimulatedExecutor(rtx3050(), num_blocks=1024), policy=chosen)
    log = record(engine)
    requests = replay(engine, arrivals(rate))
    names = {request: chr(ord("A") + at) for at, request in enumerate(requests)}
    blocks = [_block(work, start, end, names) for work, start, end in log]
    tracks = [Track(names[one], one.prompt_len, one.arrival, tuple(one.token_times)) for one in requests]
    return Run(
        tuple(sorted(blocks, key=lambda block: block.start)),
        tuple(tracks),
        Latency.of(requests),
        _tokens_s(requests),
        engine.counters.prefill_decode_overlap_steps,
        rtx3050().origin,
    )


def _block(work: Work, start: float, end: float, names: dict[Request, str]) -> Block:
    decoding = work.decode_rows if isinstance(work, MixedWork) else len(work.rows) * work.has_decode
    kind = "mixed" if work.has_decode and work.has_prefill else "decode" if work.has_decode else "prefill"
    chunks = tuple(names[row.request] for row in work.rows[decoding:])
    return Block(work.lane, kind, start, end, decoding, work.prompt_tokens, chunks)


def _tokens_s(requests: Sequence[Request]) -> float:
    return sum(len(one.output_ids) for one in requests) / span(requests)
