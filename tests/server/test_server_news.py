"""How the news of a call come, on a clock that the test turns; and what events they become."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from labkit.engine.sampling import Sampled, SamplingParams
from labkit.server import stream
from labkit.server.call import Ask, Call, Piece
from labkit.server.chat import ChatShape
from labkit.server.chunks import Chunks
from labkit.server.completions import CompletionShape
from labkit.server.logprobs import TokenTexts
from labkit.server.shape import Shape
from labkit.server.spread import Spread

WAIT = 10
ACTIONS = st.lists(st.one_of(st.just("put"), st.integers(1, 12)), max_size=30)


class Clock:
    """A loop's seconds, which pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def on_a_clock(test: Coroutine[Any, Any, None], clock: Clock) -> None:
    loop = asyncio.new_event_loop()
    loop.time = clock  # type: ignore[method-assign]
    try:
        loop.run_until_complete(test)
    finally:
        loop.close()


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def new_call() -> Call:
    return Call([Ask((1,), SamplingParams())], 0.0)


@given(ACTIONS)
def test_news_come_once_and_in_order_and_who_waits_too_long_is_told(actions: list[str | int]) -> None:
    clock, told, sent, alarms, silent = Clock(), [], 0, 0, 0

    async def listen(call: Call) -> None:
        nonlocal alarms
        while True:
            try:
                news = await call.news(WAIT)
            except TimeoutError:
                alarms += 1
                continue
            if news is None:
                return
            assert news
            told.extend(piece.text for piece in news)

    async def check() -> None:
        nonlocal sent, silent
        call, waited = new_call(), 0
        listener = asyncio.ensure_future(listen(call))
        await settle()
        for action in actions:
            if action == "put":
                call.put(Piece(0, str(sent)))
                sent, waited = sent + 1, 0
            else:
                clock.now += int(action)
                waited += int(action)
                if waited >= WAIT:
                    silent, waited = silent + 1, 0
            await settle()
            assert (told, alarms) == ([str(number) for number in range(sent)], silent)
        call.leave()
        await listener
        call.close()
        call.close()

    on_a_clock(check(), clock)


def test_all_that_is_there_comes_at_once() -> None:
    async def check() -> None:
        call = new_call()
        pieces = [Piece(0, str(number)) for number in range(5)]
        for piece in pieces:
            call.put(piece)
        assert await call.news() == pieces
        waiting = asyncio.ensure_future(call.news())
        await settle()
        assert not waiting.done()
        call.put(pieces[0])
        call.put(pieces[1])
        assert await waiting == pieces[:2]

    asyncio.run(check())


def test_a_shorter_wait_is_not_held_up_by_a_longer_one_nor_ended_by_it() -> None:
    clock = Clock()

    async def check() -> None:
        call = new_call()
        for timeout, passed, ends in (
            (50, 1, False),
            (5, 6, True),
            (50, 6, False),
            (float("inf"), 99, False),
        ):
            waiting = asyncio.ensure_future(call.news(timeout))
            await settle()
            clock.now += passed
            await settle()
            assert waiting.done() == ends
            if ends:
                with pytest.raises(TimeoutError):
                    await waiting
            else:
                call.put(Piece(0, "on"))
                assert await waiting == [Piece(0, "on")]
        call.close()

    on_a_clock(check(), clock)


def test_who_has_left_hears_nothing_and_who_stops_waiting_loses_nothing() -> None:
    async def check() -> None:
        call = new_call()
        waiting = asyncio.ensure_future(call.news(WAIT))
        await settle()
        call.put(Piece(0, "kept"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await call.news(WAIT) == [Piece(0, "kept")]
        waiting = asyncio.ensure_future(call.news(WAIT))
        await settle()
        call.put(Piece(0, "too late", reason="length"))
        call.leave()
        assert await waiting is None and await call.news() is None and call.left == 0
        call.close()

    asyncio.run(check())


# --- events ------------------------------------------------------------------------------------------------


class Ids:
    """A tokenizer whose tokens show as themselves."""

    def token_bytes(self, token: int) -> bytes:
        return b"<%d>" % token


def shapes() -> list[Shape]:
    texts = TokenTexts(Ids())
    return [
        shape
        for reported in (False, True)
        for shape in (
            CompletionShape(texts, ["", "echo"], reported=reported),
            ChatShape(texts, reported=reported),
        )
    ]


TEXTS = st.one_of(st.text(), st.sampled_from(['"', "\0text", "\\u0000", "\n\ndata: {}", "é𝄞", "\u2028"]))
SAMPLED = Sampled(7, -0.5, ((7, -0.5), (8, -1.5)))
REASONS = st.sampled_from([None, None, "stop", "length"])


def piece_of(choice: int, text: str, reported: int, reason: str | None) -> Piece:
    return Piece(choice, text, 1, (SAMPLED,) * reported, (3,) * reported, reason)


# Not st.builds: it would make up every field of a NamedTuple that is not given.
PIECES = st.tuples(st.integers(0, 1), TEXTS, st.integers(0, 2), REASONS).map(lambda parts: piece_of(*parts))


@given(st.lists(PIECES, max_size=8), st.sampled_from(['m"odel', "\0text", "plain"]), st.booleans())
def test_events_say_what_the_shape_says(pieces: list[Piece], model: str, usage: bool) -> None:
    head = {"id": "x", "model": model}
    more: dict[str, Any] = {"usage": None} if usage else {}
    for shape in shapes():
        chunks = Chunks(shape, head, after=b',"usage":null}' if usage else b"}")
        entries = []
        for piece in pieces:
            if piece.text or piece.logprobs:
                entries.append(shape.delta(piece.choice, piece))
            if piece.reason is not None:
                entries.append(shape.closing(piece.choice, piece.reason))
        expected = [stream.event({**head, "choices": [entry], **more}) for entry in entries]
        written = b"".join(map(chunks.of, pieces))
        assert written == b"".join(expected)
        events = written.split(b"\n\n")
        assert events.pop() == b""
        assert [json.loads(one.removeprefix(b"data: "))["choices"][0] for one in events] == entries


def test_openings_are_those_of_the_shape() -> None:
    for shape in shapes():
        chunks = Chunks(shape, {"id": "x"}, after=b"}")
        for choice in range(2):
            entry = shape.opening(choice)
            expected = b"" if entry is None else stream.event({"id": "x", "choices": [entry]})
            assert chunks.opening(choice) == expected


# --- figures -----------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from([0.0005, 1.0, 5.0]))))
def test_a_spread_shows_what_a_histogram_shows(values: list[float]) -> None:
    bounds = (0.0005, 0.001, 1, 2.5, 5)
    registry, other = CollectorRegistry(), CollectorRegistry()
    spread = Spread("labkit_some_seconds", "Of some.", bounds)
    registry.register(spread)
    histogram = Histogram("labkit_some_seconds", "Of some.", buckets=bounds, registry=other)
    for value in values:
        spread.observe(value)
        histogram.observe(value)
    shown, expected = (re.sub(rb"_created .*", b"", generate_latest(one)) for one in (registry, other))
    assert shown == expected
