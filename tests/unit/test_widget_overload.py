"""Overload: nobody is lost between the door and the engine, and the picture says what the run did."""

from __future__ import annotations

import itertools
import random
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import plots
from labkit.engine.cost_model import rtx3050
from labkit.errors import InputError
from labkit.server.door import Door
from labkit.server.errors import ApiError
from labkit.widgets import overload
from labkit.widgets.base import View
from labkit.widgets.overload import BOUNDS, COUNT, QUEUES, RATES, Overload
from labkit.widgets.overload_run import ANSWER, ROWS, Outcome, crowd, serve

SVG = "{http://www.w3.org/2000/svg}"
STATES = [(rate, queue, 2.0) for rate in (1.0, 4.0, 8.0) for queue in (0, 4, 256)]


def coming_again(most: int) -> Any:
    def retry(attempts: int, after: float, dice: random.Random) -> float | None:
        return after + dice.random() if attempts < most else None

    return retry


def under_way(found: Outcome, time: float) -> int:
    """Answers in the engine at a moment, by the requests' own times."""
    return sum(
        user.arrival <= time and (user.request.finish_time or 0.0) > time
        for user in found.users
        if user.request is not None
    )


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([2.0, 5.0, 20.0]),
    st.one_of(st.none(), st.integers(0, 12)),
    st.integers(1, 4),
    st.booleans(),
)
def test_everybody_ends_as_exactly_one_thing(
    rate: float, queue: int | None, most: int, newest_first: bool
) -> None:
    found = serve(crowd(rate, 40), queue, coming_again(most), newest_first=newest_first)
    let_in = [user for user in found.users if user.request is not None]
    assert len(let_in) + found.sent_away == len(found.users) == 40
    assert all(len(user.token_times) == ANSWER and user.finish_reason == "length" for user in let_in)
    assert found.tokens == ANSWER * len(let_in)
    # Every attempt was either let in or refused.
    assert sum(user.attempts for user in found.users) == len(let_in) + len(found.refusals)
    assert all(1 <= user.attempts <= most for user in found.users)
    assert all(user.attempts == most for user in found.users if user.request is None)
    if queue is None:
        assert not found.refusals
    assert found.origin == rtx3050().origin == "simulated from quoted"


@pytest.mark.parametrize("queue", [0, 3, 8])
def test_no_more_are_under_way_than_the_door_lets_in(queue: int) -> None:
    """The door here is the server's: as many run and wait, and not one more."""
    found = serve(crowd(8.0, 60), queue)
    starts = [user.arrival for user in found.users if user.request is not None]
    assert max(under_way(found, time) for time in starts) == ROWS + queue
    door = Door(ROWS, queue)
    door.enter(ROWS + queue)
    with pytest.raises(ApiError) as caught:
        door.enter(1)
    assert caught.value.status == 429
    # Whoever was sent away had found it full.
    assert found.refusals and all(under_way(found, time) >= ROWS + queue - ROWS for time in found.refusals)


def test_order_changes_who_waits_and_not_how_much_is_done() -> None:
    first, newest = (serve(crowd(6.0, 80), None, newest_first=flag) for flag in (False, True))
    assert first.tokens == newest.tokens
    waits = [[user.token_times[0] - user.arrival for user in one.users] for one in (first, newest)]
    firsts = [user.token_times[0] for user in first.users]
    assert firsts == sorted(firsts)
    assert max(waits[1]) > max(waits[0])
    assert len(newest.in_time(2.0)) > 2 * len(first.in_time(2.0))


def test_in_time_counts_from_the_first_attempt() -> None:
    """A client that came again waited outside."""
    found = serve(crowd(20.0, 40), 2, coming_again(9))
    late = [user for user in found.users if user.attempts > 3 and user.request is not None]
    assert late and not set(late) & set(found.in_time(2.0))
    assert all(user.token_times[0] - user.arrival > 2.0 for user in late)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda: serve([], 4), "arrivals"),
        (lambda: serve(crowd(1.0, 3), -1), "queue"),
        (lambda: serve(crowd(1.0, 3), 4, [coming_again(2)]), "retry"),
        (lambda: serve(crowd(30.0, 30), 0, lambda *_: 0.0), "retry"),
    ],
)
def test_wrong_uses_are_refused_by_name(wrong: Any, name: str) -> None:
    with pytest.raises(InputError) as caught:
        wrong()
    assert caught.value.argument == name


# --- the widget


@pytest.mark.parametrize("change", [{"rate": 5.0}, {"queue": 1}, {"queue": -1}, {"bound": 0}])
def test_a_wrong_state_is_refused_by_name(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(InputError) as caught:
        Overload(**change)
    assert caught.value.argument == name


def test_the_last_queue_is_no_limit_and_a_short_one_saves_the_goodput() -> None:
    assert QUEUES[-1] > COUNT
    without, short = Overload(6.0, QUEUES[-1], 2.0), Overload(6.0, 4, 2.0)
    assert without.counts["sent away (429)"] == 0 and "no limit" in without.head()
    assert short.counts["sent away (429)"] > 0 and "queue limit 4" in short.head()
    assert short.outcome.goodput(2.0) > 5 * without.outcome.goodput(2.0)


def test_the_bound_only_judges() -> None:
    shares = [Overload(4.0, 256, bound).counts["in time"] for bound in BOUNDS]
    assert shares == sorted(shares) and shares[0] < shares[-1]
    assert len({id(Overload(4.0, 256, bound).outcome) for bound in BOUNDS}) == 1


@pytest.mark.parametrize("state", STATES)
def test_the_picture_is_valid_and_stays_inside(state: tuple[float, int, float]) -> None:
    shown = Overload(*state)
    root = ElementTree.fromstring(shown.picture())
    assert root.attrib["aria-label"] == shown.alt()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert min(x, y) >= 0 and x + w <= width and y + h <= height and w > 0
    for text in root.iter(f"{SVG}text"):
        assert float(text.attrib["font-size"]) >= 11 and float(text.attrib["y"]) <= height
    tips = [box.findtext(f"{SVG}title") or "" for box in root.iter(f"{SVG}rect")]
    counts = shown.counts
    assert sum(counts.values()) == COUNT
    assert sum("sent away" in tip and tip.startswith("user") for tip in tips) == counts["sent away (429)"]
    assert sum("first token after" in tip for tip in tips) == counts["in time"] + counts["late"]


def test_words_say_what_the_run_did() -> None:
    for rate, queue in itertools.product((1.0, 8.0), (0, 256)):
        shown = Overload(rate, queue, 1.0)
        text, found = shown.text(), shown.outcome
        assert "simulated from quoted" in text and shown.verdict() in text
        assert f"goodput {found.goodput(1.0):.2f}" in text and f"{len(found.refusals)} times 429" in text
        assert f"{len(found.in_time(1.0))} in time" in text


def test_the_static_figure_and_the_view() -> None:
    states = [Overload(4.0, 256, 2.0), Overload(4.0, 4, 2.0)]
    fig, ax = plots.figure(7.2, 7.2 * overload.draw_height(*states) / overload.WIDTH)
    overload.draw(ax, *states)
    words = [text.get_text() for text in ax.texts]
    assert any("queue limit 4" in each and "simulated from quoted" in each for each in words)
    assert plots.render(fig, "No limit above a limit of four").png
    view = View(Overload())
    before = view.output.value
    view.inputs["queue"].value = 4
    assert "; 0 times 429" in before and "; 0 times 429" not in view.output.value
    for rate in RATES[:2]:
        view.inputs["rate"].value = rate
        assert Overload(rate, 4, 2.0).verdict() in view.output.value
