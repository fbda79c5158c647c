"""Exercises of chapter 11: latencies from a log, sharing a chunk, admission, one failure in a batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from labkit.check import Verdict, exercise, forbid_calls, not_yet, passed
from labkit.check.normalise import items, pair, plain_int

Event = tuple[float, str, str]
"""(seconds, request, what): "arrive", "start", "token" or "end"."""

# --- 11.1

LOG: tuple[Event, ...] = (
    (0.0, "a", "arrive"),
    (0.5, "b", "arrive"),
    (0.5, "a", "start"),
    (1.0, "a", "token"),
    (1.0, "b", "start"),
    (1.25, "a", "token"),
    (1.25, "b", "token"),
    (1.25, "b", "end"),
    (1.5, "c", "arrive"),
    (2.0, "a", "token"),
    (2.0, "a", "end"),
    (2.0, "c", "start"),
    (2.5, "c", "end"),
    (3.0, "d", "arrive"),
    (3.5, "e", "arrive"),
    (3.5, "d", "start"),
    (3.5, "e", "start"),
    (4.0, "d", "token"),
    (4.0, "e", "token"),
    (4.125, "e", "token"),
    (4.25, "e", "token"),
    (4.25, "d", "token"),
    (4.25, "d", "end"),
    (4.25, "e", "end"),
)
"""Exact in binary. Request b has one token, c was aborted before its first."""

TTFTS = {"a": 1.0, "b": 0.75, "d": 1.0, "e": 0.5}
TPOTS = {"a": 0.5, "d": 0.25, "e": 0.125}
GAPS = (0.125, 0.125, 0.25, 0.25, 0.75)


@exercise("11.1", title="Latencies from a log")
def latencies(answer: Any) -> Verdict:
    """``latencies(events)``: TTFT and TPOT by request, and every gap of all requests in one list."""
    forbid_calls(answer, ("ttft", "tpot", "gaps", "Latency"))
    came = items(answer(list(LOG)))
    if came is None or len(came) != 3 or not (isinstance(came[0], dict) and isinstance(came[1], dict)):
        return not_yet("(dict of TTFT, dict of TPOT, list of gaps)", _shown(came))
    ttfts, tpots = came[0], came[1]
    for name, wanted, got in (("TTFT", TTFTS, ttfts), ("TPOT", TPOTS, tpots)):
        for request in sorted({*wanted, *map(str, got)}):
            want, has = wanted.get(request), _number(got.get(request))
            if want != has:
                events = ", ".join(f"{what} {at:g}" for at, who, what in LOG if who == request)
                expected = "no value" if want is None else f"{want:g}"
                hint = f"{_hint(name, request, want, has)}; its events: {events}"
                return not_yet(f"{name} of {request}: {expected}", _shown(got.get(request, "none")), hint)
    numbers = [_number(one) for one in items(came[2]) or ()]
    gaps = sorted(one for one in numbers if one is not None)
    if len(gaps) != len(numbers) or tuple(gaps) != GAPS:
        hint = "from each token to the next of the same request; the wait for the first token is none of them"
        return not_yet(f"gaps {list(GAPS)}, in any order", _shown(gaps), hint)
    return passed(f"{len(TTFTS)} first tokens, {len(GAPS)} gaps; nothing made up for b and c")


def _hint(name: str, request: str, want: float | None, has: float | None) -> str:
    if name == "TTFT":
        if want is None:
            return "it never had a token"
        return "the clock runs from the arrival, the queue counts" if has is not None else "it had a token"
    if want is None:
        return "TPOT needs two tokens"
    return "(last token − first) / (tokens − 1): the first belongs to TTFT"


# --- 11.2

CHUNK, LONG = 16, 160


@exercise("11.2", title="Share a chunk", par=1, limit=4, unit="chunks, the longest wait of a short prompt")
def share_chunk(answer: Any) -> Verdict:
    """``share_chunk(budget, wanted)``: tokens of the chunk for each prompt, the oldest first."""
    forbid_calls(answer, ("share", "_chunk_rows"))
    for budget, wanted in (
        (16, [160]),
        (16, [5]),
        (16, [3, 4]),
        (16, [100, 2, 40]),
        (1, [9, 9]),
        (7, [0, 9]),
    ):
        given, verdict = _given(answer, budget, wanted)
        if given is None:
            return verdict
    flood, _, verdict = _world(answer, 9, 9)
    if verdict is not None:
        return verdict
    if flood > (bound := 2 * LONG // CHUNK):
        hint = "short prompts keep coming: the oldest needs a share of every chunk that nobody takes away"
        return not_yet(f"the oldest prompt, of {LONG} tokens, done within {bound} chunks", flood, hint)
    _, longest, verdict = _world(answer, 7)
    if verdict is not None:
        return verdict
    hint = "a long prompt that takes whole chunks makes everybody else wait: half will do"
    return passed("the long prompt is bounded, and so are the short ones", score=longest, hint=hint)


def _world(answer: Callable[..., Any], *short: int) -> tuple[int, int, Any]:
    """A long prompt, and short ones that come with each of 40 chunks.

    Returns: chunks until the long one is done, the longest of a short one, a verdict where it went wrong.
    """
    prompts = [(LONG, 0)]  # tokens left, and the chunk before which it came
    done = longest = 0
    for chunk in range(1, 200):
        prompts += [(need, chunk) for need in short if chunk <= 40]
        given, verdict = _given(answer, CHUNK, [need for need, _ in prompts])
        if given is None:
            return done, longest, verdict
        prompts = [(need - got, born) for (need, born), got in zip(prompts, given, strict=True)]
        longest = max([longest, *(chunk - born + 1 for need, born in prompts if not need and born)])
        done = done or (chunk if (0, 0) in prompts else 0)
        prompts = [one for one in prompts if one[0]]
        if not prompts:
            break
    return done, longest, None


def _given(answer: Callable[..., Any], budget: int, wanted: list[int]) -> tuple[list[int] | None, Any]:
    came = items(answer(budget, list(wanted)))
    case = f"budget {budget}, wanted {_short(wanted)}"
    given = [] if came is None else [plain_int(one) for one in came]
    whole = len(given) == len(wanted) and all(isinstance(one, int) and one >= 0 for one in given)
    if not whole:
        return None, not_yet(f"{len(wanted)} whole numbers for {case}", _shown(came))
    if any(got > want for got, want in zip(given, wanted, strict=True)):
        return None, not_yet(f"nobody gets more than wanted: {case}", _short(given))
    if sum(given) != min(budget, sum(wanted)):
        hint = "what one prompt leaves over goes to another"
        return None, not_yet(
            f"{min(budget, sum(wanted))} tokens in all, for {case}", f"{sum(given)}: {_short(given)}", hint
        )
    return given, None


# --- 11.3

SLOTS = 600


def crowd(seed: int = 11, count: int = 60) -> list[tuple[int, int]]:
    """(prompt, answer) lengths; all fit alone."""
    dice = random.Random(seed)
    return [(dice.randint(8, 90), dice.randint(8, 160)) for _ in range(count)]


PAR = 958
"""Steps of the reference."""


@exercise("11.3", title="Admit by the future peak", par=PAR, limit=1000, unit="steps")
def admit(answer: Any) -> Verdict:
    """``admit(waiting, running, slots)``: how many from the front of the queue to start now."""
    forbid_calls(answer, ("future_peak", "peak_fits", "Claim", "Pool"))
    for waiting, running, slots, wanted, why in (
        ([(10, 10)], [], 20, 1, "20 slots at its end"),
        ([(10, 10)], [], 19, 0, "it ends with 20 tokens"),
        ([(10, 10)], [(9, 1)], 20, 1, "the running one has left, with 10, before the other needs 20"),
        ([(10, 10)], [(9, 11)], 38, 0, "after ten steps they hold 20 and 19, and one grows on"),
        ([(4, 2), (4, 2), (4, 2)], [], 13, 2, "two of them end with 6 each"),
        ([(50, 50), (1, 1)], [], 40, 0, "nobody overtakes: the first would wait for ever"),
    ):
        got = plain_int(answer(list(waiting), list(running), slots))
        case = f"waiting {waiting}, running {running}, {slots} slots"
        if not isinstance(got, int) or isinstance(got, bool):
            return not_yet("a whole number", _shown(got), f"asked: {case}")
        if not 0 <= got <= len(waiting):
            return not_yet(f"0 to {len(waiting)}", got, f"asked: {case}")
        if got > wanted:
            return not_yet(f"{wanted} started: {case}", got, why)
    return _steps(answer)


def _steps(answer: Callable[..., Any]) -> Verdict:
    """Run the crowd: every running request takes a slot a step, and leaves after its last."""
    waiting, steps = crowd(), 0
    running: list[tuple[int, int]] = []
    while waiting or running:
        count = plain_int(answer(list(waiting), list(running), SLOTS))
        if not isinstance(count, int) or not 0 <= count <= len(waiting):
            return not_yet(f"0 to {len(waiting)}", _shown(count), f"after {steps} steps of a crowd")
        running += waiting[:count]
        waiting = waiting[count:]
        if not running:
            return not_yet("a request started", "nobody runs, and nobody is started", "alone it fits")
        running = [(held + 1, left - 1) for held, left in running]
        steps += 1
        if (held := sum(held for held, _ in running)) > SLOTS:
            hint = "they fitted when they started, and grew: look at every future moment at which one leaves"
            return not_yet(f"at most {SLOTS} slots held", f"{held} at step {steps}", hint)
        running = [one for one in running if one[1]]
    hint = "not all reach their final length at the same time: who has left gives slots back"
    return passed(f"{len(crowd())} requests, none was ever taken back", score=steps, hint=hint)


# --- 11.4


class Forward:
    """A batch's forward that raises when a row of it is bad, and does not say which."""

    def __init__(self, bad: dict[str, Exception]) -> None:
        self.bad, self.calls = bad, 0

    def __call__(self, rows: Any) -> list[int]:
        """A token for each row."""
        self.calls += 1
        rows = list(rows)
        for row in rows:
            if row in self.bad:
                raise type(self.bad[row])(*self.bad[row].args)
        return [self.token(row) for row in rows]

    @staticmethod
    def token(row: str) -> int:
        """What a row gets in any company."""
        return sum(map(ord, row)) * 7919 % 32_000


