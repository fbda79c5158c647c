"""The SLA Pareto: who meets a level, who is best of those, and pictures that stay inside."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import plots
from labkit.bench.pareto import Point
from labkit.bench.record import Record
from labkit.engine.adaptive import POLICIES
from labkit.errors import InputError
from labkit.widgets import sla_pareto
from labkit.widgets.base import View
from labkit.widgets.sla_pareto import LETTERS, SIMULATED, STOPS, SlaPareto, Source

SVG = "{http://www.w3.org/2000/svg}"


def point(label: str, gap: float, rate: float, p99: float | None = None) -> Point:
    return Point(label, label.partition(":")[0], False, gap, gap if p99 is None else p99, rate, "measured")


FAST_POINTS = (
    point("serial:128", 0.010, 15000),
    point("mixed:64", 0.005, 12000),
    point("sliced:512", 0.008, 9000, p99=0.003),
    point("ticks:512", 0.0025, 9000),
)
FAST = Source("fast", "A fast card, measured", FAST_POINTS, FAST_POINTS[0], 4096)


def simulated() -> Source:
    return sla_pareto.source_of(sla_pareto.simulated())


@pytest.fixture
def both() -> tuple[Source, ...]:
    return simulated(), FAST


def test_the_simulated_source_has_every_policy() -> None:
    source = simulated()
    assert source.key == SIMULATED and "simulated from quoted" in source.name
    assert {one.policy for one in source.points} == set(POLICIES) == set(LETTERS)
    assert source.baseline.label == "serial:128"
    assert source.ttft(source.baseline) == pytest.approx(1024 / source.baseline.prompt_rate)
    assert not any(one.label.endswith("no overlap") for one in source.points)


def test_the_project_has_the_simulated_card_first() -> None:
    sources = sla_pareto.project_sources()
    assert sources[0].key == SIMULATED
    assert len({one.key for one in sources}) == len(sources)
    for source in sources[1:]:
        assert all(one.origin == "measured" for one in source.points)


# --- records


def write(folder: Path, started: str, **changes: Any) -> None:
    made = sla_pareto.simulated()
    values = {**vars(made), "kind": "measured", "started": started, "device": {"key": "x", "name": "Card X"}}
    record = Record(**{**values, **changes})
    record.write(folder / f"jitter-{started[:4]}-{changes.get('name', 'x')}.json")


def test_the_newest_record_of_each_device(tmp_path: Path) -> None:
    assert sla_pareto.measured(tmp_path) == []
    write(tmp_path, "2026-01-01T00:00:00+00:00")
    write(tmp_path, "2028-01-01T00:00:00+00:00", device={"key": "y", "name": "Card Y"})
    write(tmp_path, "2027-01-01T00:00:00+00:00")
    write(tmp_path, "2029-01-01T00:00:00+00:00", entries=[])  # nothing in it counts
    write(tmp_path, "2030-01-01T00:00:00+00:00", kind="simulated")
    write(tmp_path, "2031-01-01T00:00:00+00:00", parameters={})
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    found = sla_pareto.measured(tmp_path)
    assert [(one.device["key"], one.started[:4]) for one in found] == [("x", "2027"), ("y", "2028")]


def test_a_record_without_its_baseline_is_refused() -> None:
    made = sla_pareto.simulated()
    with pytest.raises(InputError, match="no figures of"):
        sla_pareto.source_of(Record(**{**vars(made), "parameters": {"baseline": "serial:7"}}))


# --- levels


def test_who_meets_it_and_who_is_best(both: tuple[Source, ...]) -> None:
    level = SlaPareto(sources=both)
    assert level.best is not None and level.best.label == "mixed:28"
    assert [one.label for one in level.asked if level.meets(one)] == ["mixed:28"]
    assert "best is mixed:28, TTFT +15 %" in level.verdict()
    level.update(max_gap=5000, p99_gap=5000, share=0)
    assert all(map(level.meets, level.asked))
    assert level.best.prompt_rate == max(one.prompt_rate for one in level.asked)
    level.update(mixed=False)
    assert level.best is not None and level.best.policy == "overlap"


def test_nobody_and_nobody_asked(both: tuple[Source, ...]) -> None:
    level = SlaPareto(sources=both, max_gap=1)
    assert level.best is None and "nobody meets it; nearest is sliced-beside:512@25%" in level.verdict()
    level = SlaPareto(sources=both, **dict.fromkeys(POLICIES, False))
    assert level.best is None and level.asked == [] and level.verdict() == "no policy is checked"
    assert ElementTree.fromstring(level.picture()) is not None


def test_p99_and_the_maximum_are_two_bounds(both: tuple[Source, ...]) -> None:
    level = SlaPareto(source="fast", sources=both, max_gap=8, p99_gap=4, share=60)
    assert {one.label for one in level.asked if level.meets(one)} == {"sliced:512", "ticks:512"}
    level.update(max_gap=6.3)
    assert {one.label for one in level.asked if level.meets(one)} == {"ticks:512"}


def test_of_equal_rates_the_smaller_gap_is_best(both: tuple[Source, ...]) -> None:
    level = SlaPareto(source="fast", sources=both, max_gap=8, p99_gap=4, share=60)
    assert level.best is not None and level.best.label == "ticks:512"


@given(st.sampled_from(STOPS), st.sampled_from(STOPS), st.integers(0, 30))
def test_a_looser_level_is_met_by_no_fewer(gap: float, p99: float, share: int) -> None:
    sources = (FAST,)
    tight = SlaPareto(max_gap=gap, p99_gap=p99, share=5 * share, sources=sources)
    loose = SlaPareto(max_gap=STOPS[-1], p99_gap=p99, share=max(5 * share - 5, 0), sources=sources)
    for one in FAST.points:
        exact = 1e3 * one.max_gap <= gap and 1e3 * one.p99_gap <= p99
        exact = exact and one.prompt_rate >= 5 * share / 100 * 15000
        assert tight.meets(one) == exact
        assert loose.meets(one) or not tight.meets(one)


def test_bounds_move_with_the_source(both: tuple[Source, ...]) -> None:
    level = SlaPareto(sources=both)
    level.update(source="fast")
    assert (level.max_gap, level.p99_gap, level.share) == (4, 4, 85)
    level.update(source=SIMULATED)
    assert level.max_gap == 250
    level.update(source="fast", max_gap=10)
    assert (level.max_gap, level.p99_gap) == (10, 4)


@pytest.mark.parametrize(
    "change", [{"source": "h100"}, {"max_gap": 3.0}, {"p99_gap": 0}, {"share": 151}, {"mixed": 1}]
)
def test_a_wrong_state_is_refused_by_name(change: dict[str, Any], both: tuple[Source, ...]) -> None:
    (name,) = change
    with pytest.raises(InputError) as caught:
        SlaPareto(**change, sources=both)
    assert caught.value.argument == name
    level = SlaPareto(sources=both)
    before = (level.source, level.max_gap, level.p99_gap, level.share)
    with pytest.raises(InputError, match=name):
        level.update(**change)
    assert (level.source, level.max_gap, level.p99_gap, level.share) == before


def test_no_sources_are_refused() -> None:
    with pytest.raises(InputError, match="sources"):
        SlaPareto(sources=())


# --- pictures


@pytest.mark.parametrize(
    ("source", "gap", "share"), list(itertools.product((SIMULATED, "fast"), (1.0, 250.0, 8000.0), (0, 150)))
)
def test_the_picture_is_valid_and_stays_inside(
    source: str, gap: float, share: int, both: tuple[Source, ...]
) -> None:
    level = SlaPareto(source=source, max_gap=gap, p99_gap=gap, share=share, sources=both)
    root = ElementTree.fromstring(level.picture())
    assert root.attrib["aria-label"] == level.alt()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert min(x, y, w, h) >= 0 and x + w <= width and y + h <= height
    for text in root.iter(f"{SVG}text"):
        assert float(text.attrib["font-size"]) >= 11 and float(text.attrib["y"]) <= height
    tips = [box.findtext(f"{SVG}title") or "" for box in root.iter(f"{SVG}rect")]
    for one in level.asked:
        assert tips.count(level.describe(one)) == 2  # once a panel
    fills = [box.attrib["fill"] for box in root.iter(f"{SVG}rect") if box.findtext(f"{SVG}title")]
    met = sum(map(level.meets, level.asked))
    assert fills.count(plots.BLUE) == 2 * (level.best is not None)
    assert fills.count(plots.GREEN) == 2 * max(met - 1, 0)
    assert fills.count(plots.GREY) == 2 * (len(level.asked) - met)


def test_words_say_what_the_picture_shows(both: tuple[Source, ...]) -> None:
    level = SlaPareto(sources=both)
    text = level.text()
    assert "simulated from quoted" in text and level.verdict() in text and level.level() in text
    assert text.count("misses ") == len(level.asked) - 1 and "meets  mixed:28" in text


def test_stops_rise_ten_a_decade() -> None:
    assert list(STOPS) == sorted(set(STOPS)) and len(STOPS) == 40
    assert all(1.2 < b / a < 1.35 for a, b in itertools.pairwise(STOPS))
    assert math.isclose(STOPS[0], 1.0) and 250.0 in STOPS


def test_the_static_figure_and_the_view(both: tuple[Source, ...]) -> None:
    fig, ax = plots.figure(7.2, 7.2 * sla_pareto.HEIGHT / sla_pareto.WIDTH)
    sla_pareto.draw(ax, SlaPareto(sources=both))
    assert any("best is mixed:28" in text.get_text() for text in ax.texts)
    assert plots.render(fig, "Two panels with a box for the service level").png
    view = View(SlaPareto(sources=both))
    before = view.output.value
    view.inputs["mixed"].value = False
    assert view.output.value != before and "nobody meets it" in view.output.value
    view.inputs["source"].value = "fast"
    assert view.inputs["max_gap"].value == view.controller.max_gap == 4  # type: ignore[attr-defined]
    assert "A fast card, measured" in view.output.value
