"""Exercises of chapter 12: a missing wait, two counters from a log, time side by side, a joined cycle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.check import Verdict, exercise, forbid_calls, not_yet, passed
from labkit.check.normalise import items, plain_int
from labkit.engine.executor import Lane
from labkit.engine.sim import mix, token_after
from labkit.errors import require

GIVEN = ("Gpu", "Task", "plan")
"""What the notebook uses of this module."""

_LANES: tuple[Lane, ...] = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel of the model: what it reads when it starts, and writes when it ends.

    Attributes:
        name: of the kernel. lane: its stream. ms: how long it runs.
        reads, writes: slots of the KV cache. Every slot is written once.
    """

    name: str
    lane: Lane
    ms: float
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """A mark in a lane: it is reached when everything that was launched there before has ended."""

    lane: Lane
    reached: float


class Gpu:
    """Two lanes on one clock in ms: each in order, both at full speed, neither knows of the other.

    Attributes:
        log: (task, start, end) in the order of launches.
        tokens: what each task computed from the slots it read, by name.
        stale: slots that a task read before they were written, by name; tasks without any are missing.
    """

    def __init__(self) -> None:
        self.log: list[tuple[Task, float, float]] = []
        self.tokens: dict[str, int] = {}
        self.stale: dict[str, tuple[int, ...]] = {}
        self._free: dict[Lane, float] = dict.fromkeys(_LANES, 0.0)
        self._written: dict[int, tuple[float, int]] = {}  # slot: when, and what

    def launch(self, task: Task) -> None:
        """Queue a task on its lane; comes back at once."""
        require(isinstance(task, Task), "task", repr(task), "a task of the plan")
        start = self._free[task.lane]
        end = self._free[task.lane] = start + task.ms
        found = [self._read(slot, start) for slot in task.reads]
        late = tuple(slot for slot, value in zip(task.reads, found, strict=True) if value is None)
        if late:
            self.stale[task.name] = late
        state = 1
        for value in found:
            state = mix(state, 0 if value is None else value)  # 0: what the memory held before
        self.tokens[task.name] = token_after(state, 32_000)
        for slot in task.writes:
            self._written[slot] = end, mix(state, slot + 1)
        self.log.append((task, start, end))

    def record(self, lane: Lane) -> Event:
        """An event behind all that the lane holds so far."""
        return Event(lane, self._free[_known(lane)])

    def wait(self, lane: Lane, event: Event) -> None:
        """What is launched on the lane from here on starts after the event; the host goes on."""
        require(isinstance(event, Event), "event", repr(event), "what gpu.record(lane) has returned")
        self._free[_known(lane)] = max(self._free[lane], event.reached)

    def synchronize(self) -> None:
        """The host waits for both lanes, so what it launches from here on starts after all of them."""
        self._free = dict.fromkeys(_LANES, self.end)

    @property
    def end(self) -> float:
        """When both lanes are empty, ms."""
        return max(self._free.values())

    def _read(self, slot: int, now: float) -> int | None:
        if slot < 0:
            return -slot  # there since long ago
        when, value = self._written.get(slot, (math.inf, 0))
        return value if when <= now else None


def _known(lane: Lane) -> Lane:
    require(lane in _LANES, "lane", repr(lane), "'decode' or 'prefill'")
    return lane


