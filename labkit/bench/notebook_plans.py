"""From the parameters of a benchmark notebook to the options and the command line of ``labkit bench``.

Values that a command takes as text are text here, and read by the command's own readers. Empty text, and 0
where 0 makes no sense, mean the benchmark's own default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.bench.record import Record
from labkit.errors import require

MOST_GEMV_ROWS = 16


@dataclass(frozen=True)
class Plan:
    """A benchmark that is checked and has not run.

    Attributes:
        name: of the notebook.
        device: "cpu" or "cuda".
        origin: of the figures, in words: where they are measured, emulated or simulated.
        command: the ``labkit bench`` command line that means the same.
        lines: that the run will report, about.
        options: of the benchmark's module.
        work: its function ``run``.
    """

    name: str
    device: str
    origin: str
    command: str
    lines: int
    options: Any
    work: Callable[..., Record]

    def __repr__(self) -> str:
        return f"{self.command}\nfigures are {self.origin}"


def make(name: str, device: str, values: Mapping[str, Any]) -> Plan:
    """The plan of one benchmark.

    Args:
        name: key of :data:`BUILDERS`. device: "cpu" or "cuda". values: parameters by name.

    Raises:
        InputError: an unknown benchmark, a parameter too many or too few, or a value that is none.
    """
    require(name in BUILDERS, "benchmark", repr(name), "one of " + ", ".join(BUILDERS))
    build = BUILDERS[name]
    wanted = [one for one in inspect.signature(build).parameters if one != "device"]
    for key in values:
        require(key in wanted, "parameter", repr(key), f"device, {', '.join(wanted)}")
    for key in wanted:
        require(key in values, name, f"no parameter {key!r}", f"device, {', '.join(wanted)}")
    return build(device, **values)


# --- kernels: measured on a GPU, emulated without ----------------------------------------------------------


def gemm(
    device: str,
    *,
    table: str,
    shapes: str,
    m: str,
    bits: str,
    group: int,
    dtype: str,
    peers: bool,
    samples: int,
) -> Plan:
    """``labkit bench gemm``: the options are those of the command."""
    from labkit.bench import cases
    from labkit.bench import gemm as work

    numbers = cases.parse_numbers(bits, "bits")
    require(set(numbers) <= {3, 4}, "bits", repr(bits), "4, 3 or both: 4,3")
    options = work.Options(
        table=table,
        shapes=tuple(cases.parse_shapes(shapes)) if shapes else None,
        m=tuple(cases.parse_numbers(m, "m")) if m else None,
        formats=tuple(f"w{number}" for number in numbers),
        device=device,
        samples=samples,
        group=group,
        dtype=dtype,
        peers=peers,
    )
    words = {"table": table, "device": device, "shapes": shapes, "m": m, "bits": bits, "group": group}
    command = _line("gemm", words | {"dtype": dtype, "samples": samples}, ["--peers"] if peers else [])
    lines = len(options.cases())  # refuses a table, group or dtype that is none
    return Plan("gemm", device, _emulated(device), command, lines, options, work.run)


def gemv(
    device: str,
    *,
    table: str,
    shapes: str,
    m: str,
    bits: str,
    group: int,
    dtype: str,
    peers: bool,
    samples: int,
) -> Plan:
    """``labkit bench gemm`` with few rows."""
    plan = gemm(
        device,
        table=table,
        shapes=shapes,
        m=m,
        bits=bits,
        group=group,
        dtype=dtype,
        peers=peers,
        samples=samples,
    )
    most = max(case.m for case in plan.options.cases())
    fix = "notebooks/bench/gemm.ipynb has more"
    require(most <= MOST_GEMV_ROWS, "m", most, f"at most {MOST_GEMV_ROWS} rows", fix)
    return replace(plan, name="gemv")


def attention(
    device: str,
    *,
    models: str,
    context: str,
    batch: str,
    chunk: str,
    kv: str,
    block_size: int,
    plans: str,
    peers: bool,
    samples: int,
) -> Plan:
    """``labkit bench attention``."""
    from labkit.bench import attention as work
    from labkit.bench import cases

    options = work.Options(
        models=tuple(_squeezed(models).split(",")),
        context=tuple(cases.parse_numbers(context, "context")),
        batch=tuple(cases.parse_numbers(batch, "batch")),
        chunk=tuple(cases.parse_numbers(chunk, "chunk")),
        formats=tuple(_squeezed(kv).split(",")),
        block_size=block_size,
        plans=work.parse_plans(_squeezed(plans)),
        peers=peers,
        samples=samples,
        device=device,
    )
    words = {"model": models, "context": context, "batch": batch, "chunk": chunk, "kv": kv}
    words |= {"block-size": str(block_size), "plans": plans, "device": device, "samples": str(samples)}
    command = _line("attention", words, [] if peers else ["--no-peers"])
    found = {(one.model, one.batch, one.context, one.chunk) for one in options.cases()}
    if device == "cpu":  # contexts are cut there, so that some cases are the same
        most = work._EMULATED
        bounds = most["batch"], most["context"], most["chunk"]
        found = {(model, *map(min, rest, bounds)) for model, *rest in found}  # type: ignore[misc]
    lines = len(found) * len(options.formats) * max(len(options.plans), 1)
    return Plan("attention", device, _emulated(device), command, lines, options, work.run)


# --- the engine: measured on a GPU, on a simulated clock or with SmolLM2 without ---------------------------


def concurrency(
    device: str,
    *,
    simulate: str,
    policies: str,
    overlap: str,
    clients: str,
    prompt: int,
    tokens: int,
    repeats: int,
    seed: int,
    model: str,
    peers: bool,
) -> Plan:
    """``labkit bench concurrency``."""
    from labkit.bench import cases, serving_cli
    from labkit.bench import concurrency as work

    clock, on = _clock(device, simulate), _switch(overlap)
    chosen = serving_cli._chosen(policies or None, on, repeats or None, model, seed, None, None)
    chosen |= _given(prompt=prompt, answer=tokens)
    if clients:
        chosen["clients"] = tuple(cases.parse_numbers(clients, "clients"))
    options = replace(work.preset(clock or device), **chosen, peers=peers)
    words = {"clients": clients, "prompt": prompt, "tokens": tokens}
    command = _engine_line("concurrency", device, clock, policies, on, repeats, model, seed, words)
    command += " --peers" if peers else ""
    lines = len(options.clients) * _cells(options.policies, on, clock or device)
    return Plan("concurrency", device, _engine(device, clock), command, lines, options, work.run)


def jitter(
    device: str,
    *,
    simulate: str,
    policies: str,
    overlap: str,
    parts: str,
    streams: int,
    document: int,
    load: float,
    repeats: int,
    seed: int,
    model: str,
) -> Plan:
    """``labkit bench jitter``."""
    from labkit.bench import jitter as work
    from labkit.bench import serving_cli

    clock, on = _clock(device, simulate), _switch(overlap)
    chosen = serving_cli._chosen(policies or None, on, repeats or None, model, seed, None, None)
    chosen |= _given(streams=streams, document=document, load=load)
    chosen["parts"] = tuple(filter(None, _squeezed(parts).split(",")))
    options = replace(work.preset(clock or device), **chosen)
    words = {"parts": parts, "streams": streams, "document": document, "load": load}
    command = _engine_line("jitter", device, clock, policies, on, repeats, model, seed, words)
    lines = len(options.parts) * (options.repeats + _cells(options.cells, on, clock or device))
    return Plan("jitter", device, _engine(device, clock), command, lines, options, work.run)


def serving(
    device: str,
    *,
    simulate: str,
    policies: str,
    overlap: str,
    loads: str,
    rates: str,
    requests: int,
    lengths: str,
    tokens: int,
    ttft_ms: float,
    tpot_ms: float,
    repeats: int,
    seed: int,
    model: str,
) -> Plan:
    """``labkit bench serving``."""
    from labkit.bench import open_loop as work
    from labkit.bench import open_loop_cli

    clock, on = _clock(device, simulate), _switch(overlap)
    options, command = open_loop_cli.planned(
        simulate=clock,
        device="auto" if clock else device,
        policies=_squeezed(policies) or None,
        overlap=on,
        loads=_squeezed(loads) or None,
        rates=_squeezed(rates) or None,
        requests=requests or None,
        lengths=_squeezed(lengths) or None,
        tokens=tokens or None,
        repeats=repeats or None,
        ttft_ms=ttft_ms or None,
        tpot_ms=tpot_ms or None,
        gap_ms=None,
        model=model,
        seed=seed,
    )
    lines = 1 + len(options.arrivals) * _cells(options.policies, on, clock or device)
    return Plan("serving", device, _engine(device, clock), command, lines, options, work.run)


BUILDERS: dict[str, Callable[..., Plan]] = {
    "gemm": gemm,
    "gemv": gemv,
    "attention": attention,
    "concurrency": concurrency,
    "jitter": jitter,
    "serving": serving,
}
"""By the notebook's name."""


