"""Dispatch thresholds: choices by the real table, costs by hand, the colours that move, missing records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex

from labkit import plots
from labkit.errors import InputError
from labkit.nn.dispatch import DispatchTable
from labkit.widgets import dispatch_thresholds
from labkit.widgets.base import View
from labkit.widgets.dispatch_thresholds import DispatchThresholds, project_curves

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Stored:
    """A record of the size of a hand calculation."""

    device: str = "h200"
    format: str = "w4"
    n: int = 64
    k: int = 128
    origin: str = "measured"
    provenance: str = "stand-in"
    points: Mapping[str, Sequence[tuple[int, float]]] = field(
        default_factory=lambda: {
            "gemv_single_row": [(1, 10.0), (2, 20.0), (4, 40.0)],
            "gemv_small_batch": [(1, 12.0), (2, 15.0), (4, 20.0), (8, 40.0)],
            "gemm_tiled": [(1, 25.0), (2, 25.0), (4, 25.0), (8, 26.0), (16, 30.0)],
            "dequant_matmul": [(1, 80.0), (16, 90.0)],
            "dense_fp16": [(1, 5.0), (16, 6.0)],
        }
    )


def rows(small_to: int = 8) -> list[dict[str, object]]:
    common = {
        "device": "cuda",
        "capability": "8.6",
        "format": "*",
        "dtypes": ["float16"],
        "provenance": "test",
    }
    bounds = (
        ("gemv_single_row", 1, 1),
        ("gemv_small_batch", 2, small_to),
        ("gemm_tiled", small_to + 1, None),
        ("dequant_matmul", 1, None),
    )
    return [{**common, "kernel": name, "m_min": low, "m_max": high} for name, low, high in bounds]


@pytest.fixture
def table(tmp_path: Path) -> DispatchTable:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"rows": rows()}), encoding="utf-8")
    return DispatchTable.load(path)


@pytest.fixture
def state(table: DispatchTable) -> DispatchThresholds:
    quoted = Stored("rtx3050-laptop", "w3", origin="quoted", points={"gemm_tiled": [(30, 6081.0)]})
    return DispatchThresholds(curves=[Stored(), quoted], table=table)


def test_it_starts_at_the_table_s_own_thresholds(state: DispatchThresholds) -> None:
    assert (state.device, state.shape) == ("h200", "64×128")
    assert (state.single_row_up_to, state.small_batch_up_to) == (1, 8)
    kernels = [(s.first, s.last, s.kernel) for s in state.segments()]
    assert kernels == [(1, 1, "gemv_single_row"), (2, 8, "gemv_small_batch"), (9, None, "gemm_tiled")]


def test_costs_and_regret_by_hand(state: DispatchThresholds) -> None:
    costs = {cost.m: cost for cost in state.costs()}
    assert list(costs) == [1, 2, 4, 8, 16]
    assert [costs[m].percent for m in (1, 2, 4, 16)] == [0, 0, 0, 0]
    assert costs[8].percent == pytest.approx(100 * (40 / 26 - 1)) and costs[8].best == "gemm_tiled"
    # 10 + 15 + 20 + 40 + 30 against 10 + 15 + 20 + 26 + 30; dense_fp16 is a peer, not a kernel of the table
    assert state.regret == pytest.approx(100 * (115 / 101 - 1))
    state.update(small_batch_up_to=4)
    assert state.regret == pytest.approx(0)
    state.update(single_row_up_to=4)
    assert state.regret == pytest.approx(100 * ((10 + 20 + 40 + 26 + 30) / 101 - 1))


def test_the_choice_is_the_table_s(state: DispatchThresholds, table: DispatchTable) -> None:
    for single in (0, 1, 2, 4):
        for small in (0, 2, 4, 8, 16):
            state.update(single_row_up_to=single, small_batch_up_to=small)
            changed = DispatchTable.from_params(state.override(), table)
            for segment in state.segments():
                for m in {segment.first, segment.last or segment.first + 7}:
                    real = changed.select("cuda", (9, 0), "w4", "float16", m, why_not=lambda name: "")
                    assert segment.kernel == real.kernel and segment.covers(m), (single, small, m)


def test_the_override_is_for_the_format_and_the_command_line_for_all(state: DispatchThresholds) -> None:
    state.update(single_row_up_to=2, small_batch_up_to=6)
    assert state.override() == {"w4.single_row_up_to": 2, "w4.small_batch_up_to": 6}
    assert state.papermill_line() == (
        "labkit course --chapters 07 -p single_row_up_to=2 -p small_batch_up_to=6"
    )
    assert all(type(value) is int for value in state.override(every_format=True).values())
    assert "override w4.small_batch_up_to" in state.choose(7).reason


def test_a_kernel_without_any_record_is_passed_over(table: DispatchTable) -> None:
    only = Stored(points={"gemm_tiled": [(1, 25.0)], "dequant_matmul": [(1, 80.0)]})
    state = DispatchThresholds(curves=[only], table=table)
    chosen = state.choose(1)
    assert chosen.kernel == "dequant_matmul"
    assert "gemv_single_row: no time is recorded for it" in chosen.reason
    assert state.cost(1).percent == pytest.approx(220)  # type: ignore[union-attr]


def test_no_kernel_can_run(table: DispatchTable) -> None:
    state = DispatchThresholds(curves=[Stored(points={"dense_fp16": [(1, 5.0)]})], table=table)
    assert state.choose(1).kernel == "" and "no time is recorded" in state.choose(1).reason
    assert state.regret is None and "no kernel" in state.text()
    ElementTree.fromstring(state.picture())


def test_a_chosen_kernel_without_a_time_at_this_m_is_left_out(state: DispatchThresholds) -> None:
    state.update(single_row_up_to=8)  # recorded at 1, 2 and 4 only
    cost = state.cost(8)
    assert cost is not None and cost.us is None and cost.percent is None and cost.best == "gemm_tiled"
    assert state.regret == pytest.approx(100 * ((10 + 20 + 40 + 30) / (10 + 15 + 20 + 30) - 1))
    assert "1 left out" in state.regret_words()
    state.update(m=8)
    assert "no time recorded here" in state.cursor_words()


def test_pieces_are_cut_half_way_between_whole_m(state: DispatchThresholds) -> None:
    state.update(small_batch_up_to=6)
    pieces = dict(state.chosen_pieces())
    assert [m for m, _ in pieces["gemv_single_row"]] == [1, 1.5]
    assert [m for m, _ in pieces["gemv_small_batch"]] == [1.5, 2, 4, 6.5]
    assert [m for m, _ in pieces["gemm_tiled"]] == [6.5, 8, 16]
    # from (4, 20) to (8, 40) a log-log line is us = 5 m
    assert pieces["gemv_small_batch"][-1][1] == pytest.approx(32.5)


def fills(state: DispatchThresholds, kernel: str) -> dict[int, str]:
    """M → colour of that kernel's points in the picture."""
    root = ElementTree.fromstring(state.picture())
    found = {}
    for node in root.iter(f"{SVG}circle"):
        tip = node.findtext(f"{SVG}title") or ""
        if tip.startswith(f"{kernel}, M = "):
            found[int(tip.split("M = ")[1].split(":")[0])] = node.attrib["fill"]
    return found


