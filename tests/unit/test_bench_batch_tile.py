"""The batch-tile's evidence and times: counts that can be worked out by hand, and records that are kept."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit import plots
from labkit.bench import batch_figures, batch_tile, batch_times
from labkit.bench.batch_tile import Evidence
from labkit.bench.record import Entry, Record
from labkit.check.cuda_case import product_case
from labkit.device import get_device
from labkit.errors import InputError


@pytest.fixture(scope="module")
def traces() -> dict[str, Any]:
    case = product_case("w3", n=8, k=512, m=8, group_size=128)
    return {name: batch_tile.launch(name, case.x, case.weight).trace() for name in ("grid.y", "tile")}


def code_or_skip(*wanted: Any) -> batch_tile.Code:
    try:
        return batch_tile.code(*wanted)
    except InputError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("m", [1, 5, 8])
def test_every_variant_gives_the_bits_of_grid_y(m: int) -> None:
    case = product_case("w3", n=11, k=328, m=m, group_size=64)
    wanted = batch_tile.launch("grid.y", case.x, case.weight).run()
    assert (wanted.double() - case.exact).abs().max() <= case.bound
    for name in batch_tile.VARIANTS:
        launch = batch_tile.launch(name, case.x, case.weight)
        assert torch.equal(launch.run(), wanted), name
        assert launch.trace().ok, name


def test_the_tile_asks_once_for_the_weight_and_as_often_for_x(traces: dict[str, Any]) -> None:
    # 8 warps, 2 steps of 256 columns, 3 byte loads; 16 sectors of x for each row and step
    assert traces["tile"].requests(buffer="packed") == 8 * 2 * 3
    assert traces["grid.y"].requests(buffer="packed") == 8 * traces["tile"].requests(buffer="packed")
    assert {one.sectors(buffer="x") for one in traces.values()} == {8 * 2 * 8 * 16}


def test_grids_and_unknown_variants() -> None:
    assert batch_tile.grids(8) == {"grid.y": 5632, "tile": 704}
    assert batch_tile.grids(2) == {"grid.y": 1408, "tile": 704}
    with pytest.raises(InputError, match="variant"):
        batch_tile.source("fast")


def test_machine_code_of_the_variants() -> None:
    row, tile = code_or_skip("grid.y"), code_or_skip("tile")
    assert row.fixed == 0 and row.instructions(8) == 8 * row.each
    assert 0 < tile.each < row.each and tile.fixed > 0
    assert (tile.waits(8), row.waits(8)) == (9, 4)
    assert sum(tile.classes.values()) == tile.instructions(8)
    together = batch_tile.code("together")
    assert together.waits(1) == together.waits(8) < tile.waits(8)
    assert together.usage.registers > tile.usage.registers and together.usage.spills == 0
    assert batch_tile.code("rolled").usage.spills == 0


def test_a_grid_smaller_than_the_card_limits_the_warps_at_work() -> None:
    code_or_skip("tile", "sm_90")
    assert batch_tile.working_warps("tile", 8, "h200") <= 704 * 8 / 132
    assert batch_tile.working_warps("tile", 8) == batch_tile.code("tile").resident().warps


def test_evidence_names_every_cause_and_shows_itself(traces: dict[str, Any]) -> None:
    code_or_skip("tile")
    found = {one.cause: one for one in batch_tile.evidence(traces)}
    assert list(found) == [
        "weight bytes",
        "all bytes",
        "occupancy",
        "instructions",
        "last wave",
        "local memory",
        "waits",
    ]
    assert found["weight bytes"].ratio == 1 / 8 and found["all bytes"].ratio < 1
    assert "weight bytes" in str(batch_tile.evidence_table(list(found.values())))
    assert "grid.y" in str(batch_tile.code_table(("grid.y", "tile")))


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(0.5, "refuted"), (1.0, "refuted"), (1.2, "too small"), (1.9, "possible"), (2.5, "possible")],
)
def test_judgements(ratio: float, said: str) -> None:
    assert batch_tile.judge(ratio, 1.9) == said


def test_nothing_is_left_of_a_tile_that_is_not_slower() -> None:
    burdens = [Evidence("a", "", 1, 3, "emulated"), Evidence("b", "", 1, 1, "emulated")]
    assert batch_tile.possible(burdens, 2.0) == "a"
    assert batch_tile.possible(burdens, 4.0) == "none of these"
    assert batch_tile.possible(burdens, 0.9) == "nothing to explain"
    with pytest.raises(InputError, match="slowdown"):
        batch_tile.judge(2.0, 0.9)


def test_a_burden_that_both_lack_is_equal() -> None:
    assert Evidence("a", "", 0, 0, "emulated").ratio == 1
    assert Evidence("a", "", 0, 4, "emulated").ratio == float("inf")


# --- times ------------------------------------------------------------------------------------------


def test_the_article_s_times() -> None:
    times = batch_times.quoted_times()
    assert [one.m for one in times] == [2, 4, 8] and {one.origin for one in times} == {"quoted"}
    assert times[-1].slowdown == pytest.approx(1.879, abs=1e-3)
    fixed, each = batch_times.line(times, "grid.y")
    assert (fixed, each) == (pytest.approx(4.17, abs=0.01), pytest.approx(63.2, abs=0.1))


def kept(folder: Path, name: str, started: str, us: dict[str, float], kind: str = "measured") -> None:
    record = Record(name, kind, "bench", started, {"name": "Card", "key": "card"}, {}, {})
    for m in (2, 8):
        for contender, value in us.items():
            entry = Entry("w3_batch_tile", contender, "w3", m, 5632, 2048, 128, "timed")
            entry.samples_us = [m * value, m * value, m * value + 1]
            record.entries.append(entry)
    record.write(folder / f"{name}.json")


def test_records_are_read_by_device_the_fullest_first_then_the_newest(tmp_path: Path) -> None:
    seed = {"gemv_small_batch": 1.0, "gemv_batch_w3": 2.0}
    assert batch_times.measured_times(tmp_path) == []
    kept(tmp_path, "old", "2026-01-01T00:00:00+00:00", seed)
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    kept(tmp_path, "emulated", "2026-09-01T00:00:00+00:00", {"grid.y": 5.0, "tile": 1.0}, "emulated")
    first = batch_times.measured_times(tmp_path)
    assert [(one.m, one.slowdown, one.key) for one in first] == [(2, 2.0, "card"), (8, 2.0, "card")]
    kept(tmp_path, "full", "2026-02-01T00:00:00+00:00", {"grid.y": 1.0, "tile": 3.0, "together": 1.5})
    kept(tmp_path, "new", "2026-03-01T00:00:00+00:00", seed)
    assert [one.slowdown for one in batch_times.measured_times(tmp_path)] == [3.0, 3.0]
    assert list(batch_times.by_card(first)) == ["Card (measured)"]


def test_own_times_take_the_place_of_a_record_s(tmp_path: Path) -> None:
    kept(tmp_path, "old", "2026-01-01T00:00:00+00:00", {"grid.y": 1.0, "tile": 2.0})
    assert len(batch_times.all_times(folder=tmp_path)) == 5
    own = [batch_times.Times("Card", "card", 2, {"grid.y": 1.0, "tile": 9.0}, "measured")]
    assert batch_times.all_times(own, tmp_path)[3:] == own


class Ticks:
    """A clock whose marks are a second apart, for what takes no time on a CPU."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def elapsed_us(self, start: int, end: int) -> float:
        return 1e6 * (end - start)

    def begin_round(self) -> None:
        pass

    def wait(self) -> None:
        pass


