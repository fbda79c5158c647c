"""Cases of chapter 15: benchmarks with a clock of their own, pairs of records, histories without a machine.

All figures made here are *simulated*: drawn from a seeded dice, the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.bench.record import Entry, Record

GIVEN = ("Problem", "lab_record", "practice", "errors", "Simulated")
"""What the notebook imports from here: an answer may use it."""

# --- 15.1: a benchmark with its own clock

PLACE: dict[str, Any] = {
    "table": "lab",
    "contender": "product",
    "format": "fp32",
    "m": 64,
    "n": 64,
    "k": 64,
    "group": 0,
}
"""Where an entry belongs: ``Entry(**PLACE, status=...)``."""


class Problem:
    """Something to be timed, and a clock that only its work moves.

    Args:
        seconds: of its calls, one after another; the last one stays.
        error, bound: largest absolute error of the result, and what is allowed.
        raises: what every call raises, or None.
    """

    def __init__(
        self,
        seconds: Sequence[float] = (0.05, 0.001),
        error: float = 1e-4,
        bound: float = 1e-3,
        raises: Exception | None = None,
    ) -> None:
        self.place = dict(PLACE)
        self.seconds, self._error, self._bound, self._raises = tuple(seconds), error, bound, raises
        self.calls = self.readings = self.looks = 0
        self._now = 1000.0

    def call(self) -> str:
        """Do the work once; the result is handed to :meth:`error`."""
        self._now += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1
        if self._raises is not None:
            raise self._raises
        return "result"

    def error(self, result: str) -> dict[str, float]:
        """How far a result is from the right one: {"max_abs", "bound"}. It takes a second."""
        if result != "result":
            raise TypeError(f"error() needs what call() gave back; got {result!r}")
        self._now += 1.0
        self.looks += 1
        return {"max_abs": self._error, "bound": self._bound}

    def clock(self) -> float:
        """Seconds since some moment."""
        self.readings += 1
        return self._now


# --- 15.2: pairs of records

REASONS = ("kind", "problem", "device", "power limit", "driver", "throttled", "dirty")
"""Why two records may not be compared, for the claim that a commit made the code faster."""

_DEVICE = {
    "name": "NVIDIA GeForce RTX 3050 Laptop GPU",
    "key": "rtx-3050-laptop",
    "capability": "8.6",
    "driver": "580.95",
    "power_limit_w": 60.0,
}
_CPU = {"name": "a processor", "key": "cpu", "capability": None, "cores": 8}


def lab_record(**changes: Any) -> Record:
    """A record of one entry, made up; ``changes`` are fields of it, ``device__x`` one fact of its device."""
    device = dict(_DEVICE)
    for name in [name for name in changes if name.startswith("device__")]:
        device[name.removeprefix("device__")] = changes.pop(name)
    samples = [10.0 + 0.02 * (i % 5) for i in range(20)]
    values: dict[str, Any] = {
        "name": "lab",
        "kind": "measured",
        "command": "labkit bench gemm",
        "started": "2026-12-01T03:00:00+00:00",
        "device": device,
        "software": {"versions": {"torch": "2.13.0"}, "commit": {"id": "1c83d6d", "dirty": False}},
        "parameters": {"group": 128},
        "clocks": readings(),
        "entries": [Entry(**PLACE, status="timed", samples_us=samples)],
    }
    return Record(**(values | changes))


def readings(before: Sequence[str] = ("idle",), after: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Clocks of a record, with these throttle reasons before and after."""
    return [
        {"when": "before", "sm_mhz": 210.0, "throttle_reasons": list(before)},
        {"when": "under load", "sm_mhz": 1740.0, "throttle_reasons": []},
        {"when": "after", "sm_mhz": 1740.0, "throttle_reasons": list(after)},
    ]


def _dirty(dirty: bool = True, **more: Any) -> dict[str, Any]:
    return {"versions": {}, "commit": {"id": "44e1ad1", "dirty": dirty}, **more}


