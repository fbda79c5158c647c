"""Times of the W3 batch-tile and of grid.y: the article's, those of kept records, and of this GPU.

On a GPU ``python -m labkit.bench.batch_times FILE`` times all four variants of
:mod:`labkit.bench.batch_tile` and writes a record; chapter 06 reads it from ``data/measured``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from labkit import quoted
from labkit.bench import batch_tile
from labkit.bench.cases import GROUP, Case, batch_tile_shape
from labkit.bench.record import Entry, Record, read_all
from labkit.device import Device, get_device
from labkit.errors import require
from labkit.paths import data_dir

TABLE = "w3_batch_tile"
_NAMES = {"gemv_small_batch": "grid.y", "gemv_batch_w3": "tile"}


@dataclass(frozen=True)
class Times:
    """Microseconds of one call, of every variant that was timed for this number of rows.

    Attributes:
        device: name of the card.
        key: of the card in ``data/devices.json``; any other word for a card that is not there.
        m: rows.
        us: "grid.y", "tile" and perhaps other variants → µs.
        origin: "measured" or "quoted".
    """

    device: str
    key: str
    m: int
    us: Mapping[str, float]
    origin: str

    @property
    def slowdown(self) -> float:
        """Time of the tile over time of grid.y."""
        return self.us["tile"] / self.us["grid.y"]


def quoted_times() -> list[Times]:
    """The article's table."""
    card = get_device("rtx3050-laptop")
    found = []
    for row in quoted.table(quoted.DEEPINFER, TABLE).rows:
        us = {"grid.y": 1e3 * row["grid_y_ms"], "tile": 1e3 * row["batch_tile_ms"]}
        found.append(Times(card.name, card.key, row["batch"], us, "quoted"))
    return found


def measured_times(folder: Path | None = None) -> list[Times]:
    """Times of the same table in kept records, devices by name; [] when there is none.

    Of each device the record with most variants counts, of equal ones the newest.

    Args:
        folder: records; ``data/measured`` by default. Files that are no record are passed over.
    """
    records, _ = read_all(sorted((folder or data_dir() / "measured").glob("*.json")))
    found: dict[str, list[Times]] = {}
    for record in sorted(records, key=lambda one: one.started):
        times = from_record(record)
        if times and len(times[0].us) >= len(found.get(times[0].device, times)[0].us):
            found[times[0].device] = times
    return [one for device in sorted(found) for one in found[device]]


def from_record(record: Record) -> list[Times]:
    """Times of one record, rows ascending; only numbers of rows for which both kernels were timed."""
    if record.kind != "measured":
        return []
    rows: dict[int, dict[str, float]] = {}
    for entry in record.of_table(TABLE):
        if entry.median_us is not None:
            rows.setdefault(entry.m, {})[_NAMES.get(entry.contender, entry.contender)] = entry.median_us
    device, key = (str(record.device.get(name, "unknown")) for name in ("name", "key"))
    both = [m for m in sorted(rows) if {"grid.y", "tile"} <= rows[m].keys()]
    return [Times(device, key, m, rows[m], "measured") for m in both]


def fixed_and_each(m1: int, us1: float, m2: int, us2: float) -> tuple[float, float]:
    """(fixed, for each row) of the line fixed + each · M through two points, in the unit of the times."""
    require(m1 != m2, "m2", m2, "another number of rows than m1")
    each = (us2 - us1) / (m2 - m1)
    return us1 - each * m1, each


def all_times(own: Sequence[Times] = (), folder: Path | None = None) -> list[Times]:
    """The article's times, those of kept records, and ``own``, which take the place of a record's.

    Args:
        own: measured just now, of one device.
        folder: as for :func:`measured_times`.
    """
    here = {one.device for one in own}
    kept = [one for one in measured_times(folder) if one.device not in here]
    return [*quoted_times(), *kept, *own]


def by_card(times: Sequence[Times]) -> dict[str, list[Times]]:
    """ "name (origin)" of a card → its times, in the order given."""
    found: dict[str, list[Times]] = {}
    for one in times:
        found.setdefault(f"{one.device} ({one.origin})", []).append(one)
    return found


