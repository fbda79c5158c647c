"""A reader sees the old file or the whole new one, whatever happens while it is written."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from labkit.atomic import replacing, write_json, write_text


def test_failure_keeps_the_old_file_and_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "结果 1.json"
    write_json(path, {"run": 1, "名": "值"})
    with pytest.raises(RuntimeError, match="half way"), replacing(path) as file:
        file.write("half")
        raise RuntimeError("half way")
    assert json.loads(path.read_text(encoding="utf-8")) == {"run": 1, "名": "值"}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_unserialisable_value_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert path.read_text(encoding="utf-8") == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_folders_are_made_and_line_ends_are_unix(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "a.txt"
    write_text(path, "one\ntwo\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_binary_mode(tmp_path: Path) -> None:
    with replacing(tmp_path / "b", binary=True) as file:
        file.write(b"\x00\xff")
    assert (tmp_path / "b").read_bytes() == b"\x00\xff"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_result_is_as_readable_as_any_other_file(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644
