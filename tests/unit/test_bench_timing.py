"""Cold L2, whole passes over the copies, and the order of samples, with a clock that tests own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.bench import timing
from labkit.errors import InputError

MIB = 1 << 20


class FakeClock:
    """A clock that calls advance, and that logs what it is asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def mark(self) -> float:
        return self.now

    def elapsed_us(self, start: float, end: float) -> float:
        assert self.log[-1] == "wait", "read before the work was done"
        return end - start

    def begin_round(self) -> None:
        self.log.append("round")

    def wait(self) -> None:
        self.log.append("wait")

    def contender(self, name: str, us: float, calls: int = 8) -> timing.Timed:
        def replay() -> None:
            self.log.append(name)
            self.now += us * calls

        return timing.Timed(replay, calls, "fake")


def test_contenders_take_turns_so_that_a_drifting_clock_hits_all() -> None:
    clock = FakeClock()
    contenders = {name: clock.contender(name, us) for name, us in (("a", 1.0), ("b", 2.0), ("c", 5.0))}
    taken = timing.interleave(contenders, 20, clock=clock)
    assert taken == {"a": [1.0] * 20, "b": [2.0] * 20, "c": [5.0] * 20}
    first_round = clock.log.index("round")
    assert set(clock.log[:first_round]) == {"a", "b", "c", "wait"}  # warm-up is not counted
    assert clock.log[first_round:] == ["round", "a", "b", "c", "wait"] * 20


def test_samples_are_microseconds_of_one_call() -> None:
    clock = FakeClock()
    taken = timing.interleave({"a": clock.contender("a", 3.0, calls=46)}, 20, clock=clock)
    assert taken["a"] == [3.0] * 20


@given(st.integers(1, 1 << 31), st.integers(0, 1 << 28))
def test_a_pass_over_the_copies_is_larger_than_the_cache(nbytes: int, l2: int) -> None:
    copies = timing.copies_needed(nbytes, l2)
    wanted = max(256 * MIB, 2 * l2)
    assert copies == timing.MOST_COPIES or (copies >= 2 and copies * nbytes >= wanted)
    assert copies == 2 or (copies - 1) * nbytes < wanted


def test_copies_stay_within_the_memory_there_is() -> None:
    assert timing.copies_needed(6 * MIB, 50 * MIB) == 43
    assert timing.copies_needed(6 * MIB, 50 * MIB, 60 * MIB) == 10
    assert timing.copies_needed(600 * MIB, None, 500 * MIB) == 1
    assert timing.copies_needed(2 * MIB, 400 * MIB) == 400
    assert timing.copies_needed(1000, 50 * MIB) == 512


@given(st.integers(1, 500))
def test_a_sample_is_whole_passes_and_at_least_eight_calls(copies: int) -> None:
    calls = timing.plan_calls(copies)
    assert calls >= 8 and calls % copies == 0 and calls - copies < 8


def test_long_calls_need_fewer_but_still_a_cold_cache() -> None:
    assert timing.plan_calls(46, us=99, cold_copies=21) == 46
    assert timing.plan_calls(46, us=100, cold_copies=21) == 21
    assert timing.plan_calls(4, us=100, cold_copies=2) == 8
    assert timing.plan_calls(4, us=1000, cold_copies=2) == 2
    assert timing.plan_calls(46, us=1000, cold_copies=21) == 21
    assert timing.plan_calls(46, us=1000) == 46  # nothing is known of the cache


@given(st.integers(1, 500), st.floats(0, 1e5), st.integers(0, 600))
def test_a_sample_is_never_longer_than_whole_passes(copies: int, us: float, cold: int) -> None:
    calls = timing.plan_calls(copies, us, cold)
    assert 2 <= calls <= timing.plan_calls(copies)
    assert calls >= min(copies, cold)


def test_roughly_how_long_a_call_takes() -> None:
    clock = FakeClock()

    def call() -> None:
        clock.now += 7.0 if clock.log else 1000.0  # the first one loads

    assert timing.rough_us(call, clock) == 7.0


def test_a_sample_goes_through_every_copy_in_turn() -> None:
    order: list[int] = []
    calls = [lambda i=i: order.append(i) for i in range(3)]  # type: ignore[misc]
    timed = timing.prepare(calls, graph=False)
    timed.replay()
    assert order == [0, 1, 2] * 3 and timed.calls == 9 and timed.how == "plain loop"


def test_where_capture_fails_a_loop_is_timed_and_the_reason_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(timing, "captured", refuse)
    done: list[int] = []
    timed = timing.prepare([lambda: done.append(1)])
    timed.replay()
    assert len(done) == timed.calls == 8
    assert timed.how == "plain loop: capture failed (operation not permitted when stream is capturing)"


def test_no_samples_are_refused() -> None:
    with pytest.raises(InputError, match="samples"):
        timing.interleave({}, 0, clock=FakeClock())