def test_a_run_makes_a_record_that_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.bench import contenders, machine, timing

    weight, rows = contenders.random_weight, contenders.random_input
    monkeypatch.setattr(batch_times, "batch_tile_shape", lambda: (16, 256))
    monkeypatch.setattr(contenders, "random_weight", lambda case, device: weight(case, "cpu"))
    monkeypatch.setattr(contenders, "random_input", lambda case, device: rows(case, "cpu"))
    monkeypatch.setattr(machine, "device_facts", lambda device: {"name": "Card", "key": "card"})
    monkeypatch.setattr(machine, "gpu_index", lambda: "0")
    monkeypatch.setattr(machine, "clocks", lambda when, index: {"when": when})
    monkeypatch.setattr(timing, "copies_needed", lambda nbytes, l2: 2)
    monkeypatch.setattr(timing, "side_stream", contextlib.nullcontext)
    monkeypatch.setattr(timing, "EventClock", Ticks)
    prepare = timing.prepare
    monkeypatch.setattr(timing, "prepare", lambda calls: prepare(calls, graph=False))
    assert batch_times.main([str(tmp_path / "own.json")]) == 0
    found = batch_times.measured_times(tmp_path)
    assert [one.m for one in found] == [2, 4, 8]
    assert all(set(one.us) == set(batch_tile.VARIANTS) for one in found)
    assert found[0].us["tile"] == 1e6 / 8  # eight calls a sample, a second between two marks


