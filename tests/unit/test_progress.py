from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
        b"[" * 100_000,
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
    assert progress.record("02.1", passed()).startswith("not saved: ")
    assert progress.load() == ({}, "")


IN_USE = PermissionError(13, "in use")


def _refuse(
    monkeypatch: pytest.MonkeyPatch, what: str, times: float, error: OSError = IN_USE
) -> Callable[[], float]:
    """Refuse to read or replace progress.json, or to make its lock; returns how often it still will."""
    owner, attribute = {"read": (io, "open"), "replace": (Path, "replace"), "lock": (os, "open")}[what]
    function, left = getattr(owner, attribute), times
    name = "progress.lock" if what == "lock" else "progress.json"

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left > 0 and any(Path(a).name == name for a in args if isinstance(a, (str, Path))):
            left -= 1
            raise error
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, call)
    return lambda: left


@pytest.mark.parametrize("what", ["read", "replace", "lock"])
def test_a_file_held_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    progress.record("02.1", passed())
    left = _refuse(monkeypatch, what, 3)
    assert progress.record("02.2", passed()) == "" and left() == 0
    assert set(progress.load()[0]) == {"02.1", "02.2"}


@pytest.mark.parametrize("what", ["read", "replace", "lock"])
@pytest.mark.parametrize("error", [IN_USE, OSError(5, "input/output error")])
def test_trouble_with_the_file_never_erases_what_is_there(
    monkeypatch: pytest.MonkeyPatch, what: str, error: OSError
) -> None:
    progress.record("02.1", passed())
    before = progress.path().read_bytes()
    monkeypatch.setattr(progress, "_RETRY_SECONDS", 0.1)
    with monkeypatch.context() as during:
        _refuse(during, what, math.inf, error)
        assert progress.record("02.2", passed()) == f"not saved: {error.strerror}"
        if what == "read":
            assert "nothing in it is lost" in progress.load()[1]
    assert progress.path().read_bytes() == before
    assert [p.name for p in progress.path().parent.iterdir()] == ["progress.json"]


def test_a_damaged_file_that_cannot_be_moved_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    file = progress.path()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"{")
    monkeypatch.setattr(progress, "_RETRY_SECONDS", 0.1)
    _refuse(monkeypatch, "replace", math.inf)
    assert "cannot be moved" in progress.record("02.1", passed())
    assert file.read_bytes() == b"{"


def test_recording_tells_of_a_damaged_file() -> None:
    progress.path().parent.mkdir(parents=True, exist_ok=True)
    progress.path().write_bytes(b"{")
    assert "kept as progress.damaged-" in progress.record("02.1", passed())
    assert set(progress.load()[0]) == {"02.1"}


def test_a_lock_that_nobody_gives_back_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    progress.record("02.1", passed())
    before = progress.path().read_bytes()
    monkeypatch.setattr(progress, "_LOCK_STALE_SECONDS", 0.05)
    lock = progress.path().with_suffix(".lock")
    lock.mkdir()  # a lock that cannot be removed
    assert progress.record("02.2", passed()).startswith("not saved: progress.lock is held")
    assert lock.exists() and progress.path().read_bytes() == before


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
