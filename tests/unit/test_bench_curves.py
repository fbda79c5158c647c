"""Curves for the dispatch thresholds: from kept records, or quoted; each with its provenance."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_records import entry, record

from labkit import quoted
from labkit.bench import curves
from labkit.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records of two days, and a file that is none."""
    swept = [
        entry(name, us * m, m=m, format=form)
        for form in ("w4", "w3")
        for m in (8, 1, 2)
        for name, us in (("gemv_single_row", 5.0), ("gemm_tiled", 7.0))
    ]
    bad = entry("gemv_small_batch", status="wrong", samples_us=[])
    other = entry(table="tiled_w4", m=30)
    record([*swept, bad, other]).write(tmp_path / "new.json")
    old = record([entry(us=99.0)], started="2026-11-01T00:00:00+00:00")
    old.write(tmp_path / "old.json")
    record([entry(us=1.0)], kind="emulated").write(tmp_path / "emulated.json")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    return tmp_path


def test_the_newest_record_gives_points_in_order_of_m(folder: Path) -> None:
    found = curves.curves("h200", "w4", folder=folder)
    assert dict(found) == {
        "gemv_single_row": [(1, 5.0), (2, 10.0), (8, 40.0)],
        "gemm_tiled": [(1, 7.0), (2, 14.0), (8, 56.0)],
    }
    assert (found.format, found.n, found.k, found.group) == ("w4", 5632, 2048, 128)
    assert found.m_values == [1, 2, 8] and found.at(2) == {"gemv_single_row": 10.0, "gemm_tiled": 14.0}


def test_curves_carry_their_provenance(folder: Path) -> None:
    found = curves.curves("H200 SXM", "w3", (5632, 2048), folder)
    assert found.origin == "measured"
    for words in ("NVIDIA H200", "driver 580.1", "torch 2.11.0", "0123456789", "2026-12-01", "cold L2"):
        assert words in found.provenance
    assert "labkit bench gemm --table seed" in found.provenance


def test_the_articles_points_are_quoted() -> None:
    found = curves.curves("rtx3050-laptop", "w3", (5632, 2048))
    rows = quoted.table(quoted.DEEPINFER, "w3_batch_tile").rows
    assert found.origin == "quoted" and "article 7" in found.provenance
    assert found["gemv_small_batch"] == [(row["batch"], row["grid_y_ms"] * 1e3) for row in rows]
    assert found["gemv_batch_w3"] == [(row["batch"], row["batch_tile_ms"] * 1e3) for row in rows]
    w4 = curves.curves("rtx3050-laptop", "w4")
    assert set(w4) == {"gemm_tiled", "dequant_matmul"} and w4.m_values == [30]


@pytest.mark.parametrize(
    ("device", "form", "shape", "words"),
    [
        ("gtx1080", "w4", None, "gtx1080"),
        ("h200", "w5", None, "w5"),
        ("h200", "w4", (1, 2), "1x2"),
    ],
)
def test_what_was_not_recorded_is_refused_with_a_list(
    folder: Path, device: str, form: str, shape: tuple[int, int] | None, words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        curves.curves(device, form, shape, folder)
    if form == "w4":
        assert "h200 w4 5632x2048" in str(caught.value)


def test_an_emulated_record_is_no_curve(folder: Path) -> None:
    assert all(one.origin in ("measured", "quoted") for one in curves.available(folder))
    assert curves.from_record(record(kind="emulated")) == []


def test_the_kept_record_of_the_seed_tables_is_the_one_that_the_course_shows(checkout: Path) -> None:
    shown = sorted((checkout / "data" / "measured").glob("gemm-seed-*.json"))
    assert shown
    for file in shown:
        assert (checkout / "results" / "evidence" / file.name).read_bytes() == file.read_bytes()
