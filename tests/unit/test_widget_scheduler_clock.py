"""The scheduler clock: its replays keep the scheduler's promises, and its pictures stay inside."""

from __future__ import annotations

import itertools
from typing import Any
from xml.etree import ElementTree

import pytest

from labkit import plots
from labkit.engine.cost_model import rtx3050
from labkit.errors import InputError
from labkit.widgets import scheduler_clock
from labkit.widgets.base import View
from labkit.widgets.scheduler_clock import SchedulerClock
from labkit.widgets.scheduler_run import ANSWERS, CHUNKS, POLICIES, PROMPTS, RATES, run

SVG = "{http://www.w3.org/2000/svg}"
STATES = [(rate, chunk, name) for rate in (1.0, 4.0) for chunk in (16, 128) for name in POLICIES]


@pytest.mark.parametrize("state", list(itertools.product(RATES, CHUNKS, POLICIES)))
def test_every_state_serves_everybody(state: tuple[float, int, str]) -> None:
    found = run(*state)
    assert [track.prompt_len for track in found.tracks] == list(PROMPTS)
    assert [len(track.token_times) for track in found.tracks] == list(ANSWERS)
    assert found.label == rtx3050().origin == "simulated from quoted"
    assert sum(block.prompt_tokens for block in found.blocks) == sum(PROMPTS)
    assert all(block.prompt_tokens <= state[1] for block in found.blocks)
    assert found.latency.itl.count == sum(ANSWERS) - len(ANSWERS)


@pytest.mark.parametrize("state", STATES)
def test_works_of_a_lane_follow_each_other(state: tuple[float, int, str]) -> None:
    found = run(*state)
    for lane in ("decode", "prefill"):
        works = [block for block in found.blocks if block.lane == lane]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(works))
        assert bool(works) == (lane == "decode" or state[2] == "overlap")
    kinds = {block.kind for block in found.blocks}
    assert ("mixed" in kinds) == (state[2] == "mixed")
    assert found.overlap_steps > 0


def test_a_gap_is_what_ran_inside_it() -> None:
    """Serial: the largest gap is a decode step and one chunk, of those that ran then."""
    found = run(1.0, 128, "serial")
    for track in found.tracks:
        start, end = track.largest_gap
        inside = [block for block in found.blocks if block.start >= start - 1e-9 and block.end <= end + 1e-9]
        assert sum(block.end - block.start for block in inside) == pytest.approx(end - start)
        assert sum(block.kind == "prefill" for block in inside) <= 1


def test_the_rate_stretches_the_clock_and_nothing_else() -> None:
    slow, fast = (run(rate, 64, "serial").tracks for rate in (0.5, 4.0))
    assert [a.arrival for a in slow] == pytest.approx([8 * b.arrival for b in fast])


def test_larger_chunks_make_larger_gaps_and_mixed_smaller_ones() -> None:
    most = {name: [run(2.0, chunk, name).latency.itl.max or 0.0 for chunk in CHUNKS] for name in POLICIES}
    for gaps in most.values():
        assert gaps == sorted(gaps) and gaps[-1] > 5 * gaps[0]
    assert all(a < b for a, b in zip(most["mixed"], most["serial"]))
    assert all(a < b for a, b in zip(most["overlap"], most["serial"]))


@pytest.mark.parametrize("change", [{"rate": 3.0}, {"chunk": 0}, {"chunk": 100}, {"policy": "ticks"}])
def test_a_wrong_state_is_refused_by_name(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(InputError) as caught:
        SchedulerClock(**change)
    assert caught.value.argument == name
    with pytest.raises(InputError, match=name):
        run(**({"rate": 1.0, "chunk": 64, "policy": "serial"} | change))


@pytest.mark.parametrize("state", STATES)
def test_the_picture_is_valid_and_stays_inside(state: tuple[float, int, str]) -> None:
    clock = SchedulerClock(*state)
    root = ElementTree.fromstring(clock.picture())
    assert root.attrib["aria-label"] == clock.alt()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["width"]) > 0
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    for text in root.iter(f"{SVG}text"):
        assert float(text.attrib["font-size"]) >= 11 and float(text.attrib["y"]) <= height
    tips = [box.findtext(f"{SVG}title") or "" for box in root.iter(f"{SVG}rect")]
    assert sum(tip.startswith("longest gap") for tip in tips) == len(PROMPTS)
    chunks = sum(len(block.chunks) for block in clock.run.blocks)
    assert sum(" ms" in tip and "gap" not in tip for tip in tips) == len(clock.run.blocks) + chunks
    assert len(list(root.iter(f"{SVG}polyline"))) >= sum(ANSWERS)


def test_words_say_what_the_picture_shows() -> None:
    clock = SchedulerClock(1.0, 128, "serial")
    text = clock.text()
    assert "simulated from quoted" in text and "D: prompt 320" in text and "max 657 ms" in text
    assert clock.verdict() in text and text.count("first token after") == len(PROMPTS)


def test_the_static_figure_and_the_view() -> None:
    states = [SchedulerClock(1.0, 128, "serial"), SchedulerClock(1.0, 32, "mixed")]
    height = 7.2 * scheduler_clock.draw_height(*states) / scheduler_clock.WIDTH
    fig, ax = plots.figure(7.2, height)
    scheduler_clock.draw(ax, *states)
    words: Any = [text.get_text() for text in ax.texts]
    assert any("mixed, chunk 32" in each and "simulated from quoted" in each for each in words)
    assert plots.render(fig, "Serial above mixed, on one time axis").png
    view = View(SchedulerClock())
    before = view.output.value
    view.inputs["policy"].value = "mixed"
    view.inputs["chunk"].value = 32
    assert view.output.value != before and "max 173 ms" in view.output.value
