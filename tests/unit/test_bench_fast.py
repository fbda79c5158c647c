"""The tables and the picture of ``--table fast``, from a record that is made up."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_records import entry, record

from labkit.bench import ceilings, figure, report, report_fast
from labkit.bench.cases import cases
from labkit.bench.labels import foreign
from labkit.bench.record import Record

US = {
    "tensor_core": 4.0,
    "seed_dispatch": 20.0,
    "dequant_matmul": 200.0,
    "dense_fp16": 10.0,
    "tinygemm_w4": 6.0,
    "humming_w4": 8.0,
    "humming_w3": 7.0,
}


def fast_record(**changes: object) -> Record:
    """Ours take 4 µs (W4) and 3 µs (W3) at M = 1, half a µs more at M = 8; tinygemm stops at M = 64."""
    entries = []
    for c in cases("fast", shapes=[(5632, 2048), (2048, 5632)], m=(1, 8, 16, 256), peers=True):
        for name in c.contenders:
            us = US[name] * (1 + c.m / 64 if name != "tensor_core" else 1)
            if name == "tensor_core":
                us = US[name] - (c.format == "w3") + (0.5 if c.m == 8 else 0)
            where = {"table": "fast", "format": c.format, "m": c.m, "n": c.n, "k": c.k}
            if name == "tinygemm_w4" and c.m > 64:
                entries.append(entry(name, **where, status="unavailable", note="few rows", samples_us=[]))
            else:
                entries.append(entry(name, us, **where, weight_bytes=c.weight_bytes))
    values: dict = {"ceilings": {"copy_gb_s": 4000.0, "read_gb_s": 5000.0}, "name": "gemm-fast"}
    return record(entries, **(values | changes))


def cells(text: str, start: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(f"| {start} |")]


def test_each_row_has_the_best_peer_and_the_share_of_both_ceilings() -> None:
    text = report.markdown(fast_record())
    w4, w3, _, _ = cells(text, "1")
    head = next(line for line in text.splitlines() if line.startswith("| M |"))
    row = dict(zip(head.strip("| ").split(" | "), w4, strict=True))
    assert row["tensor core"] == "4.0" and row["best peer"] == "tinygemm W4"
    assert row["peer / ours"] == f"{6 * (1 + 1 / 64) / 4:.2f}"
    # 5632 × 2048 at 4.125 bits are 5.95 MB; in 4 µs 1487 GB/s.
    assert row["% of read"] == "30" and row["% of copy"] == "37"
    assert "humming W3" in w3 and row["ours, p10–p90"] == "3.9–4.1"


def test_a_peer_that_stops_leaves_a_dash_and_its_reason() -> None:
    text = report.markdown(fast_record())
    w4, w3, *_ = cells(text, "256")
    assert w4.count("–") == 2 and w3.count("–") == 1  # no seed kernel above 64 either
    assert "few rows" in text and "unavailable" in text


def test_the_figures_with_targets_stand_in_one_row_a_weight() -> None:
    text = report.markdown(fast_record())
    (row,) = cells(text, "W3 5632×2048")
    flat, small, large, against_humming, w3 = row[3], row[4], row[5], row[6], row[7]
    assert flat == "1.17" and small.endswith("at M = 8") and large.endswith("at M = 16")
    assert against_humming == f"{7 * (1 + 8 / 64) / 3.5:.2f} at M = 8"
    assert w3 == "1.33"  # 4 µs over 3


def test_without_our_kernel_the_others_are_still_shown() -> None:
    found = fast_record()
    found.entries = [one for one in found.entries if one.contender != "tensor_core"]
    text = report.text(found)
    assert "humming W4" in text and "figures with targets" not in text and "peer / ours" not in text


def test_the_best_peer_is_never_one_of_ours() -> None:
    here = {name: entry(name, us) for name, us in US.items()}
    here["seed_dispatch"] = entry("seed_dispatch", 1.0)
    assert report_fast.best_peer(here) == ("tinygemm_w4", pytest.approx(1.5))
    assert report_fast.best_peer(here, "humming_") == ("humming_w3", pytest.approx(1.75))
    assert report_fast.best_peer({"tensor_core": here["tensor_core"]}) == (None, None)
    assert [name for name in US if not foreign(name)] == ["tensor_core", "seed_dispatch", "dequant_matmul"]


def test_the_picture_has_a_panel_a_weight_and_the_floor_of_reading(tmp_path: Path) -> None:
    drawn = figure.draw(fast_record())
    assert drawn is not None
    fig, alt = drawn
    titles = [ax.get_title("left") for ax in fig.axes]
    assert titles == ["W4  5632×2048", "W4  2048×5632", "W3  5632×2048", "W3  2048×5632"]
    assert "tensor core" in alt and "2048×5632" in alt
    floor = next(line for line in fig.axes[0].lines if line.get_label() == "weights at the read rate")
    assert floor.get_ydata()[0] == pytest.approx(5632 * (1024 + 32) / 5000 / 1e3)
    saved = figure.save(fast_record(), tmp_path / "r.json")
    assert [one.suffix for one in saved] == [".png", ".svg"]


def test_nine_shapes_are_drawn_in_rows_of_four(tmp_path: Path) -> None:
    entries = [entry("tensor_core", table="fast", n=64 * i, m=m) for i in range(1, 10) for m in (1, 8)]
    drawn = figure.draw(record(entries))
    assert drawn is not None
    shown = [ax for ax in drawn[0].axes if ax.get_visible()]
    assert len(shown) == 9 and len(drawn[0].axes) == 12


def test_the_read_kernel_reads_each_byte_once() -> None:
    import torch

    from labkit.kernels import runner

    kernel = runner.load(ceilings.read_source(), "cpu")
    data = torch.zeros(4 * 5000, dtype=torch.int32)
    out = torch.full((1,), 7, dtype=torch.int32)
    trace = kernel.trace((3,), (512,), [data, 5000, out])
    assert trace.sectors(space="global", kind="read") == 5000 * 16 / 32 and not trace.faults
    assert out.item() == 7  # zeros are never stored
    data[-1] = 6
    kernel((3,), (512,), [data, 5000, out])
    assert out.item() == 6
