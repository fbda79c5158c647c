"""Temporary folders that end with their owner, however it ends, and never while it lives."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from labkit.scratch import Scratch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process and of its children."""
    home = tmp_path / "临时 {a} b"
    home.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(home))
    return home


@contextmanager
def owner(prefix: str = "x-") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a folder with a file in it, until its input ends."""
    code = "import sys\nfrom labkit.scratch import Scratch\nscratch = Scratch(sys.argv[1])\n"
    code += "(scratch.path / 'deep').mkdir()\n(scratch.path / 'deep' / 'file').touch()\n"
    code += "print(scratch.path.name, flush=True)\nsys.stdin.read()\n"
    command = [sys.executable, "-c", code, prefix]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        try:
            yield process, Path(tempfile.gettempdir()) / name
        finally:
            process.kill()


def test_tests_have_their_temporary_files_in_pytests_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    ask = [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"]
    child = subprocess.run(ask, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout.strip()
    assert child == tempfile.gettempdir()
    assert Path(child).is_relative_to(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("how", ["block", "error", "close", "forgotten"])
def test_every_end_in_order_removes_it(folder: Path, how: str) -> None:
    scratch = Scratch("x-")
    (scratch.path / "deep" / "er").mkdir(parents=True)
    (scratch.path / "deep" / "er" / "file").touch()
    assert list(folder.iterdir()) == [scratch.path]
    if how == "block":
        with scratch as path:
            assert path == scratch.path
    elif how == "error":
        with pytest.raises(KeyboardInterrupt), scratch:
            raise KeyboardInterrupt
    elif how == "close":
        scratch.close()
        scratch.close()
    else:
        del scratch
    assert list(folder.iterdir()) == []


def test_a_process_that_exits_leaves_nothing(folder: Path) -> None:
    with owner() as (process, path):
        assert (path / "deep" / "file").is_file()
        process.communicate()
        assert process.returncode == 0
    assert list(folder.iterdir()) == []


def test_the_next_one_removes_what_a_killed_owner_left_and_nothing_of_the_living(folder: Path) -> None:
    with owner() as (killed, left), owner() as (_, lives), owner("y-") as (other, others):
        for process in (killed, other):
            process.kill()
            process.wait()
        assert left.is_dir()
        with Scratch("x-") as own, Scratch("x-"):
            assert not left.exists()
            assert (lives / "deep" / "file").is_file(), "its owner is alive"
            assert own.is_dir(), "another one of the same process"
            assert (others / "deep" / "file").is_file(), "another prefix"


def test_only_folders_that_were_made_this_way_are_swept(folder: Path, tmp_path: Path) -> None:
    """A name like ours is not enough, and a link leads nowhere."""
    for name in ("x-aaaaaaaa", "x-AAAAAAAA", "x-bbbbbbbb.old", "prefix-x-cccccccc"):
        (folder / name).mkdir()
    for name in ("x-AAAAAAAA", "x-bbbbbbbb.old", "prefix-x-cccccccc"):
        (folder / name / ".owner").touch()
    (folder / "x-dddddddd").touch()
    before = {folder / name for name in os.listdir(folder)}
    target = tmp_path / "target"
    target.mkdir()
    (target / ".owner").touch()
    if os.name == "posix":
        (folder / "x-eeeeeeee").symlink_to(target)
    with Scratch("x-"):
        assert (target / ".owner").is_file()
        assert before <= set(folder.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="users have numbers on POSIX")
def test_another_users_folder_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with owner() as (killed, left):
        killed.kill()
        killed.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
        with Scratch("x-"):
            assert (left / "deep" / "file").is_file()
    with Scratch("x-"):
        assert not left.exists()


@pytest.mark.skipif(os.name != "posix", reason="modes of folders are POSIX")
def test_closed_folders_go_and_what_a_link_leads_to_keeps_its_mode(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o750)
    (target / "kept").touch()
    with Scratch("x-") as path:
        (path / "closed").mkdir()
        (path / "closed" / "file").touch()
        (path / "closed").chmod(0)
        (path / "link").symlink_to(target)
    assert list(folder.iterdir()) == []
    assert (target / "kept").is_file() and target.stat().st_mode & 0o777 == 0o750


def test_what_cannot_be_removed_now_is_removed_by_the_next_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where a process that was just killed holds its files for a moment."""
    unlink = Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self.name == "held":
            raise PermissionError(13, "in use", str(self))
        unlink(self, missing_ok)

    with monkeypatch.context() as patch, Scratch("x-") as path:
        (path / "held").touch()
        patch.setattr(Path, "unlink", refused)
    assert (path / "held").is_file()
    with Scratch("x-"):
        assert not path.exists()


def test_without_locks_it_works_and_sweeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network folder may have none: then nobody can tell whether an owner lives."""
    with owner() as (killed, left):
        killed.kill()
        killed.wait()

    def none(descriptor: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("labkit.scratch._lock", none)
    with Scratch("x-") as path:
        (path / "file").touch()
        assert left.is_dir() and not (path / ".owner").exists()
    assert list(folder.iterdir()) == [left]


def test_threads_that_make_and_end_them_never_take_anothers(folder: Path) -> None:
    lost: list[Path] = []

    def many() -> None:
        for _ in range(50):
            with Scratch("x-") as path:
                try:
                    (path / "file").touch()
                    (path / "file").read_bytes()
                except OSError:
                    lost.append(path)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == [] and list(folder.iterdir()) == []
