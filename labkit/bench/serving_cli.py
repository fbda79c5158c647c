"""``labkit bench concurrency`` and ``labkit bench jitter``: their options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

Simulate = Annotated[
    str | None,
    typer.Option("--simulate", help="A cost model on a simulated clock instead: h200 or rtx3050."),
]
Device = Annotated[
    str, typer.Option("--device", help="auto, cpu (SmolLM2) or cuda (random weights of --model).")
]
Policies = Annotated[
    str | None,
    typer.Option(
        "--policies",
        help="NAME, NAME:CHUNK or NAME:CHUNK@TARGET, with commas between: serial, overlap, ticks, "
        "dynamic, mixed, mixed-whole, sliced, sliced-beside, adaptive; the target in ms, or % of what "
        "the baseline's chunk adds to a step.",
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--prefill-decode-overlap/--no-prefill-decode-overlap",
        help="Prefill on a lane of its own, or never; both, if neither is said.",
        show_default=False,
    ),
]
Model = Annotated[
    str, typer.Option("--model", help="Shape of the random weights on a GPU, of data/quoted/models.json.")
]
Repeats = Annotated[int | None, typer.Option("--repeats", help="Runs of each cell, in turns.")]
Seed = Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.")]
Ttft = Annotated[float | None, typer.Option("--ttft-ms", help="Service level: longest TTFT.")]
GapBound = Annotated[
    float | None, typer.Option("--gap-ms", help="Service level: longest gap between tokens.")
]
Out = Annotated[
    Path | None, typer.Option("--out", help="JSON to write [results/bench/NAME-DEVICE-DATE.json].")
]


def concurrency(
    clients: Annotated[str | None, typer.Option("--clients", help="Requests at once, such as 1,2,4.")] = None,
    policies: Policies = None,
    overlap: Overlap = None,
    prompt: Annotated[int | None, typer.Option("--prompt", help="Tokens of a prompt.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="New tokens of an answer.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Prompts of each client.")] = 1,
    repeats: Repeats = None,
    ttft_ms: Ttft = None,
    tpot_ms: Annotated[float | None, typer.Option("--tpot-ms", help="Service level: longest TPOT.")] = None,
    gap_ms: GapBound = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="transformers' continuous batching as well, on a GPU.")
    ] = False,
    simulate: Simulate = None,
    device: Device = "auto",
    model: Model = "qwen2.5-3b",
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Tokens a second and latencies of 1 … 64 clients, for every policy, overlap on and off.

    On a GPU: random weights of a real shape. With none: SmolLM2 on the CPU, few clients. With --simulate: a
    cost model; its figures say where they come from.

    Exit codes: 0 done; 1 wrong tokens or a failure; 2 wrong usage; 130 interrupted (what was done is kept).
    """
    from labkit.bench import cases, cli
    from labkit.bench import concurrency as work

    where = _where(simulate, device)
    chosen = _chosen(policies, overlap, repeats, model, seed, ttft_ms, gap_ms)
    chosen |= _given(prompt=prompt, answer=tokens, tpot=None if tpot_ms is None else tpot_ms / 1e3)
    chosen |= {"rounds": rounds, "peers": peers}
    if clients is not None:
        chosen["clients"] = tuple(cases.parse_numbers(clients, "clients"))
    options = dataclasses.replace(work.preset(where), **chosen)
    words: dict[str, Any] = {
        "clients": clients,
        "prompt": prompt,
        "tokens": tokens,
        "rounds": rounds if rounds != 1 else None,
    }
    words |= {"tpot-ms": tpot_ms, "ttft-ms": ttft_ms, "gap-ms": gap_ms}
    command = _command("concurrency", policies, overlap, repeats, simulate, device, model, seed, words)
    command += " --peers" if peers else ""
    cli._writable(out)
    cli._finish(work.run(options, command, report=typer.echo), out, plot=False)


