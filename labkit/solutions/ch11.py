"""Reference solutions of chapter 11."""

from __future__ import annotations

from itertools import pairwise


def latencies(events):
    """TTFT and TPOT by request, and the gaps of all requests in one list."""
    arrived: dict[str, float] = {}
    tokens: dict[str, list[float]] = {}
    for seconds, request, what in events:
        if what == "arrive":
            arrived[request] = seconds
        elif what == "token":
            tokens.setdefault(request, []).append(seconds)
    ttft = {request: times[0] - arrived[request] for request, times in tokens.items()}
    tpot = {
        request: (times[-1] - times[0]) / (len(times) - 1)
        for request, times in tokens.items()
        if len(times) > 1
    }
    gaps = [b - a for times in tokens.values() for a, b in pairwise(times)]
    return ttft, tpot, gaps


# Half for the oldest bounds the long ones; the shortest first in the rest bounds the short ones.
def share_chunk(budget, wanted):
    """Tokens of a chunk for each prompt, the oldest first."""
    given = [0] * len(wanted)
    given[0] = min(wanted[0], (budget + 1) // 2)
    left = budget - given[0]
    for at in sorted(range(1, len(wanted)), key=lambda at: wanted[at]):
        given[at] = min(wanted[at], left)
        left -= given[at]
    given[0] += min(wanted[0] - given[0], left)
    return given


# With the longest-lived first, the first i are those that are still there when the i-th ends.
def admit(waiting, running, slots):
    """How many from the front of the queue fit at every future moment."""

    def peak(requests):
        most = held = 0
        for i, (now, left) in enumerate(sorted(requests, key=lambda one: -one[1]), start=1):
            held += now
            most = max(most, held + i * left)
        return most

    count = 0
    while count < len(waiting) and peak(running + waiting[: count + 1]) <= slots:
        count += 1
    return count


def end_alone(rows, forward):
    """Tokens of the rows that can be computed, and the error of each that cannot."""
    try:
        return dict(zip(rows, forward(rows), strict=True)), {}
    except Exception as error:
        if len(rows) == 1:
            return {}, {rows[0]: str(error)}
    tokens: dict = {}
    errors: dict = {}
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        good, bad = end_alone(half, forward)
        tokens |= good
        errors |= bad
    return tokens, errors
