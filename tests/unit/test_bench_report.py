"""Records in words and pictures: ours beside the article's, and what went wrong is not hidden."""

from __future__ import annotations

from pathlib import Path

from bench_records import entry, record

from labkit import quoted
from labkit.bench import figure, report
from labkit.bench.cases import cases
from labkit.bench.record import Entry, Record


def seed_record() -> Record:
    """Every case of the seed table: tiled 10 µs, fallback 40, dense 15, the rest 20."""
    us = {"gemm_tiled": 10.0, "dequant_matmul": 40.0, "dense_fp16": 15.0}
    entries = [
        entry(name, us.get(name, 20.0), table=c.table, format=c.format, m=c.m, n=c.n, k=c.k)
        for c in cases("seed")
        for name in c.contenders
    ]
    return record(entries)


def test_ours_and_the_articles_figures_stand_side_by_side() -> None:
    text = report.text(seed_record())
    article = quoted.table(quoted.DEEPINFER, "tiled_w4").rows[0]
    lines = [line for line in text.splitlines() if line.startswith("30×5632×2048")]
    assert len(lines) == 2
    assert "NVIDIA H200" in lines[0] and "measured" in lines[0] and "4.00" in lines[0] and "1.50" in lines[0]
    assert "RTX 3050 Laptop" in lines[1] and "quoted" in lines[1]
    assert f"{article['tiled_ms'] * 1e3:.1f}" in lines[1]
    assert f"{article['fallback_ms'] / article['tiled_ms']:.2f}" in lines[1]


def test_every_quoted_row_is_shown() -> None:
    text = report.text(seed_record())
    for name, column in (
        ("tiled_w4", "tiled_ms"),
        ("tiled_w3", "fallback_ms"),
        ("w3_batch_tile", "grid_y_ms"),
    ):
        for row in quoted.table(quoted.DEEPINFER, name).rows:
            assert f"{row[column] * 1e3:.1f}" in text


def test_the_head_says_what_the_figures_are() -> None:
    head = "\n".join(report.head(record(complete=False)))
    for words in ("measured", "NVIDIA H200", "SM 9.0", "driver 580.1", "torch 2.11.0", "0123456789"):
        assert words in head
    assert "with changes" in head and "INCOMPLETE" in head and "nvidia-smi gave no answer" in head


def test_clocks_and_throttle_reasons_in_words() -> None:
    snapshot = {
        "when": "after",
        "sm_mhz": 1200.0,
        "sm_max_mhz": 1980.0,
        "throttle_reasons": ["software power cap"],
    }
    assert "software power cap" in report.clock_line(snapshot)
    assert "throttle reasons: none" in report.clock_line({**snapshot, "throttle_reasons": []})
    assert "throttle reasons: unknown" in report.clock_line({**snapshot, "throttle_reasons": None})


def test_what_was_not_timed_is_listed_with_its_reason() -> None:
    bad = entry("gemm_tiled", status="wrong", note="error 3, allowed 1", samples_us=[], m=30)
    absent = [
        entry("gemv_single_row", status="unavailable", note="M = 1 only", samples_us=[], m=m)
        for m in range(2, 9)
    ]
    text = report.text(record([entry("dequant_matmul"), bad, *absent]))
    assert "WRONG" in text and "error 3, allowed 1" in text
    assert "M = 1 only" in text and "and 4 more" in text


def test_the_sweep_names_the_fastest_of_ours() -> None:
    entries = [
        entry(name, us, m=m)
        for m, times in ((1, (5.0, 9.0, 2.0)), (16, (20.0, 11.0, 3.0)))
        for name, us in zip(("gemv_single_row", "gemm_tiled", "dense_fp16"), times)
    ]
    rows = [line for line in report.text(record(entries)).splitlines() if "measured" in line]
    assert any(line.split()[0] == "1" and "single-row GEMV" in line for line in rows)
    assert any(line.split()[0] == "16" and "tiled GEMM" in line for line in rows)


def test_an_emulated_record_shows_no_time() -> None:
    counts = {"requests": 10, "sectors": 40, "bytes": 1280, "wavefronts": 0, "faults": 0}
    emulated = [entry(status="emulated", samples_us=[], counts=counts, weight_bytes=640)]
    text = report.text(record(emulated, kind="emulated"))
    assert "µs" not in text and "4.00" in text and "2.0" in text and "emulated" in text


def test_tables_without_a_form_of_their_own_are_shown() -> None:
    trip = Entry("offload", "round trip", "q8_0", 1, 32, 32, 32, "timed", samples_us=[41.5] * 20)
    text = report.text(record([trip], name="offload"))
    assert "round trip" in text and "41.50" in text


def test_a_record_with_nothing_in_it_prints() -> None:
    assert "gemm-seed" in report.text(record([]))


def test_the_figure_is_saved_as_png_and_svg(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.json"
    saved = figure.save(seed_record(), path)
    assert [one.name for one in saved] == ["r.png", "r.svg"]
    assert saved[0].read_bytes().startswith(b"\x89PNG")
    svg = saved[1].read_text(encoding="utf-8")
    assert "<svg" in svg and "H200" in svg and "2048" in svg
    again = figure.save(seed_record(), tmp_path / "again.json")
    assert again[0].read_bytes() == saved[0].read_bytes()


def test_a_record_without_a_timed_sweep_has_no_figure(tmp_path: Path) -> None:
    untimed = record([entry(status="wrong", samples_us=[])])
    assert figure.save(untimed, tmp_path / "r.json") == []
