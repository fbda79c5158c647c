"""Reference solutions of chapter 00."""

from __future__ import annotations

import statistics


def headline(findings):
    """Counts by state, as one line."""
    states = [finding["state"] for finding in findings]
    return f"{states.count('ok')} ok, {states.count('note')} notes, {states.count('problem')} problems"


def read_score(score, par, limit):
    """What a score means where lower is better."""
    if score > limit:
        return "not yet"
    return "par" if score <= par else "passed"


# The fault: findings are kept by name, so two GPUs count as one. The small report has no
# name twice, and most others have none either: that is why the fault is hard to see.
def plant_fault(findings):
    """A headline that is wrong only when a name comes twice."""
    by_name = {finding["name"]: finding["state"] for finding in findings if finding["state"] != "problem"}
    states = list(by_name.values()) + [f["state"] for f in findings if f["state"] == "problem"]
    return f"{states.count('ok')} ok, {states.count('note')} notes, {states.count('problem')} problems"


def steady(seconds):
    """Median of the warm calls, and whether they agree with each other."""
    warm = sorted(seconds[1:])
    median = statistics.median(warm)
    return median, warm[-1] - warm[0] <= 0.25 * median


# 7B needs 3.66 GiB for its weights alone; with the cache and the reserve it is above 4 GiB.
fits_w4 = ["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"]
