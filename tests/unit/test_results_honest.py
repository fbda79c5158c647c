"""Records that contradict themselves are no records; a device without a name is never compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_records import entry, record
from hypothesis import given
from hypothesis import strategies as st
from result_runs import run_of, written

from labkit.bench.record import read, read_all
from labkit.errors import InputError
from labkit.paths import data_dir
from labkit.results import compare, history, schema

RIGHT = {"max_abs": 1e-4, "bound": 1e-3}


def refused(words: str, **changes: Any) -> None:
    with pytest.raises(InputError, match=words):
        schema.validated("a.json", record(**changes).to_json())


@pytest.mark.parametrize("status", ["wrong", "failed", "unavailable"])
def test_what_was_not_right_has_no_times(status: str) -> None:
    refused(
        rf"entries\[0\]: samples_us: got 20 samples of something that is {status}",
        entries=[entry(status=status)],
    )
    schema.validated("a.json", record([entry(status=status, samples_us=[])]).to_json())


@pytest.mark.parametrize("error", [1.1e-3, 1.0])
def test_an_error_above_its_bound_is_not_timed(error: float) -> None:
    refused(r"entries\[1\]: error: got", entries=[entry(), entry(error=RIGHT | {"max_abs": error})])
    schema.validated("a.json", record([entry(error=RIGHT), entry(error=RIGHT | {"max_abs": 1e-3})]).to_json())


def test_entries_that_have_no_bound_are_still_read() -> None:
    """The offload benchmark has no reference of its own; old records keep their place."""
    schema.validated("a.json", record([entry(error={}), entry(error={"max_abs": 5.0})]).to_json())


@given(st.floats(max_value=-1e-12, allow_nan=False, allow_infinity=False))
def test_no_time_is_below_zero(time: float) -> None:
    refused(r"samples_us: got -", entries=[entry(samples_us=[1.0, time])])


@pytest.mark.parametrize(
    "started", ["yesterday", "", "2026-12-01", "2026-12-01T03:00:00", "2026-12-01T03:00:00+08:00"]
)
def test_a_start_that_does_not_sort_is_refused(started: str) -> None:
    refused("started: got", started=started)
    schema.validated("a.json", record(started="2026-12-01T03:00:00Z").to_json())


def test_such_a_file_is_skipped_and_named(tmp_path: Path) -> None:
    record([entry(error=RIGHT | {"max_abs": 1.0})]).write(tmp_path / "lie.json")
    written(tmp_path, [run_of(1)])
    found, skipped = history.read([tmp_path])
    assert (
        len(found) == 1
        and len(skipped) == 1
        and "lie.json" in skipped[0]
        and "0.001 is allowed" in skipped[0]
    )
    with pytest.raises(InputError, match=r"lie\.json"):
        read(tmp_path / "lie.json")


def test_the_project_s_own_records_are_honest() -> None:
    files = sorted((data_dir() / "measured").glob("*.json"))
    found, skipped = read_all(files)
    assert len(found) == len(files) > 0 and not skipped


@pytest.mark.parametrize("device", [{}, {"key": "unknown"}, {"key": "h200"}, {"name": "a card"}])
def test_two_unnamed_devices_are_not_the_same(device: dict[str, Any], tmp_path: Path) -> None:
    a, b = (run_of(day, device=device) for day in (1, 2))
    assert any("does not name it" in reason for reason in compare.why_not(a, b))
    found = history.gather([a, b, run_of(3)])
    assert [len(one.points) for one in found.found] == [1]
    assert len(found.refused) == 2 and "does not name" in found.refused[0]


@pytest.mark.parametrize("kind", ["emulated", "simulated"])
def test_figures_of_no_machine_need_no_device(kind: str) -> None:
    a, b = (run_of(day, device={}, kind=kind) for day in (1, 2))
    assert compare.why_not(a, b) == []


def test_the_file_on_disk_is_what_is_checked(tmp_path: Path) -> None:
    """An honest record that somebody edited afterwards."""
    path = record().write(tmp_path / "a.json")
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["entries"][0]["status"] = "failed"
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(InputError, match="something that is failed"):
        read(path)
