"""Histories: what belongs together, what is never compared, what counts as a change, and the report."""

from __future__ import annotations

import html.parser
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_records import entry, record
from hypothesis import given, settings
from hypothesis import strategies as st
from result_runs import run_of, runs, throttled, written
from typer.testing import CliRunner

from labkit.bench.record import COUNTS, Record
from labkit.cli import app
from labkit.errors import InputError
from labkit.paths import data_dir
from labkit.results import compare, history, report
from labkit.results.case import case_of
from labkit.results.change import WINDOW, changes, interval

CAP = "software power cap"


def noisy(medians: list[float], seed: int, spread: float = 0.01) -> list[list[float]]:
    draw = np.random.default_rng(seed)
    return [list(m * (1 + spread * draw.standard_normal(20))) for m in medians]


# --- change points


def test_a_step_is_flagged_once_and_the_new_level_is_the_new_normal() -> None:
    found = changes(noisy([10, 10, 10, 12, 12, 12, 10], 1))
    assert [one is not None for one in found] == [False, False, False, True, False, False, True]
    assert found[3] is not None and found[3].ratio == pytest.approx(1.2, rel=0.02)
    assert "slower" in found[3].words
    assert found[6] is not None and "faster" in found[6].words


@pytest.mark.parametrize("seed", range(8))
def test_noise_alone_is_no_change(seed: int) -> None:
    assert not any(changes(noisy([10.0] * 12, seed)))


def test_a_difference_below_the_threshold_is_no_change_however_certain() -> None:
    exact = [[10.0] * 20, [10.2] * 20]
    assert not any(changes(exact))
    assert changes(exact, threshold=0.01)[1] is not None


def test_wide_samples_that_overlap_are_no_change() -> None:
    """Medians 10 % apart, but each run knows its own to 40 %."""
    wide = [[float(v) for v in range(6, 15)], [float(v) for v in range(7, 16)]]
    assert abs(np.median(wide[1]) / np.median(wide[0]) - 1) > 0.03
    assert changes(wide) == [None, None]


def test_runs_that_scatter_widen_the_baseline() -> None:
    """Each run is sure of its median, the runs are not sure of each other: no alarm within their range."""
    tight = noisy([9.0, 11.0, 9.2, 10.8, 10.0, 10.9], 3, spread=0.001)
    found = changes(tight, threshold=0.5)
    assert not any(found)
    low, high = interval(tight[:5])
    assert low < 9.5 and high > 10.5


def test_counts_change_by_any_difference() -> None:
    found = changes([[96.0], [96.0], [97.0]], exact=True)
    assert [one is not None for one in found] == [False, False, True]


def test_the_same_samples_give_the_same_flags() -> None:
    samples = noisy([10, 10.4, 10.2, 10.9, 11], 5)
    assert changes(samples) == changes([list(one) for one in samples])


