"""``labkit bench serving``: its options."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from labkit.bench.serving_cli import (
    Device,
    GapBound,
    Model,
    Out,
    Overlap,
    Policies,
    Repeats,
    Seed,
    Simulate,
    Ttft,
    _chosen,
    _command,
    _given,
    _where,
)


def serving(
    policies: Policies = None,
    overlap: Overlap = None,
    loads: Annotated[
        str | None, typer.Option("--loads", help="Arrivals, as shares of the baseline's capacity: 0.5,0.9.")
    ] = None,
    rates: Annotated[str | None, typer.Option("--rates", help="Arrivals a second instead: 0.5,2.")] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="Requests of a run.")] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Tokens of the prompts, FROM-TO such as 64-1024.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="New tokens of an answer.")] = None,
    repeats: Repeats = None,
    ttft_ms: Ttft = None,
    tpot_ms: Annotated[float | None, typer.Option("--tpot-ms", help="Service level: longest TPOT.")] = None,
    gap_ms: GapBound = None,
    simulate: Simulate = None,
    device: Device = "auto",
    model: Model = "qwen2.5-3b",
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Requests that arrive open loop at several rates: TTFT, TPOT, goodput, for every policy.

    On a GPU: random weights of a real shape. With none: SmolLM2 on the CPU. With --simulate: a cost model.

    Exit codes: 0 done; 1 wrong tokens or a failure; 2 wrong usage; 130 interrupted (what was done is kept).
    """
    from labkit.bench import cli
    from labkit.bench import open_loop as work

    given: dict[str, Any] = {"policies": policies, "overlap": overlap, "loads": loads, "rates": rates}
    given["requests"] = requests
    given |= {"lengths": lengths, "tokens": tokens, "repeats": repeats, "seed": seed, "model": model}
    given |= {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "gap_ms": gap_ms}
    options, command = planned(simulate=simulate, device=device, **given)
    cli._writable(out)
    cli._finish(work.run(options, command, report=typer.echo), out, plot=False)


def planned(
    *,
    simulate: str | None,
    device: str,
    policies: str | None,
    overlap: bool | None,
    loads: str | None,
    rates: str | None,
    requests: int | None,
    lengths: str | None,
    tokens: int | None,
    repeats: int | None,
    ttft_ms: float | None,
    tpot_ms: float | None,
    gap_ms: float | None,
    model: str,
    seed: int,
) -> tuple[Any, str]:
    """Options of labkit.bench.open_loop, and the command line that means them.

    Raises:
        InputError: an option that is none; nothing has run.
    """
    from labkit.bench import open_loop as work

    chosen = _chosen(policies, overlap, repeats, model, seed, ttft_ms, gap_ms)
    chosen |= _given(requests=requests, answer=tokens, tpot=None if tpot_ms is None else tpot_ms / 1e3)
    if loads is not None:
        chosen["loads"] = _numbers(loads, "loads")
    if rates is not None:
        chosen["rates"] = _numbers(rates, "rates")
    if lengths is not None:
        chosen["lengths"] = _range(lengths)
    options = dataclasses.replace(work.preset(_where(simulate, device)), **chosen)
    words: dict[str, Any] = {"loads": loads, "rates": rates, "requests": requests, "lengths": lengths}
    words |= {"tokens": tokens, "ttft-ms": ttft_ms, "tpot-ms": tpot_ms, "gap-ms": gap_ms}
    return options, _command("serving", policies, overlap, repeats, simulate, device, model, seed, words)


def _numbers(text: str, argument: str) -> tuple[float, ...]:
    """``"0.5,2"`` as numbers, each once."""
    from labkit.errors import refuse

    found = []
    for part in text.split(","):
        try:
            found.append(float(part))
        except ValueError:
            refuse(argument, repr(text), "numbers with commas between, such as 0.5,0.9")
    return tuple(dict.fromkeys(found))


def _range(text: str) -> tuple[int, int]:
    from labkit.errors import require

    first, _, last = text.partition("-")
    fine = first.strip().isdecimal() and last.strip().isdecimal()
    require(fine, "lengths", repr(text), "FROM-TO, such as 64-1024")
    return int(first), int(last)
