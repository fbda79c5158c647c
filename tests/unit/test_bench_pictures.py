"""The picture of a record: every benchmark has one, with the numbers in its alternative text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench_records import entry, record

from labkit import plots
from labkit.bench import concurrency, gemm, jitter, open_loop, pictures
from labkit.bench.policy_specs import PolicySpec, parse_policies
from labkit.bench.record import Record, read
from labkit.errors import InputError
from labkit.paths import data_dir

POLICIES = parse_policies("serial:32,overlap:32,overlap:64,mixed:32")
BASE = PolicySpec("serial", 32)


def quiet(line: str) -> None:
    """No progress."""


def axes(fig: object) -> list:
    return [ax for ax in fig.get_axes() if ax.get_visible()]  # type: ignore[attr-defined]


def picture(one: Record) -> tuple[list, str]:
    fig, alt = pictures.draw(one)
    shown = plots.render(fig, alt)
    assert shown.png.startswith(b"\x89PNG") and len(alt) > 40 and "nan" not in alt
    return axes(fig), alt


@pytest.mark.parametrize(
    "path", sorted((data_dir() / "measured").glob("*.json")), ids=lambda path: path.stem[:30]
)
def test_kept_records(path: Path) -> None:
    one = read(path)
    shown, alt = picture(one)
    assert any(ax.lines or ax.patches for ax in shown)
    assert "measured" in alt or one.device["name"] in alt


def test_emulated_kernels() -> None:
    one = gemm.run(gemm.Options(table="sweep", m=(1, 2), formats=("w4",)), "", quiet)
    shown, alt = picture(one)
    assert "emulated" in alt and len(shown) == 1
    counted = {item.contender for item in one.entries if item.counts}
    assert len(shown[0].lines) == len(counted)
    (first,) = [item for item in one.entries if item.contender == "gemv_single_row" and item.m == 1]
    assert f"single-row GEMV {first.counts['bytes'] / first.weight_bytes:.1f} at M = 1" in alt


def test_a_line_for_each_policy_and_a_point_for_each_number_of_clients() -> None:
    options = replace(
        concurrency.preset("rtx3050"), policies=POLICIES, baseline=BASE, clients=(1, 3), prompt=40, answer=4
    )
    shown, alt = picture(concurrency.run(options, "", quiet))
    names = ["serial:32", "overlap:32 no overlap", "overlap:32"]
    names += ["overlap:64 no overlap", "overlap:64", "mixed:32"]
    for ax in shown:
        assert [line.get_label() for line in ax.lines] == names
        assert all(list(line.get_xdata()) == [1, 3] for line in ax.lines)
        # two chunks of one policy can be told apart
        styles = {line.get_label(): line.get_linestyle() for line in ax.lines}
        assert styles["overlap:32"] != styles["overlap:64"]
    assert "simulated from quoted. At 3: serial:32" in alt


def test_serving_shows_the_bounds() -> None:
    options = replace(
        open_loop.preset("rtx3050"), policies=POLICIES, baseline=BASE, requests=4, lengths=(9, 30), answer=3
    )
    one = open_loop.run(options, "", quiet)
    shown, alt = picture(one)
    assert len(shown) == 3 and "goodput" in alt
    for ax, name in zip(shown, ("ttft", "tpot")):
        assert list(ax.lines[-1].get_ydata()) == [1e3 * one.parameters[name]] * 2
    line = shown[2].lines[0]
    found = [item for item in one.entries if item.contender == line.get_label()]
    assert list(line.get_ydata()) == [item.figures["goodput"] for item in found]


@pytest.mark.parametrize("parts", [("document",), ("cold",), ("document", "cold")])
def test_jitter_has_a_panel_a_part(parts: tuple[str, ...]) -> None:
    options = replace(
        jitter.preset("rtx3050"), policies=parse_policies("mixed:32"), baseline=BASE, parts=parts, streams=2,
        document=100, cold=3, cold_lengths=(10, 40), most=200, warm=3, rest=3,
    )  # fmt: skip
    shown, alt = picture(jitter.run(options, "", quiet))
    assert len(shown) == len(parts) and "mixed:32" in alt


def test_tables_without_a_curve_are_bars() -> None:
    one = record([entry(table="tiled_w4", m=30), entry("dense_fp16", 20.0, table="tiled_w4", m=30)])
    shown, alt = picture(one)
    assert len(shown[0].patches) == 2 and "dense FP16 cuBLAS w4 30×5632×2048 20" in alt


def test_nothing_to_draw_is_said() -> None:
    for entries in ([], [entry(status="failed", samples_us=[], note="no compiler")]):
        with pytest.raises(InputError, match="figures"):
            pictures.draw(record(entries))