@given(st.lists(st.lists(st.floats(0, 1e9), min_size=1, max_size=8), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_any_samples_have_an_answer_and_the_first_run_never_changed(samples: list[list[float]]) -> None:
    found = changes(samples)
    assert len(found) == len(samples) and found[0] is None
    for change in found:
        assert change is None or change.ratio != 1


def test_an_empty_run_and_a_wild_threshold_are_refused() -> None:
    with pytest.raises(InputError, match="without samples"):
        changes([[1.0], []])
    with pytest.raises(InputError, match="threshold"):
        changes([[1.0]], threshold=3)


def test_the_baseline_is_the_window_before_the_run() -> None:
    """Far back it was slow; that is forgotten after WINDOW runs at the new level, flagged once."""
    found = changes(noisy([20.0] * 2 + [10.0] * (WINDOW + 3), 7))
    assert sum(one is not None for one in found) == 1


# --- what belongs together


def test_runs_of_a_case_come_in_the_order_of_their_dates() -> None:
    found = history.gather(reversed(runs([10, 11, 12])))
    (one,) = found.found
    assert [point.median for point in one.points] == pytest.approx([10, 11, 12])
    assert found.records == 3


def test_the_same_run_in_two_folders_counts_once(tmp_path: Path) -> None:
    written(tmp_path / "a", runs([10, 11]))
    written(tmp_path / "b", runs([10]))
    (one,) = history.of_folders([tmp_path]).found
    assert len(one.points) == 2


@pytest.mark.parametrize(
    "device",
    [
        {"name": "NVIDIA H100", "key": "h100", "capability": "9.0"},
        {"name": "NVIDIA H200", "key": "h200", "capability": "9.0", "power_limit_w": 500.0},
    ],
)
def test_devices_are_never_compared(device: dict[str, Any]) -> None:
    first = run_of(1, 10.0)
    second = run_of(2, 20.0, device=device)
    found = history.gather([first, second])
    assert [len(one.points) for one in found.found] == [1, 1]
    assert not any(one.changed for one in found.found)
    assert "differ in the device" in report.text(found, list(found.found))
    reasons = compare.why_not(first, second)
    assert len(reasons) == 1 and reasons[0].startswith("device: ")
    with pytest.raises(InputError, match="device: "):
        compare.comparable(first, second)


def test_kinds_are_never_compared() -> None:
    found = history.gather([run_of(1, 10.0), run_of(2, 20.0, kind="simulated")])
    assert sorted(one.kind for one in found.found) == ["measured", "simulated"]
    assert compare.why_not(run_of(1), run_of(2, kind="simulated")) == ["kind: measured against simulated"]


def test_settings_keep_cases_apart_and_the_report_says_which() -> None:
    first = run_of(1, 10.0, parameters={"activations": "float16", "samples": 20, "seconds": 3.5})
    other = run_of(2, 20.0, parameters={"activations": "bfloat16", "samples": 40, "seconds": 4.5})
    again = run_of(3, 10.0, parameters={"activations": "float16", "samples": 30, "seconds": 9.0})
    found = history.gather([first, other, again])
    assert sorted(len(one.points) for one in found.found) == [1, 2]
    text = report.text(found, list(found.found))
    assert "settings differ" in text and 'activations="bfloat16"' in text and "samples" not in text


def test_no_setting_of_a_kept_record_is_what_the_run_found_out() -> None:
    """A found figure differs each time, and would keep every run apart from the next one."""
    records, _ = history.read([data_dir() / "measured"])
    assert len(records) >= 5
    found = {text for one in records for row in one.entries for text in case_of(one, row).settings}
    fractions = {text for text in found if re.search(r"=-?\d+\.\d{3,}", text)}
    assert fractions == set() and not any("seconds" in text or "_s=" in text for text in found)


def test_how_it_was_timed_keeps_cases_apart() -> None:
    clock = run_of(2, 30.0)
    clock.entries[0].method = {"how": "host clock"}
    assert len(history.gather([run_of(1), clock]).found) == 2


@pytest.mark.parametrize("reason", compare.THROTTLED)
def test_throttled_runs_are_left_out_and_named(reason: str) -> None:
    hot = run_of(2, 14.0, clocks=throttled(["idle", reason]))
    found = history.gather([run_of(1), hot, run_of(3)])
    (one,) = found.found
    assert [point.started[:10] for point in one.points] == ["2026-12-01", "2026-12-03"]
    assert found.refused == (f"{hot.file_name}: throttled: {reason} (after)",)
    assert compare.why_not(run_of(1), hot) == [f"throttled: {hot.file_name}: {reason} (after)"]
    accepted = history.gather([run_of(1), hot], accept=[reason])
    assert len(accepted.found[0].points) == 2 and not accepted.refused


@pytest.mark.parametrize("reason", ["idle", "application clocks setting", "display clocks setting"])
def test_idle_and_clocks_set_by_hand_are_no_throttling(reason: str) -> None:
    assert compare.throttling(run_of(1, clocks=throttled([reason]))) == []


def test_an_unknown_reason_cannot_be_accepted() -> None:
    with pytest.raises(InputError, match="accept"):
        compare.throttling(run_of(1), ["noise"])


def test_emulated_counts_are_followed_exactly_and_on_any_machine() -> None:
    def counted(day: int, sectors: int, name: str) -> Record:
        one = entry(status="emulated", samples_us=[], counts=dict.fromkeys(COUNTS, 10) | {"sectors": sectors})
        device = {"name": name, "key": "cpu", "capability": None}
        return record([one], kind="emulated", started=f"2026-12-{day:02d}T00:00:00+00:00", device=device)

    found = history.gather([counted(1, 96, "a"), counted(2, 96, "b"), counted(3, 100, "a")])
    by_metric = {one.metric: one for one in found.found}
    assert [p.change is not None for p in by_metric["sectors"].points] == [False, False, True]
    assert not by_metric["wavefronts"].changed
    assert "more (+4.2 %)" in report.text(found, list(found.found))


def test_untimed_entries_have_no_history() -> None:
    wrong = record([entry(status="wrong"), entry("b", status="unavailable", samples_us=[])])
    assert history.gather([wrong]).found == ()


def test_the_same_case_twice_in_one_run_is_one_point() -> None:
    (one,) = history.gather([record([entry(us=10.0), entry(us=12.0)])]).found
    assert len(one.points) == 1 and len(one.points[0].samples) == 40


def test_what_else_was_new_is_said() -> None:
    first, second = runs([10, 20])
    second.device = second.device | {"driver": "999.9"}
    found = history.gather([first, second])
    assert "driver 580.1 → 999.9" in report.text(found, list(found.found))


# --- files and the command


def test_foreign_and_truncated_files_are_named_and_bookkeeping_is_not(tmp_path: Path) -> None:
    written(tmp_path, runs([10, 10]))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "half.json").write_text('{"schema": "lab', encoding="utf-8")
    (tmp_path / "deep" / "list.json").write_text("[]", encoding="utf-8")
    (tmp_path / "deep" / "summary.json").write_text("{}", encoding="utf-8")
    (tmp_path / "folder.json").mkdir()
    found = history.of_folders([tmp_path])
    assert [text.split(":")[0] for text in found.skipped] == ["skipped half.json", "skipped list.json"]
    assert found.records == 2
    with pytest.raises(InputError, match="FOLDER"):
        history.of_folders([tmp_path / "absent"])


class Page(html.parser.HTMLParser):
    """What a reader of the page gets: ids, links, pictures and their words."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.captions = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.captions += tag == "figcaption"
        if found.get("id"):
            self.ids.append(str(found["id"]))
        self.links += [str(found[name]) for name in ("src", "href", "xlink:href") if found.get(name)]
        if tag == "svg":
            assert found.get("role") == "img"
            self.labels.append(str(found.get("aria-label")))


def test_the_page_has_plots_with_words_and_loads_nothing(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    found = history.gather([*runs([10, 10, 20]), *runs([5, 5], name=hostile)])
    page = report.page(found, found.select())
    read = Page()
    read.feed(page)
    assert len(read.labels) == read.captions == 2
    assert any("slower (+100.0 %)" in label for label in read.labels)
    assert len(read.ids) == len(set(read.ids)) > 0
    assert all(link.startswith("#p") for link in read.links)
    assert hostile not in page and "url(http" not in page and "<script" not in page
    assert {link[1:] for link in read.links} <= set(read.ids)
    for name in re.findall(r"url\(#([^)]+)\)", page):
        assert name in read.ids


def cli(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_reports_flags_and_writes_the_page(tmp_path: Path) -> None:
    folder = written(tmp_path / "结果 a b", [*runs([10, 10, 13]), run_of(4, 10.0, clocks=throttled([CAP]))])
    done = cli(folder, "--html", tmp_path / "out" / "报告.html")
    assert done.exit_code == 0, done.output
    assert "slower (+30.0 %)" in done.output and "2026-12-03" in done.output
    assert "not compared:" in done.output and CAP in done.output
    assert "<svg" in (tmp_path / "out" / "报告.html").read_text(encoding="utf-8")
    accepted = cli(folder, "--accept", CAP)
    assert "not compared" not in accepted.output


def test_filters_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, runs([10]))
    assert cli(folder, "--case", "GEMM_tiled w4", "--device", "h200", "--kind", "measured").exit_code == 0
    for wrong in (["--case", "nothing"], ["--device", "h100"], ["--kind", "emulated"]):
        done = cli(folder, *wrong)
        assert isinstance(done.exception, InputError) and "nothing left" in str(done.exception)
    for wrong in (["--kind", "guessed"], ["--threshold", "-1"], ["--accept", "x"], ["--html", str(tmp_path)]):
        assert isinstance(cli(folder, *wrong).exception, InputError)


def test_two_files_are_compared_or_refused(tmp_path: Path) -> None:
    first, second = runs([10, 13])
    other = replace(second, device={"name": "NVIDIA A10", "key": "a10", "capability": "8.6"})
    paths = [one.write(tmp_path / one.file_name) for one in (first, second, other)]
    done = cli("--compare", paths[0], paths[1])
    assert done.exit_code == 0 and "slower (+30.0 %)" in done.output
    refused = cli("--compare", paths[0], paths[2])
    assert isinstance(refused.exception, InputError) and "device: key h200 against a10" in str(
        refused.exception
    )
    assert isinstance(cli("--compare", paths[0]).exception, InputError)


def test_an_empty_folder_is_an_empty_report(tmp_path: Path) -> None:
    done = cli(tmp_path, "--html", tmp_path / "r.html")
    assert done.exit_code == 0 and "0 runs" in done.output
    assert "<h1>" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_many_rows_are_cut_and_said(tmp_path: Path) -> None:
    many = record([entry(f"kernel{i:03d}") for i in range(report.MOST_ROWS + 5)])
    folder = written(tmp_path, [many])
    assert "… 5 more" in cli(folder).output
    assert "more, without" not in cli(folder, "--all").output
