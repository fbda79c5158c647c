"""The history filter: what passes it, what it says, and pictures that stay inside."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_records import entry, record
from hypothesis import given, settings
from hypothesis import strategies as st
from result_runs import run_of, runs, throttled, written

from labkit import plots
from labkit.errors import InputError
from labkit.results.history import Histories, gather
from labkit.widgets.base import View
from labkit.widgets.history import MOST_LINES, WIDTH, HistoryFilter, draw

SVG = "{http://www.w3.org/2000/svg}"
A10 = {"name": "NVIDIA A10", "key": "a10", "capability": "8.6"}


@pytest.fixture(scope="module")
def histories() -> Histories:
    return gather(
        [
            *runs([10, 10, 20]),
            *runs([30, 30], device=A10),
            *runs([5], kind="simulated", name="jitter"),
            run_of(9, 11.0, clocks=throttled(["hardware slowdown"])),
        ]
    )


def test_it_opens_with_everything_changes_first(histories: Histories) -> None:
    state = HistoryFilter(histories=histories)
    assert [(one.device.key, one.kind) for one in state.selected] == [
        ("h200", "measured"),
        ("a10", "measured"),
        ("h200", "simulated"),
    ]
    assert state.verdict() == "3 histories, 6 runs, 1 with a change"
    assert "slower (+100.0 %)" in state.text() and "hardware slowdown" in state.text()


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"device": "a10"}, 1),
        ({"kind": "simulated"}, 1),
        ({"case": "gemm-seed/sweep"}, 2),
        ({"contender": "gemm_tiled"}, 3),
        ({"changed_only": True}, 1),
        ({"device": "a10", "changed_only": True}, 0),
        ({"device": "a10", "kind": "simulated"}, 0),
    ],
)
def test_each_control_narrows(histories: Histories, changes: dict, count: int) -> None:
    state = HistoryFilter(histories=histories)
    state.update(**changes)
    assert len(state.selected) == count
    if not count:
        assert state.verdict() == "no history passes this filter"


@pytest.mark.parametrize(
    "bad", [{"device": "rtx"}, {"kind": "guessed"}, {"case": "x"}, {"changed_only": "yes"}, {"nothing": 1}]
)
def test_bad_state_is_refused(histories: Histories, bad: dict) -> None:
    with pytest.raises(InputError):
        HistoryFilter(histories=histories).update(**bad)


def test_only_histories_are_taken() -> None:
    with pytest.raises(InputError, match="histories"):
        HistoryFilter(histories=[record()])  # type: ignore[arg-type]


def test_without_results_it_says_how_to_get_some() -> None:
    state = HistoryFilter(histories=Histories(()))
    assert "labkit rerun" in state.text() and "labkit rerun" in state.html()


def test_the_project_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RESULTS", str(written(tmp_path, runs([7], name="only-here"))))
    cases = {value for _, value in HistoryFilter().controls()[2].options}  # type: ignore[union-attr]
    assert "only-here/sweep" in cases and "gemm-fast/fast" in cases


def test_more_lines_than_colours_are_counted() -> None:
    many = gather([record([entry(f"k{i}") for i in range(MOST_LINES + 3)])])
    state = HistoryFilter(histories=many)
    assert len(state.shown) == MOST_LINES
    assert f"{MOST_LINES} are drawn" in state.verdict() and "… and 3 more" in state.text()


def inside(state: HistoryFilter) -> None:
    root = ElementTree.fromstring(state.picture())
    assert root.attrib["aria-label"].startswith("Medians run by run")
    for box in root.iter(f"{SVG}rect"):
        x, y = float(box.attrib["x"]), float(box.attrib["y"])
        assert x >= 0 and x + float(box.attrib["width"]) <= WIDTH
        assert y >= 0 and y + float(box.attrib["height"]) <= state.height
    for line in root.iter(f"{SVG}polyline"):
        for place in line.attrib["points"].split():
            x, y = map(float, place.split(","))
            assert 0 <= x <= WIDTH and 0 <= y <= state.height
    for words in root.iter(f"{SVG}text"):
        assert float(words.attrib["font-size"]) >= 12
        assert 0 <= float(words.attrib["y"]) <= state.height


def test_every_filter_draws_inside(histories: Histories) -> None:
    state = HistoryFilter(histories=histories)
    options = [[value for _, value in control.options] for control in state.controls()[:2]]  # type: ignore[union-attr]
    for device, kind, only in itertools.product(options[1], options[0], (False, True)):
        state.update(device=device, kind=kind, changed_only=only)
        inside(state)


@given(st.lists(st.floats(1e-3, 1e7), min_size=1, max_size=27))
@settings(max_examples=40, deadline=None)
def test_any_medians_draw_inside(medians: list[float]) -> None:
    inside(HistoryFilter(histories=gather(runs(medians))))


def test_a_long_bar_does_not_flatten_the_lines() -> None:
    """Two odd samples of twelve: the 90th percentile is one of them."""
    spread = [10.0] * 10 + [400.0] * 2
    found = gather(
        [*runs([10, 10.5]), record([entry(samples_us=spread)], started="2026-12-09T10:00:00+00:00")]
    )
    state = HistoryFilter(histories=found)
    inside(state)
    boxes = [float(box.attrib["y"]) for box in ElementTree.fromstring(state.picture()).iter(f"{SVG}rect")]
    assert min(boxes) < 150  # the medians stay in the upper half
    assert "cut at the top" in state.picture()
    assert "cut at the top" not in HistoryFilter(histories=gather(runs([10, 10.5]))).picture()


def test_the_words_of_a_peak_and_of_the_run_after_it_stay_apart() -> None:
    state = HistoryFilter(histories=gather(runs([10, 10, 10, 20, 10, 10])))
    texts = {text.text: text for text in ElementTree.fromstring(state.picture()).iter(f"{SVG}text")}
    up, down = (
        next(t for words, t in texts.items() if words and words.startswith(w)) for w in ("slower", "faster")
    )
    assert float(down.attrib["y"]) - float(up.attrib["y"]) > 24


@pytest.mark.parametrize("count", [1, 6, 8, 20, 27])
def test_dates_stay_inside_and_apart(count: int) -> None:
    state = HistoryFilter(histories=gather(runs([10.0] * count)))
    places = []
    for text in ElementTree.fromstring(state.picture()).iter(f"{SVG}text"):
        if (text.text or "").startswith("2026-12-"):
            x, wide = float(text.attrib["x"]), 70.0
            end = text.attrib["text-anchor"] == "end"
            places.append((x - wide, x) if end else (x - wide / 2, x + wide / 2))
    assert places and all(low >= 0 and high <= WIDTH for low, high in places)
    assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(places))


def test_hostile_names_are_text() -> None:
    state = HistoryFilter(histories=gather(runs([1], name="<script>&'\"")))
    assert "<script" not in state.html()
    inside(state)


def test_the_view_redraws(histories: Histories) -> None:
    view = View(HistoryFilter(histories=histories))
    view.inputs["device"].value = "a10"
    assert "1 history, 2 runs, 0 with a change" in view.output.value


def test_the_figure_beside_it_has_the_same_shapes(histories: Histories) -> None:
    state = HistoryFilter(histories=histories)
    fig, ax = plots.figure(7.2, 3.6)
    draw(ax, state)
    words = {text.get_text() for text in ax.texts}
    assert state.verdict() in words and len(words) >= len(state.shown)
    assert plots.render(fig, state.alt()).png
