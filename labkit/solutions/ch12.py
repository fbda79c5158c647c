"""Reference solutions of chapter 12."""

from __future__ import annotations


# Each slot knows the lane that wrote it and the event behind; the own lane is in order anyway.
def launch_all(gpu, tasks):
    """Launch tasks in order; a lane waits for what another lane has written and it reads."""
    written: dict = {}
    for task in tasks:
        for slot in task.reads:
            lane, event = written.get(slot, (task.lane, None))
            if lane != task.lane:
                gpu.wait(task.lane, event)
        gpu.launch(task)
        event = gpu.record(task.lane)
        for slot in task.writes:
            written[slot] = task.lane, event


# The first counter asks what a cycle held, the second where it ran.
def overlap_counters(events):
    """Cycles with both kinds in flight, and those with the two kinds on two streams."""
    flying: dict = {}
    both = two_streams = 0
    for what, work, kind, stream in events:
        if what == "launch":
            flying[work] = kind, stream
        elif what == "join":
            flying.pop(work, None)
        else:
            decode = {stream for kind, stream in flying.values() if kind in ("decode", "mixed")}
            prefill = {stream for kind, stream in flying.values() if kind in ("prefill", "mixed")}
            both += bool(decode and prefill)
            real = decode and prefill and None not in decode | prefill
            two_streams += bool(real and decode != prefill)
    return both, two_streams


def both_busy(decode, prefill):
    """Seconds in which both lanes ran something."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in decode for b in prefill)


# While both run, each needs ``slow`` times as long; the longer one ends alone, at full speed.
def joined_cycle(step, chunk, slow):
    """Seconds of a cycle: one after the other; side by side and joined; and the least that a join allows."""
    short, long = min(step, chunk), max(step, chunk)
    return step + chunk, slow * short + (long - short), long
