"""``labkit bench concurrency``: 1 … 64 clients at once, for every policy, with the overlap on and off.

Closed loop: each client sends a prompt, reads its answer to the end, and sends the next. Answers are compared
before their times count: every policy and every number of clients must give the same tokens.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.bench import serving, stages, traces
from labkit.bench.policy_specs import PolicySpec, Scale, parse_policies, with_overlap
from labkit.bench.record import Entry, Record
from labkit.bench.serving import FORMAT, Answers, Report
from labkit.bench.stages import Need, Stage
from labkit.engine import metrics
from labkit.engine.metrics import Counters, Latency, Slo, goodput, span
from labkit.engine.request import Request
from labkit.engine.sampling import SamplingParams
from labkit.errors import require

TABLE = "concurrency"
PEER = "transformers"
_PEER_REPEATS = 2  # it is slow
_BASELINE = PolicySpec("serial", 128)


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        where: "cpu", "cuda", or a key of labkit.bench.stages.SIMULATED.
        policies: in order.
        baseline: what relative targets refer to: its smallest and largest gap, with the most clients.
        overlap: True or False for one of them; None for both.
        clients: requests at once.
        prompt, answer: tokens of each prompt and answer.
        rounds: prompts of each client.
        repeats: runs of each cell, in turns.
        ttft, tpot, gap: bounds of the service level in seconds, for the goodput; None sets no bound.
        peers: transformers' continuous batching in the same run, on a GPU.
        seed: of the prompts.
        model: shape of the random weights on a GPU.
    """

    where: str = "h200"
    policies: tuple[PolicySpec, ...] = parse_policies(
        "serial:128,overlap:128,ticks:128,dynamic:512@50%,mixed:128,sliced:512@50%,adaptive@100%"
    )
    baseline: PolicySpec = _BASELINE
    overlap: bool | None = None
    clients: tuple[int, ...] = (1, 2, 4, 16, 64)
    prompt: int = 128
    answer: int = 64
    rounds: int = 1
    repeats: int = 1
    ttft: float | None = None
    tpot: float | None = None
    gap: float | None = None
    peers: bool = False
    seed: int = 0
    model: str = stages.MODEL

    def __post_init__(self) -> None:
        require(
            bool(self.clients) and min(self.clients) >= 1, "clients", self.clients, "numbers of at least 1"
        )
        for name in ("prompt", "answer", "rounds", "repeats"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(not self.baseline.relative, "baseline", self.baseline.label, "a policy without a share")
        _ = self.slo  # refuses bounds that are none

    @property
    def slo(self) -> Slo:
        """The service level."""
        return Slo(ttft=self.ttft, tpot=self.tpot, max_gap=self.gap)

    @property
    def need(self) -> Need:
        """What it asks of a stage."""
        each, rows = self.prompt + self.answer, max(self.clients)
        rows = max(rows, 2)  # of the run that the scale is taken from
        chunk = max(spec.chunk or 512 for spec in (self.baseline, *self.policies))
        return Need(rows=rows, context=each, tokens=rows * each, chunk=chunk)


def preset(where: str) -> Options:
    """Sizes that suit a machine: seconds simulated, a minute on an H200, 20 s on a CPU."""
    if where == "cpu":
        return Options(
            where,
            policies=parse_policies("serial:32,ticks:32,dynamic:64@50%,mixed:32,sliced:64@50%"),
            baseline=PolicySpec("serial", 32),
            clients=(1, 2, 4),
            prompt=24,
            answer=8,
        )
    return Options(where, repeats=3 if where == "cuda" else 1)


def run(options: Options, command: str, report: Report = print, stage: Stage | None = None) -> Record:
    """Run every cell on one executor, then the peers.

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
    with serving.recording("concurrency", options, options.policies, stage, command) as record:
        scale = _warm(options, stage, report)
        record.parameters |= {"baseline_gap_s": scale.gap, "baseline_step_s": scale.step}
        for clients in options.clients:
            _cells(options, stage, record, answers, scale, clients, report)
        if options.peers:
            _peers(options, stage, record, report)
    return record


def _warm(options: Options, stage: Stage, report: Report) -> Scale:
    """What a first run makes (graphs, compiled kernels, workspaces) is made before anything is timed; and
    what relative targets are shares of."""
    stage.warm()
    clients = max(max(options.clients), 2)
    if stage.real:
        small = options if stage.on_gpu else replace(options, answer=2, rounds=1)
        client_run(small, stage, options.baseline, False, clients if stage.on_gpu else 2, None)
    found = client_run(options, stage, options.baseline, False, clients, None)
    gaps = [gap for one in found.requests for gap in metrics.gaps(one)]
    scale = Scale(min(gaps, default=0.0), max(gaps, default=0.0))
    if stage.on_gpu:
        for spec in options.policies:
            with contextlib.suppress(Exception):  # it is said below, where it counts
                client_run(options, stage, spec, options.overlap is not False, clients, scale)
        report("warmed up: every policy has run once")
    return scale


def _cells(
    options: Options,
    stage: Stage,
    record: Record,
    answers: Answers,
    scale: Scale,
    clients: int,
    report: Report,
) -> None:
    """All policies with so many clients, in turns."""
    pairs = with_overlap(options.policies, options.overlap, lanes=stage.executor.lanes)
    runs: dict[tuple[PolicySpec, bool], list[Run | Exception]] = {pair: [] for pair in pairs}
    for _ in range(options.repeats):
        for spec, overlap in pairs:
            try:
                runs[spec, overlap].append(client_run(options, stage, spec, overlap, clients, scale))
            except Exception as error:  # the other cells go on
                runs[spec, overlap].append(error)
    for (spec, overlap), found in runs.items():
        record.entries.append(_entry(options, stage, answers, scale, spec, overlap, clients, found))
        report(sentence(record.entries[-1]))


# --- one run -----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run of one cell."""

    requests: list[Request]
    counters: Counters
    two_lanes: bool


def client_run(
    options: Options, stage: Stage, spec: PolicySpec, overlap: bool, clients: int, scale: Scale | None
) -> Run:
    """``clients`` of them, each with one request at a time, until all rounds are through."""
    engine = serving.engine_for(stage, spec.make(scale), overlap)
    params = SamplingParams(max_tokens=options.answer, ignore_eos=True)
    vocab = stage.executor.vocab_size
    requests: list[Request] = []

    def send() -> None:
        ids = traces.prompt(options.seed, len(requests), options.prompt, vocab)
        requests.append(engine.add_request(ids, params))

    for _ in range(clients):
        send()
    while not engine.idle:
        for update in engine.step():
            if update.ended and len(requests) < clients * options.rounds:
                send()
    return Run(requests, engine.counters.copy(), spec.overlaps and engine.scheduler.two_lanes)


# --- figures -----------------------------------------------------------------------------------------------


def _entry(
    options: Options,
    stage: Stage,
    answers: Answers,
    scale: Scale,
    spec: PolicySpec,
    overlap: bool,
    clients: int,
    found: Sequence[Run | Exception],
) -> Entry:
    entry = serving.entry_for(TABLE, stage, spec, overlap, m=clients, n=options.answer, k=options.prompt)
    if error := next((one for one in found if isinstance(one, Exception)), None):
        return serving.failed(entry, error)
    runs = [one for one in found if isinstance(one, Run)]
    requests = [one for run in runs for one in run.requests]
    compared, different = answers.compare(requests)
    entry.figures |= {
        "two_lanes": runs[0].two_lanes,
        "target_s": spec.seconds(scale),
        "counters": serving.total(run.counters for run in runs),
        "exact": {"compared": compared, "different": different},
    }
    _fill(entry, [run.requests for run in runs], options.slo)
    serving.judge(entry, stage, requests)
    if entry.status != "timed":
        entry.samples_us = []
    return entry


def _fill(entry: Entry, runs: Sequence[Sequence[Any]], slo: Slo) -> None:
    """What requests of any engine say: rates and latencies."""
    everyone = [one for found in runs for one in found]
    rates = [sum(len(one.token_times) for one in found) / span(found) for found in runs if span(found)]
    latency = Latency.of(everyone)
    entry.figures |= {
        "runs": len(runs),
        "tok_s": statistics.median(rates) if rates else 0.0,
        "tok_s_each": rates,
        "ttft": serving.spread(latency.ttft),
        "tpot": serving.spread(latency.tpot),
        "itl": serving.spread(latency.itl),
        "goodput": sum(goodput(found, slo) for found in runs) / len(runs),
    }
    entry.samples_us = [1e6 / rate for rate in rates]
    entry.method = {
        "how": "µs an output token, first arrival to last token, one sample a run",
        "calls": len(runs),
    }


def _peers(options: Options, stage: Stage, record: Record, report: Report) -> None:
    from labkit.bench import serving_peer

    for clients in options.clients:
        record.entries.append(Entry(TABLE, PEER, FORMAT, clients, options.answer, options.prompt, 0, "timed"))
    entries = record.entries[-len(options.clients) :]
    reason = serving_peer.why_not(stage)
    if not reason:
        try:
            with serving_peer.Peer(options.model, options.need) as peer:
                for entry in entries:
                    _peer(entry, peer, options)
                    report(sentence(entry))
        except Exception as error:  # another project's engine: whatever it raises is the reason
            reason = f"it does not run here: {type(error).__name__}: {str(error)[:300]}"
    for entry in entries:
        if not entry.samples_us and entry.status == "timed":
            entry.status, entry.note = "unavailable", reason
            report(sentence(entry))


def _peer(entry: Entry, peer: Any, options: Options) -> None:
    prompts = [
        traces.prompt(options.seed, number, options.prompt, peer.vocab_size)
        for number in range(entry.m * options.rounds)
    ]
    peer.answer(prompts[: entry.m], options.answer)  # its graphs of this size
    runs = [peer.answer(prompts, options.answer) for _ in range(min(options.repeats, _PEER_REPEATS))]
    entry.figures = {"policy": PEER, "label": PEER, "overlap": False, "origin": "measured", "how": peer.how}
    _fill(entry, runs, options.slo)
    short = sum(len(one.token_times) < options.answer for found in runs for one in found)
    if short:
        entry.status, entry.note, entry.samples_us = "failed", f"{short} answers are too short", []


def sentence(entry: Entry) -> str:
    """One line for the terminal."""
    head = f"{entry.m} clients, {entry.contender}"
    if entry.status != "timed":
        return f"{head}: {entry.status} {entry.note}"
    figures = entry.figures
    text = f"{head}: {figures['tok_s']:,.0f} tokens/s, TTFT p50 {_ms(figures['ttft']['p50'])}, "
    text += f"TPOT p50 {_ms(figures['tpot']['p50'])}, largest gap {_ms(figures['itl']['max'])}"
    if counters := figures.get("counters"):
        text += f", overlap steps {counters['prefill_decode_overlap_steps']}"
        text += f" (two streams {counters['prefill_decode_stream_overlap_steps']})"
    return text


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:,.2f} ms"