@exercise("11.4", title="One fails, seven go on", par=7, limit=9, unit="forwards")
def end_alone(answer: Any) -> Verdict:
    """``end_alone(rows, forward)``: (tokens by row, error text by row)."""
    rows = list("abcdefgh")
    memory: Exception = MemoryError("out of blocks")
    value: Exception = ValueError("token id out of range")
    score = None
    cases: tuple[dict[str, Exception], ...] = ({"f": memory}, {}, {"a": value}, {"c": memory, "h": value})
    for bad in (*cases, dict.fromkeys(rows, memory)):
        forward = Forward(bad)
        came = pair(answer(list(rows), forward))
        case = f"rows {''.join(rows)}, of which {''.join(bad) or 'none'} fail{'s' if len(bad) == 1 else ''}"
        if came is None or not all(isinstance(one, dict) for one in came):
            return not_yet("(dict of tokens, dict of errors)", _shown(came), f"asked: {case}")
        tokens, errors = came
        if set(errors) != set(bad):
            hint = "a row fails alone when it fails without the others"
            return not_yet(f"errors of {sorted(bad)}: {case}", sorted(map(str, errors)), hint)
        wanted = {row: Forward.token(row) for row in rows if row not in bad}
        if tokens != wanted:
            hint = "rows that are in order get the tokens that they would get in any company"
            return not_yet(f"tokens {wanted}", _shown(tokens), hint)
        for row, error in bad.items():
            if str(error) not in str(errors[row]):
                return not_yet(f"the text {str(error)!r} for {row}", _shown(errors[row]), "say why it ended")
        if not bad and forward.calls > 1:
            return not_yet("one forward where nothing fails", forward.calls, "that is what batching is for")
        score = forward.calls if score is None else score
    hint = "halve what failed, and try both halves"
    return passed(
        "who is to blame ends, with a reason; the others' tokens are theirs", score=score, hint=hint
    )


def _number(value: Any) -> float | None:
    try:
        return round(float(value), 9)
    except (TypeError, ValueError):
        return None


def _short(numbers: Sequence[Any]) -> str:
    text = ", ".join(map(str, numbers[:12]))
    return f"[{text}, …]" if len(numbers) > 12 else f"[{text}]"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