def plan(chunk_ms: float = 9.0, step_ms: float = 2.0) -> list[Task]:
    """Two prompts, A and B, that come while others decode, and one, C, that goes on from an answer."""
    old = (-1, -2, -3)
    a, b = (tuple(range(8)), tuple(range(8, 16))), (tuple(range(20, 28)), tuple(range(28, 36)))
    both, c = (*a[0], *a[1]), tuple(range(60, 68))

    def chunk(name: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> Task:
        return Task(name, "prefill", chunk_ms, reads, writes)

    def step(name: str, reads: tuple[int, ...], *writes: int) -> Task:
        return Task(name, "decode", step_ms, reads, writes)

    return [
        chunk("A1", (), a[0]),
        step("step 1", old, 40),
        chunk("A2", a[0], a[1]),
        step("step 2", (*old, 40), 41),
        chunk("B1", (), b[0]),
        step("step 3", (*old, 40, 41, *both), 42, 50),
        chunk("B2", b[0], b[1]),
        step("step 4", (*old, 40, 41, 42, *both, 50), 43, 51),
        chunk("C1", (*old, 40, 41, 42), c),
        step("step 5", (*both, 50, 51, *b[0], *b[1]), 52, 54),
        step("step 6", (*old, 40, 41, 42, *c), 55),
    ]


# --- 12.1

TIMINGS = ((9.0, 2.0), (1.0, 6.0), (4.0, 4.0), (30.0, 0.5))
"""(chunk, step) in ms; the first is scored."""


@exercise("12.1", title="Put back the missing waits", par=47, limit=48, unit="ms", none_ok=True)
def launch_all(answer: Any) -> Verdict:
    """``launch_all(gpu, tasks)``: launch every task in order, with the waits that its reads need."""
    score = None
    for chunk_ms, step_ms in TIMINGS:
        tasks, gpu, right = plan(chunk_ms, step_ms), Gpu(), Gpu()
        answer(gpu, list(tasks))
        names = [task.name for task, _, _ in gpu.log]
        wanted = [task.name for task in tasks]
        if names != wanted:
            hint = "every task once, in the order of the list"
            return not_yet(", ".join(wanted), ", ".join(names) or "nothing", hint)
        for task in tasks:
            right.launch(task)
            right.synchronize()
        if gpu.stale:
            name, slots = next(iter(gpu.stale.items()))
            return not_yet(*_late(gpu, name, slots, f"a chunk takes {chunk_ms:g} ms, a step {step_ms:g} ms"))
        if gpu.tokens != right.tokens:
            return not_yet("the tasks as they were given", "others of the same names")
        score = gpu.end if score is None else score
    hint = "wait only where another lane has written what is read, for the event behind that task alone"
    return passed("all tokens right, at any speed of the two lanes", score=score, hint=hint)


def _late(gpu: Gpu, name: str, slots: Sequence[int], case: str) -> tuple[str, str, str]:
    start = next(start for task, start, _ in gpu.log if task.name == name)
    writer, end = next((task, end) for task, _, end in gpu.log if slots[0] in task.writes)
    expected = f"{name} starts when {writer.name} has written slot {slots[0]}, at {end:g} ms"
    hint = f"{case}; record behind {writer.name}, wait on the lane of {name} before it is launched"
    return expected, f"it starts at {start:g} ms", hint


# --- 12.2

LogEntry = tuple[str, str, str, int | None]
"""(what, work, kind, stream): "launch", "join" or "count"."""


def log(text: str) -> list[LogEntry]:
    """A log in short: ``+d1@7`` launches decode work d1 on stream 7 (``@-``: on none), ``-d1`` joins it,
    ``=`` is where the engine counts its cycle. d is decode, p prefill, m both in one forward."""
    kinds = {"d": "decode", "p": "prefill", "m": "mixed"}
    found: list[LogEntry] = []
    for word in text.split():
        if word == "=":
            found.append(("count", "", "", None))
        elif word[0] == "-":
            found.append(("join", word[1:], kinds[word[1]], None))
        else:
            name, _, stream = word[1:].partition("@")
            found.append(("launch", name, kinds[name[0]], None if stream == "-" else int(stream)))
    return found


LOGS: tuple[tuple[str, str, tuple[int, int], str], ...] = (
    ("two streams, joined", "+d1@7 +p1@8 = -d1 -p1 +d2@7 +p2@8 = -d2 -p2 +d3@7 = -d3", (2, 2), ""),
    (
        "overlap off",
        "+d1@7 +p1@7 = -d1 -p1 +d2@7 +p2@7 = -d2 -p2",
        (2, 0),
        "one stream runs one after the other, though both are in the cycle",
    ),
    ("a CPU", "+d1@- +p1@- = -d1 -p1", (1, 0), "where there is no stream, nothing ran on two"),
    ("mixed", "+m1@7 = -m1 +m2@7 = -m2 +d3@7 = -d3", (2, 0), "one forward holds both kinds, on one stream"),
    (
        "not joined",
        "+d1@7 +p1@8 = -d1 +d2@7 = -d2 +d3@7 = -d3 -p1 +d4@7 = -d4",
        (3, 3),
        "a chunk that was launched some cycles ago and has not joined still runs",
    ),
    (
        "two chunks, no decode",
        "+p1@8 +p2@8 = -p1 -p2 +p3@7 +p4@8 = -p3 -p4",
        (0, 0),
        "two streams, but only one kind of work",
    ),
    ("a step after the chunk", "+p1@8 = -p1 +d1@7 = -d1 =", (0, 0), "never in flight at the same time"),
)


@exercise("12.2", title="Name the metric honestly")
def overlap_counters(answer: Any) -> Verdict:
    """``overlap_counters(events)``: (cycles with both kinds in flight, those on two streams)."""
    forbid_calls(answer, ("count_step", "_count_cycle", "Counters"))
    for name, text, wanted, why in LOGS:
        came = items(answer(log(text)))
        got = None if came is None else tuple(plain_int(one) for one in came)
        if got is None or len(got) != 2 or not all(type(one) is int for one in got):
            return not_yet("two whole numbers", _shown(came), f"asked: {name}")
        if got != wanted:
            hint = "count at every 'count', from what was launched and has not joined"
            return not_yet(f"{wanted} for {name}: {text}", _shown(got), why or hint)
    return passed(f"{len(LOGS)} logs; with the overlap off, the first counter still runs")


# --- 12.3

Interval = tuple[float, float]

TIMELINES: tuple[tuple[str, list[Interval], list[Interval], float], ...] = (
    ("one inside the other", [(1.0, 2.0)], [(0.0, 8.0)], 1.0),
    ("side by side", [(0.0, 2.0), (2.0, 4.0)], [(4.0, 9.0)], 0.0),
    ("partly", [(0.0, 3.0)], [(2.0, 5.0)], 1.0),
    ("steps beside two chunks", [(0.5, 1.0), (1.0, 2.5), (3.0, 4.0)], [(0.0, 2.0), (2.0, 3.5)], 2.5),
    ("a step over two chunks", [(1.0, 4.0)], [(0.0, 2.0), (3.0, 5.0)], 2.0),
    ("in no order", [(3.0, 4.0), (0.5, 1.0)], [(2.0, 3.5), (0.0, 2.0)], 1.0),
    ("an empty lane", [], [(0.0, 2.0)], 0.0),
)
"""Exact in binary; intervals of one lane do not overlap."""


@exercise("12.3", title="Time side by side")
def both_busy(answer: Any) -> Verdict:
    """``both_busy(decode, prefill)``: seconds in which both lanes ran something."""
    forbid_calls(answer, ("beside", "overlap_run"))
    for name, decode, prefill, wanted in TIMELINES:
        got = _number(answer(list(decode), list(prefill)))
        case = f"{name}: decode {decode}, prefill {prefill}"
        if got is None:
            return not_yet("seconds", "no number", f"asked: {case}")
        if got != wanted:
            hint = "of each pair: from the later start to the earlier end, if that is any time at all"
            return not_yet(f"{wanted:g} s for {case}", f"{got:g}", hint)
    return passed(f"{len(TIMELINES)} timelines")


# --- 12.4

CYCLES = (
    (2.0, 8.0, 1.0),
    (2.0, 8.0, 2.0),
    (2.0, 8.0, 1.5),
    (8.0, 2.0, 1.25),
    (4.0, 4.0, 1.75),
    (0.5, 64.0, 1.0),
)
"""(step, chunk, slow)."""


@exercise("12.4", title="The floor of a joined cycle")
def joined_cycle(answer: Any) -> Verdict:
    """``joined_cycle(step, chunk, slow)``: (serial, joined, floor) seconds of a cycle."""
    forbid_calls(answer, ("SimulatedExecutor", "replay"))
    for step, chunk, slow in CYCLES:
        short, long = sorted((step, chunk))
        wanted = (step + chunk, long + (slow - 1) * short, long)
        came = items(answer(step, chunk, slow))
        got = None if came is None else [_number(one) for one in came]
        case = f"step {step:g}, chunk {chunk:g}, slow {slow:g}"
        if got is None or len(got) != 3 or None in got:
            return not_yet("(serial, joined, floor)", _shown(came), f"asked: {case}")
        for name, want, has in zip(("serial", "joined", "floor"), wanted, got, strict=True):
            if has is None or not math.isclose(has, want, rel_tol=1e-9):
                return not_yet(f"{name} {want:g} for {case}", f"{has:g}", _why(name, short, long, slow))
    return passed(f"{len(CYCLES)} cycles; at slow = 2 a joined overlap gains nothing")


def _why(name: str, short: float, long: float, slow: float) -> str:
    if name == "serial":
        return "one after the other"
    if name == "floor":
        return "both are joined: the longer one alone is the least, whatever the overlap"
    ends = slow * short
    return f"the shorter one ends at {ends:g}; {long - short:g} of the longer one are left, at full speed"


def _number(value: Any) -> float | None:
    try:
        return round(float(value), 9)
    except (TypeError, ValueError):
        return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
