"""Result files: round trip, atomic writing, and readers that a damaged file cannot mislead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_records import entry, record
from hypothesis import given
from hypothesis import strategies as st

from labkit.bench.record import COUNTS, SCHEMA, Entry, read, read_all, summary
from labkit.errors import InputError


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    wrong = entry("gemm_tiled", status="wrong", note="error 3, allowed 1", samples_us=[])
    emulated = entry("gemv_single_row", status="emulated", samples_us=[], counts=dict.fromkeys(COUNTS, 12))
    kept = record([entry(), wrong, emulated], complete=False)
    path = kept.write(tmp_path / "deep" / kept.file_name)
    assert read(path) == kept
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_file_says_what_it_is_and_holds_samples_and_summary(tmp_path: Path) -> None:
    value = json.loads(record().write(tmp_path / "r.json").read_text(encoding="utf-8"))
    assert value["schema"] == SCHEMA and value["kind"] == "measured"
    assert {"device", "software", "clocks", "parameters", "command", "started"} <= set(value)
    first = value["entries"][0]
    assert len(first["samples_us"]) == 20
    assert first["summary"]["median_us"] == 10.0 and first["summary"]["min_us"] == 9.8
    assert set(first["error"]) == {"max_abs", "plain", "bound"}


def test_the_file_has_the_share_of_each_measured_ceiling(tmp_path: Path) -> None:
    one = entry(us=2.0, samples_us=[2.0], weight_bytes=4000)  # 2 GB/s
    kept = record([one, entry(samples_us=[])], ceilings={"copy_gb_s": 4.0, "read_gb_s": 5.0})
    timed, untimed = json.loads(kept.write(tmp_path / "r.json").read_text(encoding="utf-8"))["entries"]
    figures = timed["summary"]
    assert (figures["weight_gb_s"], figures["of_copy"], figures["of_read"]) == (2.0, 0.5, 0.4)
    assert untimed["summary"] == {}
    assert record([one], ceilings={}).share(one, "read_gb_s") is None


def test_an_entry_is_one_line_of_the_file(tmp_path: Path) -> None:
    text = record([entry("a"), entry("b")]).write(tmp_path / "r.json").read_text(encoding="utf-8")
    assert sum('"contender"' in line for line in text.splitlines()) == 2


def test_a_record_without_entries_is_valid_json(tmp_path: Path) -> None:
    assert read(record([]).write(tmp_path / "r.json")).entries == []


def test_the_file_name_carries_name_device_and_date() -> None:
    assert record().file_name == "gemm-seed-h200-2026-12-01T10-11-12Z.json"


@pytest.mark.parametrize("kept", [0, 1, 50, -1, -3])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, kept: int) -> None:
    path = record().write(tmp_path / "r.json")
    path.write_text(path.read_text(encoding="utf-8").rstrip()[:kept], encoding="utf-8")
    with pytest.raises(InputError, match=r"r\.json"):
        read(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.pop("schema"), "schema None"),
        (lambda v: v.update(schema="labkit.bench/99"), "labkit.bench/99"),
        (lambda v: v.pop("device"), "no device"),
        (lambda v: v.update(kind="guessed"), "guessed"),
        (lambda v: v.update(entries={}), "entries"),
        (lambda v: v["entries"].append(7), r"entries\[1\]"),
        (lambda v: v["entries"][0].pop("m"), "no m"),
        (lambda v: v["entries"][0].update(m="30"), "m: got str"),
        (lambda v: v["entries"][0].update(m=True), "m: got bool"),
        (lambda v: v["entries"][0].update(samples_us=[1.0, "2"]), "samples_us"),
        (lambda v: v["entries"][0].update(status="fine"), "fine"),
        (lambda v: v["entries"][0].update(counts={"sectors": 1}), r"entries\[0\]: counts: .*requests"),
        (lambda v: v["software"].update(versions=None), "software: versions: got None"),
        (lambda v: v["software"].update(commit={}), "software: commit"),
        (lambda v: v.update(clocks=["before"]), "clocks"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused_by_field(tmp_path: Path, change, words: str) -> None:  # type: ignore[no-untyped-def]
    path = record().write(tmp_path / "r.json")
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(InputError, match=words):
        read(path)


def test_fields_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    path = record().write(tmp_path / "r.json")
    value = json.loads(path.read_text(encoding="utf-8"))
    value["colour"] = value["entries"][0]["colour"] = "blue"
    path.write_text(json.dumps(value), encoding="utf-8")
    assert read(path) == record()


def test_one_bad_file_does_not_hide_the_good_ones(tmp_path: Path) -> None:
    good = record().write(tmp_path / "good.json")
    (tmp_path / "half.json").write_text('{"schema": "labkit', encoding="utf-8")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    found, skipped = read_all([good, *sorted(tmp_path.glob("[hl]*.json")), tmp_path / "absent.json"])
    assert found == [record()]
    assert [message.split(":")[0] for message in skipped] == [
        "skipped half.json",
        "skipped list.json",
        "skipped absent.json",
    ]


def test_summary_of_known_samples() -> None:
    found = summary([5.0, 1.0, 3.0, 2.0, 4.0])
    assert found == {"median_us": 3.0, "p10_us": 1.4, "p90_us": 4.6, "min_us": 1.0}
    assert summary([]) == {}


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60))
def test_summary_is_ordered(samples: list[float]) -> None:
    found = summary(samples)
    slack = 1e-4
    assert found["min_us"] <= found["p10_us"] + slack
    assert found["p10_us"] <= found["median_us"] + slack <= found["p90_us"] + 2 * slack


def test_gigabytes_a_second_of_weights() -> None:
    assert entry(us=2.0, samples_us=[2.0], weight_bytes=8000).weight_gb_s == 4.0
    untimed = Entry("t", "c", "w4", 1, 2, 3, 4, "unavailable")
    assert untimed.median_us is None and untimed.weight_gb_s is None
