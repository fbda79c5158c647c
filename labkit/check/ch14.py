"""Exercises of chapter 14: events out of bytes, a client that leaves, coming again, refusals, keys."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

from labkit.check import Verdict, exercise, forbid_calls, not_yet, passed
from labkit.check.ch14_cases import (
    BODIES,
    CLIENTS,
    CONTEXT,
    FIELDS,
    KEY,
    MOST_ATTEMPTS,
    MOST_SECONDS,
    MOST_WAIT,
    PAR,
    PASS,
    REQUIRED,
    SLOTS,
    WORDS,
    Feed,
    Stampede,
    Visit,
    Watched,
    ends_of,
    event_stream,
)  # fmt: skip
from labkit.check.normalise import plain_int

# --- 14.1


@exercise("14.1", title="Stop when nobody reads", par=1, limit=2, unit="tokens computed for nobody")
def deliver(answer: Any) -> Verdict:
    """``deliver(steps, send, gone, abort)``: pass tokens on; stop and abort when the client has gone."""
    wasted = 0
    for name, visit in (
        ("a client that stays", Visit(12, queued=3)),
        ("a client that leaves after 5 tokens", Visit(200, leaves=5)),
        ("a client that leaves in the queue", Visit(200, queued=40, leaves=20)),
        ("a client that leaves unseen: only send fails", Visit(200, leaves=5, silent=True)),
        ("a client that leaves with the last token", Visit(8, leaves=8)),
        ("a token that send refuses with ValueError", Visit(200, fault=4)),
    ):
        raised = came = None
        try:
            came = answer(visit.steps(), visit.send, visit.gone, visit.abort)
        except ConnectionError:
            hint = "that a client leaves is no error of the server"
            return not_yet(f"no exception: {name}", "ConnectionResetError", hint)
        except ValueError as error:
            raised = error
        if visit.fault is not None:
            if raised is None:
                return not_yet(f"the ValueError passed on: {name}", "nothing was raised", "hide no faults")
            if visit.aborts != 1:
                hint = "whatever ends the loop, the engine must not go on: try … finally"
                return not_yet(f"abort called once: {name}", f"{visit.aborts} times", hint)
            continue
        if raised is not None:
            return not_yet(f"no exception: {name}", f"ValueError: {raised}")
        whole = visit.computed == visit.length
        if visit.leaves is None and (visit.sent, visit.aborts) != (visit.length, 0):
            got = f"{visit.sent} sent, abort called {visit.aborts} times"
            return not_yet(f"all {visit.length} sent and no abort: {name}", got, "None is no token")
        if not whole and visit.aborts != 1:
            hint = "until then the engine computes, and the blocks are held"
            return not_yet(f"abort called once: {name}", f"{visit.aborts} times", hint)
        if whole and visit.aborts > 1:
            return not_yet(f"abort called at most once: {name}", f"{visit.aborts} times")
        if plain_int(came) != visit.taken:
            return not_yet(
                f"{visit.taken} returned: {name}", _shown(came), "count what send took without an error"
            )
        wasted += visit.wasted
        if visit.took > (visit.leaves or 0) + 4 and visit.leaves is not None:
            hint = "ask gone() before each step, in the queue too"
            return not_yet(f"stopped after step {visit.leaves}: {name}", f"{visit.took} steps", hint)
    hint = "ask gone() before a step, not after it"
    return passed("a client that leaves ends its request, wherever it is", score=wasted, hint=hint)


# --- 14.2


@exercise("14.2", title="Events out of bytes", par=0, limit=0, unit="events given out late")
def sse_data(answer: Any) -> Verdict:
    """``sse_data(chunks)``: yield the data of each event as soon as its last byte is there."""
    late = 0
    for size, end in itertools.product((1000, 1, 2, 3, 7, 64), (b"\n", b"\r\n")):
        data = event_stream(end)
        ends = ends_of(data, end)
        case = f"chunks of {size} byte{'s' * (size > 1)}, lines that end in {end.decode()!r}"
        feed = Feed(data, size)
        came: list[Any] = []
        found = answer(iter(feed))
        if found is None:
            return not_yet("a generator", "None", "yield each event's data")
        for one in itertools.islice(found, 100):
            if len(came) < len(WORDS):
                late += feed.given - size >= ends[len(came)]  # not with the chunk that ended it
            came.append(one)
        for number, word in enumerate(WORDS):
            got = came[number] if number < len(came) else "nothing"
            if got != word:
                return not_yet(
                    f"event {number + 1}: {word!r}", _shown(got), f"{_sse_hint(word, got)}; {case}"
                )
        if len(came) > len(WORDS):
            hint = "an event without its empty line was cut off: nobody knows what is missing"
            return not_yet(f"{len(WORDS)} events", f"one more: {_shown(came[len(WORDS)])}", hint)
    hint = "yield an event when its empty line is complete, not at the end of the stream"
    return passed(f"{len(WORDS)} events out of any chunks", score=late, hint=hint)


def _sse_hint(word: str, got: Any) -> str:
    if isinstance(got, bytes):
        return "text, not bytes"
    if not isinstance(got, str):
        return "yield one text for each event"
    if got.endswith("\r"):
        return "a line may end in \\r\\n"
    if "\ufffd" in got:
        return "a character may be cut in two: decode whole lines, or incrementally"
    if word == "two\nlines":
        return "data lines of one event are joined by a newline"
    if "\u2028" in word:
        return "only \\n ends a line here, with or without \\r; str.splitlines splits at more"
    if word == " spaced ":
        return "one space behind the colon is not part of the data, others are"
    return "an event ends with an empty line; lines of other names and comments (': …') say nothing here"


# --- 14.3


@exercise("14.3", title="Refuse by name", none_ok=True)
def refuse_body(answer: Any) -> Verdict:
    """``refuse_body(body, fields, required, context)``: None, or words that name what is wrong."""
    for body, words, hint in BODIES:
        copy = json.loads(json.dumps(body))
        came = answer(copy, dict(FIELDS), REQUIRED, CONTEXT)
        case = f"asked: {_short(body)}"
        if not words:
            if came is not None:
                return not_yet("None", _shown(came), f"{hint}; {case}")
            continue
        if not isinstance(came, str):
            return not_yet(f"words with {' and '.join(map(repr, words))}", _shown(came), f"{hint}; {case}")
        if any(word not in came for word in words):
            return not_yet(f"words with {' and '.join(map(repr, words))}", _shown(came), f"{hint}; {case}")
    return passed(f"{len(BODIES)} requests; nothing was ignored")


# --- 14.4


@exercise("14.4", title="Compare keys safely")
def same_key(answer: Any) -> Verdict:
    """``same_key(given, expected)``: whether two keys (bytes; None: none was sent) are the same."""
    forbid_calls(answer, ("Gate", "_check_key"))
    for given, wanted in (
        (KEY, True),
        (b"", False),
        (None, False),
        (KEY[:-1], False),
        (KEY + b"0", False),
        (KEY.upper(), False),
        ("schlüssel".encode(), False),
        (KEY[:-1] + b"\xff", False),
    ):
        came = answer(given, KEY)
        if came is not wanted:
            hint = "a guess of another length is wrong too" if given and wanted is False else ""
            return not_yet(f"{wanted} for {given!r}", _shown(came), hint)
    reads = {}
    for equal in (0, 7, len(KEY) - 1):
        guess = Watched(KEY[:equal] + b"#" * (len(KEY) - equal))
        expected = Watched(KEY)
        answer(guess, expected)
        if guess.equals or expected.equals:
            hint = "== stops at the first byte that differs, so its time tells how many were right"
            return not_yet("a comparison that always looks at all bytes", "== or the like", hint)
        reads[equal] = plain_int(guess.reads + expected.reads)
    if len(set(reads.values())) > 1:
        shown = ", ".join(f"{read} for {equal} right" for equal, read in reads.items())
        hint = "one guess more a byte, and the key is known: look at all bytes, or use the standard library's"
        return not_yet("as many bytes read, however many are right", shown, hint)
    return passed("however many bytes are right, the work is the same")


# --- 14.5


@exercise("14.5", title="Come again, but not at once", par=PAR, limit=PASS, unit="requests for 40 answers")
def retry_wait(answer: Any) -> Verdict:
    """``retry_wait(attempt, retry_after, draw)``: seconds until the next attempt, or None to give up."""
    for attempt, after in itertools.product(range(1, 30), (None, 1.0, 5.0, 90.0)):
        waits = [answer(attempt, after, lambda u=u: u) for u in (0.0, 0.5, 0.999)]  # type: ignore[misc]
        case = f"attempt {attempt}, Retry-After {'missing' if after is None else f'{after:g}'}"
        for wait in waits:
            bad = _bad_wait(wait, attempt, after)
            if bad is not None:
                return not_yet(f"{bad[0]}: {case}", _shown(wait), bad[1])
        if attempt == 1 and after != 90.0 and waits[2] - waits[0] < 0.25:
            hint = "add draw() times something: who was sent away together must not come back together"
            return not_yet(f"waits that differ with draw(): {case}", f"{waits[0]} and {waits[2]}", hint)
    early, later = (answer(attempt, None, lambda: 0.5) for attempt in (1, 4))
    if not later > 1.5 * early:
        hint = "a server that sent you away several times needs more time"
        return not_yet("a longer wait after attempt 4 than after 1", f"{later} and {early}", hint)
    found = Stampede(answer)
    if found.served < CLIENTS:
        hint = f"{SLOTS} answers a second are ready: all can be served in {CLIENTS // SLOTS} s"
        return not_yet(f"{CLIENTS} clients served", f"{found.gave_up} gave up", hint)
    if found.end > MOST_SECONDS:
        hint = "slots are free, and nobody comes: grow less fast"
        return not_yet(f"all served within {MOST_SECONDS:g} s", f"{found.end:.0f} s", hint)
    hint = "spread more widely: let what draw() is multiplied by grow with the attempts"
    return passed(f"all served within {found.end:.0f} s", score=found.sent, hint=hint)


def _bad_wait(wait: Any, attempt: int, after: float | None) -> tuple[str, str] | None:
    """What was expected and a hint; None where all is well."""
    if wait is None:
        if attempt <= 3 and after != 90.0:
            return "a wait", "come again at least three times"
        return None
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not math.isfinite(wait) or wait <= 0:
        return "seconds above 0, or None", "never come again at once"
    if attempt >= MOST_ATTEMPTS:
        return "None", f"give up after {MOST_ATTEMPTS} attempts"
    if after is not None and wait < after:
        return f"at least {after:g} s", "the server knows its queue: never come earlier than Retry-After"
    if wait > MOST_WAIT:
        return (
            f"at most {MOST_WAIT:g} s, or None",
            "who would have to wait longer tells its user, and gives up",
        )
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 90 else text[:87] + "..."


def _short(body: Any) -> str:
    if isinstance(body, dict) and isinstance(body.get("prompt"), list) and len(body["prompt"]) > 4:
        body = {**body, "prompt": _Many(body["prompt"])}
    return repr(body)


class _Many:
    """A long list, in a few words."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.count = len(list(values))

    def __repr__(self) -> str:
        return f"[… {self.count} ids]"
