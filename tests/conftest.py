"""Fixtures that all tests share."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A test must never touch the progress of the person who runs it, nor the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Compiled kernels are kept between tests and runs: named by all they depend on, they are never stale.
os.environ.setdefault("LABKIT_CACHE", str(ROOT / ".pytest_cache" / "labkit"))
# `nohup make test &` in a script begins with Ctrl-C ignored; children would inherit that, and wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Some tests kill processes, which then leave their temporary files: in pytest's own folder.

    The name is short: a kernel's sockets lie below it, and a socket's path has a limit.
    """
    folder = str(tmp_path_factory.mktemp("t"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TMPDIR", "TEMP", "TMP"):
            patch.setenv(name, folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def hang_up_ends() -> Iterator[None]:
    """What a test starts is told when the terminal ends; in a run under nohup it would inherit not to be."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_STATE", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Root of the checkout under test."""
    return ROOT


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file. Set-up installs it, so its absence is a failure, not a skip."""
    from labkit.models.zoo import default_model_path

    return default_model_path()