def test_curves_change_colour_when_a_threshold_moves(state: DispatchThresholds) -> None:
    before = fills(state, "gemv_small_batch")
    assert before[8] == plots.ORANGE != before[1]
    assert fills(state, "gemm_tiled")[8] == before[1]
    state.update(small_batch_up_to=4)
    assert fills(state, "gemv_small_batch")[8] == before[1]
    assert fills(state, "gemm_tiled")[8] == plots.GREEN
    assert "M ≥ 5 gemm_tiled" in state.text()


def test_the_picture_is_valid_and_stays_inside(state: DispatchThresholds) -> None:
    for m in (1, 4, 16):
        state.update(m=m)
        root = ElementTree.fromstring(state.picture())
        assert root.attrib["aria-label"] == state.text()
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for node in root.iter(f"{SVG}circle"):
            assert 0 <= float(node.attrib["cx"]) <= width and 0 <= float(node.attrib["cy"]) <= height
        for node in root.iter(f"{SVG}rect"):
            assert float(node.attrib["width"]) >= 0 and float(node.attrib["height"]) >= 0
            assert float(node.attrib["x"]) + float(node.attrib["width"]) <= width
        assert all(float(t.attrib["font-size"]) >= 11 for t in root.iter(f"{SVG}text"))
        names = {t.text for t in root.iter(f"{SVG}text")}
        assert {"measured, taken", "measured, not taken", "measured, peer"} <= names


def test_quoted_points_stand_alone(state: DispatchThresholds) -> None:
    state.update(device="rtx3050-laptop", format="w3")
    assert state.record is not None and state.record.origin == "quoted"
    fig, ax = plots.figure()
    dispatch_thresholds.draw(ax, state)
    assert all(len(line.get_xdata()) == 1 for line in ax.lines if line.get_marker() == "o")
    assert "gemm_tiled (quoted)" in {text.get_text() for text in ax.get_legend().get_texts()}
    assert plots.render(fig, "A single quoted point").png


