"""``labkit bench decode``: tokens a second of the captured decode step, on random weights of a real shape.

A sample is a run of steps, each a replay of one CUDA graph that ends in the next token; checked before it is
timed. The floor of a step is the time that its weights and cached positions take at the read bandwidth
measured in the same run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from labkit import quoted
from labkit.bench import counts, machine, timing
from labkit.bench.decode_check import CHECKED_POSITIONS, TOLERANCE, WORST_TOLERANCE, Wanted
from labkit.bench.random_model import HEADS, RandomModel, config_of
from labkit.bench.record import Entry, Record
from labkit.errors import InputError, require
from labkit.models.config import ModelConfig
from labkit.models.decode_step import DecodeStep, Products, StepWeights
from labkit.models.graph_decoder import GraphDecoder

Report = Callable[[str], None]

TABLE = "decode"
OURS, PEER = "graph_decoder", "torch_compile_tinygemm"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
PEER_FACTOR = 16.0
"""Times as much for the peer: bfloat16 rounds 8 times as coarsely, and its scales are rounded too."""
_EMULATED_CONTEXT = 150


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        model: key of ``data/quoted/models.json``.
        batch: sizes of the batch.
        context: cached positions at the start of a sample.
        bits, group: of the matrices.
        head: "dense" (cuBLAS, or the peer's own) or "w4" (the same kernels as the layers), for all alike.
        dtype: our activations; the peer's are bfloat16.
        tokens: steps of a sample.
        samples: samples of each contender.
        peers: time torch.compile with tinygemm as well.
        device: "cpu" or "cuda".
    """

    model: str = "qwen2.5-3b"
    batch: tuple[int, ...] = (1,)
    context: tuple[int, ...] = (128,)
    bits: int = 4
    group: int = 128
    head: str = "dense"
    dtype: str = "float16"
    tokens: int = 32
    samples: int = timing.LEAST_SAMPLES
    peers: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        quoted.model(self.model)  # refuses an unknown one
        require(self.bits in (3, 4), "bits", self.bits, "4 or 3")
        require(self.group in (32, 64, 128), "group", self.group, "128, 64 or 32")
        require(self.head in HEADS, "head", repr(self.head), " or ".join(HEADS))
        require(self.dtype in DTYPES, "dtype", repr(self.dtype), " or ".join(DTYPES))
        least = timing.LEAST_SAMPLES
        require(self.samples >= least, "samples", self.samples, f"at least {least}: fewer show no spread")
        require(self.tokens >= 1, "tokens", self.tokens, "at least 1")
        require(bool(self.batch) and min(self.batch) >= 1, "batch", self.batch, "numbers of at least 1")
        require(bool(self.context) and min(self.context) >= 0, "context", self.context, "numbers from 0 on")
        require(self.device in ("cpu", "cuda"), "device", repr(self.device), "cpu or cuda")
        seen = self.device == "cpu" or torch.cuda.is_available()
        require(seen, "device", "cuda", "a GPU that torch can use", "--device cpu")


def run(options: Options, command: str, report: Report = print, products: Products | None = None) -> Record:
    """Check every contender, then time those that are right.

    Args:
        options: what to run.
        command: the command line, for the record.
        report: receives one line a case while it runs.
        products: the tensor-core family by default.

    Returns:
        The record; ``complete`` is False when Ctrl-C ended the run.
    """
    on_gpu = options.device == "cuda"
    record = Record(
        name=f"decode-{options.model}",
        kind="measured" if on_gpu else "emulated",
        command=command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        device=machine.device_facts(options.device),
        software=machine.software_facts(),
        parameters=asdict(options),
    )
    began = time.monotonic()
    try:
        products = products or Products.tensor_core()
        if on_gpu:
            _on_gpu(options, record, report, products)
        else:
            _on_cpu(options, record, report, products)
    except KeyboardInterrupt:
        record.complete = False
        record.notes.append("interrupted: the entries are those that were done")
    record.parameters["seconds"] = round(time.monotonic() - began, 1)
    return record


# --- on a GPU: time ---------------------------------------------------------------------------------------


