"""Chapter 07's checks: right answers pass, near misses do not, costs are those of the widget."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from labkit import check
from labkit.bench import curves
from labkit.bench.record import read_all
from labkit.check import Verdict, ch07
from labkit.check.verdict import NotYet
from labkit.nn.dispatch import DispatchTable, parse_capability
from labkit.paths import data_dir
from labkit.solutions import ch07 as reference
from labkit.widgets.dispatch_thresholds import DispatchThresholds


def judged(name: str, answer: Any) -> Verdict:
    """The verdict without the frame, which refuses an answer that uses the reference solution."""
    try:
        return check.find(name).function(answer)
    except NotYet as stopped:
        return stopped.verdict


@pytest.mark.parametrize(
    "answer",
    [
        lambda first, second: max((m for m in first if m in second and first[m] <= second[m]), default=0),
        lambda first, second: min((m for m in first if m in second and first[m] > second[m]), default=0),
        lambda first, second: reference.up_to({m: us * 1.0001 for m, us in first.items()}, second),
        lambda first, second: reference.up_to(first, {m: second.get(m, 0.0) for m in first}),
        lambda first, second: "4",
        lambda first, second: (4,),
    ],
    ids=["crossed twice", "first loss", "a tie loses", "M of one only", "a text", "a tuple"],
)
def test_up_to_near_misses(answer: Any) -> None:
    verdict = judged("up_to", answer)
    assert verdict.state == "not yet" and verdict.hint


@pytest.mark.parametrize(
    "answer",
    [
        lambda records: (1, 8),
        lambda records: (16, 64),
        lambda records: reference.best_pair(records[:1]),
        lambda records: reference.best_pair(records[-1:]),
        lambda records: (8, 4),
        lambda records: (-1, 4),
        lambda records: 8,
        lambda records: ("few", "many"),
    ],
    ids=["the article's", "a constant", "first shape", "last shape", "crossed", "negative", "one", "texts"],
)
def test_best_pair_near_misses(answer: Any) -> None:
    verdict = judged("best_pair", answer)
    assert verdict.state == "not yet" and verdict.hint


def test_best_pair_takes_anything_that_is_two_whole_numbers() -> None:
    verdict = judged("best_pair", lambda records: list(reference.best_pair(records)))
    assert verdict.state == "passed" and verdict.score == 0


@pytest.mark.parametrize("key", list(reference.reading))
def test_reading_near_misses(key: str) -> None:
    for value in ("gemv_single_row", None):
        verdict = check.find("reading").function({**reference.reading, key: value})
        assert verdict.state == "not yet" and key in verdict.expected and verdict.hint
    assert check.find("reading")({"runs": "dequant_matmul"}).state == "not yet"
    assert check.find("reading")(["dequant_matmul"]).state == "not yet"


@pytest.mark.parametrize(
    "answer",
    [
        {"w4.small_batch_up_to": 64, "disable": ["gemm_tiled"]},
        {"disable": "gemm_tiled", "w4.gemv_small_batch.m_max": 64},
    ],
)
def test_other_right_overrides_pass(answer: dict[str, Any]) -> None:
    verdict = check.find("override")(answer)
    assert verdict.state == "passed", verdict


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"small_batch_up_to": 64, "disable": "gemm_tiled"}, "w3"),
        ({"w4.small_batch_up_to": 64}, "dequant_matmul"),
        ({"disable": "gemm_tiled"}, "gemv_small_batch"),
        ({"w4.small_batch_up_to": 64, "disable": "gemm_tiled,dequant_matmul"}, "a kernel for"),
        ({"force": "gemv_small_batch"}, "a kernel for"),
        ({"w4.small_batch_up_to": 63, "disable": "gemm_tiled"}, "M = 64"),
        ({"w4.small_batch_up_to": 65, "disable": "gemm_tiled"}, "M = 65"),
        ({"w4.small_batch_upto": 64}, "parameters that the table knows"),
        ({"w4.small_batch_up_to": 64, "gemm_tiled.m_min": 10**5}, "M = 1000000000"),
        ({"disable": "gemm_tile"}, "parameters that the table knows"),
        ("disable", "a dict"),
    ],
)
def test_override_near_misses(answer: Any, words: str) -> None:
    verdict = check.find("override")(answer)
    assert verdict.state == "not yet" and words in verdict.expected and verdict.hint, verdict


def changed(index: int, **fields: Any) -> list[dict[str, Any]]:
    rows = copy.deepcopy(reference.add_card)
    rows[index].update(fields)
    return rows


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (changed(0, m_max=15), "a row of yours for M = 16"),
        (changed(0, capability="8.6"), "cuda 9.0 w4 float16"),
        (changed(1, format="*"), "cuda 9.0 w4 float16"),
        (changed(1, provenance="quoted: the article"), "a provenance"),
        (changed(1, provenance="measured: my card"), "a provenance"),
        (changed(2, provenance="measured: H200"), "measured only up to M = 64"),
        (changed(1, m_max=None), "measured only up to M = 64"),
        (changed(1, m_max=63)[:2] + changed(2, m_min=64)[2:], "measured rows up to M = 64"),
        (changed(0, kernel="dequant_matmul"), "one of gemv_single_row"),
        (changed(0, kernel="gemm_tile"), "one of gemv_single_row"),
        (changed(0, m_min=0), "the table's reader"),
        ([{"device": "cuda"}], "the table's reader"),
        ([{1, 2}], "the table's reader"),
        ("rows", "a list of rows"),
        ([], "a list of rows"),
    ],
)
def test_add_card_near_misses(rows: Any, words: str) -> None:
    verdict = check.find("add_card")(rows)
    assert verdict.state == "not yet" and words in verdict.expected and verdict.hint, verdict


def test_rows_with_the_article_s_thresholds_do_not_pass() -> None:
    rows = changed(0, m_max=1)
    rows[1].update(m_min=2, m_max=8)
    rows[2].update(m_min=9, m_max=64, provenance="measured: H200")
    verdict = check.find("add_card")(rows)
    assert verdict.state == "not yet" and verdict.score is not None and verdict.score > 50 and verdict.hint


def test_rows_may_leave_what_is_above_to_the_rows_of_an_older_card() -> None:
    verdict = check.find("add_card")(copy.deepcopy(reference.add_card[:2]))
    assert verdict.state == "passed", verdict


def test_the_cost_is_the_widget_s() -> None:
    for shape, times in zip(ch07.SHAPES, ch07.recorded(), strict=True):
        record = curves.curves(ch07.CARD, "w4", shape)
        for pair in ((1, 8), (4, 64), (64, 64), (0, 0)):
            state = DispatchThresholds(
                ch07.CARD, "w4", f"{shape[0]}×{shape[1]}", *pair, curves=[record], table=ch07.article_table()
            )
            assert state.regret == pytest.approx(ch07.percent_lost(times, *pair))


def test_the_least_loss_is_less_than_that_of_each_shape_s_own_pair() -> None:
    shapes = ch07.recorded()
    least = ch07.least_lost(shapes)
    assert 0 < least < min(ch07.worst_lost(shapes, *reference.best_pair([one])) for one in shapes)


def test_the_article_s_table_has_no_row_of_our_own_card() -> None:
    table = ch07.article_table()
    reached = {parse_capability(row.capability) for row in table.rows}
    assert (8, 6) in reached and max(reached) < (9, 0)
    assert set(table.rows) <= set(DispatchTable.load().rows)


def test_the_story_of_the_chapter_is_in_the_record() -> None:
    """What the text says; a new record that says otherwise must change the text."""
    small, large = ch07.recorded()
    assert winners(small, 1, 2, 3) == {"gemv_single_row"} and winners(large, 1, 8, 32) == {"gemv_single_row"}
    assert winners(small, 6, 8, 32, 64) == {"gemv_small_batch"}
    tiled = ch07.tiled_times()
    swapped = {card: us[2048, 5632] / us[5632, 2048] for card, us in tiled.items()}
    assert swapped["h200"] > 2.4 and swapped["rtx3050-laptop"] < 1.3
    dense = {shape: curves.curves("h200", "w4", shape)["dense_fp16"] for shape in ch07.SHAPES}
    for times, shape in zip((small, large), ch07.SHAPES, strict=True):
        faster = dict(dense[shape])
        assert times["gemv_single_row"][1] < faster[1]
        assert all(us > faster[m] for line in times.values() for m, us in line.items() if m >= 3)


def winners(times: Mapping[str, Mapping[int, float]], *rows: int) -> set[str]:
    return {min(ch07.KERNELS, key=lambda kernel: times[kernel][m]) for m in rows}


def test_this_gpu_reads_the_sweep_of_a_bench_run(monkeypatch: pytest.MonkeyPatch) -> None:
    records, _ = read_all(sorted((data_dir() / "measured").glob("gemm*.json")))
    asked = []

    def run(options: Any, command: str, report: Any) -> Any:
        asked.append((options.table, options.shapes, options.device, command))
        return records[-1]

    monkeypatch.setattr("labkit.check.ch07.gemm.Options", Pretended)
    monkeypatch.setattr("labkit.check.ch07.gemm.run", run)
    found = ch07.this_gpu()
    assert asked == [("sweep", ((5632, 2048),), "cuda", "labkit bench gemm --table sweep --shapes 5632x2048")]
    assert set(ch07.KERNELS) <= set(found.points) and found.origin == "measured"


class Pretended:
    """Options on a machine without a GPU."""

    def __init__(self, table: str, **values: Any) -> None:
        self.table = table
        self.__dict__.update(values)
