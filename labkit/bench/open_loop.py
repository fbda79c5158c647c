"""``labkit bench serving``: requests that arrive open loop, at several rates; who keeps the service level.

Arrivals are a Poisson process from a seed: they do not wait for answers, so an engine that is too slow gets a
queue. Rates are shares of what the baseline gets through when every request is there at once (its capacity),
or requests a second. Every policy and every rate must give the same tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.bench import serving, stages, traces
from labkit.bench.policy_specs import PolicySpec, Scale, parse_policies, with_overlap
from labkit.bench.record import Entry, Record
from labkit.bench.serving import Answers, Report
from labkit.bench.stages import Need, Stage
from labkit.engine import metrics
from labkit.engine.metrics import Counters, Latency, Slo, goodput, span
from labkit.engine.request import Request
from labkit.engine.sim import replay
from labkit.errors import require

PREFIX = "serving "
"""Of the names of its tables; "load 0.5" or "2 a second" follows."""

_BASELINE = PolicySpec("serial", 128)


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        where: "cpu", "cuda", or a key of labkit.bench.stages.SIMULATED.
        policies: in order.
        baseline: whose capacity the loads are shares of, and what relative targets refer to.
        overlap: True or False for one of them; None for both.
        loads: arrivals, as shares of the baseline's capacity.
        rates: arrivals a second instead; empty for the loads.
        requests: of each run.
        lengths: tokens of the prompts (from, to). answer: tokens that each writes.
        repeats: runs of each cell, in turns.
        ttft, tpot, gap: bounds of the service level in seconds. None: 4 times the TTFT and 3 times the TPOT
            of the longest prompt alone on the baseline; no bound on gaps.
        seed: of prompts and arrivals.
        model: shape of the random weights on a GPU.
    """

    where: str = "h200"
    policies: tuple[PolicySpec, ...] = parse_policies(
        "serial:128,overlap:128,dynamic:512@50%,mixed:128,sliced:512@50%,adaptive@100%"
    )
    baseline: PolicySpec = _BASELINE
    overlap: bool | None = None
    loads: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    rates: tuple[float, ...] = ()
    requests: int = 64
    lengths: tuple[int, int] = (64, 1024)
    answer: int = 64
    repeats: int = 1
    ttft: float | None = None
    tpot: float | None = None
    gap: float | None = None
    seed: int = 0
    model: str = stages.MODEL

    def __post_init__(self) -> None:
        for name, unit in (("loads", "shares of the capacity"), ("rates", "requests a second")):
            given = getattr(self, name)
            require(all(0 < one < 1e6 for one in given), name, given, f"{unit} above 0")
        require(bool(self.loads or self.rates), "loads", self.loads, "at least one load or rate")
        for name in ("requests", "answer", "repeats"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        least, most = self.lengths
        require(1 <= least <= most, "lengths", self.lengths, "FROM-TO, at least 1")
        require(not self.baseline.relative, "baseline", self.baseline.label, "a policy without a share")
        Slo(ttft=self.ttft, tpot=self.tpot, max_gap=self.gap)  # refuses bounds that are none

    @property
    def need(self) -> Need:
        """What it asks of a stage: room for a queue in which every request is there."""
        each = self.lengths[1] + self.answer
        chunk = max(spec.chunk or 512 for spec in (self.baseline, *self.policies))
        rows = min(max(self.requests, 2), 64)
        return Need(rows=rows, context=each, tokens=rows * each, chunk=chunk)

    @property
    def arrivals(self) -> list[tuple[str, float]]:
        """(name of the table, rate or load) of each speed of arrivals."""
        if self.rates:
            return [(f"{PREFIX}{rate:g} a second", rate) for rate in dict.fromkeys(self.rates)]
        return [(f"{PREFIX}load {load:g}", load) for load in dict.fromkeys(self.loads)]


def preset(where: str) -> Options:
    """Sizes that suit a machine: seconds simulated, a minute on an H200, 20 s on a CPU."""
    if where == "cpu":
        return Options(
            where,
            policies=parse_policies("serial:32,mixed:32"),
            baseline=PolicySpec("serial", 32),
            loads=(0.5, 1.0),
            requests=6,
            lengths=(8, 24),
            answer=6,
        )
    if where == "rtx3050":
        return Options(where, requests=32, lengths=(32, 512))
    return Options(where, requests=128) if where == "cuda" else Options(where)


def run(options: Options, command: str, report: Report = print, stage: Stage | None = None) -> Record:
    """Run every cell on one executor.

    Args:
        options: what to run.
        command: the command line, for the record.
        report: receives one line a cell.
        stage: instead of what ``options.where`` names.

    Returns:
        The record; ``complete`` is False when Ctrl-C ended the run.
    """
    stage = stage or stages.make(options.where, options.need, model=options.model, report=report)
    answers = Answers()
    with serving.recording("serving", options, options.policies, stage, command) as record:
        known = _warm(options, stage, report)
        bounds = _bounds(options, known)
        record.parameters |= {"ttft": bounds.ttft, "tpot": bounds.tpot, "gap": bounds.max_gap}
        record.parameters |= {
            "capacity": known.capacity,
            "alone_ttft_s": known.ttft,
            "alone_tpot_s": known.tpot,
        }
        record.notes.append("arrivals: a Poisson process from the seed, the same for every policy; open loop")
        for table, value in options.arrivals:
            rate = value if options.rates else value * known.capacity
            _cells(options, stage, record, answers, known, bounds, table, rate, report)
    return record


# --- what the baseline shows -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """The baseline: requests a second when all are there at once, the longest prompt alone, its gaps."""

    capacity: float
    ttft: float
    tpot: float
    scale: Scale


def _warm(options: Options, stage: Stage, report: Report) -> Known:
    stage.warm()
    alone = replace(options, requests=1, lengths=(options.lengths[1],) * 2, answer=max(options.answer, 2))
    if stage.real:  # what a first run makes (graphs, compiled kernels, workspaces) is not timed
        open_run(alone, stage, options.baseline, False, None, None)
        if stage.on_gpu:
            open_run(options, stage, options.baseline, False, None, None)
    one = open_run(alone, stage, options.baseline, False, None, None).requests[0]
    everyone = open_run(options, stage, options.baseline, False, None, None).requests
    wait, pace = metrics.ttft(one), metrics.tpot(one)
    taken = span(everyone)
    require(bool(wait and pace and taken), "baseline", options.baseline.label, "a policy that answers")
    assert wait is not None and pace is not None
    gaps = [gap for request in everyone for gap in metrics.gaps(request)]
    known = Known(len(everyone) / taken, wait, pace, Scale(pace, max(gaps, default=pace)))
    if stage.on_gpu:
        for spec in options.policies:
            with contextlib.suppress(Exception):  # it is said below, where it counts
                open_run(options, stage, spec, options.overlap is not False, known.scale, None)
    report(f"the baseline, all at once: {known.capacity:.3g} requests/s; alone: TTFT {_ms(known.ttft)}")
    return known


def _bounds(options: Options, known: Known) -> Slo:
    """The service level; what is not given follows from the longest prompt alone."""
    ttft = options.ttft or 4 * known.ttft
    return Slo(ttft=ttft, tpot=options.tpot or 3 * known.tpot, max_gap=options.gap)


# --- one run -----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run of one cell."""

    requests: list[Request]
    counters: Counters
    two_lanes: bool


def open_run(
    options: Options,
    stage: Stage,
    spec: PolicySpec,
    overlap: bool,
    scale: Scale | None,
    rate: float | None,
    number: int = 0,
) -> Run:
    """All requests of one run.

    Args:
        rate: arrivals a second; None: all at once.
        number: of the repeat: each has arrivals of its own, and the prompts of all.
    """
    engine = serving.engine_for(stage, spec.make(scale), overlap)
    sizes = traces.lengths(options.requests, *options.lengths, options.seed)
    trace = traces.cold_prompts(
        sizes, rate or 1.0, answer=options.answer, seed=options.seed, vocab=stage.executor.vocab_size, first=0
    )
    times = traces.poisson(len(sizes), rate, options.seed + number) if rate else [0.0] * len(sizes)
    start = stage.executor.now()
    arrivals = [replace(one, time=start + time) for one, time in zip(trace, times, strict=True)]
    requests = replay(engine, arrivals)
    return Run(requests, engine.counters.copy(), spec.overlaps and engine.scheduler.two_lanes)


def _cells(
    options: Options,
    stage: Stage,
    record: Record,
    answers: Answers,
    known: Known,
    bounds: Slo,
    table: str,
    rate: float,
    report: Report,
) -> None:
    """All policies at one rate, in turns."""
    pairs = with_overlap(options.policies, options.overlap, lanes=stage.executor.lanes)
    runs: dict[tuple[PolicySpec, bool], list[Run | Exception]] = {pair: [] for pair in pairs}
    for number in range(options.repeats):
        for spec, overlap in pairs:
            try:
                runs[spec, overlap].append(open_run(options, stage, spec, overlap, known.scale, rate, number))
            except Exception as error:  # the other cells go on
                runs[spec, overlap].append(error)
    for (spec, overlap), found in runs.items():
        record.entries.append(
            _entry(options, stage, answers, known, bounds, table, rate, spec, overlap, found)
        )
        report(sentence(record.entries[-1]))


# --- figures -----------------------------------------------------------------------------------------------


def _entry(
    options: Options,
    stage: Stage,
    answers: Answers,
    known: Known,
    bounds: Slo,
    table: str,
    rate: float,
    spec: PolicySpec,
    overlap: bool,
    found: Sequence[Run | Exception],
) -> Entry:
    sizes = {"m": options.requests, "n": options.answer, "k": options.lengths[1]}
    entry = serving.entry_for(table, stage, spec, overlap, **sizes)
    if error := next((one for one in found if isinstance(one, Exception)), None):
        return serving.failed(entry, error)
    runs = [one for one in found if isinstance(one, Run)]
    requests = [one for run in runs for one in run.requests]
    compared, different = answers.compare(requests)
    seconds = sum(span(run.requests) for run in runs)
    latency = Latency.of(requests)
    entry.figures |= _rates(requests, bounds, seconds) | {
        "rate": rate,
        "load": rate / known.capacity,
        "runs": len(runs),
        "two_lanes": runs[0].two_lanes,
        "target_s": spec.seconds(known.scale),
        "counters": serving.total(run.counters for run in runs),
        "exact": {"compared": compared, "different": different},
        "ttft": serving.spread(latency.ttft),
        "tpot": serving.spread(latency.tpot),
        "itl": serving.spread(latency.itl),
    }
    waits = [metrics.ttft(one) for one in requests]
    entry.samples_us = [1e6 * wait for wait in waits if wait is not None]
    entry.method = {"how": "TTFT of every request, in order of arrival", "calls": len(runs)}
    serving.judge(entry, stage, requests)
    if entry.status != "timed":
        entry.samples_us = []
    return entry


def _rates(requests: Sequence[Request], bounds: Slo, seconds: float) -> dict[str, Any]:
    """Of the runs together: from the first arrival of each to its last token."""
    tokens = sum(len(one.token_times) for one in requests)
    return {
        "requests": len(requests),
        "met": sum(map(bounds.met, requests)),
        "goodput": goodput(requests, bounds, seconds),
        "answered": len(requests) / seconds if seconds else 0.0,
        "tok_s": tokens / seconds if seconds else 0.0,
    }


def sentence(entry: Entry) -> str:
    """One line for the terminal."""
    head = f"{entry.table.removeprefix(PREFIX)}, {entry.contender}"
    if entry.status != "timed":
        return f"{head}: {entry.status} {entry.note}"
    figures = entry.figures
    text = f"{head}: {figures['rate']:.3g} requests/s, TTFT p50 {_ms(figures['ttft']['p50'])}, "
    text += f"p95 {_ms(figures['ttft']['p95'])}, TPOT p50 {_ms(figures['tpot']['p50'])}, "
    return text + f"{figures['met']} of {figures['requests']} in bounds, goodput {figures['goodput']:.3g}/s"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:,.2f} ms"
