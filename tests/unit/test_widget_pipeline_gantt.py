"""The pipeline's schedule by hand and by its rules, and the pictures of it."""

from __future__ import annotations

import itertools
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import plots
from labkit.errors import InputError
from labkit.kernels import resources
from labkit.kernels.source import KernelSource
from labkit.widgets import pipeline_gantt
from labkit.widgets.base import View
from labkit.widgets.pipeline_gantt import STAGE_BYTES, PipelineGantt, schedule

SVG = "{http://www.w3.org/2000/svg}"


def test_one_stage_by_hand() -> None:
    # copy 60, product 20, and so on: nothing overlaps
    steps = schedule(1, 60, 10, 20, 3)
    assert [(s.issued, s.arrived, s.began, s.ended) for s in steps] == [
        (0, 60, 60, 80),
        (80, 140, 140, 160),
        (160, 220, 220, 240),
    ]


def test_two_stages_by_hand() -> None:
    # the copy of tile t + 1 is started when product t begins
    steps = schedule(2, 60, 10, 20, 3)
    assert [(s.issued, s.arrived, s.began, s.waited) for s in steps] == [
        (0, 60, 60, 60),
        (60, 120, 120, 40),
        (120, 180, 180, 40),
    ]


def test_three_stages_share_the_bandwidth_at_the_start() -> None:
    steps = schedule(3, 60, 10, 20, 4)
    assert [s.arrived for s in steps] == [60, 70, 120, 140]
    assert [s.began for s in steps] == [60, 80, 120, 140]


@given(
    stages=st.integers(1, 8),
    latency=st.integers(0, 200),
    transfer=st.integers(0, 50),
    compute=st.integers(1, 80),
    tiles=st.integers(1, 40),
)
def test_the_rules_of_the_ring(stages: int, latency: int, transfer: int, compute: int, tiles: int) -> None:
    steps = schedule(stages, latency, transfer, compute, tiles)
    for one in steps:
        assert one.began >= one.arrived >= one.issued + latency
        assert one.ended == one.began + compute
    for one, following in itertools.pairwise(steps):
        assert following.arrived >= one.arrived + transfer
        assert following.began == one.ended + following.waited
    for one, refill in zip(steps, steps[stages:], strict=False):
        assert refill.issued >= one.ended  # nobody reads the stage any more


@given(
    stages=st.integers(1, 8),
    latency=st.integers(0, 200).map(lambda n: n // 5 * 5),
    transfer=st.integers(0, 50),
    compute=st.integers(1, 80),
)
def test_the_period_is_that_of_the_schedule_in_the_long_run(
    stages: int, latency: int, transfer: int, compute: int
) -> None:
    steps = schedule(stages, latency, transfer, compute, 1200)
    state = PipelineGantt(stages=stages, latency=latency, transfer=transfer, compute=compute)
    many = 840  # whole rounds of any ring
    assert (steps[-1].began - steps[-1 - many].began) / many == pytest.approx(state.period, rel=0.01)
    best = PipelineGantt(stages=8, latency=latency, transfer=transfer, compute=compute).period
    if state.enough <= 8:
        enough = PipelineGantt(stages=state.enough, latency=latency, transfer=transfer, compute=compute)
        assert enough.period == best == max(compute, transfer)
        if state.enough > 1:
            fewer = state.enough - 1
            assert PipelineGantt(fewer, latency, transfer, compute).period > best


@pytest.mark.parametrize(
    ("times", "limit"), [((60, 10, 20), "latency"), ((60, 40, 20), "bandwidth"), ((20, 10, 40), "products")]
)
def test_what_limits(times: tuple[int, int, int], limit: str) -> None:
    state = PipelineGantt(3, *times)
    assert state.limit == limit and f"limited by {limit}" in state.text()


def test_deeper_is_not_better_once_the_latency_is_hidden() -> None:
    totals = [PipelineGantt(stages=n).total for n in range(1, 9)]
    assert totals == sorted(totals, reverse=True)
    assert PipelineGantt().enough == 4 and totals[3] == totals[7]
    assert "4 stages hide the latency" in PipelineGantt(stages=3).text()
    assert "hide" not in PipelineGantt(stages=4).text()


def test_the_bytes_of_a_stage_are_the_lesson_kernel_s() -> None:
    try:
        used = resources.usage(KernelSource("lesson/mma_w4.cu", defines={"STAGES": 2}), "sm_86")
    except InputError:
        pytest.skip("no NVRTC on this machine")
    assert used.static_shared == 2 * STAGE_BYTES == PipelineGantt(stages=2).shared_bytes


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"stages": 0}, "stages"),
        ({"stages": 9}, "stages"),
        ({"latency": -5}, "latency"),
        ({"compute": 0}, "compute"),
    ],
)
def test_a_wrong_state_is_refused_by_name(change: dict[str, int], argument: str) -> None:
    with pytest.raises(InputError) as caught:
        PipelineGantt(**change)
    assert caught.value.argument == argument
    with pytest.raises(InputError, match="stages"):
        schedule(0, 1, 1, 1, 1)
    with pytest.raises(InputError, match="latency"):
        schedule(1, -1, 1, 1, 1)


@pytest.mark.parametrize("change", [{}, {"stages": 1}, {"stages": 8, "tiles": 16}, {"transfer": 50}])
def test_the_picture_is_valid_and_stays_inside(change: dict[str, int]) -> None:
    state = PipelineGantt(**change)
    root = ElementTree.fromstring(state.picture())
    assert root.attrib["aria-label"] == state.alt()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width + 0.1
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    tips = [box.findtext(f"{SVG}title") or "" for box in root.iter(f"{SVG}rect")]
    assert sum(tip.startswith("product of") for tip in tips) == state.tiles
    assert sum(tip.startswith("copy of") for tip in tips) == state.tiles
    assert sum(tip.startswith("bubble") for tip in tips) == sum(step.waited > 0 for step in state.steps)
    texts = list(root.iter(f"{SVG}text"))
    assert all(float(text.attrib["font-size"]) >= 11 for text in texts)


def test_the_static_figure_and_the_view() -> None:
    states = [PipelineGantt(stages=n) for n in (1, 4)]
    fig, ax = plots.figure(7.2, 7.2 * pipeline_gantt.draw_height(*states) / pipeline_gantt.WIDTH)
    pipeline_gantt.draw(ax, *states)
    words: Any = [text.get_text() for text in ax.texts]
    assert any("4 stages" in each and "bubbles 0" in each for each in words)
    assert plots.render(fig, "Two pipelines, one deeper").png
    view = View(PipelineGantt())
    view.inputs["stages"].value = 4
    assert "bubbles 0" in view.output.value