def test_a_record_with_one_of_the_two_kernels_says_nothing(tmp_path: Path) -> None:
    kept(tmp_path, "half", "2026-01-01T00:00:00+00:00", {"gemv_small_batch": 1.0})
    assert batch_times.measured_times(tmp_path) == []


def test_two_points_at_one_place_are_no_line() -> None:
    assert batch_times.fixed_and_each(2, 10.0, 4, 16.0) == (4.0, 3.0)
    with pytest.raises(InputError, match="m2"):
        batch_times.fixed_and_each(2, 1.0, 2, 2.0)


def test_starting_the_instructions_takes_longer_on_the_smaller_card() -> None:
    small, large = (batch_times.issue_us(61, card) for card in ("rtx3050-laptop", "h200"))
    assert large == pytest.approx(5632 * 8 * 61 / (4 * 132 * 1980))
    assert small > 5 * large > 0


@pytest.mark.parametrize("device", ["rtx3050-laptop", "h200"])
def test_no_measured_or_quoted_time_is_less_than_starting_the_instructions(device: str) -> None:
    code_or_skip("grid.y")
    major, minor = get_device(device).capability
    timed = [one for one in batch_times.all_times() if one.key == device]
    assert timed
    for one in timed:
        for name in one.us.keys() & set(batch_tile.VARIANTS):
            counted = batch_tile.code(name, f"sm_{major}{minor}").instructions(one.m)
            assert one.us[name] > batch_times.issue_us(counted, device), (name, one.m)


def test_the_script_wants_one_file() -> None:
    with pytest.raises(InputError, match="one file"):
        batch_times.main([])


def test_the_figures_draw_every_bar(traces: dict[str, Any]) -> None:
    _, axes = plots.figure(7.2, 3.0, cols=2)
    batch_figures.draw_times(axes[0], batch_times.quoted_times())
    assert len(axes[0].lines) == 4  # two kernels, points and line each
    batch_figures.draw_sectors(axes[1], {8: traces}, 8)
    assert len(axes[1].patches) == 8


def test_the_pace_has_a_point_for_every_time_and_a_line_below() -> None:
    code_or_skip("tile", "sm_90")
    us = {"grid.y": 9.0, "tile": 8.0, "together": 7.0}
    times = [batch_times.Times("Card", "h200", m, us, "measured") for m in (2, 8)]
    _, ax = plots.figure(6.4, 3.4)
    batch_figures.draw_pace(ax, times)
    assert [len(one.get_xdata()) for one in ax.lines] == [2, 2, 2, 2]
    words = [one.get_text() for one in ax.texts]
    assert words.count("M = 2, 8") == 1 and words.count("M = 2") == words.count("M = 8") == 2


def test_the_kernel_table_begins_with_the_slowest() -> None:
    code_or_skip("tile", "sm_90")
    lines = str(
        batch_tile.kernel_table({"tile": 22.0, "grid.y": 32.0, "together": 18.0}, "h200")
    ).splitlines()
    names = [line.split()[0] for line in lines[-3:]]
    assert names == ["grid.y", "tile", "together"] and all("measured" in line for line in lines[-3:])


def test_the_story_of_the_chapter_is_in_the_record() -> None:
    """What chapter 06 says of the H200; a new record that says otherwise must change the text."""
    code_or_skip("tile", "sm_90")
    times = {one.m: one.us for one in batch_times.measured_times() if one.key == "h200"}
    assert times[2]["tile"] > times[2]["grid.y"]
    assert all(times[m]["tile"] < times[m]["grid.y"] for m in (4, 8))
    code = {name: batch_tile.code(name, "sm_90") for name in batch_tile.VARIANTS}
    us = times[8]
    assert (
        us["together"] < 0.9 * us["tile"]
        and code["together"].instructions() < 0.9 * code["tile"].instructions()
    )
    assert max(times[m]["together"] for m in times) < 1.1 * min(times[m]["together"] for m in times)
    assert (
        us["rolled"] > 1.4 * us["tile"] and code["rolled"].instructions() > 1.8 * code["tile"].instructions()
    )
    assert code["rolled"].waits() == code["tile"].waits()
    assert us["rolled"] == pytest.approx(us["grid.y"], rel=0.1)
    assert code["rolled"].instructions() == pytest.approx(code["grid.y"].instructions(), rel=0.05)
    warps = {name: batch_tile.working_warps(name, 8, "h200") for name in batch_tile.VARIANTS}
    assert warps["together"] < 0.6 * warps["tile"] and warps["rolled"] == warps["tile"] < warps["grid.y"]
