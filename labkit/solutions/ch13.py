"""Reference solutions of chapter 13."""

from __future__ import annotations

from labkit.engine.policy import DECODE, Pick


def mixed_by_hand(step, chunk, rest, rows, tokens):
    """Largest gap of mixed, and its share of serial's prefill rate."""
    slope = (chunk[1] - rest[1]) / (chunk[0] - rest[0])
    gap = rest[1] + slope * (rows + tokens - rest[0])
    serial = chunk[0] / (chunk[1] + step)
    return gap, tokens / gap / serial


# Sorted by gap, a point is on the front if it is faster than all before it.
def pareto_front(points):
    """Labels of the points that no other beats, the smallest gap first."""
    front, fastest = [], float("-inf")
    for label, _, rate in sorted(points, key=lambda one: (one[1], -one[2])):
        if rate > fastest:
            front.append(label)
            fastest = rate
    return front


def where_each_loses(cases):
    """For each policy a case, a point of it, and a point of another policy that beats it there."""
    found: dict = {}
    for case, points in cases.items():
        for policy, label, gap, rate in points:
            for other, winner, its_gap, its_rate in points:
                better = its_gap <= gap and its_rate >= rate and (its_gap, its_rate) != (gap, rate)
                if other != policy and better:
                    found.setdefault(policy, (case, label, winner))
    return found


# Of all chunks whose forward with four decode rows stays below 250 ms, the best of the largest: 1,024 tokens
# are 22 chunks of 47, and 23 of 46.
def hold_sla(bound):
    """A policy as the command line names it; no gap above so many seconds."""
    return "mixed:47"


def next_work(view, seconds, bound):
    """Mixed, with as many tokens as the bound leaves beside the rows that decode."""
    if view.in_flight:
        return None
    if not view.prefill_waits:
        return DECODE if view.ready else None
    if not view.ready:
        return Pick("prefill", 128)
    tokens = 1
    while seconds(view.ready + tokens + 1) <= bound:
        tokens += 1
    return Pick("mixed", tokens)
