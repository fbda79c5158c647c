"""The overlap lab: its runs keep the engine's promises, and its pictures stay inside."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from labkit import plots
from labkit.engine.cost_model import h200, rtx3050
from labkit.engine.engine import Engine
from labkit.errors import InputError
from labkit.widgets import overlap_lab, overlap_run
from labkit.widgets.base import View
from labkit.widgets.overlap_lab import OverlapLab
from labkit.widgets.overlap_run import CHUNKS, POLICIES, SIZES, Machine, machine

SVG = "{http://www.w3.org/2000/svg}"
CLOCKS = ("rtx3050", "h200")
STATES = list(itertools.product(POLICIES, (False, True), (32, 128, 512), CLOCKS))
TWO_LANES = ("overlap", "ticks")


@pytest.mark.parametrize("state", STATES)
def test_a_run_computes_the_whole_document_and_says_where_from(state: tuple[str, bool, int, str]) -> None:
    policy, overlap, chunk, where = state
    found = machine(where).run(policy, overlap, chunk)
    assert sum(block.prompt_tokens for block in found.blocks) == SIZES[where][1]
    assert all(block.prompt_tokens <= chunk and block.end > block.start for block in found.blocks)
    assert found.origin == {"rtx3050": rtx3050, "h200": h200}[where]().origin
    assert found.overlap_steps > 0 and found.stream_overlap_steps == 0  # simulated: never on streams
    two = policy in TWO_LANES and overlap
    assert (found.busy_both > 0) == two
    assert any(block.lane == "prefill" for block in found.blocks) == two
    assert any(block.kind == "mixed" for block in found.blocks) == (policy == "mixed")
    assert len(found.answers) == SIZES[where][0]
    assert max(map(len, found.answers)) < overlap_run._MOST  # they wrote to the end
    for lane in ("decode", "prefill"):
        works = [block for block in found.blocks if block.lane == lane]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(works))


def test_no_policy_changes_a_token() -> None:
    for where in CLOCKS:
        runs = [machine(where).run(policy, overlap, chunk) for policy, overlap, chunk, _ in STATES]
        for answers in zip(*(run.answers for run in runs), strict=True):
            longest = max(answers, key=len)
            assert all(answer == longest[: len(answer)] for answer in answers) and len(longest) > 12


def test_a_joined_cycle_stays_above_its_floor_and_ticks_does_not() -> None:
    for chunk in CHUNKS:
        off, on, ticks = (
            machine("rtx3050").run(*state, chunk)
            for state in (("overlap", False), ("overlap", True), ("ticks", True))
        )
        work = rtx3050().products(chunk)
        assert off.gaps.max is not None and on.gaps.max is not None and ticks.gaps.max is not None
        assert off.gaps.max == pytest.approx(on.step + work)
        assert work < on.gaps.max < off.gaps.max
        assert ticks.gaps.max < min(work, on.gaps.max) or chunk < 64
        assert off.overlap_steps == on.overlap_steps


def test_an_order_of_flips_changes_nothing() -> None:
    one, other = machine("rtx3050"), Machine("rtx3050", machine("rtx3050").stage)
    for state in reversed(STATES[:12]):
        a, b = one.run(*state[:3]), other.run(*state[:3])
        assert a.gaps.max == pytest.approx(b.gaps.max) and a.answers == b.answers
        assert a.overlap_steps == b.overlap_steps and a.busy_both == pytest.approx(b.busy_both)


def test_a_known_state_is_not_run_again_until_it_is_forgotten() -> None:
    here = machine("rtx3050")
    first = here.run("mixed", True, 64)
    assert here.run("mixed", True, 64) is first
    here.forget("mixed", True, 64)
    assert here.run("mixed", True, 64) is not first


def test_a_run_that_is_stopped_leaves_the_engine_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine("rtx3050", machine("rtx3050").stage)
    step, left = Engine.step, iter(range(12))

    def stopping(engine: Engine) -> Any:
        if next(left, None) == 11:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", stopping)
    with pytest.raises(KeyboardInterrupt):
        here.run("overlap", True, 32)
    assert here.engine.idle
    assert here.run("overlap", True, 32).answers == machine("rtx3050").run("overlap", True, 32).answers


@pytest.mark.parametrize(
    "change",
    [{"policy": "fifo"}, {"chunk": 100}, {"overlap": 1}, {"where": "cpu"}, {"where": ""}, {"chunk": True}],
)
def test_a_wrong_state_is_refused_by_name(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(InputError) as caught:
        OverlapLab(**change)
    assert caught.value.argument == name


def test_runs_refuse_what_is_not_listed() -> None:
    for bad, name in ((("fifo", True, 64), "policy"), (("serial", True, 65), "chunk")):
        with pytest.raises(InputError, match=name):
            machine("rtx3050").run(*cast(Any, bad))
    with pytest.raises(InputError, match="where"):
        machine("tpu")
    with pytest.raises(InputError, match="GPU"):
        OverlapLab().press("again")


def test_only_a_gpu_can_measure_again() -> None:
    controls = {where: [one.name for one in OverlapLab(where=where).controls()] for where in SIZES}
    assert controls["rtx3050"] == controls["h200"] == ["overlap", "policy", "chunk"]
    assert controls["cuda"] == ["overlap", "policy", "chunk", "again"]


@pytest.mark.parametrize("state", STATES)
def test_the_picture_is_valid_and_stays_inside(state: tuple[str, bool, int, str]) -> None:
    lab = OverlapLab(*state)
    root = ElementTree.fromstring(lab.picture())
    assert root.attrib["aria-label"] == lab.alt()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["width"]) > 0 and float(box.attrib["x"]) >= 0
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
    for text in root.iter(f"{SVG}text"):
        assert float(text.attrib["font-size"]) >= 11 and float(text.attrib["y"]) <= height
        assert len(text.text or "") < 112
    tips = [box.findtext(f"{SVG}title") or "" for box in root.iter(f"{SVG}rect")]
    assert sum(tip.startswith("longest gap") for tip in tips) == 1
    assert sum(" ms" in tip and "gap" not in tip for tip in tips) == len(lab.run.blocks)


def test_words_say_what_the_picture_shows() -> None:
    text = OverlapLab("overlap", True, 128, "rtx3050").text()
    assert "simulated from quoted" in text and "gap max 648.9 ms" in text
    assert "overlap steps 4, on two streams 0" in text and "no stream counts" in text


def test_events_of_two_streams_come_onto_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, at: float = 2.0, **options: Any) -> None:
            self.at = at  # ms on the device

        def record(self, stream: str) -> None:
            assert stream == "default"

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.default_stream", lambda: "default")
    executor: Any = SimpleNamespace(
        concurrent=True, now=lambda: 50.0, join=lambda handle: ["out"], lanes=True
    )
    watched = overlap_run.Watched(executor)
    watched.begin()
    work = SimpleNamespace(started=Event(5.0), ended=Event(9.0))
    handle = SimpleNamespace(work=work, batch=SimpleNamespace(rows=(), lane="prefill"))
    assert watched.join(handle) == ["out"] and watched.lanes
    assert watched.seen == [((), "prefill", pytest.approx(50.003), pytest.approx(50.007))]


def test_time_side_by_side() -> None:
    assert overlap_run.beside([(0, 2), (3, 5)], [(1, 4)]) == 2
    assert overlap_run.beside([], [(1, 4)]) == 0


def test_the_static_figure_and_the_view() -> None:
    states = [OverlapLab("overlap", False), OverlapLab("ticks", True, 512)]
    fig, ax = plots.figure(7.2, 7.2 * overlap_lab.draw_height(*states) / overlap_lab.WIDTH)
    overlap_lab.draw(ax, *states)
    words: Any = [text.get_text() for text in ax.texts]
    assert any("ticks, chunk 512" in each for each in words)
    assert any("simulated from quoted" in each for each in words)
    assert plots.render(fig, "Off above ticks, on one time axis").png
    view = View(OverlapLab())
    before = view.output.value
    view.inputs["overlap"].value = False
    assert "gap max 660.5 ms" in view.output.value and view.output.value != before
    view.inputs["policy"].value = "mixed"
    assert "mixed" in view.controller.text() and "gap max 599.3 ms" in view.output.value