# --- words -------------------------------------------------------------------------------------------------


def _squeezed(text: str) -> str:
    """Without blanks, which would end a value on a command line."""
    return "".join(text.split())


def _given(**values: Any) -> dict[str, Any]:
    """Those that are not 0."""
    return {name: value for name, value in values.items() if value}


def _line(name: str, words: Mapping[str, Any], flags: Sequence[str] = ()) -> str:
    """A command line; empty text is left out."""
    given = {key: _squeezed(str(value)) for key, value in words.items()}
    options = [f"--{key} {value}" for key, value in given.items() if value]
    return " ".join([f"labkit bench {name}", *options, *flags])


def _engine_line(
    name: str,
    device: str,
    clock: str | None,
    policies: str,
    on: bool | None,
    repeats: int,
    model: str,
    seed: int,
    words: Mapping[str, Any],
) -> str:
    from labkit.bench import serving_cli

    given = {key: _squeezed(str(value)) if value else None for key, value in words.items()}
    where = "auto" if clock else device
    chosen = _squeezed(policies) or None
    return serving_cli._command(name, chosen, on, repeats or None, clock, where, model, seed, given)


def _clock(device: str, simulate: str) -> str | None:
    """The cost model; None where there is something to measure."""
    from labkit.bench.stages import SIMULATED

    known = (*SIMULATED, "cpu")
    require(simulate in known, "simulate", repr(simulate), "one of " + ", ".join(known))
    return None if device == "cuda" or simulate == "cpu" else simulate


def _switch(overlap: str) -> bool | None:
    words = {"both": None, "on": True, "off": False}
    require(overlap in words, "overlap", repr(overlap), "one of " + ", ".join(words))
    return words[overlap]


def _cells(policies: Sequence[Any], on: bool | None, where: str) -> int:
    from labkit.bench.policy_specs import with_overlap

    return len(with_overlap(policies, on, lanes=where != "cpu"))


def _emulated(device: str) -> str:
    if device == "cuda":
        return "measured on this GPU; results are checked, then timed"
    return "emulated on the CPU, shrunk shapes: right or wrong and counts, no times"


def _engine(device: str, clock: str | None) -> str:
    if device == "cuda":
        return "measured on this GPU, random weights of a real shape"
    if clock is None:
        return "measured on the CPU: SmolLM2, one lane"
    return f"simulated: the scheduler runs, its clock is a cost model of {clock}"
