"""Checks of chapter 14: own answers pass, usual mistakes get their hint."""

from __future__ import annotations

import codecs
import hmac
import json
import math
from typing import Any

import pytest
from check_answers import refused
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from labkit import check
from labkit.check import ch14_cases as cases
from labkit.server.schemas import CompletionRequest
from labkit.server.stream import DONE, PING, event
from labkit.solutions import ch14 as reference

# --- 14.1


def handler(
    *, ask: bool = True, catch: Any = ConnectionError, last: Any = "when not done", empty: bool = False
):
    """Pass tokens on, with a mistake."""

    def answer(steps: Any, send: Any, gone: Any, abort: Any) -> int:
        sent, done = 0, False
        try:
            for token in steps:
                if token is not None or empty:
                    send(token)
                    sent += 1
                if ask and gone():
                    break
            else:
                done = True
        except catch:
            if last == "when caught":
                abort()
        finally:
            if last == "always" or (last == "when not done" and not done):
                abort()
        return sent

    return answer


def test_asking_after_each_token_passes_too() -> None:
    verdict = check.find("deliver")(handler())
    assert verdict.state == "passed" and verdict.score <= 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (handler(ask=False), "in the queue"),
        (handler(catch=()), "no error of the server"),
        (handler(catch=Exception), "hide no faults"),
        (handler(last="always"), "no abort"),
        (handler(last="when caught"), "abort called once"),
        (handler(last="never"), "abort called once"),
        (handler(empty=True), "send got None"),
        (lambda steps, send, gone, abort: sum(send(token) or 1 for token in steps if token is not None), ""),
        (lambda steps, send, gone, abort: 0, "all 12 sent"),
        (lambda *world: handler()(*world) + 1, "12 returned"),
        (lambda *world: [handler()(*world), None][1], "your function returned None"),
    ],
)
def test_deliver_near_misses(answer: Any, words: str) -> None:
    refused("deliver", answer, words)


# --- 14.2


@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), max_size=6), st.data()
)
def test_the_reference_reads_what_the_server_writes(events: list[dict[str, str]], data: Any) -> None:
    """However it is cut."""
    raw = PING.join([b"", *map(event, events)]) + DONE
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    chunks = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)])]
    *found, last = reference.sse_data(chunks)
    assert [json.loads(one) for one in found] == events and last == "[DONE]"


def incremental(chunks: Any) -> Any:
    """A decoder instead of whole lines: right too."""
    decoder, rest, data = codecs.getincrementaldecoder("utf-8")(), "", []
    for chunk in chunks:
        *lines, rest = (rest + decoder.decode(chunk)).split("\n")
        for line in lines:
            line = line.removesuffix("\r")
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data = []


def at_the_end(chunks: Any) -> Any:
    yield from incremental([b"".join(chunks)])


def by_chunk(chunks: Any) -> Any:
    for chunk in chunks:
        for line in chunk.decode("utf-8", "replace").split("\n"):
            if line.startswith("data: "):
                yield line[6:]


def splitlines(chunks: Any) -> Any:
    yield from (
        part[6:]
        for part in b"".join(chunks).decode().splitlines()
        if part.startswith("data: ") and part != "data: cut off"
    )


def whole(*, strip: bool = False, join: str = "\n", keep: bool = False, cr: bool = True) -> Any:
    def answer(chunks: Any) -> Any:
        data: list[str] = []
        text = b"".join(chunks).decode()
        for line in (text.replace("\r\n", "\n") if cr else text).split("\n"):
            if line.startswith("data:"):
                data.append(line[5:].strip() if strip else line[5:].removeprefix(" "))
            elif not line.strip("\r") and data:
                yield join.join(data)
                data = []
        if keep and data:
            yield join.join(data)

    return answer


def test_an_incremental_decoder_passes() -> None:
    assert check.find("sse_data")(incremental).state == "passed"


def test_events_at_the_end_are_late() -> None:
    verdict = check.find("sse_data")(at_the_end)
    assert verdict.state == "not yet" and verdict.score > 0 and "end of the stream" in verdict.hint


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_chunk, ""),
        (splitlines, "joined by a newline"),
        (whole(strip=True), "one space"),
        (whole(join=""), "joined by a newline"),
        (whole(keep=True), "cut off"),
        (whole(cr=False), "\\r\\n"),
        (lambda chunks: [b"x"], "not bytes"),
        (lambda chunks: [], "nothing"),
    ],
)
def test_sse_data_near_misses(answer: Any, words: str) -> None:
    refused("sse_data", answer, words)


# --- 14.3


def test_the_server_agrees_about_every_body() -> None:
    """But for the context, which its schema does not know, and the types of ids."""
    for body, words, _ in cases.BODIES:
        if "512" in words:
            continue
        try:
            CompletionRequest.model_validate(body)
            named = None
        except ValidationError as error:
            named = str(error)
        assert (named is None) == (not words), (body, named)