def jitter(
    policies: Policies = None,
    overlap: Overlap = None,
    parts: Annotated[
        str, typer.Option("--parts", help="document (inserted into streams), cold (open loop), or both.")
    ] = "document,cold",
    streams: Annotated[int | None, typer.Option("--streams", help="Streams that decode all along.")] = None,
    document: Annotated[int | None, typer.Option("--document", help="Tokens of a document.")] = None,
    documents: Annotated[int | None, typer.Option("--documents", help="How many of them.")] = None,
    cold: Annotated[int | None, typer.Option("--cold", help="Cold prompts of the trace.")] = None,
    cold_lengths: Annotated[
        str | None, typer.Option("--cold-lengths", help="Their tokens, FROM-TO such as 64-2048.")
    ] = None,
    load: Annotated[
        float | None, typer.Option("--load", help="Arrivals, as a share of the baseline's prefill rate.")
    ] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Arrivals a second instead.")] = None,
    ttft_ms: Ttft = None,
    gap_ms: GapBound = None,
    repeats: Repeats = None,
    simulate: Simulate = None,
    device: Device = "auto",
    model: Model = "qwen2.5-3b",
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """What prompts do to streams that decode: largest and p99 gap against prompt tokens a second.

    A cell counts only if the prompts were computed beside a full decode batch. On a GPU: random weights of a
    real shape. With none: SmolLM2 on the CPU. With --simulate: a cost model.

    Exit codes: 0 done; 1 wrong tokens or a failure; 2 wrong usage; 130 interrupted (what was done is kept).
    """
    from labkit.bench import cli
    from labkit.bench import jitter as work

    where = _where(simulate, device)
    chosen = _chosen(policies, overlap, repeats, model, seed, ttft_ms, gap_ms)
    chosen |= _given(streams=streams, document=document, documents=documents, cold=cold, load=load, rate=rate)
    chosen["parts"] = tuple(part.strip() for part in parts.split(",") if part.strip())
    if cold_lengths is not None:
        chosen["cold_lengths"] = _range(cold_lengths)
    options = dataclasses.replace(work.preset(where), **chosen)
    words: dict[str, Any] = {
        "parts": None if parts == "document,cold" else parts,
        "streams": streams,
        "document": document,
    }
    words |= {"documents": documents, "cold": cold, "cold-lengths": cold_lengths, "load": load, "rate": rate}
    words |= {"ttft-ms": ttft_ms, "gap-ms": gap_ms}
    command = _command("jitter", policies, overlap, repeats, simulate, device, model, seed, words)
    cli._writable(out)
    cli._finish(work.run(options, command, report=typer.echo), out, plot=False)


def _where(simulate: str | None, device: str) -> str:
    """Which stage the two options mean."""
    from labkit.bench import cli
    from labkit.bench.stages import SIMULATED
    from labkit.errors import require

    if simulate is None:
        return cli._device(device)
    require(simulate in SIMULATED, "simulate", repr(simulate), " or ".join(SIMULATED))
    require(device == "auto", "device", device, "nothing, with --simulate")
    return simulate


def _chosen(
    policies: str | None,
    overlap: bool | None,
    repeats: int | None,
    model: str,
    seed: int,
    ttft_ms: float | None,
    gap_ms: float | None,
) -> dict[str, Any]:
    """What both benchmarks have."""
    from labkit.bench.policy_specs import parse_policies

    chosen = _given(repeats=repeats)
    chosen |= {"overlap": overlap, "model": model, "seed": seed}
    chosen |= {"ttft": None if ttft_ms is None else ttft_ms / 1e3}
    chosen |= {"gap": None if gap_ms is None else gap_ms / 1e3}
    if policies is not None:
        chosen["policies"] = parse_policies(policies)
    return chosen


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _range(text: str) -> tuple[int, int]:
    from labkit.errors import require

    first, _, last = text.partition("-")
    require(first.isdigit() and last.isdigit(), "cold-lengths", repr(text), "FROM-TO, such as 64-2048")
    return int(first), int(last)


def _command(
    name: str,
    policies: str | None,
    overlap: bool | None,
    repeats: int | None,
    simulate: str | None,
    device: str,
    model: str,
    seed: int,
    words: dict[str, Any],
) -> str:
    """The command line, for the record."""
    given: dict[str, Any] = {"simulate": simulate, "device": None if device == "auto" else device}
    given |= {"model": None if model == "qwen2.5-3b" else model, "policies": policies, "repeats": repeats}
    given |= {"seed": seed or None} | words
    parts = [f"labkit bench {name}"]
    parts += [f"--{key} {value}" for key, value in given.items() if value is not None]
    if overlap is not None:
        parts.append("--prefill-decode-overlap" if overlap else "--no-prefill-decode-overlap")
    return " ".join(parts)
