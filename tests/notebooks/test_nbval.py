"""Stored outputs of checked cells against a fresh run: nbval, as a person would call it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.course.index import Chapter, ready_chapters
from labkit.course.notebook import CHECK_MARK

SANITIZE = Path(__file__).with_name("sanitize.cfg")


def _nbval(path: Path, scratch: Path, checkout: Path) -> subprocess.CompletedProcess[str]:
    ini = scratch / "pytest.ini"
    ini.write_text("[pytest]\n", encoding="utf-8")
    (scratch / "state").mkdir()
    env = {**os.environ, "PYTHONPATH": str(checkout), "LABKIT_STATE": str(scratch / "state")}
    env |= {"LABKIT_RESULTS": str(scratch / "results"), "IPYTHONDIR": str(scratch / "ipython")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        str(ini),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    command += ["--nbval-lax", "--nbval-current-env", "--nbval-sanitize-with", str(SANITIZE)]
    command += ["--nbval-cell-timeout", "300", "--nbval-kernel-startup-timeout", "120", str(path)]
    return subprocess.run(
        command,
        env=env,
        cwd=scratch,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=900,
        check=False,
    )


@pytest.mark.parametrize("chapter", ready_chapters(), ids=lambda chapter: chapter.number)
def test_stored_outputs_are_what_a_run_gives(chapter: Chapter, tmp_path: Path, checkout: Path) -> None:
    path = chapter.notebook()
    assert path is not None and CHECK_MARK in path.read_text(encoding="utf-8")
    done = _nbval(path, tmp_path, checkout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout


def test_a_changed_output_is_found(tmp_path: Path, checkout: Path) -> None:
    """The guard of the guard: nbval compares nothing where a count is missing or a flag is wrong."""
    from labkit.course.notebook import dumps, normalise

    cell = {"cell_type": "code", "source": f"{CHECK_MARK}\nprint(1)", "metadata": {}, "execution_count": 1}
    cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "2\n"}]
    book = normalise({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    path = tmp_path / "x.ipynb"
    path.write_text(dumps(book), encoding="utf-8")
    done = _nbval(path, tmp_path, checkout)
    assert done.returncode == 1 and "1 failed" in done.stdout


def test_the_sanitizer_is_ascii() -> None:
    assert SANITIZE.read_bytes().isascii()
