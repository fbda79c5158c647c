"""The schema of a result file: upgrades of older files, strict fields, and files that are none."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from bench_records import entry, record
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.bench import machine
from labkit.bench.record import Record, read, read_all
from labkit.errors import InputError
from labkit.paths import data_dir
from labkit.results import schema

ROOT = Path(__file__).resolve().parents[2]
KEPT = sorted((data_dir() / "measured").glob("*.json"))
EVIDENCE = [
    path
    for path in sorted((ROOT / "results" / "evidence").glob("*.json"))
    if '"schema": "labkit.' in path.read_text(encoding="utf-8")[:200]
]


def old(value: dict[str, Any]) -> dict[str, Any]:
    """A file as version 1 wrote it."""
    kept = {key: one for key, one in value.items() if key not in ("version", "source")}
    return kept | {"schema": "labkit.bench/1"}


def content(one: Record) -> dict[str, Any]:
    return json.loads(json.dumps(one.to_json()))


@pytest.mark.parametrize("path", [*KEPT, *EVIDENCE], ids=lambda path: path.name)
def test_records_that_are_kept_can_be_read_and_written_again(path: Path, tmp_path: Path) -> None:
    one = read(path)
    again = one.write(tmp_path / one.file_name)
    assert read(again) == one
    assert json.loads(again.read_text(encoding="utf-8"))["version"] == schema.VERSION


def test_there_are_such_records() -> None:
    assert len(KEPT) >= 5 and len(EVIDENCE) >= 1


def test_a_file_of_version_1_becomes_a_record_of_this_version() -> None:
    value = old(content(record()))
    before = json.dumps(value)
    assert schema.parse("old.json", json.dumps(value)) == record()
    assert schema.upgraded("old.json", value)["version"] == schema.VERSION
    assert json.dumps(value) == before, "the upgrade changed what it was given"


def test_every_older_version_has_its_upgrade() -> None:
    assert sorted(schema.UPGRADES) == list(range(1, schema.VERSION))


def test_the_file_names_schema_version_kind_and_source() -> None:
    value = content(record(kind="quoted", source="an article, section 3"))
    assert list(value)[:2] == ["schema", "version"]
    assert (value["schema"], value["version"]) == (schema.NAME, schema.VERSION)
    assert schema.parse("q.json", json.dumps(value)).source == "an article, section 3"


@pytest.mark.parametrize("source", ["", "  "])
def test_quoted_figures_need_a_source(source: str) -> None:
    with pytest.raises(InputError, match="source"):
        record(kind="quoted", source=source)
    value = content(record()) | {"kind": "quoted", "source": source}
    with pytest.raises(InputError, match=r"q\.json: source"):
        schema.parse("q.json", json.dumps(value))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 3}, "version: got 3; expected at most 2. Fix: a newer labkit"),
        ({"version": "2"}, "version: got '2'"),
        ({"version": None}, "version: got None"),
        ({"version": True}, "version: got True"),
        ({"version": 1}, "version: got 1"),
        ({"schema": "another.tool"}, "schema 'another.tool'"),
        ({"complete": "yes"}, "complete: got str; expected true or false"),
        ({"name": 7}, "name: got int; expected text"),
        ({"parameters": []}, "parameters: got list; expected an object"),
        ({"device": {"capability": 9.0}}, "device: capability"),
        ({"device": {"power_limit_w": "700"}}, "device: power_limit_w"),
        ({"software": {"commit": {"id": "abc", "dirty": "no"}}}, "software: commit: dirty"),
        ({"software": {"versions": {"torch": 2}}}, "software: versions: torch"),
        ({"clocks": [{"when": "after", "throttle_reasons": "idle"}]}, r"clocks\[0\]: throttle_reasons"),
        ({"clocks": [{"sm_mhz": "1980"}]}, r"clocks\[0\]: sm_mhz"),
        ({"ceilings": {"copy_gb_s": "fast"}}, "ceilings: copy_gb_s"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        schema.parse("r.json", json.dumps(content(record()) | change))


@pytest.mark.parametrize("sample", ["NaN", "Infinity", "-Infinity"])
def test_samples_are_finite(sample: str) -> None:
    text = json.dumps(content(record([entry(samples_us=[1.5])]))).replace("[1.5]", f"[{sample}]")
    with pytest.raises(InputError, match=r"samples_us\[0\]: got .*; expected a finite number"):
        schema.parse("r.json", text)


def test_an_error_that_is_no_number_is_kept() -> None:
    """A kernel that gave NaN is what the record has to tell."""
    wrong = entry(
        status="wrong", samples_us=[], error={"max_abs": float("nan"), "plain": 1e-3, "bound": 2e-3}
    )
    again = schema.parse("r.json", json.dumps(content(record([wrong]))))
    assert again.entries[0].error["max_abs"] != again.entries[0].error["max_abs"]


def test_what_a_later_version_adds_to_the_facts_is_kept() -> None:
    device = record().device | {"colour": "blue"}
    assert schema.parse("r.json", json.dumps(content(record(device=device)))).device["colour"] == "blue"


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_file_that_ends_early_is_refused_and_hides_no_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    whole = record().write(folder / "whole.json")
    raw = whole.read_bytes()
    cut = folder / "cut.json"
    cut.write_bytes(raw[: data.draw(st.integers(0, len(raw.rstrip()) - 1))])
    found, skipped = read_all([cut, whole])
    assert found == [record()]
    assert len(skipped) == 1 and skipped[0].startswith("skipped cut.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
@settings(deadline=None)
def test_foreign_json_is_refused_in_words(value: Any) -> None:
    with pytest.raises(InputError, match=r"^f\.json"):
        schema.parse("f.json", json.dumps(value))


@given(st.sampled_from([item.name for item in dataclasses.fields(Record)]), JSON)
@settings(deadline=None)
def test_a_record_with_anything_in_one_field_is_read_or_refused(name: str, value: Any) -> None:
    text = json.dumps(content(record()) | {name: value})
    try:
        assert isinstance(schema.parse("f.json", text), Record)
    except InputError as error:
        assert error.argument.startswith("f.json")


@pytest.mark.parametrize("raw", [b"\xff\xfe{}", b"[" * 100_000, b"", b"\x00" * 40])
def test_bytes_that_are_no_json(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "b.json").write_bytes(raw)
    found, skipped = read_all([tmp_path / "b.json", tmp_path])
    assert not found and len(skipped) == 2


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record().write(tmp_path / "r.json")
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        record([entry("other")]).write(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_the_processor_is_named_by_its_model(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.0 GHz\nflags\t: a\n", encoding="utf-8")
    assert machine.cpu_name(info) == "Some CPU @ 2.0 GHz"
    assert machine.cpu_name(tmp_path / "absent")
    facts = machine.device_facts("cpu")
    assert facts["key"] == "cpu" and facts["name"] == machine.cpu_name()
