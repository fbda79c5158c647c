"""``labkit bench jitter``: what prompts do to streams that decode already, for every policy on one trace.

Two parts. "document": steady streams, into which long documents are inserted one after the other, each when
the streams have gone on undisturbed for some tokens. "cold": the same streams, and prompts that nobody has
seen arrive open loop, by a Poisson trace from a seed. The streams write on until the last prompt is through,
and are then aborted, so that every prompt meets a full decode batch (labkit.bench.timeline has the gate).

Gaps "beside" are those of the streams in which prefill work ran; "steady" the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from labkit.bench import serving, stages, timeline, traces
from labkit.bench.jitter_cases import Options, preset
from labkit.bench.jitter_run import Baseline, Run, baseline_of, cold_run, document_run, prompt_rate
from labkit.bench.policy_specs import PolicySpec, with_overlap
from labkit.bench.record import Entry, Record
from labkit.bench.serving import Answers, Report
from labkit.bench.stages import Stage
from labkit.engine.metrics import Latency, Slo, Spread, goodput, tpot

__all__ = ["COLD", "DOCUMENT", "Options", "preset", "run", "sentence"]

DOCUMENT, COLD = "jitter document", "jitter cold"

Runs = dict[tuple[str, PolicySpec, bool], list[Run | Exception]]
"""By part and cell, in order; what a run has raised stands for it."""


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
    runs: Runs = {}
    answers = Answers()
    with serving.recording("jitter", options, options.cells, stage, command) as record:
        _run_cells(options, stage, record, runs, report)
    for (part, spec, overlap), found in runs.items():
        record.entries.append(_entry(options, stage, record, answers, part, spec, overlap, found))
        report(sentence(record.entries[-1]))
    return record


def _run_cells(options: Options, stage: Stage, record: Record, runs: Runs, report: Report) -> None:
    stage.warm()
    once = replace(options, documents=1)
    if stage.real:  # what a first run makes (compiled kernels, workspaces) is no jitter
        document_run(once, stage, options.baseline, False, None)
    first = document_run(once, stage, options.baseline, False, None)
    known = baseline_of(first)
    rate = options.rate
    if rate is None:
        sizes = traces.lengths(options.cold, *options.cold_lengths, options.seed)
        rate = options.load * known.prompt_rate * len(sizes) / sum(sizes)
    bounds = _bounds(options, known)
    record.parameters |= {"rate": rate, "ttft": bounds.ttft, "gap": bounds.max_gap}
    record.parameters |= {"baseline_gap_s": known.scale.gap, "baseline_step_s": known.scale.step}
    record.parameters |= {"baseline_prompt_tok_s": known.prompt_rate}
    pairs = with_overlap(options.cells, options.overlap, lanes=stage.executor.lanes)
    if stage.on_gpu:
        for spec in options.cells:
            with contextlib.suppress(Exception):  # it is said below, where it counts
                document_run(once, stage, spec, options.overlap is not False, known)
        report("warmed up: every policy has run once")
    for number in range(options.repeats):
        for part in options.parts:
            for spec, overlap in pairs:
                try:
                    if part == "document":
                        found: Run | Exception = document_run(options, stage, spec, overlap, known)
                    else:
                        found = cold_run(options, stage, spec, overlap, known, rate)
                except Exception as error:  # the other cells go on
                    found = error
                runs.setdefault((part, spec, overlap), []).append(found)
            report(f"{part}: run {number + 1} of {options.repeats}")


def _bounds(options: Options, known: Baseline) -> Slo:
    ttft = options.ttft or 4 * options.cold_lengths[1] / known.prompt_rate
    return Slo(ttft=ttft, max_gap=options.gap or known.scale.gap / 2)


# --- figures -----------------------------------------------------------------------------------------------


def _entry(
    options: Options,
    stage: Stage,
    record: Record,
    answers: Answers,
    part: str,
    spec: PolicySpec,
    overlap: bool,
    found: Sequence[Run | Exception],
) -> Entry:
    table = DOCUMENT if part == "document" else COLD
    answer = 1 if part == "document" else options.cold_answer
    length = options.document if part == "document" else options.cold_lengths[1]
    entry = serving.entry_for(table, stage, spec, overlap, m=options.streams, n=answer, k=length)
    if error := next((one for one in found if isinstance(one, Exception)), None):
        return serving.failed(entry, error)
    runs = [one for one in found if isinstance(one, Run)]
    requests = [one for run in runs for one in (*run.streams, *run.prompts)]
    compared, different = answers.compare(requests)
    gaps = [gap for found in runs for gap in found.gaps]
    beside = [gap.seconds for gap in gaps if gap.tag != "none"]
    steady = [gap.seconds for gap in gaps if gap.tag == "none"]
    prompts = Latency.of(one for found in runs for one in found.prompts)
    entry.figures |= {
        "two_lanes": runs[0].two_lanes,
        "target_s": runs[0].target,
        "runs": len(runs),
        "counters": serving.total(found.counters for found in runs),
        "exact": {"compared": compared, "different": different},
        "gate": [found.gate.as_dict() for found in runs],
        "itl_beside": serving.spread(Spread.of(beside)),
        "itl_steady": serving.spread(Spread.of(steady)),
        "itl": serving.spread(Spread.of(gap.seconds for gap in gaps)),
        "max_gap_each_s": [max((gap.seconds for gap in found.gaps), default=0.0) for found in runs],
        "stalls": timeline.stalls(gaps),
        "ttft": serving.spread(prompts.ttft),
        "stream_tpot": serving.spread(
            Spread.of(value for found in runs for one in found.streams if (value := tpot(one)) is not None)
        ),
        "prompt_tok_s": prompt_rate(runs),
        "stream_tok_s": len(gaps) / sum(found.seconds for found in runs),
    }
    if part == "cold":
        bound = record.parameters["gap"]
        slo = Slo(ttft=record.parameters["ttft"], tpot=bound)
        seconds = sum(found.seconds for found in runs)
        everyone = [one for found in runs for one in found.prompts]
        entry.figures |= {
            "cold_itl": serving.spread(prompts.itl),
            "goodput": goodput(everyone, slo, seconds),
            "offered": len(everyone) / seconds,
            "met": sum(map(slo.met, everyone)),
            "gaps_met": sum(gap.seconds <= bound for gap in gaps) / len(gaps) if gaps else None,
        }
    # The gaps of one stream of one run, in order: a timeline to draw.
    first = runs[0].streams[0].token_times
    entry.samples_us = [round(1e6 * (b - a), 2) for a, b in pairwise(first)]
    entry.method = {"how": "gaps of one stream in the first run, in order", "calls": len(runs)}
    serving.judge(entry, stage, requests)
    if entry.status == "timed" and (closed := next((f.gate for f in runs if not f.gate.passed), None)):
        entry.status, entry.note = "unavailable", f"does not count: {closed.reason}"
    if entry.status != "timed":
        entry.samples_us = []
    return entry


def sentence(entry: Entry) -> str:
    """One line for the terminal."""
    if entry.status != "timed":
        return f"{entry.table}, {entry.contender}: {entry.status} {entry.note}"
    figures = entry.figures
    gaps, counters = figures["itl_beside"], figures["counters"]
    text = f"{entry.table}, {entry.contender}: largest gap {_ms(gaps['max'])}, p99 {_ms(gaps['p99'])}, "
    if entry.table == DOCUMENT:
        text += f"{figures['prompt_tok_s']:,.0f} prompt tokens/s, "
    else:
        text += f"TTFT p95 {_ms(figures['ttft']['p95'])}, goodput {figures['goodput']:.3g}/s, "
    text += f"overlap steps {counters['prefill_decode_overlap_steps']}"
    return text + f" (two streams {counters['prefill_decode_stream_overlap_steps']})"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:,.2f} ms"
