"""How long a client that is sent away is asked to wait, on a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_cases import NAME, ThreadServer

from labkit.server.door import Door
from labkit.server.errors import ApiError


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def told(door: Door, count: int = 1) -> int:
    """What a 429 says."""
    with pytest.raises(ApiError) as caught:
        door.enter(count)
    assert caught.value.status == 429 and caught.value.retry_after is not None
    return caught.value.retry_after


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def door(clock: Clock) -> Door:
    """Full: four run, two wait."""
    made = Door(4, 2, clock)
    made.enter(6)
    return made


def end(door: Door, clock: Clock, after: float, times: int = 1) -> None:
    """Answers end one after another, and others take their places."""
    for _ in range(times):
        clock.now += after
        door.leave(ended=True)
        door.enter(1)


def test_before_any_answer_has_ended_nothing_is_known(door: Door, clock: Clock) -> None:
    assert told(door) == 1
    clock.now += 30
    assert told(door) == 1


def test_it_is_the_pace_of_those_in_the_way(door: Door, clock: Clock) -> None:
    end(door, clock, 3.0, times=5)
    assert told(door) == 3
    assert told(door, 4) == 12  # four places are wanted, and none is free
    door.leave(2, ended=False)
    assert told(door, 4) == 6


def test_the_last_answers_count_and_a_standstill_shows(door: Door, clock: Clock) -> None:
    end(door, clock, 20.0, times=100)
    assert told(door) == 20
    end(door, clock, 2.0, times=64)
    assert told(door) == 2
    clock.now += 64 * 8
    assert told(door) == 10


def test_an_idle_night_is_no_slow_pace(door: Door, clock: Clock) -> None:
    end(door, clock, 2.0, times=10)
    door.leave(6, ended=True)
    clock.now += 8 * 3600
    door.enter(6)
    assert told(door) == 2  # 16 ends in 20 seconds of work


def test_who_is_refused_inside_says_nothing_of_the_pace(door: Door, clock: Clock) -> None:
    end(door, clock, 10.0, times=3)
    for _ in range(50):
        door.leave(1)
        door.enter(1)
    assert told(door) == 10


@given(
    steps=st.lists(st.tuples(st.floats(0, 1e5), st.integers(0, 6), st.booleans()), max_size=40),
    count=st.integers(1, 6),
)
def test_it_is_from_one_second_to_a_minute(steps: list[tuple[float, int, bool]], count: int) -> None:
    clock = Clock()
    door = Door(4, 2, clock)
    for seconds, leaving, ended in steps:
        clock.now += seconds
        door.leave(min(leaving, door.live), ended=ended)
        if door.live < 6:
            door.enter(6 - door.live)
    door.leave(door.live)
    door.enter(6)
    assert 1 <= told(door, count) <= 60


def test_a_server_says_it_of_itself(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real door: answers that have ended are what it counts."""
    with ThreadServer(tokenizer, max_queue=0) as server:
        asked = {"model": NAME, "prompt": "a", "max_tokens": 2}
        assert server.post("/v1/completions", asked).status_code == 200
        server.wait_until_free()
        pace = server.server.service.door._pace
        monkeypatch.setattr(pace, "_clock", lambda: pace._since + 7.5)
        pace.work(True)
        assert server.server.service.door.retry_after() == 8