def by_rules(**skip: bool) -> Any:
    """The reference's rules in other words, some left out."""

    def answer(body: Any, fields: Any, required: Any, context: int) -> str | None:
        if not isinstance(body, dict):
            return "body is no object"
        strange = [name for name in body if name not in fields]
        if strange and not skip.get("unknown"):
            return f"what is {strange[0]}?"
        for name in required:
            if body.get(name) is None:
                return f"{name} is missing"
        for name, kind in fields.items():
            value = body.get(name)
            if value is None:
                continue
            if isinstance(value, bool) and kind is not bool and not skip.get("bools"):
                return f"{name} is no bool"
            if kind is float and isinstance(value, int):
                continue
            if not isinstance(value, kind):
                return f"{name} is wrong"
            if kind is float and not math.isfinite(value) and not skip.get("nan"):
                return f"{name} is not finite"
        most = body.get("max_tokens") or 1
        if most < 1 and not skip.get("negative"):
            return "max_tokens is too small"
        total = len(body["prompt"]) + (0 if skip.get("answer") else most)
        return f"{total} tokens, {context} at most" if total > context and not skip.get("context") else None

    return answer


def test_other_words_pass() -> None:
    assert check.find("refuse_body")(by_rules()).state == "passed"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_rules(unknown=True), "max_tokns"),
        (by_rules(bools=True), "bool"),
        (by_rules(nan=True), "NaN"),
        (by_rules(negative=True), "max_tokens"),
        (by_rules(answer=True), "608"),
        (by_rules(context=True), "512"),
        (lambda body, fields, required, context: "no", "None"),
        (lambda body, fields, required, context: None if body else "no", "max_tokns"),
        (lambda body, fields, required, context: True, "None"),
    ],
)
def test_refuse_body_near_misses(answer: Any, words: str) -> None:
    refused("refuse_body", answer, words)


# --- 14.4


def all_bytes(given: Any, expected: bytes) -> bool:
    if given is None or len(given) != len(expected):
        return False
    differ = 0
    for a, b in zip(given, expected):
        differ |= a ^ b
    return differ == 0


def own_digest(given: Any, expected: bytes) -> bool:
    return given is not None and hmac.compare_digest(given, expected)


def loop(given: Any, expected: bytes) -> bool:
    if given is None or len(given) != len(expected):
        return False
    return all(a == b for a, b in zip(given, expected))


def indexed(given: Any, expected: bytes) -> bool:
    if given is None or len(given) != len(expected):
        return False
    return all(given[at] == expected[at] for at in range(len(expected)))


@pytest.mark.parametrize("answer", [all_bytes, own_digest])
def test_own_comparisons_pass(answer: Any) -> None:
    assert check.find("same_key")(answer).state == "passed"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda given, expected: given == expected, "stops at the first byte"),
        (lambda given, expected: given is not None and expected.startswith(given), "False"),
        (lambda given, expected: given in (expected,), "stops at the first byte"),
        (lambda given, expected: given is not None and hash(given) == hash(expected), "stops"),
        (lambda given, expected: bool(given) and bytes(given) == bytes(expected), "stops"),
        (loop, "however many are right"),
        (indexed, "however many are right"),
        (
            lambda given, expected: bool(given) and all(a == b for a, b in zip(given, expected)),
            "another length",
        ),
        (lambda given, expected: 1, "True"),
        (lambda given, expected: True, "False"),
    ],
)
def test_same_key_near_misses(answer: Any, words: str) -> None:
    refused("same_key", answer, words)


def test_a_text_comparison_fails_on_other_alphabets() -> None:
    def answer(given, expected):
        return hmac.compare_digest((given or b"").decode(), expected.decode())

    assert check.find("same_key")(answer).state == "not yet"


# --- 14.5


def waits(
    base: float = 1.0, *, spread: Any = lambda n: 2.0 * 2**n, most: int = 10, bound: float = 60.0
) -> Any:
    def answer(attempt: int, retry_after: float | None, draw: Any) -> float | None:
        least = base if retry_after is None else retry_after
        if attempt >= most or least > bound:
            return None
        return min(least + draw() * spread(attempt), bound)

    return answer


def test_a_crowd_loses_nobody() -> None:
    found = cases.Stampede(reference.retry_wait)
    assert found.served + found.gave_up == cases.CLIENTS
    assert found.sent == found.served + len(found.refused)
    assert found.end >= cases.CLIENTS / cases.SLOTS * cases.SERVICE
    closed = cases.Stampede(reference.retry_wait, slots=0)
    assert closed.served == 0 and closed.gave_up == cases.CLIENTS
    assert closed.sent == 10 * cases.CLIENTS


def test_a_narrow_spread_is_too_many_requests() -> None:
    verdict = check.find("retry_wait")(waits(spread=lambda n: 0.5 * n))
    assert verdict.state == "not yet" and verdict.score > cases.PASS and "spread more widely" in verdict.hint


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda attempt, retry_after, draw: (0.05 + draw()) * attempt, "never come earlier"),
        (lambda attempt, retry_after, draw: 0, "never come again at once"),
        (waits(most=2), "at least three times"),
        (lambda attempt, retry_after, draw: (retry_after or 1.0) + draw(), "None"),
        (waits(bound=1e9), "gives up"),
        (waits(most=99), "give up after 10"),
        (waits(spread=lambda n: 0.0), "draw()"),
        (waits(spread=lambda n: 4.0), "longer wait"),
        (waits(spread=lambda n: 30.0 + 10 * n), "grow less fast"),
        (lambda attempt, retry_after, draw: "1", "seconds"),
        (lambda attempt, retry_after, draw: math.nan, "seconds"),
    ],
)
def test_retry_wait_near_misses(answer: Any, words: str) -> None:
    refused("retry_wait", answer, words)
