"""Latency definitions by hand and against plain numpy; counters; the snapshot."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine.metrics import Counters, Latency, Slo, Snapshot, Spread, gaps, goodput, span, tpot, ttft
from labkit.errors import InputError


@dataclass
class Done:
    arrival: float
    token_times: list[float] = field(default_factory=list)
    finish_reason: str | None = "length"


def test_definitions_by_hand():
    request = Done(1.0, [3.0, 3.5, 5.5, 6.0])
    assert ttft(request) == 2.0
    assert tpot(request) == 1.0  # (6 - 3) / 3
    assert gaps(request) == [0.5, 2.0, 0.5]
    one, none = Done(1.0, [1.5]), Done(1.0)
    assert ttft(one) == 0.5 and tpot(one) is None and gaps(one) == []
    assert ttft(none) is None and tpot(none) is None and gaps(none) == []


def test_gaps_are_pooled_and_hold_no_first_token():
    quick = Done(0.0, [10.0, 10.1])  # a long wait for the first token is no gap
    slow = Done(0.0, [1.0, 2.0, 3.0, 4.0])
    latency = Latency.of([quick, slow, Done(0.0)])
    assert latency.itl.count == 4 and latency.itl.max == 1.0
    assert latency.itl.mean == pytest.approx(3.1 / 4)  # by token, not by request
    assert latency.tpot.count == 2 and latency.tpot.mean == pytest.approx(0.55)
    assert latency.ttft.count == 2 and latency.ttft.max == 10.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40))
def test_spread_is_numpy_percentiles(values):
    spread = Spread.of(iter(values))
    assert spread.count == len(values) and spread.max == max(values)
    ordered = sorted(values)
    for value, percent in ((spread.p50, 50), (spread.p95, 95), (spread.p99, 99)):
        place = (len(ordered) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        assert value == pytest.approx(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
    assert spread.mean == pytest.approx(np.mean(values))


def test_spread_of_nothing():
    assert Spread.of([]) == Spread(0)
    assert Latency.of([]).itl.p99 is None


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), True),
        (Slo(ttft=2.0, tpot=1.0, max_gap=2.0), True),  # a bound that is just held is met
        (Slo(ttft=1.9), False),
        (Slo(tpot=0.9), False),
        (Slo(max_gap=1.9), False),
        (Slo(ttft=9.0, tpot=9.0, max_gap=1.9), False),  # all of them, not one
    ],
)
def test_slo(slo, met):
    assert slo.met(Done(1.0, [3.0, 3.5, 5.5, 6.0])) is met


def test_goodput_counts_good_ends_alone():
    requests = [
        Done(0.0, [1.0, 2.0], "stop"),
        Done(0.0, [1.0], "length"),
        Done(0.0, [1.0, 2.0], "abort"),
        Done(0.0, [1.0, 2.0], "error"),
        Done(0.0, [1.0, 2.0], None),
        Done(0.0, [], "stop"),
        Done(2.0, [4.0], "stop"),
    ]
    assert span(requests) == 4.0
    assert goodput(requests, Slo()) == 3 / 4
    assert goodput(requests, Slo(ttft=1.0)) == 2 / 4
    assert goodput(requests, Slo(tpot=0.5), seconds=10) == 2 / 10  # one token has no TPOT to miss
    assert goodput([], Slo()) == 0.0 and span([Done(3.0)]) == 0.0
    with pytest.raises(InputError, match="seconds"):
        goodput(requests, Slo(), seconds=-1.0)
    with pytest.raises(InputError, match="max_gap"):
        Slo(max_gap=0)


@given(
    st.floats(0, 10),
    st.lists(st.floats(0.001, 5), min_size=2, max_size=20),
)
def test_the_parts_of_a_request_add_up(arrival, waits):
    request = Done(arrival, list(accumulate(waits, initial=arrival))[1:])
    total = request.token_times[-1] - arrival
    assert ttft(request) + sum(gaps(request)) == pytest.approx(total)
    assert tpot(request) == pytest.approx(np.mean(gaps(request)))
    assert min(gaps(request)) <= tpot(request) + 1e-9 and tpot(request) <= max(gaps(request)) + 1e-9


def test_overlap_counters():
    counters = Counters()
    for prefill, decode, two in ((True, True, True), (True, True, False), (True, False, False)):
        counters.count_step(prefill=prefill, decode=decode, two_streams=two)
    counters.count_step(prefill=False, decode=False, two_streams=False)  # an idle turn is no step
    assert counters.steps == 3
    assert counters.prefill_decode_overlap_steps == 2
    assert counters.prefill_decode_stream_overlap_steps == 1
    with pytest.raises(InputError, match="two_streams"):
        counters.count_step(prefill=True, decode=False, two_streams=True)
    assert counters.steps == 3


def test_snapshot_is_a_copy_that_json_takes():
    counters = Counters()
    counters.count_finish("stop")
    snapshot = Snapshot(
        policy="mixed",
        executor="simulated",
        overlap=True,
        concurrent=False,
        waiting=1,
        prefilling=2,
        decoding=3,
        blocks=10,
        blocks_free=4,
        blocks_idle=1,
        block_size=16,
        counters=counters.copy(),
        latency=Latency.of([Done(0.0, [1.0])]),
    )
    counters.count_finish("stop")
    counters.count_step(prefill=True, decode=True, two_streams=False)
    shown = json.loads(json.dumps(snapshot.as_dict(), allow_nan=False))
    assert shown["blocks_used"] == 5 and shown["counters"]["finished"] == {"stop": 1}
    assert shown["counters"]["prefill_decode_overlap_steps"] == 0
    assert shown["latency"]["ttft"]["p50"] == 1.0 and shown["latency"]["itl"]["p50"] is None
