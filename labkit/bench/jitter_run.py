"""One run of one cell of ``labkit bench jitter``: steady streams, and the prompts that disturb them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.bench import serving, timeline, traces
from labkit.bench.jitter_cases import Options
from labkit.bench.policy_specs import PolicySpec, Scale
from labkit.bench.stages import Stage
from labkit.bench.timeline import Gate, Timeline
from labkit.engine.engine import Engine
from labkit.engine.metrics import Counters, Spread
from labkit.engine.request import Request
from labkit.engine.sampling import SamplingParams
from labkit.errors import refuse


@dataclass
class Run:
    """One run of one cell, as far as its figures need it."""

    streams: list[Request]
    prompts: list[Request]
    gaps: list[timeline.Gap]
    gate: Gate
    counters: Counters
    two_lanes: bool
    seconds: float
    target: float | None


@dataclass
class Baseline:
    """What the baseline's first run has shown: what relative targets, rates and bounds are taken from."""

    scale: Scale
    prompt_rate: float


def document_run(
    options: Options, stage: Stage, spec: PolicySpec, overlap: bool, known: Baseline | None
) -> Run:
    """Documents inserted one after the other into steady streams."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)  # it is read; what it writes is not the matter

    def drive(engine: Engine, streams: Sequence[Request], ended: Callable[[], bool]) -> list[Request]:
        prompts = []
        for number in range(options.documents):
            ids = traces.prompt(options.seed, options.streams + number, options.document, _vocab(stage))
            document = engine.add_request(ids, params)
            prompts.append(document)
            while not document.status.final:
                engine.step()
            timeline.settle(engine, streams, options.rest, until=ended)
        return prompts

    return _run(options, stage, spec, overlap, known, drive)


def cold_run(
    options: Options, stage: Stage, spec: PolicySpec, overlap: bool, known: Baseline | None, rate: float
) -> Run:
    """Cold prompts that arrive among steady streams, open loop."""
    sizes = traces.lengths(options.cold, *options.cold_lengths, options.seed)
    first = options.streams + options.documents
    trace = traces.cold_prompts(
        sizes, rate, answer=options.cold_answer, seed=options.seed, vocab=_vocab(stage), first=first
    )

    def drive(engine: Engine, streams: Sequence[Request], ended: Callable[[], bool]) -> list[Request]:
        start = engine.executor.now()
        prompts: list[Request] = []
        waiting = list(reversed(trace))
        while waiting or not all(one.status.final for one in prompts):
            while waiting and start + waiting[-1].time <= engine.executor.now():
                one = waiting.pop()
                prompts.append(engine.add_request(one.prompt, one.params, arrival=start + one.time))
            if engine.idle and waiting:  # the streams have ended early: the gate says so
                engine.executor.idle(start + waiting[-1].time)
            else:
                engine.step()
        timeline.settle(engine, streams, options.rest, until=ended)
        return prompts

    return _run(options, stage, spec, overlap, known, drive)


def _run(
    options: Options,
    stage: Stage,
    spec: PolicySpec,
    overlap: bool,
    known: Baseline | None,
    drive: Callable[[Engine, Sequence[Request], Callable[[], bool]], list[Request]],
) -> Run:
    scale = known.scale if known else None
    engine = serving.engine_for(stage, spec.make(scale), overlap)
    params = SamplingParams(max_tokens=options.most, ignore_eos=True)
    streams = [
        engine.add_request(traces.prompt(options.seed, i, options.stream_prompt, _vocab(stage)), params)
        for i in range(options.streams)
    ]
    watched = Timeline(engine, streams)

    def ended() -> bool:
        return any(one.status.final for one in streams)

    timeline.settle(engine, streams, options.warm, until=ended)
    begun = max((one.token_times[0] for one in streams if one.token_times), default=engine.executor.now())
    before = engine.executor.now()
    prompts = drive(engine, streams, ended)
    after = engine.executor.now()
    for one in streams:
        engine.abort(one)
    engine.run()
    return Run(
        streams,
        prompts,
        timeline.tagged_gaps(watched, begun),
        timeline.gate(watched, prompts),
        engine.counters.copy(),
        spec.overlaps and engine.scheduler.two_lanes,
        after - before,
        spec.seconds(scale),
    )


def _vocab(stage: Stage) -> int:
    return stage.executor.vocab_size


def baseline_of(found: Run) -> Baseline:
    """The middle step, the largest gap and the prompt tokens a second of a run."""
    beside = [gap.seconds for gap in found.gaps if gap.tag != "none"]
    steady = Spread.of(gap.seconds for gap in found.gaps if gap.tag == "none").p50
    if not beside or steady is None:
        refuse("baseline", "no gap with prefill in it, or none without", "longer streams, a longer document")
    return Baseline(Scale(steady, max(beside)), prompt_rate([found]))


def prompt_rate(runs: Sequence[Run]) -> float:
    """Prompt tokens a second: of all prompts, over the sum of their TTFTs."""
    prompts = [one for found in runs for one in found.prompts if one.token_times]
    waits = [(one.prompt_len, one.token_times[0] - one.arrival) for one in prompts]
    seconds = sum(wait for _, wait in waits)
    return sum(tokens for tokens, _ in waits) / seconds if seconds else 0.0
