"""The garbage collector rests while a CUDA graph is captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from labkit.kernels.capture import capturing, collector_rests


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_it_rests_inside_and_works_again_after() -> None:
    with collector_rests:
        assert not gc.isenabled()
        with collector_rests:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_after_an_error() -> None:
    with pytest.raises(RuntimeError), collector_rests:
        raise RuntimeError
    assert gc.isenabled()


def test_one_that_a_program_has_stopped_stays_so() -> None:
    gc.disable()
    with collector_rests:
        pass
    assert not gc.isenabled()


def test_it_rests_until_the_last_of_two_threads_is_done() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_rests:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with collector_rests:
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_capture_is_torchs_with_the_collector_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    @contextmanager
    def graph(*args: Any, **options: Any) -> Iterator[None]:
        seen.append((args, options, gc.isenabled()))
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    marker: Any = object()
    with capturing(marker, pool=3):
        assert not gc.isenabled()
    assert seen == [((marker,), {"pool": 3}, False)] and gc.isenabled()
