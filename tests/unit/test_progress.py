from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labkit.check import not_attempted, not_yet, passed, progress


def _score(value: float, better: str = "lower") -> object:
    return passed(score=value).with_frame(better=better)


def test_progress_is_kept_and_never_goes_back() -> None:
    assert progress.load() == ({}, "")
    progress.record("02.1", not_attempted())
    assert not progress.path().exists()
    progress.record("02.1", not_yet(1, 2))
    progress.record("02.1", _score(30))  # type: ignore[arg-type]
    progress.record("02.1", _score(24))  # type: ignore[arg-type]
    progress.record("02.1", _score(40))  # type: ignore[arg-type]
    progress.record("02.1", not_yet(1, 2))
    entries, note = progress.load()
    assert entries == {"02.1": progress.Entry("passed", 5, 24.0)} and note == ""
    assert json.loads(progress.path().read_text(encoding="utf-8"))["version"] == progress.VERSION


def test_the_best_of_a_score_that_should_be_high() -> None:
    for value in (3, 9, 5):
        progress.record("02.2", _score(value, "higher"))  # type: ignore[arg-type]
    assert progress.load()[0]["02.2"].best == 9


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe\x00",
        b'{"version": 99, "exercises": {}}',
        b'{"version": 1, "exercises": []}',
        b'{"version": 1, "exercises": {"02.1": {"state": "wonderful", "tries": 1, "best": null}}}',
        b'{"version": 1, "exercises": {"02.1": {"state": "passed", "tries": "x", "best": null}}}',
    ],
)
def test_a_damaged_file_is_put_aside_and_progress_starts_anew(damage: bytes) -> None:
    file = progress.path()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(damage)
    entries, note = progress.load()
    assert entries == {} and "kept as progress.damaged-" in note
    aside = list(file.parent.glob("progress.damaged-*.json"))
    assert [path.read_bytes() for path in aside] == [damage]
    progress.record("02.1", passed())
    assert progress.load() == ({"02.1": progress.Entry("passed", 1, None)}, "")


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder", encoding="utf-8")
    monkeypatch.setenv("LABKIT_STATE", str(blocked / "state"))
    progress.record("02.1", passed())
    assert progress.load() == ({}, "")


def test_two_notebooks_may_record_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: progress.record(f"02.{n}", passed()), range(24)))
    assert len(progress.load()[0]) == 24


def test_a_lock_left_by_a_crash_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOCK_STALE_SECONDS", 0.05)
    lock = progress.path().with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_bytes(b"")
    progress.record("02.1", passed())
    assert progress.load()[0] and not lock.exists()