def line(times: Sequence[Times], variant: str) -> tuple[float, float]:
    """(fixed, each) of a variant, µs, from the first and the last of one card's times."""
    first, last = times[0], times[-1]
    return fixed_and_each(first.m, first.us[variant], last.m, last.us[variant])


def issue_us(instructions: float, card: str | Device) -> float:
    """µs that a card needs only to start the instructions of the article's shape, at its nominal clock.

    An SM has four schedulers (compute capability 8.0 and later), and each starts at most one warp
    instruction a clock.

    Args:
        instructions: of a step (:meth:`labkit.bench.batch_tile.Code.instructions`).
        card: key of a device, or the device.
    """
    facts = get_device(card) if isinstance(card, str) else card
    n, k = batch_tile_shape()
    return n * k / batch_tile.STEP * instructions / (4 * facts.sms * facts.clock_ghz * 1e3)


def measure(
    rows: Sequence[int] = (2, 4, 8),
    variants: Sequence[str] = batch_tile.VARIANTS,
    samples: int = 20,
    command: str = "labkit.bench.batch_times",
) -> Record:
    """Time the variants on this GPU: the article's shape, cold L2, in turns, each found right first.

    Args:
        rows: numbers of rows, 1 to 8.
        variants: of :data:`labkit.bench.batch_tile.VARIANTS`.
        samples: of each, at least 20 for a record that is kept.
        command: the command line, for the record.

    Raises:
        InputError: a variant whose bits are not those of grid.y, or that breaks the error rule.
    """
    import torch

    from labkit.bench import contenders, machine, timing
    from labkit.bench.check import judge, reference

    n, k = batch_tile_shape()
    record = Record(
        name="batch-tile",
        kind="measured",
        command=command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        device=machine.device_facts("cuda"),
        software=machine.software_facts(),
        parameters={"samples": samples, "rows": list(rows), "cold_bytes": timing.COLD_BYTES},
    )
    record.clocks.append(machine.clocks("before", machine.gpu_index()))
    cases = [Case(TABLE, "w3", m, n, k, GROUP, tuple(variants)) for m in rows]
    first = contenders.random_weight(cases[0], "cuda")
    copies = timing.copies_needed(cases[0].weight_bytes, record.device.get("l2_bytes"))
    weights = [first, *(contenders.clone(first) for _ in range(copies - 1))]
    for case in cases:
        x = contenders.random_input(case, "cuda")
        wanted, bits = reference(x, first), batch_tile.launch("grid.y", x, first).run()
        entries, ready = {}, {}
        with timing.side_stream():
            for name in variants:
                launches = [batch_tile.launch(name, x, weight) for weight in weights]
                out = launches[0].run()
                right = judge(out, wanted, torch.float16)
                require(not right.problem, "variant", f"{name}: {right.problem}", "the right result")
                require(torch.equal(out, bits), "variant", f"{name}: other bits", "those of grid.y")
                ready[name] = timing.prepare([one.run for one in launches])
                entries[name] = Entry(TABLE, name, "w3", case.m, n, k, GROUP, "timed", error=right.to_json())
                entries[name].method = {"how": ready[name].how, "calls": ready[name].calls, "copies": copies}
                entries[name].weight_bytes = case.weight_bytes
            for name, taken in timing.interleave(ready, samples).items():
                entries[name].samples_us = taken
        record.entries += entries.values()
    record.clocks.append(machine.clocks("after", machine.gpu_index()))
    return record


def main(arguments: Sequence[str]) -> int:
    """Write the record of this GPU to the file that is named."""
    require(len(arguments) == 1, "arguments", " ".join(arguments) or "none", "one file to write")
    record = measure(command=f"python -m labkit.bench.batch_times {Path(arguments[0]).name}")
    record.write(Path(arguments[0]))
    for one in from_record(record):
        print(f"M = {one.m}: " + ", ".join(f"{name} {us:.2f} µs" for name, us in one.us.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
