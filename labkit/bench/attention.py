"""``labkit bench attention``: attention over paged keys and values against torch's on gathered ones.

Right before timed; cold caches by rotating pools; CUDA graphs; the bytes of keys and values over the copy
bandwidth measured in the same run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from labkit.bench import counts, machine, timing
from labkit.bench.attention_cases import FORMATS, MODELS, SDPA, Case, Pool, Step, checked, exact, sdpa_call
from labkit.bench.record import COUNTS, Entry, Record
from labkit.errors import InputError, refuse, require
from labkit.kernels.paged_attention import Plan
from labkit.kernels.paged_layer import BLOCK_SIZES

Report = Callable[[str], None]

TABLE = "attention"
OURS = "paged"
FUSED = "paged_fused"
"""The decode step's launch, rope and append included."""
TALL = "paged_tall"
"""The prefill in tall tiles."""
TOLERANCE = 2.0
_EMULATED = {"context": 150, "batch": 2, "chunk": 20}


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        models: keys of ``data/quoted/models.json``.
        context: tokens that the last query of a row attends to.
        batch: rows.
        chunk: new tokens a row: 1 for decode, more for prefill.
        formats: of keys and values: "fp16", "int8".
        block_size: of the cache.
        plans: launch choices to compare, as (fine, coarse); empty: the kernel's own.
        peers: time torch's attention as well.
        samples: samples of each contender.
        device: "cpu" or "cuda".
    """

    models: tuple[str, ...] = MODELS
    context: tuple[int, ...] = (512, 2048, 4096, 8192, 32768)
    batch: tuple[int, ...] = (1, 4, 16, 64)
    chunk: tuple[int, ...] = (1,)
    formats: tuple[str, ...] = FORMATS
    block_size: int = 16
    plans: tuple[tuple[int, int], ...] = ()
    peers: bool = True
    samples: int = timing.LEAST_SAMPLES
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("context", "batch", "chunk"):
            given = getattr(self, name)
            require(bool(given) and min(given) >= 1, name, given, "numbers of at least 1")
        longest = f"at most the least context, {min(self.context)}"
        require(max(self.chunk) <= min(self.context), "chunk", self.chunk, longest)
        known = set(self.formats) <= set(FORMATS) and bool(self.formats)
        require(known, "formats", self.formats, " or ".join(FORMATS))
        sizes = ", ".join(map(str, BLOCK_SIZES))
        require(self.block_size in BLOCK_SIZES, "block_size", self.block_size, f"one of {sizes}")
        least = timing.LEAST_SAMPLES
        require(self.samples >= least, "samples", self.samples, f"at least {least}: fewer show no spread")
        for one in self.plans:
            Plan(*one)  # refuses what is none
        self.cases()  # refuses an unknown model

    def cases(self) -> list[Case]:
        """Every case, in the order of the run."""
        found = [
            Case(model, batch, context, chunk, self.block_size)
            for model in self.models
            for chunk in self.chunk
            for batch in self.batch
            for context in self.context
        ]
        for case in found:
            _ = case.shape
        return found


def parse_plans(text: str) -> tuple[tuple[int, int], ...]:
    """``"walk,1/4,4/8"`` as pairs.

    Raises:
        InputError: anything else.
    """
    found = []
    for part in filter(None, text.split(",")):
        fine, _, coarse = part.strip().partition("/")
        if part.strip() == "walk":
            found.append((0, 0))
        elif fine.isdigit() and coarse.isdigit():
            found.append((int(fine), int(coarse)))
        else:
            refuse("plans", repr(part), "walk or FINE/COARSE, such as walk,1/4,4/8")
    return tuple(found)


def run(options: Options, command: str, report: Report = print) -> Record:
    """Check every contender, then time those that are right.

    Args:
        options: what to run.
        command: the command line, for the record.
        report: receives one line a case while it runs.

    Returns:
        The record; ``complete`` is False when Ctrl-C ended the run.
    """
    on_gpu = options.device == "cuda"
    record = Record(
        name="attention",
        kind="measured" if on_gpu else "emulated",
        command=command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        device=machine.device_facts(options.device),
        software=machine.software_facts(),
        parameters=asdict(options),
    )
    began = time.monotonic()
    try:
        (_on_gpu if on_gpu else _on_cpu)(options, record, report)
    except KeyboardInterrupt:
        record.complete = False
        record.notes.append("interrupted: the entries are those that were done")
    record.parameters["seconds"] = round(time.monotonic() - began, 1)
    return record


# --- on a GPU: time ---------------------------------------------------------------------------------------


def _on_gpu(options: Options, record: Record, report: Report) -> None:
    from labkit.bench import ceilings

    index = machine.gpu_index()
    record.clocks.append(machine.clocks("before", index))
    record.ceilings, said = ceilings.measure()
    record.notes += [
        said,
        "bytes: keys, values and scales of all rows, once",
        f"{SDPA}: gathering not counted",
    ]
    with timing.side_stream():
        for case in options.cases():
            _case(options, case, record, report)
            gc.collect()
            torch.cuda.empty_cache()
    record.clocks.append(machine.clocks("after", index))


def _case(options: Options, case: Case, record: Record, report: Report) -> None:
    plans = _plans(options)
    ready: dict[tuple[str, str], timing.Timed] = {}
    entries: dict[tuple[str, str], Entry] = {}
    free, _ = torch.cuda.mem_get_info()
    l2 = record.device.get("l2_bytes")
    for kind in options.formats:
        nbytes = case.kv_bytes(kind)
        room = free // (2 + len(options.formats))  # the peer's gathered copies beside the pools
        if nbytes > room:
            entries[OURS, kind] = entry = _entry(OURS, case, kind)
            record.entries.append(entry)
            entry.status, entry.note = "unavailable", f"{nbytes / 2**30:.1f} GiB do not fit"
            continue
        copies = timing.copies_needed(nbytes, l2, room)
        pools = [Pool.new(case, kind, "cuda", seed) for seed in range(copies)]
        for planned in plans:
            step = Step.new(case, kind, "cuda", planned)
            name = OURS if planned is None else f"{OURS} {planned.fine}/{planned.coarse}"
            _contender(name, kind, case, record, pools, [step.call(pool) for pool in pools], entries, ready)
            chosen = step.scratch.planned
            entries[name, kind].method["plan"] = f"{chosen.fine}/{chosen.coarse}" if chosen.fine else "walk"
            if case.chunk == 1:
                fused = [step.fused(pool) for pool in pools]
                name = name.replace(OURS, FUSED, 1)
                same = torch.equal(fused[0](), step.apart(pools[0]))
                _contender(name, kind, case, record, pools, fused, entries, ready, same)
        if case.chunk > 1:
            step = Step.new(case, kind, "cuda")
            tall = [step.call(pool, tall=True) for pool in pools]
            same = torch.equal(tall[0](), step.call(pools[0])())
            _contender(TALL, kind, case, record, pools, tall, entries, ready, same)
        if kind == "fp16" and options.peers:
            calls = [sdpa_call(pool) for pool in pools]
            _contender(SDPA, kind, case, record, pools, calls, entries, ready)
    for key, samples in timing.interleave({str(k): t for k, t in ready.items()}, options.samples).items():
        at = next(one for one in ready if str(one) == key)
        entry, timed = entries[at], ready[at]
        entry.samples_us = samples
        entry.method |= {"how": timed.how, "calls": timed.calls}
        report(
            f"{case.model} batch {case.batch} chunk {case.chunk} {at[1]} {at[0]}: {sentence(entry, record)}"
        )


def _contender(
    name: str,
    kind: str,
    case: Case,
    record: Record,
    pools: list[Pool],
    calls: list[Callable[[], Any]],
    entries: dict[tuple[str, str], Entry],
    ready: dict[tuple[str, str], timing.Timed],
    same: bool | None = None,
) -> None:
    """Check and make ready; ``same``: it has been compared with another that is checked, bit for bit."""
    entry = entries[name, kind] = _entry(name, case, kind)
    record.entries.append(entry)
    if same is None:
        same = _right(entry, case, pools[0], calls[0])
    elif not same:
        entry.status, entry.note = "wrong", "other bits than the kernel that is checked"
    if not same:
        return
    us = timing.rough_us(calls[0], timing.EventClock())
    cold = min(len(calls), max(2, -(-timing.COLD_BYTES // case.kv_bytes(kind))))
    ready[name, kind] = timing.prepare(calls, us=us, cold_copies=cold)


def sentence(entry: Entry, record: Record) -> str:
    """What the median of an entry means."""
    text = f"context {entry.k}: {entry.median_us:,.1f} µs, {entry.weight_gb_s:,.0f} GB/s"
    share = record.share(entry, "copy_gb_s")
    return text + (f", {100 * share:.0f} % of copy" if share else "")


# --- on the CPU: right or wrong, and counts -----------------------------------------------------------------


def _on_cpu(options: Options, record: Record, report: Report) -> None:
    record.parameters["shrunk"] = True
    record.notes.append(
        "no GPU: short contexts in the emulator, right or wrong and counts; no time is measured"
    )
    most = _EMULATED
    small = {
        Case(
            case.model,
            min(case.batch, most["batch"]),
            min(case.context, most["context"]),
            min(case.chunk, most["chunk"]),
            case.block_size,
        ): None
        for case in options.cases()
    }
    for case in small:
        for kind in options.formats:
            pool = Pool.new(case, kind, "cpu", 0)
            calls = {}
            for planned in _plans(options):
                name = OURS if planned is None else f"{OURS} {planned.fine}/{planned.coarse}"
                calls[name] = Step.new(case, kind, "cpu", planned).call(pool)
            if case.chunk > 1:
                calls[TALL] = Step.new(case, kind, "cpu").call(pool, tall=True)
            for name, call in calls.items():
                entry = _entry(name, case, kind)
                record.entries.append(entry)
                if _right(entry, case, pool, call):
                    entry.status = "emulated"
                    with counts.recorded() as launches:
                        call()
                    entry.counts = _counted(launches)
                report(
                    f"{case.model} {kind} {name} batch {case.batch}, context {case.context}: {entry.status}"
                )


def _counted(launches: Any) -> dict[str, Any]:
    total = {"launches": len(launches), **dict.fromkeys(COUNTS, 0)}
    for launch in launches:
        trace = launch.trace(None)
        sectors = int(trace.sectors(space="global"))
        total["requests"] += int(trace.requests(space="global"))
        total["sectors"] += sectors
        total["bytes"] += 32 * sectors
        total["wavefronts"] += int(trace.wavefronts(space="shared"))
        total["faults"] += len(trace.faults)
    return total


def _plans(options: Options) -> list[Plan | None]:
    found: list[Plan | None] = [Plan(*one) for one in options.plans]
    return found or [None]


# --- both -------------------------------------------------------------------------------------------------


def _right(entry: Entry, case: Case, pool: Pool, call: Callable[[], Any]) -> bool:
    """Note the errors; an entry that is off the bound, or fails, is marked."""
    try:
        y = checked(case, call())
    except (InputError, RuntimeError) as error:
        entry.status, entry.note = "failed", (str(error).splitlines() or [""])[0][:300]
        return False
    wanted, plain = exact(pool), exact(pool, torch.float16).double()
    largest = float((y - wanted).abs().max())
    off = float((plain - wanted).abs().max())
    rounding = torch.finfo(torch.float16).eps * float(wanted.abs().max())
    entry.error = {"max_abs": largest, "plain": off, "bound": TOLERANCE * off + rounding}
    if largest <= entry.error["bound"]:
        return True
    entry.status, entry.note = "wrong", f"error {largest:.3g}, allowed {entry.error['bound']:.3g}"
    return False


def _entry(contender: str, case: Case, kind: str) -> Entry:
    return Entry(
        table=f"{TABLE} {case.model}",
        contender=contender,
        format=kind,
        m=case.batch,
        n=case.chunk,
        k=case.context,
        group=case.group,
        status="timed",
        weight_bytes=case.kv_bytes(kind),
    )