def record_pairs() -> Iterator[tuple[str, Record, Record, set[str]]]:
    """(what is special, a, b, the reasons against comparing them)."""
    good, later = lab_record(), "2026-12-08T03:00:00+00:00"
    cpu = lab_record(device=_CPU, clocks=[{"when": "before", "unread": "nvidia-smi gave no answer"}])
    hot = readings(after=["software thermal slowdown"])
    middle = readings()
    middle[1]["throttle_reasons"] = ["software power cap", "application clocks setting"]
    yield "another commit, another week", good, lab_record(started=later, software=_dirty(False)), set()
    yield "two runs of a processor, which has no clocks to read", cpu, replace(cpu, started=later), set()
    yield "60 against 60.0 W", good, lab_record(device__power_limit_w=60), set()
    yield (
        "clocks that somebody set",
        good,
        lab_record(clocks=readings(after=["application clocks setting"])),
        set(),
    )
    yield "throttled at the end", good, lab_record(clocks=hot), {"throttled"}
    yield "throttled under load only", good, lab_record(clocks=middle), {"throttled"}
    yield "throttled, both of them", lab_record(clocks=hot), lab_record(clocks=hot), {"throttled"}
    yield "no reasons known", good, lab_record(clocks=[{"when": "after", "throttle_reasons": None}]), set()
    yield "a dirty checkout", good, lab_record(software=_dirty()), {"dirty"}
    yield "no commit at all", good, lab_record(software={"versions": {}, "commit": None}), {"dirty"}
    yield "a record that says nothing of its software", good, lab_record(software={}), {"dirty"}
    yield "another driver", good, lab_record(device__driver="575.51"), {"driver"}
    yield "a driver that only one names", good, lab_record(device__driver=None), {"driver"}
    yield "a laptop at 95 W", good, lab_record(device__power_limit_w=95.0), {"power limit"}
    silent = {key: value for key, value in _DEVICE.items() if key != "power_limit_w"}
    yield "a power limit that only one names", good, lab_record(device=silent), {"power limit"}
    yield "another card", good, lab_record(device__name="NVIDIA GeForce RTX 3050 6GB"), {"device"}
    yield "another capability", good, lab_record(device__capability="8.9"), {"device"}
    yield "two that name no device", lab_record(device={}), lab_record(device={}), {"device"}
    yield "a group of 32", good, lab_record(parameters={"group": 32}), {"problem"}
    yield "another benchmark", good, lab_record(name="gemm-fast"), {"problem"}
    yield "a simulated one", good, lab_record(kind="simulated"), {"kind"}
    worst = lab_record(device__driver="575.51", device__power_limit_w=95.0, software=_dirty(), clocks=hot)
    yield "nearly everything", good, worst, {"driver", "power limit", "dirty", "throttled"}
    yield "a processor against a card", cpu, good, {"device", "driver", "power limit"}


# --- 15.4: histories

Runs = list[list[float]]

NIGHTS, SAMPLES = 24, 12


@dataclass(frozen=True)
class Simulated:
    """A history that was made up, so that the truth is known.

    Attributes:
        runs: samples of each night, µs. changes: nights at which the code really changed.
        busy: nights with a neighbour on the machine, one or two in a row; then it was as before.
    """

    runs: Runs
    changes: tuple[int, ...]
    busy: tuple[int, ...]


def simulated_history(seed: int) -> Simulated:
    """24 nights of 12 samples: noise in a run, a shift of the whole run, outliers, up to two real changes."""
    dice = random.Random(f"history {seed}")
    changes = _apart(dice, dice.choice((0, 1, 1, 2)), low=6, high=NIGHTS - 5, gap=7)
    loud = [
        night + more
        for night in _apart(dice, dice.choice((0, 1, 1, 2)), low=3, high=NIGHTS - 4, gap=5)
        for more in range(dice.choice((1, 1, 2)))
    ]
    busy = tuple(night for night in loud if all(abs(night - change) >= 3 for change in changes))
    level, runs = 100.0, []
    for night in range(NIGHTS):
        if night in changes:
            size = 1 + dice.uniform(0.04, 0.1)
            level = level * size if dice.random() < 0.5 else level / size
        here = level * (1 + dice.gauss(0, 0.012))
        here *= 1 + dice.uniform(0.06, 0.2) if night in busy else 1
        runs.append([round(_sample(dice, here), 3) for _ in range(SAMPLES)])
    return Simulated(runs, changes, busy)


def _sample(dice: random.Random, level: float) -> float:
    """Noise only makes a time longer; now and then something else runs."""
    value = level * (1 + abs(dice.gauss(0, 0.015)))
    return value * dice.uniform(1.3, 2.5) if dice.random() < 0.06 else value


def _apart(dice: random.Random, count: int, *, low: int, high: int, gap: int) -> tuple[int, ...]:
    found: list[int] = []
    while len(found) < count:
        night = dice.randint(low, high)
        if all(abs(night - other) >= gap for other in found):
            found.append(night)
    return tuple(sorted(found))


LATE = 2
"""A change may be named up to so many nights late."""


def errors(found: Sequence[int], truth: Simulated) -> tuple[int, int]:
    """(false alarms, misses): each change takes one alarm, at its night or up to :data:`LATE` later."""
    alarms, missed = sorted(set(found)), 0
    for change in truth.changes:
        hit = next((night for night in alarms if change <= night <= change + LATE), None)
        if hit is None:
            missed += 1
        else:
            alarms.remove(hit)
    return len(alarms), missed


def practice(count: int = 40) -> list[Simulated]:
    """The histories that the notebook shows; an answer is tried on others."""
    return [simulated_history(seed) for seed in range(count)]


def examination(count: int = 40) -> list[Simulated]:
    """The histories that an answer is tried on."""
    return [simulated_history(1000 + seed) for seed in range(count)]
