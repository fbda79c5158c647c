"""Exercises of chapter 13: mixed by hand, the Pareto front, where each policy loses, an SLA, a policy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from labkit.bench import jitter, pareto
from labkit.bench.jitter_cases import preset
from labkit.bench.policy_specs import PolicySpec, parse_policies
from labkit.bench.trial import trial
from labkit.check import Verdict, exercise, forbid_calls, not_yet, passed
from labkit.check.normalise import items, pair
from labkit.engine.cost_model import rtx3050
from labkit.engine.policy import Pick, Policy, View
from labkit.errors import InputError

GIVEN = ("measured_here",)
"""What the notebook uses of this module."""

_DUST = 1e-9
"""Seconds: what sums of floats may add to a bound."""


# --- a GPU


def measured_here(streams: int = 8, document: int = 2048) -> list[pareto.Point]:
    """A short run of ``labkit bench jitter`` on this GPU: random weights of Qwen2.5-3B, four policies."""
    options = replace(
        preset("cuda"),
        policies=parse_policies("serial:128,overlap:128,ticks:512,mixed:128"),
        parts=("document",),
        streams=streams,
        document=document,
        repeats=1,
        overlap=True,
    )
    return pareto.points(jitter.run(options, "chapter 13", report=lambda _: None))


# --- 13.1

Size = tuple[int, float]
"""(tokens of a forward, seconds)."""


def article_sizes() -> tuple[float, Size, Size]:
    """Decode step, chunk of 128 and chunk of 61 of the article, as the cost model has them."""
    seconds = dict(rtx3050().points)
    return seconds[4], (128, seconds[128]), (61, seconds[61])


@exercise("13.1", title="Mixed by hand")
def mixed_by_hand(answer: Any) -> Verdict:
    """``mixed_by_hand(step, chunk, rest, rows, tokens)``: (largest gap, share of serial's prefill rate)."""
    forbid_calls(answer, ("products", "rtx3050", "CostModel", "trial"))
    cases = [(0.1, (100, 0.5), (50, 0.3), 5, 20), (0.5, (128, 2.0), (64, 1.0), 16, 112)]
    for case in (*cases, (*article_sizes(), 4, 28), (*article_sizes(), 4, 60)):
        step, chunk, rest, rows, tokens = case
        slope = (chunk[1] - rest[1]) / (chunk[0] - rest[0])
        gap = rest[1] + slope * (rows + tokens - rest[0])
        serial = chunk[0] / (chunk[1] + step)
        given = answer(*case)
        came = pair(given)
        numbers = None if came is None else [_number(one) for one in came]
        asked = f"asked: step {_plain(step)} s, chunk {_size(chunk)}, rest {_size(rest)}, {rows} rows"
        asked += f", {tokens} tokens"
        if numbers is None or None in numbers:
            return not_yet("(gap in seconds, share)", _shown(given), asked)
        got_gap, got_share = cast(list[float], numbers)
        if not _near(got_gap, gap):
            hint = "a line through the two sizes, read at rows + tokens"
            if _near(got_gap, gap + step):
                hint = "the decode rows ride in the same forward: no step of their own comes on top"
            elif _near(got_gap, gap - slope * rows):
                hint = "the decode rows are rows of that forward too"
            return not_yet(f"a gap of {gap:.4f} s", f"{got_gap:.4f}", f"{hint}; {asked}")
        if not _near(got_share, tokens / gap / serial):
            hint = "prompt tokens a second: tokens / gap, over chunk tokens / (chunk + step)"
            return not_yet(f"a share of {tokens / gap / serial:.4f}", f"{got_share:.4f}", f"{hint}; {asked}")
    return passed("gap and price of every case")


# --- 13.2

Labelled = tuple[str, float, float]
"""(label, gap, rate)."""

CLOUD: tuple[Labelled, ...] = (
    ("a", 10.0, 100.0),
    ("b", 20.0, 180.0),
    ("c", 20.0, 150.0),
    ("d", 30.0, 180.0),
    ("e", 15.0, 90.0),
    ("f", 40.0, 220.0),
    ("g", 5.0, 20.0),
    ("h", 41.0, 219.0),
)
"""c has b's gap and d has b's rate; both lose."""

CLOUD_FRONT = ["g", "a", "b", "f"]


@exercise("13.2", title="The Pareto front")
def pareto_front(answer: Any) -> Verdict:
    """``pareto_front(points)``: labels of those that no other point beats, the smallest gap first."""
    forbid_calls(answer, "front")
    own = [(p.label, p.max_gap, p.prompt_rate) for p in (_point("x", 3, 1), _point("y", 2, 2))]
    clouds = [(list(CLOUD), CLOUD_FRONT), (list(reversed(CLOUD)), CLOUD_FRONT), ([CLOUD[4]], ["e"])]
    for cloud, wanted in (*clouds, ([], []), (own, ["y"])):
        came = items(answer(list(cloud)))
        asked = f"asked: {_cloud(cloud)}"
        if came is None or not all(isinstance(one, str) for one in came):
            return not_yet("a list of labels", _shown(came), asked)
        if sorted(came) == sorted(wanted) and came != wanted:
            return not_yet(f"{wanted}", came, "the smallest gap first")
        for label in came:
            if label not in wanted:
                mine = next((one for one in cloud if one[0] == label), None)
                winner = next((one for one in cloud if mine and _beats(one, mine)), None)
                hint = f"{winner} beats {mine}: no larger gap, no lower rate, and one of them better"
                return not_yet(f"{wanted}", came, hint if winner else f"{label} is no label; {asked}")
        if came != wanted:
            missing = next(one for one in wanted if one not in came)
            return not_yet(f"{wanted}", came, f"nothing beats {missing}; {asked}")
    return passed("what nothing beats, and nothing else")


def _point(label: str, gap: float, rate: float) -> pareto.Point:
    return pareto.Point(label, label, False, gap, gap, rate, "simulated")


def _beats(one: Labelled, other: Labelled) -> bool:
    return one[1] <= other[1] and one[2] >= other[2] and one[1:] != other[1:]


# --- 13.3

Case = Sequence[tuple[str, str, float, float]]
"""(policy, label, gap, rate) of every point."""

CASES: dict[str, Case] = {
    "slow card, max": [
        ("serial", "serial:128", 60.0, 190.0),
        ("overlap", "overlap:128", 59.0, 195.0),
        ("mixed", "mixed:64", 30.0, 200.0),
        ("mixed", "mixed:128", 61.0, 194.0),
        ("ticks", "ticks:512", 14.0, 120.0),
    ],
    "fast card, max": [
        ("serial", "serial:128", 10.0, 150.0),
        ("overlap", "overlap:128", 9.0, 150.0),
        ("mixed", "mixed:64", 8.0, 100.0),
        ("ticks", "ticks:512", 2.8, 101.0),
    ],
}
"""Nothing of another policy beats ticks anywhere."""


@exercise("13.3", title="Where each one loses")
def where_each_loses(answer: Any) -> Verdict:
    """``where_each_loses(cases)``: {policy: (case, its label, label of another policy that beats it)}."""
    forbid_calls(answer, "front")
    backwards = {name: CASES[name] for name in reversed(CASES)}
    worlds: list[dict[str, Case]] = [CASES, backwards, {"none": []}, _simulated_cases()]
    for cases in worlds:
        losers = _losers(cases)
        came = answer({name: list(case) for name, case in cases.items()})
        if not isinstance(came, Mapping):
            return not_yet("a dict by policy", _shown(came))
        for policy, found in came.items():
            three = items(found)
            if three is None or len(three) != 3:
                return not_yet("(case, label, label of the winner)", f"{policy}: {_shown(found)}")
            case, label, winner = three
            if case not in cases:
                return not_yet("one of " + ", ".join(cases), f"{policy}: {_shown(case)}")
            points = {one[1]: one for one in cases[case]}
            if label not in points or winner not in points:
                hint = f"labels of the case {case}: {', '.join(points)}"
                return not_yet("two labels of one case", f"{policy}: {_shown(label)}, {_shown(winner)}", hint)
            mine, other = points[label], points[winner]
            if mine[0] != policy:
                return not_yet(
                    f"a point of {policy}", f"{policy}: {label}", "the loser is a point of the policy"
                )
            if other[0] == policy:
                hint = "a policy does not lose against its own other chunk"
                return not_yet("a winner of another policy", f"{policy}: {winner}", hint)
            if not _beats(other[1:], mine[1:]):
                hint = f"{label} has {_pair(mine)}, {winner} has {_pair(other)}"
                return not_yet("a winner that is nowhere worse, and somewhere better", _shown(found), hint)
        if left := losers - set(came):
            policy = min(left)
            return not_yet(
                f"an entry for {policy}", sorted(map(str, came)), f"in {', '.join(cases)} it is beaten"
            )
    return passed("every policy that loses somewhere is named, with its winner")


def _losers(cases: Mapping[str, Case]) -> set[str]:
    return {
        mine[0]
        for case in cases.values()
        for mine in case
        if any(other[0] != mine[0] and _beats(other[1:], mine[1:]) for other in case)
    }


@functools.cache
def _simulated_cases() -> dict[str, Case]:
    """A few policies on the simulated card, by their largest and their p99 gap."""
    labels = ("serial:128", "overlap:128", "ticks:512", "mixed:28", "mixed:64", "sliced:512@25%")
    runs = {label: trial(label) for label in labels}
    return {
        f"RTX 3050, {name}": [
            (label.split(":")[0], label, getattr(run, f"{name}_gap"), run.rate) for label, run in runs.items()
        ]
        for name in ("max", "p99")
    }


# --- 13.4

BOUND = 0.25
"""Seconds: the largest gap that exercises 13.4 and 13.5 allow."""


@exercise("13.4", title="Hold 250 ms", par=5.4, limit=5.6, unit="s to a document's first token")
def hold_sla(answer: Any) -> Verdict:
    """Gives a policy as ``labkit bench jitter`` names it; no gap above 250 ms on the simulated RTX 3050."""
    answer = answer(BOUND) if callable(answer) else answer
    if not isinstance(answer, str | PolicySpec):
        return not_yet('a policy such as "mixed:64"', _shown(answer), "NAME[:CHUNK][@TARGET], as text")
    try:
        spec = PolicySpec.parse(answer) if isinstance(answer, str) else answer
        found = trial(spec)
    except InputError as error:
        return not_yet("NAME[:CHUNK][@TARGET]", error.received, error.expected)
    if found.problem:
        return not_yet(
            "a run that counts", found.problem, "so few tokens at a time that the streams end first"
        )
    text = f"max {1e3 * found.max_gap:.0f} ms, p99 {1e3 * found.p99_gap:.0f} ms"
    if found.max_gap > BOUND + _DUST:
        hint = "look at what runs between two tokens: a smaller chunk, or another kind of policy"
        return not_yet("no gap above 250 ms", f"{spec.label}: {text}", hint, score=found.ttft)
    hint = "the bound holds; who reads the weights fewer times for the same tokens?"
    return passed(f"{spec.label}: {text}", score=round(found.ttft, 2), hint=hint)


# --- 13.5

STREAMS = (2, 8, 24)
"""Steady streams of the three runs."""

PAR = 10.26


@exercise("13.5", title="A policy of your own", par=PAR, limit=10.9, unit="s, three TTFTs together")
def next_work(answer: Any) -> Verdict:
    """``next_work(view, seconds, bound)``: the next Pick, or None; no gap above the bound, with any crowd."""
    forbid_calls(answer, ("Mixed", "Adaptive", "Dynamic", "Sliced", "make_policy", "trial", "rtx3050"))
    total = 0.0
    for streams in STREAMS:
        policy = _Own(answer, rtx3050().products, BOUND)
        try:
            found = trial(policy, streams=streams, document=512)
        except _Refused as error:
            return not_yet("a Pick, or None", error.got, f"{error.hint}; {streams} streams decode")
        except RuntimeError as error:
            if "stuck" not in str(error):
                raise
            hint = f"{streams} streams: with nothing in flight and something to do, pick what can run"
            return not_yet("a document that is computed", "the engine is stuck", hint)
        if found.problem:
            return not_yet(
                "a run that counts", found.problem, f"{streams} streams decode beside two documents"
            )
        if found.max_gap > BOUND + _DUST:
            hint = "decode rows count too: seconds(rows + tokens) must fit into the bound"
            return not_yet(f"no gap above {BOUND:g} s", f"{found.max_gap:.3f} s with {streams} streams", hint)
        total += found.ttft
    hint = "fill the bound: the most tokens whose forward still fits"
    return passed(f"no gap above {BOUND:g} s with {STREAMS} streams", score=round(total, 2), hint=hint)


class _Refused(Exception):
    """What a student's policy gave back is no pick."""

    def __init__(self, got: str, hint: str) -> None:
        self.got, self.hint = got, hint
        super().__init__(got)


_MOST_PICKS = 20_000


class _Own(Policy):
    """A student's function as a policy."""

    name = "own"

    def __init__(self, function: Callable[..., Any], seconds: Callable[[int], float], bound: float) -> None:
        self.function, self.seconds, self.bound = function, seconds, bound
        self.picks = 0

    def pick(self, view: View) -> Pick | None:
        """What the function says, if it is a pick that can be launched."""
        self.picks += 1
        if self.picks > _MOST_PICKS:
            raise _Refused(f"{_MOST_PICKS} picks, and no end", "a document must get tokens in every step")
        found = self.function(view, self.seconds, self.bound)
        if found is None:
            return None
        if not isinstance(found, Pick):
            raise _Refused(_shown(found), 'Pick("mixed", tokens), Pick("prefill", tokens), DECODE or None')
        if found.kind not in ("decode", "prefill", "mixed"):
            raise _Refused(_shown(found), "decode, prefill or mixed")
        whole = isinstance(found.tokens, int) and not isinstance(found.tokens, bool)
        if found.kind != "decode" and not (whole and found.tokens >= 1):
            raise _Refused(_shown(found), "at least one whole token, so that the document gets on")
        if view.in_flight:
            return None  # one work at a time
        return found


# --- words


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(1.0, abs(other))


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _size(size: Size) -> str:
    return f"({size[0]}, {_plain(size[1])})"


def _cloud(cloud: Sequence[Labelled]) -> str:
    return ", ".join(f"{label} ({gap:g}, {rate:g})" for label, gap, rate in cloud) or "no point"


def _pair(one: tuple[str, str, float, float]) -> str:
    return f"gap {_plain(one[2])}, rate {_plain(one[3])}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
