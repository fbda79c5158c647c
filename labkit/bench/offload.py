"""``labkit bench offload``: what one call costs when input and output live in host memory."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from labkit.bench import machine
from labkit.bench.record import Entry, Record
from labkit.errors import require

_CALLS = 10  # of one sample: a sample is their median, as one call alone is at the scheduler's mercy


def run(device: str, samples: int, command: str) -> Record:
    """Measure the round trip, and this machine's row of ``data/offload.json``.

    Args:
        device: "cuda"; there is nothing to measure without a GPU.
        samples: samples of the round trip, at least 20.
        command: the command line, for the record.

    Raises:
        InputError: no GPU, or too few samples.
    """
    require(device == "cuda", "device", device, "a GPU: the way there and back is what is measured")
    require(samples >= 20, "samples", samples, "at least 20")
    from labkit.nn import offload
    from labkit.nn.offload_table import to_json

    record = Record(
        name="offload",
        kind="measured",
        command=command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        device=machine.device_facts(device),
        software=machine.software_facts(),
        parameters={"samples": samples, "calls_a_sample": _CALLS},
    )
    index = machine.gpu_index()
    record.clocks.append(machine.clocks("before", index))
    trips = [round(offload.measure_round_trip(device, repeats=_CALLS), 2) for _ in range(samples)]
    row = offload.measure(device)
    record.clocks.append(machine.clocks("after", index))
    trip = {"contender": "round trip", "format": "q8_0", "m": 1, "n": 32, "k": 32, "group": 32}
    method = {"how": "host clock, median of calls that end with one synchronise", "calls": _CALLS}
    record.entries.append(
        Entry(table="offload", status="timed", samples_us=trips, method=method, **trip)  # type: ignore[arg-type]
    )
    record.parameters["row"] = to_json(row)
    record.notes.append(_sentence(to_json(row)))
    return record


def _sentence(row: dict[str, Any]) -> str:
    """The row in words, beside the article's figure."""
    from labkit import quoted

    article = quoted.table(quoted.KESTREL, "offload")
    limit = row["threshold_flop"]
    pays = "no product pays" if limit is None else f"products from {limit / 1e6:.3g} MFLOP on pay"
    return (
        f"{pays} here: round trip {row['round_trip_us']} µs, CPU {row['cpu_gflops']} GFLOP/s, GPU "
        f"{row['gpu_gflops'] or 'rate not visible'} at M = 1 (measured); "
        f"{article.value('flop_threshold') / 1e6:g} MFLOP and {article.value('round_trip_us')} µs there "
        f"(quoted: {article.source})"
    )