def test_the_static_figure_has_the_same_colours(state: DispatchThresholds) -> None:
    state.update(small_batch_up_to=4)
    fig, ax = plots.figure()
    dispatch_thresholds.draw(ax, state)
    thick = {to_hex(line.get_color()).upper() for line in ax.lines if line.get_linewidth() == 4}
    assert thick == {plots.BLUE, plots.ORANGE, plots.GREEN}
    assert "dense_fp16 (peer, measured)" in {text.get_text() for text in ax.get_legend().get_texts()}
    assert plots.render(fig, "Curves of four kernels").png


def test_without_a_record_it_says_what_there_is(state: DispatchThresholds, table: DispatchTable) -> None:
    state.update(device="a100")
    assert "No times are recorded for A100 80GB SXM, W4" in state.text()
    assert "h200 w4 64×128 (measured)" in state.html() and 'role="alert"' in state.html()
    assert state.record is None and state.costs() == [] and state.regret is None
    _, ax = plots.figure()
    with pytest.raises(InputError, match="No times are recorded"):
        dispatch_thresholds.draw(ax, state)
    empty = DispatchThresholds(curves=[], table=table)
    assert "nothing is recorded yet" in empty.text()
    assert "nothing is recorded yet" in View(empty).output.value


def test_an_unknown_device_or_stop_is_refused(table: DispatchTable) -> None:
    with pytest.raises(InputError, match="device"):
        DispatchThresholds(device="abacus", curves=[Stored()], table=table)
    with pytest.raises(InputError, match="single_row_up_to"):
        DispatchThresholds(single_row_up_to=-1, curves=[Stored()], table=table)


def test_any_threshold_that_a_notebook_is_given_is_a_stop(table: DispatchTable) -> None:
    state = DispatchThresholds(single_row_up_to=37, small_batch_up_to=1000, curves=[Stored()], table=table)
    assert state.choose(37).kernel == "gemv_single_row" and state.choose(38).kernel == "gemv_small_batch"
    crossed = replace(state, single_row_up_to=20, small_batch_up_to=9)
    assert [s.kernel for s in crossed.segments()] == ["gemv_single_row", "gemm_tiled"]
    for wrong in (True, 2.5, "8"):
        with pytest.raises(InputError, match="small_batch_up_to"):
            DispatchThresholds(small_batch_up_to=wrong, curves=[Stored()], table=table)


def test_every_recorded_m_is_a_stop(table: DispatchTable) -> None:
    state = DispatchThresholds(curves=[Stored(points={"gemm_tiled": [(1, 9.0), (500, 90.0)]})], table=table)
    state.update(small_batch_up_to=500)
    assert state.choose(500).kernel != "gemm_tiled"


def test_the_origin_is_said_once(state: DispatchThresholds, table: DispatchTable) -> None:
    assert "Times: measured; stand-in" in state.html()
    told = DispatchThresholds(curves=[Stored(provenance="measured on NVIDIA H200")], table=table)
    assert "Times: measured on NVIDIA H200" in told.html()


def test_the_shape_follows_the_format(table: DispatchTable) -> None:
    sets = [Stored(), Stored(n=32), Stored(format="w3", n=96)]
    state = DispatchThresholds(curves=sets, table=table)
    state.update(shape="32×128")
    assert state.record is sets[1]
    state.update(format="w3")
    assert state.record is sets[2] and state.shape == "96×128"


def test_the_view_recolours_and_resets(state: DispatchThresholds) -> None:
    view = View(state)
    view.inputs["small_batch_up_to"].value = 4
    assert "M ≥ 5 gemm_tiled" in view.output.value
    assert "-p small_batch_up_to=4" in view.output.value
    view.inputs["reset"].click()
    assert view.inputs["small_batch_up_to"].value == 8
    assert "M ≥ 9 gemm_tiled" in view.output.value


def test_the_project_s_table_and_records() -> None:
    sets = project_curves()
    state = DispatchThresholds("rtx3050-laptop", "w3", curves=sets)
    assert state.record is not None and state.record.origin == "quoted"
    assert state.choose(4).kernel == "gemv_small_batch"
    assert state.cost(4).percent == pytest.approx(0)  # type: ignore[union-attr]
    assert replace(state, small_batch_up_to=2).choose(4).kernel == "gemm_tiled"