def _on_gpu(options: Options, record: Record, report: Report, products: Products) -> None:
    from labkit.bench import ceilings

    index = machine.gpu_index()
    record.clocks.append(machine.clocks("before", index))
    record.ceilings, said = ceilings.measure()
    record.notes += [said, *_notes(options)]
    model = RandomModel(
        config_of(options.model),
        f"w{options.bits}",
        options.group,
        options.head,
        "cuda",
        DTYPES[options.dtype],
    )
    torch.cuda.reset_peak_memory_stats()
    with timing.side_stream():
        began = time.monotonic()
        weights = model.step_weights(products)
        torch.cuda.synchronize()
        record.parameters["weights_seconds"] = round(time.monotonic() - began, 1)
        report(f"random weights, repacked: {record.parameters['weights_seconds']} s")
        for batch in options.batch:
            wanted = Wanted.of(model, batch)
            for context in options.context:
                _case(options, record, report, model, weights, products, wanted, batch, context)
    record.parameters["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    record.clocks.append(machine.clocks("after", index))


def _case(
    options: Options,
    record: Record,
    report: Report,
    model: RandomModel,
    weights: StepWeights,
    products: Products,
    wanted: Wanted,
    batch: int,
    context: int,
) -> None:
    """Both contenders at one batch and context: right or wrong, then in turns."""
    capacity = max(context, CHECKED_POSITIONS) + options.tokens
    ready: dict[str, timing.Timed] = {}
    held: list[Any] = []
    step = DecodeStep(model.config, weights, batch=batch, capacity=capacity, products=products)
    ours = _entry(options, OURS, batch, context, step.read_bytes(context + options.tokens // 2))
    first = len(record.entries)
    record.entries.append(ours)
    decoder = GraphDecoder(step)
    held.append(decoder)
    if _right(ours, wanted, decoder.forward):
        start = torch.full_like(step.state.lengths, context)
        _fill(step)

        def replay() -> None:
            step.state.lengths.copy_(start)
            decoder.lengths = [context] * batch
            for _ in range(options.tokens):
                decoder.advance()

        ready[OURS] = timing.Timed(replay, options.tokens, "CUDA graph of a step, replayed")
    if options.peers:
        entry = _entry(options, PEER, batch, context, ours.weight_bytes)
        record.entries.append(entry)
        found = _peer(entry, model, wanted, batch, capacity, context, options.tokens)
        if found is not None:
            held.append(found[0])
            ready[PEER] = found[1]
    for name, samples in timing.interleave(ready, options.samples).items():
        entry = next(one for one in record.entries[first:] if one.contender == name)
        entry.samples_us, entry.method = samples, {"how": ready[name].how, "calls": ready[name].calls}
        entry.note = sentence(entry, record.ceilings.get("read_gb_s"))
        report(f"{name}: {entry.note}")
    if OURS in ready:
        _checked_finite(ours, decoder)
    for entry in record.entries[first:]:
        if not entry.samples_us:
            report(f"{entry.contender}: {entry.status} {entry.note}")
    held.clear()
    ready.clear()
    gc.collect()
    torch.cuda.empty_cache()


def _peer(
    entry: Entry, model: RandomModel, wanted: Wanted, batch: int, capacity: int, context: int, tokens: int
) -> tuple[Any, timing.Timed] | None:
    from labkit.bench import decode_peer

    if reason := decode_peer.why_not(model):
        entry.status, entry.note = "unavailable", reason
        return None
    try:
        peer = decode_peer.Peer(model, batch, capacity)
    except Exception as error:  # a compiler of another project: whatever it raises is the reason
        entry.status, entry.note = "unavailable", f"it does not compile here: {_line(error)}"
        return None
    position = 0

    def forward(column: Tensor) -> Tensor:
        nonlocal position
        position += 1
        return peer.forward(column, position - 1)

    if not _right(entry, wanted, forward, PEER_FACTOR):
        return None
    for layer in peer.model.layers:
        layer.keys.normal_()  # type: ignore[operator, union-attr]
        layer.values.normal_()  # type: ignore[operator, union-attr]

    def replay() -> None:
        peer.place(context)
        for _ in range(tokens):
            peer.advance()

    return peer, timing.Timed(replay, tokens, peer.how)


def _checked_finite(entry: Entry, decoder: GraphDecoder) -> None:
    try:
        decoder.check()
    except InputError as error:
        entry.status, entry.note, entry.samples_us = "wrong", str(error), []


def sentence(entry: Entry, read_gb_s: float | None) -> str:
    """What the median of an entry means: tokens a second, and how near the floor."""
    median = entry.median_us
    assert median is not None
    text = (
        f"batch {entry.m}, context {entry.k}: {entry.m * 1e6 / median:,.0f} tokens/s, {median:,.0f} µs a step"
    )
    if read_gb_s:
        floor = entry.weight_bytes / read_gb_s / 1e3
        text += f", {100 * floor / median:.0f} % of the byte floor ({floor:,.0f} µs)"
    return text


def _notes(options: Options) -> list[str]:
    head = (
        "dense, through cuBLAS" if options.head == "dense" else "W4, through the same kernels as the layers"
    )
    return [
        f"random weights; lm_head {head}, for all alike; greedy, the token found is the next input",
        f"a sample is {options.tokens} steps from the named context on; µs a step",
        "byte floor: weights (head included) once and the cached positions, at the measured read bandwidth",
    ]


# --- on the CPU: right or wrong, and counts -----------------------------------------------------------------


def tiny(config: ModelConfig) -> ModelConfig:
    """Two layers of a model, so narrow that the emulator runs them; its group and head width stay."""
    changes = {
        "num_layers": 2,
        "num_heads": config.group,
        "num_kv_heads": 1,
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": 1000,
    }
    return ModelConfig.from_dict(config.to_dict() | changes)


def _on_cpu(options: Options, record: Record, report: Report, products: Products) -> None:
    config = tiny(config_of(options.model))
    model = RandomModel(config, f"w{options.bits}", options.group, options.head, "cpu", DTYPES[options.dtype])
    record.parameters["shrunk"] = True
    record.notes.append(
        "no GPU: two narrow layers in the emulator, right or wrong, counts of a step; no time is measured"
    )
    record.notes.append("the peer needs a GPU" if options.peers else "no peer was asked for")
    weights = model.step_weights(products)
    for batch in options.batch:
        wanted = Wanted.of(model, batch)
        for context in dict.fromkeys(min(context, _EMULATED_CONTEXT) for context in options.context):
            capacity = max(context, CHECKED_POSITIONS) + 2
            step = DecodeStep(config, weights, batch=batch, capacity=capacity, products=products)
            entry = _entry(options, OURS, batch, context, step.read_bytes(context))
            record.entries.append(entry)
            decoder = GraphDecoder(step)
            if _right(entry, wanted, decoder.forward):
                entry.status = "emulated"
                _fill(step)
                decoder.place(context)
                with counts.recorded() as launches:
                    decoder.advance()
                decoder.place(context)
                entry.counts = _counted(launches)
            state = "right" if entry.status == "emulated" else f"{entry.status.upper()} {entry.note}"
            report(f"{OURS}: batch {batch}, context {context}: {state}")


def _counted(launches: Sequence[counts.Launch]) -> dict[str, Any]:
    """Counts of a step, summed over its launches."""
    total = {"launches": len(launches), "requests": 0, "sectors": 0, "bytes": 0, "wavefronts": 0, "faults": 0}
    for launch in launches:
        trace = launch.trace(None)
        sectors = int(trace.sectors(space="global"))
        total["requests"] += int(trace.requests(space="global"))
        total["sectors"] += sectors
        total["bytes"] += 32 * sectors
        total["wavefronts"] += int(trace.wavefronts(space="shared"))
        total["faults"] += len(trace.faults)
    return total


# --- both -------------------------------------------------------------------------------------------------


def _right(entry: Entry, wanted: Wanted, forward: Callable[[Tensor], Tensor], factor: float = 1.0) -> bool:
    """Note the errors; an entry that is off the bound is marked wrong."""
    found, plain = wanted.errors(forward), wanted.plain
    entry.error = {"max_abs": found.largest, "plain": plain.largest}
    entry.error |= {"rms": found.middle, "plain_rms": plain.middle, "factor": factor}
    if found.within(plain, factor):
        return True
    entry.status = "wrong"
    entry.note = (
        f"logits off by {found.middle:.3g} at the middle position, {found.worst:.3g} at the worst; "
        f"allowed: {factor * TOLERANCE * plain.middle:.3g}, {factor * WORST_TOLERANCE * plain.worst:.3g}"
    )
    return False


def _entry(options: Options, contender: str, batch: int, context: int, nbytes: int) -> Entry:
    return Entry(
        table=TABLE,
        contender=contender,
        format=f"w{options.bits}",
        m=batch,
        n=0,
        k=context,
        group=options.group,
        status="timed",
        weight_bytes=nbytes,
    )


def _fill(step: DecodeStep) -> None:
    """Random keys and values at every position."""
    for layer in step.cache.kv.layers:
        layer.keys.normal_()
        layer.values.normal_()


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"
