"""Reference solutions of chapter 15."""

from __future__ import annotations

import math
from statistics import NormalDist, median

from labkit.bench.record import Entry
from labkit.results import compare


# The call whose result is checked is the warm-up too: by then everything is loaded and allocated.
def measure(problem, samples):
    """An entry that says itself what became of the problem."""
    try:
        error = problem.error(problem.call())
        if not error["max_abs"] <= error["bound"]:  # so that NaN is wrong as well
            return Entry(**problem.place, status="wrong", error=error, note="above its bound")
        taken = []
        for _ in range(samples):
            began = problem.clock()
            problem.call()
            taken.append(1e6 * (problem.clock() - began))
    except Exception as trouble:
        return Entry(**problem.place, status="failed", note=f"{type(trouble).__name__}: {trouble}")
    return Entry(**problem.place, status="timed", error=error, samples_us=taken)


def may_compare(a, b):
    """Reasons against it; an empty set when only the commit differs."""
    reasons = set()
    if a.kind != b.kind:
        reasons.add("kind")
    if (a.name, a.parameters) != (b.name, b.parameters):
        reasons.add("problem")
    facts = [[r.device.get(key) for key in ("name", "key", "capability")] for r in (a, b)]
    if facts[0] != facts[1] or not facts[0][0]:
        reasons.add("device")
    for key, reason in (("power_limit_w", "power limit"), ("driver", "driver")):
        if a.device.get(key) != b.device.get(key):
            reasons.add(reason)
    for record in (a, b):
        named = {reason for reading in record.clocks for reason in reading.get("throttle_reasons") or ()}
        if named & set(compare.THROTTLED):
            reasons.add("throttled")
        if (record.software.get("commit") or {"dirty": True})["dirty"]:
            reasons.add("dirty")
    return reasons


# 1.96 keeps false alarms at 5 %, 0.84 more finds 80 % of the real changes.
def runs_needed(run, sample, samples, effect):
    """Runs before and after, each."""
    both = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
    variance = 2 * (run**2 + sample**2 / samples)
    return max(1, math.ceil(variance * (both / effect) ** 2))


# Three nights in a row, all on the same side of what was normal: no neighbour stays that long.
def find_changes(runs):
    """Nights at which the level changed."""
    medians = [median(run) for run in runs]
    found, start = [], 0
    for night in range(2, len(runs) - 1):
        if night - start < 2:
            continue
        normal = median(medians[max(start, night - 6) : night])
        ratios = [value / normal for value in medians[night : night + 3]]
        if all(ratio > 1.03 for ratio in ratios) or all(ratio < 0.97 for ratio in ratios):
            found.append(night)
            start = night
    return found
